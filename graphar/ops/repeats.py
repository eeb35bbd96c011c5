"""The fast path of eager calls: a call that is like an earlier one repeats that call's launch.

Most of a small call's time is the host's. Other calls check their arguments, read a dozen properties of their tensors
one by one, and make a key of them. Here the options are the key, and a guard of torch.compile compares all tensors with
the earlier ones in a single call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.plan.call import Operands
from graphar.runtime.checks.tensor_checks import span
from graphar.runtime.engine import Engine
from graphar.runtime.plan import BoundedCache, Count, Launch, Plan, Repeat, Tensors
from graphar.runtime.registry import Group, known_engine

Asked = tuple[tuple, tuple, object]  # the tensors, options and epilogue of a call, as :func:`repeated` takes them

_REPLACED_EACH = 64  # calls, where unlike calls of one key alternate: making a repeat takes as long as a call
_is_compiling = torch.compiler.is_dynamo_compiling  # other compilers have dispatch modes, or tensors of a subclass
records_gradients = torch.is_grad_enabled
_Tensor = torch.Tensor


def _guard(xs: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Returns a function of as many distinct tensors: whether they are like these."""
    sizes, strides = [list(x.shape) for x in xs], [list(x.stride()) for x in xs]
    return torch._C._dynamo.guards.TensorGuards(*xs, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore


# These names are private. torch 2.11 to 2.15 have them. With another torch, calls take their usual way.
try:
    # As Inductor's code does it. torch.empty_like takes twice as long to find that no mode changes anything.
    _new_on_current_device = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore
    _new_on_cpu = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore
    _current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # None in a build of torch for the CPU
    dispatch_modes = torch._C._len_torch_dispatch_stack
    function_modes = torch._C._len_torch_function_stack
    is_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
    _is_deterministic = torch._C._get_deterministic_algorithms
    _tell_of_change = torch._C._increment_version  # the function of torch.autograd.graph takes twice as long
    _guard([torch.empty(0)])
    can_repeat = True
except (AttributeError, TypeError):
    can_repeat = False


def repeated(op: str, group: Group, tensors: tuple, options: tuple, epilogue: object = None, out: Any = None) -> Any:
    """Returns the result of a call that repeats an earlier one; None, if there is none that it can repeat.

    ``tensors`` are one rank's in the order of the work's operands, without the epilogue's. ``options`` is
    everything else that the call depends on, apart from ``out`` and the epilogue, as the user gave it. Each number has
    its type beside it: True equals 1, and an option may allow only one of the two.
    """
    if _is_compiling():
        return None
    first, numbers = tensors[0], ()
    if type(first) is not _Tensor or (engine := known_engine(group)) is None:
        return None
    if type(epilogue) is Epilogue:
        tensors, numbers, epilogue = (*tensors, *epilogue.tensors.values()), (*epilogue.scalars.values(),), epilogue.key
    repeats, symmetric = engine.warm.repeats, engine.symmetric
    try:
        # A plan depends on whether the output is symmetric.
        is_direct = symmetric is not None and isinstance(out, _Tensor) and symmetric.hold(out)
        call = op, len(tensors), options, epilogue, is_direct
        latest = repeats.get(call)  # most calls are like the latest one: its guard is faster than a look-up by shape
    except (TypeError, RuntimeError):  # an option is of another type than any that fits, or a tensor has no memory
        return None
    if latest is not None and (result := latest(tensors, out, numbers)) is not None:
        return result
    try:
        repeat = repeats.get((call, first.shape, first.dtype))
    except RuntimeError:  # the tensor has no shape
        return None
    if repeat is None or repeat is latest or (result := repeat(tensors, out, numbers)) is None:
        return None
    repeats.keep(call, repeat)
    return result


def typed(numbers: object) -> tuple:
    """Returns an option that is a sequence of numbers, with their types, as a part of ``options``."""
    return (*numbers, *map(type, numbers)) if isinstance(numbers, (list, tuple)) else (numbers,)


def keep(
    engine: Engine, repeats: BoundedCache[Repeat], op: str, asked: Asked, plan: Plan, operands: Operands, codec: str
) -> None:
    """Keeps a call, if calls like it can repeat its launch, once it has been made twice.

    The caller read ``repeats`` before it looked up the plan: if another thread drops the plan meanwhile, it drops these
    as well. A ``codec`` with feedback overwrites the second tensor, a residual.
    """
    (of_rank, options, epilogue), warm = asked, engine.warm
    tensors: tuple[Any, ...] = of_rank
    if type(epilogue) is Epilogue:
        tensors, epilogue = (*of_rank, *epilogue.tensors.values()), epilogue.key
    order = [at for operand in operands.inputs for at, tensor in enumerate(tensors) if tensor is operand]
    if not can_repeat or not len(order) == len(operands.inputs) == len(tensors):
        return  # an operand is a copy of what the user gave
    symmetric = engine.is_symmetric(operands.outputs[0])
    key = (op, len(tensors), options, epilogue, symmetric), tensors[0].shape, tensors[0].dtype
    if not warm.was_seen(key):
        return
    warm.unrepeated += 1
    if key in repeats and warm.unrepeated % _REPLACED_EACH:
        return
    if launch := plan.launch_like(operands):
        how = engine.runner is None, op == "allreduce", tensors, order, operands.outputs, codec
        repeats.keep(key, _repeat(launch, plan.served, *how))


def _repeat(
    launch: Launch, count: Count, on_cpu: bool, sums: bool, tensors: Tensors, order: list[int], outs: Tensors, text: str
) -> Repeat:
    """Returns a function that makes a call like an earlier one, and returns its result.

    The function returns None, and does nothing, unless everything that the earlier call has checked holds again: a
    guard finds tensors like the earlier ones, what is written is apart from them, and no mode of torch forbids the call
    or wants to see it. ``out`` must be like the earlier result, or be the first tensor of a call that only ``sums``.
    The launch takes the tensors in ``order``. Callers look the function up in the engine's ``warm`` plans, which are
    dropped with what they depend on, and not while a profiler watches. The launch finds the stream and failures.
    """
    select = None if order == list(range(len(tensors))) else operator.itemgetter(*order)
    wire = codec_of_text(text) if text else None  # of a codec
    device, alike = tensors[0].get_device(), _guard(tensors)
    new = _new_on_cpu if on_cpu else _new_on_current_device
    result_like, *others = map(_layout, outs)
    alike_with_out = _guard([*tensors, outs[0]])
    may_be_first, feeds_back = sums and result_like == _layout(tensors[0]), wire is not None and wire.feedback
    with_gradients = any(tensor.requires_grad for tensor in tensors)
    needs_seed = wire is not None and wire.rounding == "stochastic" and wire.seed is None
    *nbytes, out_nbytes = map(_spanned_nbytes, (*tensors, outs[0]))
    every, behind_first = range(len(nbytes)), range(1, len(nbytes))

    def repeat(tensors: Tensors, out: torch.Tensor | None, numbers: tuple[float, ...]):
        in_place = may_be_first and out is tensors[0]
        if out is None or in_place:
            if not alike(*tensors):
                return None
        elif not alike_with_out(*tensors, out):
            return None
        if (
            dispatch_modes()
            or function_modes()
            or forward_ad._current_level >= 0
            or is_profiling()
            or not (on_cpu or _current_device() == device)
            or (with_gradients and records_gradients())
            or (needs_seed and _is_deterministic())
            or (feeds_back and -nbytes[1] < tensors[1].data_ptr() - tensors[0].data_ptr() < nbytes[0])
        ):
            return None
        if out is not None:
            for at in behind_first if in_place else every:  # zip() and any() take twice as long
                if -nbytes[at] < tensors[at].data_ptr() - out.data_ptr() < out_nbytes:
                    return None
        count.repeated += 1
        result = new(*result_like) if out is None else out
        results = (result, *[new(*layout) for layout in others]) if others else (result,)
        launch(tensors if select is None else select(tensors), results, numbers)
        if feeds_back:
            _tell_of_change(tensors[1:2])
        if out is not None:
            _tell_of_change(results)
        return results if others else result

    return repeat


def _layout(x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(x.shape), x.stride(), x.dtype


def _spanned_nbytes(x: torch.Tensor) -> int:
    """Returns how many bytes lie between the first and the last address of a tensor."""
    begin, end = span(x)
    return end - begin if x.numel() else 0
