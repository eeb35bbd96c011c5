"""graphar::allreduce whose sum goes on into a matmul gets that one's weight to prefetch.

allreduce -- norm, activation, ... -- mm
                                      |
weight, an input of the graph -- t ---+      allreduce(x) becomes allreduce_prefetch(x, weight)

So does graphar::fused_matmul_allreduce. Which weight it is changes no result: ranks may differ in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphar.graph import order
from graphar.graph.collectives import Collective
from graphar.graph.places import Places
from graphar.ops import fused
from graphar.runtime.catalogue import TYPE_NAMES
from graphar.runtime.prefetch import LARGEST_NBYTES

_aten, _ops = torch.ops.aten, torch.ops.graphar
_FUSED = getattr(_ops, fused.OP).default
_CALLS = {  # by op, what it is called, its arguments where it has nothing to prefetch, and which is the communicator
    _ops.allreduce.default: ("allreduce", 4, 1),
    _FUSED: (fused.OP, 8, 3),
}
_WEIGHTS = {  # by matmul, which argument is the weight; what it multiplies comes before it
    _aten.mm.default: 1,
    _aten.addmm.default: 2,
    _aten.linear.default: 1,
    _aten.matmul.default: 1,
    _FUSED: 1,
}
_VIEWS = (
    _aten.t.default,
    _aten.transpose.int,
    _aten.permute.default,
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.detach.default,
    _aten.alias.default,
)


@dataclass(frozen=True)
class Followed(Collective):
    """An all-reduce whose sum goes on into a matmul with the input ``weight`` of the graph, perhaps seen otherwise."""

    weight: Node


def find(graph: Graph) -> list[Followed]:
    return [found for node in graph.nodes if (found := _followed(node))]


def why_not(followed: Followed, places: Places) -> str:
    total = followed.node.meta["val"]
    if total.dtype not in TYPE_NAMES:
        return f"no kernel adds {total.dtype}"
    if statically_known_true(total.numel() * total.element_size() > LARGEST_NBYTES):
        return f"the sum has more than {LARGEST_NBYTES} bytes"
    return ""


def replace(graph: Graph, followed: Followed, places: Places) -> None:
    node = followed.node
    if node.target is _FUSED:
        node.args = (*node.args, followed.weight)
        return
    x, *call = node.args
    with graph.inserting_before(node):
        new = graph.call_function(_ops.allreduce_prefetch.default, (x, followed.weight, *call))
    new.meta = node.meta
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _followed(node: Node) -> Followed | None:
    name, count, communicator = _CALLS.get(node.target, ("", 0, 0))
    if not name or len(node.args) != count or node.kwargs or not (weight := _next_weight(node)):
        return None
    group = node.args[communicator] or torch.distributed.group.WORLD.group_name
    return Followed(node, name, [[node]], group, "", weight)


def _next_weight(total: Node) -> Node | None:
    """The weight of the first matmul that needs ``total``, if there is one before another collective that does."""
    reached, node = {total}, total
    while (node := node.next).op != "output":
        if reached.isdisjoint(node.all_input_nodes):
            continue
        at = _WEIGHTS.get(node.target)
        if at and node.args[at - 1] in reached and (weight := _input_behind(node.args[at])) and weight < total:
            return weight
        if order.is_collective(node):
            return None
        reached.add(node)
    return None


def _input_behind(weight: Node) -> Node | None:
    """The graph's input that ``weight`` is, or a view of; or nothing."""
    while weight.target in _VIEWS:
        weight = weight.args[0]
    return weight if weight.op in ("placeholder", "get_attr") else None
