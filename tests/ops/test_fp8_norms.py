"""Matmuls of e4m3 operands whose sums are added to a residual and normed: the specification's bits."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import CommunicatorError, reference
from tests.cases import normal, same_bits
from tests.ops.test_fp8_operands import BF16, FORMATS, M, N, lists, operands
from tests.processes import run_ranks

ALL, PARTS = "fused_matmul_allreduce_residual_rmsnorm", "fused_matmul_reducescatter_residual_rmsnorm"

every_op = pytest.mark.parametrize("op", [ALL, PARTS])
every_format = pytest.mark.parametrize("of", FORMATS)


def residual_like(dtype):
    return normal(50, M * N, dtype).view(M, N)


def weight_like(dtype):
    return normal(51, N, dtype)


def residual_of(op, rank, ranks, dtype=BF16):
    whole = residual_like(dtype)
    return whole if op == ALL else whole.tensor_split(ranks)[rank].contiguous()


def expected(op, ranks, of, dtype=BF16, **how):
    """What each rank gets: a pair."""
    a, w, scales = lists(ranks, of)
    residual, weight = residual_like(dtype), weight_like(dtype)
    if op == ALL:
        return [reference.fused_matmul_allreduce_residual_rmsnorm(a, w, residual, weight, **scales, **how)] * ranks
    parts = residual.tensor_split(ranks)
    return reference.fused_matmul_reducescatter_residual_rmsnorm(a, w, parts, weight, **scales, **how)


def given(op, ranks, of, dtype=BF16):
    a, w, scales = lists(ranks, of)
    return (a, w, [residual_of(op, rank, ranks, dtype) for rank in range(ranks)], [weight_like(dtype)] * ranks), scales


@every_op
@every_format
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("partition", ["auto", "none"])
def test_lists_get_the_specifications_bits(op, of, dtype, partition):
    tensors, scales = given(op, 2, of, dtype)

    found = getattr(graphar, op)(*tensors, weight_offset=1.0, partition=partition, **scales)

    for rank, wanted in enumerate(expected(op, 2, of, dtype, weight_offset=1.0)):
        assert found[0][rank].dtype == dtype
        assert [same_bits(one[rank], of_rank) for one, of_rank in zip(found, wanted, strict=True)] == [0, 0]


@every_op
def test_the_specification_norms_the_sum_of_scaled_products(op):
    a, w, scales = lists(2, "rows")
    matmul = getattr(reference, op.removesuffix("_residual_rmsnorm"))
    sums = matmul(a, w, **scales)
    sums = [sums] * 2 if op == ALL else sums

    for rank, found in enumerate(expected(op, 2, "rows")):
        wanted = reference.allreduce_residual_rmsnorm([sums[rank]], residual_of(op, rank, 2), weight_like(BF16))
        assert [same_bits(*pair) for pair in zip(found, wanted, strict=True)] == [0, 0]


def answers(rank, world_size):
    """By op and format, this rank's results of three equal calls; and by op that of a compiled call."""
    found, compiled = {}, {}
    for op in (ALL, PARTS):
        tensors = residual_of(op, rank, world_size), weight_like(BF16)
        for of in FORMATS:
            a, w, scales = operands(rank, of)
            found[op, of] = [getattr(graphar, op)(a, w, *tensors, **scales) for _ in range(3)]
        a, w, scales = operands(rank, "blocks")
        call = torch.compile(lambda a, w, x, y, s, t, op=op: getattr(graphar, op)(a, w, x, y, a_scale=s, w_scale=t))
        compiled[op] = call(a, w, *tensors, *scales.values())
    return found, compiled


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_get_the_specifications_bits(world_size):
    for rank, (found, compiled) in enumerate(run_ranks(answers, world_size)):
        for (op, of), calls in found.items():
            wanted = expected(op, world_size, of)[rank]
            for call in calls:
                assert [same_bits(*pair) for pair in zip(call, wanted, strict=True)] == [0, 0]
        for op, call in compiled.items():
            wanted = expected(op, world_size, "blocks")[rank]
            assert [same_bits(*pair) for pair in zip(call, wanted, strict=True)] == [0, 0]


def of_other_formats(rank, world_size, op):
    a, w, scales = operands(rank, ("rows", "blocks")[rank], (256, 256))
    with pytest.raises(CommunicatorError) as caught:
        getattr(graphar, op)(a, w, residual_of(op, rank, 2), weight_like(BF16), **scales)
    return str(caught.value)


@every_op
def test_processes_whose_scales_are_of_other_formats_are_told_so(op):
    for message in run_ranks(of_other_formats, 2, op):
        assert "e4m3 operands with scales of rows" in message
        assert "e4m3 operands with scales of blocks" in message


REFUSALS = {
    "need both a_scale and w_scale": {"w_scale": None},
    "operands in torch.float8_e4m3fn need both": {"a_scale": None, "w_scale": None},
    "with scales residual must be bfloat16 or float16, got torch.float32": {"dtype": torch.float32},
    "weight must be [136] torch.bfloat16": {"weight": [weight_like(torch.float16)] * 2},
    "have no gradients, but weight requires one": {"weight": [weight_like(BF16).requires_grad_()] * 2},
    "for scales of blocks of 128": {"a_scale": [torch.ones(M, 2)] * 2},
    "got 'tp_invariant'": {"partition": "tp_invariant"},
}


@every_op
def test_calls_that_break_a_rule_are_refused_by_name(op):
    for expected_words, changes in REFUSALS.items():
        dtype, changed = changes.get("dtype", BF16), {name: one for name, one in changes.items() if name != "dtype"}
        (a, w, residual, weight), scales = given(op, 2, "rows")
        residual = [one.to(dtype) for one in residual]
        with pytest.raises((TypeError, ValueError)) as caught:
            getattr(graphar, op)(**({"a": a, "w": w, "residual": residual, "weight": weight} | scales | changed))
        assert expected_words in str(caught.value)
        assert str(caught.value).startswith(f"{op}: ")
