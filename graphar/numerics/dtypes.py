"""The dtypes that graphar sums: their names in CUDA C++, the dtypes that sums are accumulated in, canonical NaNs."""

from __future__ import annotations

import ctypes

import torch

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # dtypes that kernels sum
SAME_SIZE_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}
BYTE = torch.uint8  # the element of kernels that only move data, whatever the tensors' dtype

# A sum is accumulated in this dtype, and rounded once to the dtype of the inputs. Integers wrap.
ACCUMULATION_DTYPES = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int16,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}


def fp32(number: float) -> float:
    """Returns a number rounded to fp32."""
    return ctypes.c_float(number).value


def with_canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` with every NaN replaced by the canonical NaN of its dtype: all bits set but the sign.

    This is the NaN that additions and roundings of a GPU give. Tensors of integers are returned as they are.
    """
    if not x.is_floating_point():
        return x
    bits = x.view(SAME_SIZE_INTEGER[x.element_size()])
    return torch.where(x.isnan(), torch.iinfo(bits.dtype).max, bits).view(x.dtype)
