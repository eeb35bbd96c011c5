"""Functions for ops with residual and RMSNorm: checks, inputs and results of each rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import EpilogueInputs
from graphar.numerics.norms import FP8, RmsNorm, output_of, scales_of
from graphar.plan import tensor_checks

# A text of numerics.norms.NORM_OUTPUTS, and for "static_fp8" each rank's scale.
ARGUMENTS = "float eps, float weight_offset, str output, Tensor[] scales"
_TENSORS = ("x", "residual", "weight", "scale")


# ---- checks ---------------------------------------------------------------------------------------------------------


def ranks_of(op: str, x: object, residual: object, weight: object, scale: object) -> list[tuple]:
    """Returns the tensors of each rank of this process: ``x``, which is checked, residual, weight and perhaps a scale.

    They are given as tensors, or as lists with one per rank.
    """
    given = (x, residual, weight) if scale is None else (x, residual, weight, scale)
    xs, in_list = x, isinstance(x, (list, tuple))
    if in_list:
        tensor_checks.check_list(op, xs)
        for name, of_ranks in zip(_TENSORS[1:], given[1:], strict=False):
            tensor_checks.check_one_each(op, name, of_ranks, xs)
    ranks = list(zip(*given, strict=True)) if in_list else [given]
    for x, *_ in ranks:
        _check_x(op, x)
    return ranks


def _check_x(op: str, x: object) -> None:
    tensor_checks.check_tensor(op, "x", x)
    if x.dtype not in TYPE_NAMES:
        raise ValueError(f"{op}: x must be bfloat16, float16 or float32, got {x.dtype}")
    if not x.ndim or not x.shape[-1]:
        raise ValueError(f"{op}: x must have columns, got the shape {list(x.shape)}")


def check(
    op: str,
    out_dtype: object,
    group_size: object,
    length: int | None,
    x: torch.Tensor,
    residual: object,
    weight: object,
    scale: object = None,
) -> str:
    """Checks one rank's tensors beside ``x``, and returns the format of the normed rows.

    ``length`` is the rank's number of rows in the first dimension of ``x``; None: all rows are normed.
    """
    check_beside(op, "residual", residual, x.shape if length is None else (length, *x.shape[1:]), x)
    check_beside(op, "weight", weight, x.shape[-1:], x)
    if scale is not None:
        tensor_checks.check_tensor(op, "scale", scale)
        if (scale.numel(), scale.dtype, scale.device) != (1, torch.float32, x.device):
            raise ValueError(
                f"{op}: scale must be one element, torch.float32, on {x.device}, got {list(scale.shape)} "
                f"{scale.dtype} on {scale.device}"
            )
    return output_of(op, x.dtype, x.shape[-1], out_dtype, scale, group_size)


def check_beside(op: str, name: str, given: object, shape: Sequence[int], x: torch.Tensor) -> None:
    """Raises unless ``given`` is a tensor of that shape with the dtype and device of ``x``."""
    tensor_checks.check_tensor(op, name, given)
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


# ---- calls that need gradients --------------------------------------------------------------------------------------


def need_gradients(op: str, ranks: Sequence[Sequence[torch.Tensor]], output: str = "like_input") -> bool:
    """Whether a call needs gradients; ValueError if its ``output`` has none."""
    if not torch.is_grad_enabled() or not any(one.requires_grad for of_rank in ranks for one in of_rank):
        return False
    if output != "like_input":
        raise ValueError(f"{op}: FP8 cannot be differentiated; omit out_dtype, or call under torch.no_grad()")
    return True


# ---- inputs and results ---------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def form(columns: int, output: str) -> RmsNorm:
    return RmsNorm(columns, output=output)


def scales_of_ranks(ranks: Sequence[tuple]) -> list[torch.Tensor]:
    """Returns the scale of each rank of :func:`ranks_of`, or an empty list."""
    return [one for _, _, _, *scale in ranks for one in scale]


def contiguous_ranks(xs, residuals, weights, scales) -> list[list[torch.Tensor]]:
    """Returns the contiguous tensors of each rank; with ``scales``, which has one for each rank or none."""
    lists = [xs, residuals, weights, *([scales] if scales else [])]
    return [[one.contiguous() for one in of_rank] for of_rank in zip(*lists, strict=True)]


def empty(output: str, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns uninitialised, contiguous tensors for a rank's results: normed rows, the new residual, perhaps scales."""
    shape, new = residual.shape, residual.new_empty
    made = [new(shape, dtype=residual.dtype if output == "like_input" else FP8), new(shape)]
    if each := scales_of(output, shape[-1]):
        made.append(new((*shape[:-1], each), dtype=torch.float32))
    return tuple(made)


def inputs(given: Sequence[torch.Tensor], results: Sequence[torch.Tensor], numbers: Sequence[float]) -> EpilogueInputs:
    """Returns a kernel's inputs: ``given`` are residual, weight and perhaps a scale, ``results`` from `empty`."""
    residual, weight, *scale = given
    _, summed, *scales = results
    return EpilogueInputs([residual, weight, summed, *scale, *scales], list(numbers))


def by_result(flat: Sequence[torch.Tensor], ranks: int | None) -> tuple:
    """Returns an op's results as users get them. ``flat`` has them rank by rank.

    With ``ranks``, each result becomes a list with one tensor for each rank. Without, the tensors are returned as a
    tuple.
    """
    if ranks is None:
        return tuple(flat)
    results = len(flat) // ranks
    return tuple([list(flat[at::results]) for at in range(results)])
