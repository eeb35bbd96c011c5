"""The ops as torch sees them: schema, implementations, fake, autograd; and the functions users call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.autograd import forward_ad

from graphar.communicator import Communicator
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.plan import checks
from graphar.plan.explanation import Explanation
from graphar.runtime.registry import communicator_name, communicator_of_devices, communicator_of_group

library = torch.library.Library("graphar", "DEF")  # of every op
_CALL = "str communicator, str algorithm, float? timeout_s"  # torch's autograd for lists rules out defaults
library.define(f"allreduce(Tensor x, {_CALL}) -> Tensor")
library.define(f"allreduce_out(Tensor x, Tensor(a!) out, {_CALL}) -> ()")
library.define(f"allreduce_list(Tensor[] xs, {_CALL}) -> Tensor[]")
library.define(f"allreduce_list_out(Tensor[] xs, Tensor(a!)[] outs, {_CALL}) -> ()")


# Looked up once: each look-up in a module costs a call 30 ns.
_is_compiling = torch.compiler.is_compiling
_strided = torch.strided
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_is_profiling = torch.autograd._profiler_enabled


def allreduce(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | Communicator | None = None,
    *,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    algorithm: str = "auto",
    codec: Codec | str | None = None,
    residual: torch.Tensor | Sequence[torch.Tensor] | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    prefetch: torch.Tensor | Sequence[torch.Tensor] | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """The sum over all ranks, on every rank: accumulated in fp32 in rank order and rounded once.

    Every rank, exact algorithm, size and device gives the same bits (``graphar.reference`` is the specification), and
    "auto" takes exact ones. Ranks are processes where ``x`` is a tensor, and the devices of this process where it is a
    list. Collective: every rank makes the same calls, with equal shapes and dtypes, in the same order. Differentiable:
    the gradient of a sum that every rank receives is the all-reduce of the gradients.

    Args:
        x: this rank's tensor, or one tensor a device of this process: any shape, strides and alignment; bf16, fp16 and
            fp32 run in graphar's kernels, fp64 and integers over torch.distributed with the same exactness.
        group: a process group or Communicator; None is the default group, or a communicator of the list's devices.
        out: where to write the result: like ``x``, and ``x`` itself or apart from it. Not differentiable.
        algorithm: "auto", or one of :class:`graphar.Algorithm`; the multimem ones change the bits, and "hierarchical",
            specified by ``graphar.reference.hierarchical_allreduce``: sums of each host, and then of those.
        codec: what goes over the links in place of the elements, fewer bits of less precision: a :class:`graphar.Codec`
            or the name of one, such as "int8" or "int4". Each tensor is then rounded once, and their sum once more, as
            ``graphar.reference.quantized_allreduce`` does; every rank still gets the same bits, and the gradient is
            that of the sum, itself rounded so. For bf16, fp16 and fp32.
        residual: with a codec, what earlier calls took from this rank's tensor by rounding: like ``x``, contiguous,
            apart from it and ``out``, zeros before the first call. It is added to ``x``, and what the first of the two
            roundings takes from that is left in it; zeros, where a bucket became NaN. Not differentiable.
        epilogue: elementwise work on the fp32 sum, before it is rounded: a :class:`graphar.Epilogue`, or an expression
            or a function without arguments, such as "-v". Not with a codec; for bf16, fp16 and fp32.
        prefetch: a hint, which changes no result: what is read next, such as the weight of the matmul that follows; any
            tensor on the device of ``x``, for lists one a device. The first 4 MB of the memory it spans come into L2
            while ``one_shot_push`` or ``two_shot_push`` wait, for sums to 2 MB, on sm_90 and newer; all else ignores
            it, and calls with a codec or an epilogue. Like ``x``, it must outlive graphs captured with it.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the communicator's.

    Returns:
        A contiguous tensor (for a list: one a device), or ``out``.

    Raises:
        TypeError, ValueError: an argument breaks a rule; nothing was sent.
        UnsupportedError: ``algorithm`` cannot serve this call.
        CollectiveTimeout: an earlier call of this communicator waited past its deadline.
    """
    if codec is not None or residual is not None or epilogue is not None or prefetch is not None:
        return _allreduce_with(x, group, out, algorithm, codec, residual, epilogue, prefetch, timeout_s)
    plain = is_plain(x)
    if plain and out is None:
        return run_process(x, communicator_name(group), algorithm, timeout_s)
    checks.check_call("allreduce", algorithm, timeout_s)
    name = communicator_name(group)
    if isinstance(x, (list, tuple)):
        return _allreduce_list(x, name, out, algorithm, timeout_s)
    return _allreduce_tensor(x, plain, name, out, algorithm, timeout_s)


def _allreduce_tensor(x, plain: bool, name: str, out, algorithm: str, timeout_s: float | None) -> torch.Tensor:
    if plain and _is_twin(x, out):
        communicator_of_group(name).run_allreduce(x, out, algorithm, timeout_s)
        deliver(out, out)
        return out
    checks.check_tensor("allreduce", "x", x)
    if out is None:
        return torch.ops.graphar.allreduce(x, name, algorithm, timeout_s)
    checks.check_out("allreduce", x, out)
    run = run_process_out if plain and is_plain(out) else torch.ops.graphar.allreduce_out
    run(x, out, name, algorithm, timeout_s)
    return out


def _allreduce_with(x, group, out, algorithm: str, codec, residual, epilogue, prefetch, timeout_s: float | None):
    from graphar.ops import epilogue_ops, prefetch_ops, quantized

    if codec is None and residual is None and epilogue is None:
        return prefetch_ops.allreduce(x, group, out, algorithm, prefetch, timeout_s)
    if epilogue is None and codec is None:
        raise ValueError("allreduce: residual holds what a codec took, and there is no codec")
    if epilogue is None:
        return quantized.allreduce(x, group, out, algorithm, codec, residual, timeout_s)
    if codec is not None or residual is not None:
        raise ValueError("allreduce: takes a codec or an epilogue, not both")
    return epilogue_ops.allreduce(x, group, out, algorithm, epilogue, timeout_s)


def is_plain(x: object) -> bool:
    """Whether nothing but the implementation wants to see a call with ``x``: going straight there halves its time."""
    return (
        not _is_compiling()
        and _is_ordinary(x)
        and not _dispatch_modes()
        and not _function_modes()
        and _transforms() is None
        and forward_ad._current_level < 0
        and not _is_profiling()
    )


def _is_ordinary(x: object) -> bool:
    return type(x) is torch.Tensor and not x.requires_grad and x.layout is _strided and not x.is_neg() and not x.is_meta


def _is_twin(x: torch.Tensor, out: object) -> bool:
    """Whether the checks of ``out`` would find nothing, and nothing has to be copied; ``x`` is plain."""
    return (
        _is_ordinary(out)
        and out.shape == x.shape
        and out.dtype is x.dtype
        and out.device == x.device
        and x.is_contiguous()
        and out.is_contiguous()
        and not 0 < abs(x.data_ptr() - out.data_ptr()) < x.nbytes
    )


def _allreduce_list(xs, name: str, outs, algorithm: str, timeout_s: float | None) -> list[torch.Tensor]:
    checks.check_list("allreduce", xs)
    if outs is None:
        return torch.ops.graphar.allreduce_list(with_own_nodes(xs), name, algorithm, timeout_s)
    check_outs("allreduce", xs, outs)
    torch.ops.graphar.allreduce_list_out(xs, outs, name, algorithm, timeout_s)
    return list(outs)


def check_outs(op: str, xs, outs, name: str = "out") -> None:
    if not isinstance(outs, (list, tuple)) or len(outs) != len(xs):
        what = f"a list of {len(outs)}" if isinstance(outs, (list, tuple)) else type(outs).__name__
        raise ValueError(f"{op}: {name} must be a list of {len(xs)} tensors, one for each of x, got {what}")
    for x, out in zip(xs, outs, strict=True):
        checks.check_out(op, x, out, name)


def explain(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | Communicator | None = None,
    *,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    algorithm: str = "auto",
    codec: Codec | str | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Explanation:
    """Which algorithm ``allreduce(x, group, out=out)`` takes, its grid, and why; and how long, where that was measured.

    With a codec, how many bits it sends for an element, and where both were measured, whether it pays: how long the
    exact all-reduce would take. With an epilogue, the expression that its kernel has. Collective, as the call would be.
    """
    if codec is not None and epilogue is not None:
        raise ValueError("explain: takes a codec or an epilogue, not both")
    if codec is None:
        checks.check_call("explain", algorithm, None)
    name = communicator_name(group)
    if isinstance(x, (list, tuple)):
        checks.check_list("explain", x)
        if out is not None:
            check_outs("explain", x, out)
    else:
        checks.check_tensor("explain", "x", x)
        if out is not None:
            checks.check_out("explain", x, out)
    text = ""
    if codec is not None:
        first = x[0] if isinstance(x, (list, tuple)) else x
        text = checks.check_quantized_call("explain", codec, algorithm, first).text
    return communicator_of(x, name).explain_call(x, out, algorithm, text, _form_for(epilogue, x))


def _form_for(epilogue: object, x):
    if epilogue is None:
        return None
    from graphar.ops.epilogue_ops import form_for

    return form_for("explain", epilogue, x)


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """An uninitialised symmetric tensor, which all ranks reach, so that an all-reduce can do without a copy.

    As ``out`` of ``two_shot_pipelined``, which "auto" takes for large tensors, it has the sums of all ranks written
    straight into it; as ``x`` of ``one_shot_unstaged``, and not also ``out``, it is read where it lies. The same goes
    for views without gaps that begin at a multiple of 16 bytes. Where one rank passes a symmetric tensor, or a view of
    it, all pass the same one, at the same offset: otherwise, and after a CollectiveTimeout, what it holds is undefined.
    In all else it is like any tensor. On the CPU, and where kernels cannot reach all ranks, it is an ordinary one.

    Collective, and never while a graph is captured; captured calls may use it. Its memory, a multiple of 2 MB outside
    torch's allocator, is freed when the communicator is closed, after which the tensor must not be used.

    Args:
        size: as torch.empty takes it: integers, or one sequence of them.
        dtype: None is torch's default.
        group: as for :func:`allreduce`; a Communicator with devices makes one tensor for each of them.

    Returns:
        A contiguous tensor on this rank's device, or for a communicator with devices a list, one a device.

    Raises:
        TypeError, ValueError: torch has no such tensor, or the ranks ask for different ones.
        CommunicatorError: the communicator is closed, a stream is being captured, or a rank did not come in time.
        DriverError: a GPU has too little memory left; torch.cuda.empty_cache() frees what torch keeps.
    """
    found = group if isinstance(group, Communicator) else communicator_of_group(communicator_name(group))
    return found.empty(*size, dtype=dtype)


def communicator_of(x, name: str) -> Communicator:
    if isinstance(x, (list, tuple)):
        return communicator_of_devices(name, tuple([one.device for one in x]))
    return communicator_of_group(name)


# ---- implementations, with the text of a codec, or something to prefetch, or neither --------------------------------


def run_process(x, communicator, algorithm, timeout_s, codec: str = "", prefetch=None) -> torch.Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    communicator_of_group(communicator).run_allreduce(x, out, algorithm, timeout_s, codec, None, prefetch)
    return out


def target_of(out: torch.Tensor) -> torch.Tensor:
    """What a call writes for ``out``: that itself, or, where it has gaps, what :func:`deliver` copies to it."""
    return out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)


def deliver(target: torch.Tensor, out: torch.Tensor) -> None:
    """Puts the result into ``out`` where it is not yet there, and has autograd know that ``out`` has changed.

    Kernels write behind torch's back: a backward pass that needs what was there before has to fail.
    """
    if target is not out:
        out.copy_(target)
    elif not out.is_inference():
        torch.autograd.graph.increment_version(out)


def run_process_out(x, out, communicator, algorithm, timeout_s, codec: str = "", prefetch=None) -> None:
    checks.check_memory("allreduce", x, out)
    target = target_of(out)
    ranks = communicator_of_group(communicator)
    ranks.run_allreduce(x.contiguous(), target, algorithm, timeout_s, codec, None, prefetch)
    deliver(target, out)


def run_list(xs, communicator, algorithm, timeout_s, codec: str = "", prefetch=None) -> list[torch.Tensor]:
    xs = [x.contiguous() for x in xs]
    outs = [torch.empty_like(x) for x in xs]
    communicator_of(xs, communicator).run_allreduce(xs, outs, algorithm, timeout_s, codec, None, prefetch)
    return outs


def run_list_out(xs, outs, communicator, algorithm, timeout_s, codec: str = "", prefetch=None) -> None:
    for x, out in zip(xs, outs, strict=True):
        checks.check_memory("allreduce", x, out)
    targets = [target_of(out) for out in outs]
    xs = [x.contiguous() for x in xs]
    communicator_of(xs, communicator).run_allreduce(xs, targets, algorithm, timeout_s, codec, None, prefetch)
    for target, out in zip(targets, outs, strict=True):
        deliver(target, out)


_IMPLEMENTATIONS = {
    "allreduce": run_process,
    "allreduce_out": run_process_out,
    "allreduce_list": run_list,
    "allreduce_list_out": run_list_out,
}
for _op, _implementation in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_op, _implementation, _key)


@torch.library.register_fake("graphar::allreduce", lib=library)
def _(x, communicator, algorithm, timeout_s):
    return torch.empty_like(x.contiguous())


@torch.library.register_fake("graphar::allreduce_list", lib=library)
def _(xs, communicator, algorithm, timeout_s):
    return [torch.empty_like(x.contiguous()) for x in xs]


@torch.library.register_fake("graphar::allreduce_out", lib=library)
@torch.library.register_fake("graphar::allreduce_list_out", lib=library)
def _(xs, outs, communicator, algorithm, timeout_s):
    return None


# ---- autograd -------------------------------------------------------------------------------------------------------


def _keep_call(ctx, inputs, output) -> None:
    _, *ctx.call = inputs


def _backward(ctx, gradient):
    return torch.ops.graphar.allreduce(gradient, *ctx.call), None, None, None


@in_stream_order
def _backward_list(ctx, gradients):
    return torch.ops.graphar.allreduce_list(gradients, *ctx.call), None, None, None


torch.library.register_autograd("graphar::allreduce", _backward, setup_context=_keep_call, lib=library)
torch.library.register_autograd("graphar::allreduce_list", _backward_list, setup_context=_keep_call, lib=library)
