"""Writes the matmuls of a graph so that their bits depend neither on rows nor on columns nor on the number of ranks.

It runs after all other rewrites. Matmuls that are summed over ranks are fused ops by then, with the partition
"tp_invariant" (matmul.py), and so are those of gathered rows (allgather_matmul.py). The others become graphar::linear:

a, w -- mm, addmm or linear          becomes graphar::linear, in the order of K
dy, of a matmul -- sum over rows     becomes graphar::linear of ones and dy, as 8 leaves of rows: a bias's gradient
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphar.errors import Reason
from graphar.graph import products, rows
from graphar.graph.collectives import VIEWS, arguments, call, first, first_size, value
from graphar.graph.matmul import TRANSPOSES, why_no_kernel
from graphar.graph.places import Places
from graphar.graph.products import MATMULS, Product, stored
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.leaf_tree import LEAVES
from graphar.ops.register import op_of

_aten = torch.ops.aten
LINEAR = torch.ops.graphar.linear.default


def add_in_order(graph: Graph, places: Places) -> None:
    """Rewrites every matmul and every bias's gradient of a graph that no other rewrite has taken."""
    for total in bias_gradients(graph):
        if not why_not_added(first(total), places):
            _replace_bias_gradient(graph, total)
    for matmul in matmuls(graph):
        if matmul.node.users and not why_not(matmul, places):
            _replace_matmul(graph, matmul)


def matmuls(graph: Graph) -> list[Product]:
    """Returns the matmuls of a graph without scales."""
    return [product for node in graph.nodes if node.target in MATMULS and (product := products.read(node))]


def why_not(matmul: Product, places: Places) -> Reason | None:
    """Returns why a matmul cannot become graphar::linear."""
    dtype, bias = value(matmul.a).dtype, matmul.bias
    is_bias = bias is None or (value(bias).dtype, value(bias).ndim) == (dtype, 1)
    if matmul.node.kwargs or not is_bias or value(matmul.weight).ndim != 2:
        return "something else than a bias is added to the product"
    return why_not_added(matmul.a, places)


def why_not_added(a: Node, places: Places) -> Reason | None:
    """Returns why graphar::linear cannot add products of ``a``."""
    x = a.meta["val"]
    return why_no_kernel(x, places.world, places) if x.dtype in TYPE_NAMES else f"no matmul of {x.dtype} adds in order"


def bias_gradients(graph: Graph) -> list[Node]:
    """Returns the gradients of biases: the sums over rows of gradients that matmuls multiply by weights or inputs."""
    multiplied = {_origin(gradient): features for node in graph.nodes for gradient, features in _multiplied(node)}
    totals = []
    for node in graph.find_nodes(op="call_function", target=_aten.sum.dim_IntList):
        features = multiplied.get(_origin(first(node)))
        is_of_layer = features is not None and statically_known_true(value(first(node)).shape[-1] == features)
        if node.users and is_over_rows(node) and is_of_layer:
            totals.append(node)
    return totals


def is_over_rows(total: Node) -> bool:
    """Whether a sum is over all dimensions but the last."""
    kind = value(first(total))
    axes = sorted(axis % kind.ndim for axis in arguments(total)["dim"] or ()) if kind.ndim else []
    return kind.ndim > 1 and axes == [*range(kind.ndim - 1)] and isinstance(kind.shape[-1], int)


def _multiplied(node: Node) -> list[tuple[Node, int | torch.SymInt]]:
    """Returns what a matmul has as the gradient of a layer, with the layer's features; nothing if it is none."""
    op = op_of(node.target)
    if op and op.takes("a") and not op.takes("gathered"):  # which takes only the rows of this rank
        a = op.read(node.args)["a"]
    elif node.target in MATMULS and (product := products.read(node)):
        a = product.a
    else:
        return []
    # A weight's gradient multiplies transposed rows.
    return [(a, a.meta["val"].shape[0 if a.target in TRANSPOSES else -1])]


def _origin(node: Node) -> Node:
    while node.target in (*VIEWS, *TRANSPOSES):
        node = first(node)
    return node


# ---- what is written ------------------------------------------------------------------------------------------------


def _replace_matmul(graph: Graph, matmul: Product) -> None:
    node = matmul.node
    with graph.inserting_before(node):
        new = graph.call_function(LINEAR, (matmul.a, matmul.stored_weight(graph), matmul.bias))
    new.meta = node.meta
    new.meta.pop("eager_input_vals", None)
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _replace_bias_gradient(graph: Graph, total: Node) -> None:
    x, result = first(total), value(total)
    kind = value(x)
    with graph.inserting_before(total):
        dy = rows.called(graph, _aten.reshape.default, (x, [-1, kind.shape[-1]])) if kind.ndim > 2 else x
        like = value(dy)
        ones = call(graph, _aten.full.default, ([1, first_size(graph, dy)], 1), like.new_ones((1, like.shape[0])))
        ones.kwargs = {"dtype": kind.dtype, "device": kind.device, "pin_memory": False}
        added = rows.called(graph, LINEAR, (ones, stored(graph, dy), None, LEAVES, torch.float32))
        new = rows.called(graph, _aten.reshape.default, (added, list(result.shape)))
        if result.dtype != torch.float32:
            new = rows.called(graph, torch.ops.prims.convert_element_type.default, (new, result.dtype))
    added.stack_trace = total.stack_trace
    total.replace_all_uses_with(new)
    graph.erase_node(total)
