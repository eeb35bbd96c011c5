"""`python -m perf quantized`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from graphar.cli.options import size
from graphar.numerics.codecs import NAMES, codec
from graphar.plan.sizes import GB
from perf import live, sweep
from perf.cases import QuantisedPlan
from perf.catalogue import CODEC_METHODS
from perf.machine import check_world_sizes
from perf.quantized import errors, report

CPU_WORLD_SIZE = 4


def add(commands) -> argparse.ArgumentParser:
    quantized = commands.add_parser("quantized", help="all-reduces with codecs: errors, and on GPUs times")
    quantized.add_argument("--world-size", type=int, nargs="+", metavar="N", help="default: all GPUs; 4 on the CPU")
    quantized.add_argument("--max-nbytes", type=size, metavar="SIZE", help="largest size (default: 1G)")
    return quantized


def run(options: argparse.Namespace, folder: Path, block: dict[str, object], command: str) -> int:
    """What was measured is written even where a later size fails."""
    found, todo = report.Findings(), plans(options, block["gpu_count"])

    def write() -> tuple[Path, str]:
        return report.write(folder, block, found, command), report.verdict(found)

    total = sum(plan.row_count() for plan in todo)
    with live.reported("quantised all-reduce", total, found.skipped, write) as advance:
        for plan in todo:
            found.errors += errors.rows([codec(name) for name in NAMES], plan.world_size, torch.device(plan.device))
            for message in sweep.run(plan) if plan.methods else ():
                advance()
                live.take(message, found)
    return int(any(row.wrong for row in found.rows))


def plans(options: argparse.Namespace, gpu_count: int) -> Sequence[QuantisedPlan]:
    """One a world; what is timed needs GPUs."""
    device = "cuda" if gpu_count >= 2 else "cpu"
    world_sizes = options.world_size or [gpu_count if device == "cuda" else CPU_WORLD_SIZE]
    check_world_sizes(world_sizes, gpu_count)
    methods = ("nccl", "graphar", report.PEER, *CODEC_METHODS) if device == "cuda" else ()
    return [
        QuantisedPlan(device, world_size, "process", ("bfloat16",), methods, options.max_nbytes or GB, full=False)
        for world_size in world_sizes
    ]
