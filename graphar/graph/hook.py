"""Installs and removes a pass in Inductor's ``post_grad_custom_pre_pass``, which holds one pass.

Other libraries may have put passes there; a :class:`PassChain` then runs all of them. One of graphar's passes is always
there from the first graph with an op of graphar's on: a CompilePass, or else an OrderPass.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import config, custom_graph_pass
from torch.fx import Graph

from graphar.graph import collectives
from graphar.graph.passes import CompilePass

# The class of passes that are told whether the graph is for inference only; older torch versions lack it.
_Aware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)


class PassChain(_Aware):
    """Passes that run one after another."""

    def __init__(self, passes: list) -> None:
        self.passes = passes

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for inner in self.passes:
            if _Aware is not custom_graph_pass.CustomGraphPass and isinstance(inner, _Aware):
                inner(graph, is_inference)
            else:
                inner(graph)

    def uuid(self) -> list | None:
        """The passes' cache keys; None, which disables Inductor's cache, if a pass has no key."""
        keys = [inner.uuid() if isinstance(inner, custom_graph_pass.CustomGraphPass) else None for inner in self.passes]
        return keys if all(keys) else None


class OrderPass(custom_graph_pass.CustomGraphPass):
    """Keeps the calls of graphar's ops in the order of the program. A CompilePass does that, too."""

    def __call__(self, graph: Graph) -> None:
        collectives.keep_order(graph)

    def uuid(self) -> bytes:
        return custom_graph_pass.get_hash_for_files((collectives.__file__,))


def keep_order() -> None:
    """Installs an OrderPass behind the passes of others, if there is no pass of graphar's."""
    passes = _installed()
    if len(_of_others(passes)) == len(passes):
        _install([*passes, OrderPass()])


def install(new: CompilePass) -> None:
    """Installs ``new`` after the passes of others. It replaces an installed pass of graphar's, if there is one."""
    passes = _installed()
    new.uninstall = lambda: remove(new)
    new.replaced = next((old for old in passes if isinstance(old, CompilePass)), None)
    _install([*_of_others(passes), new])


def remove(removed: CompilePass) -> None:
    """Removes ``removed``, and installs the pass of graphar's that it replaced."""
    back = [removed.replaced if old is removed else old for old in _installed()]
    _install([old for old in back if old is not None])


def remove_all() -> None:
    """Removes every pass of graphar's."""
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
