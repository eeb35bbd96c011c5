"""Gives an all-reduce whose sum goes into a matmul the matmul's weight to prefetch into L2.

allreduce -- norm, activation, ... -- mm
                                      |
weight, an input of the graph -- t ---+      allreduce(x) gets prefetch=[weight]

The rewrite applies to graphar::allreduce and graphar::fused_matmul_allreduce. A prefetch changes no result, so ranks
may prefetch different weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphar.graph import order, scaled
from graphar.graph.collectives import Collective, ours
from graphar.graph.places import Places
from graphar.graph.weights import input_behind
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.ops import matmul_allreduce
from graphar.ops.register import op_of

_aten = torch.ops.aten
_WEIGHTS = {  # by matmul, the position of the weight among the arguments; the other operand is the argument before it
    _aten.mm.default: 1,
    _aten.addmm.default: 2,
    _aten.linear.default: 1,
    _aten.matmul.default: 1,
    torch.ops.graphar.linear.default: 1,
    matmul_allreduce.OP.one: 1,
    **dict.fromkeys(scaled.TARGETS, 1),
}


@dataclass(frozen=True)
class Followed(Collective):
    """An all-reduce whose sum goes into a matmul; ``weight`` is the graph's input behind the matmul's weight."""

    weight: Node


def find(graph: Graph) -> list[Followed]:
    return [found for node in graph.nodes if (found := _followed(node))]


def why_not(followed: Followed, places: Places) -> str:
    total, largest = followed.node.meta["val"], places.table.prefetch.largest_nbytes
    if total.dtype not in TYPE_NAMES:
        return f"no kernel adds {total.dtype}"
    if statically_known_true(total.numel() * total.element_size() > largest):
        return f"the sum has more than {largest} bytes"
    return ""


def replace(graph: Graph, followed: Followed, places: Places) -> None:
    node, op = followed.node, op_of(followed.node.target)
    node.args = op.write(op.read(node.args) | {"prefetch": [followed.weight]})


def _followed(node: Node) -> Followed | None:
    op = op_of(node.target)
    if op is None or not op.takes("prefetch") or node.kwargs:
        return None
    call = op.read(node.args)
    if any(call[name] for name in ("codec", "epilogue", "prefetch")) or not (weight := _next_weight(node)):
        return None
    return Followed(**ours(node, op), weight=weight)


def _next_weight(total: Node) -> Node | None:
    """Returns the weight of the first matmul that depends on ``total``; None if a dependent collective comes first."""
    reached, node = {total}, total
    while (node := node.next).op != "output":
        if reached.isdisjoint(node.all_input_nodes):
            continue
        at = _WEIGHTS.get(node.target)
        if at and node.args[at - 1] in reached and (weight := input_behind(node.args[at])) and weight < total:
            return weight
        if order.is_collective(node):
            return None
        reached.add(node)
    return None
