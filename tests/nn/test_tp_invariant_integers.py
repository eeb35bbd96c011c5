"""Tensor-parallel invariant layers and models of small integers, whose sums are exact: the results are known.

Integers depend on their positions. A wrong place of a row, of a column or of a leaf shows where results differ.
"""

import pytest
import torch
import torch.distributed as dist

from graphar import nn
from tests.cases import by_position
from tests.processes import on_ranks

BATCH, SEQUENCE, HIDDEN, INNER = 2, 16, 32, 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
RANKS = (1, 2, 4, 8)
NAMES = ("output", "gradient of the input", "up", "up's bias", "down", "down's bias")


def places(found, expected):
    """The first positions at which a tensor is not as expected."""
    return (found.double() != expected).nonzero()[:5].tolist()


def part(whole, axis, rank, ranks):
    return whole if axis is None else whole.chunk(ranks, axis)[rank]


class Pair(torch.nn.Module):
    """A column-parallel and a row-parallel layer, the same on every rank."""

    def __init__(self, dtype, seed=0):
        super().__init__()
        self.up, self.down = torch.nn.Linear(HIDDEN, INNER), torch.nn.Linear(INNER, HIDDEN)
        with torch.no_grad():
            for at, one in enumerate(self.parameters(), seed):
                one.copy_(by_position(at, *one.shape, mostly=3))
        self.to(dtype)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(torch.nn.Module):
    """Words, two pairs and a head."""

    def __init__(self, dtype):
        super().__init__()
        self.words = torch.nn.Embedding(16, HIDDEN)
        self.pairs = torch.nn.Sequential(Pair(dtype), Pair(dtype, seed=9))
        self.head = torch.nn.Linear(HIDDEN, 16, bias=False)
        with torch.no_grad():
            for at, one in enumerate((self.words.weight, self.head.weight), 20):
                one.copy_(by_position(at, *one.shape, mostly=3))
        self.to(dtype)

    def forward(self, words):
        return self.head(self.pairs(self.words(words)))


def given(dtype):
    """The input and the gradient of the output."""
    return [by_position(seed, BATCH, SEQUENCE, HIDDEN, mostly=2).to(dtype) for seed in (5, 6)]


def both_ways(pair, x, of_y):
    x = x.clone().requires_grad_()
    y = pair(x)
    y.backward(of_y)
    return [y.detach(), x.grad, *[one.grad for one in pair.parameters()]]


@pytest.mark.parametrize("ranks", RANKS)
@on_ranks()
def test_layers_of_integers_have_the_integers_that_are_due(rank, ranks):
    by_case = {}
    for dtype in DTYPES:
        for axis in (None, 1):
            pair, how = Pair(dtype), {"tp_invariant": True, "sequence_dim": axis}
            pair.up, pair.down = nn.ColumnParallelLinear(pair.up, **how), nn.RowParallelLinear(pair.down, **how)
            by_case[dtype, axis] = both_ways(pair, *(part(one, axis, rank, ranks) for one in given(dtype)))
    expected = both_ways(Pair(torch.double), *given(torch.double))
    for (dtype, axis), found in by_case.items():
        axes = [axis, axis, 0, 0, 1, None]
        for name, one, due, at in zip(NAMES, found, expected, axes, strict=True):
            assert places(one, part(due, at, rank, ranks)) == [], (name, dtype, axis, f"rank {rank}")


def test_every_dtype_has_these_integers_and_no_two_rows_or_columns_are_alike():
    expected = both_ways(Pair(torch.double), *given(torch.double))

    for name, one in zip(NAMES, expected, strict=True):
        assert 0 < one.abs().max() <= 2 / torch.finfo(torch.bfloat16).eps, name
        for rows in (one.flatten(0, -2), one.flatten(0, -2).t()) if one.ndim > 1 else ():
            assert len(rows.unique(dim=0)) == len(rows), name


def plan():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    divided = {"output_layouts": Shard(1), "use_local_output": False}
    return {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
        "pairs.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "pairs.*.down": RowwiseParallel(**divided),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }


def learned(model):
    """The logits and all gradients, of whole tensors."""
    words = torch.arange(BATCH * SEQUENCE).mul(5).remainder(16).view(BATCH, SEQUENCE)
    logits = model(words)
    logits.backward(by_position(30, *logits.shape, mostly=7).to(logits.dtype))
    return [whole(logits), *[whole(one.grad) for one in model.parameters()]]


def whole(x):
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


@pytest.mark.parametrize("ranks", RANKS)
@on_ranks()
def test_a_model_of_integers_has_the_integers_that_are_due(rank, ranks):
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    model = parallelize_module(Model(torch.float32), mesh, plan())
    nn.make_tp_invariant(model, plan())
    found = learned(model)
    expected = learned(Model(torch.double))
    names = ["logits", *dict(Model(torch.double).named_parameters())]
    assert max(one.abs().max() for one in expected) < 2**24
    wrong = {name: places(*pair) for name, *pair in zip(names, found, expected, strict=True)}
    assert not any(wrong.values()), (f"rank {rank}", wrong)
