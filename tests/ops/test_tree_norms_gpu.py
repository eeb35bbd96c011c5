"""The norm of sums of fp32 that one GPU has, by the kernel that meets no other rank: the specification's bits."""

import itertools

import pytest
import torch

from graphar.numerics import norms
from graphar.numerics.dtypes import with_canonical_nan
from graphar.runtime.bind import residual_norm
from tests.cases import HALVES, bit_patterns, normal, same_bits
from tests.gpu import DTYPES
from tests.ops.gpu_cases import NUMBERS

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.gpu(1)
@pytest.mark.parametrize(
    ("of_sum", "dtype"), [*((dtype, dtype) for dtype in DTYPES), *((FP32, dtype) for dtype in HALVES)], ids=str
)
def test_the_local_kernel_norms_sums_to_the_bit_whatever_they_hold(of_sum, dtype):
    widths = (8, 1032, 8192, (1 << 16) // dtype.itemsize)
    for rows, columns, fill in itertools.product((1, 265, 700), widths, (normal, bit_patterns)):
        total = with_canonical_nan(fill(0, rows * columns, of_sum).view(rows, columns)).cuda()
        residual = normal(20, rows * columns, dtype).view(rows, columns).cuda()
        weight = normal(21, columns, dtype).cuda()
        normed = total if of_sum == dtype else torch.empty_like(residual)  # in place of the sum, where it fits
        results = normed, torch.empty_like(residual)
        expected = norms.specification(total, residual, weight, *NUMBERS)
        assert residual_norm.serves(residual, of_sum)

        residual_norm.norm(total, residual, weight, *results, *NUMBERS)

        assert [same_bits(*pair) for pair in zip(results, expected, strict=True)] == [0, 0], (rows, columns)


@pytest.mark.gpu(1)
def test_the_local_kernel_takes_rows_of_any_alignment():
    room, numel = torch.empty(3 * 1024 + 1, device="cuda"), 3 * 1024
    total = room[1:].view(3, 1024).copy_(normal(0, numel, FP32).view(3, 1024))
    residual, weight = normal(20, numel, BF16).view(3, 1024).cuda(), normal(21, 1024, BF16).cuda()
    results = torch.empty_like(residual), torch.empty_like(residual)

    residual_norm.norm(total, residual, weight, *results, *NUMBERS)

    expected = norms.specification(total, residual, weight, *NUMBERS)
    assert [same_bits(*pair) for pair in zip(results, expected, strict=True)] == [0, 0]
