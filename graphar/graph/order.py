"""Keeps the collectives of a graph in their order, which must be the same on every rank.

Inductor orders nodes by the data they need, and by sizes and timings, which may differ from rank to rank. Of torch's
collectives it keeps the order; graphar's ops are to it like any others. One that needs nothing of the collective before
it is therefore given that one's result as a further argument, which it does not read. One of torch's that stays behind
one of graphar's, and needs nothing of it, cannot be tied so.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from graphar.ops import (
    epilogue_fused,
    epilogue_fused_scatter,
    epilogue_ops,
    epilogue_scatter,
    fused,
    fused_norm,
    fused_scatter,
    norm_ops,
    ops,
    prefetch_ops,
    quantized,
    quantized_scatter,
    scatter,
)

_wait = torch.ops._c10d_functional.wait_tensor.default
_AFTER: dict[Callable, Callable] = {}  # by op: the same with the results that it comes after


def _define(name: str, call: str, implementation: Callable, returns: str = "Tensor") -> None:
    after = f"{name}_after"
    ops.library.define(f"{after}(Tensor x, Tensor[] after, {call}) -> {returns}")
    for key in ("CPU", "CUDA"):
        ops.library.impl(after, lambda x, after, *call: implementation(x, *call), key)
    op = getattr(torch.ops.graphar, name).default
    torch.library.register_fake(f"graphar::{after}", lambda x, after, *call: op(x, *call), lib=ops.library)
    _AFTER[op] = getattr(torch.ops.graphar, after).default


_define("allreduce", ops._CALL, ops.run_process)
_define("allreduce_prefetch", f"Tensor prefetch, {ops._CALL}", prefetch_ops._allreduce)
_define("epilogue_allreduce", epilogue_ops._CALL, epilogue_ops._allreduce)
_define(norm_ops.OP, f"Tensor residual, Tensor weight, {norm_ops._CALL}", norm_ops._process, "(Tensor, Tensor)")
_define("quantized_allreduce", quantized._CALL, quantized._allreduce)
_define("epilogue_reducescatter", epilogue_scatter.CALL, epilogue_scatter.run_process)
_define("reducescatter", scatter._CALL, scatter.run_process)
_define("quantized_reducescatter", quantized_scatter.CALL, quantized_scatter._reducescatter)
_define("allgather", scatter._CALL, scatter._allgather)
_define(fused.OP, fused.CALL, fused.run_process)
_define(fused_norm.OP, fused_norm.CALL, fused_norm.run_process, "(Tensor, Tensor)")
_define(fused_scatter.OP, fused_scatter.CALL, fused_scatter.run_process)
_define(epilogue_fused.NAME, epilogue_fused.CALL, epilogue_fused.run_process)
_define(epilogue_fused_scatter.NAME, epilogue_fused_scatter.CALL, epilogue_fused_scatter.run_process)


def is_collective(node: Node) -> bool:
    """Whether it is one of graphar's ops, or the wait for one of torch's collectives."""
    return node.target in _AFTER or node.target is _wait


def keep(graph: Graph) -> None:
    """Ties each of graphar's ops in a graph to the collective before it, where its input does not."""
    last = None
    for node in list(graph.nodes):
        if node.target in _AFTER:
            last = node if last is None or _needs(node, last) else _tie(graph, node, last)
        elif node.target is _wait:
            last = node


def _tie(graph: Graph, node: Node, last: Node) -> Node:
    x, *call = node.args
    with graph.inserting_before(node):
        tied = graph.call_function(_AFTER[node.target], (x, [_tensor(graph, last)], *call))
    tied.meta = node.meta
    node.replace_all_uses_with(tied)
    graph.erase_node(node)
    return tied


def _tensor(graph: Graph, node: Node) -> Node:
    """A result of a collective: where it has several, the first."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return node
    first = graph.call_function(operator.getitem, (node, 0))
    first.meta["val"] = value[0]
    return first


def _needs(node: Node, earlier: Node) -> bool:
    """Whether ``node`` needs the result of ``earlier``, directly or not."""
    seen, pending = {node}, [node]
    while pending:
        for one in pending.pop().all_input_nodes:
            if one is earlier:
                return True
            if one not in seen and earlier < one:
                seen.add(one)
                pending.append(one)
    return False
