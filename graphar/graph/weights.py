"""The weights of a graph's matmuls: as layers store them, and which of them are constant."""

from __future__ import annotations

from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import Graph, Node

from graphar.graph.collectives import VIEWS, call
from graphar.graph.nodes import first, operands

_aten = torch.ops.aten
_TRANSPOSES = (_aten.t.default, _aten.transpose.int, _aten.permute.default)
_SAME = (_aten.view.default, *_TRANSPOSES, _aten.detach.default, _aten.alias.default)  # other views of the same memory

# By matmul, the positions of its arguments: the rows, the weight, and the bias.
MATMULS: dict[Any, tuple[int | None, ...]] = {
    _aten.mm.default: (0, 1, None),
    _aten.addmm.default: (1, 2, 0),
    _aten.linear.default: (0, 1, 2),
}

_OF_TRAINING = ("primals", "tangents")  # how names of inputs begin in graphs with gradients


def operands_of(matmul: Node) -> list[Any]:
    """Returns the nodes of a matmul's rows, weight and bias; the bias may be None."""
    return [None if at is None or at >= len(matmul.args) else matmul.args[at] for at in MATMULS[matmul.target]]


def stored(graph: Graph, weight: Node) -> Node:
    """Returns the weight as torch.nn.Linear stores it, [out, in]: the source of a transpose, or a new transpose."""
    permuted = weight.target is _aten.permute.default and list(operands(weight)[1]) == [1, 0]
    if permuted or weight.target is _aten.t.default:
        return first(weight)
    return call(graph, _aten.permute.default, (weight, [1, 0]), weight.meta["val"].t())


def is_constant(weight: Node) -> bool:
    """Whether ``weight`` is a tensor of a module, or a view of one, that nothing in a graph for inference writes.

    Other inputs may be results of the kernel before the graph, and in training an optimizer writes the weights.
    """
    while weight.target in _SAME:
        weight = first(weight)
    return (weight.op == "get_attr" or _is_static(weight)) and _is_only_read(weight)


def _is_static(node: Node) -> bool:
    """Whether an input has the same address in every call, as parameters, buffers and other tensors of modules have."""
    context = TracingContext.try_get()
    known = context.fw_metadata if context else None
    inputs = node.graph.find_nodes(op="placeholder")
    # With tokens, which order side effects, the metadata counts inputs differently.
    if known is None or known.tokens or any(str(placeholder.target).startswith(_OF_TRAINING) for placeholder in inputs):
        return False
    return node in inputs and inputs.index(node) in (known.static_input_indices or ())


def _is_only_read(node: Node) -> bool:
    for user in node.users:
        if user.target in (*_SAME, *VIEWS) and not _is_only_read(user):
            return False
        op = user.target
        if user.op != "output" and (not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable):
            return False
    return True
