"""Tensor maps: a matrix in device memory, as the copy engine of sm_90 and newer is told of it."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from cuda.bindings import driver

from graphar.runtime.driver import check

BOX_COLUMNS = 64  # 128 bytes of a 16-bit type: a swizzled row, as in cuda_src/device/tensor_map.cuh
_ALIGNMENT = 128  # of what the driver writes a map to; more than the objects of cuda.bindings have
_TYPES = {
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
}


class TensorMap(ctypes.Structure):
    """Mirrors TensorMap in cuda_src/device/tensor_map.cuh; only the driver and the hardware know what is in it."""

    _fields_ = [("word", ctypes.c_uint64 * 16)]


@dataclass(frozen=True)
class Matrix:
    """A matrix whose rows are contiguous, in device memory.

    Attributes:
        pointer: the address of its first element.
        dtype: torch.bfloat16 or torch.float16.
        rows: how many.
        columns: elements of a row.
        leading: elements from one row to the next.
    """

    pointer: int
    dtype: torch.dtype
    rows: int
    columns: int
    leading: int


def matrix_of(x: torch.Tensor) -> Matrix | None:
    """A 2-D tensor as a matrix with a tensor map; None where it cannot have one.

    It can if the rows are contiguous and begin at multiples of 16 bytes, the element type has 16 bits, and there is
    an element at all.
    """
    if x.dtype not in _TYPES or x.numel() == 0 or max(x.shape) >= 1 << 31:
        return None
    rows, columns = x.shape
    # Where there is one row, or one column, torch may have any stride.
    leading = x.stride(0) if rows > 1 else -(-columns // 8) * 8
    contiguous = columns == 1 or x.stride(1) == 1
    if not contiguous or leading < columns or leading % 8 or x.data_ptr() % 16:
        return None
    return Matrix(x.data_ptr(), x.dtype, rows, columns, leading)


@functools.lru_cache(maxsize=4096)
def tensor_map(matrix: Matrix, box_rows: int) -> TensorMap:
    """The map of a matrix that is moved in boxes of ``box_rows``, at most 256, by BOX_COLUMNS.

    It tells nothing of what is in the memory, so it serves whatever else comes to lie there, too.
    """
    buffer = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + _ALIGNMENT)
    place = ctypes.addressof(buffer) + -ctypes.addressof(buffer) % _ALIGNMENT
    interleave = driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    swizzle = driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    promotion = driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
    outside = driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE  # zeros
    status = _encode_tiled()(
        place,
        int(_TYPES[matrix.dtype]),
        2,
        matrix.pointer,
        (ctypes.c_uint64 * 2)(matrix.columns, matrix.rows),
        (ctypes.c_uint64 * 1)(matrix.leading * matrix.dtype.itemsize),
        (ctypes.c_uint32 * 2)(BOX_COLUMNS, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        *map(int, (interleave, swizzle, promotion, outside)),
    )
    check("cuTensorMapEncodeTiled", driver.CUresult(status))
    return TensorMap.from_buffer_copy(ctypes.string_at(place, ctypes.sizeof(TensorMap)))


@functools.cache
def _encode_tiled():
    """The driver's cuTensorMapEncodeTiled."""
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [pointer, number, number, *[pointer] * 5, *[number] * 4]
    function.restype = ctypes.c_int
    return function
