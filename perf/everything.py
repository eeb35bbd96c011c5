"""`python -m perf` without a command: all parts that this machine can measure, each cut to a minute or two.

Together under 10 minutes on 4 GPUs, and under 3 on a CPU of two cores; with --quick a few sizes of each.
"""

from __future__ import annotations

import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from perf import regressions
from perf.page import command as reports

# The arguments of each part, in the order they are run in.
ON_GPUS = {
    "allreduce": "",
    "quantized": "--max-nbytes 256M",
    "lossless": "",
    "norms": "",
    "prefetch": "",
    "fused": "--rows 1 64 512 2048 8192",
    "model": "",
    "train": "--seeds 1 --steps 200",
    "throughput": "--models resnet50 bert_base gpt2_xl --seconds 15",
    "compile": "--every 4",
}
QUICK_ON_GPUS = {
    "allreduce": "--dtypes bfloat16 --max-nbytes 64M",
    "quantized": "--max-nbytes 16M",
    "lossless": "",
    "norms": "",
    "prefetch": "",
    "fused": "--rows 64 2048 --features 8192",
    "model": "--layers 1 --decode 1 --prefill 2048",
    "train": "--tasks digits --seeds 1 --steps 100",
    "throughput": "--models transformer_xl_base --steps 20",
    "compile": "--every 10",
}
ON_CPU = {
    "allreduce": "--max-nbytes 10M",
    "quantized": "",
    "lossless": "",
    "norms": "",
    "prefetch": "",
    "fused": "",
    "model": "",
    "train": "--tasks digits",
    "throughput": "--steps 10",
    "compile": "--every 10",
}
QUICK_ON_CPU = ON_CPU | {
    "allreduce": "--world-size 2 --max-nbytes 1M",
    "quantized": "--world-size 2",
    "lossless": "--world-size 2",
    "model": "--decode 1 --prefill",
    "train": "--tasks digits --steps 10",
    "compile": "--every 100",
}
# What a whole run leaves out, since its all-reduce counts the same: quick arguments.
ALONE = {"nvlink": "--max-nbytes 64M"}


def parts(gpu_count: int, quick: bool) -> dict[str, list[str]]:
    """The arguments of each command."""
    on_gpus, on_cpu = (QUICK_ON_GPUS, QUICK_ON_CPU) if quick else (ON_GPUS, ON_CPU)
    return {name: arguments.split() for name, arguments in (on_gpus if gpu_count >= 2 else on_cpu).items()}


def run(options: Namespace, machine: dict[str, object], folder: Path, run_one: Callable[[Sequence[str]], int]) -> int:
    """Runs the parts one after another; one that fails does not keep the others from running.

    Args:
        folder: where the reports will be.
        run_one: does what a command line says, and returns its exit status.
    """
    status, compared = 0, topics_of(options.compare, machine)
    for name, arguments in parts(machine["gpu_count"], options.quick).items():
        compare = ["--compare", str(options.compare)] if name in compared else []
        print(f"\n## {' '.join([name, *arguments])}", flush=True)
        try:
            status = max(status, run_one([name, *arguments, "--out", str(options.out), *compare]))
        except SystemExit as ended:
            if not isinstance(ended.code, str):
                raise
            print(f"# not measured: {name}: {ended}", file=sys.stderr, flush=True)  # it lacks a package
        except Exception:
            traceback.print_exc()
            status = 1
    print()
    return max(status, reports.run(Namespace(folder=folder, compare=None, json=False)))


def topics_of(earlier: Path | None, machine: dict[str, object]) -> list[str]:
    """The parts that can be compared with an earlier folder's reports; ends the program where there are none."""
    if earlier is None:
        return []
    found = [topic for topic in regressions.TOPICS if (earlier / f"{topic}.json").exists()]
    try:
        for topic in found:
            regressions.read(earlier, topic, machine)
    except (OSError, ValueError) as error:
        sys.exit(f"--compare: {error}")
    return found or sys.exit(f"--compare: {earlier} holds no report to compare with")
