"""graphar.allreduce: the sum over all ranks, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.ops import options
from graphar.ops.epilogue_gradients import of_sums_before_epilogue
from graphar.ops.register import Op, check_input, check_output, deliver, for_ranks, is_ordinary, is_plain
from graphar.ops.repeats import can_repeat, repeat_of
from graphar.plan import call_checks, tensor_checks
from graphar.plan.call import NO_OPTIONS, Call
from graphar.runtime.engine import Engine, as_taken
from graphar.runtime.registry import Group, engine_name, engine_of, known_engine

NAME = "allreduce"
_REPLACED_EACH = 64  # calls, if unlike ones of one size take turns: to make a repeat takes as long as a call
_is_compiling = torch.compiler.is_dynamo_compiling  # other compilers have dispatch modes, or tensors of a subclass


@overload
def allreduce(
    x: torch.Tensor,
    group: Group = None,
    *,
    out: torch.Tensor | None = None,
    algorithm: str = "auto",
    codec: Codec | str | None = None,
    residual: torch.Tensor | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    prefetch: torch.Tensor | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor: ...
@overload
def allreduce(
    x: Sequence[torch.Tensor],
    group: Group = None,
    *,
    out: Sequence[torch.Tensor] | None = None,
    algorithm: str = "auto",
    codec: Codec | str | None = None,
    residual: Sequence[torch.Tensor] | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    prefetch: Sequence[torch.Tensor] | None = None,
    timeout_s: float | None = None,
) -> list[torch.Tensor]: ...
def allreduce(
    x,
    group=None,
    *,
    out=None,
    algorithm="auto",
    codec=None,
    residual=None,
    epilogue=None,
    prefetch=None,
    timeout_s=None,
):
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
        algorithm: "auto", or an all-reduce of :class:`graphar.Algorithm`. The multimem algorithms change the bits.
            "hierarchical" adds host by host, as ``graphar.reference.hierarchical_allreduce`` does.
        codec: the format on the wire, a :class:`graphar.Codec` or the name of one, such as "int8": fewer bits, less
            precision. Each rank's tensor is rounded once, and the sum once more. All ranks get the same bits, specified
            by ``graphar.reference.quantized_allreduce``. The gradient is rounded too. For bf16, fp16 and fp32.
        residual: with a codec, the rounding errors of earlier calls (error feedback): a contiguous tensor like ``x``
            that shares no memory with ``x`` or ``out``, zeros before the first call. The call adds it to ``x``, and
            writes the rounding error into it, or zeros where a bucket became NaN. Not differentiable.
        epilogue: elementwise work on the fp32 sum before it is rounded: a :class:`graphar.Epilogue`, or an expression
            or a function without arguments, such as "-v". Not with a codec. For bf16, fp16 and fp32.
        prefetch: memory that is read next, such as the weight of the next matmul: a tensor on the device of ``x``, for
            a list one per device. "one_shot_push" and "two_shot_push" bring up to 4 MB of it into L2 while they wait,
            for sums of at most 2 MB, on sm_90 and newer. Other calls, and calls with a codec or an epilogue, ignore it.
            It changes no result. Like ``x``, it must outlive graphs captured with it.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Raises:
        TypeError, ValueError, UnsupportedError: an argument breaks a rule, or ``algorithm`` cannot serve the call.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    if codec is None and residual is None and epilogue is None and prefetch is None:
        engine = None
        if not _is_compiling() and type(x) is torch.Tensor and (engine := known_engine(group)) is not None:
            repeat = engine.warm.repeats.get(x.numel())
            if repeat is not None and (result := repeat(x, out, algorithm, timeout_s)) is not None:
                return result
        if is_plain(x) and (out is None or _fits(x, out)):
            return _plain(engine or engine_of(group, NAME), x, out, algorithm, timeout_s)
    return _allreduce(x, group, out, algorithm, codec, residual, epilogue, prefetch, timeout_s)


def _plain(
    engine: Engine, x: torch.Tensor, out: torch.Tensor | None, algorithm: str, timeout_s: float | None
) -> torch.Tensor:
    """Makes a plain call. If its plan is cached, the plan is called directly.

    Calls like it then take the fast path of repeats.py, if the plan needs nothing but the tensors' addresses.
    """
    given = x
    if out is None:
        x = x.contiguous()
        result = torch.empty_like(x)
    else:
        result = out  # _fits() has found that both are contiguous
    warm, numel = engine.warm, x.numel()
    repeats = warm.repeats  # read before the plan: if another thread drops the plan meanwhile, it drops these as well
    sides = engine.symmetric.sides(x, result) if engine.symmetric else ()
    # The fields of Call, as a bare tuple.
    key = (NAME, numel, x.dtype, x.get_device(), algorithm, timeout_s, "", None, sides, *NO_OPTIONS[3:])
    plan = warm.get(key)
    if plan is None:
        engine.run(key, x, result)
    else:
        plan(x, result)
        if can_repeat and not sides and x is given and (launch := getattr(plan, "at_addresses", None)):
            warm.unrepeated += 1
            if numel not in repeats or warm.unrepeated % _REPLACED_EACH == 0:
                repeats.keep(numel, repeat_of(launch, engine.runner.symmetric, x, algorithm, timeout_s))
    if out is not None:
        deliver(out, out)
    return result


def _fits(x: torch.Tensor, out: object) -> bool:
    """Whether a plain ``x`` and ``out`` pass all checks and need no copy."""
    return (
        is_ordinary(out)
        and out.shape == x.shape
        and out.dtype is x.dtype
        and out.device == x.device
        and x.is_contiguous()
        and out.is_contiguous()
        and not 0 < abs(x.data_ptr() - out.data_ptr()) < x.nbytes
    )


def _allreduce(x, group: Group, out, algorithm: str, codec, residual, epilogue, prefetch, timeout_s: float | None):
    """Makes a call that is not plain: checks its options, and goes through torch's dispatcher if that is needed."""
    options.check_together(NAME, codec, epilogue, residual)
    call_checks.check_call(NAME, "auto" if codec is not None else algorithm, timeout_s)
    name, in_list = engine_name(group, NAME), isinstance(x, (list, tuple))
    check_input(NAME, x)
    ranks, first = (len(x), x[0]) if in_list else (None, x)
    followed = options.epilogue_option(NAME, epilogue, first, ranks)
    arguments = OP.arguments(
        communicator=name,
        algorithm=algorithm,
        timeout_s=timeout_s,
        codec=options.codec_option(NAME, codec, residual),
        epilogue=followed.text,
        tensors=followed.tensors,
        scalars=followed.scalars,
        prefetch=options.prefetch_option(NAME, x, prefetch),
    )
    plain = is_plain(x) and options.is_memory(prefetch) and not followed.needs_gradient
    if out is None and residual is None:
        return OP(x, *arguments, plain=plain)
    residuals = []
    if residual is not None:
        check_output(NAME, x, residual, "residual")
        residuals = list(residual) if in_list else [residual]
    if out is None:
        made = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in (x if in_list else [x])]
        out = made if in_list else made[0]
    check_output(NAME, x, out)
    OP.into(x, residuals, out, *arguments, plain=plain and residual is None and is_plain(out))
    return list(out) if in_list else out


def _fake(xs, given) -> list[torch.Tensor]:
    return [torch.empty_like(x.contiguous()) for x in xs]


def _run(engine: Engine, xs, outs, given) -> None:
    """Writes the sum into every tensor of ``outs``, which are contiguous."""
    xs, codec = [x.contiguous() for x in xs], given.codec
    if codec:
        call_checks.check_quantized_call(NAME, codec, given.algorithm, xs[0])
    form, more = options.applied(NAME, given, xs) or (None, None)
    prefetches = bool(given.prefetch) and not codec and not form
    x, out = as_taken(engine, xs), as_taken(engine, outs)
    sides = () if codec else engine.symmetric_sides(x, out)
    how = {"algorithm": given.algorithm, "timeout_s": given.timeout_s, "codec": codec, "epilogue": form}
    call = Call.of(NAME, xs[0], **how, symmetric=sides, prefetches=prefetches)
    more = given.prefetch if prefetches else more
    engine.run(call, x, out, *([] if more is None else [as_taken(engine, more)]))


def _check_out(xs, outs, given) -> None:
    for x, out in zip(xs, outs, strict=True):
        tensor_checks.check_memory(NAME, x, out)
    options.check_apart_from_epilogue(NAME, outs, given.tensors)


def _with_feedback(engine: Engine, xs, residuals, outs, given):
    algorithm = given.algorithm
    codec = options.codec_with_feedback(NAME, given.codec, algorithm, xs, residuals, outs)
    if algorithm != "auto":  # raises before a residual is changed; "auto" serves every call
        engine.select(Call.of(NAME, residuals[0], algorithm=algorithm, codec=codec), residuals[0])
    return given._replace(codec=codec)


def _backward(ctx, gradients):
    """Returns the gradients. Rounding is treated as the identity. Prefetched tensors get no gradient."""
    call = {name: ctx.given[name] for name in ("communicator", "algorithm", "timeout_s", "codec")}
    (xs,), tensors = OP.saved(ctx)
    of_sums, rest = of_sums_before_epilogue(ctx, NAME, call, gradients, xs, tensors)
    return for_ranks(ctx, NAME, of_sums, **call), rest


OP = Op(
    NAME,
    ["x"],
    "str communicator, str algorithm, float? timeout_s, "
    f"{options.CODEC}, {options.EPILOGUE}, {options.PREFETCH}, {options.AFTER}",
    _run,
    _fake,
    check_out=_check_out,
    residual=_with_feedback,
    backward=_backward,
    saved=lambda given: bool(given["epilogue"]),
)
