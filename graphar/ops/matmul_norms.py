"""Matmuls whose products are summed and normed: graphar.fused_matmul_allreduce_residual_rmsnorm and its scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Never, get_args

import torch

from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops import matmul_gradients, matmul_operands, matmul_sums, norms, options, parts
from graphar.ops.options import Arguments, T
from graphar.ops.register import Op
from graphar.ops.repeats import Asked, repeated
from graphar.plan.call import Call
from graphar.plan.work import Product
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

_SUMMED, _SCATTERED = "fused_matmul_allreduce_residual_rmsnorm", "fused_matmul_reducescatter_residual_rmsnorm"
NormPartition = Literal["auto", "tiles", "none", "batch_invariant", "tp_invariant"]
PARTITIONS = get_args(NormPartition)


def fused_matmul_allreduce_residual_rmsnorm(
    a: T,
    w: T,
    residual: T,
    weight: T,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    partition: NormPartition = "auto",
    group: Group = None,
    a_scale: T | None = None,
    w_scale: T | None = None,
    timeout_s: float | None = None,
    **removed: Never,
) -> tuple[T, T]:
    """Returns the root-mean-square norm of the sum over all ranks of ``a @ w.T`` plus a residual, and that total.

    Each rank's product is accumulated in fp32 and rounded to its dtype. The products are added in fp32 in rank order,
    and their sum is rounded.
    residual_out = total + residual, rounded to the dtype, where total is the rounded sum;
    normed = (residual_out / sqrt(mean(residual_out**2) + eps)) * (weight + weight_offset), in fp32 and rounded once.
    The mean is over the last dimension (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019).
    ``graphar.reference.fused_matmul_allreduce_residual_rmsnorm`` is the specification, except for the order in which a
    product is accumulated, which depends on the device.

    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in the same order. Differentiable.

    Args:
        a: this rank's [..., K], bf16, fp16 or fp32, or with scales torch.float8_e4m3fn, or a list with one for each
            device of this process. Shapes are equal on all ranks but for K.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. The transpose of a [K, N] tensor is not copied.
        residual: [..., N], of the dtype of ``a``, or with scales bf16 or fp16, equal on every rank; it is not changed.
            For a list a list.
        weight: [N], of the dtype of ``residual``, equal on every rank. For a list a list.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        partition: "none": multiply, then sum and norm in one kernel. "tiles": multiply and sum in one kernel, for
            16-bit results on sm_90 and N a multiple of 8, then norm in another. "auto": the choice of the tuning table.
            "batch_invariant": as "auto", but only with graphar's matmul, so that the bits of a row do not depend on the
            number of rows. "tp_invariant": leaves of K are added in fp32 as a tree, then the residual, and rounded
            once. The results and the gradients have the same bits on 1, 2, 4 and 8 ranks of equal K.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, with any strides: of rows [..., 1], or one number; of
            blocks of 128 columns [..., ceil(K / 128)]. For a list a list. Products are those of
            ``graphar.reference.scaled_linear``, rounded to the dtype of ``residual``, which is bf16 or fp16; there are
            no gradients. None: no scales.
        w_scale: fp32 scales of ``w`` in torch.float8_e4m3fn, of the same format: of rows [N, 1], [1, N], or one number;
            of blocks of 128 x 128 [ceil(N / 128), ceil(K / 128)]. For a list a list.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``residual``. For lists, two lists.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        UnsupportedError: partition is "batch_invariant" or "tp_invariant", and graphar's matmul cannot serve it.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    if removed:
        options.check_removed(_SUMMED, removed)
    scales = () if a_scale is None and w_scale is None else (a_scale, w_scale)
    kinds = type(eps), type(weight_offset), type(timeout_s)
    how = eps, weight_offset, partition, timeout_s, kinds
    asked = (a, w, *scales, residual, weight), how, None
    if (result := repeated(_SUMMED, group, *asked)) is not None:
        return result
    return _call(NORM, asked, group, eps, weight_offset, partition, timeout_s)


def fused_matmul_reducescatter_residual_rmsnorm(
    a: T,
    w: T,
    residual: T,
    weight: T,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    partition: NormPartition = "auto",
    group: Group = None,
    a_scale: T | None = None,
    w_scale: T | None = None,
    timeout_s: float | None = None,
) -> tuple[T, T]:
    """Returns the root-mean-square norm of this rank's rows of the sum of ``a @ w.T`` plus a residual, and that total.

    The rows are split as by :func:`fused_matmul_reducescatter`: lengths differ by at most one, and earlier ranks have
    the longer parts. Each rank's product is accumulated in fp32 and rounded to its dtype. The products are added in
    fp32 in rank order, and their sum is rounded. residual_out and normed are then computed as by
    :func:`reducescatter_residual_rmsnorm`.
    ``graphar.reference.fused_matmul_reducescatter_residual_rmsnorm`` is the specification, except for the order in
    which a product is accumulated, which depends on the device.

    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in the same order.

    Differentiable.

    Args:
        a: this rank's [M, ..., K], bf16, fp16 or fp32, or with scales torch.float8_e4m3fn, or a list with one for each
            device of this process. Shapes are equal on all ranks but for K.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. The transpose of a [K, N] tensor is not copied.
        residual: [M_r, ..., N], this rank's rows, of the dtype of ``a``, or with scales bf16 or fp16; it is not
            changed. M_r is the length of this rank's part. For a list a list.
        weight: [N], of the dtype of ``residual``. For a list a list.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        partition: "none": multiply, then sum and norm in one kernel. "tiles": multiply and sum in one kernel, for
            16-bit results on sm_90 and N a multiple of 8, then norm in another. "auto": the choice of the tuning table.
            "batch_invariant": as "auto", but only with graphar's matmul, so that the bits of a row do not depend on the
            number of rows. "tp_invariant": leaves of K are added in fp32 as a tree, then the residual, and rounded
            once. The results and the gradients have the same bits on 1, 2, 4 and 8 ranks of equal K.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, with any strides: of rows [..., 1], or one number; of
            blocks of 128 columns [..., ceil(K / 128)]. For a list a list. Products are those of
            ``graphar.reference.scaled_linear``, rounded to the dtype of ``residual``, which is bf16 or fp16; there are
            no gradients. None: no scales.
        w_scale: fp32 scales of ``w`` in torch.float8_e4m3fn, of the same format: of rows [N, 1], [1, N], or one number;
            of blocks of 128 x 128 [ceil(N / 128), ceil(K / 128)]. For a list a list.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``residual``. For lists, two lists.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        UnsupportedError: partition is "batch_invariant" or "tp_invariant", and graphar's matmul cannot serve it.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    scales = () if a_scale is None and w_scale is None else (a_scale, w_scale)
    kinds = type(eps), type(weight_offset), type(timeout_s)
    asked = (a, w, *scales, residual, weight), (eps, weight_offset, partition, timeout_s, kinds), None
    if (result := repeated(_SCATTERED, group, *asked)) is not None:
        return result
    return _call(SCATTERED_NORM, asked, group, eps, weight_offset, partition, timeout_s)


def _call(op: Op, asked: Asked, group: Group, eps, weight_offset, partition, timeout_s) -> Any:
    """Makes a call as the user asked for it, and returns its results as users get them."""
    (a, w, *scales, residual, weight), name, alone = asked[0], op.name, partition == TP_INVARIANT
    call_checks.check_call(name, "auto", timeout_s)
    if partition not in PARTITIONS:
        raise ValueError(f"{name}: partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    ranks = options.by_rank(name, a=a, w=w, residual=residual, weight=weight)
    of_scales = (*scales, _dtype_beside_scaled(name, ranks)) if scales else (None, None, None)
    scaled = matmul_operands.check(name, a, w, None, of_scales, partition)
    numbers = options.check_numbers(name, eps=eps, weight_offset=weight_offset)
    where, lengths = parts.of_rows(name, "a", a, group, alone) if op.takes("sizes") else ({}, None)
    for at, (x, w_of_rank, residual_of_rank, weight_of_rank) in enumerate(ranks):
        if not scales:
            options.check_float(name, "a", x)
        if not w_of_rank.shape[0]:
            raise ValueError(f"{name}: w must have rows, got the shape {list(w_of_rank.shape)}")
        rows = x.shape[:-1] if lengths is None else (lengths[at], *x.shape[1:-1])
        shape, dtype = (*rows, w_of_rank.shape[0]), scaled.get("scaled_dtype")
        options.check_beside(name, "residual", residual_of_rank, shape, x, dtype)
        options.check_beside(name, "weight", weight_of_rank, shape[-1:], x, dtype)
    norms.prepare_gradients(name, ranks)
    communicator = engine_name(group, name, alone=alone and not isinstance(a, (list, tuple)))
    how = where | numbers | {"partition": partition, "timeout_s": timeout_s, "scales": scaled.get("scales", [])}
    return op(a, w, residual, weight, asked=asked, communicator=communicator, **how)


def _dtype_beside_scaled(op: str, ranks: Sequence[tuple]) -> torch.dtype | None:
    """Returns the dtype of the residuals of a call with scales, which its results have; None without ranks."""
    for _, _, residual, weight in ranks:
        for name, x in (("residual", residual), ("weight", weight)):
            tensor_checks.check_tensor(op, name, x)
            matmul_operands.check_no_gradient(op, name, x)
        if residual.dtype != ranks[0][2].dtype or residual.dtype not in matmul_operands.RESULT_DTYPES:
            raise ValueError(f"{op}: with scales residual must be bfloat16 or float16, got {residual.dtype}")
    return ranks[0][2].dtype if ranks else None


class _Normed(Op):
    tensors = ("a", "w", "residual", "weight")
    has_several = True
    needed = ("a", "w", "weight")
    saved_result = 1

    def fake(self, a, w, residual, weight, arguments: Arguments) -> list[tuple[torch.Tensor, ...]]:
        """Returns uninitialised tensors for each rank's results: normed rows, and the new residual."""
        return [norms.empty("like_input", rows) for rows in residual]

    def run(self, engine: Engine, a, w, residual, weight, outs, arguments: Arguments):
        """Writes each rank's results: normed rows, and the new residual."""
        counts, norm = matmul_operands.summed_rows(engine, a, arguments), (arguments.eps, arguments.weight_offset)
        how = matmul_operands.multiplied(self.name, a, w, arguments)
        work = Product(self.name, tuple(counts), w[0].shape[0], norm=norm, **how)
        ranks = options.operands([*matmul_operands.lists(a, w, arguments), residual, weight], outs)
        return engine.run(Call.of(work, residual[0], timeout_s=arguments.timeout_s), ranks), ranks

    def check(self, engine: Engine, a, w, residual, weight, arguments: Arguments) -> None:
        matmul_sums.check(self, engine, a, arguments)
        if self is SCATTERED_NORM:
            parts.check(self.name, engine, arguments, [len(rows) for rows in residual])

    def backward(self, ctx, gradients, saved, _):
        """Returns the gradients. Rounding is treated as the identity."""
        of_rows, of_weights = matmul_gradients.of_norms(ctx, saved, gradients)
        return *matmul_gradients.of_operands(ctx, of_rows, *saved[:2]), of_rows, of_weights, {}


_OPTIONS = ("partition", "scales", "eps", "weight_offset")
NORM = _Normed(_SUMMED, *_OPTIONS, "constant_weight")
SCATTERED_NORM = _Normed(_SCATTERED, *options.IN_PARTS, *_OPTIONS)
