"""Installs and removes a pass in Inductor's ``post_grad_custom_pre_pass``, which holds one pass.

Other libraries may have put passes there; a :class:`PassChain` then runs all of them. One of graphar's passes is always
there from the first graph with an op of graphar's on: a CompilePass, or else an OrderPass.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import config, custom_graph_pass
from torch.fx import Graph

from graphar.graph import order
from graphar.graph.passes import CompilePass

# The class of passes that are told whether the graph is for inference only; older torch versions lack it.
_Aware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass)


class PassChain(_Aware):
    """Passes that run one after another."""

    def __init__(self, passes: list) -> None:
        self.passes = passes

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        for one in self.passes:
            if _Aware is not custom_graph_pass.CustomGraphPass and isinstance(one, _Aware):
                one(graph, is_inference)
            else:
                one(graph)

    def uuid(self) -> list | None:
        """The passes' cache keys; None, which disables Inductor's cache, if a pass has no key."""
        keys = [one.uuid() if isinstance(one, custom_graph_pass.CustomGraphPass) else None for one in self.passes]
        return keys if all(keys) else None


class OrderPass(custom_graph_pass.CustomGraphPass):
    """Keeps the calls of graphar's ops in the order of the program. A CompilePass does that, too."""

    def __call__(self, graph: Graph) -> None:
        order.keep(graph)

    def uuid(self) -> bytes:
        return custom_graph_pass.get_hash_for_files((order.__file__,))


def keep_order() -> None:
    """Installs an OrderPass behind the passes of others, if there is no pass of graphar's."""
    found = _installed()
    if len(_of_others(found)) == len(found):
        _install([*found, OrderPass()])


def install(own: CompilePass) -> None:
    """Installs ``own`` after the passes of others. It replaces an installed pass of graphar's, if there is one."""
    found = _installed()
    own.uninstall = lambda: remove(own)
    own.replaced = next((one for one in found if isinstance(one, CompilePass)), None)
    _install([*_of_others(found), own])


def remove(own: CompilePass) -> None:
    """Removes ``own``, and installs the pass of graphar's that it replaced."""
    back = [own.replaced if one is own else one for one in _installed()]
    _install([one for one in back if one is not None])


def remove_all() -> None:
    """Removes every pass of graphar's."""
    _install(_of_others(_installed()))


def _of_others(passes: list) -> list:
    return [one for one in passes if not isinstance(one, (CompilePass, OrderPass))]


def _installed() -> list:
    found = config.post_grad_custom_pre_pass
    if isinstance(found, PassChain):
        return list(found.passes)
    if isinstance(found, (list, tuple)):
        return list(found)
    return [] if found is None else [found]


def _install(passes: list) -> None:
    config.post_grad_custom_pre_pass = PassChain(passes) if len(passes) > 1 else next(iter(passes), None)
