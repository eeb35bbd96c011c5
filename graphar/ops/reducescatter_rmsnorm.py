"""graphar.reducescatter_residual_rmsnorm: reduce-scatter, residual and RMSNorm in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from graphar.numerics.norms import REDUCESCATTER_NORM as NAME
from graphar.numerics.norms import specification
from graphar.numerics.partitions import split
from graphar.ops import norms, options, parts
from graphar.ops.norm_gradients import added_and_normed
from graphar.ops.reducescatter import reducescatter
from graphar.ops.register import Op, is_plain
from graphar.plan import call_checks, select
from graphar.plan.call import NO_OPTIONS, Call
from graphar.runtime.engine import Engine, as_taken
from graphar.runtime.registry import Group, engine_name, engine_of


@overload
def reducescatter_residual_rmsnorm(
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
def reducescatter_residual_rmsnorm(
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
def reducescatter_residual_rmsnorm(
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
    """Returns the root-mean-square norm of this rank's rows of the sum plus a residual, and that total; in one kernel.

    The rows are split as by :func:`reducescatter` along the first dimension: lengths differ by at most one, and earlier
    ranks have the longer parts. The results have the bits of these rows in :func:`allreduce_residual_rmsnorm`.
    ``graphar.reference.reducescatter_residual_rmsnorm`` is the specification.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls, with equal shapes and dtypes, in the same order.

    Differentiable, except for FP8. A call that needs gradients takes several kernels.

    Args:
        x: [M, ..., columns], bf16, fp16 or fp32: this rank's tensor, or a list with one per device of this process.
        residual: [M_r, ..., columns], this rank's rows, of the dtype of ``x``; it is not changed. M_r is the length of
            this rank's part. For a list a list, one per device.
        weight: [columns], of the dtype of ``x``. For a list a list, one per device.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        out_dtype: torch.float8_e4m3fn, as in :func:`allreduce_residual_rmsnorm`. None: the dtype of ``x``.
        scale: one scale for the whole FP8 result: one positive fp32 element on the device of ``x``; for a list a list,
            one per device. None: each row has its own scale, its largest magnitude / 448.
        group_size: 128: for FP8, each 128 columns of a row have their own scale. The columns are a multiple of 128.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``residual``. For FP8 without ``scale``: (normed, residual_out,
        scales), with fp32 scales [..., 1], or [..., columns / 128] with ``group_size``. For lists, lists of these.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    call_checks.check_call(NAME, "auto", timeout_s)
    numbers = norms.check_number(NAME, "eps", eps), norms.check_number(NAME, "weight_offset", weight_offset)
    ranks, in_list = norms.ranks_of(NAME, x, residual, weight, scale), isinstance(x, (list, tuple))
    rank, sizes = _place(ranks[0][0], len(x) if in_list else None, group)
    output = _check_ranks(ranks, sizes if in_list else [sizes[rank]], out_dtype, group_size)
    if norms.need_gradients(NAME, ranks, output):
        return added_and_normed(reducescatter(x, group, timeout_s=timeout_s), residual, weight, numbers)
    plain = not in_list and all(map(is_plain, ranks[0]))
    if plain and (found := _warm(ranks[0], *numbers, output, sizes, group, timeout_s)):
        return found
    scales, name = norms.scales_of_ranks(ranks), engine_name(group, NAME)
    found = OP(x, residual, weight, *numbers, output, scales, name, rank, sizes, timeout_s, [], plain=plain)
    return norms.by_result(found, len(ranks) if in_list else None)


def _place(x: torch.Tensor, ranks: int | None, group: Group) -> tuple[int, list[int]]:
    """Returns this process's rank and the length of every rank's part of ``x``; with a list of ``ranks``, rank -1."""
    if x.ndim < 2:
        raise ValueError(f"{NAME}: x must have 2 dimensions or more, since its rows are split, got {list(x.shape)}")
    rank, world_size = parts.place(group) if ranks is None else (-1, ranks)
    return rank, split(x.shape[0], world_size)


def _check_ranks(ranks: Sequence[tuple], lengths: Sequence[int], out_dtype: object, group_size: object) -> str:
    """Checks the tensors of this process's ranks, whose parts have ``lengths``; returns the format of normed rows."""
    pairs = zip(lengths, ranks, strict=True)
    return {norms.check(NAME, out_dtype, group_size, length, *of_rank) for length, of_rank in pairs}.pop()


def _warm(
    given: tuple,
    eps: float,
    weight_offset: float,
    output: str,
    sizes: list[int],
    group: Group,
    timeout_s: float | None,
) -> tuple[torch.Tensor, ...] | None:
    """Makes a plain call and returns its results; None if its plan is not cached."""
    x, engine = given[0].contiguous(), engine_of(group, NAME)
    form = norms.form(x.shape[-1], output)
    # The fields of Call, as a bare tuple.
    key = (NAME, parts.counts_of(x, sizes), x.dtype, x.get_device(), "auto", timeout_s, "", form, *NO_OPTIONS[2:])
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
    counts = parts.counts_of(xs[0], given.sizes)
    if not select.has_norm_kernel(columns * xs[0].element_size()) or engine.why_no_kernel(NAME, xs[0]):
        totals = [torch.empty_like(residual) for _, residual, *_ in ranks]
        call = Call.of("reducescatter", xs[0], counts, timeout_s=given.timeout_s)
        engine.run(call, as_taken(engine, xs), as_taken(engine, totals))
        return [
            specification(total, residual, weight, *numbers, given.output, *scale)
            for total, (_, residual, weight, *scale) in zip(totals, ranks, strict=True)
        ]
    results = _fake(xs, residuals, weights, given)
    inputs = [norms.inputs(rest, made, numbers) for (_, *rest), made in zip(ranks, results, strict=True)]
    call = Call.of(NAME, xs[0], counts, timeout_s=given.timeout_s, epilogue=norms.form(columns, given.output))
    outs = [normed for normed, *_ in results]
    engine.run(call, *[as_taken(engine, ones) for ones in (xs, outs, inputs)])
    return results


def _fake(xs, residuals, weights, given) -> list[tuple[torch.Tensor, ...]]:
    return [norms.empty(given.output, residual) for residual in residuals]


def _check(engine: Engine, xs, residuals, weights, given) -> None:
    parts.check_lengths(NAME, given.sizes, [len(x) for x in xs], [sum(given.sizes)] * len(xs))
    parts.check_lengths(NAME, given.sizes, [len(one) for one in residuals], parts.own_sizes(given))
    parts.check_place(NAME, engine, given)


OP = Op(
    NAME,
    ["x", "residual", "weight"],
    f"{norms.ARGUMENTS}, str communicator, int rank, SymInt[] sizes, float? timeout_s, {options.AFTER}",
    _run,
    _fake,
    check=_check,
    returns="Tensor[]",
)
