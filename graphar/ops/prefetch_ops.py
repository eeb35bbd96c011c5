"""All-reduce that prefetches meanwhile, as torch sees it; users call graphar.allreduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.ops.ops import (
    _CALL,
    check_outs,
    is_plain,
    library,
    run_list,
    run_list_out,
    run_process,
    run_process_out,
)
from graphar.plan import checks
from graphar.runtime.registry import communicator_name

library.define(f"allreduce_prefetch(Tensor x, Tensor prefetch, {_CALL}) -> Tensor")
library.define(f"allreduce_prefetch_out(Tensor x, Tensor prefetch, Tensor(a!) out, {_CALL}) -> ()")
library.define(f"allreduce_prefetch_list(Tensor[] xs, Tensor[] prefetch, {_CALL}) -> Tensor[]")
library.define(f"allreduce_prefetch_list_out(Tensor[] xs, Tensor[] prefetch, Tensor(a!)[] outs, {_CALL}) -> ()")
ops = torch.ops.graphar


def allreduce(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | Communicator | None,
    out: torch.Tensor | Sequence[torch.Tensor] | None,
    algorithm: str,
    prefetch: torch.Tensor | Sequence[torch.Tensor],
    timeout_s: float | None,
) -> torch.Tensor | list[torch.Tensor]:
    """What :func:`graphar.allreduce` does with something to prefetch."""
    checks.check_call("allreduce", algorithm, timeout_s)
    call = (communicator_name(group), algorithm, timeout_s)
    if isinstance(x, (list, tuple)):
        checks.check_list("allreduce", x)
        following = hints_of_list("allreduce", x, prefetch)
        if out is None:
            return ops.allreduce_prefetch_list(with_own_nodes(x), following, *call)
        check_outs("allreduce", x, out)
        ops.allreduce_prefetch_list_out(x, following, out, *call)
        return list(out)
    checks.check_tensor("allreduce", "x", x)
    following, plain = hint_of("allreduce", x, prefetch), is_plain(x) and is_memory(prefetch)
    if out is None:
        return (_allreduce if plain else ops.allreduce_prefetch)(x, following, *call)
    checks.check_out("allreduce", x, out)
    run = _allreduce_out if plain and is_plain(out) else ops.allreduce_prefetch_out
    run(x, following, out, *call)
    return out


def hint_of(op: str, x: torch.Tensor, prefetch: object) -> torch.Tensor:
    """What an op on ``x`` is given: a tensor of the same device, without a gradient that would become the result's."""
    checks.check_strided(op, "prefetch", prefetch)
    if prefetch.device != x.device:
        raise ValueError(f"{op}: prefetch must be on the device of x, {x.device}, got {prefetch.device}")
    return prefetch.detach() if prefetch.requires_grad else prefetch


def hints_of_list(op: str, xs: Sequence[torch.Tensor], prefetch: object) -> list[torch.Tensor]:
    """As :func:`hint_of`, of a call with a list."""
    if not isinstance(prefetch, (list, tuple)) or len(prefetch) != len(xs):
        raise ValueError(f"{op}: prefetch must be a list of {len(xs)} tensors, one a device")
    return [hint_of(op, x, one) for x, one in zip(xs, prefetch, strict=True)]


def is_memory(x: torch.Tensor) -> bool:
    """Whether it is a tensor as it lies in memory, or a parameter, and nobody else's subclass."""
    return type(x) in (torch.Tensor, torch.nn.Parameter)


# ---- implementations ------------------------------------------------------------------------------------------------


def _allreduce(x, prefetch, communicator, algorithm, timeout_s) -> torch.Tensor:
    return run_process(x, communicator, algorithm, timeout_s, prefetch=prefetch)


def _allreduce_out(x, prefetch, out, communicator, algorithm, timeout_s) -> None:
    run_process_out(x, out, communicator, algorithm, timeout_s, prefetch=prefetch)


def _allreduce_list(xs, prefetch, communicator, algorithm, timeout_s) -> list[torch.Tensor]:
    return run_list(xs, communicator, algorithm, timeout_s, prefetch=prefetch)


def _allreduce_list_out(xs, prefetch, outs, communicator, algorithm, timeout_s) -> None:
    run_list_out(xs, outs, communicator, algorithm, timeout_s, prefetch=prefetch)


_IMPLEMENTATIONS = {
    "allreduce_prefetch": _allreduce,
    "allreduce_prefetch_out": _allreduce_out,
    "allreduce_prefetch_list": _allreduce_list,
    "allreduce_prefetch_list_out": _allreduce_list_out,
}
for _op, _implementation in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_op, _implementation, _key)


@torch.library.register_fake("graphar::allreduce_prefetch", lib=library)
def _(x, prefetch, communicator, algorithm, timeout_s):
    return torch.empty_like(x.contiguous())


@torch.library.register_fake("graphar::allreduce_prefetch_list", lib=library)
def _(xs, prefetch, communicator, algorithm, timeout_s):
    return [torch.empty_like(x.contiguous()) for x in xs]


@torch.library.register_fake("graphar::allreduce_prefetch_out", lib=library)
@torch.library.register_fake("graphar::allreduce_prefetch_list_out", lib=library)
def _(xs, prefetch, outs, communicator, algorithm, timeout_s):
    return None


# ---- autograd: a hint has no gradient -------------------------------------------------------------------------------


def _keep_call(ctx, inputs, output) -> None:
    _, prefetch, *ctx.call = inputs
    ctx.hints = len(prefetch) if isinstance(prefetch, (list, tuple)) else None


def _backward(ctx, gradient):
    return ops.allreduce(gradient, *ctx.call), None, None, None, None


@in_stream_order
def _backward_list(ctx, gradients):
    return ops.allreduce_list(gradients, *ctx.call), [None] * ctx.hints, None, None, None


for _op, _rule in (("allreduce_prefetch", _backward), ("allreduce_prefetch_list", _backward_list)):
    torch.library.register_autograd(f"graphar::{_op}", _rule, setup_context=_keep_call, lib=library)
