"""What a pass did to the collectives of the graphs it saw."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

# What comes of rewrites that do not put the op of their name in the place of a collective.
_BECAME = {
    "norm": "graphar::allreduce_residual_rmsnorm",
    "epilogue": "one op with the pointwise operations behind it",
    "matmul": "one op with the matmul before it",
    "prefetch": "prefetches the next matmul's weight",
}


@dataclass(frozen=True)
class Entry:
    """One tensor of one collective.

    Attributes:
        graph: the number of the graph, in the order in which the pass saw them.
        rewrite: the rewrite that found it, by name.
        op: the collective as torch calls it, with its reduction where it has one: ``all_reduce(sum)``.
        group: the name of its process group.
        shape: of the tensor that goes in; sizes that vary are symbols.
        dtype: of the tensor.
        device: where it is: "cpu" or "cuda".
        why_left: why it was not rewritten; empty where it was.
    """

    graph: int
    rewrite: str
    op: str
    group: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    device: str
    why_left: str

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        left = f"no {self.rewrite}" if self.rewrite in _BECAME else "left"
        became = _BECAME.get(self.rewrite, f"graphar::{self.rewrite}")
        became = f"{left}: {self.why_left}" if self.why_left else became
        what = f"{self.op} of [{shape}] {str(self.dtype).removeprefix('torch.')} on {self.device}"
        return f"graph {self.graph}: {what} in group {self.group!r}: {became}"


@dataclass
class Report:
    """What became of the collectives of each graph, in order; printed, a line each.

    A graph that Inductor takes from its cache has been rewritten earlier, and is not in it.

    Attributes:
        entries: one for each tensor of each collective that a rewrite found. An all-reduce before a norm that cannot
            take it has two: of "norm", with the reason, and of "allreduce"; likewise any sum with an epilogue. So
            has one behind a matmul: of what it became, and of "matmul"; and one before a matmul, of "prefetch".
        graphs: how many graphs the pass has seen.
    """

    entries: list[Entry] = field(default_factory=list)
    graphs: int = 0

    @property
    def rewritten(self) -> list[Entry]:
        """The entries that are graphar's ops now."""
        return [entry for entry in self.entries if not entry.why_left]

    @property
    def left(self) -> list[Entry]:
        """The entries that a rewrite did not take, each with the reason."""
        return [entry for entry in self.entries if entry.why_left]

    def __str__(self) -> str:
        counts = f"{self.graphs} graphs, {len(self.rewritten)} rewritten, {len(self.left)} left"
        return "\n".join([counts, *map(str, self.entries)])
