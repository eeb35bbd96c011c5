"""`python -m perf fused`: times a fused matmul and all-reduce, its peers, and the matmul and all-reduce alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from perf import fusion
from perf.charts import Plot
from perf.fusion import Cases, FusionRow, Trial
from perf.harness import verify
from perf.harness.ranks import Ranks
from perf.md import columns, plural, ratio_cell, time_cell
from perf.peers import matmuls as peers
from perf.products import sentence
from perf.ratios import by_method, ratio
from perf.report import Arguments


def count_wrong(trial: Trial, launch: Callable[[], None], ranks: Ranks) -> int:
    if not trial.variant.whole:
        return fusion.count_wrong(trial, launch, ranks)
    result = verify.again(trial, launch, ranks).view(-1)
    alone = peers.own_product(*trial.layer.whole(ranks.device), partition="tp_invariant")
    return int(verify.differs(result, alone.view(-1)).sum())


SEQUENCE = f"{peers.AFTER}graphar"
# For each method that uses the partition "auto": whether another method uses a fixed partition or two ops instead.
VARIANTS = {
    "graphar": lambda name: name == SEQUENCE or (name.startswith("graphar:") and not name.endswith(peers.INT8)),
    f"graphar{peers.INT8}": lambda name: (
        name == f"{SEQUENCE}{peers.INT8}" or (name.startswith("graphar:") and name.endswith(peers.INT8))
    ),
}


@dataclass
class Fused(fusion.RowParallelReport):
    rows: list[FusionRow] = field(default_factory=list)

    order: ClassVar[int] = 9
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--rows 1 64 512 2048 8192", quick_on_gpus="--rows 64 2048 --features 8192"
    )
    methods: ClassVar = (peers.CUDA_METHODS, peers.CPU_METHODS)
    make_variants: ClassVar = staticmethod(peers.make_variants)
    count_wrong: ClassVar = staticmethod(count_wrong)
    floors: ClassVar = peers.FLOORS
    sequence: ClassVar = SEQUENCE
    variants: ClassVar = VARIANTS

    def tables_of(self, cases: Cases) -> list[str]:
        return [*super().tables_of(cases), *invariance_table(cases)]

    def figure_of_ratios(self) -> Plot:
        """Plots the largest layer of the most ranks."""
        world_size, n, k = max((row.world_size, row.n, row.k) for row in self.rows)
        mine = [row for row in self.rows if (row.world_size, row.n, row.k) == (world_size, n, k)]
        drawn = self.ratios_plot(by_method(mine, lambda row: row.m))
        return replace(drawn, title=f"Matmul + all-reduce: time / best peer's time, N = {n}, K = {k}")

    def findings(self) -> list[str]:
        sentences, cases = super().findings(), self.cases()
        for name, over in OF_INVARIANT.items():
            ratios = {self.in_words(case): value for case, rows in cases.items() if (value := of_invariant(rows, over))}
            sentences += [sentence(f"`tp_invariant` / {name}", plural(len(ratios), "case"), ratios)] if ratios else []
        return sentences


# By name, the methods that "tp_invariant" is compared with: the first that was measured.
OF_INVARIANT = {"auto": ("graphar",), "torch": (f"{peers.AFTER}nccl", f"{peers.AFTER}gloo")}


def of_invariant(rows: Mapping[str, FusionRow], over: Sequence[str]) -> float | None:
    """Returns the time of "tp_invariant" / the time of the first method of ``over`` that was measured."""
    return ratio(rows.get(peers.TP_INVARIANT), next((rows[name] for name in over if name in rows), None))


def invariance_table(cases: Cases) -> list[str]:
    """Returns a caption and a table with a row for each M; an empty list if "tp_invariant" was not measured."""
    mine = {m: rows for m, rows in cases.items() if peers.TP_INVARIANT in rows}
    cells = {
        "M": lambda m: m,
        f"{peers.TP_INVARIANT} (us)": lambda m: time_cell(mine[m][peers.TP_INVARIANT]),
        **{
            f"of_{name}": lambda m, over=over: ratio_cell(of_invariant(mine[m], over))
            for name, over in OF_INVARIANT.items()
        },
    }
    return ["The same bits at every number of ranks, `tp_invariant`:", columns(mine, cells)] if mine else []
