"""A matmul whose result goes into a sum of graphar's becomes one op with it, where that is known to be faster.

a, w -- mm -- views -- allreduce                     becomes fused_matmul_allreduce
a, w -- mm -- views -- allreduce_residual_rmsnorm    becomes fused_matmul_allreduce_residual_rmsnorm
a, w -- mm -- views -- reducescatter, of rows        becomes fused_matmul_reducescatter

So do the first and the last with an epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphar.graph.collectives import Collective
from graphar.graph.places import Places
from graphar.matmul import tiles
from graphar.ops import epilogue_fused, epilogue_fused_scatter, fused, fused_norm, fused_scatter, norm_ops
from graphar.runtime.catalogue import MATMUL_TYPES

_aten, _ops = torch.ops.aten, torch.ops.graphar
_SUM, _NORM = _ops.allreduce.default, getattr(_ops, norm_ops.OP).default
_FUSED = {  # by op: the one with the matmul, whose arguments have the same names
    _SUM: getattr(_ops, fused.OP).default,
    _NORM: getattr(_ops, fused_norm.OP).default,
    _ops.reducescatter.default: getattr(_ops, fused_scatter.OP).default,
    _ops.epilogue_allreduce.default: getattr(_ops, epilogue_fused.NAME).default,
    _ops.epilogue_reducescatter.default: getattr(_ops, epilogue_fused_scatter.NAME).default,
}
_DEFAULTS = {"bias": None, "partition": "auto", "num_partitions": None, "codec": ""}
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_MANY_ROWS = 1 << 14  # where their number varies: the op then goes by it


@dataclass(frozen=True)
class Product(Collective):
    """A sum of graphar's, perhaps with what follows, of a matmul's result.

    Attributes:
        path: from the matmul to what the op takes, both included: views.
        call: what the op is given, by name.
    """

    path: list[Node]
    call: dict[str, object]


def find(graph: Graph) -> list[Product]:
    return [found for node in graph.nodes if (found := _product(node))]


def why_not(product: Product, places: Places) -> str:
    (total,), (a, weight) = product.tensors(), product.path[0].args
    if total.dtype not in MATMUL_TYPES:
        return f"no matmul of {total.dtype} sums its tiles"
    if sum(len(node.users) for node in product.path) > len(product.path) + len(_lengths(product)):
        return "the product has further uses"
    if product.call.get("algorithm", "auto") != "auto" or product.call.get("axis", 0) != 0:
        return "the sum is to be made in another way"
    columns = weight.meta["val"].shape[1]
    if not isinstance(columns, int) or not statically_known_true(total.shape[-1] == columns) or _rows(product) is None:
        return "the product is summed in another shape"
    rows = a.meta["val"].shape[0]
    rows = rows if isinstance(rows, int) else _MANY_ROWS
    scattered = product.node.target not in (_SUM, _NORM)
    if not tiles.pays(places.resolve(product.group).size(), rows, columns, scattered):
        return "not known to be faster as one op"
    return ""


def replace(graph: Graph, product: Product, places: Places) -> None:
    node, op, rows = product.node, _FUSED[product.node.target], _rows(product)
    for length in _lengths(product):
        length.replace_input_with(product.path[-1], rows)
    with graph.inserting_before(node):
        w = _transposed(graph, product.path[0].args[1])
        given = {**product.call, "a": rows, "w": w, **_DEFAULTS}
        new = graph.call_function(op, tuple(given[name] for name in _names(op) if name in given))
    new.meta = node.meta
    node.replace_all_uses_with(new)
    for one in reversed([*product.path, node]):
        graph.erase_node(one)


def _product(node: Node) -> Product | None:
    """The op with the matmul before it, or nothing."""
    if node.target not in _FUSED or node.kwargs:
        return None
    path = [node.args[0]]
    while path[0].target in _VIEWS:
        path.insert(0, path[0].args[0])
    if path[0].target is not _aten.mm.default:
        return None
    call = dict(zip(_names(node.target), node.args, strict=False))
    group = call["communicator"] or torch.distributed.group.WORLD.group_name
    name = node.target.name().removeprefix("graphar::")
    return Product(node, name, [[node]], group, "", path, call)


def _lengths(product: Product) -> list[Node]:
    """Uses of what is summed that ask for its first length alone, as that of a reduce-scatter's parts."""
    return [user for user in product.path[-1].users if user.target is _aten.sym_size.int and user.args[1] == 0]


def _names(op: torch._ops.OpOverload) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def _rows(product: Product) -> Node | None:
    """The matmul's first operand in a shape with which the op gives what is summed in its shape; or nothing."""
    leading = product.tensors()[0].shape[:-1]
    a = product.path[0].args[0]
    while not _is(a.meta["val"].shape[:-1], leading):
        if a.target not in _VIEWS or not _is(a.args[0].meta["val"].shape[-1:], a.meta["val"].shape[-1:]):
            return None
        a = a.args[0]
    return a


def _is(sizes: torch.Size, others: torch.Size) -> bool:
    return len(sizes) == len(others) and all(
        statically_known_true(size == other) for size, other in zip(sizes, others, strict=True)
    )


def _transposed(graph: Graph, weight: Node) -> Node:
    """The weight as torch.nn.Linear stores it: what the matmul sees transposed, or that seen so."""
    if weight.target is _aten.permute.default and list(weight.args[1]) == [1, 0]:
        return weight.args[0]
    if weight.target is _aten.t.default:
        return weight.args[0]
    node = graph.call_function(_aten.permute.default, (weight, [1, 0]))
    node.meta["val"] = weight.meta["val"].t()
    return node
