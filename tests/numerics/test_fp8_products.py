"""Products of e4m3 operands with scales: their order, both formats of scales, and what is refused."""

import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphar import reference
from graphar.numerics.exact_fma import fma
from graphar.numerics.fp8_products import BLOCK, FP8, checked_scales, product
from tests.cases import HALVES, far_apart, normal, same_bits
from tests.numerics.test_leaf_tree import by_numpy, slices

M, N, K = 5, 300, 400  # the last block of N and of K is short
FORMATS = ("rows", "blocks")
every_format = pytest.mark.parametrize("form", FORMATS)


def operand(rows, columns, seed=0):
    return normal(seed, rows * columns, torch.float32).view(rows, columns).to(FP8)


def integers(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (rows, columns), generator=generator).float().to(FP8)


def scales_of(form, m=M, n=N, k=K, seed=2):
    """Scales of a format, all different."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-k // BLOCK)
    shapes = ((m, 1), (n, 1)) if form == "rows" else ((m, blocks), (-(-n // BLOCK), blocks))
    return [torch.rand(shape, generator=generator) + 0.5 for shape in shapes]


def dequantized(x, scale, rows_of_scale):
    """An operand in fp64 with its scales, each of which serves so many rows."""
    wide = scale.double().repeat_interleave(rows_of_scale, 0)[: len(x)]
    if scale.shape[1] > 1:
        wide = wide.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    return x.double() * wide


def in_float64(a, w, a_scale, w_scale):
    in_blocks = a_scale.shape[1] > 1
    return dequantized(a, a_scale, 1) @ dequantized(w, w_scale, BLOCK if in_blocks else 1).t()


@every_format
def test_integers_with_scales_that_are_powers_of_two_give_the_exact_result(form):
    a, w = integers(M, K), integers(N, K, 1)
    a_scale, w_scale = ((2.0 ** (scale * 4).floor()) for scale in scales_of(form))

    found = reference.scaled_linear(a, w, a_scale, w_scale, out_dtype=torch.float32)

    assert found.double().equal(in_float64(a, w, a_scale, w_scale))


def with_scales(a, w, a_scale, w_scale, in_blocks):
    """One element, one operation at a time; a fused multiply-add rounds an exact fraction."""
    total = np.float32(0)
    for number, first in enumerate(range(0, len(a), BLOCK)):
        block = by_numpy(a[first : first + BLOCK], w[first : first + BLOCK], step=32)
        if in_blocks:
            exact = Fraction(float(block)) * Fraction(float(a_scale[number] * w_scale[number])) + Fraction(float(total))
            total = rounded(exact)
        else:
            total = total + block
    return total if in_blocks else (total * a_scale[0]) * w_scale[0]


def rounded(exact):
    """A fraction rounded to fp32: the nearest of the candidates around it, with an even last bit in a tie."""
    near = np.float32(float(exact))
    around = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return min(around, key=lambda v: (abs(Fraction(float(v)) - exact), int(v.view(np.int32)) & 1))


@every_format
@pytest.mark.parametrize("fill", [normal, far_apart])
def test_an_element_is_what_numpy_gives_one_operation_at_a_time(form, fill):
    a, w = (
        fill(seed, rows * K, torch.float32).view(rows, K).clamp(-448, 448).to(FP8) for seed, rows in ((0, 3), (1, 5))
    )
    a_scale, w_scale = scales_of(form, 3, 5)

    found = reference.scaled_linear(a, w, a_scale, w_scale, out_dtype=torch.float32)

    of_w = w_scale if form == "rows" else w_scale.expand(5, -1)
    expected = [
        [
            with_scales(*map(torch.Tensor.numpy, (x, y, p, q)), form == "blocks")
            for y, q in zip(w.float(), of_w, strict=True)
        ]
        for x, p in zip(a.float(), a_scale, strict=True)
    ]
    assert np.array_equal(found.numpy(), np.array(expected))


@settings(max_examples=300, deadline=None, derandomize=True)
@example((8384513 * 2.0**-35, 8392705 * 2.0**-35, 1.0))  # 2^-70 above the middle between two numbers
@example((8384513 * 2.0**-35, -8392705 * 2.0**-35, -1.0))
@example((2.0**-12 + 2.0**-35, 2.0**-12 - 2.0**-35, 1 + 2.0**-23))  # 2^-70 below it
@example((2.0**-12 + 2.0**-35, 2.0**-35 - 2.0**-12, -1 - 2.0**-23))
@example((2.0**-40, 2.0**-40, 1.0))
@example((1 + 2.0**-23, 1.0, 2.0**24))  # the exact sum is 2^24 + 1 and a little, where fp32 has every second integer
@given(numbers=st.tuples(*[st.floats(-(2.0**40), 2.0**40, width=32)] * 3))
def test_a_fused_multiply_add_rounds_the_exact_sum_once(numbers):
    x, y, z = numbers

    found = fma(*(torch.tensor(v) for v in numbers)).item()

    assert found == rounded(Fraction(x) * Fraction(y) + Fraction(z))


@pytest.mark.parametrize("infinite", [torch.inf, -torch.inf])
def test_a_fused_multiply_add_of_infinities_is_infinite(infinite):
    one, infinite = torch.tensor(1.0), torch.tensor(infinite)

    assert fma(infinite, one, one) == fma(one, one, infinite) == infinite


def test_what_is_not_a_number_stays_in_its_row_and_column():
    a, w = operand(4, 256), operand(4, 256, 1)
    a[1, 5] = torch.nan
    w_scale = torch.ones(4, 1)
    w_scale[2] = torch.inf

    found = reference.scaled_linear(a, w, torch.ones(4, 1), w_scale)

    assert found.isfinite().logical_not().nonzero().tolist() == [[0, 2], [1, 0], [1, 1], [1, 2], [1, 3], [2, 2], [3, 2]]
    assert found.view(torch.int16)[1].tolist() == [0x7FFF] * 4


@every_format
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_bias_is_added_in_fp32_and_the_result_is_rounded_once(form, dtype):
    a, w, scales = operand(M, K), operand(N, K, 1), scales_of(form)
    bias = normal(3, N, dtype)

    found = reference.scaled_linear(a, w, *scales, bias, dtype)

    whole = reference.scaled_linear(a, w, *scales, out_dtype=torch.float32)
    assert same_bits(found, (whole + bias.float()).to(dtype)) == 0
    assert same_bits(reference.scaled_linear(a, w, *scales, out_dtype=dtype), whole.to(dtype)) == 0


@pytest.mark.parametrize("k", [1, 31, 127, 128, 129, 200])
@every_format
def test_a_short_block_is_what_it_is_with_zeros_behind_it(form, k):
    a, w, scales = operand(M, k), operand(N, k, 1), scales_of(form, k=k)
    padding = torch.zeros(N, -k % BLOCK).to(FP8)

    padded = reference.scaled_linear(torch.cat([a, padding[:M]], 1), torch.cat([w, padding], 1), *scales)

    assert same_bits(reference.scaled_linear(a, w, *scales), padded) == 0


@every_format
def test_products_of_no_columns_are_zero(form):
    found = reference.scaled_linear(operand(M, 0), operand(N, 0), *scales_of(form, k=0))

    assert found.shape == (M, N)
    assert not found.any()


@settings(max_examples=20, deadline=None, derandomize=True)
@given(rows=slices(M), columns=slices(N))
def test_rows_and_columns_alone_have_the_bits_that_they_have_together(rows, columns):
    a, w, (a_scale, w_scale) = operand(M, K), operand(N, K, 1), scales_of("rows")
    a_blocks, w_blocks = scales_of("blocks")
    whole, of_blocks = (reference.scaled_linear(a, w, *scales) for scales in ((a_scale, w_scale), (a_blocks, w_blocks)))

    alone = reference.scaled_linear(a[rows], w[columns], a_scale[rows], w_scale[columns])
    rows_alone = reference.scaled_linear(a[rows], w[BLOCK:], a_blocks[rows], w_blocks[1:])

    assert same_bits(alone, whole[rows, columns]) == 0
    assert same_bits(rows_alone, of_blocks[rows, BLOCK:]) == 0


@pytest.mark.parametrize("one_number", [torch.tensor(0.75), torch.tensor([0.75]), torch.tensor([[0.75]])])
def test_one_number_is_the_scale_of_all_rows(one_number):
    a, w, (a_scale, w_scale) = operand(M, K), operand(N, K, 1), scales_of("rows")
    of_a, of_w = (torch.full_like(scale, 0.75) for scale in (a_scale, w_scale))

    for found, meant in (((one_number, w_scale), (of_a, w_scale)), ((a_scale, one_number), (a_scale, of_w))):
        assert same_bits(reference.scaled_linear(a, w, *found), reference.scaled_linear(a, w, *meant)) == 0


def test_scales_of_weights_may_lie_in_a_row_as_torch_takes_them():
    a, w, (a_scale, w_scale) = operand(M, K), operand(N, K, 1), scales_of("rows")
    expected = reference.scaled_linear(a, w, a_scale, w_scale)

    assert same_bits(reference.scaled_linear(a, w, a_scale, w_scale.view(1, N)), expected) == 0


def test_scales_of_blocks_may_be_column_major():
    a, w, (a_scale, w_scale) = operand(M, K), operand(N, K, 1), scales_of("blocks")
    found = checked_scales("op", a, w, a_scale.t().contiguous().t(), w_scale.t().contiguous().t())

    assert found.format == "blocks"
    assert found.a.stride() == (1, M)
    assert same_bits(product(a, w, found), product(a, w, checked_scales("op", a, w, a_scale, w_scale))) == 0


def test_a_product_of_one_block_has_scales_of_rows_if_its_weights_have_one_number():
    a, w = operand(3, 100), operand(8, 100, 1)

    assert checked_scales("op", a, w, torch.ones(3, 1), torch.ones(1, 1)).format == "rows"
    assert checked_scales("op", a, operand(200, 100), torch.ones(3, 1), torch.ones(2, 1)).format == "blocks"


A, W = operand(4, 300), operand(200, 300, 1)
ROWS = {"a_scale": torch.ones(4, 1), "w_scale": torch.ones(200, 1)}
BLOCKS = {"a_scale": torch.ones(4, 3), "w_scale": torch.ones(2, 3)}
NEEDED = (
    "scaled_linear: a_scale must be [4, 1] or one number and w_scale [200, 1], [1, 200] or one number, for scales of "
    "rows; or [4, 3] and [2, 3], for scales of blocks of 128; got "
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (ROWS | {"a": [1.0]}, "a must be a torch.Tensor, got list"),
        (ROWS | {"a": A.float()}, "a must be torch.float8_e4m3fn, got torch.float32"),
        (ROWS | {"w": W.to(torch.float8_e5m2)}, "w must be torch.float8_e4m3fn, got torch.float8_e5m2"),
        (ROWS | {"w": W.to("meta")}, "w must be on the device of a, cpu, got meta"),
        (ROWS | {"a": A[0]}, "a must have 2 dimensions, got [300]"),
        (ROWS | {"w": W[:, :128]}, "a and w must have equally many columns, got [4, 300] and [200, 128]"),
        (
            ROWS | {"out_dtype": torch.float64},
            "out_dtype must be one of (torch.bfloat16, torch.float16, torch.float32)",
        ),
        (ROWS | {"bias": torch.ones(200)}, "bias must be torch.bfloat16, got torch.float32"),
        (ROWS | {"bias": torch.ones(4, dtype=torch.bfloat16)}, "bias must be [200], got [4]"),
        (ROWS | {"bias": torch.ones(200), "out_dtype": torch.float32}, "a bias is added to rounded results only"),
        (ROWS | {"a_scale": 1.0}, "a_scale must be a torch.Tensor, got float"),
        (ROWS | {"a_scale": torch.ones(4, 1).double()}, "a_scale must be torch.float32, got torch.float64"),
        (ROWS | {"w_scale": torch.ones(200, 1, device="meta")}, "w_scale must be on the device of a, cpu, got meta"),
        (ROWS | {"a_scale": torch.ones(5, 1)}, f"{NEEDED}[5, 1] and [200, 1]"),
        (ROWS | {"a_scale": torch.ones(4)}, f"{NEEDED}[4] and [200, 1]"),
        (ROWS | {"a_scale": torch.ones(1, 4)}, f"{NEEDED}[1, 4] and [200, 1]"),
        (ROWS | {"w_scale": torch.ones(200)}, f"{NEEDED}[4, 1] and [200]"),
        (BLOCKS | {"a_scale": torch.ones(4, 2)}, f"{NEEDED}[4, 2] and [2, 3]"),
        (BLOCKS | {"a_scale": torch.ones(3, 4)}, f"{NEEDED}[3, 4] and [2, 3]"),
        (BLOCKS | {"w_scale": torch.ones(1, 3)}, f"{NEEDED}[4, 3] and [1, 3]"),
        (BLOCKS | {"w_scale": torch.ones(200, 1)}, f"{NEEDED}[4, 3] and [200, 1]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(arguments, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        reference.scaled_linear(**{"a": A, "w": W} | arguments)
