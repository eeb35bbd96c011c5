"""graphar's matmul of e4m3 operands with fp32 scales: cuda_src/matmul/matmul.cu, for sm_90a."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from graphar.errors import Reason, UnsupportedError
from graphar.numerics.fp8_products import Scales, check_operands, checked_scales
from graphar.plan.best_tile import ALONE_SCALED, Shape, Sms, best_tile
from graphar.plan.tiles import FP8_TILES, MatmulTile
from graphar.product import gemm
from graphar.product.gemm import STORE_ROWS, Order
from graphar.product.tensor_maps import Matrix, matrix_of, tensor_map
from graphar.runtime import launcher
from graphar.runtime.arguments import ScaledMatmulArguments
from graphar.runtime.catalogue import SCALE_FORMATS, scaled_matmul_source
from graphar.runtime.launcher import Grid, Launch


def scaled_matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    a_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    sms: int | None = None,
    tile: MatmulTile | None = None,
    order: Order | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Returns ``(a * a_scale) @ (w * w_scale).T + bias`` of e4m3 operands, accumulated in fp32 and rounded once.

    The order is that of :func:`graphar.numerics.fp8_products.scaled_linear`: blocks of 128 of K are accumulated by the
    tensor cores from zero, and added in fp32 in the order of K. An element depends on its row of ``a``, its row of
    ``w`` and their scales alone, for every tile and every number of rows. It is queued on torch's current stream.

    Args:
        a: [M, K], torch.float8_e4m3fn, on a device of sm_90a. Its rows are contiguous and begin at multiples of 16
            bytes.
        w: [N, K], likewise, as torch.nn.Linear stores it. N is a multiple of 8.
        out: [M, N] of ``out_dtype``, takes the result; overlaps no operand. None: a new tensor.
        a_scale: fp32, with any strides: of rows [M, 1], or one number; of blocks [M, ceil(K / 128)].
        w_scale: fp32, with any strides: of rows [N, 1], [1, N], or one number; of blocks [ceil(N / 128), ceil(K /
            128)]. Scales that could be of either format are of rows.
        bias: [N], contiguous, with the dtype of the result. Not for results in fp32.
        sms: how many SMs to take; None: all.
        tile: one of FP8_TILES; None: the one with the least estimated time.
        order: the order of the tiles of C.
        out_dtype: the dtype of the result: torch.bfloat16, torch.float16, or torch.float32 for the sum that is not
            rounded, such as a rank's partial.

    Raises:
        TypeError, ValueError: dtypes, devices, shapes or scales that do not fit together; less than one SM; another
            tile.
        UnsupportedError: :func:`why_not` has a reason, or the kernel is not loaded yet while a graph is captured.
    """
    check_operands("scaled_matmul", a, w, bias, out_dtype)
    scales = checked_scales("scaled_matmul", a, w, a_scale, w_scale)
    _check(a, w, out, bias, out_dtype)
    if sms is not None and sms < 1:
        raise ValueError(f"scaled_matmul: sms must be 1 or more, got {sms}")
    if tile and tile not in FP8_TILES:
        raise ValueError(f"scaled_matmul: tile must be one of FP8_TILES, got {tile}")
    out = a.new_empty(a.shape[0], w.shape[0], dtype=out_dtype) if out is None else out
    if out.numel() == 0:
        return out
    if a.shape[1] == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    if reason := why_not(a, w, out):
        raise UnsupportedError(f"scaled_matmul: {reason}")
    enqueue = bind(a, w, out, scales, bias, sms, tile, order)
    with torch.cuda.device(a.device):
        enqueue(torch.cuda.current_stream().cuda_stream)
    return out


def bind(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    scales: Scales,
    bias: torch.Tensor | None = None,
    sms: int | None = None,
    tile: MatmulTile | None = None,
    order: Order | None = None,
) -> Callable[[int], None]:
    """Returns a function of a stream's handle that launches a scaled product into ``out``; its device must be current.

    It loads the kernel. The caller has checked the arguments of :func:`scaled_matmul`: K and ``out`` are not empty, and
    :func:`why_not` has no reason. The dtype of ``out`` is ``out_dtype``.
    """
    device = a.device.index
    sms = sms or launcher.sm_count(device)
    if tile is None:
        (m, n), kind = out.shape, ALONE_SCALED["blocks" if scales.in_blocks else "rows"]
        tile = best_tile(kind, Shape((m,), n, a.shape[1]), gemm.cost_on(device), Sms(sms))
    pointer = 0 if bias is None else bias.data_ptr()
    operands = matrix_of(a), matrix_of(w), matrix_of(out)
    with torch.cuda.device(device):
        return _bind(device, tile, sms, order or Order(), *operands, pointer, placed(scales))


def why_not(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> Reason | None:
    """Returns why the kernel cannot compute ``out`` from ``a`` and ``w``."""
    return gemm.why_not_on(a.device) or gemm.why_not_lying(a=a, w=w, out=out)


def _check(
    a: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> None:
    if bias is not None and not bias.is_contiguous():
        raise ValueError("scaled_matmul: bias must be contiguous")
    if out is None:
        return
    if out.dtype != out_dtype:
        raise TypeError(f"scaled_matmul: out must have out_dtype, {out_dtype}, got {out.dtype}")
    if out.device != a.device:
        raise ValueError(f"scaled_matmul: out must be on the device of a, {a.device}, got {out.device}")
    if out.shape != (len(a), len(w)):
        raise ValueError(f"scaled_matmul: out must be {[len(a), len(w)]}, got {list(out.shape)}")


class PlacedScales(NamedTuple):
    """Scales in device memory: addresses, and strides in elements; 0 where one serves all."""

    in_blocks: bool
    a_scale: int
    w_scale: int
    a_scale_row: int
    a_scale_block: int
    w_scale_row: int
    w_scale_block: int

    def put(self, arguments: ScaledMatmulArguments, first_row: int = 0) -> None:
        """Writes them for a launch on rows of A from ``first_row`` on."""
        for name, value in self._asdict().items():
            if name != "in_blocks":
                setattr(arguments, name, value)
        arguments.a_scale += first_row * self.a_scale_row * torch.float32.itemsize


def placed(scales: Scales) -> PlacedScales:
    """Returns where scales lie."""
    strides = [scale.stride(dim) for scale in (scales.a, scales.w) for dim in (0, 1)]
    return PlacedScales(scales.in_blocks, scales.a.data_ptr(), scales.w.data_ptr(), *strides)


@functools.cache
def _function(device: int, tile: MatmulTile, out_dtype: torch.dtype, scale_format: str):
    source = scaled_matmul_source(tile, out_dtype, scale_format)
    return launcher.load(source, device, tile.shared_nbytes, f"scaled_matmul: {tile} for {out_dtype}")


@functools.lru_cache(maxsize=1024)
def _bind(
    device: int,
    tile: MatmulTile,
    sms: int,
    order: Order,
    a: Matrix,
    w: Matrix,
    c: Matrix,
    bias: int,
    scales: PlacedScales,
) -> Callable[[int], None]:
    """Returns a function that launches the matmul on a stream, at each call."""
    rows, columns = -(-a.rows // (tile.rows * tile.cluster)), -(-w.rows // tile.columns)
    first_row, group_rows = order.first_row % rows, min(order.group_rows, rows)
    arguments = ScaledMatmulArguments(bias, a.rows, w.rows, a.columns, first_row, group_rows)
    scales.put(arguments)
    maps = [*gemm.operand_maps(tile, "by_rows", a, w), tensor_map(c, STORE_ROWS)]
    function = _function(device, tile, c.dtype, SCALE_FORMATS[scales.in_blocks])
    blocks = tile.cluster * min(max(sms // tile.cluster, 1), rows * columns)
    # overlaps=False: as in gemm.py.
    grid = Grid(blocks, tile.threads, tile.shared_nbytes, overlaps=False, cluster=tile.cluster)
    return Launch(function, [*maps, arguments], grid).enqueue
