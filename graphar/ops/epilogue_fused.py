"""Matmul and all-reduce with an epilogue, as torch sees it; users call graphar.fused_matmul_allreduce.

An op takes the epilogue and its arguments as in epilogue_ops.py, and a bias as one more of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.communicator import Communicator
from graphar.matmul import operands
from graphar.numerics.epilogues.epilogue import AppliedEpilogue, Epilogue, as_epilogue, bind
from graphar.ops import fused
from graphar.ops.epilogue_ops import (
    arguments_of_list,
    arguments_of_tensor,
    gradients_of,
    gradients_of_ranks,
    no_gradients,
)
from graphar.ops.fused import OP, matmul_gradients, result
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.ops.ops import communicator_of, deliver, library, target_of
from graphar.plan import checks

_CALL = "Tensor[] tensors, float[] scalars, str epilogue, str communicator, str partition, int? num_partitions"
_CALL = f"{_CALL}, float? timeout_s"
CALL = f"Tensor w, {_CALL}"  # of one rank's op, after its first tensor
NAME = f"epilogue_{OP}"
library.define(f"{NAME}(Tensor a, {CALL}) -> Tensor")
library.define(f"{NAME}_out(Tensor a, Tensor w, Tensor(a!) out, {_CALL}) -> ()")
library.define(f"{NAME}_list(Tensor[] a, Tensor[] w, {_CALL}) -> Tensor[]")
library.define(f"{NAME}_list_out(Tensor[] a, Tensor[] w, Tensor(a!)[] outs, {_CALL}) -> ()")
ops = torch.ops.graphar


def allreduce(a, w, bias, out, epilogue: object, call: tuple) -> torch.Tensor | list[torch.Tensor]:
    """What :func:`graphar.fused_matmul_allreduce` does with an epilogue."""
    if isinstance(a, (list, tuple)):
        operands.check_operand_lists(OP, a, w, bias)
        wanted, text = with_bias(epilogue, bias, sum_like(a[0], w[0]))
        tensors, scalars = arguments_of_list(OP, wanted, len(a))
        if out is None:
            return ops.epilogue_fused_matmul_allreduce_list(*map(with_own_nodes, (a, w, tensors)), scalars, text, *call)
        operands.check_results(OP, a, w, bias, out)
        ops.epilogue_fused_matmul_allreduce_list_out(a, w, out, tensors, scalars, text, *call)
        return list(out)
    operands.check_operands(OP, a, w, bias)
    wanted, text = with_bias(epilogue, bias, sum_like(a, w))
    tensors, scalars = arguments_of_tensor(OP, wanted)
    if out is None:
        return ops.epilogue_fused_matmul_allreduce(a, w, tensors, scalars, text, *call)
    operands.check_result(OP, a, w, bias, out)
    ops.epilogue_fused_matmul_allreduce_out(a, w, out, tensors, scalars, text, *call)
    return out


def sum_like(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A tensor without memory like the sum."""
    return torch.empty((*a.shape[:-1], w.shape[0]), dtype=a.dtype, device="meta")


def with_bias(epilogue: object, bias, x: torch.Tensor, whole: int | None = None) -> tuple[Epilogue, str]:
    """The epilogue of sums like ``x`` that adds the bias first, if there is one; and its text."""
    wanted = as_epilogue(epilogue)
    if bias is not None:
        wanted = wanted.after_bias(bias, x, whole)
    return wanted, wanted.text(x, whole)


# ---- implementations ------------------------------------------------------------------------------------------------


def apply(op: str, text: str, outs: Sequence[torch.Tensor], tensors, scalars) -> AppliedEpilogue:
    """Of results of this process's ranks; ``tensors`` has those of one after another."""
    each = len(tensors) // len(outs)
    bound = [bind(op, text, out, tensors[rank * each : (rank + 1) * each], scalars) for rank, out in enumerate(outs)]
    if len({form.dtypes for form, _ in bound}) > 1:
        raise ValueError(f"{op}: the tensors of an epilogue must have equal dtypes on all ranks")
    return AppliedEpilogue(bound[0][0], [own for _, own in bound])


def _run(ranks: Communicator, a, w, outs, tensors, scalars, text, partition, num_partitions, timeout_s) -> None:
    """Of this process's ranks, as lists; each of ``outs`` is contiguous."""
    applied = apply(OP, text, outs, tensors, scalars)
    fused.run(a, w, [], outs, ranks, partition, num_partitions, "", timeout_s, (), applied)


def _run_out(ranks: Communicator, a, w, outs, tensors, *call) -> None:
    checks.check_distinct(OP, "out", outs)
    for x, weight, out in zip(a, w, outs, strict=True):
        operands.check_result_memory(OP, x, weight, None, out)
        checks.check_apart(OP, out, **{f"tensor {at} of the epilogue": one for at, one in enumerate(tensors)})
    targets = [target_of(out) for out in outs]
    _run(ranks, a, w, targets, tensors, *call)
    for target, out in zip(targets, outs, strict=True):
        deliver(target, out)


def run_process(a, w, tensors, scalars, text, communicator, *call) -> torch.Tensor:
    out = result(a, w)
    _run(communicator_of(a, communicator), [a], [w], [out], tensors, scalars, text, *call)
    return out


def _run_process_out(a, w, out, tensors, scalars, text, communicator, *call) -> None:
    _run_out(communicator_of(a, communicator), [a], [w], [out], tensors, scalars, text, *call)


def _run_list(a, w, tensors, scalars, text, communicator, *call) -> list[torch.Tensor]:
    outs = [result(*pair) for pair in zip(a, w, strict=True)]
    _run(communicator_of(a, communicator), a, w, outs, tensors, scalars, text, *call)
    return outs


def _run_list_out(a, w, outs, tensors, scalars, text, communicator, *call) -> None:
    _run_out(communicator_of(a, communicator), a, w, outs, tensors, scalars, text, *call)


_IMPLEMENTATIONS = {NAME: run_process, f"{NAME}_out": _run_process_out, f"{NAME}_list": _run_list}
_IMPLEMENTATIONS[f"{NAME}_list_out"] = _run_list_out
for _op, _implementation in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_op, _implementation, _key)


@torch.library.register_fake(f"graphar::{NAME}", lib=library)
def _(a, w, *call):
    return result(a, w)


@torch.library.register_fake(f"graphar::{NAME}_list", lib=library)
def _(a, w, *call):
    return [result(*pair) for pair in zip(a, w, strict=True)]


@torch.library.register_fake(f"graphar::{NAME}_out", lib=library)
@torch.library.register_fake(f"graphar::{NAME}_list_out", lib=library)
def _(a, w, outs, *call):
    return None


# ---- autograd: the sum is made again, as in epilogue_ops.py; beyond it, gradients go as in fused.py -----------------


def keep_call(ctx, inputs, output) -> None:
    a, w, tensors, ctx.scalars, ctx.epilogue, *ctx.call = inputs
    in_lists = isinstance(a, (list, tuple))
    ctx.ranks = len(a) if in_lists else 1
    ctx.save_for_backward(*(a if in_lists else [a]), *(w if in_lists else [w]), *tensors)
    ctx.wanted = [one.requires_grad for one in tensors]


def saved(ctx) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor], list[torch.Tensor]]:
    """Every rank's ``a`` and ``w``, the epilogue's tensors, and the ranks' products in fp32."""
    a, w = ctx.saved_tensors[: ctx.ranks], ctx.saved_tensors[ctx.ranks : 2 * ctx.ranks]
    products = [torch.nn.functional.linear(*pair).float() for pair in zip(a, w, strict=True)]
    return a, w, ctx.saved_tensors[2 * ctx.ranks :], products


def gradients_of_matmuls(ctx, of_sums, a, w) -> tuple[list, list]:
    """By rank, those of ``a`` and ``w``, where they are needed; ``of_sums`` are those of the whole products."""
    needed = [one if isinstance(one, (list, tuple)) else [one] for one in ctx.needs_input_grad[:2]]
    found = [
        matmul_gradients(of_sum.to(x.dtype), x, weight, (*wanted, False))
        for of_sum, x, weight, *wanted in zip(of_sums, a, w, *needed, strict=True)
    ]
    return [of_a for of_a, _, _ in found], [of_w for _, of_w, _ in found]


def _backward(ctx, gradient):
    communicator, *_, timeout_s = ctx.call
    a, w, tensors, (product,) = saved(ctx)
    v = ops.allreduce(product, communicator, "auto", timeout_s)
    of_v, of_tensors = gradients_of(ctx, v, gradient, list(tensors), ctx.wanted)
    (of_a,), (of_w,) = gradients_of_matmuls(ctx, [of_v], a, w)
    return of_a, of_w, of_tensors, *no_gradients(ctx)


@in_stream_order
def _backward_list(ctx, gradients):
    communicator, *_, timeout_s = ctx.call
    a, w, tensors, products = saved(ctx)
    vs = ops.allreduce_list(products, communicator, "auto", timeout_s)
    of_vs, of_tensors = gradients_of_ranks(ctx, vs, gradients, tensors)
    of_vs = [of_v.to(a[0].dtype) for of_v in of_vs]
    of_sums = ops.allreduce_list(of_vs, communicator, "auto", timeout_s)
    of_a, of_w = gradients_of_matmuls(ctx, of_sums, a, w)
    return of_a, of_w, of_tensors, *no_gradients(ctx)


for _op, _rule in ((NAME, _backward), (f"{NAME}_list", _backward_list)):
    torch.library.register_autograd(f"graphar::{_op}", _rule, setup_context=keep_call, lib=library)
