"""Ops that move whole rows: what they do to the rows of a matrix, they can do to the rows of its product instead.

An all-gather along another dimension than the first is an all-gather along the first, and then such ops:

all_gather -- split -+- getitem 0 -+- cat, dim 1 -- view of two dimensions -- mm
                     +- getitem 1 -+

A reduce-scatter along another dimension has them before it. In a batch of one they leave the rows in order.
"""

from __future__ import annotations

import math
import operator
from typing import cast

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from graphar.graph.collectives import VIEWS, are_same, arguments, call, first, reached, sources, value

_aten = torch.ops.aten
_ALONG = (_aten.split.Tensor, _aten.slice.Tensor, _aten.cat.default)  # ops along the dimension ``dim``


def origin(node: Node) -> Node:
    """Returns the node whose rows ``node`` has, in some order; ``node`` itself if no op that moves rows made it."""
    if not _moves_rows(node):
        return node
    origins = {origin(source) for source in sources(node)}
    return origins.pop() if len(origins) == 1 else node


def path(node: Node) -> list[Node]:
    """Returns the nodes from the origin of ``node`` to ``node``, both included, in the graph's order."""
    first = origin(node)
    return sorted(reached([node], lambda other: [] if other is first else sources(other)))


def are_all(node: Node) -> bool:
    """Whether ``node`` has as many rows as its origin."""
    mine, whole = node.meta["val"], origin(node).meta["val"]
    return statically_known_true(mine.numel() * whole.shape[-1] == whole.numel() * mine.shape[-1])


def are_in_order(node: Node) -> bool:
    """Whether ``node`` has all rows of its origin in their order."""
    return are_all(node) and _first(node) is not None


def move(graph: Graph, node: Node, new: Node) -> Node:
    """Adds the ops that made ``node`` from its origin again, for the rows of ``new``, shaped like the origin."""
    sizes, columns = node.meta["val"].shape[:-1], new.meta["val"].shape[-1]
    if are_in_order(node) and can_reshape(sizes):
        return reshape(graph, new, sizes)
    moved = {origin(node): new}
    for step in path(node)[1:]:
        target, (x, *rest) = step.target, cast(tuple, map_arg(step.args, lambda old: moved.get(old, old)))
        if target in VIEWS:
            target, rest = _aten.reshape.default, [[*rest[0][:-1], columns]]
        moved[step] = call(graph, target, (x, *rest))
        moved[step].stack_trace = step.stack_trace
    return moved[node]


def can_reshape(sizes: torch.Size) -> bool:
    """Whether `reshape` can give rows that shape: at most one size may be symbolic."""
    return sum(not isinstance(size, int) for size in sizes) <= 1


def reshape(graph: Graph, x: Node, sizes: torch.Size) -> Node:
    """Returns ``x`` with the leading ``sizes``: itself, what it is a view of, or a new view."""
    columns, seen = value(x).shape[-1], x
    while not are_same(value(seen).shape, (*sizes, columns)):
        if seen.target not in VIEWS:
            known = [size if isinstance(size, int) else -1 for size in sizes]
            return call(graph, _aten.reshape.default, (x, [*known, columns]))
        seen = first(seen)
    return seen


def _first(node: Node) -> int | torch.SymInt | None:
    """Returns the row of its origin at which ``node`` starts; None if it does not have consecutive rows."""
    if origin(node) is node:
        return 0
    before = sources(node)
    firsts = [begin for source in before if (begin := _first(source)) is not None]
    leading = before[0].meta["val"].shape[: _dim(node)] if node.target in _ALONG else ()
    if len(firsts) < len(before) or not all(statically_known_true(size == 1) for size in leading):
        return None
    if node.target is _aten.cat.default:
        ends = [first + _count(source.meta["val"]) for first, source in zip(firsts, before, strict=True)]
        return firsts[0] if all(map(statically_known_true, map(operator.eq, ends, firsts[1:]))) else None
    if node.target is operator.getitem:
        return firsts[0] + sum(map(_count, before[0].meta["val"][: node.args[1]]))
    if node.target is not _aten.slice.Tensor:
        return firsts[0]
    named = arguments(node)
    start = named.get("start") or 0
    start = start.meta["val"] if isinstance(start, Node) else start
    if named.get("step", 1) != 1 or not statically_known_true(start >= 0):
        return None
    return firsts[0] + start * math.prod(value(node).shape[_dim(node) + 1 : -1])


def _count(x: torch.Tensor) -> int | torch.SymInt:
    return math.prod(x.shape[:-1])


def _dim(node: Node) -> int:
    return arguments(node).get("dim", 0) % value(sources(node)[0]).ndim


def _moves_rows(node: Node) -> bool:
    if node.target is operator.getitem:
        return first(node).target is _aten.split.Tensor and _moves_rows(first(node))
    if node.kwargs or node.target not in (*_ALONG, *VIEWS):
        return False
    before, after = [source.meta["val"] for source in sources(node)], node.meta["val"]
    if min(x.ndim for x in before) == 0:
        return False
    if node.target in _ALONG:
        return len({x.ndim for x in before}) == 1 and _dim(node) < before[0].ndim - 1
    # Of rows without columns, a view may change the number.
    same = after.ndim > 0 and statically_known_true(before[0].shape[-1] == after.shape[-1])
    return same and statically_known_true(after.shape[-1] > 0)
