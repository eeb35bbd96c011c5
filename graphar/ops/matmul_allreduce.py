"""graphar.fused_matmul_allreduce: a matmul and the all-reduce of its result, a row-parallel linear layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Never

import torch

from graphar.numerics import partitions
from graphar.numerics.codecs import Codec, CodecName
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.numerics.partitions import Partition
from graphar.ops import matmul_gradients, matmul_operands, matmul_sums, options
from graphar.ops.matmul_operands import UNSCALED, scaled_of
from graphar.ops.options import T
from graphar.ops.register import Op, is_plain
from graphar.ops.repeats import Asked, repeated
from graphar.plan.matmuls import owned_rows
from graphar.runtime.checks import tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group

NAME = "fused_matmul_allreduce"


@dataclass(eq=False)
class Arguments(matmul_sums.Arguments):
    # Whether skinny kernels may load w while the kernel before runs: (26) in cuda_src/device/sync/kernel_order.cuh.
    constant_weight: bool = False


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

    Each rank's product is accumulated in fp32 (fp64 for fp64), in an order of the device's, and rounded to its dtype.
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
            multiple of 8; else as "none". "split_m", "split_n": rows of ``a`` or ``w`` are split; while one is summed,
            the next is multiplied. "auto": "tiles" or "none", by the tuning table. "batch_invariant": as "auto", only
            with graphar's matmul: a row's bits do not depend on M. "tp_invariant": K in leaves, as a tree: the same
            bits, also of gradients, on 1, 2, 4 and 8 ranks of equal K.
        num_partitions: of "split_m" and "split_n". None: 4, if there are as many rows.
        codec: the format on the wire, a :class:`graphar.Codec` or its name, such as "int8", partition by partition, as
            by ``graphar.reference.quantized_allreduce``. For bf16, fp16 and fp32; not with "batch_invariant".
        epilogue: elementwise work on the fp32 sum and ``bias`` before they are rounded: a :class:`graphar.Epilogue`, or
            an expression or a function without arguments, such as "gelu(v)". row, col and index are positions in the
            result. With a bias, an epilogue has at most three tensors. Not with a codec, and not for fp64.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        out: a tensor for the result, which shares no memory with the operands. Not differentiable.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, with any strides: of rows [..., 1], or one number; of
            blocks of 128 columns [..., ceil(K / 128)]. For a list a list. Products are those of
            ``graphar.reference.scaled_linear``, whatever the number of rows; there are no gradients. None: no scales.
        w_scale: fp32 scales of ``w`` in torch.float8_e4m3fn, of the same format: of rows [N, 1], [1, N], or one number;
            of blocks of 128 x 128 [ceil(N / 128), ceil(K / 128)]. For a list a list.
        out_dtype: with scales, the dtype of products and result, torch.bfloat16 or torch.float16. None: torch.bfloat16.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        A contiguous tensor [..., N] with the dtype of ``a``, or with ``out_dtype``; for a list one per device; or
        ``out``.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        UnsupportedError: partition is "batch_invariant" or "tp_invariant", and graphar's matmul cannot serve it.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    if removed:
        options.check_removed(NAME, removed)
    kinds = type(num_partitions), type(timeout_s)
    how = partition, num_partitions, codec, timeout_s, out_dtype, False, kinds
    is_scaled = a_scale is not None or w_scale is not None or out_dtype is not None
    scaled = scaled_of(NAME, a, a_scale, w_scale, out_dtype) if is_scaled else UNSCALED
    more = *scaled.scales, *(() if bias is None else (bias,))
    asked = (a, w, *more), how, epilogue
    found = repeated(NAME, group, *asked, out)
    if found is not None:
        return found
    given = Arguments(timeout_s=timeout_s, partition=partition, num_partitions=num_partitions, **scaled._asdict())
    return _fused(a, w, bias, codec, epilogue, group, out, given, asked)


def with_constant_weight(
    a: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    partition: Partition = "auto",
    group: Group = None,
    a_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns what :func:`fused_matmul_allreduce` does. Skinny kernels may load ``w`` while the kernel before runs.

    The caller promises that whatever wrote ``w`` has ended when the call is made, or when a graph with it is replayed.
    """
    how = partition, None, None, None, out_dtype, True, (type(None), type(None))
    scaled = UNSCALED if a_scale is None else scaled_of(NAME, a, a_scale, w_scale, out_dtype)
    asked = (a, w, *scaled.scales, *(() if bias is None else (bias,))), how, None
    found = repeated(NAME, group, *asked)
    if found is not None:
        return found
    given = Arguments(partition=partition, constant_weight=True, **scaled._asdict())
    return _fused(a, w, bias, None, None, group, None, given, asked)


def _fused(a, w, bias, codec, epilogue, group: Group, out, given: Arguments, asked: Asked) -> Any:
    """Checks a call's arguments, and makes it through torch's dispatcher if that is needed."""
    name, in_list, biases = matmul_sums.check_fused(NAME, a, w, bias, codec, epilogue, group, given)
    # An epilogue adds the bias itself.
    added, like = None, a[0] if in_list else a
    if epilogue is not None:
        added, like = bias, matmul_sums.sum_like(like, w[0] if in_list else w, given.scaled_dtype)
    followed = options.epilogue_option(NAME, epilogue, like, len(a) if in_list else None, bias=added)
    text = options.codec_option(NAME, codec)
    given = replace(given, communicator=name, bias=biases, codec=text, **followed)
    plain = not in_list and matmul_sums.is_plain_fused(a, w, given)
    if out is None:
        return OP(a, w, given=given, plain=plain, asked=asked)
    matmul_operands.check_results(NAME, a, w, bias, out, given.scaled_dtype)
    OP.into(a, w, out, given=given, plain=plain and is_plain(out), asked=asked)
    return list(out) if in_list else out


def _fake(a, w, given) -> list[torch.Tensor]:
    dtype = given.scaled_dtype
    return [x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype) for x, weight in zip(a, w, strict=True)]


def _run(engine: Engine, a, w, outs, given):
    """Writes the sum into every tensor of ``outs``, which are contiguous."""
    rows = outs[0].shape[:-1].numel()
    partitions.panels(NAME, given.partition, given.num_partitions, [rows], outs[0].shape[-1])  # raises
    followed = options.applied(NAME, given, outs)
    return matmul_sums.run(NAME, engine, a, w, outs, given, owned_rows(rows, engine.world_size), followed)


def _check_out(a, w, outs, given) -> None:
    tensor_checks.check_distinct(NAME, "out", outs)
    for rank, out in enumerate(outs):
        matmul_operands.check_result_memory(NAME, a[rank], w[rank], given.bias[rank] if given.bias else None, out)
    options.check_apart_from_epilogue(NAME, outs, given.tensors)


def _backward(ctx, gradients):
    call = {name: ctx.given[name] for name in ("communicator", "timeout_s")}
    (a, w), tensors = OP.saved(ctx)
    of_sums, rest = matmul_gradients.of_sums(ctx, "allreduce", call, gradients, a, w, tensors)
    return *matmul_gradients.of_products(ctx, matmul_gradients.of_equal_sums(ctx, of_sums, call), a, w), rest


OP = Op(
    NAME,
    ["a", "w"],
    Arguments,
    _run,
    _fake,
    check=partial(matmul_sums.check_leaves, NAME),
    check_out=_check_out,
    backward=_backward,
)
