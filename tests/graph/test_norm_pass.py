"""The pass's rewrite of an all-reduce, residual and norm: the forms it knows, what it leaves, and the bits it gives."""

import operator

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.ops import norms
from graphar.ops.norms import NORM as OP
from tests.cases import same_bits
from tests.graph.graphs import EPS, NORMS, RANKS, Traced, given, llamas, rewritten, scattered, summed, torchs
from tests.parallel_models import compiled

torch_ops, ops, aten = torch.ops._c10d_functional, torch.ops.graphar, torch.ops.aten
COLUMNS, TOKENS = 64, (5, 9, 12)


OFFSETS = {"torch's": 0.0, "Llama's": 0.0, "Gemma's": 1.0}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COMPILED = {"torch's": torch.bfloat16, "Llama's": torch.float32, "Gemma's": torch.bfloat16}
every_norm = pytest.mark.parametrize("name", NORMS)


def traced(function, columns=COLUMNS, **kinds):
    return Traced(function, (8, columns), (8, columns), (columns,), **kinds)


def traced_parts(function, part=None, columns=COLUMNS, **kinds):
    """Traces a function of the summed x [8, columns], of this rank's residual of shape ``part``, and of a weight."""
    part = part or (2, columns)
    return Traced(function, (2 * RANKS, columns), part, part[-1:], **kinds)


PARTS = {"rank": 0, "sizes": [2] * RANKS}
FUSED = {  # by the collective, a layer's sum, how it is traced, and the fused op with what a call of it is told
    "allreduce": (summed, traced, norms.NORM, {}),
    "reducescatter": (scattered, traced_parts, norms.SCATTERED_NORM, {"output": "like_input"} | PARTS),
}


@every_norm
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("collective", FUSED)
def test_a_sum_a_residual_and_a_norm_become_one_op(make_pass, name, dtype, collective):
    total, trace, op, place = FUSED[collective]
    compile_pass = make_pass()

    graph = rewritten(compile_pass, trace(lambda x, y, w: NORMS[name](y + total(x), w), dtype=dtype)).graph

    graph.eliminate_dead_code()
    x, residual, weight, fused, normed, output = graph.nodes
    assert fused.target is op.one is getattr(ops, f"{collective}_residual_rmsnorm").default
    numbers = {"eps": pytest.approx(EPS, rel=1e-6), "weight_offset": OFFSETS[name]}
    assert fused.args == (x, residual, weight, *op.arguments(**numbers, **place))
    assert (normed.target, normed.args, output.args) == (operator.getitem, (fused, 0), (normed,))
    assert str(compile_pass.report).endswith(f"in group '0': graphar::{collective}_residual_rmsnorm")
    assert "1 collective became graphar's" in str(compile_pass.report)


def test_what_else_uses_the_sum_with_its_residual_gets_the_second_result(make_pass):
    def layer(x, y, w):
        residual = summed(x) + y
        return torchs(residual, w), residual * 2

    graph = rewritten(make_pass(), traced(layer)).graph

    *_, doubled, _ = graph.nodes
    taken = doubled.args[0]
    assert (taken.target, taken.args[1]) == (operator.getitem, 1)


def test_a_sum_may_be_seen_in_another_shape_before_the_residual(make_pass):
    def layer(x, y, w):
        return llamas(y + summed(x).view(2, 4, -1), w)

    drawing = rewritten(make_pass(), Traced(layer, (8, COLUMNS), (2, 4, COLUMNS), (COLUMNS,)))

    _, _, _, view, fused, *_ = drawing.graph.nodes
    assert fused.args[0] is view
    assert list(view.args[1]) == [2, 4, -1]
    assert [tuple(one.shape) for one in fused.meta["val"]] == [(2, 4, COLUMNS)] * 2


def test_layers_become_an_op_each_and_stay_in_their_order(make_pass):
    def layers(x, y, w):
        residual = y + summed(x)
        residual = residual + summed(torchs(residual, w))
        return torchs(residual, w)

    drawing = rewritten(make_pass(), traced(layers))

    assert [one for one in drawing.calls() if one is not operator.getitem] == [
        *(ops.allreduce_residual_rmsnorm.default,) * 2
    ]


def test_of_two_sums_that_are_added_one_is_the_residual(make_pass):
    drawing = rewritten(make_pass(), traced(lambda x, y, w: torchs(summed(x) + summed(y), w)))

    assert drawing.calls() == [
        ops.allreduce.default,
        ops.allreduce_residual_rmsnorm.default,
        operator.getitem,
        operator.getitem,
    ]


def test_a_call_after_a_norm_that_it_does_not_need_is_tied_to_its_first_result(make_pass):
    def both(x, y, w):
        return torchs(y + summed(x), w), summed(x * 2)

    _, *_, tied, _ = rewritten(make_pass(), traced(both)).graph.nodes

    assert tied.target is ops.allreduce.default
    (first,) = given(tied)["after"]
    assert (first.target, first.args[1]) == (operator.getitem, 0)


def test_a_norm_after_a_call_that_it_does_not_need_is_tied_to_it(make_pass):
    def both(x, y, w):
        first = summed(x * 2)
        return first, torchs(y + summed(x), w)

    drawing = rewritten(make_pass(), traced(both))

    first, fused = (node for node in drawing.graph.nodes if node.target in (ops.allreduce.default, OP.one))
    assert fused.target is OP.one
    assert given(fused)["after"] == [first]


def test_a_scattered_sum_that_is_seen_in_another_shape_has_its_residual_and_results_reshaped(make_pass):
    def layer(x, y, w):
        residual = y + scattered(x).view(1, 2, -1)
        return llamas(residual, w), residual

    graph = rewritten(make_pass(), traced_parts(layer, (1, 2, COLUMNS))).graph

    (fused,) = [node for node in graph.nodes if node.target is norms.SCATTERED_NORM.one]
    assert given(fused)["residual"].meta["val"].shape == (2, COLUMNS)
    assert [one.meta["val"].shape for one in graph.output_node().args[0]] == [(1, 2, COLUMNS)] * 2


def with_use_of(total):
    def layer(x, y, w):
        added = total(x)
        return torchs(y + added, w), added * 2

    return layer


def with_inverse(x, y, w):
    wide = (y + summed(x)).float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * inverse * w).to(x.dtype), inverse


def with_its_own_weight(x, y, w):
    residual = y + summed(x)
    return llamas(residual, residual.select(0, 0))


def written(x, y, w, of=None, dim=-1, eps=EPS, dtype=None):
    """A norm as models write it, of the sum and a residual; of something else than what is squared, if asked for."""
    wide = (y + summed(x)).float()
    return ((wide if of is None else of) * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + eps) * w).to(
        dtype or x.dtype
    )


def in_narrow(x, y, w):
    residual = y + summed(x)
    return residual * torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + EPS) * w


LEFT = {  # by reason
    "the sum has further uses": with_use_of(summed),
    "what is between the sum and the norm has further uses": with_inverse,
    "graphar has sums, not max": lambda x, y, w: torchs(y + summed(x, "max"), w),
    "what is squared is not what is normed, or has further uses": lambda *t: written(*t, of=t[1].float()),
    "the norm gives another dtype than the sum": lambda *t: written(*t, dtype=torch.half),
    "it is no RMSNorm: output follows aten.mul.Tensor": lambda *t: written(*t, dtype=torch.float32),
    "the norm is not over the last dimension alone": lambda *t: written(*t, dim=0),
    "the norm's weight is made after the sum": with_its_own_weight,
    "no norm for torch.float64": lambda x, y, w: llamas(y + summed(x), w),
    "the norm's eps is not a number": lambda *t: written(*t, eps=t[2].select(0, 0).float()),
    "the norm has no weight": lambda x, y, w: torch.nn.functional.rms_norm(y + summed(x), w.shape) * 2,
    "the norm's weight is not one torch.bfloat16 a column": lambda x, y, w: llamas(y + summed(x), y),
    "the residual is not like the sum": lambda x, y, w: torchs(w + summed(x), w),
    "something is added with a factor": lambda x, y, w: torchs(torch.add(y, summed(x), alpha=2), w),
    "no residual is added to the sum": lambda x, y, w: torchs(summed(x) + 1, w),
    "the norm is not in fp32": in_narrow,
    "no kernel norms rows of 33 columns": lambda x, y, w: torchs(y + summed(x), w),
}
LEFT_SCATTERED = {
    "the sum is seen in another shape": lambda x, y, w: torchs(y + scattered(x).view(4, -1), w),
    "the sum has further uses": with_use_of(scattered),
    "graphar has sums, not avg": lambda x, y, w: torchs(y + scattered(x, reduction="avg"), w),
    "the scattered tensor has no rows": lambda x, y, w: torchs(y + scattered(x.flatten()), w),
    "no kernel norms rows of 33 columns": lambda x, y, w: torchs(y + scattered(x), w),
}
KINDS = {  # by reason: how it is traced
    "no norm for torch.float64": {"dtype": torch.float64},
    "no kernel norms rows of 33 columns": {"columns": 33, "device": "cuda"},
    "the sum is seen in another shape": {"part": (4, COLUMNS // 2)},
    "the scattered tensor has no rows": {"part": (2 * COLUMNS,)},
}


@pytest.mark.parametrize(
    ("collective", "why"), [(op, why) for op, left in zip(FUSED, (LEFT, LEFT_SCATTERED), strict=True) for why in left]
)
def test_another_form_is_left_with_the_reason_and_its_sum_rewritten_alone(make_pass, collective, why):
    function, (_, trace, op, _) = (LEFT if collective == "allreduce" else LEFT_SCATTERED)[why], FUSED[collective]
    compile_pass = make_pass()

    drawing = rewritten(compile_pass, trace(function, **KINDS.get(why, {})))

    entries = [(entry.rewrite, entry.why_left) for entry in compile_pass.report.entries]
    assert entries[0] == ("norm", why)
    assert entries[1][0] == collective
    assert op.one not in drawing.calls()


def test_what_is_turned_off_is_an_all_reduce_and_the_report_says_so(make_pass):
    compile_pass = make_pass(off=["norm"])

    drawing = rewritten(compile_pass, traced(lambda x, y, w: torchs(y + summed(x), w)))

    assert drawing.calls()[0] is ops.allreduce.default
    assert [str(entry).rpartition("'0': ")[2] for entry in compile_pass.report.entries] == [
        "no norm: turned off",
        "graphar::allreduce",
    ]
    counts = str(compile_pass.report).splitlines()[0]
    assert counts == "1 graph: 1 collective became graphar's, 0 stayed torch's, 1 fusion refused"


def test_a_weight_that_a_rounded_sum_makes_is_that_weight(make_pass):
    graph = rewritten(
        make_pass(), traced(lambda x, y, w: (lambda weight: llamas(y + summed(x), weight))(1.0 + w))
    ).graph

    fused = next(node for node in graph.nodes if node.target is ops.allreduce_residual_rmsnorm.default)
    assert fused.args[2].target is aten.add.Tensor
    assert given(fused)["weight_offset"] == 0.0


def run_layer(rank, name, dtype):
    """The end of a layer for some token counts: compiled, by graphar's op, and uncompiled."""
    compile_pass = graphar.compile_pass()
    weight = torch.linspace(-1, 2, COLUMNS).to(dtype)

    def layer(x, residual):
        residual = residual + summed(x * 2)
        return NORMS[name](residual, weight), residual

    fast, results = compiled(layer, compile_pass), []
    for count in TOKENS:
        generator = torch.Generator().manual_seed(count)
        residual, *parts = torch.randn(3, count, COLUMNS, generator=generator).to(dtype)
        call = (parts[rank] * 2, residual, weight, EPS)
        mine = fast(parts[rank], residual)
        results.append(
            (mine, graphar.allreduce_residual_rmsnorm(*call, weight_offset=OFFSETS[name]), layer(parts[rank], residual))
        )
    return results, [entry.rewrite for entry in compile_pass.report.entries], compile_pass.report.graphs


class Layer(torch.nn.Module):
    """As in a transformer: [batch, tokens, columns], a residual around the linear layers, and a norm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(COLUMNS, 32, bias=False), torch.nn.Linear(32, COLUMNS, bias=False)
        self.norm = torch.nn.RMSNorm(COLUMNS, EPS)

    def forward(self, x):
        x = x + self.down(torch.relu(self.up(x)))
        return self.norm(x), x


PLANS = {"plan": ["norm"], "sequence-parallel plan": ["norm", "allgather"]}  # and the rewrites of a graph


def run_plan(rank, world_size, in_parts):
    """Results of a layer by a plan of torch's, and of the whole layer; of divided tokens, this rank's."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    mesh, compile_pass = dist.device_mesh.init_device_mesh("cpu", (world_size,)), graphar.compile_pass()
    tokens = Shard(1) if in_parts else Replicate()
    layers = {"up": ColwiseParallel(input_layouts=tokens), "down": RowwiseParallel(output_layouts=tokens)}
    layers |= {"norm": SequenceParallel(use_local_output=True)} if in_parts else {}
    fast, whole, results = compiled(parallelize_module(Layer(), mesh, layers), compile_pass), Layer(), []

    def own(x):
        return x.chunk(world_size, 1)[rank] if in_parts else x

    for count in TOKENS:
        x = torch.randn(2, world_size * count, COLUMNS, generator=torch.Generator().manual_seed(count))
        results.append((fast(own(x)), [own(one) for one in whole(x)]))
    return results, [entry.rewrite for entry in compile_pass.report.rewritten], compile_pass.report.graphs


def run_layers(rank, world_size):
    with torch.no_grad():
        found = {name: run_layer(rank, name, COMPILED[name]) for name in NORMS}
        return found | {name: run_plan(rank, world_size, "sequence" in name) for name in PLANS}


@pytest.mark.promise("Models under `graphar.enable()` and layers of `graphar.nn` have the bits of eager calls.")
@every_norm
def test_a_compiled_layer_has_the_bits_of_eager_graphar_and_is_close_to_the_model(results_of, name):
    for results, rewrites, graphs in (rank[name] for rank in results_of(run_layers)):
        assert rewrites == ["norm"] * graphs
        for mine, graphars, models in results:
            assert [same_bits(one, other) for one, other in zip(mine, graphars, strict=True)] == [0, 0]
            for one, other in zip(mine, models, strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", PLANS)
def test_an_unmodified_plan_of_torch_gets_the_fused_norm(results_of, name):
    of_ranks = [rank[name] for rank in results_of(run_layers)]

    for results, rewrites, graphs in of_ranks:
        assert rewrites == PLANS[name] * graphs
        for (mine, whole), (theirs, _) in zip(results, of_ranks[0][0], strict=True):
            for one, other, first in zip(mine, whole, theirs, strict=True):
                torch.testing.assert_close(one, other)
                assert name != "plan" or same_bits(one, first) == 0
