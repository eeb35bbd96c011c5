"""Fuses a matmul with the graphar op that sums its result.

a, w -- mm -- views -- allreduce                     becomes fused_matmul_allreduce
a, w -- mm -- views -- allreduce_residual_rmsnorm    becomes fused_matmul_allreduce_residual_rmsnorm
a, w -- mm -- views -- reducescatter, of rows        becomes fused_matmul_reducescatter
... -- reducescatter_residual_rmsnorm                becomes fused_matmul_reducescatter_residual_rmsnorm

The options of the sum carry over. A sum with a codec is not fused. Where rows are reordered before the
sum, as in a reduce-scatter along another dimension than the first, the rows of ``a`` are reordered instead.

torch's scaled products of e4m3 operands are fused like mm.

With the partition "tp_invariant" the op also takes a bias, which it adds before it rounds:

bias -- div ranks -- addmm -- views -- allreduce     as DTensor writes it
a, w -- mm -- views -- allreduce -- add bias         as models write it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from graphar.graph import products, rows
from graphar.graph.collectives import VIEWS, Collective, first, ours, value
from graphar.graph.places import Places, resolve
from graphar.graph.products import Product, is_constant
from graphar.graph.report import Refused, expect
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.partitions import BATCH_INVARIANT, TP_INVARIANT
from graphar.ops import matmul_sums, norms, sums
from graphar.ops.register import Op, op_of
from graphar.plan import work
from graphar.plan.algorithms import MATMUL_TYPES
from graphar.plan.matmuls import COLUMNS, prefers_tiles

_aten = torch.ops.aten
_FUSED = {  # by op: the op with the matmul, whose arguments have the same names
    sums.SUM: matmul_sums.SUM,
    norms.NORM: norms.MATMUL_NORM,
    sums.SCATTER: matmul_sums.SCATTER,
    norms.SCATTERED_NORM: norms.MATMUL_SCATTERED_NORM,
}
MANY_ROWS = 1 << 14  # assumed for a number of rows that varies; the op decides again at each call
_QUOTIENTS = (_aten.div.Tensor, _aten.div.Scalar)


@dataclass(frozen=True)
class Summed(Collective):
    """A graphar op that sums the result of a matmul."""

    of: Op  # the op that sums: a key of _FUSED
    matmul: Product | None  # None: several are added before the sum
    # "auto": fused where the tuning table says that this is faster. BATCH_INVARIANT and TP_INVARIANT: wherever graphar
    # can, and never with torch's matmul.
    partition: str
    constant_weights: bool = False  # whether parameters that the graph only reads are constant weights

    @property
    def named(self) -> dict[str, Any]:
        """The arguments of the op that sums, by name."""
        return self.of.read(self.node.args)

    def check(self, places: Places) -> None:
        (x,), (total,), product = self.inputs, self.tensors(), self.matmul
        kinds = TYPE_NAMES if self.partition == TP_INVARIANT else MATMUL_TYPES
        expect(total.dtype in kinds, f"no matmul of {total.dtype} sums its tiles")
        if product is None:
            raise Refused("several products are added before the sum")
        if product.scales:
            expect(self.partition != TP_INVARIANT, "products with scales are not added as a tree")
            expect(not product.bias, "each rank adds a bias to its product")
            product.check_scales()
        columns = product.columns
        is_whole = isinstance(columns, int) and rows.origin(x) is product.node and rows.are_all(x)
        expect(is_whole, "the product is summed in another shape")
        path = rows.path(x)
        rest: list[Node] = []  # what else the sum takes, such as a residual
        map_arg(self.node.args[1:], rest.append)
        users = (*path, self.node, *_lengths(self))
        is_used_once = all(user in users for node in path for user in node.users)
        expect(set(rest).isdisjoint(path) and is_used_once, "the product has further uses")
        is_free = self.named.get("algorithm", "auto") == "auto" and self.named.get("axis", 0) == 0
        expect(is_free, "the sum names an algorithm or an axis")
        if self.partition == TP_INVARIANT:
            _check_tree(self, product, places)
        elif self.partition == BATCH_INVARIANT:
            expect(total.is_cuda, "graphar's matmul needs a GPU")
            expect(columns % COLUMNS == 0, f"graphar's matmul needs a multiple of {COLUMNS} columns, not {columns}")
            places.check_matmul(self.group)
        else:
            if total.is_cuda and product.scales:
                places.check_matmul(self.group)
            _check_faster(self, product, places)

    def replace(self, graph: Graph) -> None:
        node, op, path, product = self.node, _FUSED[self.of], rows.path(self.inputs[0]), self.matmul
        assert product
        with graph.inserting_before(path[-1].next):
            a = rows.move(graph, path[-1], product.a)
            scaling = product.scaling(graph, lambda x: x if products.is_number(x) else rows.move(graph, path[-1], x))
        for length in _lengths(self):
            length.replace_input_with(path[-1], a)
        with graph.inserting_before(node):
            w = product.stored_weight(graph)
            # Every product in e4m3 is batch-invariant.
            added = scaling | {"a": a, "w": w, "partition": "auto" if scaling else self.partition}
            arguments = {name: argument for name, argument in (self.named | added).items() if op.takes(name)}
            if product.bias and not scaling:
                arguments["bias"] = [first(product.bias)]
            if self.constant_weights and op.takes("constant_weight") and is_constant(w):
                arguments["constant_weight"] = True
        node.target, node.args = op.one, op.write(arguments)
        for erased in reversed(path):
            graph.erase_node(erased)
        if self.partition == TP_INVARIANT:
            _take_bias(graph, node, op)


def find(graph: Graph, partition: str, constant_weights: bool) -> list[Summed]:
    return [summed for node in graph.nodes if (summed := read(node, partition, constant_weights))]


def read(node: Node, partition: str, constant_weights: bool = False) -> Summed | None:
    """Returns the op of ``node`` with the matmul before it; None if they cannot be fused."""
    op = op_of(node.target)
    if op is None or op not in _FUSED or node.kwargs:
        return None
    arguments = op.read(node.args)
    if arguments.get("codec") or arguments.get("output", "like_input") != "like_input":
        return None
    matmul = _before(first(node))
    if not _is_product(matmul, partition == TP_INVARIANT):
        return None
    how = {"partition": partition, "constant_weights": constant_weights}
    return Summed(**ours(node, op), **how, of=op, matmul=products.read(matmul))


def _check_faster(summed: Summed, product: Product, places: Places) -> None:
    count, columns = value(product.node).shape
    count = count if isinstance(count, int) else MANY_ROWS
    owns_rows = summed.of.takes("sizes") or bool(summed.named.get("epilogue"))
    op = work.MATMUL_REDUCESCATTER if owns_rows else work.MATMUL_ALLREDUCE
    fused = work.Product(op, (count,), columns, format=product.format())
    is_faster = prefers_tiles(fused, places.table.matmul, places.chip, resolve(summed.group).size())
    expect(is_faster, "not known to be faster as one op")


def _check_tree(summed: Summed, product: Product, places: Places) -> None:
    """Raises Refused, on every rank or on none, unless graphar can add the products as a tree of leaves."""
    ranks, length, bias = resolve(summed.group).size(), value(product.weight).shape[0], product.bias
    is_divided = bias and bias.target in _QUOTIENTS and not bias.kwargs and bias.args[1:] == (ranks,)
    is_part = not bias or (is_divided and value(bias).ndim == 1)
    expect(is_part, "each rank adds something else than its part of a bias to its product")
    is_last = not bias or (not summed.named.get("epilogue") and _FUSED[summed.of].takes("bias"))
    expect(is_last and not product.node.kwargs, "the product is scaled, or an epilogue or a norm follows its bias")
    expect(ranks in (1, 2, 4, 8), f"a tree of {LEAVES} leaves is for 1, 2, 4 or 8 ranks, not {ranks}")
    are_whole = isinstance(length, int) and length % (LEAVES // ranks) == 0
    expect(are_whole, f"{length} columns on each of {ranks} ranks are not {LEAVES} leaves of equal length")
    is_padded = any(operand.target is _aten.constant_pad_nd.default for operand in (product.a, product.weight))
    expect(not is_padded, "torch has padded the columns")
    check_kernel(summed.tensors()[0], summed.group, places)


def check_kernel(x: torch.Tensor, group: object, places: Places) -> None:
    """Raises Refused if graphar's kernels cannot multiply tensors like ``x`` in a fixed order."""
    if x.device.type != "cpu":
        expect(x.dtype in MATMUL_TYPES, f"no kernel multiplies {x.dtype}")
        places.check_matmul(group)


def _take_bias(graph: Graph, total: Node, op: Op) -> None:
    """Gives a fused sum the bias that is added to it, if nothing else uses the sum."""
    arguments = op.read(total.args)
    if not op.takes("bias") or arguments["bias"] or arguments["epilogue"] or len(total.users) != 1:
        return
    add = next(iter(total.users))
    if add.target is not _aten.add.Tensor or add.kwargs:
        return
    kind, others = value(total), [operand for operand in add.args if operand is not total]
    if not all(isinstance(operand, Node) and operand < total for operand in others):
        return
    if [(value(operand).dtype, *value(operand).shape) for operand in others] == [(kind.dtype, kind.shape[-1])]:
        total.args = op.write(arguments | {"bias": others})
        add.replace_all_uses_with(total)
        graph.erase_node(add)


def _before(node: Node) -> Node:
    """Returns the node that ``node`` is a view of, or whose rows ``node`` has in another order."""
    while (before := rows.origin(node)).target in VIEWS:
        node = first(before)
    return before


def _is_product(node: Node, may_be_biased: bool = False) -> bool:
    """Whether a node is a matmul, or adds matmuls."""
    if node.target is _aten.add.Tensor:
        return all(isinstance(operand, Node) and _is_product(_before(operand)) for operand in node.args)
    return node.target in (_aten.mm.default, *products.SCALED, *[_aten.addmm.default] * may_be_biased)


def _lengths(summed: Summed) -> list[Node]:
    """Returns the users that read only the length of the summed tensor's first axis, such as a reduce-scatter's."""
    (x,) = summed.inputs
    return [user for user in x.users if user.target is _aten.sym_size.int and user.args[1] == 0]
