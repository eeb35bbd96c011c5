"""Tensor maps: descriptors of matrices in device memory for TMA, the copy engine of sm_90 and newer."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace

import torch

from graphar.runtime.driver import bind_context, check, driver

_ROW_NBYTES = 128  # of a box: a swizzled row, as in cuda_src/device/ptx/tensor_map.cuh
BOX_COLUMNS = _ROW_NBYTES // 2  # of a 16-bit type
# The alignment, in bytes, of the buffer that the driver writes a map to. Objects of cuda.bindings are aligned to less.
_ALIGNMENT = 128
_TYPES = {  # as the driver names them; it copies e4m3 as bytes
    torch.float16: "FLOAT16",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT32",
    torch.float8_e4m3fn: "UINT8",
}


class TensorMap(ctypes.Structure):
    """Mirrors TensorMap in cuda_src/device/ptx/tensor_map.cuh; its content is opaque."""

    _fields_ = [("word", ctypes.c_uint64 * 16)]


@dataclass(frozen=True)
class Matrix:
    """A matrix whose rows are contiguous, in device memory."""

    pointer: int  # the address of its first element
    dtype: torch.dtype  # torch.bfloat16, torch.float16, torch.float32 or torch.float8_e4m3fn
    rows: int  # the number of rows
    columns: int  # the elements of a row
    leading: int  # the elements from the begin of one row to the begin of the next

    def part(self, begin: int, rows: int) -> Matrix:
        """Returns some of its rows."""
        return replace(self, pointer=self.pointer + begin * self.leading * self.dtype.itemsize, rows=rows)


def matrix_of(x: torch.Tensor) -> Matrix | None:
    """Returns a 2-D tensor as a matrix for a tensor map; None if it cannot have one.

    It has one if it is not empty, and its rows are contiguous and begin at multiples of 16 bytes.
    """
    if x.dtype not in _TYPES or x.numel() == 0 or max(x.shape) >= 1 << 31:
        return None
    matrix = loaded(x)
    contiguous = matrix.columns == 1 or x.stride(1) == 1
    aligned = matrix.leading * x.dtype.itemsize % 16 == 0 and matrix.pointer % 16 == 0
    return matrix if contiguous and aligned and matrix.leading >= matrix.columns else None


def loaded(x: torch.Tensor) -> Matrix:
    """Returns the matrix of a tensor that is known to lie as :func:`matrix_of` needs it; it may be empty."""
    (rows, columns), unit = x.shape, 16 // x.dtype.itemsize
    # With one row or one column, torch's stride may have any value.
    leading = x.stride(0) if rows > 1 else -(-columns // unit) * unit
    return Matrix(x.data_ptr(), x.dtype, rows, columns, leading)


def aligned_like(x: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialised 2-D tensor like ``x`` whose rows begin at multiples of 16 bytes."""
    (rows, columns), unit = x.shape, 16 // x.dtype.itemsize
    return x.new_empty(rows, -(-columns // unit) * unit)[:, :columns]


def aligned_copy(x: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a 2-D tensor whose rows begin at multiples of 16 bytes."""
    return aligned_like(x).copy_(x)


@functools.lru_cache(maxsize=4096)
def tensor_map(matrix: Matrix, box_rows: int) -> TensorMap:
    """Returns the tensor map of a matrix that is moved in boxes of ``box_rows``, at most 256, by 128 bytes.

    Maps are cached by address and shape. A cached map stays valid when the memory is reused: it holds no data.
    """
    bind_context(torch.cuda.current_device())
    buffer = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + _ALIGNMENT)
    place = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % _ALIGNMENT
    interleave = driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    swizzle = driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    promotion = driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    outside = driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE  # zeros
    status = _encode_tiled()(
        place,
        int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[matrix.dtype]}")),
        2,
        matrix.pointer,
        (ctypes.c_uint64 * 2)(matrix.columns, matrix.rows),
        (ctypes.c_uint64 * 1)(matrix.leading * matrix.dtype.itemsize),
        (ctypes.c_uint32 * 2)(_ROW_NBYTES // matrix.dtype.itemsize, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        *map(int, (interleave, swizzle, promotion, outside)),
    )
    check("cuTensorMapEncodeTiled", driver.CUresult(status))
    return TensorMap.from_buffer_copy(ctypes.string_at(place, ctypes.sizeof(TensorMap)))


@functools.cache
def _encode_tiled():
    """Returns the driver's cuTensorMapEncodeTiled; its arguments are plain integers and arrays."""
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    function.restype = ctypes.c_int
    return function
