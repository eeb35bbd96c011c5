"""The operations of an epilogue in CUDA C++ and in torch. The torch code is the specification.

All operations but TRANSCENDENTAL are exact: C++ and torch give the same bits, since both round each step to fp32, to
nearest, without contraction. The results of TRANSCENDENTAL operations differ by a few units in the last place of fp32.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.syntax import PLACES, Apply, Expression, Name, Node, Number, Operand, parse

TRANSCENDENTAL = {
    *("exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "erf", "rsqrt"),
    *("pow", "sigmoid", "silu", "gelu", "gelu_tanh", "softplus", "elu", "mish"),
}


def _truth(condition: torch.Tensor) -> torch.Tensor:
    return condition.to(torch.float32)


def _maximum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((a > b) | a.isnan(), a, b)


def _minimum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((a < b) | a.isnan(), a, b)


def nearest_sqrt(a: torch.Tensor) -> torch.Tensor:
    """Returns the square root rounded to nearest. torch.sqrt of fp32 is not rounded to nearest on every CPU.

    The fp64 root rounds to the same fp32 number as the exact root. A root in [1, 2) of an fp32 number that is not
    itself an fp32 number is at least 2^-50 away from the middle of two fp32 numbers. The error in fp64 is below 2^-52.
    """
    return a.to(torch.float64).sqrt().to(torch.float32)


# Each operation in CUDA C++, with functions of cuda_src/device/epilogue.cuh, and in torch.
OPERATIONS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "+": ("__fadd_rn({}, {})", torch.add),
    "-": ("__fsub_rn({}, {})", torch.sub),
    "*": ("__fmul_rn({}, {})", torch.mul),
    "/": ("__fdiv_rn({}, {})", torch.div),
    "neg": ("(-{})", torch.neg),
    "<": ("truth({} < {})", lambda a, b: _truth(a < b)),
    "<=": ("truth({} <= {})", lambda a, b: _truth(a <= b)),
    ">": ("truth({} > {})", lambda a, b: _truth(a > b)),
    ">=": ("truth({} >= {})", lambda a, b: _truth(a >= b)),
    "==": ("truth({} == {})", lambda a, b: _truth(a == b)),
    "!=": ("truth({} != {})", lambda a, b: _truth(a != b)),
    "&&": ("truth({} != 0 && {} != 0)", lambda a, b: _truth((a != 0) & (b != 0))),
    "||": ("truth({} != 0 || {} != 0)", lambda a, b: _truth((a != 0) | (b != 0))),
    "!": ("truth({} == 0)", lambda a: _truth(a == 0)),
    "?:": ("({} != 0 ? {} : {})", lambda condition, a, b: torch.where(condition != 0, a, b)),
    "abs": ("fabsf({})", torch.abs),
    "sqrt": ("__fsqrt_rn({})", nearest_sqrt),
    "floor": ("floorf({})", torch.floor),
    "ceil": ("ceilf({})", torch.ceil),
    "trunc": ("truncf({})", torch.trunc),
    "rint": ("rintf({})", torch.round),
    "isnan": ("truth(is_nan({}))", lambda a: _truth(a.isnan())),
    "relu": ("maximum({}, 0.0f)", lambda a: _maximum(a, torch.zeros_like(a))),
    "hardswish": (
        "hardswish({})",
        lambda a: a * _minimum(_maximum(a + 3, a.new_zeros(())), a.new_full((), 6)) / 6,
    ),
    "max": ("maximum({}, {})", _maximum),
    "min": ("minimum({}, {})", _minimum),
    "clamp": ("minimum(maximum({}, {}), {})", lambda a, low, high: _minimum(_maximum(a, low), high)),
    "bf16": ("rounded<bf16>({})", lambda a: a.to(torch.bfloat16).to(torch.float32)),
    "fp16": ("rounded<fp16>({})", lambda a: a.to(torch.float16).to(torch.float32)),
    "pow": ("powf({}, {})", torch.pow),
    "exp": ("expf({})", torch.exp),
    "exp2": ("exp2f({})", torch.exp2),
    "expm1": ("expm1f({})", torch.expm1),
    "log": ("logf({})", torch.log),
    "log2": ("log2f({})", torch.log2),
    "log1p": ("log1pf({})", torch.log1p),
    "sin": ("sinf({})", torch.sin),
    "cos": ("cosf({})", torch.cos),
    "tanh": ("tanhf({})", torch.tanh),
    "erf": ("erff({})", torch.erf),
    "rsqrt": ("rsqrtf({})", torch.rsqrt),
    "sigmoid": ("sigmoid({})", torch.sigmoid),
    "silu": ("silu({})", torch.nn.functional.silu),
    "gelu": ("gelu({})", torch.nn.functional.gelu),
    "gelu_tanh": ("gelu_tanh({})", functools.partial(torch.nn.functional.gelu, approximate="tanh")),
    "softplus": ("softplus({})", torch.nn.functional.softplus),
    "elu": ("elu({})", torch.nn.functional.elu),
    "mish": ("mish({})", torch.nn.functional.mish),
}


# ---- CUDA C++ -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """The C++ code of one expression for tensors of certain dtypes."""

    name: str  # the struct that the code defines; it contains a hash of the code
    text: str  # the C++ code, which tests/host also compiles for the CPU


@functools.lru_cache(maxsize=1024)
def generate(text: str, dtypes: tuple[torch.dtype, ...]) -> Generated:
    """Returns the C++ code of an expression; ``dtypes`` are the dtypes of its tensors, sorted by name."""
    found, loads = parse(text), []
    for k, one in enumerate(found.operands):
        tensor, at = found.tensors.index(one.name), f"at.{one.subscript}" if one.subscript in PLACES else "0"
        loads.append(f"    operand[{k}] = element<{TYPE_NAMES[dtypes[tensor]]}>(e.tensor[{tensor}], {at});\n")
    body = (
        f"  static constexpr int operands = {len(loads)};\n"
        "  static __device__ __forceinline__ void load(const EpilogueArguments& e, const Indices& at,\n"
        "                                              float* operand) {\n"
        f"    (void)e, (void)at, (void)operand;\n{''.join(loads)}  }}\n"
        "  static __device__ __forceinline__ float value(const EpilogueArguments& e, const Indices& at,\n"
        "                                                const float* operand, float v) {\n"
        f"    (void)e, (void)at, (void)operand;\n    return {_printed(found.tree, found)};\n  }}\n"
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
            return OPERATIONS[operation][0].format(*(_printed(one, whole) for one in of))
    raise AssertionError(node)


# ---- torch ----------------------------------------------------------------------------------------------------------


Corner = tuple[int, int, int]  # of a panel: its first row and column in the larger tensor, and that tensor's columns


class Window:
    """A range of elements of a tensor: gives ``row``, ``col``, ``index`` and the operands' elements for each of them.

    Args:
        first: the index of the range's first element.
        count: elements of the range. Elements past the tensor's end count as its last element.
        columns: columns of the tensor.
        numel: elements of the tensor.
        device: the device of the results.
        corner: for a panel of a larger tensor; row, col and index are then places in the larger tensor.
    """

    def __init__(
        self, first: int, count: int, columns: int, numel: int, device: torch.device, corner: Corner | None = None
    ) -> None:
        index = torch.arange(first, first + count, device=device).clamp_(max=numel - 1)
        if corner is not None:
            row, column, whole_columns = corner
            index = (index // columns + row) * whole_columns + index % columns + column
            columns = whole_columns
        self._index, self._columns = index, columns

    def place(self, name: str) -> torch.Tensor:
        match name:
            case "row":
                return self._index // self._columns
            case "col":
                return self._index % self._columns
            case _:
                return self._index

    def element(self, tensor: torch.Tensor, subscript: str) -> torch.Tensor:
        at = self.place(subscript) if subscript in PLACES else torch.zeros_like(self._index)
        return tensor.reshape(-1)[at].to(torch.float32)


class Whole:
    """All elements of a tensor: gives ``row``, ``col``, ``index`` and the operands' elements as tensors that broadcast.

    Broadcasting makes the gradient of an operand a sum over rows or columns.
    """

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self._rows, self._columns, self._device = rows, columns, device

    def place(self, name: str) -> torch.Tensor:
        row = torch.arange(self._rows, device=self._device).view(-1, 1)
        col = torch.arange(self._columns, device=self._device).view(1, -1)
        return {"row": row, "col": col}[name] if name != "index" else row * self._columns + col

    def element(self, tensor: torch.Tensor, subscript: str) -> torch.Tensor:
        shape = {"row": (-1, 1), "col": (1, -1), "index": (self._rows, self._columns), "0": (1, 1)}[subscript]
        return tensor.reshape(shape).to(torch.float32)


def evaluate(
    found: Expression, v: torch.Tensor, tensors: Sequence[torch.Tensor], scalars: Sequence[float], there: Window | Whole
) -> torch.Tensor:
    """Returns the expression's values in fp32 for the fp32 sums ``v``, which are at the places ``there``.

    ``tensors`` and ``scalars`` are the expression's, sorted by name.
    """

    def value(node: Node) -> torch.Tensor:
        match node:
            case Number(number):
                return torch.full((), number, dtype=torch.float32, device=v.device)
            case Name("v"):
                return v
            case Name(name) if name in PLACES:
                return there.place(name).to(torch.float32)
            case Name(name):
                return torch.full((), scalars[found.scalars.index(name)], dtype=torch.float32, device=v.device)
            case Operand(name, subscript):
                return there.element(tensors[found.tensors.index(name)], subscript)
            case Apply(operation, of):
                return OPERATIONS[operation][1](*map(value, of))
        raise AssertionError(node)

    return value(found.tree).expand_as(v)
