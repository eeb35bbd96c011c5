"""The specification of every op in plain torch, which runs on the CPU too. Written to be read, not to be fast."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from graphar.numerics import leaf_tree, norms, partitions
from graphar.numerics.codec_reference import SUM, Noise, encode, part_of_wires, sum_of_wires
from graphar.numerics.codec_reference import error_of_wire as error_of_wire
from graphar.numerics.codecs import TILE_NUMEL, Codec, as_codec
from graphar.numerics.dtypes import ACCUMULATION_DTYPES
from graphar.numerics.epilogues.epilogue import Epilogue, EpilogueInputs, Pointwise, as_epilogue, bind
from graphar.numerics.fp8_products import rank_products
from graphar.numerics.fp8_products import scaled_linear as scaled_linear
from graphar.numerics.nan import with_canonical_nan


def allreduce(
    parts: Sequence[torch.Tensor],
    epilogue: object = None,
    order: str = "rank",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the sum that every rank receives: ``parts[0] + parts[1] + ...``, added in rank order and rounded once.

    The sum of bf16, fp16 and fp32 is accumulated in fp32. Integers wrap. ``order="tree"`` adds fp32 partials of 1, 2, 4
    or 8 ranks as a binary tree: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). The sum has the same bits for each number of
    ranks if the partials are nodes of one tree of 8 leaves.

    Args:
        parts: one tensor per rank, in rank order; equal shapes and dtypes.
        epilogue: elementwise work on the sum before it is rounded: a :class:`graphar.Epilogue`, an expression or a
            function, as graphar.allreduce takes it for one tensor. None: no epilogue.
        order: "rank", or "tree" for fp32.
        out_dtype: the dtype of the result. None: the dtype of a part.

    Returns:
        A new tensor with the shape of a part. Every NaN is the canonical one: all bits set but the sign. A single part
        without an epilogue or another dtype is copied bit for bit.

    Raises:
        ValueError: the order is unknown, or "tree" with another dtype or number of ranks.
    """
    first, dtype = parts[0], out_dtype or parts[0].dtype
    total = _sum(parts, order)
    if epilogue is not None:
        wanted = as_epilogue(epilogue)
        form, inputs = bind("allreduce", wanted.text(first), first, *wanted.arguments())
        total = form.apply(total.reshape(-1), inputs, 0, first.numel()).view(first.shape)
    elif len(parts) == 1 and dtype == first.dtype:
        return first.clone()
    return with_canonical_nan(total.to(dtype))


def sum_with_epilogue(
    parts: Sequence[torch.Tensor],
    form: Pointwise,
    inputs: EpilogueInputs,
    first: int,
    numel: int,
    order: str = "rank",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the sum of one flat chunk of every rank's tensor, with an epilogue applied before rounding.

    The chunk begins at element ``first`` of a tensor of ``numel`` elements. ``order`` and ``out_dtype`` are those of
    :func:`allreduce`.
    """
    total = form.apply(_sum(parts, order), inputs, first, numel)
    return with_canonical_nan(total.to(out_dtype or parts[0].dtype))


def _sum(parts: Sequence[torch.Tensor], order: str = "rank") -> torch.Tensor:
    if order not in ("rank", "tree"):
        raise ValueError(f"reference: order must be 'rank' or 'tree', got {order!r}")
    if order == "tree":
        if parts[0].dtype != torch.float32:
            raise ValueError(f"reference: order='tree' adds partials in float32, got {parts[0].dtype}")
        leaf_tree.check_ranks("reference", len(parts))
        return leaf_tree.tree_sum(parts)
    total = parts[0].to(ACCUMULATION_DTYPES[parts[0].dtype])
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total


def hierarchical_allreduce(
    parts: Sequence[torch.Tensor], hosts: Sequence[Sequence[int]], codec: Codec | str | None = None
) -> torch.Tensor:
    """Returns the sum that every rank receives from the algorithm "hierarchical".

    The tensors of each host's ranks are added in rank order. The hosts' sums are then added in the order of ``hosts``.
    Both steps accumulate in fp32 (float64 in float64, integers in their dtype), and the result is rounded once. Every
    rank and every call gives the same bits. For floating point they can differ from the bits of :func:`allreduce`.

    Args:
        parts: one tensor per rank, in rank order; equal shapes and dtypes.
        hosts: the ranks of each host.
        codec: the format on the wire across hosts, or its name. It rounds the hosts' fp32 sums to nearest, as
            :func:`quantized_allreduce` does. None: the sums travel in fp32.

    Returns:
        A new tensor with the shape and dtype of a part. Every NaN is the canonical one. A single part is copied.
    """
    if len(parts) == 1:
        return parts[0].clone()
    sums = [_sum([parts[rank] for rank in sorted(ranks)]) for ranks in hosts]
    total = quantized_allreduce(sums, codec) if codec else _sum(sums)
    return with_canonical_nan(total.to(parts[0].dtype))


def reducescatter(
    parts: Sequence[torch.Tensor],
    axis: int = 0,
    epilogue: object = None,
    order: str = "rank",
    out_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Returns what each rank receives: its part of the sum, split along ``axis`` as torch.tensor_split does.

    Args:
        parts: one tensor per rank, in rank order; equal shapes of at least one dimension, and equal dtypes.
        axis: the dimension that is split. Lengths differ by at most one, and earlier ranks have the longer parts.
        epilogue: elementwise work on each part of the sum before it is rounded, as graphar.reducescatter takes it for a
            list: a :class:`graphar.Epilogue`, an expression or a function. A tensor that is not in a list serves all
            ranks. None: no epilogue.
        order: "rank", or "tree" for fp32 partials of 1, 2, 4 or 8 ranks, as in :func:`allreduce`.
        out_dtype: the dtype of the results. None: the dtype of a part.

    Returns:
        A new, contiguous tensor per rank, in rank order, with the bits of :func:`allreduce`.
    """
    if epilogue is not None:
        of_ranks = zip(*(part.tensor_split(len(parts), axis) for part in parts), strict=True)
        owned = [as_epilogue(epilogue).of_rank(rank) for rank in range(len(parts))]
        return [allreduce(summands, own, order, out_dtype) for summands, own in zip(of_ranks, owned, strict=True)]
    total = allreduce(parts, order=order, out_dtype=out_dtype)
    return [part.contiguous() for part in total.tensor_split(len(parts), axis)]


def allgather(parts: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
    """Returns what every rank receives: all ranks' tensors concatenated along ``axis`` in rank order, bit for bit.

    Args:
        parts: one tensor per rank, in rank order; any one dtype. Shapes may differ along ``axis`` only.
        axis: the dimension along which the tensors are concatenated.
    """
    return torch.cat(list(parts), axis)


def quantized_allreduce(
    parts: Sequence[torch.Tensor], codec: Codec | str, seed: int = 0, call: int = 0
) -> torch.Tensor:
    """Returns the sum that every rank receives with a codec on the wire.

    The codec rounds each part once, and the sum of the rounded parts once more. The result depends on the parts, their
    order and the codec alone; with stochastic rounding also on ``seed`` and ``call``.

    Args:
        parts: one tensor per rank, in rank order; equal shapes and dtypes: bfloat16, float16 or float32.
        codec: the format of both roundings, or its name.
        seed: the 64-bit seed of stochastic rounding.
        call: how many calls came before. Stochastic rounding draws other random numbers in each call.

    Returns:
        A new tensor with the shape and dtype of a part. Every NaN is the canonical one. A single part is copied.
    """
    codec = as_codec("reference.quantized_allreduce", codec)
    if len(parts) == 1 or not parts[0].numel():
        return parts[0].clone()
    wires = [encode(part.reshape(-1), codec, Noise(seed, call, rank)) for rank, part in enumerate(parts)]
    return sum_of_wires(wires, codec, Noise(seed, call, SUM), parts[0])


def quantized_reducescatter(
    parts: Sequence[torch.Tensor],
    codec: Codec | str,
    seed: int = 0,
    call: int = 0,
    axis: int = 0,
    sizes: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """Returns what each rank receives with a codec on the wire: its part of the sum.

    The codec rounds each summand once. The sum is rounded to the dtype, and not encoded again. Each rank sends each
    other rank one message, with ``axis`` moved to the front. A message's first bucket begins at its first element, so
    no bucket spans two parts. The random numbers of stochastic rounding are drawn by tile; the tile index continues
    from one part to the next, in rank order.

    Args:
        parts: one tensor per rank, in rank order; equal shapes of at least one dimension, and equal dtypes: bfloat16,
            float16 or float32.
        codec: the format on the wire, or its name.
        seed: the 64-bit seed of stochastic rounding.
        call: how many calls came before. Stochastic rounding draws other random numbers in each call.
        axis: the dimension that is split.
        sizes: the length of each rank's part along ``axis``. None: the lengths of torch.tensor_split.

    Returns:
        A new, contiguous tensor per rank, in rank order. Every NaN is the canonical one. A single part is copied.
    """
    codec = as_codec("reference.quantized_reducescatter", codec)
    at = list(accumulate(sizes))[:-1] if sizes else len(parts)
    messages = [part.movedim(axis, 0).tensor_split(at) for part in parts]  # [sender][receiver]
    if len(parts) == 1:
        return [messages[0][0].movedim(0, axis).clone(memory_format=torch.contiguous_format)]
    firsts = first_elements([message.numel() for message in messages[0]])
    received = []
    for owner, first in enumerate(firsts):
        sent = [message[owner] for message in messages]
        noises = [Noise(seed, call, rank, first) for rank in range(len(parts))]
        wires = [encode(one.reshape(-1), codec, noise) for one, noise in zip(sent, noises, strict=True)]
        received.append(part_of_wires(wires, codec, sent[0]).movedim(0, axis).contiguous())
    return received


def allreduce_residual_rmsnorm(
    parts: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    group_size: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns what graphar.allreduce_residual_rmsnorm gives on every rank: (normed, residual_out), or with scales.

    residual_out is the rounded sum over the ranks plus ``residual``, rounded. normed is
    (residual_out / sqrt(mean(residual_out**2) + eps)) * (weight + weight_offset) of each row, in fp32, rounded once.

    An FP8 element is (normed in fp32) * (1 / scale). Both steps are rounded to fp32, and the product to e4m3, to
    nearest with ties to even. Magnitudes beyond 448, infinities included, become 448 with their sign. A NaN is 0x7f.
    Without ``scale`` each row has its own scale: its largest magnitude / 448, and at least 2**-126, the smallest normal
    number. If the largest magnitude is infinite or NaN, the scale and all elements of the row are NaN. With
    ``group_size`` the same holds for each group of columns in place of the row.

    Args:
        parts: each rank's input [..., columns], of one shape and dtype, in rank order: bfloat16, float16 or float32.
        residual: a tensor with the shape and dtype of a part.
        weight: [columns], of the same dtype.
        eps: added to the mean square.
        weight_offset: added to the weight.
        out_dtype: the dtype of normed: torch.float8_e4m3fn. None: the dtype of the parts.
        scale: one fp32 number that serves all rows of an FP8 result. None: each row has its own scale.
        group_size: 128: each 128 columns of a row of an FP8 result have their own scale. None: they share the row's.

    Returns:
        (normed, residual_out). FP8 without ``scale`` gives (normed, residual_out, scales), with fp32 scales [..., 1],
        or [..., columns / 128] with ``group_size``.
    """
    columns = parts[0].shape[-1]
    output = norms.output_of(norms.ALLREDUCE_NORM, parts[0].dtype, columns, out_dtype, scale, group_size)
    return norms.specification(allreduce(parts), residual, weight, eps, weight_offset, output, scale)


def reducescatter_residual_rmsnorm(
    parts: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], weight: torch.Tensor, **options
) -> list[tuple[torch.Tensor, ...]]:
    """Returns what each rank receives: the results of :func:`allreduce_residual_rmsnorm` for its rows of the sum.

    Args:
        parts: each rank's input [M, ..., columns], of one shape and dtype, in rank order. The first dimension is split
            as torch.tensor_split does.
        residuals: each rank's rows of the residual, in rank order, with the dtype of a part.
        weight: [columns], of the same dtype.
        options: ``eps``, ``weight_offset``, ``out_dtype``, ``scale`` and ``group_size`` of
            :func:`allreduce_residual_rmsnorm`.

    Returns:
        A tuple per rank, in rank order.
    """
    of_ranks = zip(*(part.tensor_split(len(parts)) for part in parts), strict=True)
    return [
        allreduce_residual_rmsnorm(summands, residual, weight, **options)
        for summands, residual in zip(of_ranks, residuals, strict=True)
    ]


def matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Returns one rank's product ``a @ w.T``, accumulated in fp32 (float64 for float64) and rounded to its dtype."""
    return linear(a, w)


def linear(
    a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, tp_invariant: bool = False
) -> torch.Tensor:
    """Returns ``a @ w.T + bias``, accumulated in fp32 (float64 for float64) and rounded once to its dtype.

    With ``tp_invariant`` it is accumulated in the order of K, 16 columns at a time.
    """
    product = _unrounded_product(a, w, tp_invariant)
    return with_canonical_nan((product if bias is None else product + bias.to(product.dtype)).to(a.dtype))


def linear_with_epilogue(
    a: torch.Tensor, w: torch.Tensor, form: Pointwise, inputs: EpilogueInputs, tp_invariant: bool = False
) -> torch.Tensor:
    """Returns ``a @ w.T``, accumulated as :func:`linear` does, with an epilogue applied before rounding."""
    return rounded_after(form, inputs, _unrounded_product(a, w, tp_invariant), a.dtype)


def rounded_after(form: Pointwise, inputs: EpilogueInputs, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns an epilogue's values for all of the fp32 tensor ``v``, rounded to ``dtype``."""
    return with_canonical_nan(form.apply_whole(v, inputs).to(dtype))


def _unrounded_product(a: torch.Tensor, w: torch.Tensor, tp_invariant: bool) -> torch.Tensor:
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
    partition: str = "none",
    num_partitions: int | None = None,
    codec: Codec | str | None = None,
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
        a_scale: one tensor per rank, of e4m3 operands: its product is that of :func:`scaled_linear`. None: no scales.
        w_scale: likewise.
        out_dtype: with scales, the dtype of products and result: torch.bfloat16, as None, or torch.float16.

    Raises:
        ValueError: ``tp_invariant`` with a codec, or with ranks that have no whole leaves.
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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what every rank receives: (normed, residual_out) of :func:`allreduce_residual_rmsnorm` of the products.

    Each product ``a[r] @ w[r].T`` is rounded before it is summed. Both results are [..., N], with the dtype of ``a``.
    With ``tp_invariant`` the residual is added to the fp32 sum of :func:`fused_matmul_allreduce`, before the only
    rounding of ``residual_out``.

    Args:
        a: one tensor per rank, in rank order: [..., K]. Shapes may differ in K only.
        w: one tensor per rank: [N, K], as torch.nn.Linear stores it.
        residual: [..., N], with the dtype of ``a``.
        weight: [N], with the dtype of ``a``.
        eps: added to the mean square.
        weight_offset: added to the weight.
        tp_invariant: whether leaves are added as a tree, as in :func:`fused_matmul_allreduce`.
    """
    if tp_invariant:
        products, order, _ = _products(a, w, tp_invariant)
        total = allreduce(products, order=order).view(residual.shape)
    else:
        total = fused_matmul_allreduce(a, w)
    return norms.specification(total, residual, weight, eps, weight_offset)


def fused_allgather_matmul(
    a: Sequence[torch.Tensor],
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: object = None,
    tp_invariant: bool = False,
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
        tp_invariant: whether products are added in the order of K.

    Returns:
        A new, contiguous tensor [sum of M_r, ..., N] with the dtype of ``a``.
    """
    whole = allgather(a)
    if epilogue is None:
        return linear(whole, w, bias, tp_invariant)
    like = whole.new_empty((*whole.shape[:-1], len(w)))
    wanted = _after_bias(epilogue, bias, like)
    form, inputs = bind("fused_allgather_matmul", wanted.text(like), like, *wanted.arguments())
    return linear_with_epilogue(whole, w, form, inputs, tp_invariant)


def fused_matmul_reducescatter(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    partition: str = "none",
    num_partitions: int | None = None,
    codec: Codec | str | None = None,
    seed: int = 0,
    call: int = 0,
    epilogue: object = None,
    tp_invariant: bool = False,
    a_scale: Sequence[torch.Tensor] | None = None,
    w_scale: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Returns what each rank receives: its part of the sum of ``a[r] @ w[r].T`` over all ranks r, plus the bias.

    The sum is split along the first dimension as torch.tensor_split does. Without a codec the result has the bits of
    :func:`fused_matmul_allreduce`. A codec rounds the products as :func:`quantized_reducescatter` does, and encodes
    each partition separately, in order.

    Args:
        a: one tensor per rank, in rank order: [..., K], of at least two dimensions. Shapes may differ in K only.
        w: one tensor per rank: [N, K], as torch.nn.Linear stores it.
        bias: [N], equal on all ranks. None: no bias.
        partition: as of :func:`fused_matmul_allreduce`, like the arguments that follow.
        num_partitions: how many partitions "split_m" and "split_n" make. None: at most 4.
        codec: the format on the wire, or its name. None: the elements themselves.
        seed: the 64-bit seed of stochastic rounding.
        call: how many calls came before. Stochastic rounding draws other random numbers in each call.
        epilogue: elementwise work, as there. The tensors of an Epilogue are lists with one per rank.
        tp_invariant: whether leaves are added as a tree.
        a_scale: one tensor per rank, of e4m3 operands.
        w_scale: likewise.
        out_dtype: with scales, the dtype of products and result. None: torch.bfloat16.

    Returns:
        A new, contiguous tensor per rank, in rank order: [rows of its part, ..., N].
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
    order: str,
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
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns what each rank receives: the results of :func:`reducescatter_residual_rmsnorm` of the products.

    Each product ``a[r] @ w[r].T`` is rounded before it is summed. With ``tp_invariant`` each rank receives its rows of
    :func:`fused_matmul_allreduce_residual_rmsnorm`.

    Args:
        a: one tensor per rank, in rank order: [M, ..., K]. Shapes may differ in K only.
        w: one tensor per rank: [N, K], as torch.nn.Linear stores it.
        residuals: each rank's rows of the residual, in rank order: [M_r, ..., N], with the dtype of ``a``.
        weight: [N], with the dtype of ``a``.
        eps: added to the mean square.
        weight_offset: added to the weight.
        tp_invariant: whether leaves are added as a tree.
    """
    if tp_invariant:
        products, order, _ = _products(a, w, tp_invariant)
        sums = reducescatter([one.view(*a[0].shape[:-1], len(w[0])) for one in products], order=order)
    else:
        sums = fused_matmul_reducescatter(a, w)
    return [norms.specification(*pair, weight, eps, weight_offset) for pair in zip(sums, residuals, strict=True)]


def _products(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    tp_invariant: bool,
    codec: object = None,
    a_scale: Sequence[torch.Tensor] | None = None,
    w_scale: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[list[torch.Tensor], str, torch.dtype]:
    """Returns each rank's product [rows, N], the order in which they are added, and the dtype of the result.

    Products are partials of a tree, or rounded.
    """
    if a_scale is not None or w_scale is not None:
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


def first_elements(counts: Sequence[int]) -> list[int]:
    """Returns the index of each message's first element for random numbers: earlier messages count as whole tiles."""
    return [tiles * TILE_NUMEL for tiles in accumulate((-(-count // TILE_NUMEL) for count in counts), initial=0)][:-1]
