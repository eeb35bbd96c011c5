"""`python -m perf fused_fp8`: times a fused matmul and all-reduce of e4m3 operands, and torch._scaled_mm with peers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from graphar.numerics.fp8_products import BLOCK
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
from perf.report import Arguments, by_method, of_best_peer, plural
from perf.topics.fp8 import LOST, of_elements

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
    return (x * of_elements(a_scale, x)).abs() @ (y * of_elements(w_scale, y)).abs().t() * LOST


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

    name: ClassVar[str] = "fused_fp8"
    title: ClassVar[str] = "Fused matmul and all-reduce of e4m3 operands"
    order: ClassVar[int] = 10
    help: ClassVar[str] = "time a fused matmul and all-reduce of e4m3 operands, and torch._scaled_mm with all-reduces"
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--rows 1 64 2048 8192", quick_on_gpus="--rows 64 2048 --features 8192 --scales rows"
    )
    has_spread: ClassVar[bool] = True
    work: ClassVar = staticmethod(run_rank)
    comparison: ClassVar = Comparison(FLOORS, SEQUENCE)
    variants: ClassVar = VARIANTS
    notes: ClassVar[str] = f"""\
- M, N, K: every rank multiplies e4m3 activations [M, K] by the transpose of an e4m3 weight [N, K]. The products in bf16
  are summed over the ranks. K is one rank's share of the input features.
- scales of rows: one for each row of both operands. Scales of blocks: one for each 1 x {BLOCK} of the activations and
  {BLOCK} x {BLOCK} of the weight.
- times: microseconds of one operation, in a CUDA graph of independent operations. A time is the median over the
  repeats. Each repeat runs all methods in turn, and has the time of the slowest rank.
- scaled_mm: `torch._scaled_mm` alone, without `use_fast_accum`. allreduce: graphar's all-reduce alone.
- `scaled_mm+NAME`: `torch._scaled_mm`, followed by the all-reduce of that name in `allreduce.md`.
- graphar: `graphar.fused_matmul_allreduce(a, w, a_scale=..., w_scale=...)` with its default partition, "auto".
  `graphar:tiles`: one kernel multiplies and sums. `graphar:none`: graphar's matmul, and then its sum. best graphar: the
  fastest of them.
- best peer: the fastest method without graphar in the same run whose result was correct.
- of_best_peer: graphar's time / the best peer's time; below 1.00 graphar is faster. Differences under 3 % are noise.
- of_best_variant: graphar's time / the time of the fastest fixed partition in the same run.
- of_sequence: graphar's time / the time of `torch._scaled_mm` followed by graphar's all-reduce.
- hidden: the overlap, (scaled_mm + allreduce - best graphar) / the shorter of both. At 100 % the shorter one is hidden
  completely. Below 0 % best graphar is slower than both in sequence.

Every result was verified on random data, on all ranks. graphar's products were summed by `graphar.reference`, and
graphar's results compared with these sums bit for bit. The other methods' products may differ by 2^-11 of the sum
of the magnitudes of their terms, which a tensor core may lose, and by the rounding of sums at every hop: 3 machine
epsilons of the sum of magnitudes plus 2^-13 of its largest value. The verified result comes from a replay of the
timed graph. NVLink multicast was off for all methods, unless the user turned it on."""

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
