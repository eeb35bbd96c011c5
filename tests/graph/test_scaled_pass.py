"""The pass's rewrite of a product of e4m3 operands with scales and its sum: its forms, what it leaves, and the bits."""

import functools
import operator

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import ScalingType, scaled_mm

import graphar
from graphar.graph import places
from graphar.ops.register import op_of
from tests.cases import same_bits
from tests.graph.graphs import (
    PAYS,
    RANKS,
    Traced,
    fused_in,
    gathered,
    given,
    inputs_of,
    llamas,
    of_matmul,
    rewritten,
    scattered,
    summed,
)
from tests.parallel_models import compiled

ops, aten, torch_ops = torch.ops.graphar, torch.ops.aten, torch.ops._c10d_functional
FP8, FP32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
ROWS, COLUMNS, K = 8, 256, 384


def torchs(a, w, a_scale, w_scale, out_dtype=BF16, **more):
    return torch._scaled_mm(a, w.t(), a_scale, w_scale, out_dtype=out_dtype, **more)


def second(a, w, a_scale, w_scale, recipe_a=ScalingType.RowWise, recipe_b=ScalingType.RowWise, out_dtype=BF16):
    return scaled_mm(a, w.t(), a_scale, recipe_a, w_scale, recipe_b, output_dtype=out_dtype)


def in_blocks(a, w, a_scale, w_scale):
    """torch's second form with scales as it wants them in memory: of ``w`` padded to a multiple of 4 blocks of K."""
    padded = torch.nn.functional.pad(w_scale, (0, 4 - w_scale.shape[1] % 4))
    found = a_scale.t().contiguous().t(), ScalingType.BlockWise1x128, padded.t(), ScalingType.BlockWise128x128
    return scaled_mm(a, w.t(), *found, output_dtype=BF16)


def traced(function, of_a=(ROWS, 1), of_w=(1, COLUMNS), *more, rows=(ROWS,), kinds=(FP8, FP8, FP32, FP32), **how):
    """Traces a function of a [rows, K], w [COLUMNS, K], their scales, and ``more`` of bf16."""
    shapes, kinds = ((*rows, K), (COLUMNS, K), of_a, of_w, *more), [*kinds, *[BF16] * len(more)]
    return Traced(function, *shapes, dtype=kinds, **how)


def left_because(compile_pass, drawing):
    """Why the pass leaves the product of a graph, which it does."""
    calls = rewritten(compile_pass, drawing).calls()
    assert aten._scaled_mm.default in calls or aten._scaled_mm_v2.default in calls
    (entry,) = of_matmul(compile_pass.report)
    return entry.why_left


def of_stored_blocks(a, w, a_scale, w_scale):
    return torchs(a, w, a_scale, w_scale.t())  # as checkpoints store them


PRODUCTS = {  # the product, the shapes of its scales, and the dtype of its result
    "rows": (torchs, (ROWS, 1), (1, COLUMNS), BF16),
    "tensors": (torchs, (), (), BF16),
    "a tensor as one element": (torchs, (1,), (1,), BF16),
    "rows in the second form": (second, (ROWS, 1), (1, COLUMNS), BF16),
    "fast accumulation": (functools.partial(torchs, use_fast_accum=True), (ROWS, 1), (1, COLUMNS), BF16),
    "blocks": (of_stored_blocks, (ROWS, 3), (2, 3), BF16),
    "fp16": (functools.partial(torchs, out_dtype=torch.float16), (ROWS, 1), (1, COLUMNS), torch.float16),
}


@pytest.mark.parametrize(("product", "of_a", "of_w", "dtype"), PRODUCTS.values(), ids=PRODUCTS)
def test_a_product_with_scales_and_its_sum_become_one_op(make_pass, pays, product, of_a, of_w, dtype):
    compile_pass = make_pass()

    graph = rewritten(compile_pass, traced(lambda *tensors: summed(product(*tensors)), of_a, of_w)).graph

    fused = fused_in(graph)
    assert fused.target is ops.fused_matmul_allreduce.default
    assert [*fused.args[:2], *given(fused)["scales"]] == inputs_of(graph)
    assert given(fused)["scaled_dtype"] == fused.meta["val"].dtype == dtype
    assert not [node for node in graph.nodes if node.target in (aten._scaled_mm.default, aten._scaled_mm_v2.default)]
    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == [""]


def test_padded_scales_of_blocks_lose_their_padding(make_pass, pays):
    drawing = traced(lambda *tensors: summed(in_blocks(*tensors)), (ROWS, 3), (2, 3))

    fused = fused_in(rewritten(make_pass(), drawing).graph)

    of_a, of_w = [one.meta["val"].shape for one in given(fused)["scales"]]
    assert (of_a, of_w) == ((ROWS, 3), (2, 3))


def test_a_product_and_its_reduce_scatter_become_one_op(make_pass, pays):
    graph = rewritten(make_pass(), traced(lambda *tensors: scattered(torchs(*tensors)))).graph

    fused = fused_in(graph)
    assert fused.target is ops.fused_matmul_reducescatter.default
    assert given(fused)["sizes"] == [ROWS // RANKS] * RANKS
    assert [one.op for one in given(fused)["scales"]] == ["placeholder"] * 2


@pytest.mark.parametrize("of_a", [(2, ROWS, 1), ()], ids=["of rows", "a number"])
def test_rows_of_scales_are_put_in_the_order_of_the_rows_that_they_scale(make_pass, pays, of_a):
    def layer(a, w, a_scale, w_scale):
        y = torchs(a.view(-1, K), w, a_scale.view(-1, 1) if a_scale.ndim else a_scale, w_scale).view(2, ROWS, -1)
        return scattered(torch.cat(y.chunk(RANKS, 1)))

    of_w = (1, COLUMNS) if of_a else ()
    fused = fused_in(rewritten(make_pass(), traced(layer, of_a, of_w, rows=(2, ROWS))).graph)

    assert given(fused)["a"].meta["val"].shape == (2 * RANKS, ROWS // RANKS, K)
    scale = given(fused)["scales"][0].meta["val"]
    assert scale.shape == ((2 * RANKS, ROWS // RANKS, 1) if of_a else ())


NORMED = {
    "a sum": (ops.fused_matmul_allreduce_residual_rmsnorm.default, summed, ROWS),
    "a reduce-scatter": (ops.fused_matmul_reducescatter_residual_rmsnorm.default, scattered, ROWS // RANKS),
}


@pytest.mark.parametrize("name", NORMED)
def test_a_product_its_sum_and_a_norm_become_one_op(make_pass, pays, name):
    target, total, rows = NORMED[name]

    def layer(a, w, a_scale, w_scale, residual, weight):
        return llamas(residual + total(torchs(a, w, a_scale, w_scale)), weight)

    compile_pass = make_pass()
    drawing = traced(layer, (ROWS, 1), (1, COLUMNS), (rows, COLUMNS), (COLUMNS,))
    graph = rewritten(compile_pass, drawing).graph

    fused, inputs = fused_in(graph), inputs_of(graph)
    assert fused.target is target
    assert [*fused.args[:2], *given(fused)["scales"], *fused.args[2:4]] == inputs
    assert [one.dtype for one in fused.meta["val"]] == [BF16] * 2
    assert [(entry.rewrite, entry.why_left) for entry in compile_pass.report.entries] == [("norm", ""), ("matmul", "")]


def test_constant_weights_and_scales_go_together(make_pass, pays):
    drawing = traced(lambda *tensors: summed(torchs(*tensors)))

    fused = fused_in(rewritten(make_pass(constant_weights=True), drawing).graph)

    assert given(fused)["constant_weight"] is False  # an input that is no parameter
    assert len(given(fused)["scales"]) == 2


@pytest.mark.parametrize("rows", [8, 3000])
def test_a_batch_invariant_pass_fuses_products_with_scales_at_every_size(make_pass, rows):
    compile_pass = make_pass(batch_invariant=True)
    drawing = traced(lambda *tensors: summed(torchs(*tensors)), (rows, 1), rows=(rows,), device="cuda")

    fused = fused_in(rewritten(compile_pass, drawing).graph)

    assert given(fused)["partition"] == "auto"  # each is batch-invariant
    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == [""]


def traced_gather(function, *more, of_a=(ROWS, 1), of_w=(1, COLUMNS), kinds=(), rows=(ROWS,)):
    """Traces a function of this rank's rows a, w [COLUMNS, K], their scales, and ``more``."""
    kinds = [FP8, FP8, FP32, FP32, *kinds]
    return Traced(function, (*rows, K), (COLUMNS, K), of_a, of_w, *more, dtype=kinds)


@pytest.mark.parametrize("in_blocks", [False, True], ids=["rows", "blocks"])
def test_gathered_rows_and_scales_and_their_product_become_one_op(make_pass, pays, in_blocks):
    def layer(a, w, a_scale, w_scale):
        return torchs(gathered(a), w, gathered(a_scale), w_scale.t() if in_blocks else w_scale)

    shapes = {"of_a": (ROWS, 3), "of_w": (2, 3)} if in_blocks else {}
    compile_pass = make_pass()
    drawing = rewritten(compile_pass, traced_gather(layer, **shapes))

    fused = fused_in(drawing.graph)
    a, w, a_scale, w_scale = inputs_of(drawing.graph)
    assert fused.target is ops.fused_allgather_matmul.default
    assert (given(fused)["a"], given(fused)["w"], given(fused)["scales"]) == (a, w, [a_scale, w_scale])
    assert given(fused)["sizes"] == [ROWS] * RANKS
    assert fused.meta["val"][0].dtype == BF16
    assert fused.meta["val"][0].shape == (RANKS * ROWS, COLUMNS)
    assert [entry.why_left for entry in of_matmul(compile_pass.report)] == [""]


def test_the_bias_of_a_gathered_product_is_added_by_the_op(make_pass, pays):
    def layer(a, w, a_scale, w_scale, bias):
        return torchs(gathered(a), w, gathered(a_scale), w_scale, bias=bias)

    graph = rewritten(make_pass(), traced_gather(layer, (COLUMNS,), kinds=[BF16])).graph

    *_, bias = inputs_of(graph)
    assert given(fused_in(graph))["bias"] == [bias]


def test_of_several_products_others_take_the_gathered_rows_and_their_scales(make_pass, pays):
    def layer(a, w, a_scale, w_scale, v, v_scale):
        rows, scales = gathered(a), gathered(a_scale)
        return torchs(rows, w, scales, w_scale), torchs(rows, v, scales, v_scale)

    drawing = traced_gather(layer, (128, K), (1, 128), kinds=[FP8, FP32])
    graph = rewritten(make_pass(), drawing).graph

    (other,) = [node for node in graph.nodes if node.target is aten._scaled_mm.default]
    rows, _, scales, _ = other.args[:4]
    fused = fused_in(graph)
    assert fused.target is ops.fused_allgather_matmul.default
    assert (rows.target, *rows.args, scales.target, *scales.args) == (
        operator.getitem,
        fused,
        1,
        operator.getitem,
        fused,
        2,
    )
    assert [one.meta["val"].shape for one in (rows, scales)] == [(RANKS * ROWS, K), (RANKS * ROWS, 1)]


def test_scales_that_are_used_before_the_rows_are_gathered_keep_a_gather_of_their_own(make_pass, pays):
    def layer(a, w, a_scale, w_scale, v, v_scale):
        scales = gathered(a_scale)
        doubled, rows = scales * 2, gathered(a)
        return doubled, torchs(rows, w, scales, w_scale), torchs(rows, v, scales, v_scale)

    drawing = traced_gather(layer, (128, K), (1, 128), kinds=[FP8, FP32])
    graph = rewritten(make_pass(), drawing).graph

    gather, fused = [node for node in graph.nodes if op_of(node.target)]
    assert (gather.target, fused.target) == (ops.allgather.default, ops.fused_allgather_matmul.default)


def with_bias(*tensors):
    return summed(torchs(*tensors[:4], bias=tensors[4]))


def added(*tensors):
    return summed(torchs(*tensors) + torchs(*tensors))


def scaled_again(a, w, a_scale, w_scale, scale):
    return summed(torchs(a, w, a_scale, w_scale, scale_result=scale.float()))


def of_blocks_alike(a, w, a_scale, w_scale):
    a_scale, w_scale = [one.t().contiguous().t() for one in (a_scale, w_scale)]
    return summed(second(a, w, a_scale, w_scale, ScalingType.BlockWise1x128, ScalingType.BlockWise1x128))


def alone(*tensors):
    return summed(torchs(*tensors))


def with_scales_of_other_rows(a, w, a_scale, w_scale):
    return torchs(gathered(a), w, a_scale, w_scale)


def with_a_number_for_all_rows(a, w, a_scale, w_scale):
    return torchs(gathered(a), w, a_scale[0, 0], w_scale[0, 0])


def with_rows_of_another_order(a, w, a_scale, w_scale):
    return torchs(gathered(a.view(2, -1, K), 1).view(-1, K), w, gathered(a_scale), w_scale)


OTHER_DTYPE = f"graphar multiplies {FP8} by {FP8}, not torch.float8_e5m2 by {FP8}"
NOT_GATHERED = "the scales are not gathered like the rows"
LEFT = [  # the reason, the function, its shapes, and how it is traced
    ("each rank adds a bias to its product", with_bias, [(ROWS, 1), (1, COLUMNS), (COLUMNS,)], {}),
    ("several products are added before the sum", added, [], {}),
    (OTHER_DTYPE, alone, [], {"kinds": (torch.float8_e5m2, FP8, FP32, FP32)}),
    ("the scales are neither of rows nor of blocks, in fp32", alone, [(ROWS, 3), (3, COLUMNS)], {}),
    ("the product has further uses", lambda *tensors: (lambda y: (summed(y), y))(torchs(*tensors)), [], {}),
    ("no matmul of torch.float32 sums its tiles", lambda *one: summed(torchs(*one, out_dtype=FP32)), [], {}),
    ("the product is scaled again", scaled_again, [(), (), ()], {}),
    ("graphar has no such recipe of scales", of_blocks_alike, [(ROWS, 3), (COLUMNS, 3)], {}),
    ("rank 3 has no GPU of sm_90a", alone, [], {"device": "cuda"}),
    (NOT_GATHERED, with_scales_of_other_rows, [(RANKS * ROWS, 1)], {}),
    (NOT_GATHERED, with_a_number_for_all_rows, [], {}),
    (NOT_GATHERED, with_rows_of_another_order, [], {}),
]


@pytest.mark.parametrize(("why", "function", "shapes", "how"), LEFT)
def test_others_are_left_and_the_report_says_why(make_pass, pays, why, function, shapes, how):
    where = {"arch": "sm_80"} if "sm_90a" in why else {}

    assert left_because(make_pass(**where), traced(function, *shapes, **how)) == why


def test_sizes_that_were_not_measured_to_be_faster_are_left(make_pass):
    assert left_because(make_pass(), traced(alone)) == "not known to be faster as one op"


def test_a_tensor_parallel_invariant_pass_leaves_them_and_calls_them_breaks(make_pass):
    compile_pass = make_pass(tp_invariant=True)

    why = left_because(compile_pass, traced(lambda *tensors: summed(torchs(*tensors))))

    assert why == "products with scales are not added as a tree"
    assert ("aten._scaled_mm.default", "graphar has no such product") in [
        (one.op, one.why) for one in compile_pass.report.breaks
    ]
    assert not compile_pass.report.is_tp_invariant


TOKENS = (6, 8, 10)


class RowParallel:
    """A row-parallel layer as it is written for torch's collectives, with its weight in e4m3."""

    def __init__(self, rank, world_size):
        generator = torch.Generator().manual_seed(1 + rank)
        self.weight = torch.randn(COLUMNS, K, generator=generator).to(FP8)
        self.w_scale = torch.rand(1, COLUMNS, generator=torch.Generator().manual_seed(0)) + 0.5

    def quantized(self, x):
        scale = x.float().abs().amax(-1, keepdim=True) / 448
        return (x / scale).to(FP8), scale

    def __call__(self, x):
        a, a_scale = self.quantized(x)
        y = torchs(a, self.weight, a_scale, self.w_scale)
        dist.all_reduce(y)
        return y

    def eager(self, x):
        """The result of the fused op, and that of torch's products."""
        a, a_scale = self.quantized(x)
        total = torchs(a, self.weight, a_scale, self.w_scale)
        dist.all_reduce(total)
        return graphar.fused_matmul_allreduce(a, self.weight, a_scale=a_scale, w_scale=self.w_scale), total


class OfDTensors(RowParallel):
    """The same layer, of DTensors, which torch multiplies in parts of K only with one scale for a whole tensor."""

    def __init__(self, rank, world_size):
        super().__init__(rank, world_size)
        self.w_scale = self.w_scale[0, 0]
        self.mesh = dist.device_mesh.init_device_mesh("cpu", (world_size,))

    def quantized(self, x):
        scale = x.float().abs().amax() / 448
        return (x / scale).to(FP8), scale

    def __call__(self, x):
        from torch.distributed.tensor import DTensor, Replicate, Shard

        a, a_scale = self.quantized(x)
        own, placed = [a, self.weight.t(), a_scale, self.w_scale], [Shard(1), Shard(0), Replicate(), Replicate()]
        given = [DTensor.from_local(one, self.mesh, [where]) for one, where in zip(own, placed, strict=True)]
        y = torch._scaled_mm(*given, out_dtype=BF16)
        return y.redistribute(placements=[Replicate()]).to_local()


class Gathering(RowParallel):
    """A column-parallel layer whose tokens are divided: rows of e4m3 and their scales are gathered."""

    def __call__(self, x):
        own = [dist._functional_collectives.all_gather_tensor(one, 0, dist.group.WORLD) for one in self.quantized(x)]
        return torchs(own[0], self.weight, own[1], self.w_scale)

    def eager(self, x):
        a, a_scale = self.quantized(x)
        rows, scales = graphar.allgather((a, a_scale))
        fused = graphar.fused_allgather_matmul(a, self.weight, a_scale=a_scale, w_scale=self.w_scale)
        return fused, torchs(rows, self.weight, scales, self.w_scale)


LAYERS = {"all-gather": Gathering, "all-reduce": RowParallel, "DTensor": OfDTensors}


def run_layers(rank, world_size):
    places.shipped_table = places.find_table = lambda name: PAYS
    found = {}
    for name, kind in LAYERS.items():
        torch._dynamo.reset()
        layer, compile_pass = kind(rank, world_size), graphar.compile_pass()
        fast = compiled(layer, compile_pass)
        inputs = [torch.randn(count, K, generator=torch.Generator().manual_seed(count)).to(BF16) for count in TOKENS]
        found[name] = [(fast(x), *layer.eager(x)) for x in inputs], of_matmul(compile_pass.report)
    return found


@pytest.mark.parametrize("name", LAYERS)
def test_a_compiled_layer_has_the_bits_of_the_fused_op_and_about_the_values_of_torchs(results_of, name):
    for found, entries in (rank[name] for rank in results_of(run_layers)):
        assert entries
        assert {entry.why_left for entry in entries} == {""}
        for mine, expected, theirs in found:
            assert same_bits(mine, expected) == 0
            torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.02)


WIDE, INNER = 8192, 512
PAYING = (8, 1024)  # rows, between two ranks


def run_in_graphs(rank, world_size, rows, in_blocks):
    """Differing elements of the fused op in five calls, the first two of which are no replays; the report; skips."""
    from torch._dynamo.utils import counters

    def layer(a, w, a_scale, w_scale):
        y = torchs(a, w, a_scale, w_scale.t())
        dist.all_reduce(y)
        return y

    torch.manual_seed(rank)
    a, w = torch.randn(rows, INNER, device="cuda").to(FP8), torch.randn(WIDE, INNER, device="cuda").to(FP8)
    shapes = [(INNER // 128, rows), (WIDE // 128, INNER // 128)] if in_blocks else [(1, rows), (WIDE, 1)]
    of_a, of_w = [torch.rand(shape, device="cuda") + 0.5 for shape in shapes]
    given = a, w, of_a.t(), of_w  # torch wants the first scales so in memory
    with torch.no_grad(), graphar.enable() as compile_pass:
        fast = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
        expected = graphar.fused_matmul_allreduce(a, w, a_scale=of_a.t(), w_scale=of_w)
        wrong = [same_bits(fast(*given), expected) for _ in range(5)]
    entries = [(entry.rewrite, entry.why_left) for entry in compile_pass.report.entries]
    return wrong, entries, counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
@pytest.mark.parametrize("in_blocks", [False, True], ids=["rows", "blocks"])
@pytest.mark.parametrize("rows", PAYING)
def test_a_scaled_product_of_a_size_that_pays_replays_the_fused_op_in_cuda_graphs(on_gpus, rows, in_blocks):
    for wrong, entries, skips in on_gpus(run_in_graphs, rows, in_blocks):
        assert wrong == [0] * 5
        assert entries == [("allreduce", ""), ("matmul", "")]
        assert skips == 0
