"""A feed-forward layer of a real size, divided between GPUs: results and gradients have the bits of one GPU."""

import pytest
import torch

from graphar import nn
from tests.cases import same_bits
from tests.processes import on_ranks, run_on_gpus

pytestmark = pytest.mark.usefixtures("hopper")

HIDDEN, INNER = 8192, 28672  # of a model of 70 billion parameters
BF16 = torch.bfloat16


def random_numbers(seed, *shape):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=BF16, generator=generator)


def linear(seed, inner, outer):
    made = torch.nn.Linear(inner, outer, bias=False, device="cuda", dtype=BF16)
    with torch.no_grad():
        made.weight.copy_(random_numbers(seed, outer, inner)).mul_(inner**-0.5)
    return made


def both_ways(layers, x, of_y):
    """The result, and the gradients of the input and of both weights."""
    x = x.clone().requires_grad_()
    y = layers(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layers.parameters()], of_y)]


@pytest.mark.parametrize("tokens", [1, 64, 2048])
@pytest.mark.parametrize("ranks", [pytest.param(count, marks=pytest.mark.gpu(count, shared=True)) for count in (2, 4)])
@on_ranks(by=run_on_gpus, timeout_s=300)
def test_results_and_gradients_have_the_bits_of_one_gpu(rank, ranks, tokens):
    x, of_y = random_numbers(0, tokens, HIDDEN), random_numbers(1, tokens, HIDDEN)
    up, down = linear(2, HIDDEN, INNER), linear(3, INNER, HIDDEN)
    divided = nn.ColumnParallelLinear(up, tp_invariant=True), nn.RowParallelLinear(down, tp_invariant=True)
    found = both_ways(torch.nn.Sequential(divided[0], torch.nn.SiLU(), divided[1]), x, of_y)
    whole = torch.nn.Sequential(up, torch.nn.SiLU(), down)
    nn.make_tp_invariant(whole, plan={"0": "colwise", "2": "rowwise"})
    y, of_x, of_up, of_down = both_ways(whole, x, of_y)
    expected = [y, of_x, of_up.chunk(ranks, 0)[rank], of_down.chunk(ranks, 1)[rank]]
    assert all(one.isfinite().all() and one.count_nonzero() > one.numel() / 2 for one in expected)
    wrong = [same_bits(*pair) for pair in zip(found, expected, strict=True)]
    assert wrong == [0] * 4
