"""All-reduce with a codec on the wire, as torch sees it; users call graphar.allreduce.

An op takes the codec as text, which a graph can hold and a compiler need not look into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.numerics.codecs import Codec
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.ops.ops import (
    check_outs,
    communicator_of,
    is_plain,
    library,
    run_list,
    run_list_out,
    run_process,
    run_process_out,
)
from graphar.plan import checks
from graphar.runtime.registry import communicator_name

_CALL = "str communicator, str algorithm, str codec, float? timeout_s"
library.define(f"quantized_allreduce(Tensor x, {_CALL}) -> Tensor")
library.define(f"quantized_allreduce_out(Tensor x, Tensor(a!) out, {_CALL}) -> ()")
library.define(f"quantized_allreduce_list(Tensor[] xs, {_CALL}) -> Tensor[]")
library.define(f"quantized_allreduce_list_out(Tensor[] xs, Tensor(a!)[] outs, {_CALL}) -> ()")
_FED_BACK = "Tensor(a!) residual, Tensor(b!) out", "Tensor(a!)[] residuals, Tensor(b!)[] outs"
library.define(f"quantized_allreduce_feedback(Tensor x, {_FED_BACK[0]}, {_CALL}) -> ()")
library.define(f"quantized_allreduce_list_feedback(Tensor[] xs, {_FED_BACK[1]}, {_CALL}) -> ()")


def allreduce(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | Communicator | None,
    out: torch.Tensor | Sequence[torch.Tensor] | None,
    algorithm: str,
    codec: Codec | str,
    residual: torch.Tensor | Sequence[torch.Tensor] | None,
    timeout_s: float | None,
) -> torch.Tensor | list[torch.Tensor]:
    """What :func:`graphar.allreduce` does with a codec."""
    if timeout_s is not None:
        checks.check_timeout("allreduce", timeout_s)
    call = (communicator_name(group), algorithm, text_of("allreduce", codec, residual), timeout_s)
    if isinstance(x, (list, tuple)):
        checks.check_list("allreduce", x)
        if residual is not None:
            return _feed_back_list(x, residual, out, call)
        if out is None:
            return torch.ops.graphar.quantized_allreduce_list(with_own_nodes(x), *call)
        check_outs("allreduce", x, out)
        torch.ops.graphar.quantized_allreduce_list_out(x, out, *call)
        return list(out)
    checks.check_tensor("allreduce", "x", x)
    if residual is not None:
        return _feed_back(x, residual, out, call)
    if out is None:
        return (_allreduce if is_plain(x) else torch.ops.graphar.quantized_allreduce)(x, *call)
    checks.check_out("allreduce", x, out)
    run = _allreduce_out if is_plain(x) and is_plain(out) else torch.ops.graphar.quantized_allreduce_out
    run(x, out, *call)
    return out


def _feed_back(x, residual, out, call: tuple) -> torch.Tensor:
    checks.check_out("allreduce", x, residual, "residual")
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=False)
    checks.check_out("allreduce", x, out)
    torch.ops.graphar.quantized_allreduce_feedback(x, residual, out, *call)
    return out


def _feed_back_list(xs, residuals, outs, call: tuple) -> list[torch.Tensor]:
    check_outs("allreduce", xs, residuals, "residual")
    if outs is None:
        outs = [torch.empty_like(x, memory_format=torch.contiguous_format, requires_grad=False) for x in xs]
    check_outs("allreduce", xs, outs)
    torch.ops.graphar.quantized_allreduce_list_feedback(xs, residuals, outs, *call)
    return list(outs)


def text_of(op: str, codec: Codec | str, residual: object) -> str:
    """What an op is given for a codec; what it names is checked there, where no compiler is in between."""
    if isinstance(codec, str) and "feedback" not in codec:
        return codec
    found = checks.check_codec(op, codec)
    if residual is None and found.feedback:
        raise ValueError(f"{op}: a codec with feedback leaves what it takes in a residual, and there is none")
    return found.text


# ---- implementations ------------------------------------------------------------------------------------------------


def _allreduce(x, communicator, algorithm, codec, timeout_s) -> torch.Tensor:
    checks.check_quantized_call("allreduce", codec, algorithm, x)
    return run_process(x, communicator, algorithm, timeout_s, codec)


def _allreduce_out(x, out, communicator, algorithm, codec, timeout_s) -> None:
    checks.check_quantized_call("allreduce", codec, algorithm, x)
    run_process_out(x, out, communicator, algorithm, timeout_s, codec)


def _allreduce_list(xs, communicator, algorithm, codec, timeout_s) -> list[torch.Tensor]:
    checks.check_quantized_call("allreduce", codec, algorithm, xs[0])
    return run_list(xs, communicator, algorithm, timeout_s, codec)


def _allreduce_list_out(xs, outs, communicator, algorithm, codec, timeout_s) -> None:
    checks.check_quantized_call("allreduce", codec, algorithm, xs[0])
    run_list_out(xs, outs, communicator, algorithm, timeout_s, codec)


def _allreduce_feedback(x, residual, out, communicator, algorithm, codec, timeout_s) -> None:
    codec = with_feedback(checks.check_quantized_call("allreduce", codec, algorithm, x))
    checks.check_residual("allreduce", residual, x=x, out=out)
    _check_served(residual, out, communicator, algorithm, codec)
    residual.add_(x)
    run_process_out(residual, out, communicator, algorithm, timeout_s, codec)


def _allreduce_list_feedback(xs, residuals, outs, communicator, algorithm, codec, timeout_s) -> None:
    codec = with_feedback(checks.check_quantized_call("allreduce", codec, algorithm, xs[0]))
    for x, residual, out in zip(xs, residuals, outs, strict=True):
        checks.check_residual("allreduce", residual, x=x, out=out)
    checks.check_distinct("allreduce", "residual", residuals)
    _check_served(residuals, outs, communicator, algorithm, codec)
    for x, residual in zip(xs, residuals, strict=True):
        residual.add_(x)
    run_list_out(residuals, outs, communicator, algorithm, timeout_s, codec)


# A residual becomes the input, in whose place the kernels leave what they take from it.
def _check_served(residual, out, communicator: str, algorithm: str, codec: str) -> None:
    """Raises what the call would, before a residual is touched; "auto" serves every call."""
    if algorithm != "auto":
        communicator_of(residual, communicator).explain_call(residual, out, algorithm, codec)


def with_feedback(codec: Codec) -> str:
    """The text of a codec that also leaves what it takes."""
    return replace(codec, feedback=True).text


_IMPLEMENTATIONS = {
    "quantized_allreduce": _allreduce,
    "quantized_allreduce_out": _allreduce_out,
    "quantized_allreduce_list": _allreduce_list,
    "quantized_allreduce_list_out": _allreduce_list_out,
    "quantized_allreduce_feedback": _allreduce_feedback,
    "quantized_allreduce_list_feedback": _allreduce_list_feedback,
}
for _op, _implementation in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_op, _implementation, _key)


@torch.library.register_fake("graphar::quantized_allreduce", lib=library)
def _(x, communicator, algorithm, codec, timeout_s):
    return torch.empty_like(x.contiguous())


@torch.library.register_fake("graphar::quantized_allreduce_list", lib=library)
def _(xs, communicator, algorithm, codec, timeout_s):
    return [torch.empty_like(x.contiguous()) for x in xs]


@torch.library.register_fake("graphar::quantized_allreduce_out", lib=library)
@torch.library.register_fake("graphar::quantized_allreduce_list_out", lib=library)
def _(xs, outs, communicator, algorithm, codec, timeout_s):
    return None


@torch.library.register_fake("graphar::quantized_allreduce_feedback", lib=library)
@torch.library.register_fake("graphar::quantized_allreduce_list_feedback", lib=library)
def _(xs, residuals, outs, communicator, algorithm, codec, timeout_s):
    return None


# ---- autograd: rounding counts as the identity ----------------------------------------------------------------------


def _keep_call(ctx, inputs, output) -> None:
    _, *ctx.call = inputs


def _backward(ctx, gradient):
    return torch.ops.graphar.quantized_allreduce(gradient, *ctx.call), None, None, None, None


@in_stream_order
def _backward_list(ctx, gradients):
    return torch.ops.graphar.quantized_allreduce_list(gradients, *ctx.call), None, None, None, None


for _op, _rule in (("quantized_allreduce", _backward), ("quantized_allreduce_list", _backward_list)):
    torch.library.register_autograd(f"graphar::{_op}", _rule, setup_context=_keep_call, lib=library)
