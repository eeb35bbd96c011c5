"""The specification of matmuls whose products are summed, or whose rows are gathered, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics import leaf_tree, norms, partitions
from graphar.numerics.codecs import Codec, CodecName
from graphar.numerics.dtypes import ACCUMULATION_DTYPES
from graphar.numerics.epilogues.epilogue import Epilogue, EpilogueInputs, Pointwise, as_epilogue, bind
from graphar.numerics.fp8_products import rank_products, rows_of_scale, scaled_linear
from graphar.numerics.nan import with_canonical_nan
from graphar.numerics.partitions import Partition
from graphar.reference.sums import (
    Order,
    allgather,
    allreduce,
    quantized_allreduce,
    quantized_reducescatter,
    reducescatter,
)


def matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Returns one rank's product ``a @ w.T``, accumulated in fp32 (float64 for float64) and rounded to its dtype."""
    return linear(a, w)


def linear(
    a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, tp_invariant: bool = False
) -> torch.Tensor:
    """Returns ``a @ w.T + bias``, accumulated in fp32 (float64 for float64) and rounded once to its dtype.

    With ``tp_invariant`` it is accumulated in the order of K, 16 columns at a time.
    """
    product = unrounded_product(a, w, tp_invariant)
    return with_canonical_nan((product if bias is None else product + bias.to(product.dtype)).to(a.dtype))


def linear_with_epilogue(
    a: torch.Tensor, w: torch.Tensor, form: Pointwise, inputs: EpilogueInputs, tp_invariant: bool = False
) -> torch.Tensor:
    """Returns ``a @ w.T``, accumulated as :func:`linear` does, with an epilogue applied before rounding."""
    return rounded_after(form, inputs, unrounded_product(a, w, tp_invariant), a.dtype)


def rounded_after(form: Pointwise, inputs: EpilogueInputs, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns an epilogue's values for all of the fp32 tensor ``v``, rounded to ``dtype``."""
    return with_canonical_nan(form.apply_whole(v, inputs).to(dtype))


def unrounded_product(a: torch.Tensor, w: torch.Tensor, tp_invariant: bool = False) -> torch.Tensor:
    """Returns ``a @ w.T``, accumulated as :func:`linear` does, before it is rounded."""
    if tp_invariant:
        return leaf_tree.product(_flat(a), w).view(*a.shape[:-1], len(w))
    kind = ACCUMULATION_DTYPES[a.dtype]
    with torch.autocast(a.device.type, enabled=False):  # it would multiply in bf16
        return a.to(kind) @ w.to(kind).t()


def with_bias(total: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``total + bias`` rounded to ``dtype``; ``total`` is a sum that has not been rounded yet."""
    return with_canonical_nan((total + bias.to(total.dtype)).to(dtype))


def fused_matmul_allreduce(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    partition: Partition = "none",
    num_partitions: int | None = None,
    codec: Codec | CodecName | None = None,
    seed: int = 0,
    call: int = 0,
    epilogue: object = None,
    tp_invariant: bool = False,
    a_scale: Sequence[torch.Tensor] | None = None,
    w_scale: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns what every rank receives: the sum of ``a[r] @ w[r].T`` over all ranks r, plus the bias.

    Each product is rounded to its dtype before it is summed. The bias is added once, before the sum is rounded. Without
    a codec, partitions change no bit. With a codec, each partition is encoded separately, in order.

    With ``tp_invariant`` K over all ranks is cut into 8 leaves of equal length, which are added in fp32 as a binary
    tree. The result is rounded once. It has the same bits for 1, 2, 4 and 8 ranks, and each element depends on its row
    of ``a`` and its row of ``w`` alone. A leaf is added in the order of K, 16 columns at a time.

    Args:
        a: one tensor per rank, in rank order: [..., K]. Shapes may differ in K only.
        w: one tensor per rank: [N, K], as torch.nn.Linear stores it.
        bias: [N], equal on all ranks. None: no bias.
        partition: "split_m" cuts the rows of ``a``, and "split_n" the rows of ``w``. The others make one partition.
        num_partitions: how many partitions "split_m" and "split_n" make. None: at most 4.
        codec: the format on the wire, or its name. None: the elements themselves.
        seed: the 64-bit seed of stochastic rounding.
        call: how many calls came before. Stochastic rounding draws other random numbers in each call.
        epilogue: elementwise work on the sum and the bias before they are rounded: an Epilogue, an expression, or a
            function without arguments. Not with a codec.
        tp_invariant: whether leaves are added as a tree: bf16, fp16 or fp32, without a codec.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, one tensor per rank: of rows [..., 1], or one number; of
            blocks [..., ceil(K / 128)]. Each product is then that of :func:`scaled_linear`. None: no scales.
        w_scale: fp32 scales of ``w``, one tensor per rank: of rows [N, 1], [1, N], or one number; of blocks
            [ceil(N / 128), ceil(K / 128)].
        out_dtype: with scales, the dtype of products and result, torch.bfloat16 or torch.float16. None: torch.bfloat16.

    Returns:
        A new tensor [..., N] with the dtype of ``a``, or with ``out_dtype``.

    Raises:
        TypeError, ValueError: operands and scales do not fit together: see :func:`scaled_linear`.
        ValueError: ``tp_invariant`` with 3, 5, 6 or 7 ranks, with columns of unequal number, with K over all ranks
            that is no multiple of 8, with scales, or with a codec.
    """
    products, order, dtype = _products(a, w, tp_invariant, codec, a_scale, w_scale, out_dtype)
    m, n = products[0].shape
    if epilogue is not None:
        parts = [product.view(*a[0].shape[:-1], n) for product in products]
        return allreduce(parts, _after_bias(epilogue, bias, parts[0]), order, dtype)
    out, sum_dtype = products[0].new_empty(m, n, dtype=dtype), dtype if bias is None else None
    for at, panel in enumerate(partitions.panels("reference", partition, num_partitions, [m], n)):
        place = (*panel.rows, panel.columns)
        parts = [widened(product[place], bias) for product in products]
        total = (
            quantized_allreduce(parts, codec, seed, call + at)
            if codec
            else allreduce(parts, order=order, out_dtype=sum_dtype)
        )
        out[place] = total if bias is None else with_bias(total, bias[panel.columns], dtype)
    return out.view(*a[0].shape[:-1], n)


def fused_matmul_allreduce_residual_rmsnorm(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    tp_invariant: bool = False,
    a_scale: Sequence[torch.Tensor] | None = None,
    w_scale: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what every rank receives: (normed, residual_out) of :func:`allreduce_residual_rmsnorm` of the products.

    Each product ``a[r] @ w[r].T`` is rounded to the dtype of ``residual`` before it is summed. Both results are
    [..., N], with that dtype.
    With ``tp_invariant`` the residual is added to the fp32 sum of :func:`fused_matmul_allreduce`, before the only
    rounding of ``residual_out``.

    Args:
        a: one tensor per rank, in rank order: [..., K]. Shapes may differ in K only.
        w: one tensor per rank: [N, K], as torch.nn.Linear stores it.
        residual: [..., N], with the dtype of ``a``; with scales bf16 or fp16.
        weight: [N], with the dtype of ``residual``.
        eps: added to the mean square.
        weight_offset: added to the weight.
        tp_invariant: whether leaves are added as a tree, as in :func:`fused_matmul_allreduce`. Not with scales.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, one tensor per rank: of rows [..., 1], or one number; of
            blocks [..., ceil(K / 128)]. Each product is then that of :func:`scaled_linear`. None: no scales.
        w_scale: fp32 scales of ``w``, one tensor per rank: of rows [N, 1], [1, N], or one number; of blocks
            [ceil(N / 128), ceil(K / 128)].
    """
    if tp_invariant:
        products, order, _ = _products(a, w, tp_invariant, a_scale=a_scale, w_scale=w_scale)
        total = allreduce(products, order=order).view(residual.shape)
    else:
        total = fused_matmul_allreduce(a, w, a_scale=a_scale, w_scale=w_scale, out_dtype=residual.dtype)
    normed, summed = norms.specification(total, residual, weight, eps, weight_offset)
    return normed, summed


def fused_allgather_matmul(
    a: Sequence[torch.Tensor],
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: object = None,
    tp_invariant: bool = False,
    a_scale: Sequence[torch.Tensor] | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns what a rank with the weight ``w`` receives: ``allgather(a) @ w.T``, plus the bias.

    With ``tp_invariant`` products are added in fp32 in the order of K, 16 columns at a time. Each element then depends
    on its row of ``a`` and its row of ``w`` alone, however ranks divide rows and features.

    Args:
        a: one tensor per rank, in rank order: [M_r, ..., K]. Shapes may differ in M_r only.
        w: the rank's [N, K], as torch.nn.Linear stores it.
        bias: the rank's [N], added before the product is rounded. None: no bias.
        epilogue: elementwise work on the fp32 product and the bias before they are rounded: an Epilogue with the rank's
            tensors, an expression, or a function without arguments.
        tp_invariant: whether products are added in the order of K. Not with scales.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, one tensor per rank: of rows [M_r, ..., 1], or one number;
            of blocks [M_r, ..., ceil(K / 128)]. The product is then that of :func:`scaled_linear`. None: no scales.
        w_scale: the rank's fp32 scales of ``w``: of rows [N, 1], [1, N], or one number; of blocks
            [ceil(N / 128), ceil(K / 128)].
        out_dtype: with scales, the dtype of the result, torch.bfloat16 or torch.float16. None: torch.bfloat16.

    Returns:
        A new, contiguous tensor [sum of M_r, ..., N] with the dtype of ``a``, or with ``out_dtype``.
    """
    whole = allgather(a)
    if a_scale is not None or w_scale is not None:
        of_a = torch.cat([rows_of_scale(*pair) for pair in zip(a, a_scale, strict=True)])
        return _of_scaled_rows(whole, w, of_a, w_scale, bias, epilogue, out_dtype or torch.bfloat16)
    if epilogue is None:
        return linear(whole, w, bias, tp_invariant)
    like = whole.new_empty((*whole.shape[:-1], len(w)))
    return linear_with_epilogue(whole, w, *_bound(epilogue, bias, like), tp_invariant)


def _of_scaled_rows(
    whole: torch.Tensor,
    w: torch.Tensor,
    a_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: object,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows, like = _flat(whole), whole.new_empty((*whole.shape[:-1], len(w)), dtype=dtype)
    if epilogue is None:
        return scaled_linear(rows, w, a_scale, w_scale, bias, dtype).view_as(like)
    product = scaled_linear(rows, w, a_scale, w_scale, out_dtype=torch.float32)
    return rounded_after(*_bound(epilogue, bias, like), product.view_as(like), dtype)


def _bound(epilogue: object, bias: torch.Tensor | None, like: torch.Tensor) -> tuple[Pointwise, EpilogueInputs]:
    wanted = _after_bias(epilogue, bias, like)
    return bind("fused_allgather_matmul", wanted.text(like), like, *wanted.arguments())


def fused_matmul_reducescatter(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    partition: Partition = "none",
    num_partitions: int | None = None,
    codec: Codec | CodecName | None = None,
    seed: int = 0,
    call: int = 0,
    epilogue: object = None,
    tp_invariant: bool = False,
    a_scale: Sequence[torch.Tensor] | None = None,
    w_scale: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Returns what each rank receives: its part of the sum of ``a[r] @ w[r].T`` over all ranks r, plus the bias.

    The sum is split along the first dimension as torch.tensor_split does. Each product is rounded to its dtype before
    it is summed. The bias is added once, before the sum is rounded. Without a codec the result has the bits of
    :func:`fused_matmul_allreduce`. A codec rounds the products as :func:`quantized_reducescatter` does, and
    encodes each partition separately, in order.

    Args:
        a: one tensor per rank, in rank order: [..., K], of at least two dimensions. Shapes may differ in K only.
        w: one tensor per rank: [N, K], as torch.nn.Linear stores it.
        bias: [N], equal on all ranks. None: no bias.
        partition: "split_m" cuts the rows of ``a``, and "split_n" the rows of ``w``. The others make one partition.
        num_partitions: how many partitions "split_m" and "split_n" make. None: at most 4.
        codec: the format on the wire, or its name. None: the elements themselves.
        seed: the 64-bit seed of stochastic rounding.
        call: how many calls came before. Stochastic rounding draws other random numbers in each call.
        epilogue: elementwise work on each part of the sum and the bias before they are rounded: an Epilogue, whose
            tensors are lists with one per rank, an expression, or a function without arguments. Not with a codec.
        tp_invariant: whether leaves are added as a tree, as in :func:`fused_matmul_allreduce`.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, one tensor per rank: of rows [..., 1], or one number; of
            blocks [..., ceil(K / 128)]. Each product is then that of :func:`scaled_linear`. None: no scales.
        w_scale: fp32 scales of ``w``, one tensor per rank: of rows [N, 1], [1, N], or one number; of blocks
            [ceil(N / 128), ceil(K / 128)].
        out_dtype: with scales, the dtype of products and result, torch.bfloat16 or torch.float16. None: torch.bfloat16.

    Returns:
        A new, contiguous tensor per rank, in rank order: [rows of its part, ..., N] with the dtype of ``a``, or with
        ``out_dtype``.
    """
    products, order, dtype = _products(a, w, tp_invariant, codec, a_scale, w_scale, out_dtype)
    beside = a[0].shape[1:-1]
    if epilogue is not None:
        return _parts_with_epilogue(products, a[0].shape[:-1], order, dtype, as_epilogue(epilogue), bias)
    lengths = [len(part) for part in torch.empty(len(a[0]), device="meta").tensor_split(len(a))]
    sizes = [rows * beside.numel() for rows in lengths]
    n, sum_dtype = products[0].shape[1], dtype if bias is None else None
    received = [products[0].new_empty(rows, n, dtype=dtype) for rows in sizes]
    for at, panel in enumerate(partitions.panels("reference", partition, num_partitions, sizes, n)):
        parts = [torch.cat([product[rows, panel.columns] for rows in panel.rows]) for product in products]
        parts, rows = [widened(part, bias) for part in parts], [partitions.length(one) for one in panel.rows]
        shares = (
            quantized_reducescatter(parts, codec, seed, call + at, sizes=rows)
            if codec
            else [share.contiguous() for share in allreduce(parts, order=order, out_dtype=sum_dtype).split(rows)]
        )
        for rank, share in enumerate(shares):
            begin = panel.rows[rank].start - sum(sizes[:rank])
            total = share if bias is None else with_bias(share, bias[panel.columns], dtype)
            received[rank][begin : begin + len(share), panel.columns] = total
    return [one.view(rows, *beside, n) for one, rows in zip(received, lengths, strict=True)]


def _parts_with_epilogue(
    products: Sequence[torch.Tensor],
    rows: torch.Size,
    order: Order,
    dtype: torch.dtype,
    epilogue: Epilogue,
    bias: torch.Tensor | None,
) -> list[torch.Tensor]:
    of_ranks = zip(*(one.view(*rows, one.shape[1]).tensor_split(len(products)) for one in products), strict=True)
    return [
        allreduce(parts, _after_bias(epilogue.of_rank(rank), bias, parts[0]), order, dtype)
        for rank, parts in enumerate(of_ranks)
    ]


def fused_matmul_reducescatter_residual_rmsnorm(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    tp_invariant: bool = False,
    a_scale: Sequence[torch.Tensor] | None = None,
    w_scale: Sequence[torch.Tensor] | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns what each rank receives: the results of :func:`reducescatter_residual_rmsnorm` of the products.

    Each product ``a[r] @ w[r].T`` is rounded to the dtype of the residuals before it is summed. With ``tp_invariant``
    each rank receives its rows of :func:`fused_matmul_allreduce_residual_rmsnorm`.

    Args:
        a: one tensor per rank, in rank order: [M, ..., K]. Shapes may differ in K only.
        w: one tensor per rank: [N, K], as torch.nn.Linear stores it.
        residuals: each rank's rows of the residual, in rank order: [M_r, ..., N], with the dtype of ``a``; with scales
            bf16 or fp16.
        weight: [N], with the dtype of the residuals.
        eps: added to the mean square.
        weight_offset: added to the weight.
        tp_invariant: whether leaves are added as a tree. Not with scales.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, one tensor per rank: of rows [..., 1], or one number; of
            blocks [..., ceil(K / 128)]. Each product is then that of :func:`scaled_linear`. None: no scales.
        w_scale: fp32 scales of ``w``, one tensor per rank: of rows [N, 1], [1, N], or one number; of blocks
            [ceil(N / 128), ceil(K / 128)].
    """
    if tp_invariant:
        products, order, _ = _products(a, w, tp_invariant, a_scale=a_scale, w_scale=w_scale)
        sums = reducescatter([one.view(*a[0].shape[:-1], len(w[0])) for one in products], order=order)
    else:
        scaled = {"a_scale": a_scale, "w_scale": w_scale, "out_dtype": residuals[0].dtype}
        sums = fused_matmul_reducescatter(a, w, **scaled)
    pairs = (norms.specification(*pair, weight, eps, weight_offset) for pair in zip(sums, residuals, strict=True))
    return [(normed, summed) for normed, summed in pairs]


def _products(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    tp_invariant: bool,
    codec: object = None,
    a_scale: Sequence[torch.Tensor] | None = None,
    w_scale: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[list[torch.Tensor], Order, torch.dtype]:
    """Returns each rank's product [rows, N], the order in which they are added, and the dtype of the result.

    Products are partials of a tree, or rounded.
    """
    if a_scale is not None or w_scale is not None:
        if tp_invariant:
            raise ValueError("reference: takes scales or tp_invariant, not both")
        return rank_products(a, w, a_scale, w_scale, out_dtype), "rank", out_dtype or torch.bfloat16
    dtype, a = a[0].dtype, [_flat(one) for one in a]
    if not tp_invariant:
        return [matmul(*pair) for pair in zip(a, w, strict=True)], "rank", dtype
    if codec is not None:
        raise ValueError("reference: takes a codec or tp_invariant, not both")
    leaf_tree.check_operands("reference", a)
    return [leaf_tree.partial(*pair, len(a)) for pair in zip(a, w, strict=True)], "tree", dtype


def _flat(a: torch.Tensor) -> torch.Tensor:
    return a.reshape(a.shape[:-1].numel(), a.shape[-1])


def _after_bias(epilogue: object, bias: torch.Tensor | None, x: torch.Tensor) -> Epilogue:
    return as_epilogue(epilogue) if bias is None else as_epilogue(epilogue).after_bias(bias, x)


def widened(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns the product that is summed: with a bias in its accumulation dtype, so that the sum is not rounded."""
    return product if bias is None else product.to(ACCUMULATION_DTYPES[product.dtype])
