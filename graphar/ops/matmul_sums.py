"""Matmuls whose products are summed: graphar.fused_matmul_allreduce and graphar.fused_matmul_reducescatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Never

import torch

from graphar.numerics import leaf_tree, partitions
from graphar.numerics.codecs import Codec, CodecName
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.numerics.partitions import BATCH_INVARIANT, TP_INVARIANT, Partition
from graphar.ops import matmul_operands, options, parts
from graphar.ops.gradients import of_operands, of_sums
from graphar.ops.options import Arguments, T
from graphar.ops.register import Op
from graphar.ops.repeats import Asked, repeated
from graphar.plan.call import Call
from graphar.plan.work import MATMUL_ALLREDUCE, MATMUL_REDUCESCATTER, Product
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name


def fused_matmul_allreduce(
    a: T,
    w: T,
    *,
    bias: T | None = None,
    partition: Partition = "auto",
    num_partitions: int | None = None,
    codec: Codec | CodecName | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: Group = None,
    out: T | None = None,
    a_scale: T | None = None,
    w_scale: T | None = None,
    out_dtype: torch.dtype | None = None,
    timeout_s: float | None = None,
    **removed: Never,
) -> T:
    """Returns the sum over all ranks of ``a @ w.T``, plus ``bias``, on every rank: a row-parallel linear layer.

    Each rank's product is accumulated in fp32 (fp64 for fp64), in an order that depends on the device, and rounded.
    Products and bias are added in fp32 in rank order and rounded once: ``graphar.reference.fused_matmul_allreduce``.
    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in order. Differentiable: for a tensor, the backward pass assumes that all ranks compute the
    same loss, as in tensor parallelism, and does not communicate. A matmul and an :func:`allreduce` give such a loss's
    gradient times the number of ranks. For a list gradients are summed.

    Args:
        a: this rank's [..., K], bf16, fp16, fp32 or fp64, or with scales torch.float8_e4m3fn; for a list one per
            device. Ranks may differ in K only.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. The transpose of a [K, N] tensor is not copied.
        bias: [N], equal on all ranks; for lists a list, one per device. It is added to the sum once, not by each rank.
        partition: "none": multiply, then sum. "tiles": one kernel does both, for results of 16 bits on sm_90 and N a
            multiple of 8; other calls run as "none". "split_m", "split_n": the rows of ``a`` or ``w`` are split; while
            one part is summed, the next is multiplied. "auto": "tiles" or "none", by the tuning table.
            "batch_invariant": as "auto", but only with graphar's matmul, so that a row's bits do not depend on M.
            "tp_invariant": leaves of K are added as a tree. The result and the gradients have the same bits on 1, 2, 4
            and 8 ranks of equal K.
        num_partitions: of "split_m" and "split_n". None: 4, if there are as many rows.
        codec: the format on the wire, a :class:`graphar.Codec` or its name, such as "int8", partition by partition, as
            by ``graphar.reference.quantized_allreduce``. For bf16, fp16 and fp32; not with "batch_invariant".
        epilogue: elementwise work on the fp32 sum and ``bias`` before they are rounded: a :class:`graphar.Epilogue`, or
            an expression or a function without arguments, such as "gelu(v)". row, col and index are positions in the
            result. With a bias, an epilogue has at most three tensors. Not with a codec, and not for fp64.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        out: a tensor for the result, which shares no memory with the operands. Not differentiable.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, with any strides: of rows [..., 1], or one number; of
            blocks of 128 columns [..., ceil(K / 128)]. For a list a list. Products are as by
            ``graphar.reference.scaled_linear``, whatever the number of rows; there are no gradients. None: no scales.
        w_scale: fp32 scales of ``w`` in torch.float8_e4m3fn, of the same format: of rows [N, 1], [1, N], or one number;
            of blocks of 128 x 128 [ceil(N / 128), ceil(K / 128)]. For a list a list.
        out_dtype: with scales, the dtype of products and result, torch.bfloat16 or torch.float16. None: torch.bfloat16.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        A contiguous tensor [..., N] of the dtype of ``a``, or of ``out_dtype``; for a list one per device; or ``out``.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        UnsupportedError: partition is "batch_invariant" or "tp_invariant", and graphar's matmul cannot serve it.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    if removed:
        options.check_removed(MATMUL_ALLREDUCE, removed)
    kinds = type(num_partitions), type(timeout_s)
    how = partition, num_partitions, codec, timeout_s, out_dtype, False, kinds
    scales = () if a_scale is None and w_scale is None else (a_scale, w_scale)
    asked = (a, w, *scales, *(() if bias is None else (bias,))), how, epilogue
    if (result := repeated(MATMUL_ALLREDUCE, group, *asked, out)) is not None:
        return result
    numbers = {"num_partitions": num_partitions, "timeout_s": timeout_s}
    return _call(SUM, a, w, bias, (a_scale, w_scale, out_dtype), partition, codec, group, asked, out, **numbers)


def with_constant_weight(
    a, w, *, bias=None, partition: Partition = "auto", group: Group = None, a_scale=None, w_scale=None, out_dtype=None
) -> torch.Tensor:
    """Returns what :func:`fused_matmul_allreduce` does. Skinny kernels may load ``w`` while the kernel before runs.

    The caller promises that whatever wrote ``w`` has ended when the call is made, or when a graph with it is replayed.
    """
    how = partition, None, None, None, out_dtype, True, (type(None), type(None))
    scales = () if a_scale is None and w_scale is None else (a_scale, w_scale)
    asked = (a, w, *scales, *(() if bias is None else (bias,))), how, None
    if (result := repeated(MATMUL_ALLREDUCE, group, *asked)) is not None:
        return result
    return _call(SUM, a, w, bias, (a_scale, w_scale, out_dtype), partition, None, group, asked, constant_weight=True)


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

    The bits are as of :func:`fused_matmul_allreduce`, split along the first dimension as by torch.tensor_split:
    lengths differ by at most one, and earlier ranks have the longer parts. The specification is
    ``graphar.reference.fused_matmul_reducescatter``, except for the order in which a product is accumulated.
    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in order. Differentiable: a :func:`fused_allgather_matmul` of the parts' gradients gives that
    of ``a``, and a matmul that of ``w``. The gradient of ``bias`` covers only this rank's part. If ``bias`` is one
    parameter of all ranks, sum its gradients.

    Args:
        a: this rank's [M, ..., K], bf16, fp16, fp32 or fp64, or with scales torch.float8_e4m3fn; for a list one per
            device. Ranks may differ in K only.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. The transpose of a [K, N] tensor is not copied.
        bias: [N], equal on all ranks; for lists a list, one per device. It is added to the sum once, not by each rank.
        partition: "none": multiply, then sum. "tiles": one kernel does both, for results of 16 bits on sm_90 and N a
            multiple of 8; other calls run as "none". "split_m", "split_n": each rank's part of the rows of ``a``, or
            the rows of ``w``, are split. While one partition is summed, the next is multiplied. "auto": "tiles" or
            "none", by the tuning table. "batch_invariant": as "auto", but only with graphar's matmul, so that a row's
            bits do not depend on M; not with a codec. "tp_invariant": as by :func:`fused_matmul_allreduce`; ``bias``
            then gets the gradient of all ranks' rows, whose number must be a multiple of 8.
        num_partitions: of "split_m" and "split_n". None: 4, if there are as many rows.
        codec: the format on the wire, a :class:`graphar.Codec` or its name, such as "int8". Each rank's product is
            rounded once, part by part, and the sum only to the dtype. Each partition is encoded separately, so
            partitions change bits. For bf16, fp16 and fp32.
        epilogue: elementwise work on this rank's part of the fp32 sum and ``bias`` before they are rounded: a
            :class:`graphar.Epilogue`, or an expression or a function without arguments, such as "gelu(v)". row, col and
            index are positions in that part, and tensors have its shape. With a bias, an epilogue has at most three
            tensors. Not with a codec, and not for fp64.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, with any strides: of rows [..., 1], or one number; of
            blocks of 128 columns [..., ceil(K / 128)]. For a list a list. Products are as by
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
    kinds = type(num_partitions), type(timeout_s)
    how = partition, num_partitions, codec, bias is None, timeout_s, out_dtype, kinds
    scales = () if a_scale is None and w_scale is None else (a_scale, w_scale)
    asked = (a, w, *scales, *(() if bias is None else (bias,))), how, epilogue
    if (result := repeated(MATMUL_REDUCESCATTER, group, *asked)) is not None:
        return result
    numbers = {"num_partitions": num_partitions, "timeout_s": timeout_s}
    return _call(SCATTER, a, w, bias, (a_scale, w_scale, out_dtype), partition, codec, group, asked, **numbers)


def _call(
    op: Op, a, w, bias, scales: tuple, partition, codec, group: Group, asked: Asked, out=None, timeout_s=None, **how
) -> Any:
    name, epilogue, in_list = op.name, asked[2], isinstance(a, (list, tuple))
    call_checks.check_call(name, "auto", timeout_s)
    communicator = engine_name(group, name, alone=partition == TP_INVARIANT and not in_list)
    options.check_together(name, codec, epilogue)
    if partition in (BATCH_INVARIANT, TP_INVARIANT) and codec is not None:
        raise ValueError(f"{name}: takes a codec or partition={partition!r}, not both")
    scaled = matmul_operands.check(name, a, w, bias, scales, partition)
    dtype = scaled.get("scaled_dtype")
    rows, weight = (a[0], w[0]) if in_list else (a, w)
    whole = None
    if op is SCATTER:
        (where, lengths), whole = parts.of_rows(name, "a", a, group, partition == TP_INVARIANT), 0
        rows, how = rows.narrow(0, 0, lengths[0]) if epilogue is not None else rows, how | where
    how |= matmul_operands.added(name, a, bias, epilogue, (*rows.shape[:-1], weight.shape[0]), dtype, whole)
    how |= {"communicator": communicator, "timeout_s": timeout_s, "partition": partition, **scaled}
    how["codec"] = options.codec_option(name, codec)
    if out is None:
        return op(a, w, asked=asked, **how)
    biases = {} if bias is None else {"bias": bias}
    for x, y, of_rank, *more in options.by_rank(name, a=a, w=w, out=out, **biases):
        options.check_result(name, of_rank, (*x.shape[:-1], y.shape[0]), dtype or x.dtype, (x, y, *more))
    op.into(a, w, out, asked=asked, **how)
    return list(out) if in_list else out


def check_leaves(op: str, engine: Engine, a: Sequence[torch.Tensor], arguments: Arguments) -> None:
    """Raises ValueError if a call is to be invariant without whole leaves of K."""
    if arguments.partition == TP_INVARIANT:
        # Processes compare their columns when they sum.
        leaf_tree.check_operands(op, a if engine.devices else list(a) * engine.world_size)


class _Summed(Op):
    tensors = ("a", "w")

    def fake(self, a, w, arguments: Arguments) -> list[torch.Tensor]:
        shapes = [x.shape[:-1] for x in a]
        if self is SCATTER:
            shapes = [(size, *shape[1:]) for size, shape in zip(parts.own_sizes(arguments), shapes, strict=True)]
        each = zip(a, w, shapes, strict=True)
        return [x.new_empty((*shape, weight.shape[0]), dtype=arguments.scaled_dtype) for x, weight, shape in each]

    def run(self, engine: Engine, a, w, outs, arguments: Arguments):
        op, columns, counts = self.name, w[0].shape[0], matmul_operands.rows_of_ranks(self, engine, a, arguments)
        cut = counts if self is SCATTER else [sum(counts)]
        partitions.panels(op, arguments.partition, arguments.num_partitions, cut, columns)  # raises
        followed = options.applied(op, arguments, outs)
        if arguments.codec:
            call_checks.check_quantized_call(op, arguments.codec, "auto", outs[0])
        if not sum(counts) or not columns:
            return None
        how = {"num_partitions": arguments.num_partitions, **matmul_operands.multiplied(self, a, w, arguments)}
        form = followed and followed.form
        work = Product(op, counts, columns, bool(arguments.bias), arguments.codec, form, **how)
        factors = matmul_operands.lists(a, w, arguments.scales, arguments.bias)
        ranks = options.operands(factors, [(out,) for out in outs], followed)
        return engine.run(Call.of(work, outs[0], timeout_s=arguments.timeout_s), ranks), ranks

    def check_out(self, a, w, outs, arguments: Arguments) -> None:
        scales = {"a_scale": arguments.scales[::2], "w_scale": arguments.scales[1::2]}
        tensor_checks.check_apart(self.name, outs, a=a, w=w, bias=arguments.bias, **scales)
        options.check_apart_from_epilogue(self.name, outs, arguments.tensors)

    def check(self, engine: Engine, a, w, arguments: Arguments) -> None:
        if self is SCATTER:
            parts.check(self.name, engine, arguments, [len(x) for x in a], whole=True)
        check_leaves(self.name, engine, a, arguments)

    def backward(self, ctx, gradients, saved, tensors):
        """Returns the gradients. The rounding of a codec is treated as the identity."""
        a, w, *_ = saved
        before, rest = of_sums(ctx, gradients, a, w, tensors)
        return *of_operands(ctx, before, a, w), rest


_OPTIONS = ("partition", "scales", *options.FOLLOWED, "codec", "bias", "num_partitions", "scaled_dtype")
SUM = _Summed(MATMUL_ALLREDUCE, *_OPTIONS, "constant_weight", with_out=True)
SCATTER = _Summed(MATMUL_REDUCESCATTER, *options.IN_PARTS, *_OPTIONS)
