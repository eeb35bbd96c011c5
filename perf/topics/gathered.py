"""`python -m perf gathered`: times a fused all-gather and matmul, its peers, and the matmul and all-gather alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from perf.fusion import Comparison, FusionReport, FusionRow, Trial, is_far, methods_of
from perf.harness import verify
from perf.harness.ranks import Ranks
from perf.peers import gathered as peers
from perf.ratios import by_method
from perf.report import Arguments

CPU_ROWS, CPU_COLUMNS, CPU_FEATURES = (16, 256), (256,), 256


def count_wrong(trial: Trial, launch: Callable[[], None], ranks: Ranks) -> int:
    """Runs the timed launch once more, and returns how many elements of this process's result are wrong."""
    result = verify.again(trial, launch, ranks).view(-1)
    (a, w), rows = trial.operands, trial.layer.gathered(ranks.device)
    expected = rows if trial.variant.name == peers.ALLGATHER else torch.mm(rows, w.t())
    bits = peers.promised(trial.variant, a, w, rows)
    wrong = 0
    for window in verify.windows(result.numel()):
        found, near = result[window], expected.view(-1)[window]
        bad = is_far(found, near, [near])
        if bits is not None:
            bad |= verify.differs(found, bits.view(-1)[window])
        wrong += int(bad.sum())
    return wrong


class GatheredRow(FusionRow):
    floors: ClassVar = peers.FLOORS


# For "graphar", which uses the partition "auto": whether another method uses a fixed partition or two ops instead.
VARIANTS = {peers.AUTO: lambda name: name == peers.SEQUENCE or name.startswith(f"{peers.AUTO}:")}


@dataclass
class Gathered(FusionReport):
    rows: list[GatheredRow] = field(default_factory=list)

    order: ClassVar[int] = 11
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--rows 64 1024 4096 16384", quick_on_gpus="--rows 64 4096 --columns 10240"
    )
    methods: ClassVar = (peers.CUDA_METHODS, peers.CPU_METHODS)
    make_variants: ClassVar = staticmethod(lambda plan, ranks: (peers.make_variants(plan), []))
    row_of: ClassVar = staticmethod(lambda layer: GatheredRow)
    count_wrong: ClassVar = staticmethod(count_wrong)
    comparison: ClassVar = Comparison(peers.FLOORS, peers.SEQUENCE)
    variants: ClassVar = VARIANTS
    of_rows: ClassVar[str] = "gathered rows (default: 64 to 16384)"

    @classmethod
    def add_shapes(cls, parser: argparse.ArgumentParser) -> None:
        whole = "output features of the whole layers, over all ranks (default: 10240 57344)"
        parser.add_argument("--columns", type=int, nargs="+", metavar="N", help=whole)
        parser.add_argument("--features", type=int, metavar="K", help="input features (default: 8192)")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[peers.GatheredPlan]:
        """Returns one plan for each world size."""
        on_gpus = gpu_count >= 2
        device, known = ("cuda", cls.methods[0]) if on_gpus else ("cpu", cls.methods[1])
        world_sizes, methods = cls.world_sizes(options, gpu_count), methods_of(options, known)
        rows = options.rows or (peers.ROWS if on_gpus else CPU_ROWS)
        if min(rows) < max(world_sizes):
            sys.exit(f"--rows must be at least the number of ranks, {max(world_sizes)}, got {min(rows)}")
        columns = options.columns or (peers.COLUMNS if on_gpus else CPU_COLUMNS)
        features = options.features or (peers.FEATURES if on_gpus else CPU_FEATURES)
        return [peers.GatheredPlan(device, n, rows, columns, features, methods) for n in world_sizes]

    def cases(self) -> dict[tuple[int, int, int], dict[str, GatheredRow]]:
        return by_method(self.rows, lambda row: (row.world_size, row.n, row.m))

    @staticmethod
    def in_words(case: tuple[int, int, int]) -> str:
        world_size, n, m = case
        return f"M = {m}, N = {n}, {world_size} ranks"
