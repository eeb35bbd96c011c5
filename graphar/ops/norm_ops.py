"""All-reduce, residual and norm as one op: graphar.allreduce_residual_rmsnorm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.numerics.epilogues.epilogue import Operands
from graphar.numerics.norms import FP8, OP, OPS, RmsNorm, add_and_norm, output_of, specification
from graphar.ops.ops import allreduce, communicator_of, is_plain, library
from graphar.plan import checks
from graphar.plan.choice import norm_rows
from graphar.runtime.catalogue import TYPE_NAMES
from graphar.runtime.registry import communicator_name

_CALL = "float eps, float weight_offset, str communicator, float? timeout_s"
for _output, _op in OPS.items():
    _results = 3 if _output == "dynamic_fp8" else 2
    _of_rank, _of_list = ", ".join(["Tensor"] * _results), ", ".join(["Tensor[]"] * _results)
    _scale, _scales = ("Tensor scale, ", "Tensor[] scales, ") if _output == "static_fp8" else ("", "")
    library.define(f"{_op}(Tensor x, Tensor residual, Tensor weight, {_scale}{_CALL}) -> ({_of_rank})")
    library.define(f"{_op}_list(Tensor[] xs, Tensor[] residuals, Tensor[] weights, {_scales}{_CALL}) -> ({_of_list})")


def allreduce_residual_rmsnorm(
    x: torch.Tensor | Sequence[torch.Tensor],
    residual: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor | Sequence[torch.Tensor],
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    scale: torch.Tensor | Sequence[torch.Tensor] | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
    timeout_s: float | None = None,
) -> tuple[torch.Tensor, ...] | tuple[list[torch.Tensor], ...]:
    """The sum over all ranks, plus the residual, and the root-mean-square norm of that: in one kernel.

    residual_out = allreduce(x) + residual, rounded to the dtype after each of the two;
    normed = (residual_out / sqrt(mean(residual_out**2) + eps)) * (weight + weight_offset), in fp32 and rounded once,
    with the mean over the last dimension (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019). Every rank,
    size and device gives the same bits, those of :func:`graphar.reference.allreduce_residual_rmsnorm`. Collective.
    Differentiable, but for FP8; with gradients it is not one kernel.

    Args:
        x: [..., columns], bf16, fp16 or fp32: this rank's tensor, or a list of them, one a device of this process.
        residual: like ``x``, the same on every rank; not changed. A list where ``x`` is one, as for what follows.
        weight: [columns], of the same dtype and the same on every rank.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that keep weights less one.
        out_dtype: torch.float8_e4m3fn for a normed result in FP8: normed * (1 / scale), still in fp32, to nearest and
            saturated, so that times the scale it is what was normed. None: the dtype of ``x``.
        scale: of all of the FP8 result: one fp32 element, positive, on the device of ``x`` and the same on every rank.
            None: each row has one of its own, its largest magnitude / 448, as torch._scaled_mm takes them.
        group: a process group or Communicator; None is the default group, or a communicator of the list's devices.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``x``; of FP8 without a scale (normed, residual_out, scales), with
        fp32 scales [..., 1]; of lists, lists of these.

    Raises:
        TypeError, ValueError: an argument breaks a rule; nothing was sent.
        CollectiveTimeout: an earlier call of this communicator waited past its deadline.
    """
    checks.check_call(OP, "auto", timeout_s)
    call = _check_number("eps", eps), _check_number("weight_offset", weight_offset), group, timeout_s
    given = (x, residual, weight) if scale is None else (x, residual, weight, scale)
    if isinstance(x, (list, tuple)):
        return _norm_lists(given, out_dtype, *call)
    output = _check(out_dtype, *given)
    if all(map(is_plain, given)):
        return _process(output, *given, *call[:2], communicator_name(group), timeout_s)
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        _check_differentiable(output)
        return add_and_norm(allreduce(x, group, timeout_s=timeout_s), residual, weight, *call[:2])
    return getattr(torch.ops.graphar, OPS[output])(*given, *call[:2], communicator_name(group), timeout_s)


def _norm_lists(given: tuple, out_dtype, eps: float, weight_offset: float, group, timeout_s):
    xs = given[0]
    checks.check_list(OP, xs)
    for name, of_ranks in zip(_NAMES[1:], given[1:], strict=False):
        if not isinstance(of_ranks, (list, tuple)) or len(of_ranks) != len(xs):
            raise ValueError(f"{OP}: {name} must be a list of {len(xs)} tensors, one for each of x")
    ranks = list(zip(*given, strict=True))
    output = {_check(out_dtype, *of_rank) for of_rank in ranks}.pop()
    if torch.is_grad_enabled() and any(one.requires_grad for of_rank in ranks for one in of_rank):
        _check_differentiable(output)
        totals = allreduce(xs, group, timeout_s=timeout_s)
        summed = zip(totals, *given[1:], strict=True)
        return _by_result([add_and_norm(*of_rank, eps, weight_offset) for of_rank in summed])
    op = getattr(torch.ops.graphar, f"{OPS[output]}_list")
    return op(*given, eps, weight_offset, communicator_name(group), timeout_s)


# ---- checks ---------------------------------------------------------------------------------------------------------

_NAMES = ("x", "residual", "weight", "scale")


def _check(out_dtype: object, x: torch.Tensor, residual: object, weight: object, scale: object = None) -> str:
    """What the normed rows become, of one rank's tensors that may be added and normed."""
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
    if scale is not None:
        checks.check_tensor(OP, "scale", scale)
        if (scale.numel(), scale.dtype, scale.device) != (1, torch.float32, x.device):
            raise ValueError(
                f"{OP}: scale must be one element, torch.float32, on {x.device}, got {list(scale.shape)} {scale.dtype} "
                f"on {scale.device}"
            )
    return output_of(x.dtype, out_dtype, scale)


def _check_differentiable(output: str) -> None:
    if output != "like_input":
        raise ValueError(f"{OP}: FP8 cannot be differentiated; leave out_dtype away, or call under torch.no_grad()")


def _check_number(name: str, number: object) -> float:
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not math.isfinite(number):
        raise ValueError(f"{OP}: {name} must be a finite number, got {number!r}")
    return float(number)


# ---- implementations ------------------------------------------------------------------------------------------------


def _process(output: str, *arguments) -> tuple[torch.Tensor, ...]:
    *given, eps, weight_offset, communicator, timeout_s = arguments
    return _run(output, [given], [eps, weight_offset], communicator_of(given[0], communicator), timeout_s)[0]


def _list(output: str, *arguments) -> tuple[list[torch.Tensor], ...]:
    *given, eps, weight_offset, communicator, timeout_s = arguments
    of_ranks = list(zip(*given, strict=True))
    return _by_result(_run(output, of_ranks, [eps, weight_offset], communicator_of(given[0], communicator), timeout_s))


def _by_result(of_ranks) -> tuple[list[torch.Tensor], ...]:
    return tuple([list(ones) for ones in zip(*of_ranks, strict=True)])


def _run(output: str, given: Sequence, numbers: list[float], ranks: Communicator, timeout_s) -> list[tuple]:
    """The results of each rank of this process, of what each is given: x, residual, weight, and its scale, if any."""
    given = [[one.contiguous() for one in of_rank] for of_rank in given]
    xs = [of_rank[0] for of_rank in given]
    step = norm_rows(ranks, xs[0])
    if not step:
        totals = [torch.empty_like(x) for x in xs]
        ranks.run_allreduce(*_as_taken(ranks, xs, totals), "auto", timeout_s)
        return [
            specification(total, residual, weight, *numbers, output, *scale)
            for total, (_, residual, weight, *scale) in zip(totals, given, strict=True)
        ]
    results = [_empty(output, x) for x in xs]
    form = RmsNorm(xs[0].shape[-1], output=output)
    for start in range(0, xs[0].numel() // form.columns, step):
        cut = partial(_rows, start, step)
        operands = [
            Operands([cut(residual), weight, cut(summed), *scale, *map(cut, scales)], numbers)
            for (_, residual, weight, *scale), (_, summed, *scales) in zip(given, results, strict=True)
        ]
        parts, outs = list(map(cut, xs)), [cut(normed) for normed, *_ in results]
        taken = _as_taken(ranks, parts, outs)
        ranks.run_with_epilogue(OP, *taken, parts[0].numel(), form, operands, "auto", timeout_s)
    return results


def _rows(start: int, count: int, x: torch.Tensor) -> torch.Tensor:
    """``count`` rows of a tensor without gaps, or what there are: as it is, where that is all."""
    columns = x.shape[-1]
    return x if x.numel() <= count * columns else x.view(-1, columns)[start : start + count]


def _empty(output: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A rank's results, of an input without gaps."""
    if output == "like_input":
        return torch.empty_like(x), torch.empty_like(x)
    scales = [x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)] if output == "dynamic_fp8" else []
    return torch.empty_like(x, dtype=FP8), torch.empty_like(x), *scales


def _as_taken(ranks: Communicator, *lists: list[torch.Tensor]) -> list:
    """As a communicator's methods take tensors."""
    return [of_ranks if ranks.devices else of_ranks[0] for of_ranks in lists]


def _fake(output: str, x: torch.Tensor, *_) -> tuple[torch.Tensor, ...]:
    return _empty(output, x.contiguous())


def _fake_list(output: str, xs: Sequence[torch.Tensor], *_) -> tuple[list[torch.Tensor], ...]:
    return _by_result([_fake(output, x) for x in xs])


for _output, _op in OPS.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_op, partial(_process, _output), _key)
        library.impl(f"{_op}_list", partial(_list, _output), _key)
    torch.library.register_fake(f"graphar::{_op}", partial(_fake, _output), lib=library)
    torch.library.register_fake(f"graphar::{_op}_list", partial(_fake_list, _output), lib=library)
