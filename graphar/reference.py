"""The CPU implementation of every op, which is also its specification. Written to be read, not to be fast."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from graphar.numerics import norms, partitions
from graphar.numerics.codec_reference import SUM, Noise, decode, encode
from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.epilogues.epilogue import Epilogue, Form, Operands, as_epilogue, bind
from graphar.numerics.nan import with_canonical_nan

# What a sum is held in before it is rounded, once, to the dtype of its parts. Integers wrap.
ACCUMULATION_DTYPES = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int16,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}


def allreduce(parts: Sequence[torch.Tensor], epilogue: object = None) -> torch.Tensor:
    """What every rank receives: ``parts[0] + parts[1] + ...``, in that order, rounded once.

    Args:
        parts: one tensor a rank, in rank order; equal shapes and dtypes.
        epilogue: what is done to the sum before it is rounded, as graphar.allreduce takes it for one tensor.

    Returns:
        A new tensor of that shape and dtype. A NaN in it is the canonical one, all bits set but the sign; of a single
        part without an epilogue it is a copy, bit for bit.
    """
    if epilogue is not None:
        wanted, first = as_epilogue(epilogue), parts[0]
        form, operands = bind("allreduce", wanted.text(first), first, *wanted.arguments())
        flat = sum_with_epilogue([part.reshape(-1) for part in parts], form, operands, 0, first.numel())
        return flat.view(first.shape)
    if len(parts) == 1:
        return parts[0].clone()
    return with_canonical_nan(_sum(parts).to(parts[0].dtype))


def sum_with_epilogue(
    parts: Sequence[torch.Tensor], form: Form, operands: Operands, first: int, numel: int
) -> torch.Tensor:
    """The sum of flat parts of tensors of ``numel`` elements, from element ``first`` on, with an epilogue."""
    return with_canonical_nan(form.apply(_sum(parts), operands, first, numel).to(parts[0].dtype))


def _sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total = parts[0].to(ACCUMULATION_DTYPES[parts[0].dtype])
    for part in parts[1:]:
        total = total + part.to(total.dtype)
    return total


def hierarchical_allreduce(
    parts: Sequence[torch.Tensor], hosts: Sequence[Sequence[int]], codec: Codec | None = None
) -> torch.Tensor:
    """What every rank receives from algorithm "hierarchical": the sum of each host's ranks, in rank order, and the sum
    of these in the order of hosts; all in fp32 (for float64 in that), and rounded once.

    The same bits on every rank and at every call, but, for floating point, not those of :func:`allreduce`.

    Args:
        parts: as for :func:`allreduce`.
        hosts: each host's ranks.
        codec: what is on the wire across hosts: the fp32 sums are rounded by it as :func:`quantized_allreduce` does, to
            nearest.
    """
    if len(parts) == 1:
        return parts[0].clone()
    sums = [_sum([parts[rank] for rank in sorted(ranks)]) for ranks in hosts]
    total = quantized_allreduce(sums, codec) if codec else _sum(sums)
    return with_canonical_nan(total.to(parts[0].dtype))


def reducescatter(parts: Sequence[torch.Tensor], axis: int = 0, epilogue: object = None) -> list[torch.Tensor]:
    """What each rank receives: its part of the sum along ``axis``, as torch.tensor_split gives them.

    Args:
        parts: as for :func:`allreduce`; at least one dimension.
        axis: along which the sum is split; lengths differ by at most one, earlier ranks have the longer ones.
        epilogue: what is done to each part of the sum before it is rounded, as graphar.reducescatter takes it for a
            list; a tensor that is not in a list is every rank's.
    """
    if epilogue is not None:
        of_ranks = zip(*(part.tensor_split(len(parts), axis) for part in parts), strict=True)
        owned = [as_epilogue(epilogue).of_rank(rank) for rank in range(len(parts))]
        return [allreduce(summands, own) for summands, own in zip(of_ranks, owned, strict=True)]
    return [part.contiguous() for part in allreduce(parts).tensor_split(len(parts), axis)]


def allgather(parts: Sequence[torch.Tensor], axis: int = 0) -> torch.Tensor:
    """What every rank receives: ``parts[0]``, ``parts[1]``, ... one after another along ``axis``, bit for bit.

    Args:
        parts: one tensor a rank, in rank order; any dtype, equal shapes but for their length along ``axis``.
    """
    return torch.cat(list(parts), axis)


def quantized_allreduce(parts: Sequence[torch.Tensor], codec: Codec, seed: int = 0, call: int = 0) -> torch.Tensor:
    """What every rank receives where a codec is on the wire: each part is rounded once, and the sum of them once more.

    Only the parts, their order and the codec decide, and for stochastic rounding ``seed`` and ``call``.

    Args:
        parts: one tensor a rank, in rank order; equal shapes and dtypes: bfloat16, float16 or float32.
        codec: the format of both roundings.
        seed: 64 bits.
        call: how many calls came before; another one rounds in other directions.

    Returns:
        A new tensor of that shape and dtype. A NaN in it is the canonical one; of a single part it is a copy.
    """
    if len(parts) == 1 or not parts[0].numel():
        return parts[0].clone()
    wires = [encode(part.reshape(-1), codec, Noise(seed, call, rank)) for rank, part in enumerate(parts)]
    return sum_of_wires(wires, codec, Noise(seed, call, SUM), parts[0])


def quantized_reducescatter(
    parts: Sequence[torch.Tensor],
    codec: Codec,
    seed: int = 0,
    call: int = 0,
    axis: int = 0,
    sizes: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """What each rank receives where a codec is on the wire: its part of the sum, of which each summand is rounded once.

    The sum is not coded again: it is rounded to the dtype alone. What a rank sends to another is a message of its own,
    with ``axis`` first: its first bucket begins with its first element, and elements of two parts share none. The
    random numbers of stochastic rounding count tiles, on from one part to the next in rank order.

    Args:
        parts: one tensor a rank, in rank order; equal shapes of at least one dimension, and equal dtypes: bfloat16,
            float16 or float32.
        codec: the format.
        seed: 64 bits.
        call: how many calls came before; another one rounds in other directions.
        axis: along which the sum is split.
        sizes: the length of each rank's part along ``axis``; None: those that torch.tensor_split gives.

    Returns:
        A new, contiguous tensor a rank. A NaN in it is the canonical one; of a single part it is a copy.
    """
    at = list(accumulate(sizes))[:-1] if sizes else len(parts)
    messages = [part.movedim(axis, 0).tensor_split(at) for part in parts]  # by sender and receiver
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
) -> tuple[torch.Tensor, ...]:
    """What graphar.allreduce_residual_rmsnorm gives on every rank: (normed, residual_out), or also the rows' scales.

    FP8 is (normed in fp32) * (1 / scale), both rounded to fp32, and then to e4m3: to nearest, ties to even; what is
    beyond 448, infinities too, becomes 448 with its sign; a NaN is 0x7f. Without a scale each row has its own: its
    largest magnitude / 448, and at least 2**-126, the smallest normal number. If that magnitude is an infinity or a
    NaN, the scale is NaN, and so is all of the row.

    Args:
        parts: each rank's input [..., columns], of one shape and dtype.
        residual: like one of them.
        weight: [columns], of the same dtype.
        out_dtype, scale: as graphar.allreduce_residual_rmsnorm takes them.
    """
    output = norms.output_of(parts[0].dtype, out_dtype, scale)
    return norms.specification(allreduce(parts), residual, weight, eps, weight_offset, output, scale)


def matmul(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A rank's product ``a @ w.T``, added up in fp32 (of float64 in float64) and rounded to its dtype."""
    kind = ACCUMULATION_DTYPES[a.dtype]
    return (a.to(kind) @ w.to(kind).t()).to(a.dtype)


def with_bias(total: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sum that is not rounded yet, and the bias added to it, which is then."""
    return with_canonical_nan((total + bias.to(total.dtype)).to(dtype))


def fused_matmul_allreduce(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    partition: str = "none",
    num_partitions: int | None = None,
    codec: Codec | None = None,
    seed: int = 0,
    call: int = 0,
    epilogue: object = None,
) -> torch.Tensor:
    """What every rank receives: the sum of ``a[r] @ w[r].T``, each product rounded to its dtype first, and the bias.

    The bias is added once, to the sum of all ranks before that is rounded. Partitions change no bit, but with a codec:
    each is then a call of its own, in their order.

    Args:
        a: one tensor a rank, in rank order: [..., K], equal but for K.
        w: one a rank: [N, K], as torch.nn.Linear stores it.
        bias: [N], alike on all ranks.
        partition, num_partitions: as :func:`graphar.fused_matmul_allreduce` takes them.
        codec, seed, call: as for :func:`quantized_allreduce`.
        epilogue: what is done to the sum with the bias before that is rounded, as for :func:`allreduce`; no codec then.

    Returns:
        [..., N], of the dtype of ``a``.
    """
    products = _products(a, w)
    m, n = products[0].shape
    if epilogue is not None:
        parts = [product.view(*a[0].shape[:-1], n) for product in products]
        return allreduce(parts, _after_bias(epilogue, bias, parts[0]))
    out = torch.empty_like(products[0])
    for at, panel in enumerate(partitions.panels("reference", partition, num_partitions, [m], n)):
        place = (*panel.rows, panel.columns)
        parts = [widened(product[place], bias) for product in products]
        total = quantized_allreduce(parts, codec, seed, call + at) if codec else allreduce(parts)
        out[place] = total if bias is None else with_bias(total, bias[panel.columns], out.dtype)
    return out.view(*a[0].shape[:-1], n)


def fused_matmul_allreduce_residual_rmsnorm(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What every rank receives: (normed, residual_out) of :func:`allreduce_residual_rmsnorm`, of the rounded products.

    Args:
        a, w: as for :func:`fused_matmul_allreduce`.
        residual: [..., N]; the others as for :func:`allreduce_residual_rmsnorm`.
    """
    return norms.specification(fused_matmul_allreduce(a, w), residual, weight, eps, weight_offset)


def fused_matmul_reducescatter(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    bias: torch.Tensor | None = None,
    partition: str = "none",
    num_partitions: int | None = None,
    codec: Codec | None = None,
    seed: int = 0,
    call: int = 0,
    epilogue: object = None,
) -> list[torch.Tensor]:
    """What each rank receives: its part of what :func:`fused_matmul_allreduce` gives, along the first dimension.

    The parts are those of torch.tensor_split. With a codec, what is sent is rounded as by
    :func:`quantized_reducescatter`. Arguments as there, with two dimensions of ``a`` or more; ``epilogue`` as for
    :func:`reducescatter`.
    """
    products, beside = _products(a, w), a[0].shape[1:-1]
    if epilogue is not None:
        of_ranks = zip(*(one.view(*a[0].shape[:-1], len(w[0])).tensor_split(len(a)) for one in products), strict=True)
        return [
            allreduce(parts, _after_bias(as_epilogue(epilogue).of_rank(rank), bias, parts[0]))
            for rank, parts in enumerate(of_ranks)
        ]
    lengths = [len(part) for part in torch.empty(len(a[0]), device="meta").tensor_split(len(a))]
    sizes = [rows * beside.numel() for rows in lengths]
    n, dtype = products[0].shape[1], products[0].dtype
    received = [products[0].new_empty(rows, n) for rows in sizes]
    for at, panel in enumerate(partitions.panels("reference", partition, num_partitions, sizes, n)):
        parts = [torch.cat([product[rows, panel.columns] for rows in panel.rows]) for product in products]
        parts, rows = [widened(part, bias) for part in parts], [partitions.length(one) for one in panel.rows]
        shares = (
            quantized_reducescatter(parts, codec, seed, call + at, sizes=rows)
            if codec
            else [share.contiguous() for share in allreduce(parts).split(rows)]
        )
        for rank, share in enumerate(shares):
            begin = panel.rows[rank].start - sum(sizes[:rank])
            total = share if bias is None else with_bias(share, bias[panel.columns], dtype)
            received[rank][begin : begin + len(share), panel.columns] = total
    return [one.view(rows, *beside, n) for one, rows in zip(received, lengths, strict=True)]


def _products(a: Sequence[torch.Tensor], w: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [matmul(one.reshape(one.shape[:-1].numel(), one.shape[-1]), other) for one, other in zip(a, w, strict=True)]


def _after_bias(epilogue: object, bias: torch.Tensor | None, x: torch.Tensor) -> Epilogue:
    return as_epilogue(epilogue) if bias is None else as_epilogue(epilogue).after_bias(bias, x)


def widened(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What is summed: where a bias comes after it, in a dtype that the sum is not rounded to."""
    return product if bias is None else product.to(ACCUMULATION_DTYPES[product.dtype])


def first_elements(counts: Sequence[int]) -> list[int]:
    """Where each rank's message begins, for random numbers: in elements, behind whole tiles of those before it."""
    return [tiles * TILE_NUMEL for tiles in accumulate((-(-count // TILE_NUMEL) for count in counts), initial=0)][:-1]


def sum_of_wires(wires: Sequence[torch.Tensor], codec: Codec, noise: Noise, like: torch.Tensor) -> torch.Tensor:
    """The second half of :func:`quantized_allreduce`: of what all ranks have sent, a tensor like one rank's."""
    total = decode(encode(_total(wires, codec), codec, noise), codec)
    return with_canonical_nan(total[: like.numel()].to(like.dtype)).view(like.shape)


def part_of_wires(wires: Sequence[torch.Tensor], codec: Codec, like: torch.Tensor) -> torch.Tensor:
    """The second half of :func:`quantized_reducescatter`: of what all ranks have sent to one, a tensor like a part."""
    return with_canonical_nan(_total(wires, codec)[: like.numel()].to(like.dtype)).view(like.shape)


def _total(wires: Sequence[torch.Tensor], codec: Codec) -> torch.Tensor:
    total = decode(wires[0], codec)
    for wire in wires[1:]:
        total = total + decode(wire, codec)
    return total


def error_of_wire(part: torch.Tensor, wire: torch.Tensor, codec: Codec) -> torch.Tensor:
    """What rounding took from a rank's part, in fp32, rounded to its dtype; zeros where a bucket became NaN.

    What :func:`graphar.allreduce` leaves in a residual, of what that and the tensor sum up to.
    """
    decoded = decode(wire, codec)[: part.numel()]
    error = torch.where(decoded.isnan(), 0, part.float().view(-1) - decoded)
    return error.to(part.dtype).view(part.shape)
