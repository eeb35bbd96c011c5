"""Ops that move whole rows: what they do to the rows of a matrix, they can do to the rows of its product instead.

An all-gather along another dimension than the first is an all-gather along the first, and then such ops:

all_gather -- split -+- getitem 0 -+- cat, dim 1 -- view of two dimensions -- mm
                     +- getitem 1 -+

A reduce-scatter along another dimension has them before it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from graphar.graph.collectives import VIEWS, call

_aten = torch.ops.aten
_DIMS = {_aten.split.Tensor: 2, _aten.cat.default: 1}  # by op, the position of the dimension among the arguments


def origin(node: Node) -> Node:
    """Returns the node whose rows ``node`` has, in some order; ``node`` itself if no op that moves rows made it."""
    if not _moves_rows(node):
        return node
    origins = {origin(one) for one in _sources(node)}
    return origins.pop() if len(origins) == 1 else node


def path(node: Node) -> list[Node]:
    """Returns the nodes from the origin of ``node`` to ``node``, both included, in the graph's order."""
    first = origin(node)
    found, pending = {first, node}, [node]
    while pending:
        if (last := pending.pop()) is not first:
            pending += [one for one in _sources(last) if one not in found]
            found.update(_sources(last))
    return sorted(found)


def are_all(node: Node) -> bool:
    """Whether ``node`` has as many rows as its origin."""
    mine, whole = node.meta["val"], origin(node).meta["val"]
    return statically_known_true(mine.numel() * whole.shape[-1] == whole.numel() * mine.shape[-1])


def move(graph: Graph, node: Node, new: Node) -> Node:
    """Adds the ops that made ``node`` of its origin to the graph, for the rows of ``new``; returns the result.

    ``new`` has the shape of the origin, but for the last dimension.
    """
    moved = {origin(node): new}
    for one in path(node)[1:]:
        x, *rest = map_arg(one.args, lambda old: moved.get(old, old))
        if one.target in VIEWS:
            target, rest = _aten.reshape.default, [[*rest[0][:-1], new.meta["val"].shape[-1]]]
        else:
            target = one.target
        moved[one] = called(graph, target, (x, *rest))
        moved[one].stack_trace = one.stack_trace
    return moved[node]


def called(graph: Graph, target: Callable, arguments: tuple) -> Node:
    """Adds a call to the graph, and its fake result."""
    return call(graph, target, arguments, target(*map_arg(arguments, lambda node: node.meta["val"])))


def _sources(node: Node) -> list[Node]:
    """Returns the nodes whose rows ``node`` has."""
    first = node.args[0]
    return [first] if isinstance(first, Node) else list(first)


def _moves_rows(node: Node) -> bool:
    if node.target is operator.getitem:
        return node.args[0].target is _aten.split.Tensor and _moves_rows(node.args[0])
    if node.kwargs or node.target not in (*_DIMS, *VIEWS):
        return False
    before = [one.meta["val"] for one in _sources(node)]
    ndim = before[0].ndim
    if node.target in _DIMS:
        at = _DIMS[node.target]
        dim = node.args[at] if len(node.args) > at else 0
        return all(one.ndim == ndim for one in before) and dim % max(1, ndim) < ndim - 1
    after = node.meta["val"]
    # Of rows without columns, a view may change the number.
    same = ndim and after.ndim and statically_known_true(before[0].shape[-1] == after.shape[-1])
    return bool(same) and statically_known_true(after.shape[-1] > 0)
