"""Calls worked out by hand: every op and graphar.reference must give these results.

In bf16, 257 lies halfway between two numbers and becomes 256, so a sum shows when it was rounded. In fp32, 2^24 + 1
becomes 2^24, so a sum shows its order of addition: 2^24, 1 and -2^24 give 0, but 1 if added in reverse order.
"""

import pytest
import torch

import graphar
from graphar import Codec, Epilogue, reference

BIG = 2.0**24


def bf16(*values):
    return [torch.tensor(one, dtype=torch.bfloat16) for one in values]


IN_ORDER_AND_ONCE = bf16([BIG, 256], [1, 1], [-BIG, 1])
ROWS = bf16([[BIG], [256], [1]], [[1], [1], [2]], [[-BIG], [1], [3]])
SENT_AS_INTEGERS = bf16([[127, -10.25], [0.375, 63.25]], [[0, 3.375], [127, 0]])  # the largest is 127, so a step is 1
# The products are [[256, 2^24], [1, 0], [0, 0]], where 257 was rounded, [[1, 1], [0, 0], [2, 2]], [[0, -2^24], ...].
A = bf16([[4096, 1], [0, 1], [0, 0]], [[1, 0], [0, 0], [2, 0]], [[1, 0], [0, 0], [0, 0]])
W = bf16([[1 / 16, 1], [4096, 0]], [[1, 0], [1, 0]], [[0, 0], [-BIG, 0]])
(BIAS,) = bf16([1, 5])
NORM = {"eps": 3.5}  # 16 with the mean of 3^2 and 4^2: rows are divided by 4


def norm_of(*row):
    residual, weight = bf16([row], [1, 2])
    return residual, weight


def same_on(ranks, *results):
    return [list(results)] * ranks


# What each rank gets, the call with lists, and what graphar.reference says.
EXAMPLES = {
    "allreduce": (
        same_on(3, [0, 258]),
        lambda: graphar.allreduce(IN_ORDER_AND_ONCE),
        lambda: reference.allreduce(IN_ORDER_AND_ONCE),
    ),
    "allreduce, epilogue": (  # 257 - 1; rounding before the epilogue would give 255
        same_on(2, [256, 0]),
        lambda: graphar.allreduce(
            bf16([256, 1], [1, 2]), epilogue=Epilogue("relu(v - b[col])", b=bf16([1, 4], [1, 4]))
        ),
        lambda: reference.allreduce(bf16([256, 1], [1, 2]), Epilogue("relu(v - b[col])", b=bf16([1, 4])[0])),
    ),
    "allreduce, codec": (  # the largest of the sum is 127, too
        same_on(2, [[127, -7], [127, 63]]),
        lambda: graphar.allreduce(SENT_AS_INTEGERS, codec=Codec(8, 32)),
        lambda: reference.quantized_allreduce(SENT_AS_INTEGERS, Codec(8, 32)),
    ),
    "reducescatter": (
        [[[[0]]], [[[258]]], [[[6]]]],
        lambda: graphar.reducescatter(ROWS),
        lambda: reference.reducescatter(ROWS),
    ),
    "reducescatter, codec": (  # rows travel apart: the largest of one is exact, and 0.375 becomes a step of 63.25 / 127
        [[[[127, -6.625]]], [[[127.5, 63.25]]]],
        lambda: graphar.reducescatter(SENT_AS_INTEGERS, codec=Codec(8, 32)),
        lambda: reference.quantized_reducescatter(SENT_AS_INTEGERS, Codec(8, 32)),
    ),
    "allgather": (
        same_on(2, [[1, 2], [3, 4], [5, 6]]),
        lambda: graphar.allgather(bf16([[1, 2]], [[3, 4], [5, 6]])),
        lambda: reference.allgather(bf16([[1, 2]], [[3, 4], [5, 6]])),
    ),
    "allreduce_residual_rmsnorm": (
        same_on(3, [[0.75, 2]], [[3, 4]]),
        lambda: graphar.allreduce_residual_rmsnorm(
            [x[None] for x in IN_ORDER_AND_ONCE], *([one] * 3 for one in norm_of(3, -254)), **NORM
        ),
        lambda: reference.allreduce_residual_rmsnorm([x[None] for x in IN_ORDER_AND_ONCE], *norm_of(3, -254), **NORM),
    ),
    "reducescatter_residual_rmsnorm": (
        [[[[0.75, 2]], [[3, 4]]], [[[1, 1.5]], [[4, 3]]]],
        lambda: graphar.reducescatter_residual_rmsnorm(
            bf16([[256, 0], [1, 0]], [[1, 5], [0, 1]]), bf16([[-253, -1]], [[3, 2]]), bf16([1, 2], [1, 2]), **NORM
        ),
        lambda: reference.reducescatter_residual_rmsnorm(
            bf16([[256, 0], [1, 0]], [[1, 5], [0, 1]]), bf16([[-253, -1]], [[3, 2]]), bf16([1, 2])[0], **NORM
        ),
    ),
    "fused_matmul_allreduce": (
        same_on(3, [[256, 0], [1, 0], [2, 2]]),
        lambda: graphar.fused_matmul_allreduce(A, W),
        lambda: reference.fused_matmul_allreduce(A, W),
    ),
    "fused_matmul_allreduce, bias": (
        same_on(3, [[258, 5], [2, 5], [3, 7]]),
        lambda: graphar.fused_matmul_allreduce(A, W, bias=[BIAS] * 3),
        lambda: reference.fused_matmul_allreduce(A, W, BIAS),
    ),
    "fused_matmul_reducescatter, bias": (
        [[[[258, 5]]], [[[2, 5]]], [[[3, 7]]]],
        lambda: graphar.fused_matmul_reducescatter(A, W, bias=[BIAS] * 3),
        lambda: reference.fused_matmul_reducescatter(A, W, BIAS),
    ),
    "fused_matmul_reducescatter_residual_rmsnorm": (  # sums of [256, 0], [1, 0] and [2, 2]
        [[[[0.75, 2]], [[3, 4]]], [[[0.75, 2]], [[3, 4]]], [[[1, 1.5]], [[4, 3]]]],
        lambda: graphar.fused_matmul_reducescatter_residual_rmsnorm(
            A, W, bf16([[-253, 4]], [[2, 4]], [[2, 1]]), bf16([1, 2], [1, 2], [1, 2]), **NORM
        ),
        lambda: reference.fused_matmul_reducescatter_residual_rmsnorm(
            A, W, bf16([[-253, 4]], [[2, 4]], [[2, 1]]), bf16([1, 2])[0], **NORM
        ),
    ),
    "fused_matmul_allreduce_residual_rmsnorm": (
        same_on(3, [[0.75, 2]], [[3, 4]]),
        lambda: graphar.fused_matmul_allreduce_residual_rmsnorm(
            [a[:1] for a in A], W, *([one] * 3 for one in norm_of(-253, 4)), **NORM
        ),
        lambda: reference.fused_matmul_allreduce_residual_rmsnorm([a[:1] for a in A], W, *norm_of(-253, 4), **NORM),
    ),
}
every_example = pytest.mark.parametrize(("expected", "call", "specify"), EXAMPLES.values(), ids=EXAMPLES)


def numbers(results):
    """The results of one rank, or of all, as lists."""
    return [y.tolist() for y in results]


@every_example
def test_every_rank_of_a_list_gets_it(expected, call, specify):
    found = call()
    of_ranks = zip(*found, strict=True) if isinstance(found, tuple) else [(y,) for y in found]

    assert list(map(numbers, of_ranks)) == expected


@every_example
def test_the_specification_says_so(expected, call, specify):
    said = specify()
    of_ranks = [y if isinstance(y, tuple) else (y,) for y in (said if isinstance(said, list) else [said])]

    assert list(map(numbers, of_ranks)) == expected[: len(of_ranks)]
