"""Products added in the order of K, and partials as nodes of a tree: the bits that do not depend on the ranks."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphar.numerics.leaf_tree import LEAF_UNIT, LEAVES, check_operands, check_ranks, in_leaves, product, tree_sum
from tests.cases import HALVES, KERNEL_DTYPES, LAYOUTS, bit_patterns, far_apart, lay_out, normal, same_bits

BF16, RANKS = torch.bfloat16, (1, 2, 4, 8)
BIG = 2.0**24  # in fp32, BIG + 1 is BIG

every_dtype = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)


def operands(m, n, k, dtype=BF16, fill=normal):
    return fill(0, m * k, dtype).view(m, k), fill(1, n * k, dtype).view(n, k)


def partials(a, w, world_size):
    leaves, of_ranks = LEAVES // world_size, zip(a.chunk(world_size, 1), w.chunk(world_size, 1), strict=True)
    return [in_leaves(*own, leaves) for own in of_ranks]


def invariant(a, w, world_size=1):
    return tree_sum(partials(a, w, world_size))


def by_numpy(a, w, step=16):
    """The product of two rows, one operation at a time."""
    total = np.float32(0)
    for first in range(0, len(a), step):
        added = np.float32(0)
        for x, y in zip(a[first : first + step], w[first : first + step], strict=True):
            added = added + x * y
        total = total + added
    return total


@every_dtype
@pytest.mark.parametrize("fill", [normal, far_apart, bit_patterns])
def test_an_element_is_what_numpy_gives_one_operation_at_a_time(dtype, fill):
    a, w = operands(3, 5, 70, dtype, fill)

    with np.errstate(all="ignore"):
        expected = [[by_numpy(x, y) for y in w.float().numpy()] for x in a.float().numpy()]

    assert np.array_equal(product(a, w).numpy(), np.array(expected), equal_nan=True)


def test_the_products_of_16_columns_are_added_before_they_meet_what_was_added_before():
    one, x = torch.ones(1, 48), torch.ones(1, 48)
    x[0, 0] = BIG

    assert product(x, one).item() == BIG + 32  # 15 ones are lost in the first step


def test_a_sum_of_negative_zeros_is_zero():
    assert not product(torch.full((1, 16), -0.0), torch.ones(1, 16)).signbit().item()


def slices(length):
    return st.tuples(*[st.integers(0, length)] * 2).map(lambda ends: slice(*sorted(ends)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data(), dtype=st.sampled_from(KERNEL_DTYPES), layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2))
def test_rows_and_columns_alone_have_the_bits_that_they_have_together(data, dtype, layouts):
    m, n = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    a, w = operands(m, n, 8 * LEAF_UNIT, dtype)
    rows, columns, ranks = data.draw(slices(m)), data.draw(slices(n)), data.draw(st.sampled_from(RANKS))

    alone = invariant(lay_out(a[rows], layouts[0]), lay_out(w[columns], layouts[1]), ranks)

    assert same_bits(alone, invariant(a, w)[rows, columns]) == 0


def test_leaves_are_added_in_pairs_of_neighbours():
    nodes = [torch.tensor(x) for x in (BIG, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)]

    assert tree_sum(nodes).item() == ((BIG + 0) + 2) + (2 + 2)
    assert tree_sum(nodes[:4]).item() == BIG + 2
    assert tree_sum(nodes[:2]).item() == BIG
    assert tree_sum(nodes[1:2]).item() == 1


@pytest.mark.parametrize("leaf", [64, 448, 1024, 1792, 2368, 3584])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_partials_of_any_number_of_ranks_add_up_to_the_same_bits(leaf, dtype):
    a, w = operands(3, 16, LEAVES * leaf, dtype)
    l0, l1, l2, l3, l4, l5, l6, l7 = map(product, a.split(leaf, 1), w.split(leaf, 1))
    expected = ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7))

    assert {ranks: same_bits(invariant(a, w, ranks), expected) for ranks in RANKS} == dict.fromkeys(RANKS, 0)


@pytest.mark.parametrize("ranks", [0, 3, 5, 6, 7, 9, 16])
def test_ranks_without_whole_leaves_are_refused(ranks):
    with pytest.raises(ValueError, match=f"op: a tree of 8 leaves is for 1, 2, 4 or 8 ranks, got {ranks}"):
        check_ranks("op", ranks)


@pytest.mark.parametrize(
    ("columns", "dtype", "message"),
    [
        ((66, 66), BF16, "op: the columns of a rank must be 4 leaves of equal length with a group of 2, got 66"),
        ((601,), BF16, "op: the columns of a rank must be 8 leaves of equal length with a group of 1, got 601"),
        ((256, 768), BF16, "op: a tree of 8 leaves needs equally many columns on all ranks, got [256, 768]"),
        ((512,), torch.float64, "op: leaves are of bfloat16, float16 or float32, got torch.float64"),
        ((512,) * 3, BF16, "op: a tree of 8 leaves is for 1, 2, 4 or 8 ranks, got 3"),
    ],
)
def test_operands_without_whole_leaves_are_refused(columns, dtype, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        check_operands("op", [torch.ones(2, length, dtype=dtype) for length in columns])


@pytest.mark.parametrize("columns", [(0,), (512,), (256, 256), (128,) * 4, (64,) * 8, (448,) * 8, (600,), (3,) * 8])
def test_operands_of_whole_leaves_are_taken(columns):
    check_operands("op", [torch.ones(2, 3, length) for length in columns])
