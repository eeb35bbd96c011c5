"""Functions for ops with residual and RMSNorm: checks, inputs and results of each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.norms import FP8, output_of, scales_of
from graphar.numerics.partitions import TP_INVARIANT, split
from graphar.ops import norm_gradients, options, parts
from graphar.ops.register import Op, by_result, is_plain
from graphar.ops.repeats import Asked
from graphar.plan.call import Call, Operands
from graphar.plan.work import Norm
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name


@dataclass(eq=False)
class Arguments(options.Normed):
    output: str = "like_input"  # one of numerics.norms.NORM_OUTPUTS
    scales: options.Tensors = ()  # for "static_fp8", each rank's scale


@dataclass(eq=False)
class ArgumentsOfParts(Arguments, options.InParts):
    """Those of a reduce-scatter with a norm."""


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


def check_beside(
    op: str, name: str, given: object, shape: Sequence[int], x: torch.Tensor, dtype: torch.dtype | None = None
) -> None:
    """Raises unless ``given`` is a tensor of that shape with the device of ``x``, and ``dtype``, or that of ``x``."""
    tensor_checks.check_tensor(op, name, given)
    dtype = dtype or x.dtype
    if (tuple(given.shape), given.dtype, given.device) != (tuple(shape), dtype, x.device):
        raise ValueError(
            f"{op}: {name} must be {list(shape)} {dtype} on {x.device}, got {list(given.shape)} {given.dtype} "
            f"on {given.device}"
        )


def check_number(op: str, name: str, number: object) -> float:
    """Returns a finite number as a float; ValueError for anything else."""
    # Comparisons, because torch.compile does not trace math.isfinite.
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not -math.inf < number < math.inf:
        raise ValueError(f"{op}: {name} must be a finite number, got {number!r}")
    return float(number)


# ---- calls that need gradients --------------------------------------------------------------------------------------


def prepare_gradients(op: str, ranks: Sequence[Sequence[torch.Tensor]], output: str = "like_input") -> None:
    """Loads what the backward pass of a call needs, if it needs one; ValueError if the call's ``output`` has none."""
    if not torch.is_grad_enabled() or not any(one.requires_grad for of_rank in ranks for one in of_rank):
        return
    if output != "like_input":
        raise ValueError(f"{op}: FP8 cannot be differentiated; omit out_dtype, or call under torch.no_grad()")
    if not torch.compiler.is_compiling():
        for of_rank in ranks:
            norm_gradients.load(of_rank[-1])


# ---- calls ----------------------------------------------------------------------------------------------------------


def call(op: Op, asked: Asked, group: Group, eps, weight_offset, out_dtype, group_size, timeout_s) -> Any:
    """Makes a call as the user asked for it, and returns its results as users get them."""
    (x, residual, weight, *rest), name = asked[0], op.name
    scale = rest[0] if rest else None
    call_checks.check_call(name, "auto", timeout_s)
    numbers = check_number(name, "eps", eps), check_number(name, "weight_offset", weight_offset)
    ranks = ranks_of(name, x, residual, weight, scale)
    where, lengths = place(op, "x", x, group)
    pairs = zip(lengths or [None] * len(ranks), ranks, strict=True)
    output = {check(name, out_dtype, group_size, length, *of_rank) for length, of_rank in pairs}.pop()
    prepare_gradients(name, ranks, output)
    scales = [one for _, _, _, *of_rank in ranks for one in of_rank]
    how = where | {"output": output, "scales": scales, "timeout_s": timeout_s}
    return make(op, (x, residual, weight), ranks, numbers, how, asked, group)


def place(op: Op, name: str, x, group: Group, alone: bool = False) -> tuple[dict[str, object], list[int] | None]:
    """Returns the arguments ``rank`` and ``sizes`` of an op that splits the rows of ``x``, named ``name`` in errors.

    With ``alone``, a process without a group is the only rank. Also returns the lengths of this process's parts. For
    other ops there is nothing to return: ({}, None).
    """
    if not op.takes("sizes"):
        return {}, None
    in_list = isinstance(x, (list, tuple))
    shape = list(x[0].shape if in_list else x.shape)
    if len(shape) < 2:
        raise ValueError(f"{op.name}: {name} must have 2 dimensions or more, since its rows are split, got {shape}")
    rank, world_size = (-1, len(x)) if in_list else parts.place(group, alone)
    sizes = split(shape[0], world_size)
    return {"rank": rank, "sizes": sizes}, sizes if in_list else [sizes[rank]]


def make(op: Op, tensors: tuple, ranks: Sequence[tuple], numbers: tuple[float, float], how: dict, asked, group: Group):
    """Makes a call that was checked, with the arguments ``how``, and returns its results as users get them.

    ``tensors`` are the op's, as the user gave them, and ``ranks`` those of each rank. ``numbers`` are eps and offset.
    """
    in_list = isinstance(tensors[0], (list, tuple))
    name = engine_name(group, op.name, alone=how.get("partition") == TP_INVARIANT and not in_list)
    how |= {"eps": numbers[0], "weight_offset": numbers[1], "communicator": name}
    plain = not in_list and all(map(is_plain, (*ranks[0], *how.get("scales", ()))))
    found = op(*tensors, given=op.given(**how), plain=plain, asked=asked)
    return by_result(found, len(ranks) if in_list else None)


def check_parts(op: str, engine: Engine, xs, *rest) -> None:
    """Checks the sizes of an op that splits rows: its ``sizes`` must fit the first tensors and the residuals."""
    *_, residuals, _, given = rest
    parts.check_lengths(op, given.sizes, [len(x) for x in xs], [sum(given.sizes)] * len(xs))
    parts.check_lengths(op, given.sizes, [len(one) for one in residuals], parts.own_sizes(given))
    parts.check_place(op, engine, given)


def fake(xs, residuals, weights, given) -> list[tuple[torch.Tensor, ...]]:
    """Returns uninitialised tensors for each rank's results."""
    return [empty(given.output, residual) for residual in residuals]


def run(op: str, engine: Engine, xs, residuals, weights, outs, given):
    """Writes each rank's results: normed rows, the new residual, and scales if the output has some."""
    lists = [xs, residuals, weights, *([given.scales] if given.scales else [])]
    ranks = [
        Operands(tuple([one.contiguous() for one in of_rank]), results)
        for of_rank, results in zip(zip(*lists, strict=True), outs, strict=True)
    ]
    x = ranks[0].inputs[0]
    counts = parts.counts_of(x, given.sizes) if isinstance(given, options.InParts) else (x.numel(),)
    numbers = given.eps, given.weight_offset
    work = Norm(op, counts, x.shape[-1], given.output, *numbers, row=tuple(x.shape[1:]))
    return engine.run(Call.of(work, x, timeout_s=given.timeout_s), ranks), ranks


def empty(output: str, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns uninitialised, contiguous tensors for a rank's results: normed rows, the new residual, perhaps scales."""
    shape, new = residual.shape, residual.new_empty
    made = [new(shape, dtype=residual.dtype if output == "like_input" else FP8), new(shape)]
    if each := scales_of(output, shape[-1]):
        made.append(new((*shape[:-1], each), dtype=torch.float32))
    return tuple(made)
