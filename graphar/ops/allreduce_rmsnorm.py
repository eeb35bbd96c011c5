"""graphar.allreduce_residual_rmsnorm: all-reduce, residual and RMSNorm in one kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from functools import partial
from typing import overload

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import EpilogueInputs
from graphar.numerics.norms import FP8, RmsNorm, add_and_norm, output_of, specification
from graphar.ops import options
from graphar.ops.allreduce import allreduce
from graphar.ops.register import Op, is_plain
from graphar.plan import checks, select
from graphar.plan.call import NO_OPTIONS, Call
from graphar.runtime.engine import Engine, as_taken
from graphar.runtime.registry import Group, engine_name, engine_of

NAME = "allreduce_residual_rmsnorm"
_TENSORS = ("x", "residual", "weight", "scale")


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
    group: Group = None,
    timeout_s: float | None = None,
) -> tuple[list[torch.Tensor], ...]: ...
def allreduce_residual_rmsnorm(
    x, residual, weight, eps=1e-6, *, weight_offset=0.0, out_dtype=None, scale=None, group=None, timeout_s=None
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
        residual: like ``x``, equal on every rank; it is not changed. For a list a list, one a device.
        weight: [columns], of the dtype of ``x``, equal on every rank. For a list a list, one a device.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        out_dtype: torch.float8_e4m3fn: the normed result is normed * (1 / scale), computed in fp32, rounded to nearest
            and saturated; times the scale it is the normed value. None: the dtype of ``x``.
        scale: one scale for the whole FP8 result: one positive fp32 element on the device of ``x``, equal on every
            rank; for a list a list, one a device. None: each row has its own scale, its largest magnitude / 448, as
            torch._scaled_mm takes them.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``x``. For FP8 without ``scale``: (normed, residual_out, scales),
        with fp32 scales [..., 1]. For lists, lists of these.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    checks.check_call(NAME, "auto", timeout_s)
    numbers = check_number(NAME, "eps", eps), check_number(NAME, "weight_offset", weight_offset)
    given = (x, residual, weight) if scale is None else (x, residual, weight, scale)
    ranks = _ranks_of(given)
    output = {_check(out_dtype, *of_rank) for of_rank in ranks}.pop()
    in_list = isinstance(x, (list, tuple))
    if torch.is_grad_enabled() and any(one.requires_grad for of_rank in ranks for one in of_rank):
        if output != "like_input":
            raise ValueError(f"{NAME}: FP8 cannot be differentiated; omit out_dtype, or call under torch.no_grad()")
        return added_and_normed(allreduce(x, group, timeout_s=timeout_s), residual, weight, numbers)
    scales = [] if scale is None else list(scale) if in_list else [scale]
    arguments = (*numbers, output, scales, engine_name(group, NAME), timeout_s, [])
    plain = not in_list and all(map(is_plain, given))
    if plain and (found := _warm(given, *arguments[:3], group, timeout_s)):
        return found
    return by_result(OP(x, residual, weight, *arguments, plain=plain), len(ranks) if in_list else None)


def _warm(
    given: tuple, eps: float, weight_offset: float, output: str, group: Group, timeout_s: float | None
) -> tuple[torch.Tensor, ...] | None:
    """Makes a plain call and returns its results; None if its plan is not cached."""
    x, engine = given[0].contiguous(), engine_of(group, NAME)
    form = _form(x.shape[-1], output)
    # The fields of Call, as a bare tuple.
    key = (NAME, x.numel(), x.dtype, x.get_device(), "auto", timeout_s, "", form, *NO_OPTIONS[2:])
    plan = engine.warm.get(key)
    if plan is None:
        return None
    _, residual, weight, *scale = [one.contiguous() for one in given]
    normed, summed, *scales = results = _empty(output, x)
    plan(x, normed, EpilogueInputs([residual, weight, summed, *scale, *scales], [eps, weight_offset]))
    return results


@functools.lru_cache(maxsize=256)
def _form(columns: int, output: str) -> RmsNorm:
    return RmsNorm(columns, output=output)


def added_and_normed(total, residual, weight, numbers: tuple[float, float]):
    """Returns the results for a sum, or for a list of sums, by torch's operations, which are differentiable."""
    if not isinstance(total, (list, tuple)):
        return add_and_norm(total, residual, weight, *numbers)
    results = [add_and_norm(*one, *numbers) for one in zip(total, residual, weight, strict=True)]
    return by_result([one for of_rank in results for one in of_rank], len(total))


def by_result(flat: Sequence[torch.Tensor], ranks: int | None) -> tuple:
    """Returns an op's results as users get them. ``flat`` has them rank by rank.

    With ``ranks``, each result becomes a list with one tensor for each rank. Without, the tensors are returned as a
    tuple.
    """
    if ranks is None:
        return tuple(flat)
    results = len(flat) // ranks
    return tuple([list(flat[at::results]) for at in range(results)])


def _ranks_of(given: tuple) -> list[tuple]:
    """Returns the tensors of each rank of this process, as tuples."""
    xs = given[0]
    if not isinstance(xs, (list, tuple)):
        return [given]
    checks.check_list(NAME, xs)
    for name, of_ranks in zip(_TENSORS[1:], given[1:], strict=False):
        checks.check_one_each(NAME, name, of_ranks, xs)
    return list(zip(*given, strict=True))


def _check(out_dtype: object, x: torch.Tensor, residual: object, weight: object, scale: object = None) -> str:
    """Checks one rank's tensors, and returns the format of the normed rows."""
    checks.check_tensor(NAME, "x", x)
    if x.dtype not in TYPE_NAMES:
        raise ValueError(f"{NAME}: x must be bfloat16, float16 or float32, got {x.dtype}")
    if not x.ndim or not x.shape[-1]:
        raise ValueError(f"{NAME}: x must have columns, got the shape {list(x.shape)}")
    for name, given, shape in (("residual", residual, x.shape), ("weight", weight, x.shape[-1:])):
        check_beside(NAME, name, given, shape, x)
    if scale is not None:
        checks.check_tensor(NAME, "scale", scale)
        if (scale.numel(), scale.dtype, scale.device) != (1, torch.float32, x.device):
            raise ValueError(
                f"{NAME}: scale must be one element, torch.float32, on {x.device}, got {list(scale.shape)} "
                f"{scale.dtype} on {scale.device}"
            )
    return output_of(x.dtype, out_dtype, scale)


def check_beside(op: str, name: str, given: object, shape: Sequence[int], x: torch.Tensor) -> None:
    """Raises unless ``given`` is a tensor of that shape with the dtype and device of ``x``."""
    checks.check_tensor(op, name, given)
    if (tuple(given.shape), given.dtype, given.device) != (tuple(shape), x.dtype, x.device):
        raise ValueError(
            f"{op}: {name} must be {list(shape)} {x.dtype} on {x.device}, got {list(given.shape)} {given.dtype} "
            f"on {given.device}"
        )


def check_number(op: str, name: str, number: object) -> float:
    """Returns a finite number as a float; ValueError for anything else."""
    # Comparisons, because torch.compile does not trace math.isfinite.
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not -math.inf < number < math.inf:
        raise ValueError(f"{op}: {name} must be a finite number, got {number!r}")
    return float(number)


def _run(engine: Engine, xs, residuals, weights, given) -> list[tuple[torch.Tensor, ...]]:
    """Returns each rank's results: normed rows, the new residual, and the rows' scales if they have any."""
    ranks = [[one.contiguous() for one in of_rank] for of_rank in zip(xs, residuals, weights, strict=True)]
    scales = [[one.contiguous()] for one in given.scales] or [[] for _ in ranks]
    xs, columns, numbers = [of_rank[0] for of_rank in ranks], xs[0].shape[-1], [given.eps, given.weight_offset]
    step = select.norm_rows(engine.world_size, columns * xs[0].element_size())
    if not step or engine.why_no_kernel(NAME, xs[0]):
        totals = [torch.empty_like(x) for x in xs]
        x, total = as_taken(engine, xs), as_taken(engine, totals)
        call = Call.of("allreduce", xs[0], timeout_s=given.timeout_s, symmetric=engine.symmetric_sides(x, total))
        engine.run(call, x, total)
        return [
            specification(total, residual, weight, *numbers, given.output, *scale)
            for total, (_, residual, weight), scale in zip(totals, ranks, scales, strict=True)
        ]
    results = [_empty(given.output, x) for x in xs]
    form = _form(columns, given.output)
    for start in range(0, xs[0].numel() // columns, step):
        cut = partial(_rows, start, step)
        inputs = [
            EpilogueInputs([cut(residual), weight, cut(summed), *scale, *map(cut, made)], numbers)
            for (_, residual, weight), scale, (_, summed, *made) in zip(ranks, scales, results, strict=True)
        ]
        pieces, outs = list(map(cut, xs)), [cut(normed) for normed, *_ in results]
        call = Call.of(NAME, pieces[0], timeout_s=given.timeout_s, epilogue=form)
        engine.run(call, *[as_taken(engine, ones) for ones in (pieces, outs, inputs)])
    return results


def _rows(start: int, count: int, x: torch.Tensor) -> torch.Tensor:
    """Returns at most ``count`` rows of a contiguous tensor, from ``start`` on; the tensor itself if it has no more."""
    columns = x.shape[-1]
    return x if x.numel() <= count * columns else x.view(-1, columns)[start : start + count]


def _empty(output: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns uninitialised tensors for the results of a rank with the contiguous input ``x``."""
    if output == "like_input":
        return torch.empty_like(x), torch.empty_like(x)
    scales = [x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)] if output == "dynamic_fp8" else []
    return torch.empty_like(x, dtype=FP8), torch.empty_like(x), *scales


def _fake(xs, residuals, weights, given) -> list[tuple[torch.Tensor, ...]]:
    return [_empty(given.output, x.contiguous()) for x in xs]


OP = Op(
    NAME,
    ["x", "residual", "weight"],
    f"float eps, float weight_offset, str output, Tensor[] scales, str communicator, float? timeout_s, {options.AFTER}",
    _run,
    _fake,
    returns="Tensor[]",
)
