"""The specification of fused matmuls in plain torch: sums of the ranks' products, and products of gathered rows.

An op has three steps, and each function here is made of them: the products of the ranks (:func:`_products`), their sum
(:func:`_summed`), and what follows it before the only rounding of the result: a bias, an epilogue or a norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics import leaf_tree, norms, partitions
from graphar.numerics.codecs import Codec, CodecName
from graphar.numerics.dtypes import ACCUMULATION_DTYPES, with_canonical_nan
from graphar.numerics.epilogues.epilogue import Epilogue, EpilogueInputs, Pointwise, as_epilogue, bind
from graphar.numerics.fp8_products import rows_of_scale, scaled_linear
from graphar.numerics.partitions import Partition
from graphar.reference.sums import (
    Order,
    allgather,
    allreduce,
    quantized_allreduce,
    quantized_reducescatter,
    reducescatter,
)


def linear(
    a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, tp_invariant: bool = False
) -> torch.Tensor:
    """Returns ``a @ w.T + bias``, computed in fp32 (float64 for float64) and rounded once to the dtype of ``a``.

    With ``tp_invariant`` the products are added in the order of K, 16 columns at a time.
    """
    return with_bias(unrounded_product(a, w, tp_invariant), bias, a.dtype)


def unrounded_product(a: torch.Tensor, w: torch.Tensor, tp_invariant: bool = False) -> torch.Tensor:
    """Returns the ``a @ w.T`` of :func:`linear` before it is rounded."""
    if tp_invariant:
        return leaf_tree.product(flat(a), w).view(*a.shape[:-1], len(w))
    kind = ACCUMULATION_DTYPES[a.dtype]
    with torch.autocast(a.device.type, enabled=False):  # it would multiply in bf16
        return a.to(kind) @ w.to(kind).t()


def with_bias(total: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Returns ``total + bias`` rounded to ``dtype``, for a sum that has not been rounded yet."""
    return with_canonical_nan((total if bias is None else total + bias.to(total.dtype)).to(dtype))


def rounded_after(form: Pointwise, inputs: EpilogueInputs, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the values of an epilogue for the fp32 tensor ``v``, rounded to ``dtype``."""
    return with_canonical_nan(form.apply_whole(v, inputs).to(dtype))


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

        product[r] = round(a[r] @ w[r].T)
        result     = round((product[0] + product[1] + ...) + bias)

    Additions are in fp32, in rank order. Both roundings are to the dtype of the result.

    With ``codec`` :func:`quantized_allreduce` computes the sum, for each partition on its own, in their order. The
    partition changes no bit without a codec.

    With ``tp_invariant`` the result has the same bits for 1, 2, 4 and 8 ranks. K over all ranks is cut into 8 leaves of
    equal length. The products of a leaf are added in the order of K, 16 columns at a time, and the leaves as a tree:

        result = round((((leaf[0] + leaf[1]) + (leaf[2] + leaf[3])) + ((leaf[4] + leaf[5]) + ...)) + bias)

    Nothing else is rounded. Each rank has 8 / N adjacent leaves, so its partial sum is a node of that tree, whatever
    the number N of ranks. Each element depends on its row of ``a`` and its row of ``w`` alone.

    Args:
        a: one tensor per rank, in rank order: [..., K]. Shapes may differ in K only.
        w: one tensor per rank: [N, K], as torch.nn.Linear stores it.
        bias: [N], equal on all ranks. None: no bias.
        partition: "split_m" cuts the rows of ``a``, "split_n" the rows of ``w``. All others make one partition.
        num_partitions: how many partitions "split_m" and "split_n" make. None: at most 4.
        codec: the format on the wire, or its name. None: no codec.
        seed: the 64-bit seed of stochastic rounding.
        call: how many calls came before. Stochastic rounding draws other random numbers in each call.
        epilogue: elementwise work on ``sum + bias`` in fp32, before the rounding: an Epilogue, an expression, or a
            function without arguments. Not with a codec.
        tp_invariant: whether leaves are added as a tree: bf16, fp16 or fp32, without a codec.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, one tensor per rank: of rows [..., 1], or one number; of
            blocks [..., ceil(K / 128)]. :func:`scaled_linear` then computes each product. None: no scales.
        w_scale: fp32 scales of ``w``, one tensor per rank: of rows [N, 1], [1, N], or one number; of blocks
            [ceil(N / 128), ceil(K / 128)].
        out_dtype: with scales, the dtype of products and result, torch.bfloat16 or torch.float16. None: torch.bfloat16.

    Returns:
        A new tensor [..., N] with the dtype of ``a``, or with ``out_dtype``.

    Raises:
        TypeError, ValueError: operands and scales do not fit together: see :func:`scaled_linear`.
        ValueError: ``tp_invariant`` with 3, 5, 6 or 7 ranks, with a K that differs between ranks, with K over all ranks
            that is no multiple of 8, with scales, or with a codec.
    """
    products, order, dtype = _products(a, w, tp_invariant, codec, a_scale, w_scale, out_dtype)
    panels = partitions.panels("reference", partition, num_partitions, [a[0].shape[:-1].numel()], len(w[0]))
    if not codec:
        return _summed(products, bias, epilogue, order, dtype)
    matrices, out = list(map(flat, products)), torch.empty_like(products[0])
    for at, panel in enumerate(panels):
        place = (*panel.rows, panel.columns)
        total = quantized_allreduce([widened(product[place], bias) for product in matrices], codec, seed, call + at)
        flat(out)[place] = total if bias is None else with_bias(total, bias[panel.columns], dtype)
    return out


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
) -> tuple[torch.Tensor, ...]:
    """Returns what every rank receives: (normed, residual_out) of :func:`allreduce_residual_rmsnorm` of the products.

        product[r]   = round(a[r] @ w[r].T)
        residual_out = round(round(product[0] + product[1] + ...) + residual)

    With ``tp_invariant`` there is one rounding. ``tree`` is the sum of the leaves in :func:`fused_matmul_allreduce`:

        residual_out = round(tree + residual)

    All roundings are to the dtype of ``residual``. Both results are [..., N], with that dtype.

    Args:
        a: one tensor per rank, in rank order: [..., K]. Shapes may differ in K only.
        w: one tensor per rank: [N, K], as torch.nn.Linear stores it.
        residual: [..., N], with the dtype of ``a``; with scales bf16 or fp16.
        weight: [N], with the dtype of ``residual``.
        eps: added to the mean square.
        weight_offset: added to the weight.
        tp_invariant: whether leaves are added as a tree, as in :func:`fused_matmul_allreduce`. Not with scales.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, one tensor per rank: of rows [..., 1], or one number; of
            blocks [..., ceil(K / 128)]. :func:`scaled_linear` then computes each product. None: no scales.
        w_scale: fp32 scales of ``w``, one tensor per rank: of rows [N, 1], [1, N], or one number; of blocks
            [ceil(N / 128), ceil(K / 128)].
    """
    products, order, _ = _products(a, w, tp_invariant, None, a_scale, w_scale, residual.dtype)
    return norms.specification(allreduce(products, order=order), residual, weight, eps, weight_offset)


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
    """Returns what a rank with the weight ``w`` receives: ``allgather(a) @ w.T + bias``, in fp32 and rounded once.

    With ``tp_invariant`` products are added in the order of K, 16 columns at a time. Each element then depends on its
    row of ``a`` and its row of ``w`` alone, however rows and features are divided between ranks.

    Args:
        a: one tensor per rank, in rank order: [M_r, ..., K]. Shapes may differ in M_r only.
        w: the rank's [N, K], as torch.nn.Linear stores it.
        bias: the rank's [N], added before the product is rounded. None: no bias.
        epilogue: elementwise work on ``product + bias`` in fp32, before the rounding: an Epilogue with the rank's
            tensors, an expression, or a function without arguments.
        tp_invariant: whether products are added in the order of K. Not with scales.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, one tensor per rank: of rows [M_r, ..., 1], or one number;
            of blocks [M_r, ..., ceil(K / 128)]. :func:`scaled_linear` then computes the product. None: no scales.
        w_scale: the rank's fp32 scales of ``w``: of rows [N, 1], [1, N], or one number; of blocks
            [ceil(N / 128), ceil(K / 128)].
        out_dtype: with scales, the dtype of the result, torch.bfloat16 or torch.float16. None: torch.bfloat16.

    Returns:
        A new, contiguous tensor [sum of M_r, ..., N] with the dtype of ``a``, or with ``out_dtype``.
    """
    whole = allgather(a)
    if a_scale is not None or w_scale is not None:
        dtype, of_a = out_dtype or torch.bfloat16, [rows_of_scale(*pair) for pair in zip(a, a_scale or (), strict=True)]
        product = scaled_linear(flat(whole), w, torch.cat(of_a), w_scale, out_dtype=torch.float32)
        product = product.view(*whole.shape[:-1], len(w))
    else:
        dtype, product = whole.dtype, unrounded_product(whole, w, tp_invariant)
    if epilogue is None:
        return with_bias(product, bias, dtype)
    like = product.new_empty(product.shape, dtype=dtype)
    wanted = _after_bias(epilogue, bias, like)
    form, inputs = bind("fused_allgather_matmul", wanted.text(like), like, *wanted.arguments())
    return rounded_after(form, inputs, product, dtype)


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
    """Returns what each rank receives: its rows of the sum of ``a[r] @ w[r].T`` over all ranks r, plus the bias.

    The result of :func:`fused_matmul_allreduce` is split along the first dimension as torch.tensor_split does.
    With ``codec`` :func:`quantized_reducescatter` computes the sum, for each partition on its own, in their order.

    Args:
        a: one tensor per rank, in rank order: [..., K], of at least two dimensions. Shapes may differ in K only.
        w: one tensor per rank: [N, K], as torch.nn.Linear stores it.
        bias: [N], equal on all ranks. None: no bias.
        partition: "split_m" cuts the rows of ``a``, "split_n" the rows of ``w``. All others make one partition.
        num_partitions: how many partitions "split_m" and "split_n" make. None: at most 4.
        codec: the format on the wire, or its name. None: the elements themselves.
        seed: the 64-bit seed of stochastic rounding.
        call: how many calls came before. Stochastic rounding draws other random numbers in each call.
        epilogue: elementwise work on ``sum + bias`` of each part in fp32, before the rounding: an Epilogue whose
            tensors are lists with one per rank, an expression, or a function without arguments. Not with a codec.
        tp_invariant: whether leaves are added as a tree, as in :func:`fused_matmul_allreduce`.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, one tensor per rank: of rows [..., 1], or one number; of
            blocks [..., ceil(K / 128)]. :func:`scaled_linear` then computes each product. None: no scales.
        w_scale: fp32 scales of ``w``, one tensor per rank: of rows [N, 1], [1, N], or one number; of blocks
            [ceil(N / 128), ceil(K / 128)].
        out_dtype: with scales, the dtype of products and result, torch.bfloat16 or torch.float16. None: torch.bfloat16.

    Returns:
        A new, contiguous tensor per rank, in rank order: [rows of its part, ..., N] with the dtype of ``a``, or with
        ``out_dtype``.
    """
    products, order, dtype = _products(a, w, tp_invariant, codec, a_scale, w_scale, out_dtype)
    lengths = partitions.split(len(a[0]), len(a))
    sizes = [rows * a[0].shape[1:-1].numel() for rows in lengths]
    panels = partitions.panels("reference", partition, num_partitions, sizes, len(w[0]))
    if not codec:
        of_ranks = zip(*(product.split(lengths) for product in products), strict=True)
        whole = None if epilogue is None else as_epilogue(epilogue)
        return [_summed(own, bias, whole and whole.of_rank(rank), order, dtype) for rank, own in enumerate(of_ranks)]
    matrices, out = list(map(flat, products)), torch.empty_like(products[0])
    for at, panel in enumerate(panels):
        parts = [torch.cat([product[rows, panel.columns] for rows in panel.rows]) for product in matrices]
        rows = list(map(partitions.length, panel.rows))
        shares = quantized_reducescatter([widened(part, bias) for part in parts], codec, seed, call + at, sizes=rows)
        for of_rank, share in zip(panel.rows, shares, strict=True):
            flat(out)[of_rank, panel.columns] = share if bias is None else with_bias(share, bias[panel.columns], dtype)
    return [part.clone() for part in out.split(lengths)]


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
) -> list[tuple[torch.Tensor, ...]]:
    """Returns what each rank receives: its rows of the results of :func:`fused_matmul_allreduce_residual_rmsnorm`.

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
            blocks [..., ceil(K / 128)]. :func:`scaled_linear` then computes each product. None: no scales.
        w_scale: fp32 scales of ``w``, one tensor per rank: of rows [N, 1], [1, N], or one number; of blocks
            [ceil(N / 128), ceil(K / 128)].
    """
    products, order, _ = _products(a, w, tp_invariant, None, a_scale, w_scale, residuals[0].dtype)
    sums = reducescatter(products, order=order)
    return [norms.specification(*pair, weight, eps, weight_offset) for pair in zip(sums, residuals, strict=True)]


def _products(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    tp_invariant: bool,
    codec: object,
    a_scale: Sequence[torch.Tensor] | None,
    w_scale: Sequence[torch.Tensor] | None,
    out_dtype: torch.dtype | None,
) -> tuple[list[torch.Tensor], Order, torch.dtype]:
    """Returns each rank's product [..., N], the order in which they are added, and the dtype of the result.

    The products are rounded, or with ``tp_invariant`` fp32 nodes of the tree of leaves.
    """
    matrices, order, dtype = list(map(flat, a)), "rank", a[0].dtype
    if a_scale is not None or w_scale is not None:
        if tp_invariant:
            raise ValueError("reference: takes scales or tp_invariant, not both")
        dtype, of_a = out_dtype or torch.bfloat16, [rows_of_scale(*pair) for pair in zip(a, a_scale or (), strict=True)]
        operands = zip(matrices, w, of_a, w_scale or (), strict=True)
        products = [scaled_linear(*of_rank, out_dtype=dtype) for of_rank in operands]
    elif not tp_invariant:
        products = list(map(linear, matrices, w))
    else:
        if codec is not None:
            raise ValueError("reference: takes a codec or tp_invariant, not both")
        leaf_tree.check_operands("reference", matrices)
        leaves, order = leaf_tree.LEAVES // len(a), "tree"
        products = [leaf_tree.in_leaves(*pair, leaves) for pair in zip(matrices, w, strict=True)]
    return [product.view(*a[0].shape[:-1], len(w[0])) for product in products], order, dtype


def _summed(
    products: Sequence[torch.Tensor], bias: torch.Tensor | None, epilogue: object, order: Order, dtype: torch.dtype
) -> torch.Tensor:
    """Returns the sum of the ranks' products, with the bias and the epilogue, rounded once."""
    if epilogue is not None:
        return allreduce(products, _after_bias(epilogue, bias, products[0]), order, dtype)
    return with_bias(allreduce([widened(product, bias) for product in products], order=order), bias, dtype)


def flat(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as a matrix whose rows are its last dimension."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _after_bias(epilogue: object, bias: torch.Tensor | None, x: torch.Tensor) -> Epilogue:
    return as_epilogue(epilogue) if bias is None else as_epilogue(epilogue).after_bias(bias, x)


def widened(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns the product as it is summed: before a bias in fp32 (or float64), so that the sum is not rounded yet."""
    return product if bias is None else product.to(ACCUMULATION_DTYPES[product.dtype])
