"""graphar.fused_matmul_reducescatter: a matmul and the reduce-scatter of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphar.numerics import partitions
from graphar.numerics.codecs import Codec, CodecName
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.numerics.partitions import Partition, split
from graphar.ops import matmul_gradients, matmul_operands, matmul_sums, options, parts
from graphar.ops.matmul_operands import UNSCALED, scaled_of
from graphar.ops.options import T
from graphar.ops.register import Op
from graphar.ops.repeats import Asked, repeated
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group

NAME = "fused_matmul_reducescatter"


@dataclass(eq=False)
class Arguments(matmul_sums.Arguments, options.InParts):
    """Those of a reduce-scatter."""


def fused_matmul_reducescatter(
    a: T,
    w: T,
    *,
    bias: T | None = None,
    partition: Partition = "auto",
    num_partitions: int | None = None,
    codec: Codec | CodecName | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: Group = None,
    a_scale: T | None = None,
    w_scale: T | None = None,
    out_dtype: torch.dtype | None = None,
    timeout_s: float | None = None,
) -> T:
    """Returns this rank's rows of the sum over all ranks of ``a @ w.T``, plus ``bias``.

    The result of :func:`fused_matmul_allreduce` is split along the first dimension of ``a`` as by torch.tensor_split:
    lengths differ by at most one, and earlier ranks have the longer parts. The bits are the same.
    ``graphar.reference.fused_matmul_reducescatter`` is the specification, except for the order in which a product is
    accumulated, which depends on the device.

    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in the same order.

    Differentiable: the gradients of all parts are gathered and multiplied by a :func:`fused_allgather_matmul`, and a
    matmul gives the gradient of ``w``. The gradient of ``bias`` covers only this rank's part. If ``bias`` is one
    parameter of all ranks, sum its gradients.

    Args:
        a: this rank's [M, ..., K], bf16, fp16, fp32 or fp64, or with scales torch.float8_e4m3fn; or a list with one for
            each device of this process. Shapes are equal on all ranks but for K.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. The transpose of a [K, N] tensor is not copied.
        bias: [N], equal on all ranks; for lists a list, one per device. It is added to the sum once, not by each rank.
        partition: "none": multiply, then sum. "tiles": one kernel does both, for results of 16 bits on sm_90 and N a
            multiple of 8; other calls run as "none". "split_m": each rank's part of the rows of ``a`` is split into
            partitions, so that all ranks receive rows of each; "split_n": the rows of ``w`` are split. While one
            partition is summed, the next is multiplied. "auto": "tiles" or "none", by the tuning table.
            "batch_invariant": as "auto", but only with graphar's matmul, so that the bits of a row do not depend on the
            number of rows; not with a codec.
            "tp_invariant": leaves of K added in fp32 as a tree and rounded once, as by :func:`fused_matmul_allreduce`;
            ``bias`` then gets the gradient of all ranks' rows, whose number must be a multiple of 8.
        num_partitions: the number of partitions of "split_m" and "split_n". None: 4, if there are as many rows.
        codec: the format on the wire, a :class:`graphar.Codec` or the name of one, such as "int8": fewer bits, less
            precision. Each rank's product is rounded once, part by part; the sum is rounded only to the
            dtype. Each partition is encoded separately, so partitions change bits. For bf16, fp16 and fp32.
        epilogue: elementwise work on this rank's part of the fp32 sum and ``bias`` before they are rounded: a
            :class:`graphar.Epilogue`, or an expression or a function without arguments, such as "gelu(v)". row, col and
            index are positions in that part, and tensors have its shape. With a bias, an epilogue has at most three
            tensors. Not with a codec, and not for fp64.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, with any strides: of rows [..., 1], or one number; of
            blocks of 128 columns [..., ceil(K / 128)]. For a list a list. Products are those of
            ``graphar.reference.scaled_linear``, whatever the number of rows; there are no gradients. None: no scales.
        w_scale: fp32 scales of ``w`` in torch.float8_e4m3fn, of the same format: of rows [N, 1], [1, N], or one number;
            of blocks of 128 x 128 [ceil(N / 128), ceil(K / 128)]. For a list a list.
        out_dtype: with scales, the dtype of products and result, torch.bfloat16 or torch.float16. None: torch.bfloat16.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        A contiguous tensor [M_r, ..., N] with the dtype of ``a``, or with ``out_dtype``, where M_r is the length of
        this rank's part; for a list one per device.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        UnsupportedError: partition is "batch_invariant" or "tp_invariant", and graphar's matmul cannot serve it.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    kinds, scaled = (type(num_partitions), type(timeout_s)), UNSCALED
    how = partition, num_partitions, codec, bias is None, timeout_s, kinds
    if a_scale is not None or w_scale is not None or out_dtype is not None:
        scaled = scaled_of(NAME, a, a_scale, w_scale, out_dtype)
        how = *how, scaled.scaled_dtype
    asked = (a, w, *scaled.scales, *(() if bias is None else (bias,))), how, epilogue
    if (found := repeated(NAME, group, *asked)) is not None:
        return found
    given = Arguments(timeout_s=timeout_s, partition=partition, num_partitions=num_partitions, **scaled._asdict())
    return _fused(a, w, bias, codec, epilogue, group, given, asked)


def _fused(a, w, bias, codec, epilogue, group: Group, given: Arguments, asked: Asked) -> Any:
    """Checks a call's arguments, and makes it through torch's dispatcher if that is needed."""
    name, in_list, biases = matmul_sums.check_fused(NAME, a, w, bias, codec, epilogue, group, given)
    first = a[0] if in_list else a
    matmul_operands.check_has_rows(NAME, first)
    rank, world_size = (-1, len(a)) if in_list else parts.place(group, given.partition == partitions.TP_INVARIANT)
    sizes = split(first.shape[0], world_size)
    followed = _epilogue_option(first, w, bias, epilogue, sizes, rank, given.scaled_dtype)
    where = {"communicator": name, "rank": rank, "sizes": sizes}
    given = replace(given, bias=biases, codec=options.codec_option(NAME, codec), **where, **followed)
    plain = not in_list and matmul_sums.is_plain_fused(a, w, given)
    return OP(a, w, given=given, plain=plain, asked=asked)


def _epilogue_option(
    first: torch.Tensor, w, bias, epilogue, sizes: Sequence[int], rank: int, dtype: torch.dtype | None
) -> options.EpilogueOption:
    """Returns the epilogue for each rank's rows. It also adds the bias."""
    if epilogue is None:
        return options.NO_EPILOGUE
    in_list = isinstance(w, (list, tuple))
    like = matmul_sums.sum_like(first.narrow(0, 0, sizes[max(rank, 0)]), w[0] if in_list else w, dtype)
    return options.epilogue_option(NAME, epilogue, like, len(sizes) if in_list else None, 0, bias)


def _fake(a, w, given) -> list[torch.Tensor]:
    sizes = zip(a, w, parts.own_sizes(given), strict=True)
    dtype = given.scaled_dtype
    return [x.new_empty((size, *x.shape[1:-1], weight.shape[0]), dtype=dtype) for x, weight, size in sizes]


def _run(engine: Engine, a, w, outs, given):
    """Writes each rank's part of the sum into its tensor of ``outs``, which are contiguous."""
    rows = [size * a[0].shape[1:-1].numel() for size in given.sizes]
    partitions.panels(NAME, given.partition, given.num_partitions, rows, w[0].shape[0])  # raises
    return matmul_sums.run(NAME, engine, a, w, outs, given, rows, options.applied(NAME, given, outs))


def _check(engine: Engine, a, w, given) -> None:
    parts.check_lengths(NAME, given.sizes, [x.shape[0] for x in a], [sum(given.sizes)] * len(a))
    parts.check_place(NAME, engine, given)
    matmul_sums.check_leaves(NAME, engine, a, w, given)


def _backward(ctx, gradients):
    """Returns the gradients. The rounding of a codec is treated as the identity."""
    where = {name: ctx.given[name] for name in ("communicator", "rank", "sizes", "timeout_s")}
    (a, w), tensors = OP.saved(ctx)
    of_sums, rest = matmul_gradients.of_sums(ctx, "reducescatter", where, gradients, a, w, tensors)
    return *matmul_gradients.of_parts(ctx, of_sums, a, w, where), rest


OP = Op(
    NAME,
    ["a", "w"],
    Arguments,
    _run,
    _fake,
    check=_check,
    backward=_backward,
)
