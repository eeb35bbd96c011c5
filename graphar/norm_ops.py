"""All-reduce, residual and norm as one op: graphar.allreduce_residual_rmsnorm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphar import checks
from graphar.choice import norm_rows
from graphar.communicator import Communicator
from graphar.epilogues.epilogue import Operands
from graphar.kernels import TYPE_NAMES
from graphar.norms import RmsNorm, add_and_norm, specification
from graphar.ops import allreduce, communicator_of, library
from graphar.registry import communicator_name

OP = "allreduce_residual_rmsnorm"
_CALL = "float eps, float weight_offset, str communicator, float? timeout_s"
library.define(f"{OP}(Tensor x, Tensor residual, Tensor weight, {_CALL}) -> (Tensor, Tensor)")
library.define(f"{OP}_list(Tensor[] xs, Tensor[] residuals, Tensor[] weights, {_CALL}) -> (Tensor[], Tensor[])")


def allreduce_residual_rmsnorm(
    x: torch.Tensor | Sequence[torch.Tensor],
    residual: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor | Sequence[torch.Tensor],
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    group: dist.ProcessGroup | Communicator | None = None,
    timeout_s: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The sum over all ranks, plus the residual, and the root-mean-square norm of that: in one kernel.

    residual_out = allreduce(x) + residual, rounded to the dtype after each of the two;
    normed = (residual_out / sqrt(mean(residual_out**2) + eps)) * (weight + weight_offset), in fp32 and rounded once,
    with the mean over the last dimension (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019). Every rank,
    size and device gives the same bits, those of :func:`graphar.reference.allreduce_residual_rmsnorm`. Collective.
    Differentiable; with gradients it is not one kernel.

    Args:
        x: [..., columns], bf16, fp16 or fp32: this rank's tensor, or a list of them, one a device of this process.
        residual: like ``x``, the same on every rank; not changed. A list where ``x`` is one, as for ``weight``.
        weight: [columns], of the same dtype and the same on every rank.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that keep weights less one.
        group: a process group or Communicator; None is the default group, or a communicator of the list's devices.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``x``; of lists, two lists.

    Raises:
        TypeError, ValueError: an argument breaks a rule; nothing was sent.
        CollectiveTimeout: an earlier call of this communicator waited past its deadline.
    """
    checks.check_call(OP, "auto", timeout_s)
    numbers = _check_number("eps", eps), _check_number("weight_offset", weight_offset)
    in_list = isinstance(x, (list, tuple))
    if in_list:
        checks.check_list(OP, x)
        for name, given in (("residual", residual), ("weight", weight)):
            if not isinstance(given, (list, tuple)) or len(given) != len(x):
                raise ValueError(f"{OP}: {name} must be a list of {len(x)} tensors, one for each of x")
    ranks = list(zip(x, residual, weight, strict=True)) if in_list else [(x, residual, weight)]
    for tensors in ranks:
        _check(*tensors)
    if torch.is_grad_enabled() and any(one.requires_grad for tensors in ranks for one in tensors):
        return _differentiable(x, residual, weight, numbers, group, timeout_s)
    op = getattr(torch.ops.graphar, f"{OP}_list" if in_list else OP)
    return op(x, residual, weight, *numbers, communicator_name(group), timeout_s)


def _differentiable(x, residual, weight, numbers: tuple[float, float], group, timeout_s):
    total = allreduce(x, group, timeout_s=timeout_s)
    if not isinstance(x, (list, tuple)):
        return add_and_norm(total, residual, weight, *numbers)
    pairs = [add_and_norm(*of_rank, *numbers) for of_rank in zip(total, residual, weight, strict=True)]
    return [normed for normed, _ in pairs], [summed for _, summed in pairs]


def _check(x: torch.Tensor, residual: object, weight: object) -> None:
    checks.check_tensor(OP, "x", x)
    if x.dtype not in TYPE_NAMES:
        raise ValueError(f"{OP}: x must be bfloat16, float16 or float32, got {x.dtype}")
    if not x.ndim or not x.shape[-1]:
        raise ValueError(f"{OP}: x must have columns, got the shape {list(x.shape)}")
    for name, given, shape in (("residual", residual, x.shape), ("weight", weight, x.shape[-1:])):
        checks.check_tensor(OP, name, given)
        if (given.shape, given.dtype, given.device) != (shape, x.dtype, x.device):
            raise ValueError(
                f"{OP}: {name} must be {list(shape)} {x.dtype} on {x.device}, got {list(given.shape)} {given.dtype} on "
                f"{given.device}"
            )


def _check_number(name: str, number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError(f"{OP}: {name} must be a finite number, got {number!r}")
    return float(number)


# ---- implementations ------------------------------------------------------------------------------------------------


def _process(x, residual, weight, eps, weight_offset, communicator, timeout_s):
    normed, summed = _run([x], [residual], [weight], (eps, weight_offset), communicator_of(x, communicator), timeout_s)
    return normed[0], summed[0]


def _list(xs, residuals, weights, eps, weight_offset, communicator, timeout_s):
    return _run(xs, residuals, weights, (eps, weight_offset), communicator_of(xs, communicator), timeout_s)


def _run(xs, residuals, weights, numbers: tuple[float, float], ranks: Communicator, timeout_s):
    xs, residuals, weights = ([one.contiguous() for one in of_ranks] for of_ranks in (xs, residuals, weights))
    step = norm_rows(ranks, xs[0])
    if not step:
        totals = [torch.empty_like(x) for x in xs]
        ranks.run_allreduce(*_given(ranks, xs, totals), "auto", timeout_s)
        pairs = [specification(*of_rank, *numbers) for of_rank in zip(totals, residuals, weights, strict=True)]
        return [normed for normed, _ in pairs], [summed for _, summed in pairs]
    columns = xs[0].shape[-1]
    normed, summed = ([torch.empty_like(x) for x in xs] for _ in range(2))
    rows = [[one.view(-1, columns) for one in of_ranks] for of_ranks in (xs, residuals, normed, summed)]
    for start in range(0, len(rows[0][0]), step):
        parts, own_residuals, outs, own_summed = ([one[start : start + step] for one in of_ranks] for of_ranks in rows)
        operands = [
            Operands(list(of_rank), list(numbers)) for of_rank in zip(own_residuals, weights, own_summed, strict=True)
        ]
        given = _given(ranks, parts, outs)
        ranks.run_with_epilogue(OP, *given, parts[0].numel(), RmsNorm(columns), operands, "auto", timeout_s)
    return normed, summed


def _given(ranks: Communicator, *lists: list[torch.Tensor]) -> list:
    """As a communicator's methods take tensors."""
    return [of_ranks if ranks.devices else of_ranks[0] for of_ranks in lists]


for _op, _implementation in ((OP, _process), (f"{OP}_list", _list)):
    for _key in ("CPU", "CUDA"):
        library.impl(_op, _implementation, _key)


@torch.library.register_fake(f"graphar::{OP}", lib=library)
def _(x, residual, weight, eps, weight_offset, communicator, timeout_s):
    return torch.empty_like(x.contiguous()), torch.empty_like(x.contiguous())


@torch.library.register_fake(f"graphar::{OP}_list", lib=library)
def _(xs, residuals, weights, eps, weight_offset, communicator, timeout_s):
    return [torch.empty_like(x.contiguous()) for x in xs], [torch.empty_like(x.contiguous()) for x in xs]
