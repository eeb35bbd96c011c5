"""Sums with residual and RMSNorm, of tensors and of products of matmuls, on every rank or of each rank's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Never, get_args

import torch
from torch.autograd.functional import vjp

from graphar.numerics import norm_gradients
from graphar.numerics.norms import ALLREDUCE_NORM, FP8, REDUCESCATTER_NORM, output_of, scales_of
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops import matmul_operands, matmul_sums, options, parts
from graphar.ops.gradients import of_operands, sums_as_tree, world_size
from graphar.ops.options import T
from graphar.ops.register import Op, define, for_ranks
from graphar.ops.repeats import Asked, repeated
from graphar.plan.call import Call
from graphar.plan.work import Norm, Product
from graphar.runtime.bind import residual_norm
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

_MATMUL_NORM, _MATMUL_SCATTER = "fused_matmul_allreduce_residual_rmsnorm", "fused_matmul_reducescatter_residual_rmsnorm"
NormPartition = Literal["auto", "tiles", "none", "batch_invariant", "tp_invariant"]
PARTITIONS = get_args(NormPartition)
_TENSORS = ("x", "residual", "weight", "scale")


def allreduce_residual_rmsnorm(
    x: T,
    residual: T,
    weight: T,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    scale: T | None = None,
    group_size: int | None = None,
    group: Group = None,
    timeout_s: float | None = None,
) -> tuple[T, ...]:
    """Returns the root-mean-square norm of the sum over all ranks plus a residual, and that total, from one kernel.

    residual_out = total + residual, rounded to the dtype, where total is the rounded sum;
    normed = (residual_out / sqrt(mean(residual_out**2) + eps)) * (weight + weight_offset), in fp32 and rounded once.
    The mean is over the last dimension (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019).
    ``graphar.reference.allreduce_residual_rmsnorm`` is the specification: every rank, size and device gives its bits.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls, with equal shapes and dtypes, in the same order. Differentiable, except for FP8.

    Args:
        x: [..., columns], bf16, fp16 or fp32: this rank's tensor, or a list with one for each device of this process.
        residual: like ``x``, equal on every rank; it is not changed. For a list a list, one per device.
        weight: [columns], of the dtype of ``x``, equal on every rank. For a list a list, one per device.
        eps: added to the mean square; not negative.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        out_dtype: torch.float8_e4m3fn: the normed result is normed * (1 / scale), computed in fp32, rounded to nearest
            and saturated; times the scale it is the normed value. None: the dtype of ``x``.
        scale: one scale for the whole FP8 result: one positive fp32 element on the device of ``x``, equal on every
            rank; for a list a list. None: each row has its own, its largest magnitude / 448, as in torch._scaled_mm.
        group_size: 128: for FP8, each 128 columns of a row have their own scale. The columns are a multiple of 128.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``x``. For FP8 without ``scale``: (normed, residual_out, scales),
        with fp32 scales [..., 1], or [..., columns / 128] with ``group_size``. For lists, lists of these.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    tensors = (x, residual, weight) if scale is None else (x, residual, weight, scale)
    kinds = type(eps), type(weight_offset), type(group_size), type(timeout_s)
    how = eps, weight_offset, out_dtype, group_size, timeout_s, kinds
    if (result := repeated(ALLREDUCE_NORM, group, tensors, how)) is not None:
        return result
    return _call(NORM, (tensors, how, None), group, eps, weight_offset, out_dtype, group_size, timeout_s)


def reducescatter_residual_rmsnorm(
    x: T,
    residual: T,
    weight: T,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    scale: T | None = None,
    group_size: int | None = None,
    group: Group = None,
    timeout_s: float | None = None,
) -> tuple[T, ...]:
    """Returns the root-mean-square norm of this rank's rows of the sum plus a residual, and that total; in one kernel.

    The rows are split as by :func:`reducescatter` along the first dimension: lengths differ by at most one, and earlier
    ranks have the longer parts. The results have the bits of these rows in :func:`allreduce_residual_rmsnorm`.
    ``graphar.reference.reducescatter_residual_rmsnorm`` is the specification.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls, with equal shapes and dtypes, in the same order. Differentiable, except for FP8.

    Args:
        x: [M, ..., columns], bf16, fp16 or fp32: this rank's tensor, or a list with one per device of this process.
        residual: [M_r, ..., columns], this rank's rows, of the dtype of ``x``; it is not changed. M_r is the length of
            this rank's part. For a list a list, one per device.
        weight: [columns], of the dtype of ``x``. For a list a list, one per device.
        eps: added to the mean square; not negative.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        out_dtype: torch.float8_e4m3fn, as in :func:`allreduce_residual_rmsnorm`. None: the dtype of ``x``.
        scale: one scale for the whole FP8 result: one positive fp32 element on the device of ``x``; for a list a list,
            one per device. None: each row has its own scale, its largest magnitude / 448.
        group_size: 128: for FP8, each 128 columns of a row have their own scale. The columns are a multiple of 128.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``residual``. For FP8 without ``scale``: (normed, residual_out,
        scales), with fp32 scales [..., 1], or [..., columns / 128] with ``group_size``. For lists, lists of these.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    tensors = (x, residual, weight) if scale is None else (x, residual, weight, scale)
    kinds = type(eps), type(weight_offset), type(group_size), type(timeout_s)
    how = eps, weight_offset, out_dtype, group_size, timeout_s, kinds
    if (result := repeated(REDUCESCATTER_NORM, group, tensors, how)) is not None:
        return result
    return _call(SCATTERED_NORM, (tensors, how, None), group, eps, weight_offset, out_dtype, group_size, timeout_s)


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

    Each rank's product is accumulated in fp32 and rounded to its dtype; total is their fp32 sum in rank order, rounded.
    residual_out = total + residual, rounded to the dtype;
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
        eps: added to the mean square; not negative.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        partition: "none": multiply, then sum and norm in one kernel. "tiles": multiply and sum in one kernel, for
            16-bit results on sm_90 and N a multiple of 8, then norm in another. "auto": the choice of the tuning table.
            "batch_invariant": as "auto", but only with graphar's matmul, so that the bits of a row do not depend on the
            number of rows. "tp_invariant": leaves of K are added in fp32 as a tree, then the residual, and rounded
            once. The results and the gradients have the same bits on 1, 2, 4 and 8 ranks of equal K.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        a_scale: fp32 scales of ``a``, with any strides: of rows [..., 1], or one number; of blocks of 128 columns
            [..., ceil(K / 128)]. For a list a list. Products are as by ``graphar.reference.scaled_linear``, rounded
            to the dtype of ``residual``, without gradients. None: no scales.
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
        options.check_removed(_MATMUL_NORM, removed)
    scales = () if a_scale is None and w_scale is None else (a_scale, w_scale)
    kinds = type(eps), type(weight_offset), type(timeout_s)
    asked = (a, w, *scales, residual, weight), (eps, weight_offset, partition, timeout_s, kinds), None
    if (result := repeated(_MATMUL_NORM, group, *asked)) is not None:
        return result
    return _call_matmul(MATMUL_NORM, asked, group, eps, weight_offset, partition, timeout_s)


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

    The rows are split as by torch.tensor_split: lengths differ by at most one, and earlier ranks have the longer parts.
    Each rank's product is accumulated in fp32 and rounded to its dtype. The products are added in fp32 in rank order,
    and their sum is rounded. residual_out and normed are then computed as by :func:`reducescatter_residual_rmsnorm`.
    ``graphar.reference.fused_matmul_reducescatter_residual_rmsnorm`` is the specification, except for the order in
    which a product is accumulated, which depends on the device.

    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in the same order. Differentiable.

    Args:
        a: this rank's [M, ..., K], bf16, fp16 or fp32, or with scales torch.float8_e4m3fn, or a list with one for each
            device of this process. Shapes are equal on all ranks but for K.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. The transpose of a [K, N] tensor is not copied.
        residual: [M_r, ..., N], this rank's rows, of the dtype of ``a``, or with scales bf16 or fp16; it is not
            changed. M_r is the length of this rank's part. For a list a list.
        weight: [N], of the dtype of ``residual``. For a list a list.
        eps: added to the mean square; not negative.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        partition: "none": multiply, then sum and norm in one kernel. "tiles": multiply and sum in one kernel, for
            16-bit results on sm_90 and N a multiple of 8, then norm in another. "auto": the choice of the tuning table.
            "batch_invariant": as "auto", but only with graphar's matmul, so that the bits of a row do not depend on the
            number of rows. "tp_invariant": leaves of K are added in fp32 as a tree, then the residual, and rounded
            once. The results and the gradients have the same bits on 1, 2, 4 and 8 ranks of equal K.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        a_scale: fp32 scales of ``a``, with any strides: of rows [..., 1], or one number; of blocks of 128 columns
            [..., ceil(K / 128)]. For a list a list. Products are as by ``graphar.reference.scaled_linear``, rounded
            to the dtype of ``residual``, without gradients. None: no scales.
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
    if (result := repeated(_MATMUL_SCATTER, group, *asked)) is not None:
        return result
    return _call_matmul(MATMUL_SCATTERED_NORM, asked, group, eps, weight_offset, partition, timeout_s)


def _numbers(op: str, eps: object, weight_offset: object) -> dict[str, float]:
    return {
        "eps": options.check_number(op, "eps", eps, least=0),
        "weight_offset": options.check_number(op, "weight_offset", weight_offset),
    }


def _call(op: Op, asked: Asked, group: Group, eps, weight_offset, out_dtype, group_size, timeout_s) -> Any:
    tensors, name = asked[0], op.name
    call_checks.check_call(name, "auto", timeout_s)
    numbers = _numbers(name, eps, weight_offset)
    options.check_input(name, tensors[0])
    ranks = options.by_rank(name, **dict(zip(_TENSORS, tensors, strict=False)))
    for x, *_ in ranks:
        options.check_rows(name, "x", x)
    where, lengths = parts.of_rows(name, "x", tensors[0], group) if op.takes("sizes") else ({}, None)
    output = ""
    for at, (x, residual, weight, *scales) in enumerate(ranks):
        shape = x.shape if lengths is None else (lengths[at], *x.shape[1:])
        options.check_beside(name, "residual", residual, shape, x)
        options.check_beside(name, "weight", weight, x.shape[-1:], x)
        for scale in scales:
            tensor_checks.check_tensor(name, "scale", scale)
            if (scale.numel(), scale.dtype, scale.device) != (1, torch.float32, x.device):
                got = f"{list(scale.shape)} {scale.dtype} on {scale.device}"
                raise ValueError(f"{name}: scale must be one element, torch.float32, on {x.device}, got {got}")
        output = output_of(name, x.dtype, x.shape[-1], out_dtype, scales[0] if scales else None, group_size)
    _prepare_gradients(name, ranks, output)
    scales = [scale for _, _, _, *of_rank in ranks for scale in of_rank]
    how = where | numbers | {"output": output, "scales": scales, "timeout_s": timeout_s}
    return op(*tensors[:3], asked=asked, communicator=engine_name(group, name), **how)


def _call_matmul(op: Op, asked: Asked, group: Group, eps, weight_offset, partition, timeout_s) -> Any:
    (a, w, *scales, residual, weight), name, alone = asked[0], op.name, partition == TP_INVARIANT
    call_checks.check_call(name, "auto", timeout_s)
    if partition not in PARTITIONS:
        raise ValueError(f"{name}: partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    ranks = options.by_rank(name, a=a, w=w, residual=residual, weight=weight)
    of_scales = (*scales, _dtype_beside_scaled(name, ranks)) if scales else (None, None, None)
    scaled = matmul_operands.check(name, a, w, None, of_scales, partition)
    numbers = _numbers(name, eps, weight_offset)
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
    _prepare_gradients(name, ranks)
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


def _prepare_gradients(op: str, ranks: Sequence[Sequence[torch.Tensor]], output: str = "like_input") -> None:
    """Loads what a backward pass needs: to do so beside a kernel that waits could hang. ValueError if there is none."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for of_rank in ranks for tensor in of_rank):
        return
    if output != "like_input":
        raise ValueError(f"{op}: FP8 cannot be differentiated; omit out_dtype, or call under torch.no_grad()")
    for *_, weight in () if torch.compiler.is_compiling() else ranks:
        if weight.is_cuda and residual_norm.serves_backward(weight):
            residual_norm.load_backward(weight.device.index, weight.dtype, weight.numel())


def empty(output: str, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns uninitialised, contiguous tensors for a rank's results: normed rows, the new residual, perhaps scales."""
    shape, new = residual.shape, residual.new_empty
    made = [new(shape, dtype=residual.dtype if output == "like_input" else FP8), new(shape)]
    if each := scales_of(output, shape[-1]):
        made.append(new((*shape[:-1], each), dtype=torch.float32))
    return tuple(made)


class _Norms(Op):
    tensors = _TENSORS[:3]
    has_several = True
    needed = ("weight",)
    saved_result = 1

    def fake(self, *call: Any) -> list[tuple[torch.Tensor, ...]]:
        *_, residuals, _, arguments = call
        output = arguments.output if self.takes("output") else "like_input"
        return [empty(output, residual) for residual in residuals]

    def run(self, engine: Engine, *call: Any):
        xs, residuals, weights, outs, arguments = call
        lists = [xs, residuals, weights, *([arguments.scales] if arguments.scales else [])]
        ranks = options.operands([[tensor.contiguous() for tensor in tensors] for tensors in lists], outs)
        x = ranks[0].inputs[0]
        counts = parts.counts_of(x, arguments.sizes) if self.takes("sizes") else (x.numel(),)
        numbers = arguments.eps, arguments.weight_offset
        work = Norm(self.name, counts, x.shape[-1], arguments.output, *numbers, row=tuple(x.shape[1:]))
        return engine.run(Call.of(work, x, timeout_s=arguments.timeout_s), ranks), ranks

    def check(self, engine: Engine, *call: Any) -> None:
        xs, *_, residuals, _, arguments = call
        if self.takes("sizes"):
            parts.check(self.name, engine, arguments, [len(x) for x in xs], whole=True)
            parts.check(self.name, engine, arguments, [len(rows) for rows in residuals])

    def backward(self, ctx, gradients, saved, _) -> tuple:
        """Returns the gradients. Rounding is treated as the identity."""
        of_rows, of_weights = _of_rows_and_weights(ctx, saved, gradients)
        op = "allgather" if self.takes("sizes") else "allreduce"
        return for_ranks(ctx, op, of_rows, **ctx.where), of_rows, of_weights, {}


class _MatmulNorms(_Norms):
    tensors = ("a", "w", "residual", "weight")
    needed = ("a", "w", "weight")

    def run(self, engine: Engine, *call: Any):
        a, w, residual, weight, outs, arguments = call
        counts = matmul_operands.rows_of_ranks(self, engine, a, arguments)
        how = matmul_operands.multiplied(self, a, w, arguments)
        work = Product(self.name, counts, w[0].shape[0], norm=(arguments.eps, arguments.weight_offset), **how)
        ranks = options.operands([*matmul_operands.lists(a, w, arguments.scales), residual, weight], outs)
        return engine.run(Call.of(work, residual[0], timeout_s=arguments.timeout_s), ranks), ranks

    def check(self, engine: Engine, *call: Any) -> None:
        super().check(engine, *call)
        matmul_sums.check_leaves(self.name, engine, call[0], call[-1])

    def backward(self, ctx, gradients, saved, _) -> tuple:
        of_rows, of_weights = _of_rows_and_weights(ctx, saved, gradients, ctx.arguments.partition == TP_INVARIANT)
        return *of_operands(ctx, of_rows, *saved[:2]), of_rows, of_weights, {}


_OPTIONS = ("eps", "weight_offset", "output", "scales")
_MATMUL_OPTIONS = ("partition", "scales", "eps", "weight_offset")
NORM, SCATTERED_NORM = _Norms(ALLREDUCE_NORM, *_OPTIONS), _Norms(REDUCESCATTER_NORM, *options.IN_PARTS, *_OPTIONS)
MATMUL_NORM = _MatmulNorms(_MATMUL_NORM, *_MATMUL_OPTIONS, "constant_weight")
MATMUL_SCATTERED_NORM = _MatmulNorms(_MATMUL_SCATTER, *options.IN_PARTS, *_MATMUL_OPTIONS)


def _of_rows_and_weights(ctx, saved: Sequence, gradients: Sequence, is_invariant: bool = False) -> tuple[list, list]:
    """Returns the gradients of each rank's rows before the norm, and of its weight; None for a weight that needs none.

    ``gradients`` are of normed rows and of the rows, rank by rank. None: zeros. If each rank norms its part of
    the rows, the weights' gradients cover these rows only, unless a call of processes is to be invariant.
    """
    *_, weights, summed = saved
    dtype = weights[0].dtype
    of_all_rows = is_invariant and "sizes" in ctx.where and not ctx.in_list
    ranks = world_size(ctx) if of_all_rows else int(is_invariant)
    numbers, backward = (ctx.arguments.eps, ctx.arguments.weight_offset), torch.ops.graphar.residual_rmsnorm_backward
    of_ranks, of_rows, of_weights = zip(gradients[::2], gradients[1::2], summed, weights, strict=True), [], []
    for (of_normed, of_summed, rows, weight), wanted in zip(of_ranks, ctx.needs["weight"], strict=True):
        if of_normed is None:
            results = torch.zeros_like(rows) if of_summed is None else of_summed, torch.zeros_like(weight)
        else:
            results = backward(of_normed, of_summed, rows, weight, *numbers, wanted, ranks)
        of_rows.append(results[0])
        of_weights.append(results[1] if wanted else None)
    if of_all_rows and of_weights[0] is not None:
        of_weights = sums_as_tree(ctx, of_weights, dtype)
    return of_rows, [None if gradient is None else gradient.to(dtype) for gradient in of_weights]


def _fake(of_normed, of_summed, summed, weight, eps, weight_offset, of_weight, ranks):
    of_weights = weight.new_empty(weight.shape if of_weight else 0, dtype=torch.float32 if ranks else None)
    return summed.new_empty(summed.shape), of_weights


def _residual_rmsnorm_backward(of_normed, of_summed, summed, weight, eps, weight_offset, of_weight, ranks):
    of_normed, summed, weight = (x.contiguous() for x in (of_normed, summed, weight))
    of_summed = None if of_summed is None else of_summed.contiguous()
    whole, columns = of_weight and not ranks, weight.numel()
    if residual_norm.serves_backward(summed):
        of_rows, of_w = residual_norm.backward(of_normed, of_summed, summed, weight, eps, weight_offset, whole)
    else:
        of_rows, of_w = norm_gradients.specification(of_normed, of_summed, summed, weight, eps, weight_offset)
    if of_weight and ranks:
        rows = of_normed.view(-1, columns), summed.view(-1, columns)
        return of_rows, norm_gradients.weight_partial(*rows, eps, ranks)
    return of_rows, of_w if of_weight else weight.new_empty(0)


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.eps, ctx.offset, ctx.of_weight, _ = inputs
    ctx.save_for_backward(*tensors)


def _second_derivatives(ctx, gradient_of_rows, gradient_of_weight):
    of_normed, of_summed, summed, weight = ctx.saved_tensors
    results = 2 if ctx.of_weight else 1

    def gradients_of_norm(of_normed, of_summed, summed, weight):
        return norm_gradients.differentiable(of_normed, of_summed, summed, weight, ctx.eps, ctx.offset)[:results]

    inputs = of_normed, torch.zeros_like(summed) if of_summed is None else of_summed, summed, weight
    of_first, of_second, *others = vjp(gradients_of_norm, inputs, (gradient_of_rows, gradient_of_weight)[:results])[1]
    return of_first, None if of_summed is None else of_second, *others, None, None, None, None


define(
    "residual_rmsnorm_backward(Tensor of_normed, Tensor? of_summed, Tensor summed, Tensor weight, float eps, "
    "float weight_offset, bool of_weight, int ranks) -> (Tensor, Tensor)",
    _residual_rmsnorm_backward,
    _fake,
    _second_derivatives,
    _keep,
)
