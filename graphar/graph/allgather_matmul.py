"""Fuses a graphar all-gather with a matmul of the gathered rows.

x -- allgather -- views -+- mm, addmm or linear     becomes fused_allgather_matmul
                         +- other uses              take its second result

Of several matmuls, the one with the largest weight is fused. Where rows are reordered between the two, as in an
all-gather along another dimension than the first, the rows of the product are reordered instead.

torch's scaled products of e4m3 operands (scaled.py) are fused if the scales of rows are gathered like the rows:

a -- allgather ------- views -+- _scaled_mm         becomes fused_allgather_matmul with scales
a_scale -- allgather - views -+
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphar.errors import Reason
from graphar.graph import rows, scaled
from graphar.graph.collectives import CASTS, VIEWS, Collective, are_same, call, ours, reached
from graphar.graph.matmul import MANY_ROWS, TRANSPOSES, why_no_kernel
from graphar.graph.nodes import value
from graphar.graph.places import Places
from graphar.graph.scaled import ScaledProduct
from graphar.graph.weights import MATMULS, operands_of, stored
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.fp8_products import FP8
from graphar.numerics.partitions import BATCH_INVARIANT, TP_INVARIANT
from graphar.ops import allgather, allgather_matmul
from graphar.ops.register import op_of
from graphar.plan.algorithms import MATMUL_TYPES

_aten = torch.ops.aten
_MATMULS = (*MATMULS, *scaled.TARGETS)
_MOVABLE = (*VIEWS, *TRANSPOSES, *CASTS)  # what may be done to a weight between the all-gather and the matmul


@dataclass(frozen=True)
class Gathered(Collective):
    """A graphar all-gather whose rows are multiplied."""

    matmuls: list[Node]  # by two-dimensional weights, in the graph's order


@dataclass(frozen=True)
class AllgatherMatmul:
    """Fuses where the tuning table says that this is faster.

    With the partition BATCH_INVARIANT nothing is fused: no kernel promises that a row's bits are the same in every
    call. With TP_INVARIANT everything that the op can multiply is fused.
    """

    partition: str = "auto"

    def find(self, graph: Graph) -> list[Gathered]:
        by_gather: dict[Node, list[Node]] = {}
        for node in graph.nodes:
            if node.target in _MATMULS and node.users and _is_gather(gather := rows.origin(_operands(node)[0])):
                by_gather.setdefault(gather, []).append(node)
        return [Gathered(**ours(gather, allgather.OP), matmuls=matmuls) for gather, matmuls in by_gather.items()]

    def why_not(self, gathered: Gathered, places: Places) -> Reason | None:
        (x,) = gathered.tensors()
        arguments = allgather.OP.read(gathered.node.args)
        if self.partition == BATCH_INVARIANT:
            return "gathered rows have no batch-invariant matmul"
        if x.dtype not in (TYPE_NAMES if self.partition == TP_INVARIANT else (*MATMUL_TYPES, FP8)):
            return f"no matmul of {x.dtype} gathers its rows"
        if arguments["algorithm"] != "auto":
            return "the gather names an algorithm"
        if arguments["axis"] != 0:
            return "the rows are not gathered along the first axis"
        if x.device.type == "cuda" and (why := places.why_no_matmul(gathered.group)):
            return why
        _, why = _choose(gathered)
        if self.partition == TP_INVARIANT:
            return why or why_no_kernel(x, gathered.group, places)
        return why or _why_not_faster(gathered, places)

    def replace(self, graph: Graph, gathered: Gathered, places: Places) -> None:
        node, (matmul, _) = gathered.node, _choose(gathered)
        x, weight, bias = _operands(matmul)
        path, others, first = rows.path(x), _has_others(matmul), _place(gathered, matmul)
        scales = rows.path(with_scales.a_scale) if (with_scales := scaled.read(matmul)) else []
        for late in _late(gathered, matmul) or ():
            first.prepend(late)
        with graph.inserting_before(first):
            w = weight if matmul.target is _aten.linear.default else stored(graph, weight)
            arguments = allgather.OP.read(node.args)
            arguments = {name: argument for name, argument in arguments.items() if allgather_matmul.OP.takes(name)}
            arguments |= {"a": gathered.inputs[0], "w": w, "bias": [bias] if bias else [], "gathered": others}
            arguments |= {"partition": self.partition} | _scaling(graph, matmul)
            results = rows.called(graph, allgather_matmul.OP.one, allgather_matmul.OP.write(arguments))
            results.stack_trace = matmul.stack_trace
            product = call(graph, operator.getitem, (results, 0), results.meta["val"][0])
            whole = call(graph, operator.getitem, (results, 1), results.meta["val"][1]) if others else None
        with graph.inserting_before(matmul):
            matmul.replace_all_uses_with(rows.move(graph, x, product))
        for old in reversed([*scales, *path[1:], matmul]):
            if not old.users:
                graph.erase_node(old)
        if whole:
            node.replace_all_uses_with(whole)
            if scales and scales[0].users:
                _share_scales(graph, scales[0], results)
        graph.erase_node(node)


def _is_gather(node: Node) -> bool:
    return op_of(node.target) is allgather.OP and not node.kwargs and node.meta["val"].ndim > 1


def _operands(matmul: Node) -> list:
    """Returns the nodes of a matmul's rows, weight and bias; the bias may be None."""
    if product := scaled.read(matmul):
        return [product.a, product.weight, product.bias]
    return operands_of(matmul)


def _columns(matmul: Node) -> int | torch.SymInt:
    return matmul.meta["val"].shape[-1]


def _choose(gathered: Gathered) -> tuple[Node, Reason | None]:
    """Returns the matmul of the largest weight that can be fused; if none can, the largest, and why it cannot."""
    matmuls = sorted(gathered.matmuls, key=lambda node: -columns if isinstance(columns := _columns(node), int) else 0)
    reasons = [_why_not_one(gathered, matmul) for matmul in matmuls]
    chosen = reasons.index(None) if None in reasons else 0
    return matmuls[chosen], reasons[chosen]


def _why_not_one(gathered: Gathered, matmul: Node) -> Reason | None:
    (x, _, bias), columns, product = _operands(matmul), _columns(matmul), scaled.read(matmul)
    if product and (why := product.why_not or _why_no_own_scale(gathered, product)):
        return why
    if not rows.are_all(x):
        return "only some of the gathered rows are multiplied"
    if not isinstance(columns, int):
        return "the weight's number of rows varies"
    kind = (value(bias).dtype, *value(bias).shape) if bias else (value(matmul).dtype, columns)
    if (matmul.kwargs and not product) or kind != (value(matmul).dtype, columns):
        return "something else than a bias is added to the product"
    if _late(gathered, matmul) is None:
        return "the weight is made after the rows are gathered"
    return None


def _share_scales(graph: Graph, gather: Node, results: Node) -> None:
    """Gives other products the scales that the op has gathered, if the op comes before these products."""
    scales = results.meta["val"][2]
    if are_same(gather.meta["val"].shape, scales.shape) and not any(user < results for user in gather.users):
        with graph.inserting_after(results):
            gather.replace_all_uses_with(call(graph, operator.getitem, (results, 2), scales))
        graph.erase_node(gather)


def _why_no_own_scale(gathered: Gathered, product: ScaledProduct) -> Reason | None:
    """Returns why the op cannot gather the scales of a product's rows."""
    of_scales = rows.origin(product.a_scale)
    are_gathered = _is_gather(of_scales) and _are_alike(of_scales, gathered.node)
    if not (are_gathered and all(map(rows.are_in_order, (product.a, product.a_scale)))):
        return "the scales are not gathered like the rows"
    return None


def _are_alike(gather: Node, other: Node) -> bool:
    """Whether two nodes gather the same rows of the same ranks."""
    these, others = [allgather.OP.read(node.args) for node in (gather, other)]
    sizes = [[size.meta["val"] if isinstance(size, Node) else size for size in of["sizes"]] for of in (these, others)]
    where = [(of["communicator"], of["axis"]) for of in (these, others)]
    return where[0] == where[1] and are_same(*sizes)


def _scaling(graph: Graph, matmul: Node) -> dict[str, object]:
    """Returns the arguments for a product's scales: the scales of this rank's rows, and of the weight."""
    if (product := scaled.read(matmul)) is None:
        return {}
    return product.options(graph, lambda x: rows.origin(x).args[0])


def _why_not_faster(gathered: Gathered, places: Places) -> Reason | None:
    count = math.prod(gathered.node.meta["val"].shape[:-1])
    world_size = places.resolve(gathered.group).size()
    count = count if isinstance(count, int) else MANY_ROWS
    if places.table.allgather_matmul.faster(world_size, count, places.chip) == "none":
        return "not known to be faster as one op"
    return None


def _has_others(matmul: Node) -> bool:
    """Whether something else than ``matmul`` uses the gathered rows."""
    path = rows.path(_operands(matmul)[0])
    return any(user not in (*path, matmul) for node in path for user in node.users)


def _place(gathered: Gathered, matmul: Node) -> Node:
    """Returns the node before which the op is inserted: the first node that needs one of its results."""
    return min(gathered.node.users) if _has_others(matmul) else matmul


def _late(gathered: Gathered, matmul: Node) -> list[Node] | None:
    """Returns the nodes that make the weight and the bias too late, in order; None if they cannot be made earlier."""
    first = _place(gathered, matmul)

    def late(nodes: Iterable[Node | None]) -> list[Node]:
        return [node for node in nodes if node is not None and (node is gathered.node or not node < first)]

    product = scaled.read(matmul)
    scales = [rows.origin(product.a_scale).args[0], product.w_scale] if product else []
    nodes = reached(late([*_operands(matmul)[1:], *scales]), lambda node: late(node.all_input_nodes))
    return sorted(nodes) if all(node.target in _MOVABLE for node in nodes) else None
