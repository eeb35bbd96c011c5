"""With tp_invariant=True: writes the rest of a graph so that its bits are the same on 1, 2, 4 and 8 ranks.

It runs after all other rewrites. Matmuls that are summed over ranks are fused ops by then, with the partition
"tp_invariant" (matmul.py), and so are those of gathered rows (allgather_matmul.py). The others become graphar::linear:

a, w -- mm, addmm or linear          becomes graphar::linear, in the order of K
dy, of a matmul -- sum over rows     becomes graphar::linear of ones and dy, as 8 leaves of rows: a bias's gradient

Every other op is looked at, too, so that one which no rewrite knows becomes a Break of the report.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphar.graph import collectives, matmul
from graphar.graph.collectives import CASTS, VIEWS, arguments, call, first, reached, value
from graphar.graph.matmul import check_kernel
from graphar.graph.places import Places
from graphar.graph.products import MATMULS, TRANSPOSES, Product, stored
from graphar.graph.report import Break, Refused, expect
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops.register import Op, op_of

_aten = torch.ops.aten
_LINEAR = torch.ops.graphar.linear.default
_SUM = _aten.sum.dim_IntList
_BATCHED = ("bmm", "baddbmm")
_PRODUCTS = (  # torch's other ops that add products
    *("addbmm", "convolution", "convolution_backward", "dot", "matmul", "mkldnn_rnn_layer", "vdot"),
    *("_grouped_mm", "_int_mm", "_scaled_grouped_mm", "_scaled_mm", "_scaled_mm_v2"),
)
_LOOKUPS = (_aten.embedding.default, _aten.index.Tensor, _aten.gather.default)
_CONSTANTS = (_aten.full.default, _aten.scalar_tensor.default, _aten.full_like.default, _aten.zeros_like.default)
_ROOT = re.compile(r"^L\['\w+'\](\[\d+\])?\.?")  # what torch calls the module that is compiled
_EXACT = ("allgather", "cross_entropy")  # how names of ops begin that add nothing, or in leaves
_RESHAPED = (_aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.dims)
_OF_HEADS = "its kernel may add in an order that depends on the number of heads"
_OF_TOKENS = "it adds the tokens of this rank alone, such as the gradient of a norm's weight"
_OF_ONE_RANK = "one rank does not tell whether the layer is row-parallel: call graphar.nn.make_tp_invariant first"


def rewrite(graph: Graph, places: Places, number: int) -> list[Break]:
    """Rewrites the matmuls and the biases' gradients that no other rewrite has taken.

    Returns the ops that break the chain of invariance; ``number`` is the graph's number in the report.
    """
    broken: list[Break] = []
    rewrites: list[Callable[[], None]] = []  # made when every op has been looked at, as other rewrites have left it
    biases = _bias_gradients(graph)
    divided = any(op.takes("sizes") for node in graph.nodes if (op := op_of(node.target)))
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        try:
            if node in biases:
                _check_added(first(node), places)
                rewrites.append(partial(_replace_bias_gradient, graph, node))
            elif node.target in MATMULS and node.users:
                product = Product(node)
                product.check_bias()
                _check_added(product.a, places)
                rewrites.append(partial(_replace_matmul, graph, product))
                expect(places.count > 1, _OF_ONE_RANK)
            else:
                _check(node, places, divided)
        except Refused as refused:
            why = str(refused)
            broken.append(Break(number, str(node.target), _module(node), why, why == _OF_HEADS))
    for make in rewrites:
        make()
    return broken


def _check_added(a: Node, places: Places) -> None:
    """Raises Refused if graphar::linear cannot add products of ``a``."""
    x = a.meta["val"]
    expect(x.dtype in TYPE_NAMES, f"no matmul of {x.dtype} adds in order")
    check_kernel(x, places.world, places)


def _bias_gradients(graph: Graph) -> list[Node]:
    """Returns the gradients of biases: the sums over rows of gradients that matmuls multiply by weights or inputs."""
    multiplied = {}  # by gradient of a layer: the layer's features
    for node in graph.nodes:
        op = op_of(node.target)
        if node.target in MATMULS:
            a = Product(node).a
        elif op and op.takes("a") and not op.takes("gathered"):  # which takes only the rows of this rank
            a = op.read(node.args)["a"]
        else:
            continue
        # A weight's gradient multiplies transposed rows.
        multiplied[_origin(a)] = value(a).shape[0 if a.target in TRANSPOSES else -1]
    totals = [node for node in graph.find_nodes(op="call_function", target=_SUM) if node.users and _is_over_rows(node)]
    pairs = [(total, first(total)) for total in totals]
    return [total for total, x in pairs if statically_known_true(value(x).shape[-1] == multiplied.get(_origin(x)))]


def _is_over_rows(total: Node) -> bool:
    """Whether a sum is over all dimensions but the last."""
    kind = value(first(total))
    axes = sorted(axis % kind.ndim for axis in arguments(total)["dim"] or ()) if kind.ndim else []
    return kind.ndim > 1 and axes == [*range(kind.ndim - 1)] and isinstance(kind.shape[-1], int)


def _origin(node: Node) -> Node:
    while node.target in (*VIEWS, *TRANSPOSES):
        node = first(node)
    return node


def _replace_matmul(graph: Graph, matmul: Product) -> None:
    node = matmul.node
    with graph.inserting_before(node):
        operands = (matmul.a, matmul.stored_weight(graph), matmul.bias)
    node.target, node.args = _LINEAR, operands
    node.meta.pop("eager_input_vals", None)


def _replace_bias_gradient(graph: Graph, total: Node) -> None:
    x, result = first(total), value(total)
    kind = value(x)
    with graph.inserting_before(total):
        dy = call(graph, _aten.reshape.default, (x, [-1, kind.shape[-1]])) if kind.ndim > 2 else x
        like = value(dy)
        how = {"dtype": kind.dtype, "device": kind.device, "pin_memory": False}
        ones = graph.call_function(_aten.full.default, ([1, collectives.first_size(graph, dy)], 1), how)
        ones.meta["val"] = like.new_ones((1, like.shape[0]))
        added = call(graph, _LINEAR, (ones, stored(graph, dy), None, LEAVES, torch.float32))
        new = call(graph, _aten.reshape.default, (added, list(result.shape)))
        if result.dtype != torch.float32:
            new = call(graph, torch.ops.prims.convert_element_type.default, (new, result.dtype))
    added.stack_trace = total.stack_trace
    total.replace_all_uses_with(new)
    graph.erase_node(total)


def _check(node: Node, places: Places, divided: bool) -> None:
    """Raises Refused if an op may change bits; ``divided`` is whether ranks have parts of a tensor of the graph."""
    name = getattr(node.target, "__name__", "").partition(".")[0]
    expect("_attention" not in name and name not in _BATCHED, _OF_HEADS)
    expect(name not in _PRODUCTS, "graphar has no such product")
    if node.target is _SUM:
        parts = first(node).args if first(node).target is _aten.mul.Tensor else ()
        is_product = parts and all(isinstance(x, Node) and x.target in _RESHAPED for x in parts)
        expect(not is_product, "torch has written a matmul as products and a sum")
        expect(not (divided and _is_over_rows(node)), _OF_TOKENS)
    if op := op_of(node.target):
        _check_ours(op, node, places)
    else:
        _check_torchs(node, places)


def _check_ours(op: Op, node: Node, places: Places) -> None:
    options = op.read(node.args)
    if "partition" in options:
        expect(options["partition"] == TP_INVARIANT, f"its partition is {options['partition']!r}")
    elif not (op.name.startswith(_EXACT) or options.get("order") == "tree" or _is_lookup(first(node))):
        if summed := matmul.read(node, TP_INVARIANT):
            summed.check(places)
        _refuse_sum(node)


def _check_torchs(node: Node, places: Places) -> None:
    """Raises Refused if a collective of torch's adds in another order; a maximum, for example, is exact."""
    collective = collectives.read(node)
    if not collective or collective.reduction in ("", "min", "max", "band", "bor", "bxor"):
        return
    if not all(map(_is_lookup, collective.inputs)):
        collective.check_sum(places)
        _refuse_sum(node)


def _refuse_sum(node: Node) -> NoReturn:
    """Raises why a sum over ranks that follows no matmul adds in another order."""
    before = map(collectives.read, reached([node], lambda other: other.all_input_nodes))
    is_over_features = any(collective.reduction == "max" for collective in before if collective)
    expect(not is_over_features, "it sums over features that ranks divide, such as a vocabulary")
    raise Refused("it sums what is no product of a matmul")


def _is_lookup(node: Node, masked: bool = False) -> bool:
    """Whether a node holds rows of a table, and zeros where another rank has the row."""
    if node.target in (*VIEWS, *CASTS, _aten.clone.default):
        return _is_lookup(first(node), masked)
    if node.target in (_aten.index_put.default, _aten.masked_fill.Scalar):
        return _is_lookup(first(node), True)
    if node.target is _aten.where.self:
        named = arguments(node)
        rest = [named[name] for name in ("self", "other") if named[name].target not in _CONSTANTS]
        return len(rest) == 1 and _is_lookup(rest[0], True)
    if node.target is _aten.mul.Tensor:
        x, mask = arguments(node).values()
        while isinstance(mask, Node) and mask.target in (*VIEWS, *CASTS, _aten.unsqueeze.default):
            mask = first(mask)
        return isinstance(mask, Node) and value(mask).dtype == torch.bool and _is_lookup(x, True)
    return masked and node.target in _LOOKUPS


def _module(node: Node) -> str:
    """Returns the name of the module that a node comes from; an empty string if torch does not tell."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = [entry[0] for entry in stack.values()]
    return _ROOT.sub("", path[-1]) if path else ""
