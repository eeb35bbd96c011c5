"""Calls worked out by hand: every op and graphar.reference must give these results.

In bf16, 257 lies halfway between two numbers and becomes 256, so a sum shows when it was rounded. In fp32, 2^24 + 1
becomes 2^24, so a sum shows its order of addition: 2^24, 1 and -2^24 give 0, but 1 if added in reverse order.
"""

from dataclasses import replace

import pytest
import torch

from graphar import Codec
from tests.ops.conformance import PLAIN

BIG = 2.0**24


def bf16(*values):
    return [torch.tensor(one, dtype=torch.bfloat16) for one in values]


IN_ORDER_AND_ONCE = bf16([BIG, 256], [1, 1], [-BIG, 1])
ROWS = bf16([[BIG], [256], [1]], [[1], [1], [2]], [[-BIG], [1], [3]])
SENT_AS_INTEGERS = bf16([[127, -10.25], [0.375, 63.25]], [[0, 3.375], [127, 0]])  # the largest is 127, so a step is 1
# The products are [[256, 2^24], [1, 0], [0, 0]], where 257 was rounded, [[1, 1], [0, 0], [2, 2]], [[0, -2^24], ...].
A = bf16([[4096, 1], [0, 1], [0, 0]], [[1, 0], [0, 0], [2, 0]], [[1, 0], [0, 0], [0, 0]])
W = bf16([[1 / 16, 1], [4096, 0]], [[1, 0], [1, 0]], [[0, 0], [-BIG, 0]])
BIAS, WEIGHT = bf16([1, 5]), bf16([1, 2])
CODEC = {"codec": Codec(8, 32)}
NORM = {"eps": 3.5}  # 16 with the mean of 3^2 and 4^2: rows are divided by 4


def same_on(ranks, *results):
    return [list(results)] * ranks


# By op and options: what each rank gets, the tensors of all ranks, and the options.
EXAMPLES = {
    "allreduce": (same_on(3, [0, 258]), {"x": IN_ORDER_AND_ONCE}, {}),
    "allreduce, epilogue": (  # 257 - 1; rounding before the epilogue would give 255
        same_on(2, [256, 0]),
        {"x": bf16([256, 1], [1, 2]), "b": bf16([1, 4], [1, 4])},
        {"epilogue": "relu(v - b[col])"},
    ),
    "allreduce, codec": (same_on(2, [[127, -7], [127, 63]]), {"x": SENT_AS_INTEGERS}, CODEC),  # the sum's is 127, too
    "reducescatter": ([[[[0]]], [[[258]]], [[[6]]]], {"x": ROWS}, {}),
    # Rows travel apart: the largest of one is exact, and 0.375 becomes a step of 63.25 / 127.
    "reducescatter, codec": ([[[[127, -6.625]]], [[[127.5, 63.25]]]], {"x": SENT_AS_INTEGERS}, CODEC),
    "allgather": (same_on(2, [[1, 2], [3, 4], [5, 6]]), {"x": bf16([[1, 2]], [[3, 4], [5, 6]])}, {}),
    "allreduce_residual_rmsnorm": (
        same_on(3, [[0.75, 2]], [[3, 4]]),
        {"x": [x[None] for x in IN_ORDER_AND_ONCE], "residual": bf16([[3, -254]]) * 3, "weight": WEIGHT * 3},
        NORM,
    ),
    "reducescatter_residual_rmsnorm": (
        [[[[0.75, 2]], [[3, 4]]], [[[1, 1.5]], [[4, 3]]]],
        {
            "x": bf16([[256, 0], [1, 0]], [[1, 5], [0, 1]]),
            "residual": bf16([[-253, -1]], [[3, 2]]),
            "weight": WEIGHT * 2,
        },
        NORM,
    ),
    "fused_matmul_allreduce": (same_on(3, [[256, 0], [1, 0], [2, 2]]), {"a": A, "w": W}, {}),
    "fused_matmul_allreduce, bias": (
        same_on(3, [[258, 5], [2, 5], [3, 7]]),
        {"a": A, "w": W, "bias": BIAS * 3},
        {},
    ),
    "fused_matmul_reducescatter, bias": (
        [[[[258, 5]]], [[[2, 5]]], [[[3, 7]]]],
        {"a": A, "w": W, "bias": BIAS * 3},
        {},
    ),
    "fused_matmul_reducescatter_residual_rmsnorm": (  # sums of [256, 0], [1, 0] and [2, 2]
        [[[[0.75, 2]], [[3, 4]]], [[[0.75, 2]], [[3, 4]]], [[[1, 1.5]], [[4, 3]]]],
        {"a": A, "w": W, "residual": bf16([[-253, 4]], [[2, 4]], [[2, 1]]), "weight": WEIGHT * 3},
        NORM,
    ),
    "fused_matmul_allreduce_residual_rmsnorm": (
        same_on(3, [[0.75, 2]], [[3, 4]]),
        {"a": [a[:1] for a in A], "w": W, "residual": bf16([[-253, 4]]) * 3, "weight": WEIGHT * 3},
        NORM,
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_rank_of_a_list_gets_it_and_the_specification_says_so(name):
    expected, tensors, options = EXAMPLES[name]
    (plain,) = [form for form in PLAIN if form.op.__name__ == name.split(",")[0]]
    options = dict(options)
    form = replace(plain, epilogue=options.pop("epilogue", None), options=options)

    for of_ranks in (form.in_list(tensors), form.expected(tensors)):
        assert [[y.tolist() for y in ys] for ys in of_ranks] == expected
