"""`python -m perf model`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perf import live
from perf.machine import check_world_sizes
from perf.model import report, runs
from perf.model.cases import SIZES, TINY, Plan
from perf.model.runs import ModelRow

SIZE, LAYERS, DECODE, PREFILL = "llama-3-70b", 4, (1, 8, 64), (2048, 8192)
CPU_WORLD_SIZE, CPU_DECODE, CPU_PREFILL = 2, (1, 8), (128,)


def add(commands) -> argparse.ArgumentParser:
    model = commands.add_parser("model", help="time a tensor-parallel decoder of Llama's shape by its all-reduces")
    model.add_argument("--world-size", type=int, nargs="+", metavar="N", help="default: all GPUs; 2 on the CPU")
    model.add_argument("--size", choices=list(SIZES), help=f"default: {SIZE}; {TINY} on the CPU")
    model.add_argument("--layers", type=int, metavar="N", help=f"that are timed (default: {LAYERS}, or all there are)")
    tokens = {"type": int, "nargs": "*", "metavar": "TOKENS"}
    model.add_argument("--decode", **tokens, help="a step, one of each sequence (default: 1 8 64; 1 8 on the CPU)")
    model.add_argument("--prefill", **tokens, help="of one sequence (default: 2048 8192; 128 on the CPU)")
    return model


def run(options: argparse.Namespace, folder: Path, block: dict[str, object], command: str) -> int:
    """Works through the plans. What was measured is written even where a later case fails."""
    found, todo = report.Findings(), plans(options, block["gpu_count"])

    def write() -> tuple[Path, str]:
        return report.write(folder, block, found, command), report.verdict(found)

    with live.reported("model", None, found.skipped, write) as advance:
        for message in (message for plan in todo for message in runs.run(plan)):
            advance()
            take(message, found)
    return int(any(row.wrong for row in found.rows))


def take(message: ModelRow | str, found: report.Findings) -> None:
    """Keeps and shows what a plan has found."""
    if isinstance(message, str):
        live.take(message, found)
        return
    found.rows.append(message)
    step = f"{message.world_size:>2} ranks {message.phase:>8} {message.tokens:>6} tokens"
    print(f"{step} {message.method:>23} {message.median:>12.2f} us {message.wrong:>6} wrong", flush=True)


def plans(options: argparse.Namespace, gpu_count: int) -> Sequence[Plan]:
    """One a world."""
    on_gpus = gpu_count >= 2
    world_sizes = options.world_size or [gpu_count if on_gpus else CPU_WORLD_SIZE]
    check_world_sizes(world_sizes, gpu_count)
    size = SIZES[options.size or (SIZE if on_gpus else TINY)]
    if odd := [world_size for world_size in world_sizes if size.kv_heads % world_size]:
        sys.exit(f"--world-size: {odd[0]} ranks cannot divide the {size.kv_heads} heads of {size.name}'s keys evenly")
    layers = options.layers or min(LAYERS, size.layers)
    if not 1 <= layers <= size.layers:
        sys.exit(f"--layers must be from 1 to the {size.layers} of {size.name}")
    decode, prefill = (DECODE, PREFILL) if on_gpus else (CPU_DECODE, CPU_PREFILL)
    decode, prefill = (
        given if asked is None else asked for asked, given in ((options.decode, decode), (options.prefill, prefill))
    )
    if not decode and not prefill:
        sys.exit("--decode and --prefill leave nothing to measure")
    if min([*decode, *prefill]) < 1 or 1 in prefill:
        sys.exit("--decode must be at least 1 token, --prefill at least 2")
    device = "cuda" if on_gpus else "cpu"
    return [Plan(device, world_size, size.name, layers, decode, prefill) for world_size in world_sizes]
