"""Fuses a graphar all-gather with a matmul of the gathered rows.

x -- allgather -- views -+- mm, addmm or linear     becomes fused_allgather_matmul
                         +- other uses              take its second result

Of several matmuls, the one with the largest weight is fused. Where rows are reordered between the two, as in an
all-gather along another dimension than the first, the rows of the product are reordered instead.

torch's scaled products of e4m3 operands are fused if the scales of rows are gathered like the rows:

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

from graphar.graph import products, rows
from graphar.graph.collectives import CASTS, VIEWS, Collective, are_same, call, first, ours, reached, value
from graphar.graph.matmul import MANY_ROWS, check_kernel
from graphar.graph.places import Places, resolve
from graphar.graph.products import TRANSPOSES, Product
from graphar.graph.report import expect, why_refused
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.fp8_products import FP8
from graphar.numerics.partitions import BATCH_INVARIANT, TP_INVARIANT
from graphar.ops import allgather, allgather_matmul
from graphar.ops.register import op_of
from graphar.plan.algorithms import MATMUL_TYPES

_aten = torch.ops.aten
_MOVABLE = (*VIEWS, *TRANSPOSES, *CASTS)  # what may be done to a weight between the all-gather and the matmul


@dataclass(frozen=True)
class Gathered(Collective):
    """A graphar all-gather whose rows are multiplied."""

    matmuls: list[Product]  # by two-dimensional weights, in the graph's order
    # "auto": fused where the tuning table says that this is faster. BATCH_INVARIANT: nothing is, since no kernel
    # promises that a row's bits are the same in every call. TP_INVARIANT: everything that the op can multiply.
    partition: str

    def check(self, places: Places) -> None:
        (x,) = self.tensors()
        arguments = allgather.OP.read(self.node.args)
        expect(self.partition != BATCH_INVARIANT, "gathered rows have no batch-invariant matmul")
        kinds = TYPE_NAMES if self.partition == TP_INVARIANT else (*MATMUL_TYPES, FP8)
        expect(x.dtype in kinds, f"no matmul of {x.dtype} gathers its rows")
        expect(arguments["algorithm"] == "auto", "the gather names an algorithm")
        expect(arguments["axis"] == 0, "the rows are not gathered along the first axis")
        if x.device.type == "cuda":
            places.check_matmul(self.group)
        product = _choose(self)
        if self.partition == TP_INVARIANT:
            check_kernel(x, self.group, places)
        else:
            _check_faster(self, places, is_plain=not product.scales)

    def replace(self, graph: Graph) -> None:
        node, product = self.node, _choose(self)
        matmul, x, bias = product.node, product.a, product.bias
        path, others, before = rows.path(x), _has_others(product), _place(self, product)
        scales = rows.path(product.scales[0]) if product.scales else []
        for late in _late(self, product):
            before.prepend(late)
        with graph.inserting_before(before):
            arguments = allgather.OP.read(node.args)
            arguments = {name: argument for name, argument in arguments.items() if allgather_matmul.OP.takes(name)}
            arguments |= {"a": self.inputs[0], "w": product.stored_weight(graph), "bias": [bias] if bias else []}
            arguments |= {"gathered": others, "partition": self.partition}
            arguments |= product.scaling(graph, lambda scale: first(rows.origin(scale)))
            results = call(graph, allgather_matmul.OP.one, allgather_matmul.OP.write(arguments))
            results.stack_trace = matmul.stack_trace
            multiplied = call(graph, operator.getitem, (results, 0))
            whole = call(graph, operator.getitem, (results, 1)) if others else None
        with graph.inserting_before(matmul):
            matmul.replace_all_uses_with(rows.move(graph, x, multiplied))
        for old in reversed([*scales, *path[1:], matmul]):
            if not old.users:
                graph.erase_node(old)
        if whole:
            node.replace_all_uses_with(whole)
            if scales and scales[0].users:
                _share_scales(graph, scales[0], results)
        graph.erase_node(node)


def find(graph: Graph, partition: str) -> list[Gathered]:
    by_gather: dict[Node, list[Product]] = {}
    for node in graph.nodes:
        product = products.read(node) if node.users else None
        if product and _is_gather(gather := rows.origin(product.a)):
            by_gather.setdefault(gather, []).append(product)
    return [Gathered(**ours(gather, allgather.OP), matmuls=of, partition=partition) for gather, of in by_gather.items()]


def _is_gather(node: Node) -> bool:
    return op_of(node.target) is allgather.OP and not node.kwargs and node.meta["val"].ndim > 1


def _choose(gathered: Gathered) -> Product:
    """Returns the matmul of the largest weight that can be fused; if none can, raises why the largest cannot."""
    matmuls = sorted(gathered.matmuls, key=lambda product: -product.columns if isinstance(product.columns, int) else 0)
    reasons = [why_refused(_check_one, gathered, product) for product in matmuls]
    expect("" in reasons, reasons[0])
    return matmuls[reasons.index("")]


def _check_one(gathered: Gathered, product: Product) -> None:
    if product.scales:
        product.check_scales()
        are_gathered = _are_scales_gathered(gathered, product.a, product.scales[0])
        expect(are_gathered, "the scales are not gathered like the rows")
    expect(rows.are_all(product.a), "only some of the gathered rows are multiplied")
    expect(isinstance(product.columns, int), "the weight's number of rows varies")
    product.check_bias()
    _late(gathered, product)


def _share_scales(graph: Graph, gather: Node, results: Node) -> None:
    """Gives other products the scales that the op has gathered, if the op comes before these products."""
    scales = results.meta["val"][2]
    if are_same(gather.meta["val"].shape, scales.shape) and not any(user < results for user in gather.users):
        with graph.inserting_after(results):
            gather.replace_all_uses_with(call(graph, operator.getitem, (results, 2)))
        graph.erase_node(gather)


def _are_scales_gathered(gathered: Gathered, a: Node, scale: Node) -> bool:
    """Whether the scales of a product's rows are gathered like the rows: from the same rows of the same ranks."""
    gather = rows.origin(scale)
    if not (_is_gather(gather) and rows.are_in_order(a) and rows.are_in_order(scale)):
        return False
    of_scales, of_rows = [allgather.OP.read(node.args) for node in (gather, gathered.node)]
    sizes = [[value(size) if isinstance(size, Node) else size for size in of["sizes"]] for of in (of_scales, of_rows)]
    return all(of_scales[name] == of_rows[name] for name in ("communicator", "axis")) and are_same(*sizes)


def _check_faster(gathered: Gathered, places: Places, is_plain: bool) -> None:
    count = math.prod(gathered.node.meta["val"].shape[:-1])
    world_size = resolve(gathered.group).size()
    count = count if isinstance(count, int) else MANY_ROWS
    faster = places.table.allgather_matmul.faster(world_size, count, places.chip, is_plain)
    expect(faster != "none", "not known to be faster as one op")


def _has_others(product: Product) -> bool:
    """Whether something else than the matmul uses the gathered rows."""
    path = rows.path(product.a)
    return any(user not in (*path, product.node) for node in path for user in node.users)


def _place(gathered: Gathered, product: Product) -> Node:
    """Returns the node before which the op is inserted: the first node that needs one of its results."""
    return min(gathered.node.users) if _has_others(product) else product.node


def _late(gathered: Gathered, product: Product) -> list[Node]:
    """Returns the nodes after the op's place that its weight, bias and scales need. Raises Refused if one must stay."""
    place = _place(gathered, product)

    def late(nodes: Iterable[Node | None]) -> list[Node]:
        return [node for node in nodes if node is not None and (node is gathered.node or not node < place)]

    scales = [first(rows.origin(product.scales[0])), product.scales[1]] if product.scales else []
    nodes = reached(late([product.weight, product.bias, *scales]), lambda node: late(node.all_input_nodes))
    expect(all(node.target in _MOVABLE for node in nodes), "the weight is made after the rows are gathered")
    return sorted(nodes)
