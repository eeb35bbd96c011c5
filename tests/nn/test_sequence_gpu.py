"""Sequence parallelism of graphar.nn between GPUs: results and gradients have the bits of one GPU with all tokens."""

import pytest
import torch

from graphar import nn
from tests.cases import normal, same_bits
from tests.processes import on_ranks, run_on_gpus

pytestmark = [pytest.mark.gpu(2, shared=True), pytest.mark.usefixtures("hopper")]

BATCH, SEQUENCE, HIDDEN, INNER = 4, 32, 256, 1024
BF16 = torch.bfloat16


def drawn(seed, *shape):
    return normal(seed, torch.Size(shape).numel(), BF16).view(shape).cuda()


def both_ways(layers, x, of_y):
    x = x.clone().requires_grad_()
    y = layers(x)
    y.backward(of_y)
    return [y.detach(), x.grad, *[one.grad for one in layers.parameters()]]


@on_ranks(2, by=run_on_gpus, timeout_s=300)
def test_divided_tokens_have_the_bits_of_one_gpu(rank, ranks):
    torch.manual_seed(0)
    up, down = torch.nn.Linear(HIDDEN, INNER), torch.nn.Linear(INNER, HIDDEN)
    up, down = up.cuda().to(BF16), down.cuda().to(BF16)
    x, of_y = drawn(0, BATCH, SEQUENCE, HIDDEN), drawn(1, BATCH, SEQUENCE, HIDDEN)
    found = {}
    for axis in (0, 1):
        how = {"tp_invariant": True, "sequence_dim": axis}
        layers = nn.ColumnParallelLinear(up, **how), torch.nn.ReLU(), nn.RowParallelLinear(down, **how)
        own = [one.chunk(ranks, axis)[rank] for one in (x, of_y)]
        found[axis] = [one.cpu() for one in both_ways(torch.nn.Sequential(*layers), *own)]
        down.bias.grad = None  # which the layer shares
    whole = torch.nn.Sequential(up, torch.nn.ReLU(), down)
    nn.make_tp_invariant(whole, plan={"0": "colwise", "2": "rowwise"})
    expected = [one.cpu() for one in both_ways(whole, x, of_y)]
    wrong = {}
    for axis, of_rank in found.items():
        axes = [axis, axis, 0, 0, 1, None]
        parts = [one if at is None else one.chunk(ranks, at)[rank] for one, at in zip(expected, axes, strict=True)]
        wrong[axis] = [same_bits(*pair) for pair in zip(of_rank, parts, strict=True)]
    assert wrong == {0: [0] * 6, 1: [0] * 6}
