"""graphar.linear with e4m3 operands: the specification's bits."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import reference
from tests.cases import normal, same_bits
from tests.ops.test_fp8_operands import BF16, FORMATS, FP8, M, N, bias_like, operands

every_format = pytest.mark.parametrize("of", FORMATS)


@every_format
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_has_the_specifications_bits(of, dtype, with_bias):
    a, w, scales = operands(1, of)
    bias = bias_like(dtype) if with_bias else None

    found = graphar.linear(a, w, bias, **scales, out_dtype=dtype)

    assert same_bits(found, reference.scaled_linear(a, w, **scales, bias=bias, out_dtype=dtype)) == 0


@every_format
def test_a_row_has_the_same_bits_alone_and_among_others(of):
    a, w, scales = operands(0, of)
    whole = graphar.linear(a, w, **scales)
    of_row = scales["a_scale"][3:4] if scales["a_scale"].ndim else scales["a_scale"]

    assert same_bits(graphar.linear(a[3:4], w, a_scale=of_row, w_scale=scales["w_scale"]), whole[3:4]) == 0


@every_format
def test_rows_may_have_several_dimensions(of):
    a, w, scales = operands(0, of)
    wide = scales["a_scale"].view(2, M // 2, -1) if scales["a_scale"].ndim else scales["a_scale"]

    found = graphar.linear(a.view(2, M // 2, -1), w, a_scale=wide, w_scale=scales["w_scale"])

    assert same_bits(found, graphar.linear(a, w, **scales).view(2, M // 2, N)) == 0


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles(dynamic):
    a, w, scales = operands(0, "blocks")
    call = torch.compile(lambda a, w, s, t: graphar.linear(a, w, a_scale=s, w_scale=t) * 2, dynamic=dynamic)

    for rows in (M, 7):
        given = a[:rows], w, scales["a_scale"][:rows], scales["w_scale"]
        wanted = graphar.linear(*given[:2], a_scale=given[2], w_scale=given[3])
        assert same_bits(call(*given), wanted * 2) == 0


def test_no_rows_and_no_columns_of_k_give_zeros_or_nothing():
    a, w, scales = operands(0, "numbers")

    assert graphar.linear(a[:0], w, **scales).shape == (0, N)
    assert not graphar.linear(a[:, :0], w[:, :0], **scales).any()


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("need both a_scale and w_scale", {"w_scale": None}),
        ("need both a_scale and w_scale", {"w_scale": None, "a_scale": None}),
        ("out_dtype must be bfloat16, float16 or None", {"out_dtype": torch.float32}),
        ("w must be torch.float8_e4m3fn", {"w": torch.ones(N, 256)}),
        ("for scales of blocks of 128", {"a_scale": torch.ones(M, 5)}),
        ("have no gradients, but bias requires one", {"bias": normal(1, N, BF16).requires_grad_()}),
    ],
)
def test_calls_that_break_a_rule_are_refused_by_name(words, changes):
    a, w, scales = operands(0, "rows")

    with pytest.raises((TypeError, ValueError)) as caught:
        graphar.linear(**({"a": a, "w": w} | scales | changes))

    assert words in str(caught.value)
    assert str(caught.value).startswith("linear: ")


def test_a_group_is_checked_as_without_scales():
    a, w, scales = operands(0, "rows")

    with graphar.Communicator(devices=["cpu"] * 3) as three, pytest.raises((TypeError, ValueError)) as caught:
        graphar.linear(a, w, **scales, group=three)
    with graphar.Communicator(devices=["cpu"] * 3) as three, pytest.raises((TypeError, ValueError)) as without:
        graphar.linear(a.bfloat16(), w.bfloat16(), group=three)

    assert str(caught.value) == str(without.value)


def test_operands_of_16_bits_take_no_out_dtype():
    with pytest.raises(ValueError, match="out_dtype goes with a_scale and w_scale"):
        graphar.linear(torch.ones(2, 8), torch.ones(4, 8), out_dtype=BF16)


def test_e4m3_is_told_from_other_formats_of_8_bits():
    a, w, scales = operands(0, "rows")

    with pytest.raises(TypeError, match=f"a must be {FP8}, got torch.float8_e5m2"):
        graphar.linear(a.view(torch.float8_e5m2), w, **scales)
