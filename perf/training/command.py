"""`python -m perf train`"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from perf import live
from perf.machine import check_world_sizes
from perf.training import report, sweep
from perf.training.runs import WARM_UP_STEPS
from perf.training.tasks import TASKS

CPU_WORLD_SIZE, CPU_SEEDS, CPU_STEPS = 2, 1, 30
SEEDS, STEPS = 3, 600


def add(commands) -> argparse.ArgumentParser:
    train = commands.add_parser("train", help="train small models with exact and with quantised gradients")
    train.add_argument("--world-size", type=int, metavar="N", help="ranks (default: all GPUs; 2 on the CPU)")
    train.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    train.add_argument("--seeds", type=int, metavar="N", help=f"how many (default: {SEEDS}; {CPU_SEEDS} on the CPU)")
    train.add_argument("--steps", type=int, metavar="N", help=f"default: {STEPS}; {CPU_STEPS} on the CPU")
    return train


def run(options: argparse.Namespace, folder: Path, block: dict[str, object], command: str) -> int:
    """What was measured is written even where a later run fails."""
    found, training = report.Findings(), plan(options, block["gpu_count"])

    def write() -> tuple[Path, str]:
        return report.write(folder, block, found, command), report.verdict(found.rows)

    with live.reported("train", training.run_count(), found.skipped, write) as advance:
        for row in sweep.run(training):
            advance()
            found.rows.append(row)
            print(report.one_line(row), flush=True)
    return int(not all(row.outcome.same_bits for row in found.rows))


def plan(options: argparse.Namespace, gpu_count: int) -> sweep.TrainingPlan:
    """Every codec on GPUs, a few on the CPU."""
    on_gpus = gpu_count >= 2
    world_size = options.world_size or (gpu_count if on_gpus else CPU_WORLD_SIZE)
    seeds, steps = (
        options.seeds or (SEEDS if on_gpus else CPU_SEEDS),
        options.steps or (STEPS if on_gpus else CPU_STEPS),
    )
    check_world_sizes([world_size], gpu_count)
    if steps <= WARM_UP_STEPS:
        sys.exit(f"--steps must be more than the {WARM_UP_STEPS} that are not timed")
    if "digits" in options.tasks:
        check_digits()
    device = "cuda" if on_gpus else "cpu"
    return sweep.TrainingPlan(device, world_size, tuple(options.tasks), tuple(range(seeds)), steps, every_codec=on_gpus)


def check_digits() -> None:
    """Ends the program where the digits' package is missing."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        sys.exit("digits needs scikit-learn: pip install 'graphar-nvlink[train]'; or leave them out: --tasks bytes")
