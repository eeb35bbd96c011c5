"""Sums over ranks: graphar.allreduce, on every rank, and graphar.reducescatter, each rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Never

import torch

from graphar.numerics import leaf_tree
from graphar.numerics.codecs import Codec, CodecName
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import AppliedEpilogue, Epilogue
from graphar.numerics.epilogues.syntax import parse
from graphar.numerics.partitions import split
from graphar.ops import options, parts
from graphar.ops.gradients import of_sums_before_epilogue
from graphar.ops.options import Arguments, T
from graphar.ops.register import Op, for_ranks
from graphar.ops.repeats import Asked, repeated
from graphar.plan.algorithms import AllReduceAlgorithm, ReduceScatterAlgorithm
from graphar.plan.call import Call
from graphar.plan.work import Parts, Sum
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

ALLREDUCE, REDUCESCATTER = "allreduce", "reducescatter"


def allreduce(
    x: T,
    group: Group = None,
    *,
    out: T | None = None,
    algorithm: AllReduceAlgorithm = "auto",
    codec: Codec | CodecName | None = None,
    residual: T | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    timeout_s: float | None = None,
    **removed: Never,
) -> T:
    """Returns the sum over all ranks, on every rank, accumulated in fp32 in rank order and rounded once.

    fp64 is accumulated in fp64. Every rank, exact algorithm, size and device gives the same bits, which
    ``graphar.reference.allreduce`` specifies. "auto" takes only exact algorithms. The result is contiguous, or ``out``.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls, with equal shapes and dtypes, in the same order.
    Differentiable: the gradient of ``x`` is the sum of the ranks' gradients. If all ranks compute the same loss, as in
    tensor parallelism, that is the number of ranks times the gradient of the loss.

    Args:
        x: this rank's tensor, or a list with one for each device of this process, of any shape, strides and alignment.
            bf16, fp16 and fp32 run in graphar's kernels; fp64 and integers over torch.distributed, and exact too.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        out: a tensor like ``x`` for the result: ``x`` itself, or one that shares no memory with it. Not differentiable.
        algorithm: "auto", an all-reduce of :class:`graphar.Algorithm`, or one from :func:`graphar.load_algorithm`. The
            multimem algorithms change the bits. "hierarchical" adds host by host, as
            ``graphar.reference.hierarchical_allreduce`` does.
        codec: the format on the wire, a :class:`graphar.Codec` or the name of one, such as "int8": fewer bits, less
            precision. Each rank's tensor is rounded once, and the sum once more. All ranks get the same bits, specified
            by ``graphar.reference.quantized_allreduce``. The gradient is rounded too. For bf16, fp16 and fp32.
        residual: with a codec, the rounding errors of earlier calls (error feedback): a contiguous tensor like ``x``
            that shares no memory with ``x`` or ``out``, zeros before the first call. The call adds it to ``x``, and
            writes the rounding error into it, or zeros where a bucket became NaN. A call that raises leaves it as it
            was. If a kernel fails, which a later call raises, its content is undefined. Not differentiable.
        epilogue: elementwise work on the fp32 sum before it is rounded: a :class:`graphar.Epilogue`, or an expression
            or a function without arguments, such as "-v". Not with a codec. For bf16, fp16 and fp32.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Raises:
        TypeError, ValueError, UnsupportedError: an argument breaks a rule, or ``algorithm`` cannot serve the call.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    if removed:
        options.check_removed(ALLREDUCE, removed)
    tensors = (x,) if residual is None else (x, residual)
    how = algorithm, timeout_s, type(timeout_s), codec
    if (result := repeated(ALLREDUCE, group, tensors, how, epilogue, out)) is not None:
        return result
    asked = tensors, how, epilogue
    return _call(SUM, x, group, asked, out, algorithm=algorithm, codec=codec, residual=residual, timeout_s=timeout_s)


def reducescatter(
    x: T,
    group: Group = None,
    *,
    axis: int = 0,
    algorithm: ReduceScatterAlgorithm = "auto",
    codec: Codec | CodecName | None = None,
    residual: T | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    timeout_s: float | None = None,
    **removed: Never,
) -> T:
    """Returns this rank's part of the sum over all ranks: the bits of :func:`allreduce`, split along ``axis``.

    The sum is split as by torch.tensor_split: lengths differ by at most one, and earlier ranks have the longer parts.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls, with equal shapes and dtypes, in the same order. Differentiable: the gradient of ``x`` is the
    all-gather of the ranks' gradients.

    Args:
        x: this rank's tensor of at least one dimension, any strides and alignment; or a list, one per device of this
            process. bf16, fp16 and fp32 run in graphar's kernels; fp64 and integers over torch.distributed.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        axis: the dimension along which the sum is split. Any but the first costs a copy of input and output.
        algorithm: "auto", a reduce-scatter of :class:`graphar.Algorithm`, or one from :func:`graphar.load_algorithm`.
            With a codec, "auto".
        codec: the format on the wire, a :class:`graphar.Codec` or its name, such as "int8": fewer bits, less precision.
            Each rank's tensor is rounded once, part by part, and the sum only to the dtype, as specified by
            ``graphar.reference.quantized_reducescatter``. The gradient is the exact sum's. For bf16, fp16 and fp32.
        residual: with a codec, the rounding errors of earlier calls (error feedback): a contiguous tensor like ``x``
            that shares no memory with it, zeros before the first call. The call adds it to ``x``, and writes the
            rounding error into it. After an error its content is what :func:`allreduce` says.
        epilogue: elementwise work on this rank's part of the fp32 sum before it is rounded: a
            :class:`graphar.Epilogue`, or an expression or a function without arguments, such as "-v". row, col and
            index are positions in that part, and tensors have its shape. If ``axis`` is not the first dimension, an
            expression may use only col; if it is the last, none of them. Not with a codec. For bf16, fp16 and fp32.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        A contiguous tensor, for a list one per device.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    if removed:
        options.check_removed(REDUCESCATTER, removed)
    tensors = (x,) if residual is None else (x, residual)
    how = axis, type(axis), algorithm, codec, timeout_s, type(timeout_s)
    if (result := repeated(REDUCESCATTER, group, tensors, how, epilogue)) is not None:
        return result
    options_of_sum = {"algorithm": algorithm, "codec": codec, "residual": residual, "timeout_s": timeout_s}
    return _call(SCATTER, x, group, (tensors, how, epilogue), axis=axis, **options_of_sum)


def _call(op: Op, x, group: Group, asked: Asked, out=None, *, algorithm, codec, residual, timeout_s, axis=0) -> Any:
    name, epilogue, in_list = op.name, asked[2], isinstance(x, (list, tuple))
    options.check_together(name, codec, epilogue, residual)
    if op is SCATTER and codec is not None and algorithm != "auto":
        raise ValueError(f"{name}: takes a codec or an algorithm, not both")
    call_checks.check_call(name, "auto" if codec is not None else algorithm, timeout_s, name)
    communicator = engine_name(group, name)
    options.check_input(name, x)
    xs = list(x) if in_list else [x]
    part, where = xs[0], {}
    if op is SCATTER:
        axis = call_checks.check_axis(name, part, axis)
        rank, world_size = (-1, len(xs)) if in_list else parts.place(group)
        where = {"rank": rank, "axis": axis, "sizes": split(part.shape[axis], world_size)}
        part = part.narrow(axis, 0, where["sizes"][max(rank, 0)]) if epilogue is not None else part
    how = options.epilogue_option(name, epilogue, part, len(xs) if in_list else None, where.get("axis"))
    how |= {"communicator": communicator, "algorithm": str(algorithm), "timeout_s": timeout_s, **where}
    how["codec"] = options.codec_option(name, codec, residual)
    if out is None and residual is None:
        return op(x, asked=asked, **how)
    written = {what: tensors for what, tensors in (("residual", residual), ("out", out)) if tensors is not None}
    for what, tensors in written.items():
        for like, tensor in options.by_rank(name, **{"x": x, what: tensors}):
            tensor_checks.check_out(name, like, tensor, what)
    if out is None:
        made = op.fake(xs, Arguments(op.complete(how)))
        out = made if in_list else made[0]
    residuals = [] if residual is None else residual if in_list else [residual]
    op.into(x, residuals, out, asked=asked, **how)
    return list(out) if in_list else out


class _Sums(Op):
    def fake(self, xs, arguments: Arguments) -> list[torch.Tensor]:
        dtype = arguments.out_dtype
        if self is SUM:
            return [torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format) for x in xs]
        sizes = zip(xs, parts.own_sizes(arguments), strict=True)
        return [parts.with_length(x, arguments.axis, size, dtype) for x, size in sizes]

    def run(self, engine: Engine, xs, outs, arguments: Arguments, residuals=()):
        codec, order, axis = arguments.codec, (arguments.order, arguments.out_dtype), 0
        if codec:
            call_checks.check_quantized_call(self.name, codec, arguments.algorithm, xs[0])
        if self is SCATTER:
            axis = arguments.axis
            rows, rooms = [parts.rows_of(x, axis) for x in xs], [parts.room_for(out, axis) for out in outs]
            errors, symmetric = [parts.rows_of(x, axis) for x in residuals], False
            followed = self._applied_to_parts(arguments, rooms)
            counts, row = parts.counts_of(rows[0], arguments.sizes), tuple(rows[0].shape[1:])
            work = Parts(self.name, counts, codec, followed and followed.form, axis, "", row, *order)
        else:
            rows, rooms, errors = [x.contiguous() for x in xs], outs, residuals
            followed = options.applied(self.name, arguments, rows)
            symmetric = not codec and engine.is_symmetric(rooms)
            work = Sum(rows[0].numel(), codec, followed and followed.form, tuple(rows[0].shape), *order)
        how = {"algorithm": arguments.algorithm, "timeout_s": arguments.timeout_s, "symmetric": symmetric}
        ranks = options.operands([rows, *([errors] if errors else [])], [(room,) for room in rooms], followed)
        plan = engine.run(Call.of(work, rows[0], **how), ranks)
        if not axis:
            return plan, ranks
        for written, to in zip((*rooms, *errors), (*outs, *residuals), strict=True):
            to.copy_(written.movedim(0, axis))
        return None

    def _applied_to_parts(self, arguments: Arguments, rooms: list[torch.Tensor]) -> AppliedEpilogue | None:
        """Returns the epilogue for parts that have the axis first. Its form is equal on all ranks."""
        if not arguments.epilogue:
            return None
        axis = arguments.axis
        known = {"row", "col", "index"} if axis == 0 else {"col"} if axis < rooms[0].ndim - 1 else set()
        if unknown := parse(arguments.epilogue).places - known:
            raise ValueError(
                f"{self.name}: along axis {axis} an epilogue cannot use {min(unknown)}; move axis to the front"
            )
        followed = options.applied(self.name, arguments, rooms)
        if followed and rooms[0].ndim == 1:  # any number of columns is right for a row, but ranks must have the same
            return followed._replace(form=replace(followed.form, columns=max(1, *arguments.sizes)))
        return followed

    def check(self, engine: Engine, xs, arguments: Arguments) -> None:
        """Raises ValueError unless ``xs`` can be added in the order of the call: a tree adds partials in fp32."""
        op, order, out_dtype = self.name, arguments.order, arguments.out_dtype
        if self is SCATTER:
            parts.check(op, engine, arguments, [x.shape[arguments.axis] for x in xs], whole=True)
        if order == "rank" and out_dtype is None:
            return
        if order not in ("rank", "tree"):
            raise ValueError(f"{op}: order must be 'rank' or 'tree', got {order!r}")
        if order == "rank":
            raise ValueError(f"{op}: out_dtype needs order='tree'; in the order of ranks the result has the dtype of x")
        if arguments.codec:
            raise ValueError(f"{op}: takes a codec or order='tree', not both")
        if xs[0].dtype != torch.float32:
            raise ValueError(f"{op}: order='tree' adds partials in float32, got {xs[0].dtype}")
        if out_dtype not in (None, *TYPE_NAMES):
            raise ValueError(f"{op}: out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
        leaf_tree.check_ranks(op, engine.world_size)

    def check_out(self, xs, outs, arguments: Arguments) -> None:
        may_be_input = self is SUM and arguments.out_dtype is None
        tensor_checks.check_apart(self.name, outs, **{} if may_be_input else {"x": xs})
        for x, out in zip(xs, outs, strict=True) if may_be_input else ():
            tensor_checks.check_memory(self.name, x, out)
        options.check_apart_from_epilogue(self.name, outs, arguments.tensors)

    def with_residuals(self, xs, residuals, outs, arguments: Arguments) -> Arguments:
        """Checks a call's residuals, and returns its arguments with a codec that stores rounding errors in them."""
        checked = call_checks.check_quantized_call(self.name, arguments.codec, arguments.algorithm, xs[0])
        tensor_checks.check_residuals(self.name, residuals, x=xs, out=outs)
        return Arguments(vars(arguments) | {"codec": replace(checked, feedback=True).text})

    def saved(self, arguments: Arguments) -> tuple[str, ...]:
        return ("x",) if arguments.epilogue else ()

    def backward(self, ctx, gradients, saved, tensors):
        """Returns the gradients. Rounding is treated as the identity."""
        more = ("order", "algorithm", "codec") if self is SUM else ("order",)
        again = ctx.where | {name: getattr(ctx.arguments, name) for name in more}
        of_sums, rest = of_sums_before_epilogue(ctx, self.name, again, gradients, saved[0], tensors)
        if self is SCATTER:
            of_sums = for_ranks(ctx, "allgather", of_sums, **ctx.where)
        if ctx.arguments.order == "tree":  # the summands were in fp32
            of_sums = [gradient.float() for gradient in of_sums]
        return for_ranks(ctx, ALLREDUCE, of_sums, **again) if self is SUM else of_sums, rest


_OPTIONS = (*options.FOLLOWED, "codec", "order", "out_dtype")
SUM = _Sums(ALLREDUCE, *_OPTIONS, "algorithm", with_out=True)
SCATTER = _Sums(REDUCESCATTER, *options.IN_PARTS, "axis", "algorithm", *_OPTIONS, with_out=True)
