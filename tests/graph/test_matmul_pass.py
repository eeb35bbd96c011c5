"""The pass's rewrite of a matmul and the sum of its result: the forms it takes, what it leaves, and the bits."""

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.graph import places
from graphar.ops import matmul_sums, norms, sums
from graphar.ops.register import op_of
from tests import inside
from tests.cases import integers, normal, same_bits
from tests.graph.graphs import (
    EPS,
    PAYS,
    RANKS,
    Traced,
    fused_in,
    given,
    inputs_of,
    llamas,
    of_matmul,
    rewritten,
    scattered,
    summed,
)
from tests.parallel_models import MLP, TOKENS, SequenceParallelMLP, compiled, tokens

ops, functional = torch.ops.graphar, torch.nn.functional
ROWS, COLUMNS, K = 8, 16, 24


def traced(function, *more, rows=(ROWS,), columns=COLUMNS, **kinds):
    """Traces a function of a [rows, K], w [columns, K] and ``more``."""
    return Traced(function, (*rows, K), (columns, K), *more, **kinds)


FORMS = {
    "a linear layer": lambda a, w: summed(functional.linear(a, w)),
    "a product": lambda a, w: summed(a @ w.t()),
    "the sum in another shape": lambda a, w: summed(functional.linear(a, w)).view(2, -1, COLUMNS),
}


def normed(total):
    return lambda a, w, residual, weight: llamas(residual + total(functional.linear(a, w)), weight)


PARTS, NORM, RELU = {"rank": 0, "sizes": [2] * RANKS}, {"eps": EPS, "weight_offset": 0.0}, {"epilogue": "relu(v)"}
SUM, SCATTER, RESIDUAL, WEIGHT = matmul_sums.SUM, matmul_sums.SCATTER, (ROWS, COLUMNS), (COLUMNS,)
FUSED = {  # the function, what it takes beside a and w, its rows, the fused op, and what it is told
    **{name: (form, [], (ROWS,), SUM, {}) for name, form in FORMS.items()},
    "three dimensions": (FORMS["a linear layer"], [], (2, ROWS), SUM, {}),
    "an epilogue": (lambda a, w: summed(functional.linear(a, w)).relu(), [], (ROWS,), SUM, RELU),
    "parts": (lambda a, w: scattered(functional.linear(a, w)), [], (ROWS,), SCATTER, PARTS),
    "parts and an epilogue": (lambda a, w: scattered(a @ w.t()).relu(), [], (ROWS,), SCATTER, PARTS | RELU),
    "a norm": (normed(summed), [RESIDUAL, WEIGHT], (ROWS,), norms.MATMUL_NORM, NORM),
    "a norm of parts": (normed(scattered), [(2, COLUMNS), WEIGHT], (ROWS,), norms.MATMUL_SCATTERED_NORM, NORM | PARTS),
}


@pytest.mark.parametrize(("function", "more", "rows", "op", "told"), FUSED.values(), ids=FUSED)
def test_a_matmul_and_its_sum_become_one_op(make_pass, pays, function, more, rows, op, told):
    compile_pass, drawing = make_pass(on=["epilogue"] if "epilogue" in told else []), traced(function, *more, rows=rows)
    before = drawing.graph.output_node().args[0].meta["val"].shape

    graph = rewritten(compile_pass, drawing).graph

    fused = fused_in(graph)
    assert fused.target is op.one
    assert fused.args == (*inputs_of(graph), *op.arguments(**told))
    assert graph.output_node().args[0].meta["val"].shape == before
    assert torch.ops.aten.mm.default not in drawing.calls()
    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == [""]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
def test_partials_that_are_added_as_a_tree_stay_apart_from_their_matmul(make_pass, pays, op, dtype):
    def partials(a, w):
        return getattr(inside, op)(functional.linear(a, w).float(), order="tree", out_dtype=torch.bfloat16)

    graph = rewritten(make_pass(), traced(partials, dtype=dtype)).graph

    assert [node.target for node in graph.nodes if op_of(node.target)] == [getattr(ops, op).default]


@pytest.mark.parametrize(("batch", "copies"), [(1, 0), (2, 1)])
def test_where_tokens_of_a_batch_are_scattered_the_rows_of_the_first_operand_are_put_in_order(
    make_pass, pays, batch, copies
):
    def scatter(a, w):
        y = functional.linear(a, w)
        return scattered(torch.cat(y.chunk(RANKS, 1)))

    drawing = rewritten(make_pass(), traced(scatter, rows=(batch, ROWS)))

    fused = fused_in(drawing.graph)
    assert given(fused)["a"].meta["val"].shape == (batch * RANKS, ROWS // RANKS, K)
    assert fused.meta["val"].shape == (batch, ROWS // RANKS, COLUMNS)
    assert drawing.calls().count(torch.ops.aten.cat.default) == copies


def test_a_residual_that_is_a_fused_sum_itself_is_taken_as_it_became(make_pass, pays):
    def two_sums(a, w, other, weight):
        return llamas(summed(functional.linear(a, w)) + summed(functional.linear(other, w)), weight)

    graph = rewritten(make_pass(), traced(two_sums, (ROWS, K), (COLUMNS,))).graph

    first, second = (node for node in graph.nodes if op_of(node.target))
    assert first.target is ops.fused_matmul_allreduce.default
    assert given(second)["residual"] is first


def own_sum(a, w):
    return ops.allreduce.default(a @ w.t(), *sums.SUM.arguments(algorithm="two_shot_lossless"))


def own_scatter(a, w):
    return ops.reducescatter.default(a @ w.t(), *sums.SCATTER.arguments(rank=0, axis=1, sizes=[4, 4, 4, 4]))


def with_itself_as_residual(a, w, weight):
    y = functional.linear(a, w)
    return llamas(summed(y) + y, weight)


NO_TILES = "no matmul of torch.float32 sums its tiles"
A_PRODUCT, INVARIANT = FORMS["a product"], {"batch_invariant": True}
IN_FP32, ON_GPUS = {"dtype": torch.float32}, {"device": "cuda"}
LEFT = [  # the reason, the function, what it takes beside a and w, how it is traced, and the pass
    ("the product has further uses", lambda a, w: (lambda y: (summed(y), y))(a @ w.t()), [], {}, {}),
    ("the product has further uses", with_itself_as_residual, [(COLUMNS,)], {"rows": (ROWS, 2)}, {}),
    ("several products are added before the sum", lambda a, w: summed(a @ w.t() + (a * 2) @ w.t()), [], {}, {}),
    ("the product is summed in another shape", lambda a, w: summed((a @ w.t()).view(-1, 2 * COLUMNS)), [], {}, {}),
    ("the sum names an algorithm or an axis", own_sum, [], {}, {}),
    ("the sum names an algorithm or an axis", own_scatter, [], {}, {}),
    (NO_TILES, A_PRODUCT, [], IN_FP32, {}),
    (NO_TILES, A_PRODUCT, [], ON_GPUS | IN_FP32, INVARIANT),
    ("graphar's matmul needs a multiple of 8 columns, not 12", A_PRODUCT, [], ON_GPUS | {"columns": 12}, INVARIANT),
    ("rank 3 has no GPU of sm_90a", A_PRODUCT, [], ON_GPUS, INVARIANT | {"arch": "sm_80"}),
    ("graphar's matmul needs a GPU", A_PRODUCT, [], {}, INVARIANT),
]


@pytest.mark.parametrize(("why", "function", "more", "kinds", "how"), LEFT)
def test_others_are_left_and_the_report_says_why(make_pass, pays, why, function, more, kinds, how):
    compile_pass = make_pass(**how)

    calls = rewritten(compile_pass, traced(function, *more, **kinds)).calls()

    assert torch.ops.aten.mm.default in calls
    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == [why]


# Of few rows: every rank may sum all of them, which was measured to be faster; a part for each was not.
FEW_ROWS = {
    "a sum": ({}, lambda a, w, *norm: summed(functional.linear(a, w)), True),
    "a norm": ({}, normed(summed), True),
    "a reduce-scatter": ({}, lambda a, w, *norm: scattered(functional.linear(a, w)), False),
    "an epilogue": ({"on": ["epilogue"]}, lambda a, w, *norm: summed(functional.linear(a, w)).relu(), False),
}


@pytest.mark.parametrize(("options", "function", "fused"), FEW_ROWS.values(), ids=FEW_ROWS)
def test_few_rows_become_one_op_where_that_is_faster(make_pass, options, function, fused):
    compile_pass = make_pass(**options)

    rewritten(compile_pass, Traced(function, (ROWS, K), (WIDE, K), (ROWS, WIDE), (WIDE,)))

    (entry,) = of_matmul(compile_pass.report)
    assert entry.why_left == ("" if fused else "not known to be faster as one op")


@pytest.mark.parametrize("rows", [1, 8, 100, 3000])
@pytest.mark.parametrize(("options", "function", "_"), FEW_ROWS.values(), ids=FEW_ROWS)
def test_a_batch_invariant_matmul_is_fused_at_every_size(make_pass, options, function, _, rows):
    compile_pass = make_pass(batch_invariant=True, **options)
    rows *= RANKS

    graph = rewritten(
        compile_pass, Traced(function, (rows, K), (COLUMNS, K), (rows, COLUMNS), (COLUMNS,), device="cuda")
    ).graph

    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == [""]
    assert not [node for node in graph.nodes if node.target is torch.ops.aten.mm.default]
    assert [given(node)["partition"] for node in graph.nodes if op_of(node.target)] == ["batch_invariant"]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_product_with_a_bias_of_its_own_is_no_matmul_of_the_report(make_pass, pays, batch_invariant):
    compile_pass = make_pass(batch_invariant=batch_invariant)

    calls = rewritten(compile_pass, traced(lambda a, w, b: summed(functional.linear(a, w, b)), (COLUMNS,))).calls()

    assert torch.ops.aten.addmm.default in calls
    assert of_matmul(compile_pass.report) == []


MODELS = {"all-reduce": MLP, "reduce-scatter": SequenceParallelMLP}


def run_compiled(rank, world_size):
    """The results of each model with and without the rewrite, and the report's entries about it."""
    places.shipped_table = places.find_table = lambda name: PAYS
    return {name: run_model(model(rank, world_size)) for name, model in MODELS.items()}


def run_model(model):
    fused, apart = graphar.compile_pass(), graphar.compile_pass(off=["matmul"])
    models = [compiled(model, one) for one in (fused, apart)]
    with torch.no_grad():
        found = [[model(tokens(count)) for model in models] for count in TOKENS]
    return found, of_matmul(fused.report)


@pytest.mark.promise("Models under `graphar.enable()` and layers of `graphar.nn` have the bits of eager calls.")
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_model_has_the_bits_that_it_has_without(results_of, name):
    for found, entries in (rank[name] for rank in results_of(run_compiled)):
        assert [same_bits(fused, apart) for fused, apart in found] == [0] * len(TOKENS)
        assert {entry.why_left for entry in entries} == {""}
        assert isinstance(entries[-1].shape[0], str)  # a graph for any number of tokens


WIDE, INNER = 8192, 512
PAYING, LEFT_APART = (8, 1024), 256  # rows, between two ranks


class RowParallel(torch.nn.Module):
    """A linear layer written for dist.all_reduce, with a norm if asked for, or for a reduce-scatter."""

    def __init__(self, rank, fill, with_norm=False, in_parts=False):
        super().__init__()
        self.in_parts = in_parts
        self.down = torch.nn.Linear(INNER, WIDE, bias=False, dtype=torch.bfloat16, device="cuda")
        self.down.weight.data = drawn(fill, rank, WIDE, INNER)
        self.scale = torch.nn.Parameter(drawn(normal, 100, WIDE)) if with_norm else None

    def forward(self, x, residual=None):
        y = self.down(x)
        if self.in_parts:
            return dist._functional_collectives.reduce_scatter_tensor(y, "sum", 0, dist.group.WORLD)
        dist.all_reduce(y)
        if self.scale is None:
            return y
        residual = residual + y
        return functional.rms_norm(residual, (WIDE,), self.scale, EPS), residual

    def eager(self, x, residual=None):
        """The result of the fused op for this layer."""
        if self.in_parts:
            return graphar.fused_matmul_reducescatter(x, self.down.weight)
        if self.scale is None:
            return graphar.fused_matmul_allreduce(x, self.down.weight)
        weights = self.down.weight, residual, self.scale
        return graphar.fused_matmul_allreduce_residual_rmsnorm(x, *weights, EPS)


def drawn(fill, seed, *shape):
    return fill(seed, torch.Size(shape).numel(), torch.bfloat16).view(shape).cuda()


def differing(model, fast, inputs):
    """How many elements of each result differ from eager ones, in five calls. The first two are no replays."""
    found = []
    for turn in range(5):
        given = inputs[turn % len(inputs)]
        pairs = zip(
            *(one if isinstance(one, tuple) else (one,) for one in (fast(*given), model.eager(*given))), strict=True
        )
        found += [same_bits(mine, expected) for mine, expected in pairs]
    return found


def run_in_graphs(rank, world_size, rows, fill, options):
    with_norm, constant_weights = (options.get(name, False) for name in ("with_norm", "constant_weights"))
    from torch._dynamo.utils import counters

    model = RowParallel(rank, fill, with_norm, options.get("in_parts", False))
    inputs = [(drawn(fill, 10 * turn + rank, rows, INNER),) for turn in range(1, 3)]
    if with_norm:
        inputs = [(x, drawn(normal, 200 + turn, rows, WIDE)) for turn, (x,) in enumerate(inputs)]
    with torch.no_grad(), graphar.enable(constant_weights=constant_weights) as compile_pass:
        fast = torch.compile(model, fullgraph=True, mode="reduce-overhead")
        wrong = differing(model, fast, inputs)
    entries = [(entry.rewrite, entry.why_left) for entry in compile_pass.report.entries]
    return wrong, entries, counters["inductor"]["cudagraph_skips"]


def run_any_rows(rank, world_size):
    model = RowParallel(rank, normal)
    with torch.no_grad(), graphar.enable() as compile_pass:
        fast = torch.compile(model, fullgraph=True, dynamic=True)
        wrong = [differing(model, fast, [(drawn(normal, rank, rows, INNER),)]) for rows in (LEFT_APART, *PAYING)]
    return wrong, [(entry.rewrite, entry.why_left) for entry in compile_pass.report.entries]


def run_rows_of_a_whole(rank, world_size):
    model, x = RowParallel(rank, normal), drawn(normal, 10 + rank, 2048, INNER)
    with torch.no_grad(), graphar.enable(batch_invariant=True) as compile_pass:
        fast = torch.compile(model, fullgraph=True, dynamic=False)
        whole = fast(x)
        wrong = [same_bits(fast(x[:rows]), whole[:rows]) for rows in (1, 16, 64, LEFT_APART, 1024)]
    return wrong, {(entry.rewrite, entry.why_left) for entry in compile_pass.report.entries}


@pytest.mark.promise(
    'With `partition="batch_invariant"` a row of a fused matmul has the same bits for every number of rows.'
)
@pytest.mark.gpu
def test_rows_of_a_batch_invariant_layer_have_the_same_bits_in_graphs_of_any_number_of_rows(on_gpus):
    for wrong, entries in on_gpus(run_rows_of_a_whole):
        assert wrong == [0] * 5
        assert entries == {("allreduce", ""), ("matmul", "")}


REPLAYED = {  # rows, their values, further options, and what the report says
    "few rows": (PAYING[0], normal, {}, ["allreduce", "matmul"]),
    "many rows": (PAYING[1], normal, {}, ["allreduce", "matmul"]),
    "few rows and a norm": (PAYING[0], normal, {"with_norm": True}, ["norm", "matmul"]),
    "many rows and a norm": (PAYING[1], normal, {"with_norm": True}, ["norm", "matmul"]),
    "a constant weight": (PAYING[0], normal, {"constant_weights": True}, ["allreduce", "matmul"]),
    "both": (PAYING[0], normal, {"constant_weights": True, "with_norm": True}, ["norm", "matmul"]),
    "divided tokens": (PAYING[1], normal, {"in_parts": True}, ["reducescatter", "matmul"]),
    # Any matmul adds integers up alike.
    "rows that do not pay": (LEFT_APART, integers, {}, ["allreduce", "matmul: not known to be faster as one op"]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", REPLAYED)
def test_a_layer_replays_in_cuda_graphs_as_one_op_where_that_pays(on_gpus, name):
    rows, fill, options, expected = REPLAYED[name]
    for wrong, entries, skips in on_gpus(run_in_graphs, rows, fill, options):
        assert wrong == [0] * (10 if "with_norm" in options else 5)
        assert [": ".join(filter(None, entry)) for entry in entries] == expected
        assert skips == 0


@pytest.mark.gpu
def test_a_layer_of_any_number_of_rows_is_the_fused_op_once_for_all(on_gpus):
    for wrong, entries in on_gpus(run_any_rows):
        assert wrong == [[0] * 5] * 3
        assert entries == [("allreduce", ""), ("matmul", "")]
