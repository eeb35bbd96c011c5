"""The values of an expression: printed as CUDA C++, and evaluated by torch, which is the specification."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.operations import OPERATIONS
from graphar.numerics.epilogues.syntax import PLACES, Apply, Expression, Name, Node, Number, Operand, parse


@dataclass(frozen=True)
class Generated:
    """The C++ code of one expression for tensors of certain dtypes."""

    name: str  # the struct that the code defines; it contains a hash of the code
    text: str  # the C++ code, which tests/host also compiles for the CPU


@functools.lru_cache(maxsize=1024)
def generate(text: str, dtypes: tuple[torch.dtype, ...]) -> Generated:
    """Returns the C++ code of an expression; ``dtypes`` are the dtypes of its tensors, sorted by name."""
    expression, loads = parse(text), []
    for k, operand in enumerate(expression.operands):
        at = f"at.{operand.subscript}" if operand.subscript in PLACES else "0"
        tensor = expression.tensors.index(operand.name)
        loads.append(f"    operand[{k}] = element<{TYPE_NAMES[dtypes[tensor]]}>(e.tensor[{tensor}], {at});\n")
    body = (
        f"  static constexpr int operands = {len(loads)};\n"
        "  static __device__ __forceinline__ void load(const EpilogueArguments& e, const Indices& at,\n"
        "                                              float* operand) {\n"
        f"    (void)e, (void)at, (void)operand;\n{''.join(loads)}  }}\n"
        "  static __device__ __forceinline__ float value(const EpilogueArguments& e, const Indices& at,\n"
        "                                                const float* operand, float v) {\n"
        f"    (void)e, (void)at, (void)operand;\n    return {_printed(expression.tree, expression)};\n  }}\n"
    )
    name = f"Expression_{hashlib.sha256(body.encode()).hexdigest()[:12]}"
    return Generated(name, f"struct {name} {{\n{body}}};\n")


def _printed(node: Node, whole: Expression) -> str:
    match node:
        case Number(value) if math.isfinite(value):
            return f"{value.hex()}f"
        case Number(value):
            return "__uint_as_float(0x7fffffffu)" if math.isnan(value) else "__uint_as_float(0x7f800000u)"
        case Name("v"):
            return "v"
        case Name(name) if name in PLACES:
            return f"__ull2float_rn(at.{name})"
        case Name(name):
            return f"e.scalar[{whole.scalars.index(name)}]"
        case Operand():
            return f"operand[{whole.operands.index(node)}]"
        case Apply(operation, of):
            return OPERATIONS[operation][0].format(*(_printed(argument, whole) for argument in of))
    raise AssertionError(node)


Corner = tuple[int, int, int]  # of a panel: its first row and column in the larger tensor, and that tensor's columns


def evaluate(
    expression: Expression,
    v: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[float],
    places: Mapping[str, Callable[[], torch.Tensor]],
    read: Callable[[torch.Tensor, str], torch.Tensor],
) -> torch.Tensor:
    """Returns an expression's values in fp32 for the fp32 sums ``v``, with ``tensors`` and ``scalars`` sorted by name.

    ``places`` give the sums' places by name in PLACES, and ``read`` what they read of a tensor at a subscript.
    """

    def value(node: Node) -> torch.Tensor:
        match node:
            case Number(number):
                return torch.full((), number, dtype=torch.float32, device=v.device)
            case Name("v"):
                return v
            case Name(name) if name in PLACES:
                return places[name]().to(torch.float32)
            case Name(name):
                return torch.full((), scalars[expression.scalars.index(name)], dtype=torch.float32, device=v.device)
            case Operand(name, subscript):
                return read(tensors[expression.tensors.index(name)], subscript).to(torch.float32)
            case Apply(operation, of):
                return OPERATIONS[operation][1](*map(value, of))
        raise AssertionError(node)

    return value(expression.tree).expand_as(v)
