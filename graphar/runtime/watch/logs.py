"""Logs on standard error: GRAPHAR_LOG=info or debug. Each line has the rank."""

from __future__ import annotations

import logging
import os
import warnings

import torch.distributed as dist

SWITCH = "GRAPHAR_LOG"
LEVELS = ("info", "debug")
_FORMAT = "%(asctime)s rank %(rank)s %(levelname)s %(name)s: %(message)s"


class _RankedFormatter(logging.Formatter):
    """Adds the rank in the world: torch's, before torch.distributed is initialised the launcher's, else "-"."""

    def format(self, record: logging.LogRecord) -> str:
        initialized = dist.is_available() and dist.is_initialized()
        record.rank = dist.get_rank() if initialized else os.environ.get("RANK", "-")
        return super().format(record)


def start() -> None:
    """Logs to standard error if the environment has GRAPHAR_LOG. Warns if its value is neither info nor debug."""
    if not (level := os.environ.get(SWITCH, "")):
        return
    if level not in LEVELS:
        warnings.warn(f"{SWITCH} must be {' or '.join(LEVELS)}, got {level!r}: nothing is logged", stacklevel=2)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_RankedFormatter(_FORMAT))
    logger = logging.getLogger("graphar")
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False  # else the root logger's handlers print each line again
