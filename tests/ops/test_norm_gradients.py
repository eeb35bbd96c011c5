"""The gradients of residual and RMSNorm: the specification, the kernels' bits, and what a call keeps for them."""

import pytest
import torch
from torch.nn import functional

import graphar
from graphar.numerics import norm_gradients
from graphar.numerics.norm_gradients import specification
from tests.cases import bit_patterns, normal, same_bits

EPS, OFFSET = NUMBERS = (1e-5, 1.0)
# Rows that a single thread has, that end within a thread's packs, that have several packs a thread, more rows than
# groups of them, and rows that no kernel takes.
SHAPES = [(8,), (1, 1032), (5, 3, 24), (265, 8192), (600, 64), (3, 16384), (2, 7), (0, 16)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn(shape, dtype, device="cpu", fill=normal):
    """The gradients of normed rows and of rows, the rows, and the weight."""
    shapes = (shape, shape, shape, shape[-1:])
    return [fill(seed, torch.Size(one).numel(), dtype).view(one).to(device) for seed, one in enumerate(shapes)]


def backward(of_normed, of_summed, summed, weight, of_weight=True):
    return torch.ops.graphar.residual_rmsnorm_backward(of_normed, of_summed, summed, weight, *NUMBERS, of_weight, 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_summed", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradients_have_the_bits_of_the_specification(dtype, with_summed, device):
    for shape in SHAPES:
        of_normed, of_summed, *rest = drawn(shape, dtype, device)
        given = of_normed, of_summed if with_summed else None, *rest

        found = backward(*given)

        expected = specification(*[None if one is None else one.cpu() for one in given], *NUMBERS)
        assert [same_bits(one.cpu(), other) for one, other in zip(found, expected, strict=True)] == [0, 0], shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_bit_patterns_give_the_bits_of_the_specification(dtype, device):
    given = drawn((140, 264), dtype, device, bit_patterns)

    found = backward(*given)

    expected = specification(*[one.cpu() for one in given], *NUMBERS)
    assert [same_bits(one.cpu(), other) for one, other in zip(found, expected, strict=True)] == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_any_alignment_give_the_same_bits(device):
    aligned = drawn((4, 64), torch.bfloat16, device)
    off = [torch.cat([one.view(-1)[:1], one.view(-1)])[1:].view_as(one) for one in aligned]

    found, expected = backward(*off), backward(*aligned)

    assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_without_gradient_gets_an_empty_tensor_and_the_rows_the_same_bits(device):
    given = drawn((9, 64), torch.bfloat16, device)

    (of_rows, nothing), (expected, _) = backward(*given, of_weight=False), backward(*given)

    assert nothing.numel() == 0
    assert same_bits(of_rows, expected) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(8,), (5, 3, 24), (700, 1032)], ids=str)
def test_the_gradients_are_those_of_float64(shape, device):
    of_normed, of_summed, summed, weight = drawn(shape, torch.float32, device)
    r, w = (one.double().requires_grad_() for one in (summed, weight))
    normed = functional.rms_norm(r, w.shape, w + OFFSET, EPS)
    expected = torch.autograd.grad([normed, r], [r, w], [of_normed.double(), of_summed.double()])

    found = backward(of_normed, of_summed, summed, weight)

    torch.testing.assert_close([one.double() for one in found], list(expected), rtol=1e-5, atol=2e-5)


def half_a_unit(exact, dtype):
    """Half the distance of neighbours of ``dtype`` at each number: half a unit in the last place."""
    least = torch.finfo(dtype).smallest_normal
    return torch.finfo(dtype).eps / 2 * 2.0 ** exact.abs().clamp(min=least).log2().floor()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_summed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_each_gradient_is_rounded_once(dtype, with_summed, device):
    """Any rounding of an intermediate to the tensors' dtype moves some gradients by more than half a unit."""
    of_normed, of_summed, summed, weight = drawn((48, 264), dtype, device)
    more = of_summed.double() if with_summed else torch.zeros_like(summed).double()

    of_rows, of_weight = backward(of_normed, of_summed if with_summed else None, summed, weight)

    rows, scale = summed.double(), weight.double() + OFFSET
    inverse = (rows.square().mean(-1, keepdim=True) + EPS).rsqrt()
    unit, scaled = rows * inverse, of_normed.double() * scale
    shared = unit * (scaled * unit).mean(-1, keepdim=True)
    exact = more + inverse * (scaled - shared)
    slack = 2**-19 * (more.abs() + inverse * (scaled.abs() + shared.abs()))  # of sums in fp32
    assert ((of_rows - exact).abs() <= half_a_unit(exact, dtype) + slack).all()
    terms = of_normed * unit
    exact = terms.sum(0)
    assert ((of_weight - exact).abs() <= half_a_unit(exact, dtype) + 2**-19 * terms.abs().sum(0)).all()


@pytest.mark.parametrize("used", [(0,), (1,)], ids=["normed", "residual_out"])
@pytest.mark.usefixtures("world_of_one")
def test_a_result_that_is_not_used_counts_as_zeros(used):
    x, residual, _, weight = (one.requires_grad_() for one in drawn((6, 40), torch.float32))
    total = x + residual
    expected = functional.rms_norm(total, weight.shape, weight + OFFSET, EPS), total

    found = graphar.allreduce_residual_rmsnorm(x, residual, weight, EPS, weight_offset=OFFSET)

    gradients = [
        torch.autograd.grad(
            ys[used[0]].square().sum(), (x, residual, weight), allow_unused=True, materialize_grads=True
        )
        for ys in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.usefixtures("world_of_one")
def test_the_second_derivatives_are_those_of_finite_differences():
    x, residual, _, weight = (one.double().requires_grad_() for one in drawn((2, 8), torch.float32))

    def in_fp32(*given):
        found = graphar.allreduce_residual_rmsnorm(*(one.float() for one in given), 1e-2, weight_offset=0.5)
        return [one.double() for one in found]

    assert torch.autograd.gradgradcheck(in_fp32, (x, residual, weight), eps=1e-2, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("world_of_one")
def test_only_the_new_residual_and_the_weight_are_kept_for_the_backward_pass():
    x, residual, _, weight = drawn((4, 16), torch.bfloat16)
    x, kept = x.requires_grad_(), []

    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        _, summed = graphar.allreduce_residual_rmsnorm(x, residual, weight, *NUMBERS[:1])

    assert [one.data_ptr() for one in kept] == [weight.data_ptr(), summed.data_ptr()]


def test_torch_finds_the_op_well_formed():
    tensors = [one.requires_grad_() for one in drawn((4, 16), torch.float32)]

    torch.library.opcheck(torch.ops.graphar.residual_rmsnorm_backward.default, (*tensors, *NUMBERS, True, 0))


def test_the_groups_of_rows_depend_on_the_shape_alone():
    """As measured on an H100: 128 blocks of 1024 threads, more blocks of fewer, four rows each if there are few."""
    cases = {(4096, 16384): 128, (4096, 8192): 128, (16384, 2048): 512, (200, 4096): 128, (600, 2048): 150, (3, 64): 3}

    assert {(rows, nbytes): norm_gradients.row_groups(rows, nbytes) for rows, nbytes in cases} == cases
