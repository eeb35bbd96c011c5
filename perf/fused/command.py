"""`python -m perf fused`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from perf import live
from perf.fused import report, sweep
from perf.fused.cases import FEATURES, HIDDEN, ROWS, Plan
from perf.fused.methods import CPU_METHODS, CUDA_METHODS
from perf.fused.sweep import FusedRow
from perf.fused.timeline import Timeline
from perf.machine import check_world_sizes

CPU_WORLD_SIZE = 2
CPU_ROWS, CPU_COLUMNS, CPU_FEATURES = (16, 256), 256, (256,)


def add(commands) -> argparse.ArgumentParser:
    fused = commands.add_parser("fused", help="time matmul and all-reduce as one op beside its peers")
    fused.add_argument("--world-size", type=int, nargs="+", metavar="N", help="default: all GPUs; 2 on the CPU")
    fused.add_argument("--rows", type=int, nargs="+", metavar="M", help="of the activations (default: 1 to 16384)")
    fused.add_argument("--columns", type=int, metavar="N", help="of the result (default: 8192)")
    fused.add_argument(
        "--features", type=int, nargs="+", metavar="K", help="of the whole layers, over all ranks (default: 8192 28672)"
    )
    fused.add_argument("--methods", nargs="+", choices=list(dict.fromkeys(CUDA_METHODS + CPU_METHODS)))
    return fused


def run(options: argparse.Namespace, folder: Path, block: dict[str, object], command: str) -> int:
    """Works through the plans. What was measured is written even where a later size fails."""
    found, todo = report.Findings(), plans(options, block["gpu_count"])

    def write() -> tuple[Path, str]:
        return report.write(folder, block, found, command), report.verdict(found)

    with live.reported("matmul and all-reduce", None, found.skipped, write) as advance:
        for message in (message for plan in todo for message in sweep.run(plan)):
            advance()
            take(message, found)
    return int(any(one.wrong for one in (*found.rows, *found.timelines)))


def take(message: FusedRow | Timeline | str, found: report.Findings) -> None:
    """Keeps and shows what a plan has found."""
    if isinstance(message, str):
        found.skipped.append(message)
        print(f"# not measured: {message}", file=sys.stderr, flush=True)
        return
    sizes = f"{message.world_size:>2} ranks {message.m:>6} x {message.n} x {message.k:<6}"
    if isinstance(message, Timeline):
        found.timelines.append(message)
        name, time_us = "timeline", message.total_us
    else:
        found.rows.append(message)
        name, time_us = message.method, message.median
    print(f"{sizes} {name:>28} {time_us:>10.2f} us {message.wrong:>6} wrong", flush=True)


def plans(options: argparse.Namespace, gpu_count: int) -> Sequence[Plan]:
    """One a world."""
    on_gpus = gpu_count >= 2
    device, known = ("cuda", CUDA_METHODS) if on_gpus else ("cpu", CPU_METHODS)
    world_sizes = options.world_size or [gpu_count if on_gpus else CPU_WORLD_SIZE]
    check_world_sizes(world_sizes, gpu_count)
    methods = options.methods or known
    if unknown := [name for name in methods if name not in known]:
        sys.exit(f"{', '.join(unknown)}: not on this machine, which has {', '.join(known)}")
    rows = options.rows or (ROWS if on_gpus else CPU_ROWS)
    columns = options.columns or (HIDDEN if on_gpus else CPU_COLUMNS)
    features = options.features or (FEATURES if on_gpus else CPU_FEATURES)
    return [Plan(device, world_size, rows, columns, features, methods) for world_size in world_sizes]
