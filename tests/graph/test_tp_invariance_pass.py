"""The pass with ``tp_invariant=True``: what it writes, and what it reports."""

import pytest
import torch
from torch.nn import functional

import graphar
from graphar.graph.collectives import arguments
from graphar.ops.register import op_of
from tests import inside
from tests.graph.graphs import RANKS, Traced, given, llamas, rewritten, scattered, summed

ops, aten, torch_ops = torch.ops.graphar, torch.ops.aten, torch.ops._c10d_functional
ROWS, COLUMNS, K = 8, 16, 32


@pytest.fixture
def tree(make_pass):
    """Rewrites a graph; returns the pass and the graph."""

    def run(traced, **how):
        compile_pass = make_pass(tp_invariant=True, **how)
        return compile_pass, rewritten(compile_pass, traced).graph

    return run


def traced(function, *more, dtype=torch.bfloat16, rows=(ROWS,), columns=K, device="cpu"):
    """Traces a function of a [rows, K], w [COLUMNS, K] and ``more``."""
    return Traced(function, (*rows, columns), (COLUMNS, columns), *more, dtype=dtype, device=device)


def calls_of(graph):
    """The calls of graphar's ops, with their arguments by name."""
    return [(node.target, given(node)) for node in graph.nodes if op_of(node.target)]


def matmuls_of_torch(graph):
    return [node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]


BIAS, SAME, PARTS = (COLUMNS,), (ROWS, COLUMNS), (ROWS // RANKS, COLUMNS)
SUM, SCATTER, BIASED = ops.fused_matmul_allreduce, ops.fused_matmul_reducescatter, {"bias": ["arg2_1"]}
NORM, SCATTERED_NORM = ops.fused_matmul_allreduce_residual_rmsnorm, ops.fused_matmul_reducescatter_residual_rmsnorm
NORMED = {"residual": "arg2_1"}
# By name: the function, the shapes of what it takes beside a and w, what is on, the op, and its arguments that are set.
SUMS = {
    "a sum": (lambda a, w: summed(a @ w.t()), [], [], SUM, {}),
    "a scattered sum": (lambda a, w: scattered(a @ w.t()), [], [], SCATTER, {}),
    "a bias of the sum": (lambda a, w, b: summed(a @ w.t()) + b, [BIAS], [], SUM, BIASED),
    "parts of a bias": (lambda a, w, b: summed(functional.linear(a, w, b / RANKS)), [BIAS], [], SUM, BIASED),
    "a bias of parts": (lambda a, w, b: b + scattered(a @ w.t()), [BIAS], [], SCATTER, BIASED),
    "an epilogue": (lambda a, w: summed(a @ w.t()).relu(), [], ["epilogue"], SUM, {"epilogue": "relu(v)"}),
    "a norm": (lambda a, w, r, g: llamas(r + summed(a @ w.t()), g), [SAME, BIAS], ["norm"], NORM, NORMED),
    "a norm of parts": (
        lambda a, w, r, g: llamas(r + scattered(a @ w.t()), g),
        [PARTS, BIAS],
        ["norm"],
        SCATTERED_NORM,
        NORMED,
    ),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", SUMS)
def test_a_matmul_and_its_sum_become_one_op_at_every_size(tree, name, dtype):
    function, more, on, op, wanted = SUMS[name]

    compile_pass, graph = tree(traced(function, *more, dtype=dtype), on=on)

    ((target, found),) = calls_of(graph)
    names = torch.utils._pytree.tree_map_only(torch.fx.Node, lambda node: node.target, found)
    assert target is op.default
    assert {one: names[one] for one in wanted} == wanted
    assert found["partition"] == "tp_invariant"
    assert not [node for node in graph.nodes if node.target is aten.add.Tensor]
    assert compile_pass.report.is_tp_invariant


NO_BIAS = {
    "a residual": (lambda a, w, r: summed(a @ w.t()) + r, SAME),
    "a bias with a factor": (lambda a, w, b: torch.add(summed(a @ w.t()), b, alpha=2), BIAS),
    "a sum with further uses": (lambda a, w, b: (lambda y: y * (y + b))(summed(a @ w.t())), BIAS),
}


@pytest.mark.parametrize("name", NO_BIAS)
def test_what_is_no_bias_of_the_sum_is_added_after_it(tree, name):
    function, shape = NO_BIAS[name]

    _, graph = tree(traced(function, shape))

    ((_, found),) = calls_of(graph)
    assert found["bias"] == []
    assert [node for node in graph.nodes if node.target is aten.add.Tensor]


def test_a_norm_stays_apart_by_default_as_it_does_in_training_and_on_one_rank(tree):
    function, more, *_ = SUMS["a norm"]

    compile_pass, graph = tree(traced(function, *more))

    assert [target for target, _ in calls_of(graph)] == [ops.fused_matmul_allreduce.default]
    assert {entry.rewrite for entry in compile_pass.report.entries} == {"allreduce", "matmul"}


def gathered(a):
    return torch_ops.wait_tensor(torch_ops.all_gather_into_tensor(a, RANKS, "0"))


def test_gathered_rows_become_one_op_with_the_first_matmul_and_linear_with_the_others(tree):
    def layer(a, w, v):
        whole = gathered(a)
        return whole @ w.t(), whole @ v.t()

    compile_pass, graph = tree(traced(layer, (2 * COLUMNS, K)))

    ((target, found),) = calls_of(graph)
    assert target is ops.fused_allgather_matmul.default
    assert (found["partition"], found["gathered"]) == ("tp_invariant", True)
    assert [node.target for node in graph.nodes].count(ops.linear.default) == 1
    assert compile_pass.report.is_tp_invariant


LINEARS = {
    "a product": (lambda a, w: a @ w.t(), []),
    "a layer": (functional.linear, [BIAS]),
    "a product with a weight as it lies": (lambda a, w, v: a @ v, [(K, 24)]),
    "a weight's gradient": (lambda a, w, dy: dy.t() @ a, [SAME]),
    "an input's gradient": (lambda a, w, dy: dy @ w, [SAME]),
}


@pytest.mark.parametrize("name", LINEARS)
def test_every_other_matmul_is_added_in_the_order_of_k(tree, name):
    function, more = LINEARS[name]
    graph = traced(function, *more)
    shapes = [node.meta["val"].shape for node in matmuls_of_torch(graph.graph)]

    compile_pass, graph = tree(graph)

    assert [node.meta["val"].shape for node in graph.nodes if node.target is ops.linear.default] == shapes
    assert not matmuls_of_torch(graph)
    assert compile_pass.report.is_tp_invariant


@pytest.mark.parametrize("rows", [(ROWS,), (2, 4)], ids=str)
def test_a_biass_gradient_is_added_as_leaves_of_rows_and_other_sums_are_not(tree, rows):
    def gradients(a, w, dy):
        axes = list(range(dy.ndim - 1))
        return dy.reshape(-1, COLUMNS).t() @ a.reshape(-1, K), dy.sum(axes), (dy * 2).sum(axes), dy.sum(-1)

    _, graph = tree(traced(gradients, (*rows, COLUMNS), rows=rows))

    leaves = [arguments(node).get("leaves", 1) for node in graph.nodes if node.target is ops.linear.default]
    assert sorted(leaves) == [1, 8]
    assert [node.target for node in graph.nodes].count(aten.sum.dim_IntList) == 2


def test_a_sum_over_rows_of_another_width_is_no_biass_gradient(tree):
    def gradients(a, w, dy):
        return dy.t() @ a, dy.view(-1, 2, COLUMNS // 2).sum([0, 1])

    _, graph = tree(traced(gradients, SAME))

    assert [node.target for node in graph.nodes].count(aten.sum.dim_IntList) == 1


def test_a_sum_over_the_rows_of_this_rank_is_left_although_they_are_gathered_and_multiplied(tree):
    def gradients(a, w):
        return gathered(a) @ w.t(), a.sum(0)

    compile_pass, graph = tree(traced(gradients))

    assert [node.target for node in graph.nodes].count(aten.sum.dim_IntList) == 1
    assert ["tokens of this rank alone" in one.why for one in compile_pass.report.breaks] == [True]


def reduced(x, reduction):
    return torch_ops.wait_tensor(torch_ops.all_reduce(x, reduction, "0"))


def over_vocabulary(a, w):
    logits = a @ w.t()
    largest = reduced(logits.amax(-1, keepdim=True), "max")
    return reduced((logits - largest).exp().sum(-1, keepdim=True), "sum")


def biased_sum(a, w, b):
    return summed(functional.linear(a, w, b))


def summed_product(a, w):
    return summed(a @ w.t())


ALONE = "one rank does not tell whether the layer is row-parallel: call graphar.nn.make_tp_invariant first"
# By what the report says: the function, the shapes of what it takes beside a and w, and how it is traced and compiled.
BREAKS = {
    "it sums what is no product of a matmul": (lambda a, w: summed(a * 2), [], {}, {}),
    "it sums over features that ranks divide, such as a vocabulary": (over_vocabulary, [], {}, {}),
    "several products are added before the sum": (lambda a, w: summed(a @ w.t() + (a * 2) @ w.t()), [], {}, {}),
    "the product has further uses": (lambda a, w: (lambda y: (summed(y), y))(a @ w.t()), [], {}, {}),
    "each rank adds something else than its part of a bias to its product": (biased_sum, [BIAS], {}, {}),
    "the product is scaled, or an epilogue or a norm follows its bias": (
        lambda a, w, b, r, g: llamas(r + biased_sum(a, w, b / RANKS), g),
        [BIAS, SAME, BIAS],
        {},
        {"on": ["norm"]},
    ),
    "graphar has sums, not avg": (lambda a, w: reduced(a @ w.t(), "avg"), [], {}, {}),
    "a tree of 8 leaves is for 1, 2, 4 or 8 ranks, not 3": (summed_product, [], {}, {"ranks": 3}),
    "31 columns on each of 4 ranks are not 8 leaves of equal length": (summed_product, [], {"columns": 31}, {}),
    "torch has padded the columns": (
        lambda a, w: summed(functional.pad(a, (0, 2)) @ functional.pad(w, (0, 2)).t()),
        [],
        {},
        {},
    ),
    "no matmul of torch.float64 adds in order": (functional.linear, [], {"dtype": torch.float64}, {}),
    "no kernel multiplies torch.float32": (functional.linear, [], {"dtype": torch.float32, "device": "cuda"}, {}),
    "rank 3 has no GPU of sm_90a": (functional.linear, [], {"device": "cuda"}, {"arch": "sm_80"}),
    "something else than a bias is added to the product": (lambda a, w, c: torch.addmm(c, a, w.t()), [SAME], {}, {}),
    "it adds the tokens of this rank alone, such as the gradient of a norm's weight": (
        lambda a, w, g: (scattered(a @ w.t()), (g * 2).sum(0)),
        [SAME],
        {},
        {},
    ),
    "graphar has no such product": (lambda a, w, v: functional.conv1d(a[None], v), [(3, ROWS, 5)], {}, {}),
    "its partition is 'auto'": (lambda a, w: graphar.fused_matmul_allreduce(a, w), [], {}, {}),
    "torch has written a matmul as products and a sum": (
        lambda a, w: (a[:1].unsqueeze(2) * w.t().unsqueeze(0)).sum(1),
        [],
        {},
        {},
    ),
    ALONE: (functional.linear, [], {}, {"ranks": 1}),
}


@pytest.mark.parametrize("why", BREAKS)
def test_the_report_names_what_may_change_bits(tree, why):
    function, more, kind, how = BREAKS[why]

    compile_pass, _ = tree(traced(function, *more, **kind), **how)
    report = compile_pass.report

    assert {one.why for one in report.breaks} == {why}
    assert not report.is_tp_invariant
    assert f"not tensor-parallel invariant: {len(report.breaks)} op" in str(report)
    assert str(report).splitlines()[-1].endswith(f" may change bits: {why}")


ATTENTION = {
    "torch's attention": lambda a, w: functional.scaled_dot_product_attention(a, a, a),
    "products of batches": lambda a, w: torch.softmax(a @ a.transpose(-1, -2), -1) @ a,
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_named_and_left_to_the_user_to_judge(tree, name):
    compile_pass, _ = tree(traced(ATTENTION[name], rows=(1, 4, ROWS)))
    report = compile_pass.report

    assert {one.why for one in report.breaks} == {"its kernel may add in an order that depends on the number of heads"}
    assert report.is_tp_invariant
    assert str(report).count("tensor-parallel invariant, if ") == 1


def test_a_product_in_fp32_of_a_biass_gradient_that_no_kernel_adds_is_named(tree):
    def gradients(a, w, dy):
        return dy.t() @ a, dy.sum(0)

    compile_pass, _ = tree(traced(gradients, SAME, dtype=torch.float32, device="cuda"))

    assert [one.op for one in compile_pass.report.breaks] == ["aten.mm.default", "aten.sum.dim_IntList"]


KEPT = {
    "a masked lookup": lambda a, w, i: summed(torch.where(i[:, None] > 3, functional.embedding(i, w), 0)),
    "a lookup times a mask": lambda a, w, i: summed(functional.embedding(i, w) * (i > 3).unsqueeze(-1)),
    "a maximum": lambda a, w, i: reduced(a, "max"),
    "rows that are gathered": lambda a, w, i: gathered(a),
    "a loss of graphar's": lambda a, w, i: graphar.cross_entropy(a @ w.t(), i),
    "partials as a tree": lambda a, w, i: inside.allreduce(a.float(), order="tree"),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_only_moves_bits_is_no_break(tree, name):
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        inputs = [torch.empty(ROWS, K), torch.empty(COLUMNS, K), torch.empty(ROWS, dtype=torch.int64)]
        graph = make_fx(KEPT[name])(*inputs)
    graph.graph.eliminate_dead_code()

    compile_pass, _ = tree(graph)

    assert compile_pass.report.breaks == []


def test_a_lookup_without_a_mask_is_a_break(tree):
    compile_pass, _ = tree(traced(lambda a, w: summed(w[torch.arange(4)])))

    assert not compile_pass.report.is_tp_invariant


def test_without_the_option_there_is_no_word_about_invariance(make_pass):
    compile_pass = make_pass()
    rewritten(compile_pass, traced(lambda a, w: a @ w.t()))

    assert compile_pass.report.breaks is None
    assert not compile_pass.report.is_tp_invariant
    assert "invariant" not in str(compile_pass.report)


def test_before_any_graph_nothing_is_known_to_be_invariant(make_pass):
    assert not make_pass(tp_invariant=True).report.is_tp_invariant


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"batch_invariant": True}, "tp_invariant=True or batch_invariant=True"),
        ({"off": ["matmul", "allgather"]}, r"tp_invariant=True needs the rewrites that off=\['matmul'\]"),
        ({"off": ["allreduce"]}, r"tp_invariant=True needs the rewrites that off=\['allreduce'\]"),
        ({"on": ["matmul"]}, "on must name rewrites, of epilogue, norm,"),
    ],
)
def test_options_that_contradict_are_refused(make_pass, how, named):
    with pytest.raises(ValueError, match=named):
        make_pass(tp_invariant=True, **how)


def test_only_with_trees_a_norm_is_optional(make_pass):
    with pytest.raises(ValueError, match="on must name rewrites, of epilogue, got"):
        make_pass(on=["norm"])
