"""The fast path of eager calls: a plain all-reduce that is like an earlier one repeats that call's launch.

Most of a small call's time is the host's. Other calls read a dozen properties of their tensors one by one, and make a
key of them. Here a guard of torch.compile compares a tensor with the earlier one in a single call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import forward_ad

from graphar.ops.register import deliver
from graphar.runtime.engine import Repeat
from graphar.runtime.symmetric_tensors import SymmetricTensors


def _guard(xs: list[torch.Tensor]) -> Callable[..., bool]:
    """Returns a function of as many distinct tensors: whether they are like these."""
    sizes, strides = [list(x.shape) for x in xs], [list(x.stride()) for x in xs]
    return torch._C._dynamo.guards.TensorGuards(*xs, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


# These names are private. torch 2.11 to 2.15 have them. With another torch, calls take their usual way.
try:
    _new_on_current_device = torch._C._dynamo.guards._empty_strided_cuda
    _current_device = getattr(torch._C, "_cuda_getDevice", None)  # None in a build of torch for the CPU
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _function_modes = torch._C._len_torch_function_stack
    _is_profiling = torch.autograd._profiler_enabled
    _guard([torch.empty(0)])
    can_repeat = True
except (AttributeError, TypeError):
    can_repeat = False


def repeat_of(
    launch: Callable[[int, int], None],
    symmetric: SymmetricTensors,
    x: torch.Tensor,
    algorithm: str,
    timeout_s: float | None,
) -> Repeat:
    """Returns a function that makes a call like an earlier one, and returns its result.

    The function returns None, and does nothing, unless these are as in the earlier call: the class, dtype, device,
    shape and strides of ``x``, whether it needs a gradient or is negated, and the function transforms (all of which the
    guard compares), the algorithm and the deadline. ``out`` must be ``x``, or like it and apart from it. There must be
    no mode of torch that wants to see the op. Nothing may lie in symmetric memory, which other kernels serve.

    It does not ask whether the plan is still good. Callers look the function up in the ``warm`` plans of the call's
    engine, which are dropped when the engine is closed, its group is destroyed, or its table changes, and are out of
    reach while debug mode or a profiler watches. The launch looks for the current stream and for failures.

    Args:
        launch: launches the earlier call's plan with the addresses of input and output, on the current device.
        symmetric: the symmetric tensors of the call's engine.
        x: the earlier call's input. That call was plain, ``x`` is contiguous, and not in symmetric memory.
    """
    shape, strides, dtype = tuple(x.shape), x.stride(), x.dtype
    device, nbytes = x.get_device(), x.nbytes
    one, both = _guard([x]), _guard([x, x])

    def repeat(x: torch.Tensor, out: torch.Tensor | None, asked: str, seconds: float | None) -> torch.Tensor | None:
        if (
            asked != algorithm
            or seconds != timeout_s
            or _dispatch_modes()
            or _function_modes()
            or forward_ad._current_level >= 0
            or _is_profiling()
            or _current_device() != device
        ):
            return None
        if not (one(x) if out is None or out is x else type(out) is torch.Tensor and both(x, out)):
            return None
        source = x.data_ptr()
        if symmetric.begin <= source < symmetric.end:
            return None
        if out is None:
            # As Inductor's code does it. torch.empty_like takes twice as long to find that no mode changes anything.
            result = _new_on_current_device(shape, strides, dtype)
            launch(source, result.data_ptr())
            return result
        target = out.data_ptr()
        if 0 < abs(source - target) < nbytes or symmetric.begin <= target < symmetric.end:
            return None
        launch(source, target)
        deliver(out, out)
        return out

    return repeat
