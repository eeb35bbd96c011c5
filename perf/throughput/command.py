"""`python -m perf throughput`"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from perf import live
from perf.machine import check_world_sizes
from perf.throughput import report, runs
from perf.throughput.models import TINY, WORKLOADS

CPU_WORLD_SIZE, CPU_STEPS = 2, 20
STEPS = 200


def add(commands) -> argparse.ArgumentParser:
    throughput = commands.add_parser("throughput", help="train known models on random data, and time their steps")
    throughput.add_argument("--world-size", type=int, metavar="N", help="ranks (default: all GPUs; 2 on the CPU)")
    throughput.add_argument(
        "--models", nargs="+", choices=list(WORKLOADS), help=f"default: all but {TINY}; that alone on the CPU"
    )
    throughput.add_argument("--steps", type=int, metavar="N", help=f"default: {STEPS}; {CPU_STEPS} on the CPU")
    throughput.add_argument("--batch-size", type=int, metavar="N", help="samples of a rank (default: the model's own)")
    throughput.add_argument("--seconds", type=float, metavar="S", help="for each model; what is done by then counts")
    return throughput


def run(options: argparse.Namespace, folder: Path, block: dict[str, object], command: str) -> int:
    """What was measured is written even where a later model fails."""
    found, todo = report.Findings(), plan(options, block["gpu_count"])
    total = len(todo.models) * len(runs.ways(""))

    def write() -> tuple[Path, str]:
        return report.write(folder, block, found, command), report.verdict(found.rows)

    with live.reported("throughput", total, found.skipped, write) as advance:
        for message in runs.run(todo):
            advance()
            if isinstance(message, str):
                live.take(message, found)
            else:
                found.rows.append(message)
                print(report.one_line(message), flush=True)
    return int(not all(row.same_bits for row in found.rows))


def plan(options: argparse.Namespace, gpu_count: int) -> runs.ThroughputPlan:
    """All models that users know on GPUs, a tiny one on the CPU."""
    on_gpus = gpu_count >= 2
    world_size = options.world_size or (gpu_count if on_gpus else CPU_WORLD_SIZE)
    check_world_sizes([world_size], gpu_count)
    steps = options.steps or (STEPS if on_gpus else CPU_STEPS)
    if steps < runs.BLOCK:
        sys.exit(f"--steps must be at least {runs.BLOCK}, which are timed as one block")
    if min(options.batch_size or 1, options.seconds or 1) <= 0:
        sys.exit("--batch-size and --seconds must be positive")
    default = tuple(name for name in WORKLOADS if (name == TINY) != on_gpus)
    device = "cuda" if on_gpus else "cpu"
    models = tuple(options.models or default)
    return runs.ThroughputPlan(device, world_size, models, steps, options.batch_size, options.seconds)
