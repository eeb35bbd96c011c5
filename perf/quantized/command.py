"""`python -m perf quantized`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from graphar.codecs import NAMES, codec
from graphar.shell.options import size
from graphar.sizes import GB
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
    found, todo = report.Findings(), plans(options, block["gpu_count"])
    with live.make_progress() as progress:
        bar = progress.add_task("quantised all-reduce", total=sum(plan.row_count() for plan in todo))
        for plan in todo:
            found.errors += errors.rows([codec(name) for name in NAMES], plan.world_size, torch.device(plan.device))
            for message in sweep.run(plan) if plan.methods else ():
                progress.advance(bar)
                live.take(message, found)
    path = report.write(folder, block, found, command)
    print(f"\n{report.verdict(found)}\nreport: {path}")
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
