"""The pass's rewrite of an all-gather and the matmuls of its rows: the forms it takes, what it leaves, and numbers."""

import operator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.graph import places
from graphar.ops import allgather, allgather_matmul
from tests.graph.graphs import DEFAULT, PAYS, RANKS, Drawing, Traced, gathered, given, inputs_of, of_matmul, rewritten
from tests.parallel_models import HIDDEN, Block, FunctionalBlock, compiled, sequence_parallel

ops, aten, functional = torch.ops.graphar, torch.ops.aten, torch.nn.functional
torch_ops = torch.ops._c10d_functional
FUSED = ops.fused_allgather_matmul.default
ROWS, COLUMNS, K = 6, 16, 24


def traced(function, *more, rows=(ROWS,), **kinds):
    """Traces a function of a [rows, K], w [COLUMNS, K] and ``more``."""
    return Traced(function, (*rows, K), (COLUMNS, K), *more, **kinds)


def fused_in(graph):
    (fused,) = [node for node in graph.nodes if node.target is FUSED]
    return fused


FORMS = {
    "a linear layer": (lambda a, w: functional.linear(gathered(a), w), {}),
    "a product": (lambda a, w: gathered(a) @ w.t(), {}),
    "three dimensions": (lambda a, w: functional.linear(gathered(a), w), {"rows": (ROWS, 2)}),
    "fp16": (lambda a, w: functional.linear(gathered(a), w), {"dtype": torch.float16}),
    "a batch of one, along its tokens": (lambda a, w: functional.linear(gathered(a, 1), w), {"rows": (1, ROWS)}),
    "a bias": (lambda a, w, b: functional.linear(gathered(a), w, b), {}),
}


@pytest.mark.parametrize("name", FORMS)
def test_an_all_gather_and_a_matmul_become_one_op(make_pass, pays, name):
    function, kinds = FORMS[name]
    compile_pass, drawing = make_pass(), traced(function, *[(COLUMNS,)] * (name == "a bias"), **kinds)
    before = drawing.graph.output_node().args[0].meta["val"]

    graph = rewritten(compile_pass, drawing).graph

    a, w, *bias = inputs_of(graph)
    sizes = [len(a.meta["val"])] * RANKS
    assert fused_in(graph).args == (a, w, *allgather_matmul.OP.arguments(bias=bias, rank=0, sizes=sizes))
    assert not {ops.allgather.default, aten.mm.default} & set(drawing.calls())
    after = graph.output_node().args[0].meta["val"]
    assert (after.shape, after.dtype) == (before.shape, before.dtype)
    assert [(entry.op, entry.why_left) for entry in of_matmul(compile_pass.report)] == [("allgather", "")]
    assert str(compile_pass.report).endswith("in group '0': one op with a matmul")


def test_a_weight_that_is_not_seen_transposed_is_given_so(make_pass, pays):
    graph = rewritten(make_pass(), Traced(lambda a, w: gathered(a) @ w, (ROWS, K), (K, COLUMNS))).graph

    w = given(fused_in(graph))["w"]
    assert w.target is aten.permute.default
    assert w.meta["val"].shape == (COLUMNS, K)


@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_op_of_an_exported_program_becomes_one_op(make_pass, pays, with_bias):
    drawing = Drawing(ROWS, 2, K, device="cpu")
    w, bias = drawing.graph.placeholder("w"), drawing.graph.placeholder("bias")
    with drawing.mode:
        w.meta["val"], bias.meta["val"] = (
            torch.empty(shape, dtype=torch.bfloat16) for shape in ((COLUMNS, K), COLUMNS)
        )
    whole = drawing.wait(drawing.add(torch_ops.all_gather_into_tensor, drawing.x, RANKS, "0"))
    drawing.end(drawing.add(aten.linear, whole, w, *[bias] * with_bias))

    fused = fused_in(rewritten(make_pass(), drawing).graph)

    sizes = [ROWS] * RANKS
    assert fused.args == (*(drawing.x, w), *allgather_matmul.OP.arguments(bias=[bias] * with_bias, rank=0, sizes=sizes))
    assert drawing.calls() == [FUSED, operator.getitem]


def test_of_several_matmuls_the_one_of_the_largest_weight_is_fused_and_others_take_the_gathered_rows(make_pass, pays):
    def attention(a, k, q, v):
        x = gathered(a)
        return functional.linear(x, k), functional.linear(x, q), functional.linear(x, v)

    compile_pass = make_pass()
    graph = rewritten(compile_pass, Traced(attention, (ROWS, K), (8, K), (32, K), (8, K))).graph

    a, _, q, _ = inputs_of(graph)
    fused = fused_in(graph)
    assert fused.args == (a, q, *allgather_matmul.OP.arguments(rank=0, sizes=[ROWS] * RANKS, gathered=True))
    product, whole = sorted(fused.users, key=lambda node: node.args[1])
    assert [node.target for node in whole.users] == [aten.mm.default] * 2
    assert graph.output_node().args[0][1] is product
    assert len(of_matmul(compile_pass.report)) == 1


def test_other_uses_of_the_rows_take_the_second_result(make_pass, pays):
    def layer(a, w):
        x = gathered(a)
        return x * 2, functional.linear(x, w)

    fused = fused_in(rewritten(make_pass(), traced(layer)).graph)

    assert given(fused)["gathered"]
    (doubled,) = [node for node in fused.graph.nodes if node.target is aten.mul.Tensor]
    assert doubled.args[0].args == (fused, 1)


def test_a_weight_that_is_cast_after_the_all_gather_is_cast_before_it(make_pass, pays):
    def layer(a, small, large):
        x = gathered(a.bfloat16())
        return x @ small.bfloat16().t(), x @ large.bfloat16().t()

    graph = rewritten(make_pass(), Traced(layer, (ROWS, K), (8, K), (16, K), dtype=torch.float32)).graph

    fused = fused_in(graph)
    assert given(fused)["w"].args[0] is inputs_of(graph)[2]
    assert given(fused)["gathered"]


def test_a_weight_that_is_made_before_the_only_use_of_the_rows_may_be_made_after_the_all_gather(make_pass, pays):
    graph = rewritten(make_pass(), traced(lambda a, w: functional.linear(gathered(a), w * 2))).graph

    assert given(fused_in(graph))["w"].target is aten.mul.Tensor


def slices(x):
    """A gather along the second dimension, as the backward pass of a reduce-scatter writes it."""
    whole = gathered(x)
    return torch.cat([whole[len(x) * rank : len(x) * (rank + 1)] for rank in range(RANKS)], 1)


@pytest.mark.parametrize(("batch", "copies"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("gather", [lambda a: gathered(a, 1), slices], ids=["chunks", "slices"])
def test_only_rows_of_a_batch_are_reordered(make_pass, pays, gather, batch, copies):
    drawing = traced(lambda a, w: functional.linear(gather(a), w), rows=(batch, ROWS))

    calls = rewritten(make_pass(), drawing).calls()

    assert calls.count(FUSED) == 1
    assert calls.count(aten.cat.default) == copies


def test_where_rows_are_gathered_along_tokens_of_a_batch_the_products_rows_are_put_in_order(make_pass, pays):
    drawing = traced(lambda a, w: functional.linear(gathered(a, 1), w), rows=(2, ROWS))

    graph = rewritten(make_pass(), drawing).graph

    fused = fused_in(graph)
    assert [tuple(one.shape) for one in fused.meta["val"]] == [(2 * RANKS, ROWS, COLUMNS), (0,)]
    assert given(fused)["sizes"] == [2] * RANKS
    assert graph.output_node().args[0].meta["val"].shape == (2, RANKS * ROWS, COLUMNS)


@pytest.mark.parametrize("off", ["allgather", "matmul"])
def test_what_is_turned_off_stays_an_all_gather_and_a_matmul(make_pass, pays, off):
    compile_pass = make_pass(off=[off])

    calls = rewritten(compile_pass, traced(FORMS["a product"][0])).calls()

    assert FUSED not in calls
    assert aten.mm.default in calls
    assert [entry.rewrite for entry in compile_pass.report.entries if entry.why_left == "turned off"] == [off]


def test_matmuls_of_other_things_are_not_in_the_report(make_pass, pays):
    compile_pass = make_pass()

    calls = rewritten(compile_pass, traced(lambda a, w: (gathered(a).t() @ gathered(a), a @ w.t()))).calls()

    assert calls.count(aten.mm.default) == 2
    assert of_matmul(compile_pass.report) == []


def own(x, axis, **named):
    """A model's own call of graphar's op."""
    sizes = [x.shape[axis]] * RANKS
    return ops.allgather.default(x, *allgather.OP.arguments(rank=0, axis=axis, sizes=sizes, **named))


def with_a_late_weight(a, w):
    x = gathered(a)
    return x * 2, functional.linear(x, w * 2)


def halves(a, w):
    return functional.linear(gathered(a).split(ROWS * RANKS // 2)[0], w)


def scaled_up(a, w):
    return torch.addmm(w[0, :COLUMNS], gathered(a), w.t(), beta=2)


A_PRODUCT, ON_GPUS = FORMS["a product"][0], {"device": "cuda"}
LEFT = [  # the reason, the function, how it is traced, and the pass
    ("no matmul of torch.float32 gathers its rows", A_PRODUCT, {"dtype": torch.float32}, {}),
    ("the rows are not gathered along the first axis", lambda a, w: own(a, 1) @ w.t(), {"rows": (2, ROWS)}, {}),
    ("the gather names an algorithm", lambda a, w: own(a, 0, algorithm="allgather_push") @ w.t(), {}, {}),
    ("only some of the gathered rows are multiplied", halves, {}, {}),
    ("the weight is made after the rows are gathered", with_a_late_weight, {}, {}),
    ("the weight is made after the rows are gathered", lambda a, w: (lambda x: x @ x.t())(gathered(a)), {}, {}),
    ("something else than a bias is added to the product", scaled_up, {}, {}),
    ("rank 3 has no GPU of sm_90a", A_PRODUCT, ON_GPUS, {"arch": "sm_80"}),
    ("gathered rows have no batch-invariant matmul", A_PRODUCT, ON_GPUS, {"batch_invariant": True}),
]


@pytest.mark.parametrize(("why", "function", "kinds", "how"), LEFT)
def test_another_form_is_left_and_the_report_says_why(make_pass, pays, why, function, kinds, how):
    compile_pass = make_pass(**how)

    calls = rewritten(compile_pass, traced(function, **kinds)).calls()

    assert FUSED not in calls
    assert ops.allgather.default in calls
    assert why in [entry.why_left for entry in of_matmul(compile_pass.report)]


@pytest.mark.parametrize("partition", ["chunks", "tiles"])
@pytest.mark.parametrize(
    ("from_rows", "fused"), [({}, False), ({RANKS: ROWS * RANKS}, True), ({RANKS: ROWS * RANKS + 1}, False)]
)
def test_the_tuning_table_says_from_how_many_rows_on(make_pass, monkeypatch, from_rows, fused, partition):
    measured = replace(DEFAULT.allgather_matmul, **{f"{partition}_from_rows": from_rows})
    table = replace(DEFAULT, allgather_matmul=measured)
    monkeypatch.setattr(places, "shipped_table", lambda name: table)
    compile_pass = make_pass()

    calls = rewritten(compile_pass, traced(FORMS["a product"][0])).calls()

    assert (FUSED in calls) == fused
    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == [
        "" if fused else "not known to be faster as one op"
    ]


LAYOUTS = {  # the shape of a rank's tokens, of which there are None, and their dimension
    "tokens": ((None, HIDDEN), 0),
    "tokens first": ((None, 2, HIDDEN), 0),
    "a batch of one": ((1, None, HIDDEN), 1),
    "a batch": ((2, None, HIDDEN), 1),
}
# By layout, who puts the collectives there, and whether two matmuls take the gathered rows, or one of a packed weight.
MODELS = [
    ("tokens", "plan", False),
    ("a batch of one", "plan", True),
    ("a batch", "plan", False),
    ("tokens", "functional", True),
    ("tokens first", "functional", False),
    ("a batch of one", "functional", False),
    ("a batch", "functional", True),
    ("tokens", "functional", "packed"),
    ("a batch", "functional", "packed"),
]
WITH_ANY_NUMBER = MODELS[3], MODELS[-1]  # those that are compiled again, for any number of tokens


def made(kind, gated, dim, rank, world_size):
    if kind == "functional":
        return FunctionalBlock(gated, rank, world_size, dim)
    return sequence_parallel(Block(gated), dist.device_mesh.init_device_mesh("cpu", (world_size,)), dim)


def gradients(model, x):
    """The result for this rank's tokens, and the gradients of the tokens and of this rank's parameters."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    of_parameters = [one.grad for one in model.parameters()]
    return [y.detach(), x.grad, *[one.to_local() if hasattr(one, "to_local") else one for one in of_parameters]]


def run_model(layout, kind, gated, rank, world_size):
    """The numbers of the compiled model and of the model itself for some counts of tokens, and the report's entries."""
    (shape, dim), compile_pass = LAYOUTS[layout], graphar.compile_pass()
    torch._dynamo.reset()
    model, fast = (made(kind, gated, dim, rank, world_size) for _ in range(2))
    fast, generator, numbers = compiled(fast, compile_pass), torch.Generator().manual_seed(rank), []
    for count in (6, 10) if (layout, kind, gated) in WITH_ANY_NUMBER else (6,):
        x = torch.randn([size or count for size in shape], generator=generator).bfloat16()
        numbers.append((gradients(fast, x), gradients(model, x)))
    return numbers, [(entry.graph, entry.op, entry.why_left) for entry in of_matmul(compile_pass.report)]


def run_models(rank, world_size):
    places.shipped_table = places.find_table = lambda name: PAYS
    return {model: run_model(*model, rank, world_size) for model in MODELS}


@pytest.mark.parametrize(("layout", "kind", "gated"), MODELS)
def test_matmuls_around_collectives_are_fused_forward_and_backward_with_the_models_numbers(
    results_of, layout, kind, gated
):
    of_backward = "several products are added before the sum" if gated is True else ""
    one = [(0, "reducescatter", ""), (0, "allgather", ""), (1, "reducescatter", of_backward), (1, "allgather", "")]
    # A further number of tokens gives a graph for any number of them.
    others = [(graph + 2, op, why) for graph, op, why in one] if (layout, kind, gated) in WITH_ANY_NUMBER else []

    for numbers, entries in (rank[layout, kind, gated] for rank in results_of(run_models)):
        assert entries == one + others
        for mine, expected in numbers:
            for one_of_mine, other in zip(mine, expected, strict=True):
                torch.testing.assert_close(one_of_mine, other, rtol=0.02, atol=0.02)
