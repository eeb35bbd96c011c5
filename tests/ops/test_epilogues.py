"""Epilogues on the CPU: the value of each operation, the places of elements, explanations, and gradients."""

import math

import pytest
import torch
from torch.nn import functional

import graphar
from graphar import Epilogue
from graphar.numerics.epilogues.epilogue import bind
from tests.cases import KERNEL_DTYPES, bit_patterns, normal, parts_of, same_bits
from tests.processes import on_ranks

ops = torch.ops.graphar
BIASED = "v * scale + bias[col]"


def fp32_sum(parts):
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


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


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("gelu(v)", functional.gelu),
        ("softplus(v) + elu(v) * mish(v)", lambda v: functional.softplus(v) + functional.elu(v) * functional.mish(v)),
        ("where(v > 1, v, hardswish(v))", lambda v: torch.where(v > 1, v, functional.hardswish(v))),
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


def test_a_tensor_that_says_it_is_negated_is_read_so():
    bias = torch._neg_view(torch.ones(3))

    _, operands = bind("allreduce", "v + b[col]", torch.ones(2, 3), [bias], [])

    assert [one.is_neg() for one in operands.tensors] == [False]
    assert operands.tensors[0].tolist() == [-1.0] * 3


def test_explain_tells_the_expression():
    xs = [torch.ones(2, 3)] * 2
    epilogue = Epilogue(lambda v, b: torch.relu(v + b), b=[torch.ones(3)] * 2)

    assert str(graphar.explain(xs, epilogue=epilogue)).endswith("on the CPU; with the epilogue relu((v + b[col]))")
    with pytest.raises(ValueError, match="allreduce: takes a codec or an epilogue, not both"):
        graphar.explain(xs, codec="int8", epilogue="-v")


def test_a_traced_epilogue_has_its_expression_and_its_arguments():
    bias = torch.ones(3)

    traced = Epilogue(lambda v, b, s: torch.relu(v + b) * s, b=bias, s=2).traced(torch.empty(2, 3))

    assert (traced.what, traced.tensors, traced.scalars) == ("(relu((v + b[col])) * s)", {"b": bias}, {"s": 2.0})


def test_a_compiled_call_names_the_argument_that_is_missing():
    with pytest.raises(Exception, match="needs the tensor 'bias'"):
        torch.compile(lambda x: graphar.allreduce([x], epilogue=Epilogue(BIASED, scale=1.0)), backend="aot_eager")(
            torch.ones(2)
        )


def test_without_places_it_is_a_part_of_the_all_reduce_along_any_axis():
    parts = [normal(rank, 140, torch.bfloat16).view(5, 4, 7) for rank in range(3)]
    for text, axes in [("-v", (0, 1, 2)), ("gelu(v) * b[col]", (0, 1))]:
        tensors = {"b": normal(9, 7, torch.float32)} if "b" in text else {}
        whole = graphar.reference.allreduce(parts, Epilogue(text, **tensors))
        for axis in axes:
            lists = {name: [one] * 3 for name, one in tensors.items()}
            ys = graphar.reducescatter(parts, axis=axis, epilogue=Epilogue(text, **lists))
            assert [same_bits(*pair) for pair in zip(ys, whole.tensor_split(3, axis), strict=True)] == [0] * 3


def test_a_tensor_of_one_dimension_is_one_row():
    ys = graphar.reducescatter([torch.zeros(7)] * 2, epilogue="100 * row + 10 * col + index")

    assert [y.tolist() for y in ys] == [[0.0, 11.0, 22.0, 33.0], [0.0, 11.0, 22.0]]


@pytest.mark.parametrize("length", [1, 3])
def test_a_function_means_the_same_on_ranks_with_one_row_as_on_others(length):
    def added(v, residual, of_rows):
        return v * of_rows + residual

    epilogue = Epilogue(added, residual=torch.ones(length, 5), of_rows=torch.ones(length, 1))

    assert epilogue.text(torch.empty(length, 5), whole=0) == "((v * of_rows[row]) + residual[index])"


def test_a_rank_whose_part_is_empty_has_tensors_without_elements():
    xs, biases = [torch.ones(1), torch.ones(1)], [torch.ones(1), torch.ones(0)]

    parts = graphar.reducescatter(xs, epilogue=graphar.Epilogue("v + b[col]", b=biases))

    assert [part.tolist() for part in parts] == [[3.0], []]


@on_ranks(2)
def test_the_gradient_of_a_process_sums_those_of_all_and_an_arguments_is_its_own(rank, world_size):
    x, bias = normal(rank, 12, torch.bfloat16).view(3, 4).requires_grad_(), torch.ones(4, requires_grad=True)
    y = graphar.allreduce(x, epilogue=Epilogue("v * v + bias[col]", bias=bias))
    y.backward(torch.full_like(y, 1.0 + rank))
    gradient, of_bias = x.grad, bias.grad
    v = sum(normal(rank, 12, torch.bfloat16).float() for rank in range(2)).view(3, 4)
    expected = graphar.reference.allreduce([(v * 2 * (1 + rank)).bfloat16() for rank in range(2)])
    assert same_bits(gradient, expected) == 0
    assert of_bias.tolist() == [3 * (1.0 + rank)] * 4


def test_what_the_sum_has_no_part_in_has_no_gradient():
    x = torch.ones(3, requires_grad=True)

    graphar.allreduce([x], epilogue="row + 2")[0].sum().backward()

    assert x.grad.tolist() == [0, 0, 0]
