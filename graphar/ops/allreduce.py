"""graphar.allreduce: the sum over all ranks, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Never

import torch

from graphar.numerics.codecs import Codec, CodecName
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.ops import options
from graphar.ops.epilogue_gradients import of_sums_before_epilogue
from graphar.ops.options import T
from graphar.ops.register import Op, check_input, check_output, for_ranks, is_plain
from graphar.ops.repeats import Asked, repeated
from graphar.plan.algorithms import AllReduceAlgorithm
from graphar.plan.call import Call
from graphar.plan.work import Sum
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

NAME = "allreduce"


@dataclass(eq=False)
class Arguments(options.Ordered):
    algorithm: str = "auto"


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
        x: this rank's tensor, or a list with one tensor for each device of this process, of any shape, strides and
            alignment. bf16, fp16 and fp32 run in graphar's kernels. fp64 and integers run over torch.distributed, and
            are exact too.
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
            was. A call whose kernel fails, which a later one raises, leaves it undefined. Not differentiable.
        epilogue: elementwise work on the fp32 sum before it is rounded: a :class:`graphar.Epilogue`, or an expression
            or a function without arguments, such as "-v". Not with a codec. For bf16, fp16 and fp32.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Raises:
        TypeError, ValueError, UnsupportedError: an argument breaks a rule, or ``algorithm`` cannot serve the call.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    if removed:
        options.check_removed(NAME, removed)
    tensors = (x,) if residual is None else (x, residual)
    how = algorithm, timeout_s, type(timeout_s), codec
    if (found := repeated(NAME, group, tensors, how, epilogue, out)) is not None:
        return found
    asked = tensors, how, epilogue
    return _allreduce(x, group, out, algorithm, codec, residual, epilogue, timeout_s, asked)


def _allreduce(x, group: Group, out, algorithm, codec, residual, epilogue, timeout_s, asked: Asked) -> Any:
    """Checks a call's arguments, and makes it through torch's dispatcher if that is needed."""
    options.check_together(NAME, codec, epilogue, residual)
    call_checks.check_call(NAME, "auto" if codec is not None else algorithm, timeout_s)
    name, in_list = engine_name(group, NAME), isinstance(x, (list, tuple))
    check_input(NAME, x)
    ranks, first = (len(x), x[0]) if in_list else (None, x)
    followed = options.epilogue_option(NAME, epilogue, first, ranks)
    given = Arguments(
        communicator=name,
        algorithm=str(algorithm),
        timeout_s=timeout_s,
        codec=options.codec_option(NAME, codec, residual),
        **followed,
    )
    plain = is_plain(x) and not options.needs_gradient(given.tensors)
    if out is None and residual is None:
        return OP(x, given=given, plain=plain, asked=asked)
    residuals = []
    if residual is not None:
        check_output(NAME, x, residual, "residual")
        residuals = list(residual) if in_list else [residual]
    if out is None:
        made = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (x if in_list else [x])]
        out = made if in_list else made[0]
    check_output(NAME, x, out)
    plain = plain and is_plain(out) and all(map(is_plain, residuals))
    OP.into(x, residuals, out, given=given, plain=plain, asked=asked)
    return list(out) if in_list else out


def _fake(xs, given: Arguments) -> list[torch.Tensor]:
    return [torch.empty_like(x.contiguous(), dtype=given.out_dtype) for x in xs]


def _run(engine: Engine, xs, outs, given: Arguments, residuals=()):
    """Writes the sum into every tensor of ``outs``, which are contiguous."""
    xs, codec = [x.contiguous() for x in xs], given.codec
    if codec:
        call_checks.check_quantized_call(NAME, codec, given.algorithm, xs[0])
    followed = options.applied(NAME, given, xs)
    call = Call.of(
        Sum(xs[0].numel(), codec, followed and followed.form, tuple(xs[0].shape), given.order, given.out_dtype),
        xs[0],
        algorithm=given.algorithm,
        timeout_s=given.timeout_s,
        symmetric=() if codec else engine.symmetric_sides(xs, outs),
    )
    ranks = options.operands_of_sum(xs, outs, followed, residuals)
    return engine.run(call, ranks), ranks


def _check(engine: Engine, xs, given: Arguments) -> None:
    options.check_order(NAME, engine, xs, given)


def _check_out(xs, outs, given: Arguments) -> None:
    for x, out in zip(xs, outs, strict=True):
        if given.out_dtype is None:
            tensor_checks.check_memory(NAME, x, out)
        else:
            tensor_checks.check_apart(NAME, out, x=x)
    options.check_apart_from_epilogue(NAME, outs, given.tensors)


def _with_feedback(xs, residuals, outs, given: Arguments) -> Arguments:
    return replace(given, codec=options.codec_with_feedback(NAME, given.codec, given.algorithm, xs, residuals, outs))


def _backward(ctx, gradients):
    """Returns the gradients. Rounding is treated as the identity."""
    call = {name: ctx.given[name] for name in ("communicator", "algorithm", "timeout_s", "codec", "order")}
    (xs,), tensors = OP.saved(ctx)
    of_sums, rest = of_sums_before_epilogue(ctx, NAME, call, gradients, xs, tensors)
    return for_ranks(ctx, NAME, options.gradients_in_order(call["order"], of_sums), **call), rest


OP = Op(
    NAME,
    ["x"],
    Arguments,
    _run,
    _fake,
    check=_check,
    check_out=_check_out,
    residual=_with_feedback,
    backward=_backward,
    saved=lambda given: ("x",) if given["epilogue"] else (),
)
