"""`python -m perf fused_fp8`: times a fused matmul and all-reduce of e4m3 operands, and torch._scaled_mm with peers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from perf.fusion import (
    Comparison,
    FusionReport,
    FusionRow,
    Trial,
    add_row_parallel,
    is_far,
    measure,
    row_parallel_plans,
)
from perf.harness import ranks as ranks_of
from perf.harness import verify
from perf.harness.ranks import Ranks
from perf.md import plural
from perf.peers.fp8_matmuls import (
    AFTER,
    CPU_METHODS,
    CUDA_METHODS,
    FLOORS,
    OF_ROWS,
    SCALES,
    Fp8Plan,
    make_variants,
    own_product,
)
from perf.products import sentence
from perf.ratios import by_method, of_best_peer
from perf.report import Arguments
from perf.topics import fp8

# ---- on a rank ------------------------------------------------------------------------------------------------------


def count_wrong(trial: Trial, launch: Callable[[], None], ranks: Ranks) -> int:
    """Runs the timed launch once more, and returns how many elements of this process's result are wrong."""
    result = trial.result_of(launch, ranks).view(-1)
    product = own_product(*trial.operands).view(-1)
    lost = None if trial.variant.exact else most_lost(*trial.operands).view(-1)

    def summands(x: Tensor, window: slice) -> list[Tensor]:
        return ranks.gather(x, window) if trial.variant.summed else [x[window]]

    wrong = 0
    for window in verify.windows(product.numel()):
        found, parts = result[window], summands(product, window)
        expected = verify.reference(parts, 1)
        if lost is None:
            bad = verify.differs(found, expected)
        else:
            bad = is_far(found, expected, parts, summands(lost, window))
        wrong += int(bad.sum())
    return wrong


def most_lost(a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor) -> Tensor:
    """Returns how far another kernel's product may be: LOST of the sum of the magnitudes of an element's terms."""
    x, y = a.float(), w.float()
    return (x * fp8.of_elements(a_scale, x)).abs() @ (y * fp8.of_elements(w_scale, y)).abs().t() * fp8.LOST


@dataclass(frozen=True)
class FusedFp8Row(FusionRow):
    """The measured and verified time of one method on one layer. ``scales`` is one of SCALES."""

    scales: str = OF_ROWS
    floors: ClassVar = FLOORS

    @property
    def what(self) -> tuple[str, ...]:
        return f"scales of {self.scales}", *super().what


def run_rank(plan: Fp8Plan, rank: int, port: int) -> Iterator[FusedFp8Row | str]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    variants, skipped = make_variants(plan, ranks)
    yield from skipped
    ranks.warm_up()
    for layer in plan.layers():
        row = partial(FusedFp8Row, scales=layer.scales)
        yield from measure(layer, [one for one in variants if one.serves(layer)], ranks, row, count_wrong)
        if plan.device == "cuda":
            torch.cuda.empty_cache()  # a graph's memory stays in torch's pool, where the next size cannot use it
    ranks.barrier()


# ---- the topic ------------------------------------------------------------------------------------------------------

SEQUENCE = f"{AFTER}graphar"
VARIANTS = {"graphar": lambda name: name.startswith("graphar:")}  # of "graphar", which uses the partition "auto"

Case = tuple[int, str, int, int]  # the number of ranks, scales, K and M


@dataclass
class FusedFp8(FusionReport):
    rows: list[FusedFp8Row] = field(default_factory=list)

    order: ClassVar[int] = 10
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--rows 1 64 2048 8192", quick_on_gpus="--rows 64 2048 --features 8192 --scales rows"
    )
    has_spread: ClassVar[bool] = True
    work: ClassVar = staticmethod(run_rank)
    comparison: ClassVar = Comparison(FLOORS, SEQUENCE)
    variants: ClassVar = VARIANTS

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        scales = "scales of rows, of blocks, or both (default: both; rows on the CPU)"
        parser.add_argument("--scales", nargs="+", choices=SCALES, help=scales)
        super().add_options(parser)
        add_row_parallel(parser, CUDA_METHODS, CPU_METHODS)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[Fp8Plan]:
        """Returns one plan for each world size."""
        scales = options.scales or (SCALES if gpu_count >= 2 else (OF_ROWS,))  # on the CPU torch has none of blocks
        world_sizes = cls.world_sizes(options, gpu_count)
        return row_parallel_plans(
            partial(Fp8Plan, scales=scales), options, world_sizes, gpu_count >= 2, CUDA_METHODS, CPU_METHODS
        )

    def line(self, row: FusedFp8Row) -> str:
        sizes = f"{row.world_size:>2} ranks {row.m:>6} x {row.n} x {row.k:<6} {row.scales:<6}"
        return f"{sizes} {row.method:>30} {row.median:>10.2f} us {row.wrong:>6} wrong"

    # ---- the report --------------------------------------------------------------------------------------------------

    @staticmethod
    def layer_of(row: FusedFp8Row) -> tuple[int, str, int, int]:
        return row.world_size, row.scales, row.n, row.k

    @staticmethod
    def title_of(layer: tuple[int, str, int, int]) -> str:
        world_size, scales, n, k = layer
        return f"Scales of {scales}, {world_size} ranks, N = {n}, K = {k}"

    def findings(self) -> list[str]:
        found = []
        for scales in SCALES:
            ratios = {case: one for case, one in of_best_peer(self.cases()).items() if case[1] == scales}
            named = {self.in_words(case): one for case, one in ratios.items()}
            where = f"{plural(len(named), 'case')} of scales of {scales}"
            found += [sentence("graphar / best peer", where, named)] if named else []
        return [*found, *super().findings()]

    def cases(self) -> dict[Case, dict[str, FusedFp8Row]]:
        return by_method(self.rows, lambda row: (row.world_size, row.scales, row.k, row.m))

    @staticmethod
    def in_words(case: Case) -> str:
        world_size, scales, k, m = case
        return f"M = {m}, K = {k}, scales of {scales}, {world_size} ranks"
