"""`python -m perf gathered`: times a fused all-gather and matmul, its peers, and the matmul and all-gather alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from perf.fusion import Comparison, FusionReport, FusionRow, Trial, add_methods, is_far, measure, methods_of
from perf.harness import ranks as ranks_of
from perf.harness import verify
from perf.harness.ranks import Ranks
from perf.peers.gathered import (
    ALLGATHER,
    AUTO,
    COLUMNS,
    CPU_METHODS,
    CUDA_METHODS,
    FEATURES,
    FLOORS,
    ROWS,
    SEQUENCE,
    GatheredPlan,
    make_variants,
    promised,
)
from perf.ratios import by_method
from perf.report import Arguments

CPU_ROWS, CPU_COLUMNS, CPU_FEATURES = (16, 256), (256,), 256


# ---- on a rank ------------------------------------------------------------------------------------------------------


def count_wrong(trial: Trial, launch: Callable[[], None], ranks: Ranks) -> int:
    """Runs the timed launch once more, and returns how many elements of this process's result are wrong."""
    result = trial.result_of(launch, ranks).view(-1)
    (a, w), rows = trial.operands, trial.layer.gathered(ranks.device)
    expected = rows if trial.variant.name == ALLGATHER else torch.mm(rows, w.t())
    bits = promised(trial.variant, a, w, rows)
    wrong = 0
    for window in verify.windows(result.numel()):
        found, near = result[window], expected.view(-1)[window]
        bad = is_far(found, near, [near])
        if bits is not None:
            bad |= verify.differs(found, bits.view(-1)[window])
        wrong += int(bad.sum())
    return wrong


class GatheredRow(FusionRow):
    floors: ClassVar = FLOORS


def run_rank(plan: GatheredPlan, rank: int, port: int) -> Iterator[GatheredRow | str]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    variants = make_variants(plan)
    ranks.warm_up()
    for layer in plan.layers():
        yield from measure(layer, [one for one in variants if one.serves(layer)], ranks, GatheredRow, count_wrong)
        if plan.device == "cuda":
            torch.cuda.empty_cache()  # a graph's memory stays in torch's pool, where the next size cannot use it
    ranks.barrier()


# ---- the topic ------------------------------------------------------------------------------------------------------

# For "graphar", which uses the partition "auto": whether another method uses a fixed partition or two ops instead.
VARIANTS = {AUTO: lambda name: name == SEQUENCE or name.startswith(f"{AUTO}:")}


@dataclass
class Gathered(FusionReport):
    rows: list[GatheredRow] = field(default_factory=list)

    order: ClassVar[int] = 11
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--rows 64 1024 4096 16384", quick_on_gpus="--rows 64 4096 --columns 10240"
    )
    has_spread: ClassVar[bool] = True
    work: ClassVar = staticmethod(run_rank)
    comparison: ClassVar = Comparison(FLOORS, SEQUENCE)
    variants: ClassVar = VARIANTS

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--rows", type=int, nargs="+", metavar="M", help="gathered rows (default: 64 to 16384)")
        whole = "output features of the whole layers, over all ranks (default: 10240 57344)"
        parser.add_argument("--columns", type=int, nargs="+", metavar="N", help=whole)
        parser.add_argument("--features", type=int, metavar="K", help="input features (default: 8192)")
        add_methods(parser, CUDA_METHODS, CPU_METHODS)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[GatheredPlan]:
        """Returns one plan for each world size."""
        on_gpus = gpu_count >= 2
        device, known = ("cuda", CUDA_METHODS) if on_gpus else ("cpu", CPU_METHODS)
        world_sizes, methods = cls.world_sizes(options, gpu_count), methods_of(options, known)
        rows = options.rows or (ROWS if on_gpus else CPU_ROWS)
        if min(rows) < max(world_sizes):
            sys.exit(f"--rows must be at least the number of ranks, {max(world_sizes)}, got {min(rows)}")
        columns = options.columns or (COLUMNS if on_gpus else CPU_COLUMNS)
        features = options.features or (FEATURES if on_gpus else CPU_FEATURES)
        return [GatheredPlan(device, world_size, rows, columns, features, methods) for world_size in world_sizes]

    def line(self, row: GatheredRow) -> str:
        sizes = f"{row.world_size:>2} ranks {row.m:>6} x {row.n:<6} x {row.k:<6}"
        return f"{sizes} {row.method:>16} {row.median:>10.2f} us {row.wrong:>6} wrong"

    # ---- the report --------------------------------------------------------------------------------------------------

    def cases(self) -> dict[tuple[int, int, int], dict[str, GatheredRow]]:
        return by_method(self.rows, lambda row: (row.world_size, row.n, row.m))

    @staticmethod
    def in_words(case: tuple[int, int, int]) -> str:
        world_size, n, m = case
        return f"M = {m}, N = {n}, {world_size} ranks"
