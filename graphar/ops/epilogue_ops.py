"""All-reduce with an epilogue, as torch sees it; users call graphar.allreduce.

An op takes the epilogue as text, which a graph can hold and a compiler need not look into, and its arguments in the
order of their names; of a call with a list, rank by rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.numerics.epilogues.epilogue import Epilogue, Form, Operands, as_epilogue, bind
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.ops.ops import check_outs, communicator_of, deliver, is_plain, library, target_of
from graphar.plan import checks
from graphar.runtime.registry import communicator_name

_CALL = "Tensor[] tensors, float[] scalars, str epilogue, str communicator, str algorithm, float? timeout_s"
library.define(f"epilogue_allreduce(Tensor x, {_CALL}) -> Tensor")
library.define(f"epilogue_allreduce_out(Tensor x, Tensor(a!) out, {_CALL}) -> ()")
library.define(f"epilogue_allreduce_list(Tensor[] xs, {_CALL}) -> Tensor[]")
library.define(f"epilogue_allreduce_list_out(Tensor[] xs, Tensor(a!)[] outs, {_CALL}) -> ()")
library.define(
    "epilogue_backward(Tensor v, Tensor gradient, Tensor[] tensors, float[] scalars, str epilogue, bool[] wanted)"
    " -> Tensor[]"
)


def allreduce(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | Communicator | None,
    out: torch.Tensor | Sequence[torch.Tensor] | None,
    algorithm: str,
    epilogue: object,
    timeout_s: float | None,
) -> torch.Tensor | list[torch.Tensor]:
    """What :func:`graphar.allreduce` does with an epilogue."""
    checks.check_call("allreduce", algorithm, timeout_s)
    epilogue, name = as_epilogue(epilogue), communicator_name(group)
    if isinstance(x, (list, tuple)):
        checks.check_list("allreduce", x)
        tensors, scalars = arguments_of_list("allreduce", epilogue, len(x))
        call = (scalars, epilogue.text(x[0]), name, algorithm, timeout_s)
        if out is None:
            return torch.ops.graphar.epilogue_allreduce_list(with_own_nodes(x), with_own_nodes(tensors), *call)
        check_outs("allreduce", x, out)
        torch.ops.graphar.epilogue_allreduce_list_out(x, out, tensors, *call)
        return list(out)
    checks.check_tensor("allreduce", "x", x)
    tensors, scalars = arguments_of_tensor("allreduce", epilogue)
    call = (tensors, scalars, epilogue.text(x), name, algorithm, timeout_s)
    if out is None:
        plain = is_plain(x) and not any(one.requires_grad for one in tensors)
        return (_allreduce if plain else torch.ops.graphar.epilogue_allreduce)(x, *call)
    checks.check_out("allreduce", x, out)
    torch.ops.graphar.epilogue_allreduce_out(x, out, *call)
    return out


def arguments_of_list(op: str, epilogue: Epilogue, ranks: int) -> tuple[list[torch.Tensor], list[float]]:
    """The tensors, rank by rank, and the numbers of a call with a list."""
    tensors, scalars = epilogue.arguments()
    for one in tensors:
        if isinstance(one, torch.Tensor) or len(one) != ranks:
            raise ValueError(f"{op}: with a list, an epilogue's tensors are lists of {ranks}, one a device")
        for tensor in one:
            checks.check_local(op, "an epilogue's tensor", tensor)
    return [one[rank] for rank in range(ranks) for one in tensors], scalars


def arguments_of_tensor(op: str, epilogue: Epilogue) -> tuple[list[torch.Tensor], list[float]]:
    """The tensors and the numbers of a call with one tensor."""
    tensors, scalars = epilogue.arguments()
    if not all(isinstance(one, torch.Tensor) for one in tensors):
        raise ValueError(f"{op}: with one tensor, an epilogue's tensors are tensors, not lists")
    for one in tensors:
        checks.check_local(op, "an epilogue's tensor", one)
    return tensors, scalars


def form_for(op: str, epilogue: object, x: torch.Tensor | Sequence[torch.Tensor]) -> Form:
    """The form of an epilogue in a call with ``x``."""
    epilogue, in_list = as_epilogue(epilogue), isinstance(x, (list, tuple))
    first = x[0] if in_list else x
    of_list = arguments_of_list(op, epilogue, len(x)) if in_list else None
    tensors, scalars = of_list or arguments_of_tensor(op, epilogue)
    return bind(op, epilogue.text(first), first, tensors[: len(epilogue.tensors)], scalars)[0]


# ---- implementations ------------------------------------------------------------------------------------------------


def _run(
    communicator: Communicator, x, out, form: Form, operands: Sequence[Operands], algorithm: str, timeout_s
) -> None:
    numel = x.numel() if communicator.devices is None else x[0].numel()
    communicator.run_with_epilogue("allreduce", x, out, numel, form, operands, algorithm, timeout_s)


def _allreduce(x, tensors, scalars, epilogue, communicator, algorithm, timeout_s) -> torch.Tensor:
    x = x.contiguous()
    form, operands = bind("allreduce", epilogue, x, tensors, scalars)
    out = torch.empty_like(x)
    _run(communicator_of(x, communicator), x, out, form, [operands], algorithm, timeout_s)
    return out


def _allreduce_out(x, out, tensors, scalars, epilogue, communicator, algorithm, timeout_s) -> None:
    checks.check_memory("allreduce", x, out)
    form, operands = bind("allreduce", epilogue, x, tensors, scalars)
    _check_apart(out, tensors)
    target = target_of(out)
    _run(communicator_of(x, communicator), x.contiguous(), target, form, [operands], algorithm, timeout_s)
    deliver(target, out)


def _bind_list(xs, tensors, scalars, epilogue) -> tuple[Form, list[Operands]]:
    each = len(tensors) // len(xs)
    bound = [
        bind("allreduce", epilogue, x, tensors[rank * each : (rank + 1) * each], scalars) for rank, x in enumerate(xs)
    ]
    if len({form for form, _ in bound}) > 1:
        raise ValueError("allreduce: the tensors of an epilogue must have equal dtypes on all ranks")
    return bound[0][0], [operands for _, operands in bound]


def _allreduce_list(xs, tensors, scalars, epilogue, communicator, algorithm, timeout_s) -> list[torch.Tensor]:
    xs = [x.contiguous() for x in xs]
    form, operands = _bind_list(xs, tensors, scalars, epilogue)
    outs = [torch.empty_like(x) for x in xs]
    _run(communicator_of(xs, communicator), xs, outs, form, operands, algorithm, timeout_s)
    return outs


def _allreduce_list_out(xs, outs, tensors, scalars, epilogue, communicator, algorithm, timeout_s) -> None:
    for x, out in zip(xs, outs, strict=True):
        checks.check_memory("allreduce", x, out)
        _check_apart(out, tensors)
    form, operands = _bind_list(xs, tensors, scalars, epilogue)
    targets, xs = [target_of(out) for out in outs], [x.contiguous() for x in xs]
    _run(communicator_of(xs, communicator), xs, targets, form, operands, algorithm, timeout_s)
    for target, out in zip(targets, outs, strict=True):
        deliver(target, out)


def _check_apart(out: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Some elements are stored before others are made."""
    checks.check_apart("allreduce", out, **{f"tensor {at} of the epilogue": one for at, one in enumerate(tensors)})


def _epilogue_backward(v, gradient, tensors, scalars, epilogue, wanted) -> list[torch.Tensor]:
    form, operands = bind("allreduce", epilogue, v, tensors, scalars)
    leaves = [one.detach().requires_grad_(one_wanted) for one, one_wanted in zip([v, *tensors], wanted, strict=True)]
    with torch.enable_grad():
        result = form.apply_whole(leaves[0], operands._replace(tensors=leaves[1:]))
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    found = [None] * len(needed)
    if result.requires_grad:
        found = torch.autograd.grad(result, needed, gradient.to(torch.float32), allow_unused=True)
    gradients = [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(needed, found, strict=True)]
    return [one.contiguous() for one in gradients]


_IMPLEMENTATIONS = {
    "epilogue_allreduce": _allreduce,
    "epilogue_allreduce_out": _allreduce_out,
    "epilogue_allreduce_list": _allreduce_list,
    "epilogue_allreduce_list_out": _allreduce_list_out,
    "epilogue_backward": _epilogue_backward,
}
for _op, _implementation in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_op, _implementation, _key)


@torch.library.register_fake("graphar::epilogue_allreduce", lib=library)
def _(x, tensors, scalars, epilogue, communicator, algorithm, timeout_s):
    return torch.empty_like(x.contiguous())


@torch.library.register_fake("graphar::epilogue_allreduce_list", lib=library)
def _(xs, tensors, scalars, epilogue, communicator, algorithm, timeout_s):
    return [torch.empty_like(x.contiguous()) for x in xs]


@torch.library.register_fake("graphar::epilogue_allreduce_out", lib=library)
@torch.library.register_fake("graphar::epilogue_allreduce_list_out", lib=library)
def _(xs, outs, tensors, scalars, epilogue, communicator, algorithm, timeout_s):
    return None


@torch.library.register_fake("graphar::epilogue_backward", lib=library)
def _(v, gradient, tensors, scalars, epilogue, wanted):
    leaves = [one for one, one_wanted in zip([v, *tensors], wanted, strict=True) if one_wanted]
    return [torch.empty_like(one.contiguous()) for one in leaves]


# ---- autograd -------------------------------------------------------------------------------------------------------
#
# The epilogue's own gradient needs the sum, which the kernels do not keep: a second all-reduce makes it again, in fp32.


def keep_call(ctx, inputs, output) -> None:
    x, tensors, ctx.scalars, ctx.epilogue, *ctx.call = inputs
    ctx.on_ranks = isinstance(x, (list, tuple))
    ctx.ranks = len(x) if ctx.on_ranks else 1
    ctx.save_for_backward(*(x if ctx.on_ranks else [x]), *tensors)
    ctx.wanted = [one.requires_grad for one in tensors]


def _backward(ctx, gradient):
    x, *tensors = ctx.saved_tensors
    v = torch.ops.graphar.allreduce(x.float(), *ctx.call)
    of_v, of_tensors = gradients_of(ctx, v, gradient, tensors, ctx.wanted)
    of_x = torch.ops.graphar.allreduce(of_v.to(x.dtype), *ctx.call)
    return of_x, of_tensors, *no_gradients(ctx)


@in_stream_order
def _backward_list(ctx, gradients):
    xs, tensors = ctx.saved_tensors[: ctx.ranks], ctx.saved_tensors[ctx.ranks :]
    vs = torch.ops.graphar.allreduce_list([x.float() for x in xs], *ctx.call)
    of_vs, of_tensors = gradients_of_ranks(ctx, vs, gradients, tensors)
    of_vs = [of_v.to(xs[0].dtype) for of_v in of_vs]
    return torch.ops.graphar.allreduce_list(of_vs, *ctx.call), of_tensors, *no_gradients(ctx)


def no_gradients(ctx) -> list:
    """Of the other arguments; torch takes an empty list for one of tensors."""
    return [None if ctx.scalars else [], None, *[None] * len(ctx.call)]


def gradients_of_ranks(ctx, vs, gradients, tensors) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """As :func:`gradients_of`, for lists; ``tensors`` has those of all ranks."""
    each, of_vs, of_tensors = len(tensors) // len(vs), [], []
    for rank, (v, gradient) in enumerate(zip(vs, gradients, strict=True)):
        own = slice(rank * each, (rank + 1) * each)
        of_v, of_own = gradients_of(ctx, v, gradient, list(tensors[own]), ctx.wanted[own])
        of_vs.append(of_v)
        of_tensors += of_own
    return of_vs, of_tensors


def gradients_of(ctx, v, gradient, tensors, wanted: list[bool]) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The gradients of the sum, and of those tensors that want one."""
    found = torch.ops.graphar.epilogue_backward(v, gradient, tensors, ctx.scalars, ctx.epilogue, [True, *wanted])
    if torch.is_grad_enabled():  # of a gradient that is to be differentiated
        found = _WithoutDerivative.apply(*found)
    rest = iter(found[1:])
    return found[0], [next(rest) if one else None for one in wanted]


class _WithoutDerivative(torch.autograd.Function):
    """Gradients as they are; torch would only warn that those of ``epilogue_backward`` become zeros."""

    @staticmethod
    def forward(ctx, *gradients):
        return tuple([one.view_as(one) for one in gradients])

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("graphar: an epilogue has no second derivative; apply it to the sum instead")


for _op, _rule in (("epilogue_allreduce", _backward), ("epilogue_allreduce_list", _backward_list)):
    torch.library.register_autograd(f"graphar::{_op}", _rule, setup_context=keep_call, lib=library)
