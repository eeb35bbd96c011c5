"""CompilePass, which runs the rewrites over a graph, and how passes are installed and removed.

Inductor's ``post_grad_custom_pre_pass`` holds one pass. Other libraries may have put passes there; a :class:`PassChain`
then runs all of them. One of graphar's passes is always there from the first graph with an op of graphar's on: a
CompilePass, or else an OrderPass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch._inductor import config, custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph

from graphar.graph import allgather_matmul, collectives, epilogue, matmul, norm, tp_invariance
from graphar.graph.collectives import ALLGATHER, ALLREDUCE, REDUCESCATTER, Collective
from graphar.graph.places import Places
from graphar.graph.report import Entry, Report, why_refused
from graphar.numerics.partitions import BATCH_INVARIANT, TP_INVARIANT

Find = Callable[[Graph], Sequence[Collective]]  # returns what a rewrite may replace in a graph
REWRITES: dict[str, Find] = {  # by name; "matmul" is tried after these, on the ops of graphar's that they make
    "norm": norm.find,
    "epilogue": epilogue.find,
    "allreduce": partial(collectives.find, op=ALLREDUCE),
    "reducescatter": partial(collectives.find, op=REDUCESCATTER),
    "allgather": partial(collectives.find, op=ALLGATHER),
}
OPTIONAL = {"epilogue"}  # off by default: changes the bits of a model that already uses graphar's ops
# A norm that is fused with a sum is not rounded between them, as it is in training and in a graph of one rank.
_OPTIONAL_IN_TREES = {"epilogue", "norm"}
_NEEDED_BY_TREES = {"allreduce", "reducescatter", "matmul"}

# A rewritten graph depends on the rewrites, and on the schemas and choices of the ops that it calls.
_SOURCES = tuple(sorted(map(str, Path(__file__).parents[1].rglob("*.py"))))

# The class of passes that are told whether the graph is for inference only; older torch versions lack it.
_Aware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


class PassChain(_Aware):
    def __init__(self, passes: list) -> None:
        self.passes = passes

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for inner in self.passes:
            if _Aware is not CustomGraphPass and isinstance(inner, _Aware):
                inner(graph, is_inference)
            else:
                inner(graph)

    def uuid(self) -> list | None:
        """The passes' cache keys; None, which disables Inductor's cache, if a pass has no key."""
        keys = [inner.uuid() if isinstance(inner, CustomGraphPass) else None for inner in self.passes]
        return keys if all(keys) else None


class OrderPass(CustomGraphPass):
    """Keeps the calls of graphar's ops in the order of the program. A CompilePass does that, too."""

    def __call__(self, graph: Graph) -> None:
        collectives.keep_order(graph)

    def uuid(self) -> bytes:
        return get_hash_for_files((collectives.__file__,))


class CompilePass(CustomGraphPass):
    """The Inductor pass that :func:`graphar.compile_pass` makes.

    As a context manager, it removes itself from Inductor's configuration at the end of the block.

    Attributes:
        report: for each graph, which collectives were replaced, and why the others were not.
        on: the optional rewrites that are switched on.
        off: the rewrites that are switched off.
        batch_invariant: whether matmuls are fused so that the bits of a row do not depend on the number of rows.
        tp_invariant: whether matmuls are written so that their bits do not depend on the number of ranks.
        constant_weights: whether parameters that a graph only reads are constant weights of fused matmuls.
        replaced: the pass of graphar's that :func:`graphar.enable` replaced, and that is installed again after this.
    """

    def __init__(
        self, off: Iterable[str], on: Iterable[str], batch_invariant: bool, constant_weights: bool, tp_invariant: bool
    ) -> None:
        self._optional = _OPTIONAL_IN_TREES if tp_invariant else OPTIONAL
        self.off = _check_names("off", off, (*REWRITES, "matmul"))
        self.on = _check_names("on", on, sorted(self._optional))
        self.batch_invariant, self.constant_weights = batch_invariant, constant_weights
        self.tp_invariant = tp_invariant
        if tp_invariant and batch_invariant:
            raise ValueError("compile_pass: take tp_invariant=True or batch_invariant=True, which are two partitions")
        if tp_invariant and (needed := self.off & _NEEDED_BY_TREES):
            raise ValueError(
                f"compile_pass: tp_invariant=True needs the rewrites that off={sorted(needed)} switches off"
            )
        partition = TP_INVARIANT if tp_invariant else BATCH_INVARIANT if batch_invariant else "auto"
        sums = partial(matmul.find, partition=partition, constant_weights=constant_weights)
        gathers = partial(allgather_matmul.find, partition=partition)
        self._rewrites: list[tuple[str, Find]] = [*REWRITES.items(), ("matmul", sums), ("matmul", gathers)]
        self.report = Report(breaks=[] if tp_invariant else None)
        self.replaced: CompilePass | None = None
        self._places = Places()

    def __call__(self, graph: Graph) -> None:
        """Rewrites a graph in place; its nodes must have fake tensors in ``meta["val"]``."""
        collectives.simplify(graph)
        for name, find in self._rewrites:
            for collective in find(graph) if name not in self._optional - self.on else ():
                why_left = "turned off" if name in self.off else why_refused(collective.check, self._places)
                for x in collective.tensors():
                    shape = tuple(size if isinstance(size, int) else str(size) for size in x.shape)
                    where = (self.report.graphs, name, str(collective), str(collective.group))
                    self.report.entries.append(Entry(*where, shape, x.dtype, x.device.type, why_left))
                if not why_left:
                    collective.replace(graph)
        if self.report.breaks is not None:
            self.report.breaks += tp_invariance.rewrite(graph, self._places, self.report.graphs)
        collectives.keep_order(graph)
        self.report.graphs += 1

    def uuid(self) -> bytes:
        """The pass's part of Inductor's cache key: its source, its options, and where the ranks are."""
        return get_hash_for_files(_SOURCES, f"{self._options()} {self._places.describe()}")

    def __deepcopy__(self, memo: dict) -> CompilePass:
        """Returns itself: ``torch.compile(mode=...)`` copies Inductor's configuration, but groups cannot be copied."""
        return self

    def _options(self) -> str:
        options = f"on={sorted(self.on)}, off={sorted(self.off)}, batch_invariant={self.batch_invariant}"
        return f"{options}, tp_invariant={self.tp_invariant}, constant_weights={self.constant_weights}"

    def __repr__(self) -> str:
        return f"CompilePass({self._options()}, graphs={self.report.graphs})"

    def __enter__(self) -> CompilePass:
        return self

    def __exit__(self, *_) -> None:
        remove(self)


def _check_names(option: str, wanted: Iterable[str], known: Iterable[str]) -> frozenset[str]:
    names = frozenset([wanted] if isinstance(wanted, str) else wanted)
    if unknown := names - set(known):
        raise ValueError(f"compile_pass: {option} must name rewrites, of {', '.join(known)}, got {sorted(unknown)}")
    return names


def keep_order() -> None:
    """Installs an OrderPass behind the passes of others, if there is no pass of graphar's."""
    passes = _installed()
    if len(_of_others(passes)) == len(passes):
        _install([*passes, OrderPass()])


def install(new: CompilePass) -> None:
    """Installs ``new`` after the passes of others. It replaces an installed pass of graphar's, if there is one."""
    passes = _installed()
    new.replaced = next((old for old in passes if isinstance(old, CompilePass)), None)
    _install([*_of_others(passes), new])


def remove(removed: CompilePass) -> None:
    """Removes ``removed``, and installs the pass of graphar's that it replaced."""
    back = [removed.replaced if old is removed else old for old in _installed()]
    _install([old for old in back if old is not None])


def remove_all() -> None:
    _install(_of_others(_installed()))


def _of_others(passes: list) -> list:
    return [item for item in passes if not isinstance(item, (CompilePass, OrderPass))]


def _installed() -> list:
    passes = config.post_grad_custom_pre_pass
    if isinstance(passes, PassChain):
        return list(passes.passes)
    if isinstance(passes, (list, tuple)):
        return list(passes)
    return [] if passes is None else [passes]


def _install(passes: list) -> None:
    config.post_grad_custom_pre_pass = PassChain(passes) if len(passes) > 1 else next(iter(passes), None)
