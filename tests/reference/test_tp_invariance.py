"""Tensor-parallel invariance in the specification: ops and gradients with the same bits on 1, 2, 4 and 8 ranks."""

import pytest
import torch

from graphar import Epilogue, reference
from graphar.numerics import norm_gradients, norms
from graphar.numerics.leaf_tree import product
from graphar.reference import linear_gradients
from tests.cases import HALVES, KERNEL_DTYPES, bit_patterns, far_apart, integers, normal, same_bits

RANKS = (1, 2, 4, 8)
SEVERAL = RANKS[1:]
M, N, K = 19, 24, 1024
EPS = 1e-5

every_dtype = pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
every_ranks = pytest.mark.parametrize("ranks", SEVERAL)


def drawn(seed, *shape, dtype=torch.bfloat16, fill=normal):
    return fill(seed, torch.Size(shape).numel(), dtype).view(shape)


def operands(dtype=torch.bfloat16, fill=normal):
    """The whole ``a``, ``w`` and bias."""
    return drawn(0, M, K, dtype=dtype, fill=fill), drawn(1, N, K, dtype=dtype, fill=fill), drawn(2, N, dtype=dtype)


def columns_of(whole, ranks):
    return [one.contiguous() for one in whole.chunk(ranks, -1)]


def summed(a, w, *more, ranks=1, op=reference.fused_matmul_allreduce, **options):
    return op(columns_of(a, ranks), columns_of(w, ranks), *more, tp_invariant=True, **options)


def leaves_by_hand(a, w):
    l0, l1, l2, l3, l4, l5, l6, l7 = map(product, a.chunk(8, 1), w.chunk(8, 1))
    return ((l0 + l1) + (l2 + l3)) + ((l4 + l5) + (l6 + l7))


@every_dtype
@pytest.mark.parametrize("fill", [normal, far_apart])
def test_any_number_of_ranks_sums_products_to_the_same_bits(dtype, fill):
    a, w, bias = operands(dtype, fill)
    expected = leaves_by_hand(a, w)

    for ranks in RANKS:
        assert same_bits(summed(a, w, ranks=ranks), expected.to(dtype)) == 0, ranks
        assert same_bits(summed(a, w, bias, ranks=ranks), (expected + bias.float()).to(dtype)) == 0, ranks


@every_half
def test_any_bits_give_the_same_bits_and_canonical_nans(dtype):
    a, w = (drawn(seed, 64, K, dtype=dtype, fill=bit_patterns) for seed in (0, 1))
    a[::2], w[::2] = drawn(2, 32, K, dtype=dtype), drawn(3, 32, K, dtype=dtype)
    whole, gathered = summed(a, w), reference.fused_allgather_matmul([a], w, tp_invariant=True)

    assert 0 < whole.isnan().sum() < whole.numel()
    for one in (whole, gathered):
        assert (one.view(torch.int16)[one.isnan()] == 0x7FFF).all()
    assert [same_bits(summed(a, w, ranks=ranks), whole) for ranks in SEVERAL] == [0] * 3


@every_ranks
def test_without_the_tree_ranks_give_other_bits(ranks):
    a, w, _ = operands()
    plain = [reference.fused_matmul_allreduce(columns_of(a, one), columns_of(w, one)) for one in (1, ranks)]

    assert 0.3 < same_bits(*plain) / plain[0].numel() < 0.5


@every_ranks
@every_dtype
@pytest.mark.parametrize("partition", ["none", "split_m", "split_n"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_partitions_change_no_bit_and_the_parts_joined_are_the_whole(ranks, with_bias, partition, dtype):
    a, w, *biases = operands(dtype)[: 2 + with_bias]
    whole = summed(a, w, *biases)

    parts = summed(a, w, *biases, ranks=ranks, partition=partition, op=reference.fused_matmul_reducescatter)

    assert same_bits(summed(a, w, *biases, ranks=ranks, partition=partition), whole) == 0
    assert [len(part) for part in parts] == [len(part) for part in a.tensor_split(ranks)]
    assert same_bits(torch.cat(parts), whole) == 0


@every_ranks
@every_dtype
def test_an_epilogue_works_on_the_sum_before_it_is_rounded(ranks, dtype):
    a, w, bias = operands(dtype)
    scale = drawn(4, M)
    expected = ((leaves_by_hand(a, w) + bias.float()) * scale.float()[:, None]).to(dtype)

    found = summed(a, w, bias, ranks=ranks, epilogue=Epilogue("v * scale[row]", scale=scale))
    of_parts = Epilogue("v * scale[row]", scale=scale.tensor_split(ranks))
    parts = summed(a, w, bias, ranks=ranks, epilogue=of_parts, op=reference.fused_matmul_reducescatter)

    assert same_bits(found, expected) == 0
    assert same_bits(torch.cat(parts), expected) == 0


@every_ranks
def test_norms_have_the_same_bits_and_one_rounding_before_them(ranks):
    a, w, weight = operands()
    residual = drawn(5, M, N)
    of_sum = (leaves_by_hand(a, w) + residual.float()).bfloat16()
    normed, _ = norms.specification(of_sum, torch.zeros_like(of_sum), weight, EPS, 1.0)

    found = summed(a, w, residual, weight, EPS, 1.0, ranks=ranks, op=reference.fused_matmul_allreduce_residual_rmsnorm)
    parts = summed(
        a,
        w,
        residual.tensor_split(ranks),
        weight,
        EPS,
        1.0,
        ranks=ranks,
        op=reference.fused_matmul_reducescatter_residual_rmsnorm,
    )

    for one, expected in zip((found, map(torch.cat, zip(*parts, strict=True))), [(normed, of_sum)] * 2, strict=True):
        assert [same_bits(*pair) for pair in zip(one, expected, strict=True)] == [0, 0]


def test_more_dimensions_of_rows_are_rows():
    a, w, _ = operands()
    a, residual = a[:18].view(3, 6, K), drawn(5, 3, 6, N)
    flat = summed(a.view(18, K), w)

    assert same_bits(summed(a, w, ranks=2), flat.view(3, 6, N)) == 0
    assert same_bits(torch.cat(summed(a, w, ranks=2, op=reference.fused_matmul_reducescatter)), flat.view(3, 6, N)) == 0
    assert (
        same_bits(reference.fused_allgather_matmul([a], w, tp_invariant=True).view(18, N), linear(a.view(18, K), w))
        == 0
    )
    normed, _ = summed(a, w, residual, w[0, :N], ranks=2, op=reference.fused_matmul_allreduce_residual_rmsnorm)
    assert normed.shape == (3, 6, N)


def linear(a, w):
    return product(a, w).to(a.dtype)


@every_ranks
@every_dtype
def test_gathered_rows_have_the_same_bits_however_rows_and_features_are_divided(ranks, dtype):
    a, w, bias = operands(dtype)
    a, w = a[:, :200].contiguous(), w[:, :200].contiguous()  # any K
    expected = (product(a, w) + bias.float()).to(dtype)

    of_ranks = [
        reference.fused_allgather_matmul(a.tensor_split(ranks), *own, tp_invariant=True)
        for own in zip(w.tensor_split(ranks), bias.tensor_split(ranks), strict=True)
    ]

    assert same_bits(torch.cat(of_ranks, 1), expected) == 0


@every_dtype
def test_an_epilogue_works_on_the_product_of_gathered_rows(dtype):
    a, w, bias = operands(dtype)
    expected = torch.relu(product(a, w) + bias.float()).to(dtype)

    found = reference.fused_allgather_matmul(a.tensor_split(4), w, bias, "relu(v)", tp_invariant=True)

    assert same_bits(found, expected) == 0


@every_half
@every_ranks
def test_sums_of_fp32_partials_as_a_tree_are_rounded_once(ranks, dtype):
    parts = [drawn(rank, M, N, dtype=torch.float32) for rank in range(ranks)]
    tree = parts
    while len(tree) > 1:
        tree = [left + right for left, right in zip(tree[::2], tree[1::2], strict=True)]

    assert same_bits(reference.allreduce(parts, order="tree"), tree[0]) == 0
    assert same_bits(reference.allreduce(parts, order="tree", out_dtype=dtype), tree[0].to(dtype)) == 0
    by_columns = reference.reducescatter(parts, axis=1, order="tree", out_dtype=dtype)
    assert same_bits(torch.cat(by_columns, 1), tree[0].to(dtype)) == 0
    doubled = reference.reducescatter(parts, epilogue="v * 2", order="tree", out_dtype=dtype)
    assert same_bits(torch.cat(doubled), (tree[0] * 2).to(dtype)) == 0


def test_a_single_partial_is_rounded_to_another_dtype_and_else_copied():
    (x,) = parts = [drawn(0, M, N, dtype=torch.float32)]

    assert same_bits(reference.allreduce(parts, order="tree", out_dtype=torch.bfloat16), x.bfloat16()) == 0
    copied = reference.allreduce(parts, order="tree")
    assert same_bits(copied, x) == 0
    assert copied.data_ptr() != x.data_ptr()


def test_sums_in_the_order_of_ranks_take_another_dtype_too():
    parts = [drawn(rank, M, N) for rank in range(3)]
    total = parts[0].float() + parts[1].float() + parts[2].float()

    assert same_bits(reference.allreduce(parts, out_dtype=torch.float32), total) == 0


TOKENS, HIDDEN, FEATURES = 40, 1024, 512


class RowParallel:
    """Operands of a row-parallel layer, and its gradients on all ranks, joined: da, dw and dbias."""

    def __init__(self, tokens=TOKENS, dtype=torch.bfloat16):
        self.dy, self.a = drawn(0, tokens, FEATURES, dtype=dtype), drawn(1, tokens, HIDDEN, dtype=dtype)
        self.w = drawn(2, FEATURES, HIDDEN, dtype=dtype)

    def gradients(self, ranks):
        da, dw, dbias = linear_gradients.row_parallel(self.dy, self.a.chunk(ranks, 1), self.w.chunk(ranks, 1))
        return torch.cat(da, 1), torch.cat(dw, 1), dbias


class ColumnParallel:
    """Operands of a column-parallel layer, and its gradients on all ranks, joined: da, dw and dbias."""

    def __init__(self, tokens=TOKENS, dtype=torch.bfloat16):
        self.dy, self.a = drawn(0, tokens, HIDDEN, dtype=dtype), drawn(1, tokens, FEATURES, dtype=dtype)
        self.w = drawn(2, HIDDEN, FEATURES, dtype=dtype)

    def gradients(self, ranks):
        da, dw, dbias = linear_gradients.column_parallel(self.dy.chunk(ranks, 1), self.a, self.w.chunk(ranks))
        return da, torch.cat(dw), torch.cat(dbias)


every_layer = pytest.mark.parametrize("layer", [RowParallel, ColumnParallel])


@every_ranks
@every_layer
@every_dtype
@pytest.mark.parametrize("tokens", [TOKENS, 5])
def test_the_gradients_of_linear_layers_have_the_same_bits_for_any_number_of_ranks(layer, ranks, tokens, dtype):
    one = layer(tokens, dtype)

    pairs = zip(one.gradients(ranks), one.gradients(1), strict=True)

    assert [same_bits(*pair) for pair in pairs] == [0, 0, 0]


@every_dtype
def test_gradients_of_inputs_and_weights_are_added_in_the_order_of_features_or_tokens_or_as_a_tree(dtype):
    rows, columns = RowParallel(dtype=dtype), ColumnParallel(dtype=dtype)

    of_input, of_weight, of_bias = rows.gradients(2)
    of_whole_input, of_columns_weight, _ = columns.gradients(2)

    assert same_bits(of_input, linear(rows.dy, rows.w.t())) == 0
    assert same_bits(of_weight, linear(rows.dy.t(), rows.a.t())) == 0
    leaves = leaves_by_hand(rows.dy.t(), torch.ones(1, TOKENS, dtype=dtype))
    assert same_bits(of_bias, leaves.squeeze(1).to(dtype)) == 0
    assert same_bits(of_whole_input, summed(columns.dy, columns.w.t(), ranks=4)) == 0
    assert same_bits(of_columns_weight, linear(columns.dy.t(), columns.a.t())) == 0


@every_layer
def test_gradients_that_are_no_numbers_are_canonical_nans(layer):
    one = layer()
    one.dy[3, 7], one.dy[5] = torch.nan, -torch.nan

    for gradient in one.gradients(2):
        assert 0 < gradient.isnan().sum() <= gradient.numel()
        assert (gradient.view(torch.int16)[gradient.isnan()] == 0x7FFF).all()


@every_ranks
@every_dtype
def test_the_gradient_of_a_bias_whose_rows_ranks_divide_has_the_same_bits(ranks, dtype):
    one = RowParallel(dtype=dtype)
    *_, rounded = one.gradients(1)

    partials = [linear_gradients.bias_partial(rows, ranks) for rows in one.dy.chunk(ranks)]

    total = reference.allreduce(partials, order="tree")
    assert same_bits(total, linear_gradients.bias_partial(one.dy, 1)) == 0
    assert same_bits(total.to(dtype), rounded) == 0


@every_ranks
@every_dtype
def test_the_gradient_of_a_norms_weight_whose_rows_ranks_divide_has_the_same_bits(ranks, dtype):
    of_normed, rows = (drawn(seed, 2000, N, dtype=dtype) for seed in (0, 1))
    whole = norm_gradients.weight_partial(of_normed, rows, EPS, 1)

    parts = zip(of_normed.chunk(ranks), rows.chunk(ranks), strict=True)
    partials = [norm_gradients.weight_partial(*own, EPS, ranks) for own in parts]

    assert same_bits(reference.allreduce(partials, order="tree"), whole) == 0
    x, g = rows.double(), of_normed.double()
    exact = (g * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()).sum(0)
    assert (whole.double() - exact).abs().max() < 1e-3


@pytest.mark.parametrize(
    "op",
    [
        reference.fused_matmul_allreduce,
        reference.fused_matmul_reducescatter,
        reference.fused_matmul_allreduce_residual_rmsnorm,
        reference.fused_matmul_reducescatter_residual_rmsnorm,
    ],
)
def test_products_without_whole_leaves_are_refused(op):
    a = [integers(0, 8 * 66, torch.bfloat16).view(8, 66)] * 2
    more = [torch.ones(8, 8), torch.ones(8)] if "norm" in op.__name__ else []

    with pytest.raises(ValueError, match="the columns of a rank must be 4 leaves of equal length with a group of 2"):
        op(a, a, *more, tp_invariant=True)


@pytest.mark.parametrize("op", [reference.fused_matmul_allreduce, reference.fused_matmul_reducescatter])
def test_a_codec_is_refused(op):
    a, w, _ = operands()

    with pytest.raises(ValueError, match="takes a codec or tp_invariant, not both"):
        summed(a, w, ranks=2, op=op, codec="int8")


@pytest.mark.parametrize("op", [reference.allreduce, reference.reducescatter])
@pytest.mark.parametrize(
    ("ranks", "dtype", "order", "message"),
    [
        (3, torch.float32, "tree", "1, 2, 4 or 8 ranks, got 3"),
        (2, torch.bfloat16, "tree", "order='tree' adds partials in float32, got torch.bfloat16"),
        (2, torch.float32, "ring", "order must be 'rank' or 'tree', got 'ring'"),
    ],
)
def test_sums_that_are_no_tree_are_refused(op, ranks, dtype, order, message):
    with pytest.raises(ValueError, match=message):
        op([torch.ones(8, dtype=dtype)] * ranks, order=order)


@pytest.mark.parametrize(
    ("rows", "ranks", "message"), [(3, 4, "rows of each of 4 ranks must be a multiple of 2, got 3"), (8, 6, "got 6")]
)
def test_rows_without_whole_leaves_are_refused(rows, ranks, message):
    dy = torch.ones(rows, 8)

    for partial in (
        lambda: linear_gradients.bias_partial(dy, ranks),
        lambda: norm_gradients.weight_partial(dy, dy, EPS, ranks),
    ):
        with pytest.raises(ValueError, match=message):
            partial()


def test_a_column_parallel_layer_without_whole_leaves_of_features_is_refused():
    dy, x = drawn(0, 4, 90), drawn(1, 4, 16)

    with pytest.raises(ValueError, match="4 leaves of equal length with a group of 2, got 45"):
        linear_gradients.column_parallel(dy.chunk(2, 1), x, drawn(2, 90, 16).chunk(2))
