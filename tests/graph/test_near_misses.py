"""The passes on graphs that almost have a form they rewrite: what they leave computes what the graph did.

The near misses of a form are made from the schemas of its ops: each argument of each node has other values in turn, as
far as the graph still has shapes. Its values before and after the passes are those of ranks that have the same tensors.
"""

import logging
import operator
from collections.abc import Iterator

import pytest
import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.nn import functional
from torch.utils import _pytree as pytree

from graphar.graph import places
from graphar.graph.collectives import VIEWS
from graphar.ops.register import op_of
from tests.graph.graphs import NORMS, PAYS, RANKS, Traced, gathered, scattered, summed

torch_ops = torch.ops._c10d_functional
ROWS, COLUMNS, K = 8, 16, 32
A, W, BIAS, SAME, PART = (ROWS, K), (COLUMNS, K), (COLUMNS,), (ROWS, COLUMNS), (ROWS // RANKS, COLUMNS)
SQUARE = (COLUMNS, COLUMNS)  # without a dimension that it should keep, a mean is still broadcast
TREE, FUSED = {"tp_invariant": True}, {"on": ["epilogue"]}
TREE_AND_MORE = {"tp_invariant": True, "on": ["norm", "epilogue"]}


def coalesced(a, b):
    first, second = torch_ops.all_reduce_coalesced([a, b], "sum", "0")
    return torch_ops.wait_tensor(second), torch_ops.wait_tensor(first) * 2


def gradients(a, dy):
    return dy.reshape(-1, COLUMNS).t() @ a.reshape(-1, K), dy.sum(list(range(dy.ndim - 1)))


def squared_by_itself(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def normed(name, sum_of=summed):
    return lambda x, residual, weight: WRITTEN[name](residual + sum_of(x), weight)


WRITTEN = {**NORMS, "another": squared_by_itself}
# By name: a function, the shapes of its tensors, and the passes.
FORMS = {
    "sums": (lambda x: summed(x), [SAME], FUSED),
    "sums of sums": (lambda x: summed(summed(x)), [SAME], FUSED),
    "sums of parts": (lambda x: scattered(x), [SAME], FUSED),
    "coalesced sums": (coalesced, [SAME, SAME], FUSED),
    "an epilogue": (lambda x, y, b: (summed(x) * 0.5 + y + b).relu(), [SAME, SAME, BIAS], FUSED),
    "a product": (lambda a, w: summed(a @ w.t()), [A, W], FUSED),
    "a product of parts": (lambda a, w: scattered(a @ w.t()), [A, W], FUSED),
    "a product of a sum": (lambda a, w, v: summed(summed(a @ w.t()) @ v), [A, W, SQUARE], FUSED),
    "a product in three dimensions": (lambda a, w: summed(functional.linear(a, w)), [(2, *A), W], FUSED),
    "a product and a bias": (lambda a, w, b: summed(functional.linear(a, w, b)), [A, W, BIAS], FUSED),
    "gathered rows": (lambda a, w, b: functional.linear(gathered(a), w, b), [A, W, BIAS], FUSED),
    "rows gathered behind others": (lambda a, w: functional.linear(gathered(a, 1), w), [(1, *A), W], FUSED),
    "a tree": (lambda a, w, b: summed(a @ w.t()) + b, [A, W, BIAS], TREE),
    "a tree of parts": (lambda a, w, b: b + scattered(a @ w.t()), [A, W, BIAS], TREE),
    "a tree with parts of a bias": (lambda a, w, b: summed(functional.linear(a, w, b / RANKS)), [A, W, BIAS], TREE),
    "a tree and an epilogue": (lambda a, w: summed(a @ w.t()).relu(), [A, W], TREE_AND_MORE),
    "two products": (lambda a, w, v: (a @ w.t()) @ v, [A, W, SQUARE], TREE),
    "a layer": (lambda a, w, b, c: functional.linear(a, w, b) + c, [A, W, BIAS, SAME], TREE),
    "a layer's gradients": (gradients, [A, SAME], TREE),
    "gradients in three dimensions": (gradients, [(2, *A), (2, *SAME)], TREE),
    **{f"{name} norm": (normed(name), [SQUARE, SQUARE, BIAS], {}) for name in WRITTEN},
    "a norm of parts": (normed("Llama's", scattered), [SAME, PART, BIAS], {}),
    "a tree and a norm": (
        lambda a, w, residual, weight: normed("Gemma's")(a @ w.t(), residual, weight),
        [A, W, SAME, BIAS],
        TREE_AND_MORE,
    ),
}


IN_FP32 = [(name, torch.float32) for name in FORMS if "norm" in name or "layer" in name]


class Alike(Interpreter):
    """Runs a graph for ranks that all have the same tensors: collectives get what all of them send."""

    def call_function(self, target, args, kwargs):
        if op := op_of(target):
            return self._of_all_ranks(op, op.read(args))
        if target is torch_ops.wait_tensor.default:
            return args[0]
        if target is torch_ops.all_reduce_coalesced.default:
            return [self._reduced(x, args[1]) for x in args[0]]
        if target is torch_ops.all_reduce.default:
            return self._reduced(*args[:2])
        if target is torch_ops.reduce_scatter_tensor.default:
            return self._reduced(*args[:2]).chunk(RANKS)[0]
        if target is torch_ops.all_gather_into_tensor.default:
            return torch.cat([args[0]] * RANKS)
        return super().call_function(target, args, kwargs)

    def _reduced(self, x, reduction):
        return x * RANKS if reduction == "sum" else x

    def _of_all_ranks(self, op, given):
        tensors = [[given.pop(name)] * RANKS for name in op.tensors]
        lists = {name: [one for one in value for _ in range(RANKS)] for name, value in given.items() if _tensors(value)}
        found = op.list(*tensors, *op.arguments(**given | lists | self._of_no_rank(op)))
        return found[0] if not op.has_several else found[: len(found) // RANKS]

    def _of_no_rank(self, op):
        return {name: one for name, one in {"communicator": "", "rank": -1, "after": []}.items() if op.takes(name)}


def _tensors(value):
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(one, torch.Tensor) for one in value)


def others(argument, given) -> list:
    """Other values of an argument of an op."""
    kind = str(argument.type)
    if argument.name == "group_size":
        return []
    if isinstance(given, bool):
        return [not given]
    if isinstance(given, (int, float)):
        return [given + 1, -given]
    if kind.endswith("List[int]") or kind == "Optional[List[int]]":
        return [[], [0], [1], [-1], [0, 1], [0, 2], (given or [])[::-1], None]
    if argument.name == "reduce_op":
        return ["avg", "max"]
    if argument.name == "dtype":
        return [torch.float64, torch.float32]
    return []


def near_misses(graph: Graph) -> Iterator[tuple[str, Graph]]:
    """Yields copies of a graph in which one argument of one node has another value, and what it is."""
    for at, node in enumerate(graph.nodes):
        if isinstance(node.meta.get("val"), torch.Tensor):
            new = copied(graph)
            new.output_node().args = ([*pytree.tree_leaves(new.output_node().args), list(new.nodes)[at]],)
            yield f"node {at} is a result, too", new
        if node.target is operator.getitem:
            yield from _changed(graph, at, "index", lambda one: (one.args[0], 1 - one.args[1]), {})
        if not isinstance(node.target, torch._ops.OpOverload) or node.target in VIEWS:
            continue
        for i, (operand, argument) in enumerate(zip(node.args, node.target._schema.arguments, strict=False)):
            for number in like(graph, node, operand, str(argument.type)):
                yield from _changed(graph, at, f"operand {i} is node {number}", _with_node(i, number), {})
        for i, argument in enumerate(node.target._schema.arguments):
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            for other in others(argument, given):
                kwargs = {argument.name: other} if i >= len(node.args) else {}
                yield from _changed(graph, at, f"{argument.name}={other}", _with(i, other), kwargs)


def like(graph: Graph, node: Node, operand, kind: str) -> list[int]:
    """The numbers of the nodes of the operand's dtype that come before ``node``."""
    if not isinstance(operand, (Node, float, int)) or kind != "Tensor":
        return []
    dtype = (operand if isinstance(operand, Node) else node).meta["val"].dtype
    tensors = [isinstance(one.meta.get("val"), torch.Tensor) and one.meta["val"].dtype == dtype for one in graph.nodes]
    before = list(graph.nodes).index(node)
    return [number for number in range(before) if tensors[number] and list(graph.nodes)[number] is not operand]


def _with(i: int, other):
    return lambda one: tuple(other if at == i else value for at, value in enumerate(one.args))


def _with_node(i: int, number: int):
    return lambda one: _with(i, list(one.graph.nodes)[number])(one)


def _changed(graph: Graph, at: int, what: str, args, kwargs: dict) -> Iterator[tuple[str, Graph]]:
    """Yields the copy, if its shapes fit."""
    new = copied(graph)
    node = list(new.nodes)[at]
    node.args, node.kwargs = args(node), node.kwargs | kwargs
    mode = next(iter(new.nodes)).meta["val"].fake_mode
    try:
        with mode:
            for one in new.nodes:
                if one.op == "call_function":
                    given = map_arg((one.args, one.kwargs), lambda x: x.meta["val"])
                    one.meta["val"] = one.target(*given[0], **given[1])
    except Exception:  # no such call
        return
    yield f"{node.target}: {what}", new


def copied(graph: Graph) -> Graph:
    new = Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def values_of(graph: Graph, inputs):
    return Alike(GraphModule({}, graph)).run(*inputs)


def expect_alike(before, after, what: str) -> None:
    for one, other in zip(pytree.tree_leaves(before), pytree.tree_leaves(after), strict=True):
        most = 0.02 * float(one.double().nan_to_num().abs().max()) if one.numel() else 0.0
        torch.testing.assert_close(other, one, rtol=0.02, atol=most, equal_nan=True, msg=lambda said: f"{said}\n{what}")


@pytest.mark.parametrize(("name", "dtype"), [*((one, torch.bfloat16) for one in FORMS), *IN_FP32], ids=str)
def test_what_almost_has_a_form_computes_the_same_after_the_passes(make_pass, monkeypatch, name, dtype):
    function, shapes, how = FORMS[name]
    monkeypatch.setattr(places, "shipped_table", lambda name: PAYS)
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randint(-2, 3, shape, generator=generator).to(dtype) for shape in shapes]
    compile_pass, tried, changed = make_pass(**how), 0, 0
    form = Traced(function, *shapes, dtype=dtype).graph

    for what, graph in [("the form", form), *near_misses(form)]:
        before, rewritten = values_of(graph, inputs), copied(graph)
        targets = [node.target for node in rewritten.nodes]
        compile_pass(rewritten)
        tried, changed = tried + 1, changed + (targets != [node.target for node in rewritten.nodes])
        assert tried > 1 or changed, "the form itself is not rewritten"
        expect_alike(before, values_of(rewritten, inputs), f"{what}\n{rewritten}")
    assert tried > 2
