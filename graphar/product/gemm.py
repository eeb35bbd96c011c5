"""graphar's matmul kernel, cuda_src/matmul/matmul.cu, for sm_90a; it takes as many SMs as the caller gives it.

It has operands of 16 bits, whose K may be cut in leaves, and operands in e4m3 with fp32 scales.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from graphar.errors import Reason, UnsupportedError
from graphar.numerics.fp8_products import FP8, checked_scales
from graphar.numerics.leaf_tree import LEAF_UNIT
from graphar.plan.algorithms import MATMUL_ARCH, MATMUL_TYPES
from graphar.plan.matmuls import Shape, Sms, alone, best_tile
from graphar.plan.policy import TileCost
from graphar.plan.tiles import LEAF_COUNTS, LEAF_TILES, MatmulTile
from graphar.plan.work import FACTORS, PLAIN, Factors
from graphar.product.operands import Step
from graphar.product.tensor_maps import BOX_COLUMNS, Matrix, TensorMap, loaded, matrix_of, tensor_map
from graphar.runtime import launcher
from graphar.runtime.arguments import MatmulArguments, ScaledMatmulArguments
from graphar.runtime.catalogue import matmul_source
from graphar.runtime.launcher import Grid, Launch
from graphar.runtime.user_tables import find_table

STORE_COLUMNS = 8  # TMA stores whole 16 bytes, and would write past a row that ends within them
STORE_ROWS = 64  # rows of the boxes in which C is stored
# Rows of tiles that are computed together, column by column, so that tiles that run at the same time share operands in
# L2. A row of tiles has ``MatmulTile.rows * MatmulTile.cluster`` rows of C.
GROUP_ROWS = 8


def matmul(
    a: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    bias: torch.Tensor | None = None,
    sms: int | None = None,
    tile: MatmulTile | None = None,
    leaves: int = 1,
    out_dtype: torch.dtype | None = None,
    a_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns ``a @ w.T + bias``, accumulated in fp32 in the order of K and rounded once; on torch's current stream.

    With several ``leaves`` K is cut into as many, of equal length, multiples of 64 columns. They are added in fp32 as a
    binary tree: a node of :mod:`graphar.numerics.leaf_tree`. With scales of e4m3 operands the order is as in
    :func:`graphar.numerics.fp8_products.scaled_linear`. The caller has checked that dtypes, devices and shapes fit.

    Args:
        w: with contiguous rows, as in ``torch.nn.Linear``, or columns, as a transpose has them. With scales its rows.
        sms: how many SMs to take; None: all.
        tile: None: the tile with the least estimated time. With a ``tail_split`` two kernels are launched.
        out_dtype: 16 bits, or torch.float32 for a sum that is not rounded and has no bias. None: the dtype of ``a``, or
            bf16 with scales.
        a_scale, w_scale: of e4m3 operands, the scales as users give them: of rows, or of blocks of 128 x 128.

    Raises:
        ValueError: ``tile`` does not serve the layout of ``w``, or a scale does not fit.
        UnsupportedError: :func:`why_not` has a reason, or the kernel is not loaded yet while a graph is captured.
    """
    op, scales = "matmul", None
    if a_scale is not None and w_scale is not None:
        op, out_dtype = "scaled_matmul", out_dtype or torch.bfloat16
        scales = checked_scales(op, a, w, a_scale, w_scale)
    out = a.new_empty(a.shape[0], w.shape[0], dtype=out_dtype) if out is None else out
    if out.numel() == 0:
        return out
    if a.shape[1] == 0:
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    if reason := why_not(a, w, out, leaves):
        raise UnsupportedError(f"{op}: {reason}")
    if tile and (layout := layout_of(w)) not in tile.layouts:
        raise ValueError(f"{op}: {tile} serves weights {' or '.join(tile.layouts)}, got one {layout}")
    enqueue = bind(Step(a, w, out, scales, bias), sms, tile, leaves)
    with torch.cuda.device(a.device):
        enqueue(torch.cuda.current_stream().cuda_stream)
    return out


def bind(step: Step, sms: int | None = None, tile: MatmulTile | None = None, leaves: int = 1) -> Callable[[int], None]:
    """Returns a function of a stream's handle that launches a step of :func:`matmul`; its device must be current.

    It loads the kernel. K and the result are not empty, and :func:`why_not` has no reason.
    """
    device, matrices, (m, n), k = step.a.device.index, Matrices.of(step), step.out.shape, step.a.shape[1]
    sms = sms or launcher.sm_count(device)
    factors = FACTORS[step.scales.format] if step.scales else PLAIN
    tile = tile or default_tile(device, m, n, k, sms, matrices.layout, leaves, factors)
    with torch.cuda.device(device):
        return _bind(device, tile, sms, matrices)


def why_not(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, leaves: int = 1) -> Reason | None:
    """Returns why the kernel cannot compute ``out`` from ``a`` and ``w`` in ``leaves``; in e4m3 they have scales."""
    if reason := why_none_like(a) or ("" if a.shape[1] else "K is 0"):
        return reason
    for name, x in {"a": a, **({"w": w} if a.dtype == FP8 else {}), "out": out}.items():
        if x.numel() and matrix_of(x) is None:
            return f"the rows of {name} must be contiguous and begin at multiples of 16 bytes"
    if out.shape[1] % STORE_COLUMNS:
        return f"the columns of out must be a multiple of {STORE_COLUMNS}, got {out.shape[1]}"
    if a.dtype != FP8 and not layout_of(w):
        return "the rows or the columns of w must be contiguous and begin at multiples of 16 bytes"
    if leaves > 1 and a.shape[1] % (leaves * LEAF_UNIT):
        return f"the columns of a must be a multiple of {leaves * LEAF_UNIT} for {leaves} leaves, got {a.shape[1]}"
    return None


def why_none_like(a: torch.Tensor) -> Reason | None:
    """Returns why the kernel has no products of ``a``, whatever its layout."""
    if a.dtype not in (*MATMUL_TYPES, FP8):
        return f"the kernel has no {a.dtype}"
    if a.device.type != "cuda" or launcher.architecture(a.device.index) != MATMUL_ARCH:
        return f"the kernel needs a device of {MATMUL_ARCH}, got tensors on {a.device}"
    return None


def default_tile(
    device: int, m: int, n: int, k: int, sms: int, layout: str = "by_rows", leaves: int = 1, factors: Factors = PLAIN
) -> MatmulTile:
    """Returns the tile that :func:`matmul` takes by default for [m, k] times [k, n] on ``sms`` SMs of a device."""
    in_clusters = _sms_in_clusters(device) if leaves > 2 else 0
    return best_tile(alone(factors, leaves), Shape((m,), n, k, layout), cost_on(device), Sms(sms, in_clusters))


@functools.cache
def _sms_in_clusters(device: int) -> int:
    """Returns how many SMs of a device the largest clusters find: 120 of 132 on some. It loads a kernel."""
    tile = next(tile for tile in LEAF_TILES[LEAF_COUNTS[-1]] if tile.blocks == LEAF_COUNTS[-1])
    with torch.cuda.device(device):
        return tile.blocks * _clusters_at_once(device, MATMUL_TYPES[0], tile, "by_rows", MATMUL_TYPES[0], "")


@functools.cache
def cost_on(device: int) -> TileCost:
    """Returns the costs by which tiles are chosen on a device."""
    return find_table(torch.cuda.get_device_name(device)).matmul.cost


def layout_of(w: torch.Tensor) -> str:
    """Returns which of LAYOUTS the weight has; an empty string if neither its rows nor its columns can be loaded."""
    if matrix_of(w) is not None:
        return "by_rows"
    return "by_columns" if matrix_of(w.t()) is not None else ""


_OF_SCALES = [field[0] for field in ScaledMatmulArguments._fields_]


class Matrices(NamedTuple):
    """Where the operands and the result of one rank's matmul lie, for the tensor maps and arguments of a launch."""

    a: Matrix
    w: Matrix  # as it lies in memory
    layout: str  # the layout of W, one of LAYOUTS
    out: Matrix  # [M, N]
    bias: int = 0  # the address of the bias; 0 without one
    constant_weight: bool = False  # whether W may be loaded while the kernel before still runs
    scale_format: str = ""  # the C++ class of the format of scales; an empty string without them
    scales: tuple[int, ...] = ()  # their addresses, and strides in elements, as ScaledMatmulArguments has them

    @classmethod
    def of(cls, step: Step, constant_weight: bool = False, gathered_scales: torch.Tensor | None = None) -> Matrices:
        """Returns where a step's tensors lie, and the scales of gathered rows, if they are wanted."""
        a, w, out, scales, bias = step
        layout = layout_of(w)
        weights = loaded(w if layout == "by_rows" else w.t())
        pointer = 0 if bias is None else bias.contiguous().data_ptr()
        matrices = cls(loaded(a), weights, layout, loaded(out), pointer, constant_weight)
        if scales is None:
            return matrices
        of_a, of_w, to = (0 if x is None else x.data_ptr() for x in (scales.a, scales.w, gathered_scales))
        beside = of_a, of_w, *scales.a.stride(), *scales.w.stride(), to
        return matrices._replace(scale_format=FACTORS[scales.format].template, scales=beside)

    def arguments(self, rows: int, *, from_row: int = 0, **more: int) -> MatmulArguments:
        """Returns the arguments of a launch on rows of A that begin at ``from_row``; the result has ``rows``."""
        sizes = self.bias, rows, self.out.columns, self.a.columns
        if not self.scales:
            return MatmulArguments(*sizes, **more)
        arguments = ScaledMatmulArguments(*sizes, **more, **dict(zip(_OF_SCALES, self.scales, strict=True)))
        arguments.a_scale += from_row * arguments.a_scale_row * torch.float32.itemsize
        return arguments

    def weight_map(self, tile: MatmulTile) -> TensorMap:
        """Returns the tensor map of W for the boxes that the kernels load."""
        w_rows = tile.columns if self.layout == "by_rows" else BOX_COLUMNS
        return tensor_map(self.w, w_rows // tile.cluster)


def rows_map(tile: MatmulTile, a: Matrix) -> TensorMap:
    """Returns the tensor map of rows of A for the boxes that the kernels load: no higher than the rows need."""
    return tensor_map(a, min(tile.rows, -(-a.rows // 8) * 8))


@functools.cache
def _function(
    device: int, dtype: torch.dtype, tile: MatmulTile, layout: str, out_dtype: torch.dtype, scale_format: str
):
    source = matmul_source(dtype, tile, layout, out_dtype, scale_format)
    return launcher.load(source, device, tile.shared_nbytes, f"matmul: {tile} for {dtype}")


@functools.cache
def _clusters_at_once(device: int, dtype: torch.dtype, tile: MatmulTile, *kernel) -> int:
    """Returns how many clusters of a kernel run on a device at once; it must be current."""
    return launcher.clusters_at_once(_function(device, dtype, tile, *kernel), _grid(tile, 1))


def _grid(tile: MatmulTile, clusters: int) -> Grid:
    # overlaps=False: a launch that overlaps an all-reduce or a norm made both up to 9 % slower on 2 H200s.
    return Grid(clusters * tile.blocks, tile.threads, tile.shared_nbytes, overlaps=False, cluster=tile.blocks)


@functools.lru_cache(maxsize=1024)
def _bind(device: int, tile: MatmulTile, sms: int, matrices: Matrices) -> Callable[[int], None]:
    a, c = matrices.a, matrices.out
    rows, columns = -(-a.rows // (tile.rows * tile.cluster)), -(-c.columns // tile.columns)
    maps = [rows_map(tile, a), matrices.weight_map(tile), tensor_map(c, STORE_ROWS)]

    def launch_of(tile: MatmulTile, first: int, end: int) -> Launch:
        """Returns the launch of some of the tiles, numbered in their order."""
        fields = matrices.arguments(a.rows, group_rows=min(GROUP_ROWS, rows))
        if not matrices.scales:
            fields.c, fields.c_leading, fields.first_tile, fields.end_tile = c.pointer, c.leading, first, end
        clusters = min(max(sms // tile.blocks, 1), end - first)
        kernel = a.dtype, tile, matrices.layout, c.dtype, matrices.scale_format
        if tile.split > 1:
            # Clusters that find no room begin when others end, and would then compute all their tiles.
            clusters = min(clusters, _clusters_at_once(device, *kernel))
        return Launch(_function(device, *kernel), [*maps, fields], _grid(tile, clusters))

    tiles, tail = rows * columns, tile.of_tail
    whole = tiles // sms * sms if tail else tiles
    steps = [launch_of(replace(tile, tail_split=1), 0, whole)] if whole else []
    steps += [launch_of(tail, whole, tiles)] if tail and whole < tiles else []

    def enqueue_all(stream: int) -> None:
        for step in steps:
            step.enqueue(stream)

    return steps[0].enqueue if len(steps) == 1 else enqueue_all
