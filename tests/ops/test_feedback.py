"""Error feedback: the rounding error of a codec stays in a residual, which is added to the next tensor."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import Codec, reference
from graphar.numerics.codec_reference import Noise, encode, error_of_wire
from tests.cases import normal, same_bits
from tests.processes import run_ranks

INT4 = Codec(4)
STOCHASTIC = Codec(2, 128, "stochastic", seed=3)


def step(xs, residuals, codec, call=0):
    """What every rank receives, and the residuals afterwards, by the specification."""
    parts = [residual + x for x, residual in zip(xs, residuals, strict=True)]
    wires = [encode(part.view(-1), codec, Noise(codec.seed or 0, call, rank)) for rank, part in enumerate(parts)]
    left = [error_of_wire(part, wire, codec) for part, wire in zip(parts, wires, strict=True)]
    return reference.quantized_allreduce(parts, codec, codec.seed or 0, call), left


def in_processes(rank, world_size, codec, dtype):
    xs, residuals = ([normal(r + at, 3001, dtype) for r in range(world_size)] for at in (0, 50))
    mine = residuals[rank].clone()
    for call in range(3):
        expected, residuals = step(xs, residuals, codec, call)
        y = graphar.allreduce(xs[rank], codec=codec, residual=mine)
        assert same_bits(y, expected) == 0
        assert same_bits(mine, residuals[rank]) == 0
    return True


@pytest.mark.promise("Error feedback adds what a codec took to the next tensor, and loses nothing.")
@pytest.mark.parametrize("codec", [INT4, STOCHASTIC], ids=["int4", "stochastic"])
def test_processes_keep_the_specifications_residuals(codec):
    assert all(run_ranks(in_processes, 3, codec, torch.bfloat16))


def test_a_bucket_that_became_nan_leaves_nothing():
    x = normal(0, 96, torch.float32)
    x[40] = torch.inf
    wire = encode(x, INT4)

    error = error_of_wire(x, wire, INT4)

    assert (error[32:64] == 0).all()
    assert (error[:32] != 0).any()
