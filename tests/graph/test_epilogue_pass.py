"""The pass's rewrite of a sum over ranks and the pointwise operations that follow: what it takes, and what it gives."""

import pytest
import torch
from torch.nn import functional

import graphar
from graphar.numerics.epilogues.syntax import parse
from graphar.ops import sums
from tests.cases import same_bits
from tests.graph.graphs import RANKS, Traced, given, rewritten, scattered, summed, torchs
from tests.graph.test_norm_pass import traced
from tests.parallel_models import compiled

torch_ops, ops, aten = torch.ops._c10d_functional, torch.ops.graphar, torch.ops.aten
SHAPE = (8, 64)


def drawn(function, *shapes, **kinds):
    return Traced(function, SHAPE, *shapes, **kinds)


SUMS = {"all-reduce": (summed, ops.allreduce.default), "reduce-scatter": (scattered, ops.reducescatter.default)}
every_sum = pytest.mark.parametrize(("total", "op"), SUMS.values(), ids=SUMS)


def epilogue_of(drawing) -> str:
    (node,) = [one for one in drawing.graph.nodes if one.target in [op for _, op in SUMS.values()]]
    return given(node)["epilogue"]


TAKEN = {
    "relu": (lambda v: v.relu(), "relu(v)"),
    "numbers": (lambda v: (v * 2 + 1) / 3 - 0.5, "((((v * 2.0) + 1.0) / 3.0) - 0.5)"),
    "one minus": (lambda v: 1 - v, "(1.0 - v)"),
    "neg, tanh and exp": (lambda v: -v.tanh().exp(), "(-exp(tanh(v)))"),
    "clamp": (lambda v: v.clamp(-1, 2), "min(max(v, (-1.0)), 2.0)"),
    "a cast and back": (lambda v: v.float().mul(3).bfloat16(), "(v * 3.0)"),
    "a cast between": (lambda v: v.float().mul(3).half().float().add(1).bfloat16(), "(fp16((v * 3.0)) + 1.0)"),
    "a square": (lambda v: v.pow(2), "(v * v)"),
    "a sum of conditions": (lambda v: v * ((v > 0) + (v > 1)), "(v * (((v > 0.0) + (v > 1.0)) != 0.0))"),
    "a factor": (lambda v: torch.add(v, v, alpha=3), "(v + (v * 3.0))"),
}


@every_sum
@pytest.mark.parametrize(("function", "text"), TAKEN.values(), ids=TAKEN)
def test_operations_of_the_sum_and_numbers_become_an_epilogue(make_pass, function, text, total, op):
    compile_pass = make_pass(on=["epilogue"])

    drawing = rewritten(compile_pass, drawn(lambda x: function(total(x))))

    assert drawing.calls() == [op]
    assert epilogue_of(drawing) == text
    assert str(compile_pass.report).endswith("in group '0': one op with the pointwise operations behind it")


def test_a_reduce_scatter_is_told_this_ranks_part(make_pass):
    drawing = rewritten(make_pass(on=["epilogue"]), drawn(lambda x: scattered(x).relu()))

    x, node, _ = drawing.graph.nodes
    assert node.args == (x, *sums.SCATTER.arguments(epilogue="relu(v)", rank=0, axis=0, sizes=[2, 2, 2, 2]))
    assert tuple(node.meta["val"].shape) == (2, 64)


@pytest.mark.parametrize("activation", [functional.gelu, functional.silu, torch.sigmoid])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_activations_become_one_op_however_they_are_decomposed(make_pass, activation, dtype):
    drawing = rewritten(make_pass(on=["epilogue"]), drawn(lambda x: activation(summed(x)), dtype=dtype))

    assert drawing.calls() == [ops.allreduce.default]
    v = torch.linspace(-4, 4, 100)
    found = graphar.reference.allreduce([v], epilogue_of(drawing))
    torch.testing.assert_close(found, activation(v), rtol=1e-5, atol=1e-6)


@every_sum
def test_the_longest_part_that_nobody_else_looks_into_is_taken(make_pass, total, op):
    def layer(x, y):
        doubled = total(x) * 2
        return doubled + y, doubled.relu()

    shape = SHAPE if total is summed else (SHAPE[0] // RANKS, SHAPE[1])
    drawing = rewritten(make_pass(on=["epilogue"]), drawn(layer, shape))

    assert drawing.calls() == [op, aten.add.Tensor, aten.relu.default]
    assert epilogue_of(drawing) == "(v * 2.0)"


@every_sum
def test_views_of_the_sum_are_views_of_the_result(make_pass, total, op):
    drawing = rewritten(make_pass(on=["epilogue"]), drawn(lambda x: total(x).view(2, -1, 64).relu()))

    assert drawing.calls() == [op, aten.view.default]
    *_, view, _ = drawing.graph.nodes
    assert tuple(view.meta["val"].shape) == (2, SHAPE[0] // (2 if total is summed else 2 * RANKS), 64)


ENDS = {
    "integers": lambda v: v.int(),
    "truth": lambda v: v.bool(),
    "another device": lambda v: v.to("cpu"),
    "several results": lambda v: v.max(-1),
    "fp64": lambda v: v.double() * 2,
}


@pytest.mark.parametrize("following", ENDS.values(), ids=ENDS)
def test_what_no_epilogue_gives_is_done_to_its_result(make_pass, following):
    drawing = rewritten(make_pass(on=["epilogue"]), drawn(lambda x: following(summed(x).relu()), device="cuda"))

    assert epilogue_of(drawing) == "relu(v)"
    assert len(drawing.calls()) > 1


def test_of_a_longer_chain_than_can_be_an_epilogue_the_first_operations_are_taken(make_pass):
    def layer(x):
        v = summed(x)
        for _ in range(100):
            v = v.sin()
        return v

    drawing = rewritten(make_pass(on=["epilogue"]), drawn(layer))

    taken = str(parse(epilogue_of(drawing))).count("sin")
    assert 0 < taken < 100
    assert drawing.calls()[1:] == [aten.sin.default] * (100 - taken)


def test_a_residual_and_a_norm_stay_a_norm(make_pass):
    drawing = rewritten(make_pass(on=["epilogue"]), traced(lambda x, y, w: torchs(y + summed(x), w)))

    assert drawing.calls()[0] is ops.allreduce_residual_rmsnorm.default


def with_the_sum(total):
    return total.relu(), total


USED = "the sum, or what is computed of it, has further uses"
LEFT = {
    "the sum is used": (with_the_sum, {}, {}, USED),
    "another dtype": (lambda v: v.float().mul(2), {}, {}, USED),
    "integers": (lambda v: v.float().relu(), {}, {"dtype": torch.int32}, "no epilogue for torch.int32"),
    "a maximum": (torch.relu, {"reduction": "max"}, {}, "graphar has sums, not max"),
}


@every_sum
@pytest.mark.parametrize(("function", "of_sum", "kinds", "why"), LEFT.values(), ids=LEFT)
def test_what_is_left_has_its_reason_and_is_tried_as_a_sum(make_pass, function, of_sum, kinds, why, total, op):
    compile_pass = make_pass(on=["epilogue"])

    drawing = rewritten(compile_pass, drawn(lambda x: function(total(x, **of_sum)), **kinds))

    first, second = compile_pass.report.entries
    assert (first.rewrite, first.why_left) == ("epilogue", why)
    assert second.rewrite == op.name().removeprefix("graphar::")
    assert not any(given(node)["epilogue"] for node in drawing.graph.nodes if node.target is op)


def test_a_tensor_ends_what_is_taken(make_pass):
    compile_pass = make_pass(on=["epilogue"])

    drawing = rewritten(compile_pass, drawn(lambda x, y: (summed(x) + y).relu(), SHAPE))

    assert drawing.calls() == [ops.allreduce.default, aten.add.Tensor, aten.relu.default]
    assert epilogue_of(drawing) == ""
    assert [entry.rewrite for entry in compile_pass.report.entries] == ["allreduce"]


def with_a_view_of_the_sum(x):
    total = summed(x)
    return total.view(-1).relu(), total


@pytest.mark.parametrize("function", [lambda x: summed(x).float(), with_a_view_of_the_sum], ids=["cast", "view"])
def test_a_cast_or_a_view_alone_is_no_epilogue(make_pass, function):
    compile_pass = make_pass(on=["epilogue"])

    rewritten(compile_pass, drawn(function))

    assert [entry.rewrite for entry in compile_pass.report.entries] == ["allreduce"]


@pytest.mark.parametrize("how", [{}, {"on": ["epilogue"], "off": ["epilogue"]}], ids=["not asked for", "turned off"])
def test_what_is_not_asked_for_or_turned_off_is_an_all_reduce_and_the_report_says_so(make_pass, how):
    compile_pass = make_pass(**how)

    drawing = rewritten(compile_pass, drawn(lambda x: summed(x).relu()))

    assert drawing.calls() == [ops.allreduce.default, aten.relu.default]
    assert epilogue_of(drawing) == ""
    assert ("no epilogue: turned off" in str(compile_pass.report)) == bool(how)


TOKENS = (6, 10, 12)


def run_layer(rank, world_size):
    """For each number of tokens: the whole sum, this rank's part of the scattered sum, and their expected values."""
    compile_pass, found = graphar.compile_pass(on=["epilogue"]), []

    def layer(x):
        return [functional.gelu(total) * 0.5 for total in (summed(x * 2), scattered(x * 2, world_size))]

    fast = compiled(layer, compile_pass)
    with torch.no_grad():
        for count in TOKENS:
            parts = torch.randn(world_size, count, 64, generator=torch.Generator().manual_seed(count)).bfloat16()
            expected = graphar.reference.allreduce([part * 2 for part in parts], "gelu(v) * 0.5")
            found.append((*fast(parts[rank]), expected, expected.chunk(world_size)[rank]))
    return found, [entry.rewrite for entry in compile_pass.report.rewritten]


def test_a_compiled_layer_gives_the_epilogue_of_the_exact_sums(results_of):
    for found, rewrites in results_of(run_layer):
        assert rewrites == ["epilogue"] * 4  # the second graph is for any number of tokens
        for whole, part, expected, expected_part in found:
            torch.testing.assert_close(whole, expected)
            torch.testing.assert_close(part, expected_part)


def test_ranks_have_the_same_bits_and_parts_those_of_the_whole(results_of):
    results = [found for found, _ in results_of(run_layer)]

    for (mine, first, *_), (theirs, second, *_) in zip(*results, strict=True):
        assert same_bits(mine, theirs) == 0
        assert same_bits(torch.cat([first, second]), mine) == 0
