"""The report of a pass: which collectives it replaced in each graph, and why it left the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

_SINGLE = ("allreduce", "reducescatter", "allgather")  # rewrites of a collective alone, tried last
_REPLACING = ("norm", "epilogue", *_SINGLE)  # rewrites after which the collective is graphar's
_NO_GRAPHS = (
    "0 graphs: nothing was compiled since the pass was installed, or all of it came from Inductor's cache. Call"
    " graphar.enable() before the first call of the compiled model."
)
_NO_COLLECTIVES = (
    "No graph has a collective. torch.compile traces no call with async_op=True and no Work.wait(): such calls run"
    " between the graphs, and fullgraph=True refuses them. Leave async_op out, or use"
    " torch.distributed._functional_collectives."
)

# Results of the rewrites that are not named after the op they produce.
_BECAME = {
    "norm": "graphar::{op}_residual_rmsnorm",
    "epilogue": "one op with the pointwise operations behind it",
    "matmul": "one op with a matmul",
}


class Refused(Exception):
    """Nodes cannot be rewritten; the message says why."""


def expect(holds: object, why: str) -> None:
    if not holds:
        raise Refused(why)


def why_refused(check: Callable[..., object], *arguments: object) -> str:
    """Returns why a check raises Refused; an empty string if it does not."""
    try:
        check(*arguments)
    except Refused as refused:
        return str(refused)
    return ""


@dataclass(frozen=True)
class Entry:
    """One tensor of one collective that a rewrite found.

    Attributes:
        graph: the number of the graph, counted from 0 in the order of compilation.
        rewrite: the name of the rewrite.
        op: torch's name of the collective, with its reduction if it has one: ``all_reduce(sum)``.
        group: the name of the process group.
        shape: the shape of the input tensor; sizes that vary are symbols.
        dtype: the dtype of the input tensor.
        device: "cpu" or "cuda".
        why_left: why it was not rewritten; an empty string if it was.
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
        op = "reducescatter" if self.op.startswith("reduce_scatter") else "allreduce"
        became = _BECAME.get(self.rewrite, f"graphar::{self.rewrite}").format(op=op)
        became = f"{left}: {self.why_left}" if self.why_left else became
        what = f"{self.op} of [{shape}] {str(self.dtype).removeprefix('torch.')} on {self.device}"
        return f"graph {self.graph}: {what} in group {self.group!r}: {became}"


@dataclass(frozen=True)
class Break:
    """An op that may give other bits on another number of ranks, in a graph that was to be tensor-parallel invariant.

    Attributes:
        graph: the number of the graph, counted from 0 in the order of compilation.
        op: torch's name of the op, such as ``aten.bmm.default``.
        module: the name of the module that called it, such as ``layers.0.mlp``; an empty string if torch does not tell.
        why: what it does.
        depends_on_kernel: whether it is attention or another product of batches: each element of such a product is
            whole on one rank, and has the same bits if the kernel gives it the same whatever the number of heads.
    """

    graph: int
    op: str
    module: str
    why: str
    depends_on_kernel: bool

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module else ""
        return f"graph {self.graph}: {self.op}{where} may change bits: {self.why}"


@dataclass
class Report:
    """What a pass did with the collectives of each graph, in order. ``print(report)`` gives a line for each entry.

    Its first line counts graphs, the collectives that became graphar's, those that stayed torch's, and the fusions that
    were refused. Without collectives the second line says which calls torch does not trace. A graph that Inductor takes
    from its cache was rewritten earlier, and is not in the report.

    Attributes:
        entries: one for each tensor of each collective and each rewrite that found it. A collective can have several:
            an all-reduce before a norm that cannot be fused has one of "norm", with the reason, and one of
            "allreduce". A sum after a matmul and an all-gather before one also have one of "matmul".
        graphs: how many graphs the pass has seen.
        breaks: with ``tp_invariant=True``, the ops that may give other bits on another number of ranks; otherwise None.
    """

    entries: list[Entry] = field(default_factory=list)
    graphs: int = 0
    breaks: list[Break] | None = None

    @property
    def is_tp_invariant(self) -> bool:
        """Whether every graph so far has the same bits on 1, 2, 4 and 8 ranks, if kernels of attention do.

        False without ``tp_invariant=True``. What Inductor generates is not looked at, such as norms and losses.
        """
        return self.breaks is not None and self.graphs > 0 and all(op.depends_on_kernel for op in self.breaks)

    @property
    def rewritten(self) -> list[Entry]:
        """The entries whose rewrite was done."""
        return [entry for entry in self.entries if not entry.why_left]

    @property
    def left(self) -> list[Entry]:
        """The entries of collectives that stayed torch's; ``why_left`` says why."""
        return [entry for entry in self.entries if entry.why_left and entry.rewrite in _SINGLE]

    @property
    def refused(self) -> list[Entry]:
        """The entries of fusions that were not done; ``why_left`` says why. The collective may still be graphar's."""
        return [entry for entry in self.entries if entry.why_left and entry.rewrite not in _SINGLE]

    def __str__(self) -> str:
        if not self.graphs:
            return _NO_GRAPHS
        replaced = sum(entry.rewrite in _REPLACING for entry in self.rewritten)
        counts = (
            f"{_count(self.graphs, 'graph')}: {_count(replaced, 'collective')} became graphar's,"
            f" {len(self.left)} stayed torch's, {_count(len(self.refused), 'fusion')} refused"
        )
        lines = [counts, *(map(str, self.entries) if self.entries else [_NO_COLLECTIVES])]
        if self.breaks is not None:
            judged = sum(op.depends_on_kernel for op in self.breaks)
            invariance = f"not tensor-parallel invariant: {_count(len(self.breaks) - judged, 'op')} may change bits"
            if self.is_tp_invariant:
                condition = f", if {_count(judged, 'kernel')} of attention are" if judged else ""
                invariance = f"tensor-parallel invariant{condition}"
            lines += [invariance, *map(str, self.breaks)]
        return "\n".join(lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
