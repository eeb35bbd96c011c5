"""graphar.allreduce_residual_rmsnorm: all-reduce, residual and RMSNorm in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import overload

import torch

from graphar.numerics.norms import ALLREDUCE_NORM as NAME
from graphar.numerics.norms import specification
from graphar.ops import norms, options
from graphar.ops.allreduce import allreduce
from graphar.ops.norm_gradients import added_and_normed
from graphar.ops.register import Op, is_plain
from graphar.plan import call_checks, select
from graphar.plan.call import NO_OPTIONS, Call
from graphar.runtime.engine import Engine, as_taken
from graphar.runtime.registry import Group, engine_name, engine_of


@overload
def allreduce_residual_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | None = None,
    group_size: int | None = None,
    group: Group = None,
    timeout_s: float | None = None,
) -> tuple[torch.Tensor, ...]: ...
@overload
def allreduce_residual_rmsnorm(
    x: Sequence[torch.Tensor],
    residual: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    scale: Sequence[torch.Tensor] | None = None,
    group_size: int | None = None,
    group: Group = None,
    timeout_s: float | None = None,
) -> tuple[list[torch.Tensor], ...]: ...
def allreduce_residual_rmsnorm(
    x,
    residual,
    weight,
    eps=1e-6,
    *,
    weight_offset=0.0,
    out_dtype=None,
    scale=None,
    group_size=None,
    group=None,
    timeout_s=None,
):
    """Returns the root-mean-square norm of the sum over all ranks plus a residual, and that total, from one kernel.

    residual_out = total + residual, rounded to the dtype, where total is the rounded sum;
    normed = (residual_out / sqrt(mean(residual_out**2) + eps)) * (weight + weight_offset), in fp32 and rounded once.
    The mean is over the last dimension (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019).
    ``graphar.reference.allreduce_residual_rmsnorm`` is the specification: every rank, size and device gives its bits.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls, with equal shapes and dtypes, in the same order.

    Differentiable, except for FP8. A call that needs gradients takes several kernels.

    Args:
        x: [..., columns], bf16, fp16 or fp32: this rank's tensor, or a list with one for each device of this process.
        residual: like ``x``, equal on every rank; it is not changed. For a list a list, one per device.
        weight: [columns], of the dtype of ``x``, equal on every rank. For a list a list, one per device.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        out_dtype: torch.float8_e4m3fn: the normed result is normed * (1 / scale), computed in fp32, rounded to nearest
            and saturated; times the scale it is the normed value. None: the dtype of ``x``.
        scale: one scale for the whole FP8 result: one positive fp32 element on the device of ``x``, equal on every
            rank; for a list a list, one per device. None: each row has its own scale, its largest magnitude / 448, as
            torch._scaled_mm takes them.
        group_size: 128: for FP8, each 128 columns of a row have their own scale. The columns are a multiple of 128.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``x``. For FP8 without ``scale``: (normed, residual_out, scales),
        with fp32 scales [..., 1], or [..., columns / 128] with ``group_size``. For lists, lists of these.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    call_checks.check_call(NAME, "auto", timeout_s)
    numbers = norms.check_number(NAME, "eps", eps), norms.check_number(NAME, "weight_offset", weight_offset)
    ranks, in_list = norms.ranks_of(NAME, x, residual, weight, scale), isinstance(x, (list, tuple))
    output = {norms.check(NAME, out_dtype, group_size, None, *of_rank) for of_rank in ranks}.pop()
    if norms.need_gradients(NAME, ranks, output):
        return added_and_normed(allreduce(x, group, timeout_s=timeout_s), residual, weight, numbers)
    arguments = (*numbers, output, norms.scales_of_ranks(ranks), engine_name(group, NAME), timeout_s, [])
    plain = not in_list and all(map(is_plain, ranks[0]))
    if plain and (found := _warm(ranks[0], *arguments[:3], group, timeout_s)):
        return found
    return norms.by_result(OP(x, residual, weight, *arguments, plain=plain), len(ranks) if in_list else None)


def _warm(
    given: tuple, eps: float, weight_offset: float, output: str, group: Group, timeout_s: float | None
) -> tuple[torch.Tensor, ...] | None:
    """Makes a plain call and returns its results; None if its plan is not cached."""
    x, engine = given[0].contiguous(), engine_of(group, NAME)
    form = norms.form(x.shape[-1], output)
    # The fields of Call, as a bare tuple.
    key = (NAME, x.numel(), x.dtype, x.get_device(), "auto", timeout_s, "", form, *NO_OPTIONS[2:])
    plan = engine.warm.get(key)
    if plan is None:
        return None
    rest = [one.contiguous() for one in given[1:]]
    results = norms.empty(output, rest[0])
    plan(x, results[0], norms.inputs(rest, results, (eps, weight_offset)))
    return results


def _run(engine: Engine, xs, residuals, weights, given) -> list[tuple[torch.Tensor, ...]]:
    """Returns each rank's results: normed rows, the new residual, and scales if the output has some."""
    ranks = norms.contiguous_ranks(xs, residuals, weights, given.scales)
    xs, columns, numbers = [of_rank[0] for of_rank in ranks], xs[0].shape[-1], (given.eps, given.weight_offset)
    step = select.norm_rows(engine.world_size, columns * xs[0].element_size())
    if not step or engine.why_no_kernel(NAME, xs[0]):
        totals = [torch.empty_like(x) for x in xs]
        x, total = as_taken(engine, xs), as_taken(engine, totals)
        call = Call.of("allreduce", xs[0], timeout_s=given.timeout_s, symmetric=engine.symmetric_sides(x, total))
        engine.run(call, x, total)
        return [
            specification(total, residual, weight, *numbers, given.output, *scale)
            for total, (_, residual, weight, *scale) in zip(totals, ranks, strict=True)
        ]
    results = _fake(xs, residuals, weights, given)
    form = norms.form(columns, given.output)
    for start in range(0, xs[0].numel() // columns, step):
        cut = partial(_rows, start, step)
        inputs = [
            norms.inputs([cut(residual), *rest], [*map(cut, made)], numbers)
            for (_, residual, *rest), made in zip(ranks, results, strict=True)
        ]
        pieces, outs = list(map(cut, xs)), [cut(normed) for normed, *_ in results]
        call = Call.of(NAME, pieces[0], timeout_s=given.timeout_s, epilogue=form)
        engine.run(call, *[as_taken(engine, ones) for ones in (pieces, outs, inputs)])
    return results


def _rows(start: int, count: int, x: torch.Tensor) -> torch.Tensor:
    """Returns at most ``count`` rows of a contiguous tensor, from ``start`` on; the tensor itself if it has no more."""
    columns = x.shape[-1]
    return x if x.numel() <= count * columns else x.view(-1, columns)[start : start + count]


def _fake(xs, residuals, weights, given) -> list[tuple[torch.Tensor, ...]]:
    return [norms.empty(given.output, residual) for residual in residuals]


OP = Op(
    NAME,
    ["x", "residual", "weight"],
    f"{norms.ARGUMENTS}, str communicator, float? timeout_s, {options.AFTER}",
    _run,
    _fake,
    returns="Tensor[]",
)
