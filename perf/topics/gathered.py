"""`python -m perf gathered`: times a fused all-gather and matmul, its peers, and the matmul and all-gather alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from perf.fusion import FusionReport, FusionRow, Trial, is_far
from perf.harness import verify
from perf.harness.ranks import Ranks
from perf.peers import gathered as peers
from perf.report import Arguments

CPU_ROWS, CPU_COLUMNS, CPU_FEATURES = (16, 256), (256,), 256


def count_wrong(trial: Trial, launch: Callable[[], None], ranks: Ranks) -> int:
    result = verify.again(trial, launch, ranks).view(-1)
    (a, w), rows = trial.operands, trial.layer.gathered(ranks.device)
    expected = rows if trial.variant.name == peers.ALLGATHER else torch.mm(rows, w.t())
    bits = peers.promised(trial.variant, a, w, rows)
    wrong = 0
    for window in verify.windows(result.numel()):
        output, near = result[window], expected.view(-1)[window]
        bad = is_far(output, near, [near])
        if bits is not None:
            bad |= verify.differs(output, bits.view(-1)[window])
        wrong += int(bad.sum())
    return wrong


# For "graphar", which uses the partition "auto": whether another method uses a fixed partition or two ops instead.
VARIANTS = {peers.AUTO: lambda name: name == peers.SEQUENCE or name.startswith(f"{peers.AUTO}:")}


@dataclass
class Gathered(FusionReport):
    rows: list[FusionRow] = field(default_factory=list)

    order: ClassVar[int] = 11
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--rows 64 1024 4096 16384", quick_on_gpus="--rows 64 4096 --columns 10240"
    )
    methods: ClassVar = (peers.CUDA_METHODS, peers.CPU_METHODS)
    make_variants: ClassVar = staticmethod(lambda plan, ranks: (peers.make_variants(plan), []))
    count_wrong: ClassVar = staticmethod(count_wrong)
    floors: ClassVar = peers.FLOORS
    sequence: ClassVar = peers.SEQUENCE
    width: ClassVar[str] = "n"
    variants: ClassVar = VARIANTS
    of_rows: ClassVar[str] = "gathered rows (default: 64 to 16384)"
    plans: ClassVar = peers.GatheredPlan
    sizes: ClassVar = ((peers.ROWS, peers.COLUMNS, peers.FEATURES), (CPU_ROWS, CPU_COLUMNS, CPU_FEATURES))

    @classmethod
    def add_shapes(cls, parser: argparse.ArgumentParser) -> None:
        whole = "output features of the whole layers, over all ranks (default: 10240 57344)"
        parser.add_argument("--columns", type=int, nargs="+", metavar="N", help=whole)
        parser.add_argument("--features", type=int, metavar="K", help="input features (default: 8192)")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[peers.GatheredPlan]:
        plans = super().plan(options, gpu_count)
        most = max(world_plan.world_size for world_plan in plans)
        if (least := min(plans[0].rows)) < most:
            sys.exit(f"--rows must be at least the number of ranks, {most}, got {least}")
        return plans
