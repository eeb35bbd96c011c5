"""Fuses a matmul with the graphar op that sums its result.

a, w -- mm -- views -- allreduce                     becomes fused_matmul_allreduce
a, w -- mm -- views -- allreduce_residual_rmsnorm    becomes fused_matmul_allreduce_residual_rmsnorm
a, w -- mm -- views -- reducescatter, of rows        becomes fused_matmul_reducescatter

The options of the sum carry over. A sum with a codec or a prefetch is not fused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphar.graph.collectives import VIEWS, Collective, call
from graphar.graph.places import Places
from graphar.numerics.partitions import BATCH_INVARIANT
from graphar.ops import (
    allreduce,
    allreduce_rmsnorm,
    matmul_allreduce,
    matmul_allreduce_rmsnorm,
    matmul_reducescatter,
    reducescatter,
)
from graphar.ops.register import Op, op_of
from graphar.plan.algorithms import MATMUL_ARCH, MATMUL_TYPES
from graphar.plan.matmuls import COLUMNS, prefers_tiles

_aten = torch.ops.aten
_FUSED = {  # by op: the op with the matmul, whose arguments have the same names
    allreduce.OP: matmul_allreduce.OP,
    allreduce_rmsnorm.OP: matmul_allreduce_rmsnorm.OP,
    reducescatter.OP: matmul_reducescatter.OP,
}
_MANY_ROWS = 1 << 14  # assumed for a number of rows that varies; the op decides again at each call


@dataclass(frozen=True)
class Product(Collective):
    """A graphar op that sums the result of a matmul."""

    of: Op  # the op that sums: a key of _FUSED
    path: list[Node]  # the nodes from the matmul to the op's input, both included; all but the matmul are views
    call: dict[str, object]  # the op's arguments, by name


@dataclass(frozen=True)
class Matmul:
    """Fuses where the tuning table says that this is faster, or wherever graphar's matmul can multiply."""

    batch_invariant: bool = False  # whether to fuse wherever graphar's matmul can, and never to take torch's

    def find(self, graph: Graph) -> list[Product]:
        return [found for node in graph.nodes if (found := _product(node))]

    def why_not(self, product: Product, places: Places) -> str:
        (total,), (a, weight) = product.tensors(), product.path[0].args
        if total.dtype not in MATMUL_TYPES:
            return f"no matmul of {total.dtype} sums its tiles"
        if sum(len(node.users) for node in product.path) > len(product.path) + len(_lengths(product)):
            return "the product has further uses"
        if product.call.get("algorithm", "auto") != "auto" or product.call.get("axis", 0) != 0:
            return "the sum names an algorithm or an axis"
        columns = weight.meta["val"].shape[1]
        same_columns = isinstance(columns, int) and statically_known_true(total.shape[-1] == columns)
        if not same_columns or _rows(product) is None:
            return "the product is summed in another shape"
        if self.batch_invariant:
            return _why_not_own(product, places, columns)
        rows = a.meta["val"].shape[0]
        rows = rows if isinstance(rows, int) else _MANY_ROWS
        scattered = product.of is reducescatter.OP or bool(product.call.get("epilogue"))
        world_size, policy = places.resolve(product.group).size(), places.table.matmul
        if not prefers_tiles(policy, places.sms, world_size, rows, columns, scattered):
            return "not known to be faster as one op"
        return ""

    def replace(self, graph: Graph, product: Product, places: Places) -> None:
        node, op, rows = product.node, _FUSED[product.of], _rows(product)
        for length in _lengths(product):
            length.replace_input_with(product.path[-1], rows)
        with graph.inserting_before(node):
            w = _transposed(graph, product.path[0].args[1])
            given = {name: one for name, one in product.call.items() if op.takes(name)}
            given |= {"a": rows, "w": w} | ({"partition": BATCH_INVARIANT} if self.batch_invariant else {})
            new = graph.call_function(op.one, op.write(given))
        new.meta = node.meta
        node.replace_all_uses_with(new)
        for one in reversed([*product.path, node]):
            graph.erase_node(one)


def _why_not_own(product: Product, places: Places, columns: int) -> str:
    """Returns why graphar's matmul cannot multiply, or an empty string; the same on every rank."""
    if product.tensors()[0].device.type != "cuda":
        return "graphar's matmul needs a GPU"
    if columns % COLUMNS:
        return f"graphar's matmul needs a multiple of {COLUMNS} columns, not {columns}"
    return places.why_not_arch(product.group, MATMUL_ARCH)


def _product(node: Node) -> Product | None:
    """Returns the op of ``node`` with the matmul before it; None if they cannot be fused."""
    op = op_of(node.target)
    if op not in _FUSED or node.kwargs:
        return None
    given = op.read(node.args)
    if given.get("codec") or given.get("prefetch") or given.get("output", "like_input") != "like_input":
        return None
    path = [node.args[0]]
    while path[0].target in VIEWS:
        path.insert(0, path[0].args[0])
    if path[0].target is not _aten.mm.default:
        return None
    group = given["communicator"] or torch.distributed.group.WORLD.group_name
    return Product(node, op.name, [[node]], group, "", op, path, given)


def _lengths(product: Product) -> list[Node]:
    """Returns the users that read only the length of the summed tensor's first axis, such as a reduce-scatter's."""
    return [user for user in product.path[-1].users if user.target is _aten.sym_size.int and user.args[1] == 0]


def _rows(product: Product) -> Node | None:
    """Returns the matmul's first operand with the leading shape of the summed tensor; None if no view has it."""
    leading = product.tensors()[0].shape[:-1]
    a = product.path[0].args[0]
    while not _is(a.meta["val"].shape[:-1], leading):
        if a.target not in VIEWS or not _is(a.args[0].meta["val"].shape[-1:], a.meta["val"].shape[-1:]):
            return None
        a = a.args[0]
    return a


def _is(sizes: torch.Size, others: torch.Size) -> bool:
    return len(sizes) == len(others) and all(
        statically_known_true(size == other) for size, other in zip(sizes, others, strict=True)
    )


def _transposed(graph: Graph, weight: Node) -> Node:
    """Returns the weight as torch.nn.Linear stores it, [out, in]: the source of a transpose, or a new transpose."""
    if weight.target is _aten.t.default or (weight.target is _aten.permute.default and list(weight.args[1]) == [1, 0]):
        return weight.args[0]
    return call(graph, _aten.permute.default, (weight, [1, 0]), weight.meta["val"].t())
