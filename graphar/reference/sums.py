"""The specification of sums and gathers of tensors, and of the norms after them, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import Literal

import torch

from graphar.numerics import leaf_tree, norms
from graphar.numerics.codec_reference import SUM, Noise, encode, first_elements, part_of_wires, sum_of_wires
from graphar.numerics.codecs import Codec, CodecName, as_codec
from graphar.numerics.dtypes import ACCUMULATION_DTYPES, with_canonical_nan
from graphar.numerics.epilogues.epilogue import as_epilogue, bind

Order = Literal["rank", "tree"]  # in which the tensors of ranks are added


def allreduce(
    parts: Sequence[torch.Tensor], epilogue: object = None, order: Order = "rank", out_dtype: torch.dtype | None = None
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


def _sum(parts: Sequence[torch.Tensor], order: str = "rank") -> torch.Tensor:
    if order not in ("rank", "tree"):
        raise ValueError(f"reference: order must be 'rank' or 'tree', got {order!r}")
    if order == "tree":
        if parts[0].dtype != torch.float32:
            raise ValueError(f"reference: order='tree' adds partials in float32, got {parts[0].dtype}")
        leaf_tree.check_ranks("reference", len(parts))
        return leaf_tree.tree_sum(parts)
    kind = ACCUMULATION_DTYPES[parts[0].dtype]
    return reduce(torch.add, (part.to(kind) for part in parts))


def hierarchical_allreduce(
    parts: Sequence[torch.Tensor], hosts: Sequence[Sequence[int]], codec: Codec | CodecName | None = None
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


def hierarchical_reducescatter(
    parts: Sequence[torch.Tensor], hosts: Sequence[Sequence[int]], codec: Codec | CodecName
) -> list[torch.Tensor]:
    """Returns what each rank receives from graphar.fsdp with a codec and the algorithm "hierarchical".

    The tensors of each host's ranks are added in fp32, in rank order. The hosts' sums then go to their owners as
    :func:`quantized_reducescatter` sends them, rounded to nearest. There they are added in fp32, in the order of
    ``hosts``, and rounded to the dtype once.

    Args:
        parts: one tensor per rank, in rank order; equal shapes of at least one dimension, and equal dtypes: bfloat16,
            float16 or float32.
        hosts: the ranks of each host.
        codec: the format on the wire across hosts, or its name.

    Returns:
        A new, contiguous tensor per rank, in rank order: its part along the first dimension, split as
        torch.tensor_split does. Every NaN is the canonical one. Between ranks of one host the sum is exact.
    """
    sums = [_sum([parts[rank] for rank in sorted(ranks)]) for ranks in hosts]
    owned = sums[0].tensor_split(len(parts))
    if len(hosts) > 1:
        owned = quantized_reducescatter(sums, codec, sizes=list(map(len, owned)))
    return [with_canonical_nan(part.to(parts[0].dtype)).contiguous() for part in owned]


def reducescatter(
    parts: Sequence[torch.Tensor],
    axis: int = 0,
    epilogue: object = None,
    order: Order = "rank",
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
        whole = as_epilogue(epilogue)
        of_ranks = zip(*(part.tensor_split(len(parts), axis) for part in parts), strict=True)
        return [allreduce(own, whole.of_rank(rank), order, out_dtype) for rank, own in enumerate(of_ranks)]
    total = allreduce(parts, order=order, out_dtype=out_dtype)
    return [part.contiguous() for part in total.tensor_split(len(parts), axis)]


def allgather(parts: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
    """Returns what every rank receives: all ranks' tensors concatenated along ``axis`` in rank order, bit for bit.

    Args:
        parts: one tensor per rank, in rank order; any one dtype. Shapes may differ along ``axis`` only.
        axis: the dimension along which the tensors are concatenated.
    """
    return torch.cat(list(parts), axis)


def alltoall(
    parts: Sequence[torch.Tensor],
    scatter_dim: int = 0,
    gather_dim: int = 0,
    sizes: Sequence[Sequence[int]] | None = None,
) -> list[torch.Tensor]:
    """Returns what each rank receives: a part of every rank's tensor, joined in rank order, bit for bit.

    Args:
        parts: one tensor per rank, in rank order; any one dtype.
        scatter_dim: the dimension along which each tensor is divided into a part for each rank.
        gather_dim: the dimension along which a rank joins what it receives.
        sizes: for each rank, the lengths along ``scatter_dim`` of the parts that it sends to each rank. None: equal.

    Returns:
        A new, contiguous tensor per rank, in rank order.
    """
    sizes = sizes or [[x.shape[scatter_dim] // len(parts)] * len(parts) for x in parts]
    sent = [x.split(list(lengths), scatter_dim) for x, lengths in zip(parts, sizes, strict=True)]  # [sender][receiver]
    return [torch.cat(received, gather_dim) for received in zip(*sent, strict=True)]


def quantized_allreduce(
    parts: Sequence[torch.Tensor], codec: Codec | CodecName, seed: int = 0, call: int = 0
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
    codec: Codec | CodecName,
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
    for first, sent in zip(firsts, zip(*messages, strict=True), strict=True):
        wires = [encode(part.reshape(-1), codec, Noise(seed, call, rank, first)) for rank, part in enumerate(sent)]
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
    return [allreduce_residual_rmsnorm(*pair, weight, **options) for pair in zip(of_ranks, residuals, strict=True)]
