"""The operations of an epilogue in CUDA C++ and in torch. The torch code is the specification.

Each step is rounded to fp32, to nearest, without contraction. EXACT operations have the same bits in C++ and in torch.
The results of TRANSCENDENTAL operations differ by a few units in the last place of fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

# The C++ code of an operation, with functions of cuda_src/device/epilogue.cuh, and the operation in torch.
Operations = dict[str, tuple[str, Callable[..., torch.Tensor]]]


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


def _comparison(sign: str, compare: Callable[..., torch.Tensor]) -> tuple[str, Callable[..., torch.Tensor]]:
    return f"truth({{}} {sign} {{}})", lambda a, b: _truth(compare(a, b))


COMPARISONS = {"<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne}
EXACT: Operations = {
    "+": ("__fadd_rn({}, {})", torch.add),
    "-": ("__fsub_rn({}, {})", torch.sub),
    "*": ("__fmul_rn({}, {})", torch.mul),
    "/": ("__fdiv_rn({}, {})", torch.div),
    "neg": ("(-{})", torch.neg),
    **{sign: _comparison(sign, compare) for sign, compare in COMPARISONS.items()},
    "&&": ("truth({} != 0 && {} != 0)", lambda a, b: _truth((a != 0) & (b != 0))),
    "||": ("truth({} != 0 || {} != 0)", lambda a, b: _truth((a != 0) | (b != 0))),
    "!": ("truth({} == 0)", lambda a: _truth(a == 0)),
    "?:": ("({} != 0 ? {} : {})", lambda condition, a, b: torch.where(condition != 0, a, b)),
    "abs": ("fabsf({})", torch.abs),
    "sqrt": ("__fsqrt_rn({})", nearest_sqrt),
    "rint": ("rintf({})", torch.round),
    **{name: (f"{name}f({{}})", getattr(torch, name)) for name in ("floor", "ceil", "trunc")},
    "isnan": ("truth(is_nan({}))", lambda a: _truth(a.isnan())),
    "relu": ("maximum({}, 0.0f)", lambda a: _maximum(a, torch.zeros_like(a))),
    "hardswish": ("hardswish({})", lambda a: a * _minimum(_maximum(a + 3, a.new_zeros(())), a.new_full((), 6)) / 6),
    "max": ("maximum({}, {})", _maximum),
    "min": ("minimum({}, {})", _minimum),
    "clamp": ("minimum(maximum({}, {}), {})", lambda a, low, high: _minimum(_maximum(a, low), high)),
    "bf16": ("rounded<bf16>({})", lambda a: a.to(torch.bfloat16).to(torch.float32)),
    "fp16": ("rounded<fp16>({})", lambda a: a.to(torch.float16).to(torch.float32)),
}
_FLOAT_FUNCTIONS = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "erf", "rsqrt")
_ACTIVATIONS = ("sigmoid", "silu", "gelu", "softplus", "elu", "mish")
TRANSCENDENTAL: Operations = {
    "pow": ("powf({}, {})", torch.pow),
    **{name: (f"{name}f({{}})", getattr(torch, name)) for name in _FLOAT_FUNCTIONS},
    **{name: (f"{name}({{}})", getattr(functional, name)) for name in _ACTIVATIONS},
    "gelu_tanh": ("gelu_tanh({})", partial(functional.gelu, approximate="tanh")),
}
OPERATIONS = EXACT | TRANSCENDENTAL
# How many arguments each function takes. `where` is another spelling of `?:`.
FUNCTIONS = {name: code.count("{}") for name, (code, _) in OPERATIONS.items() if name.isidentifier() and name != "neg"}
FUNCTIONS["where"] = 3
