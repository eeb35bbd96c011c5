"""What keeps a graph from giving the same bits on 1, 2, 4 and 8 ranks.

It looks at every op that is left when matmuls and sums have been fused, so that an op which no rewrite knows is found,
too. tp_invariance.py then writes the matmuls in which it has found nothing wrong.
"""

from __future__ import annotations

import re

import torch
from torch.fx import Graph, Node

from graphar.errors import Reason
from graphar.graph import collectives, products, tp_invariance
from graphar.graph.collectives import CASTS, VIEWS, Collective, arguments, first, operands, reached, value
from graphar.graph.matmul import Matmul
from graphar.graph.places import Places
from graphar.graph.products import MATMULS
from graphar.graph.report import Break
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops.register import Op, op_of

_aten = torch.ops.aten
_CALLS = ("all_reduce", "reduce_scatter_tensor")
_BATCHED = ("bmm", "baddbmm")
_PRODUCTS = (  # torch's other ops that add products
    *("addbmm", "convolution", "convolution_backward", "dot", "matmul", "mkldnn_rnn_layer", "vdot"),
    *("_grouped_mm", "_int_mm", "_scaled_grouped_mm", "_scaled_mm", "_scaled_mm_v2"),
)
_LOOKUPS = (_aten.embedding.default, _aten.index.Tensor, _aten.gather.default)
_CONSTANTS = (_aten.full.default, _aten.scalar_tensor.default, _aten.full_like.default, _aten.zeros_like.default)
_ROOT = re.compile(r"^L\['\w+'\](\[\d+\])?\.?")  # what torch calls the module that is compiled
_OF_HEADS = "its kernel may add in an order that depends on the number of heads"
_OF_TOKENS = "it adds the tokens of this rank alone, such as the gradient of a norm's weight"
_OF_ONE_RANK = "one rank does not tell whether the layer is row-parallel: call graphar.nn.make_tp_invariant first"


def find(graph: Graph, places: Places, number: int) -> list[Break]:
    """Returns the ops of a graph that break the chain of invariance; ``number`` is the graph's number in the report."""
    tree, broken = Matmul(TP_INVARIANT), []
    biased = {node: tp_invariance.why_not_added(first(node), places) for node in tp_invariance.bias_gradients(graph)}
    divided = any(op.takes("sizes") for node in graph.nodes if (op := op_of(node.target)))
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        why = biased[node] if node in biased else _why(node, tree, places)
        if divided and node not in biased and node.target is _aten.sum.dim_IntList and tp_invariance.is_over_rows(node):
            why = why or _OF_TOKENS
        if why:
            broken.append(Break(number, str(node.target), _module(node), why, why == _OF_HEADS))
    return broken


def _why(node: Node, tree: Matmul, places: Places) -> Reason | None:
    name = _name(node)
    if "_attention" in name or name in _BATCHED:
        return _OF_HEADS
    if name in _PRODUCTS:
        return "graphar has no such product"
    if node.target in MATMULS:
        alone = _OF_ONE_RANK if places.count == 1 else None
        matmul = products.read(node)
        return tp_invariance.why_not(matmul, places) or alone if node.users and matmul else None
    if node.target is _aten.sum.dim_IntList and _is_product_in_parts(first(node)):
        return "torch has written a matmul as products and a sum"
    op = op_of(node.target)
    return _why_ours(op, node, tree, places) if op else _why_torchs(node, places)


def _why_ours(op: Op, node: Node, tree: Matmul, places: Places) -> Reason | None:
    options = op.read(node.args)
    if "partition" in options:
        return None if options["partition"] == TP_INVARIANT else f"its partition is {options['partition']!r}"
    if op.name.startswith(("allgather", "cross_entropy")) or options.get("order") == "tree" or _is_lookup(first(node)):
        return None
    summed = tree.read(node)
    return (summed and tree.why_not(summed, places)) or _why_sum(node)


def _why_torchs(node: Node, places: Places) -> Reason | None:
    """Returns why a collective of torch's adds in another order; None if it is exact, as a maximum is."""
    collective = _of_torch(node)
    if not collective or collective.reduction in ("min", "max", "band", "bor", "bxor"):
        return None
    if all(map(_is_lookup, collective.inputs)):
        return None
    return collectives.why_not(collective, places) or collectives.why_no_sum(collective) or _why_sum(node)


def _of_torch(node: Node) -> Collective | None:
    name = _name(node).removesuffix("_coalesced") if getattr(node.target, "namespace", "") == "_c10d_functional" else ""
    return collectives.read(node, name) if name in _CALLS else None


def _why_sum(node: Node) -> Reason | None:
    """Returns why a sum over ranks that follows no matmul adds in another order."""
    before = reached([node], lambda other: other.all_input_nodes)
    if any((collective := _of_torch(other)) and collective.reduction == "max" for other in before):
        return "it sums over features that ranks divide, such as a vocabulary"
    return "it sums what is no product of a matmul"


def _is_lookup(node: Node, masked: bool = False) -> bool:
    """Whether a node holds rows of a table, and zeros where another rank has the row."""
    if node.target in (*VIEWS, *CASTS, _aten.clone.default):
        return _is_lookup(first(node), masked)
    if node.target in (_aten.index_put.default, _aten.masked_fill.Scalar):
        return _is_lookup(first(node), True)
    if node.target is _aten.where.self:
        named = arguments(node)
        rest = [named[name] for name in ("self", "other") if named[name].target not in _CONSTANTS]
        return len(rest) == 1 and _is_lookup(rest[0], True)
    if node.target is _aten.mul.Tensor:
        x, mask = operands(node)
        return isinstance(mask, Node) and _is_mask(mask) and _is_lookup(x, True)
    return masked and node.target in _LOOKUPS


def _is_mask(node: Node) -> bool:
    while node.target in (*VIEWS, *CASTS, _aten.unsqueeze.default):
        node = first(node)
    return value(node).dtype == torch.bool


def _is_product_in_parts(node: Node) -> bool:
    parts = (_aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
    return node.target is _aten.mul.Tensor and all(isinstance(x, Node) and x.target in parts for x in node.args)


def _name(node: Node) -> str:
    """Returns the name of a torch op or of a higher-order op."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return getattr(node.target, "__name__", "") if isinstance(node.target, torch._ops.HigherOrderOperator) else ""


def _module(node: Node) -> str:
    """Returns the name of the module that a node comes from; an empty string if torch does not tell."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = [entry[0] for entry in stack.values()]
    return _ROOT.sub("", path[-1]) if path else ""
