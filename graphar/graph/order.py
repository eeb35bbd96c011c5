"""Keeps the collectives of a graph in order, which must be the same on every rank.

Inductor orders nodes by the data they need, and by sizes and timings, which may differ from rank to rank. It keeps the
order of torch's collectives, but not of graphar's ops. An op that does not depend on the previous collective therefore
takes that collective's result as ``after``, which it does not read. Limit: torch's collectives have no such argument,
so one that follows an op of graphar's without depending on it may still be reordered.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from graphar.graph.collectives import call, reached
from graphar.ops.register import op_of

_wait = torch.ops._c10d_functional.wait_tensor.default


def keep(graph: Graph) -> None:
    """Makes each of graphar's ops depend on the previous collective, through ``after`` if its inputs do not.

    Call it after all other passes.
    """
    last = None
    for node in list(graph.nodes):
        if op := op_of(node.target):
            if last is not None and not _needs(node, last):
                with graph.inserting_before(node):
                    node.args = op.write(op.read(node.args) | {"after": [_tensor(graph, last)]})
            # Inductor cuts lists to the lengths in the traced call: it would drop an ``after``.
            node.meta.pop("eager_input_vals", None)
            last = node
        elif node.target is _wait:
            last = node


def _tensor(graph: Graph, node: Node) -> Node:
    """Returns the result of a collective, or the first of several."""
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return node
    return call(graph, operator.getitem, (node, 0), value[0])


def _needs(node: Node, earlier: Node) -> bool:
    """Whether ``node`` needs the result of ``earlier``, directly or not."""
    return earlier in reached([node], lambda other: [x for x in other.all_input_nodes if x is earlier or earlier < x])
