"""Residual and RMSNorm of a finished sum, in calls that need gradients: its bits, its gradients, and what it keeps."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional

from graphar.numerics.norms import specification
from graphar.ops.norm_gradients import added_and_normed
from tests.cases import normal, same_bits

NUMBERS = (1e-5, 1.0)  # eps and weight_offset
SHAPES = [(8,), (1, 1032), (5, 3, 24), (265, 8192), (2, 7), (0, 16)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def drawn(shape, dtype, device):
    """The sum, the residual and the weight."""
    shapes = (shape, shape, shape[-1:])
    return [normal(seed, torch.Size(one).numel(), dtype).view(one).to(device) for seed, one in enumerate(shapes)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_results_have_the_bits_of_the_specification(dtype, device):
    for shape in SHAPES:
        total, *rest = (one.requires_grad_() for one in drawn(shape, dtype, device))

        found = added_and_normed(total, *rest, NUMBERS)

        with torch.no_grad():
            expected = specification(total, *rest, *NUMBERS)
        assert [same_bits(*pair) for pair in zip(found, expected, strict=True)] == [0, 0], shape


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3)), ids=str)
def test_the_gradients_are_those_of_torch(wanted, device):
    for shape in ((8,), (5, 3, 24), (70, 1032)):
        tensors = [
            one.requires_grad_(need) for one, need in zip(drawn(shape, torch.float32, device), wanted, strict=True)
        ]
        total, residual, weight = tensors
        leaves = [one for one in tensors if one.requires_grad]
        given = [normal(seed, total.numel(), torch.float32).view(shape).to(device) for seed in (7, 8)]
        summed = total + residual
        expected = functional.rms_norm(summed, weight.shape, weight + NUMBERS[1], NUMBERS[0]), summed

        found = added_and_normed(total, residual, weight, NUMBERS)

        losses = [sum((y * one).sum() for y, one in zip(ys, given, strict=True)) for ys in (found, expected)]
        if leaves:
            torch.testing.assert_close(*(torch.autograd.grad(loss, leaves) for loss in losses))


def half_a_unit(x, dtype):
    """Half of a unit in the last place of each number, rounded to ``dtype``."""
    return torch.finfo(dtype).eps / 2 * torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent - 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_gradients_are_rounded_once(dtype, with_residual, device):
    """Any rounding of an intermediate to the tensors' dtype moves some gradients by more than half a unit."""
    total, residual, weight = (one.requires_grad_() for one in drawn((48, 264), dtype, device))
    of_normed, of_summed = (normal(seed, total.numel(), dtype).view_as(total).to(device) for seed in (7, 8))
    of_summed = of_summed if with_residual else torch.zeros_like(of_summed)

    results = added_and_normed(total, residual, weight, NUMBERS)
    of_total, of_residual, of_weight = torch.autograd.grad(
        results, (total, residual, weight), grad_outputs=(of_normed, of_summed)
    )

    rows, scale = (one.detach().double() for one in (results[1], weight))
    inverse = (rows.square().mean(-1, keepdim=True) + NUMBERS[0]).rsqrt()
    unit, scaled = rows * inverse, of_normed.double() * (scale + NUMBERS[1])
    shared = unit * (scaled * unit).mean(-1, keepdim=True)
    exact = of_summed + inverse * (scaled - shared)
    slack = 2**-19 * (of_summed.abs() + inverse * (scaled.abs() + shared.abs()))  # of sums in fp32
    assert ((of_total - exact).abs() <= half_a_unit(exact, dtype) + slack).all()
    assert torch.equal(of_residual, of_total)
    terms = of_normed * unit
    exact = terms.sum(0)
    assert ((of_weight - exact).abs() <= half_a_unit(exact, dtype) + 2**-19 * terms.abs().sum(0)).all()


def test_the_second_derivatives_are_those_of_finite_differences():
    total, residual, weight = (one.double().requires_grad_() for one in drawn((2, 8), torch.float32, "cpu"))

    def in_fp32(*given):
        return [one.double() for one in added_and_normed(*(one.float() for one in given), (1e-2, 0.5))]

    assert torch.autograd.gradgradcheck(in_fp32, (total, residual, weight), eps=1e-2, atol=2e-2, rtol=2e-2)


def test_only_the_new_residual_and_the_weight_are_kept_for_the_backward_pass():
    total, residual, weight = drawn((4, 16), torch.bfloat16, "cpu")
    total, kept = total.requires_grad_(), []

    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        _, summed = added_and_normed(total, residual, weight, NUMBERS)

    assert [one.data_ptr() for one in kept] == [weight.data_ptr(), summed.data_ptr()]


def test_torch_finds_the_op_well_formed():
    tensors = [one.requires_grad_() for one in drawn((4, 16), torch.float32, "cpu")]

    torch.library.opcheck(torch.ops.graphar.residual_rmsnorm.default, (*tensors, *NUMBERS))
