"""allreduce with an epilogue on the CPU: the specification's bits on every rank, compilers, refusals."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck
from torch.nn import functional

import graphar
from graphar import Epilogue
from graphar.numerics.epilogues.epilogue import bind
from graphar.ops.allreduce import OP
from tests.cases import KERNEL_DTYPES, SMALL_NUMELS, bit_patterns, integers, normal, same_bits
from tests.processes import run_ranks

ops = torch.ops.graphar
BIASED = "v * scale + bias[col]"


@pytest.fixture(scope="module")
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def compiled():
    """torch.compile that accepts no graph break and compiles for any size."""
    torch._dynamo.reset()
    yield lambda function: torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    torch._dynamo.reset()


def parts_of(fill, world_size, numel, dtype):
    return [fill(rank, numel, dtype) for rank in range(world_size)]


def fp32_sum(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


# ---- shapes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)], ids=str)
@pytest.mark.parametrize("place", ["row", "col", "index"])
def test_what_has_no_element_has_tensors_without(shape, place):
    numel = {"row": math.prod(shape[:-1]), "col": shape[-1], "index": 0}[place]
    xs = [torch.zeros(shape, requires_grad=True) for _ in range(2)]
    bs = [torch.zeros(numel, requires_grad=True) for _ in range(2)]

    ys = graphar.allreduce(xs, epilogue=Epilogue(f"v + b[{place}]", b=bs))
    sum(y.sum() for y in ys).backward()

    assert [y.shape for y in ys] == [shape] * 2
    assert [b.grad.shape for b in bs] == [(numel,)] * 2


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_a_negating_epilogue_gives_the_negated_sum(world_size, dtype):
    for numel in SMALL_NUMELS:
        parts = parts_of(integers, world_size, numel, dtype)
        for out in graphar.allreduce(parts, epilogue="-v"):
            assert same_bits(out, -fp32_sum(parts).to(dtype)) == 0, f"{numel} elements"


def test_a_list_may_take_its_own_results():
    xs = parts_of(normal, 3, 100, torch.bfloat16)
    expected = graphar.reference.allreduce(xs, "v * 2 + col")

    graphar.allreduce(xs, out=xs, epilogue="v * 2 + col")

    assert [same_bits(x, expected) for x in xs] == [0] * 3


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_the_sum_is_rounded_after_the_epilogue_and_only_then(dtype):
    parts, bias = parts_of(normal, 3, 64 * 40, dtype), normal(9, 40, torch.bfloat16)
    parts = [part.view(64, 40) for part in parts]

    outs = graphar.allreduce(parts, epilogue=Epilogue(BIASED, scale=0.1, bias=[bias] * 3))

    expected = fp32_sum(parts) * torch.tensor(0.1) + bias.float()
    assert [same_bits(out, expected.to(dtype)) for out in outs] == [0] * 3


def test_every_nan_is_the_canonical_one():
    parts = parts_of(bit_patterns, 2, 1 << 16, torch.float32)

    out, _ = graphar.allreduce(parts, epilogue="-v")

    nan = out.isnan()
    assert bool(nan.any())
    assert out.view(torch.int32)[nan].unique().tolist() == [0x7FFFFFFF]


def test_a_square_root_is_rounded_to_nearest():
    x = torch.arange(1 << 16, dtype=torch.float32)

    (out,) = graphar.allreduce([x], epilogue="sqrt(v)")

    assert same_bits(out, torch.tensor([math.sqrt(one) for one in range(1 << 16)], dtype=torch.float64).float()) == 0


X = torch.tensor([-math.inf, -2.0, -0.0, 0.0, 0.5, 1.0, 3.0, math.inf, math.nan])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("min(v, 1)", torch.minimum(X, torch.ones(()))),
        ("min(1, v)", torch.minimum(X, torch.ones(()))),
        ("max(v, 1)", torch.maximum(X, torch.ones(()))),
        ("max(1, v)", torch.maximum(X, torch.ones(()))),
        ("clamp(v, -1, 1)", X.clamp(-1, 1)),
        ("v < 1", X < 1),
        ("v <= 1", X <= 1),
        ("v > 1", X > 1),
        ("v >= 1", X >= 1),
        ("v == 1", X == 1),
        ("v != 1", X != 1),
        ("!v", X == 0),
        ("isnan(v)", X.isnan()),
        ("v && v - 1", (X != 0) & (X != 1)),
        ("v || v - 1", (X != 0) | (X != 1)),
        ("v > 0 ? v : 7", torch.where(X > 0, X, 7.0)),
    ],
)
def test_comparisons_are_those_of_floating_point_and_give_one_or_zero(text, expected):
    (out,) = graphar.allreduce([X], epilogue=text)

    torch.testing.assert_close(out, expected.float(), rtol=0, atol=0, equal_nan=True)


def test_places_are_those_in_rows_of_the_last_dimension():
    zeros = [torch.zeros(2, 3, 5)] * 2

    for text, expected in [
        ("row", torch.arange(6).repeat_interleave(5)),
        ("col", torch.arange(5).repeat(6)),
        ("index", torch.arange(30)),
    ]:
        assert graphar.allreduce(zeros, epilogue=text)[1].view(-1).tolist() == expected.tolist()


def test_tensors_are_read_by_row_column_index_and_alone():
    x, r, c, f, d = (normal(k, n, torch.float32) for k, n in enumerate((12, 3, 4, 12, 1)))

    (out,) = graphar.allreduce(
        [x.view(3, 4)], epilogue=Epilogue("r[row] * c[col] + f[index] * d[0]", r=[r], c=[c], f=[f], d=[d])
    )

    assert same_bits(out, r[:, None] * c + f.view(3, 4) * d) == 0


def reduce_with_bias(rank, world_size, numel):
    bias = normal(50, 8, torch.float16)
    for shape in [(numel // 8, 8), (numel // 16, 2, 8)]:
        parts = [normal(r, numel, torch.bfloat16).view(shape) for r in range(world_size)]
        epilogue = Epilogue("max(v * scale + bias[col], 0) - row", scale=0.3, bias=bias)
        expected = graphar.reference.allreduce(parts, epilogue)
        assert same_bits(graphar.allreduce(parts[rank], epilogue=epilogue), expected) == 0
        out = torch.empty(2 * numel, dtype=torch.bfloat16)[::2].view(shape)
        assert graphar.allreduce(parts[rank], epilogue=epilogue, out=out) is out
        assert same_bits(out, expected) == 0


@pytest.mark.parametrize(("world_size", "numel"), [(2, 16), (3, 16 * 1031), (4, 1 << 21)])
def test_processes_get_the_specifications_bits(world_size, numel):
    run_ranks(reduce_with_bias, world_size, numel)


def reduce_in_debug_mode(rank, world_size):
    with graphar.Communicator(debug=True) as communicator:
        assert communicator.allreduce(torch.ones(3), epilogue="-v").tolist() == [-2.0] * 3
        with pytest.raises(graphar.CommunicatorError, match="epilogue v"):
            communicator.allreduce(torch.ones(3), epilogue=f"v + {rank}")


def test_debug_mode_compares_epilogues():
    run_ranks(reduce_in_debug_mode, 2)


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("gelu(v)", functional.gelu),
        ("silu(v) * sigmoid(v)", lambda v: functional.silu(v) * v.sigmoid()),
        ("tanh(v) + exp(v) + erf(v)", lambda v: v.tanh() + v.exp() + v.erf()),
    ],
)
def test_transcendental_functions_are_torchs(text, function):
    xs = parts_of(normal, 2, 1000, torch.float32)

    torch.testing.assert_close(graphar.allreduce(xs, epilogue=text)[0], function(xs[0] + xs[1]), rtol=2e-6, atol=1e-6)


def test_a_function_gives_the_bits_of_its_expression():
    xs, bias = [x.view(10, 10) for x in parts_of(normal, 2, 100, torch.bfloat16)], normal(7, 10, torch.bfloat16)

    def biased(v, bias, scale):
        return torch.relu(v * scale + bias)

    mine = graphar.allreduce(xs, epilogue=Epilogue(biased, bias=[bias] * 2, scale=3))

    same = graphar.allreduce(xs, epilogue=Epilogue(f"relu({BIASED})", bias=[bias] * 2, scale=3))
    assert [same_bits(a, b) for a, b in zip(mine, same, strict=True)] == [0, 0]


def test_an_empty_tensor_stays_empty():
    assert graphar.allreduce([torch.empty(0, 3)] * 2, epilogue="-v")[0].shape == (0, 3)


def test_a_tensor_that_says_it_is_negated_is_read_so():
    bias = torch._neg_view(torch.ones(3))

    _, operands = bind("allreduce", "v + b[col]", torch.ones(2, 3), [bias], [])

    assert [one.is_neg() for one in operands.tensors] == [False]
    assert operands.tensors[0].tolist() == [-1.0] * 3


# ---- before and beside calls ----------------------------------------------------------------------------------------


def test_explain_tells_the_expression():
    xs = [torch.ones(2, 3)] * 2
    epilogue = Epilogue(lambda v, b: torch.relu(v + b), b=[torch.ones(3)] * 2)

    assert str(graphar.explain(xs, epilogue=epilogue)).endswith("on the CPU; with the epilogue relu((v + b[col]))")
    with pytest.raises(ValueError, match="explain: takes a codec or an epilogue, not both"):
        graphar.explain(xs, codec="int8", epilogue="-v")


@pytest.mark.parametrize(
    ("epilogue", "message"),
    [
        (torch.relu, r"give epilogue.traced\(x\)"),
        ("v * s", "needs the number 's'"),
        (Epilogue("v + b[col]", b=torch.ones(3).int()), "must be bfloat16, float16 or float32, got .*int32"),
    ],
)
def test_prepare_refuses_what_no_kernel_can_be_made_for(epilogue, message):
    with graphar.Communicator(devices=["cpu"] * 2) as communicator, pytest.raises(ValueError, match=message):
        communicator.prepare(epilogues=[epilogue])


def test_a_traced_epilogue_has_its_expression_and_its_arguments():
    bias = torch.ones(3)

    traced = Epilogue(lambda v, b, s: torch.relu(v + b) * s, b=bias, s=2).traced(torch.empty(2, 3))

    assert (traced.what, traced.tensors, traced.scalars) == ("(relu((v + b[col])) * s)", {"b": bias}, {"s": 2.0})


# ---- compilers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_ops_keep_the_rules_of_ops(world_of_one, requires_grad):
    x, bias = torch.randn(4, 6, requires_grad=requires_grad), torch.randn(6, requires_grad=requires_grad)
    given = {"scalars": [0.5], "epilogue": BIASED}
    apart = OP.arguments(tensors=[bias.detach()], **given)

    opcheck(ops.allreduce.default, (x, *OP.arguments(tensors=[bias], **given)))
    opcheck(ops.allreduce_list.default, ([x, x], *OP.arguments(tensors=[bias, bias], **given)))
    opcheck(ops.allreduce_out.default, (x.detach(), [], torch.empty(4, 6), *apart))
    opcheck(ops.allreduce_list_out.default, ([x.detach()], [], [torch.empty(4, 6)], *apart))


def with_text(a, b):
    return graphar.allreduce([a * 2, a], epilogue=Epilogue(BIASED, scale=0.5, bias=[b, b]))[0] + 1


def with_function(a, b):
    return graphar.allreduce([a, a], epilogue=Epilogue(lambda v, bias: torch.relu(v + bias), bias=[b, b]))[1] * 2


def with_one_tensor(a, b):
    return graphar.allreduce(a + 1, epilogue=Epilogue(BIASED, scale=2, bias=b))


@pytest.mark.parametrize("function", [with_text, with_function, with_one_tensor])
def test_compiled_calls_give_the_eager_bits_and_gradients_at_any_size(world_of_one, compiled, function):
    fast = compiled(function)

    for rows in (5, 7, 12):
        a, b = torch.randn(rows, 3, requires_grad=True), torch.randn(3, requires_grad=True)
        mine, expected = fast(a, b), function(a, b)
        assert same_bits(mine, expected) == 0
        gradients = [torch.autograd.grad(one.sum(), (a, b)) for one in (mine, expected)]
        assert [same_bits(*pair) for pair in zip(*gradients, strict=True)] == [0, 0]


def test_a_compiled_call_names_the_argument_that_is_missing(compiled):
    with pytest.raises(Exception, match="needs the tensor 'bias'"):
        compiled(lambda x: graphar.allreduce([x], epilogue=Epilogue(BIASED, scale=1.0)))(torch.ones(2))


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: 3, TypeError, "must be an expression or a function, got int"),
        (lambda: Epilogue("v", v=1), ValueError, "the name 'v' is taken"),
        (lambda: Epilogue("v * s", s="1"), TypeError, "s must be a tensor or a number, got str"),
        (lambda: "v * s", ValueError, "'v . s' needs the number 's', got numbers none"),
        (lambda: Epilogue("v", s=1), ValueError, "'v' has no number 's'"),
        (lambda: Epilogue("v + b[col]", b=1.0), ValueError, "needs the tensor 'b', got tensors none"),
        (lambda: Epilogue("v + b[col]", b=torch.ones(4)), ValueError, "an epilogue's tensors are lists of 2"),
        (lambda: Epilogue("v + b[col]", b=[torch.ones(4)] * 3), ValueError, "an epilogue's tensors are lists of 2"),
        (lambda: Epilogue("v + b[col]", b=[torch.ones(3)] * 2), ValueError, r"b\[col\] needs 4 element.* b has 3"),
        (lambda: Epilogue("v + b[row]", b=[torch.ones(4)] * 2), ValueError, r"b\[row\] needs 2 element.* b has 4"),
        (lambda: Epilogue("v + b[index]", b=[torch.ones(4)] * 2), ValueError, r"b\[index\] needs 8 element"),
        (lambda: Epilogue("v + b[0]", b=[torch.ones(4)] * 2), ValueError, r"b\[0\] needs 1 element"),
        (lambda: Epilogue("v + b[col]", b=[torch.ones(4).int()] * 2), ValueError, "b must be bfloat16, float16 or"),
        (lambda: Epilogue("v + b[col]", b=[torch.ones(4), torch.ones(4).half()]), ValueError, "must have equal dtypes"),
        (
            lambda: Epilogue(lambda v, b: v + b, b=[torch.ones(1, 2, 4)] * 2),
            ValueError,
            r"a tensor of shape \[1, 2, 4\] does not broadcast over \[2, 4\]",
        ),
        (
            lambda: Epilogue(lambda v, b: v + b, b=[torch.ones(3)] * 2),
            ValueError,
            r"a tensor of shape \[3\] does not broadcast over \[2, 4\]",
        ),
    ],
)
def test_a_bad_argument_is_refused_by_name(make, error, message):
    with pytest.raises(error, match=message):
        graphar.allreduce([torch.ones(2, 4)] * 2, epilogue=make())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_other_dtypes_have_no_epilogue(dtype):
    with pytest.raises(ValueError, match=f"works on sums of bfloat16, float16 and float32, got a tensor of {dtype}"):
        graphar.allreduce([torch.ones(2, dtype=dtype)] * 2, epilogue="-v")


def test_a_codec_and_an_epilogue_do_not_go_together():
    with pytest.raises(ValueError, match="takes a codec or an epilogue, not both"):
        graphar.allreduce([torch.ones(2)] * 2, epilogue="-v", codec="int8")


def test_an_algorithm_without_such_a_kernel_is_refused():
    with pytest.raises(graphar.UnsupportedError, match="two_shot_tma has no kernel with an epilogue"):
        graphar.allreduce([torch.ones(2)] * 2, epilogue="-v", algorithm="two_shot_tma")


def test_an_output_that_is_a_tensor_of_the_epilogue_is_refused():
    xs, outs = [torch.ones(4)] * 2, [torch.ones(4) for _ in range(2)]

    with pytest.raises(ValueError, match="out must share no memory with tensor 0 of the epilogue"):
        graphar.allreduce(xs, out=outs, epilogue=Epilogue("v + r[index]", r=outs))
