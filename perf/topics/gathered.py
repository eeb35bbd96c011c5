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
from perf.report import Arguments, by_method

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

    name: ClassVar[str] = "gathered"
    title: ClassVar[str] = "Fused all-gather and matmul"
    order: ClassVar[int] = 11
    help: ClassVar[str] = "time a fused all-gather and matmul, separate ops, and other fused ops"
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--rows 64 1024 4096 16384", quick_on_gpus="--rows 64 4096 --columns 10240"
    )
    has_spread: ClassVar[bool] = True
    work: ClassVar = staticmethod(run_rank)
    comparison: ClassVar = Comparison(FLOORS, SEQUENCE)
    variants: ClassVar = VARIANTS
    notes: ClassVar[str] = """\
- M, N, K: the rows of the activations [M, K] are sharded over the ranks, as in sequence parallelism. Every rank gathers
  them and multiplies them by the transpose of its weight [N, K]. N is one rank's share of the output features, rounded
  to a multiple of 64. M is rounded down to a multiple of the number of ranks.
- times: microseconds of one bfloat16 operation, in a CUDA graph of independent operations. A time is the median over
  the repeats. Each repeat runs all methods in turn, and has the time of the slowest rank.
- matmul: torch's matmul alone, on rows that were gathered before. allgather: graphar's all-gather alone.
- graphar: `graphar.fused_allgather_matmul` with its default partition, "auto". best graphar: the fastest of "auto",
  `graphar:tiles` and `graphar:chunks`.
- best peer: the fastest method without graphar in the same run whose result was correct.
- of_best_peer: graphar's time / the best peer's time; below 1.00 graphar is faster. Differences under 3 % are noise.
- of_best_variant: graphar's time / the time of the fastest variant in the same run. The variants are
  `graphar:tiles`, `graphar:chunks` and `graphar+matmul`.
- of_sequence: graphar's time / the time of graphar's all-gather followed by torch's matmul.
- hidden: the overlap, (matmul + allgather - best graphar) / the shorter of matmul and allgather. At 100 % the shorter
  one is hidden completely. Below 0 % best graphar is slower than both in sequence.

Methods:

- `nccl+matmul`, `gloo+matmul`, `graphar+matmul`: the all-gather of that library, followed by torch's matmul.
- `chunked_nccl@4`: each rank's rows are split into 4 chunks of at least 64 rows. NCCL gathers one chunk on its own
  stream while torch multiplies the previous one.
- `symm_fused`: torch's pipelined all-gather and matmul over symmetric memory
  (`torch.ops.symm_mem.fused_all_gather_matmul`). It does not return the gathered rows.
- `graphar:tiles`: one kernel gathers and multiplies.
- `graphar:chunks`: copy engines gather, and torch multiplies each rank's rows when they have arrived.

Every result was verified on random data, on all ranks. Every product was compared with torch's product of the same
rows. The error may be at most 3 machine epsilons of the product plus 2^-13 of the largest product. Products of
graphar's own matmul must also have the bits of graphar's matmul on gathered rows, and on the CPU the bits of
`graphar.reference`. Gathered rows must equal the ranks' rows bit for bit. The verified result comes from a replay of
the timed graph. NVLink multicast was off for all methods, unless the user turned it on."""

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
