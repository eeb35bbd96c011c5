"""Error feedback: what a codec takes from a tensor stays in a residual, and goes with the next one."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import graphar
from graphar import Codec, Communicator, reference
from graphar.numerics.codec_reference import Noise, encode
from graphar.ops.allreduce import OP
from tests.cases import KERNEL_DTYPES, bit_patterns, normal, same_bits
from tests.processes import run_ranks

INT4 = Codec(4)
STOCHASTIC = Codec(2, 128, "stochastic", seed=3)


def step(xs, residuals, codec, call=0):
    """What every rank receives, and the residuals afterwards, by the specification."""
    parts = [residual + x for x, residual in zip(xs, residuals, strict=True)]
    wires = [encode(part.view(-1), codec, Noise(codec.seed or 0, call, rank)) for rank, part in enumerate(parts)]
    left = [reference.error_of_wire(part, wire, codec) for part, wire in zip(parts, wires, strict=True)]
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


@pytest.mark.parametrize("codec", [INT4, STOCHASTIC], ids=["int4", "stochastic"])
def test_processes_keep_the_specifications_residuals(codec):
    assert all(run_ranks(in_processes, 3, codec, torch.bfloat16))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_a_list_keeps_the_specifications_residuals(dtype):
    xs, residuals = ([bit_patterns(rank + at, 5001, dtype) for rank in range(2)] for at in (0, 7))
    expected, left = step(xs, residuals, INT4)

    with Communicator(devices=["cpu"] * 2) as communicator:
        ys = graphar.allreduce(xs, communicator, codec=INT4, residual=residuals)

    assert [same_bits(y, expected) for y in ys] == [0, 0]
    assert [same_bits(*pair) for pair in zip(residuals, left, strict=True)] == [0, 0]


def test_a_bucket_that_became_nan_leaves_nothing():
    x = normal(0, 96, torch.float32)
    x[40] = torch.inf
    wire = encode(x, INT4)

    error = reference.error_of_wire(x, wire, INT4)

    assert (error[32:64] == 0).all()
    assert (error[:32] != 0).any()


@pytest.fixture
def pair():
    with Communicator(devices=["cpu"] * 2) as communicator:
        yield communicator


def test_a_residual_needs_a_codec(pair):
    xs = [torch.ones(8)] * 2
    with pytest.raises(ValueError, match="there is no codec"):
        graphar.allreduce(xs, pair, residual=xs)


def test_a_codec_with_feedback_needs_a_residual(pair):
    with pytest.raises(ValueError, match="there is none"):
        graphar.allreduce([torch.ones(8)] * 2, pair, codec=Codec(4, feedback=True))


@pytest.mark.parametrize("op", [graphar.allreduce, graphar.reducescatter])
def test_so_does_the_text_of_one(pair, op):
    with pytest.raises(ValueError, match="there is none"):
        op([torch.ones(8)] * 2, pair, codec=Codec(4, feedback=True).text)


@pytest.mark.parametrize("op", [graphar.allreduce, graphar.reducescatter])
def test_each_rank_of_a_list_has_a_residual_of_its_own(pair, op):
    with pytest.raises(ValueError, match="residual must be a tensor of its own for each rank, got one twice"):
        op([torch.ones(8), torch.ones(8)], pair, codec="int4", residual=[torch.zeros(8)] * 2)


def test_a_residual_is_like_the_input_and_apart_from_it(pair):
    xs = [torch.ones(8), torch.ones(8)]
    for residuals, message in (
        ([torch.zeros(9)] * 2, r"residual must have the input's shape \[8\], got \[9\]"),
        ([torch.zeros(8).half()] * 2, "residual must have the input's dtype"),
        (torch.zeros(8), "residual must be a list of 2 tensors"),
        ([torch.zeros(16)[::2]] * 2, "residual must be contiguous"),
        (xs, "residual must share no memory with x"),
    ):
        with pytest.raises(ValueError, match=message):
            graphar.allreduce(xs, pair, codec="int4", residual=residuals)


def test_a_residual_is_apart_from_the_output(pair):
    outs = [torch.zeros(8), torch.zeros(8)]

    with pytest.raises(ValueError, match="residual must share no memory with out"):
        graphar.allreduce([torch.ones(8)] * 2, pair, codec="int4", residual=outs, out=outs)


def test_the_op_says_what_it_writes(pair):
    xs, residuals, outs = ([normal(at + rank, 100, torch.float32) for rank in range(2)] for at in (0, 2, 4))

    opcheck(
        torch.ops.graphar.allreduce_list_out,
        (xs, residuals, outs, *OP.arguments(communicator=pair.engine.name, codec="int4")),
        test_utils=("test_schema", "test_faketensor"),
    )
