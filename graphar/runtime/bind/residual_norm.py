"""Residual and RMSNorm of a finished sum, and their gradients, by kernels on one GPU without communication."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from graphar.numerics import norm_gradients
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.scratch import NORM_SHARED_NBYTES, PACK_NBYTES, WARP
from graphar.plan.select import has_norm_kernel
from graphar.runtime import launcher
from graphar.runtime.arguments import NormArguments, NormGradientArguments
from graphar.runtime.catalogue import residual_norm_backward_sources, residual_norm_source
from graphar.runtime.driver import attribute
from graphar.runtime.launcher import Grid, Launch, OwnLaunches, early_grid, runs_on

_THREADS_AN_SM = 2048  # by the launch bounds of cuda_src/norm/residual_rmsnorm.cu
# As in cuda_src/norm/residual_rmsnorm_backward.cu: the size of PairsOfWarps, `tensors`, and `columns_added`.
PAIRS_NBYTES = 512
STAGED_TENSORS = 3
COLUMNS_ADDED = 32
_SHARED_NBYTES = "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"  # of a block
_MOST_STAGES = 4  # rows that a block has in shared memory; more are not faster (H100)


def serves(residual: torch.Tensor, total_dtype: torch.dtype | None = None) -> bool:
    """Whether the kernel can norm the rows of ``residual`` and of a sum in ``total_dtype``; None: in the same dtype."""
    if not residual.is_cuda or not residual.numel() or residual.dtype not in TYPE_NAMES:
        return False
    if total_dtype not in (None, residual.dtype, torch.float32):
        return False
    return has_norm_kernel(residual.shape[-1] * residual.element_size()) and runs_on(residual.device.index)


def norm(
    total: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    normed: torch.Tensor,
    summed: torch.Tensor,
    eps: float,
    offset: float,
) -> None:
    """Writes the normed tensor into ``normed``, which may be ``total``, and the sum with the residual into ``summed``.

    The specification is graphar.numerics.norms.specification. The kernel is queued on torch's current stream. All
    tensors are contiguous. ``total``, ``residual``, which :func:`serves` approves, ``normed`` and ``summed`` have the
    same shape [..., columns]; ``weight`` is [columns]. All have one dtype, or ``total`` is fp32 and the others have one
    dtype. A ``total`` of another dtype shares no memory with ``normed``.
    """
    launches = _bind(total.device.index, weight.dtype, total.dtype, total.numel(), weight.numel(), eps, offset)
    launches.run(input=total, residual=residual, weight=weight, output=normed, summed=summed)


def load(device: int, dtype: torch.dtype, total_dtype: torch.dtype | None = None):
    """Loads and returns the kernel: before one that waits for other ranks runs, beside which loading could hang."""
    source = residual_norm_source(dtype, total_dtype)
    return launcher.load(source, device, NORM_SHARED_NBYTES, f"residual_rmsnorm for {dtype}")


@functools.lru_cache(maxsize=1024)
def _bind(
    device: int, dtype: torch.dtype, total_dtype: torch.dtype, numel: int, columns: int, eps: float, offset: float
) -> OwnLaunches:
    arguments = NormArguments(numel=numel, columns=columns, eps=eps, weight_offset=offset)
    packs = columns * dtype.itemsize // PACK_NBYTES
    threads = min(1024, max(WARP, 1 << (packs - 1).bit_length()))
    blocks = min(numel // columns, _THREADS_AN_SM // threads * launcher.sm_count(device))
    grid = early_grid(device, blocks, threads, NORM_SHARED_NBYTES)
    return OwnLaunches(device, arguments, [Launch(load(device, dtype, total_dtype), [arguments], grid)])


def backward(
    of_normed: torch.Tensor,
    of_summed: torch.Tensor | None,
    summed: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    of_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of the rows that were normed, and of the weight: empty if it is not wanted.

    The specification is graphar.numerics.norm_gradients.specification. All tensors are contiguous, and of one dtype;
    :func:`serves_backward` approves ``summed``. The kernels are queued on torch's current stream.
    """
    device, columns = summed.device.index, weight.numel()
    launches, groups = _bind_backward(device, summed.dtype, summed.numel() // columns, columns, eps, offset, of_weight)
    of_rows = torch.empty_like(summed)
    of_groups = weight.new_empty((groups if of_weight else 0, columns), dtype=torch.float32)
    total = weight.new_empty(columns if of_weight else 0)
    inputs = {"of_normed": of_normed, "of_summed": of_summed, "summed": summed, "weight": weight}
    aligned = {name: x.clone() if x is not None and x.data_ptr() % PACK_NBYTES else x for name, x in inputs.items()}
    launches.run(**aligned, of_rows=of_rows, groups=of_groups, of_weight=total)
    return of_rows, total


class _Staging(NamedTuple):
    """How a block stages rows, for the kernel's template arguments."""

    packs: int  # of a row, for each thread; a power of two, so that there are few kernels
    stages: int  # rows in shared memory; 0: not even one fits
    nbytes: int  # shared memory


def _staging(device: int, row_nbytes: int) -> _Staging:
    threads = norm_gradients.threads_of(row_nbytes)
    packs = 1 << (-(-row_nbytes // (threads * PACK_NBYTES)) - 1).bit_length()
    stage_nbytes = STAGED_TENSORS * packs * threads * PACK_NBYTES
    stages = min(_MOST_STAGES, (attribute(_SHARED_NBYTES, device) - PAIRS_NBYTES) // stage_nbytes)
    return _Staging(packs, stages, PAIRS_NBYTES + stages * stage_nbytes)


def serves_backward(summed: torch.Tensor) -> bool:
    return serves(summed) and _staging(summed.device.index, summed.shape[-1] * summed.element_size()).stages > 0


def load_backward(device: int, dtype: torch.dtype, columns: int) -> tuple:
    """Loads and returns the kernels for rows of ``columns``. Do so before a kernel that waits for other ranks runs."""
    packs, stages, _ = _staging(device, columns * dtype.itemsize)
    sources, what = residual_norm_backward_sources(dtype, packs, stages), f"residual_rmsnorm_backward for {dtype}"
    return tuple(launcher.load(source, device, attribute(_SHARED_NBYTES, device), what) for source in sources)


@functools.lru_cache(maxsize=1024)
def _bind_backward(
    device: int, dtype: torch.dtype, rows: int, columns: int, eps: float, offset: float, of_weight: bool
) -> tuple[OwnLaunches, int]:
    """Returns the launches of the kernels, and the groups of rows."""
    row_nbytes = columns * dtype.itemsize
    groups = norm_gradients.row_groups(rows, row_nbytes)
    arguments = NormGradientArguments(
        rows=rows, columns=columns, row_groups=groups, eps=eps, weight_offset=offset, with_weight=of_weight
    )
    gradients, sums = load_backward(device, dtype, columns)
    # The kernel before may wait for ranks: (18) in cuda_src/device/sync/kernel_order.cuh. The second kernel here is
    # released by the first, after the kernel before has ended.
    overlaps, chip = launcher.can_overlap(device), launcher.chip(device)
    is_early = overlaps and groups < chip.sms and chip.may_overlap(groups, halves=False)
    shared_nbytes = max(_staging(device, row_nbytes).nbytes, _nbytes_to_spread(device, groups))
    grid = Grid(groups, norm_gradients.threads_of(row_nbytes), shared_nbytes, is_early)
    bound = [Launch(gradients, [arguments], grid)]
    if of_weight:
        threads = threads_of_sums(groups)
        bound.append(Launch(sums, [arguments], Grid(-(-columns // COLUMNS_ADDED), threads, threads * 16, overlaps)))
    return OwnLaunches(device, arguments, bound), groups


def threads_of_sums(groups: int) -> int:
    """Returns the threads of a block that adds the sums of ``groups`` of rows."""
    return COLUMNS_ADDED // 4 * max(4, min(norm_gradients.LANES, groups))


def _nbytes_to_spread(device: int, blocks: int) -> int:
    """Returns the shared memory of a block with which no SM has room for more than its share of a grid of ``blocks``.

    Otherwise two blocks may run on one SM while another SM has none (H100: 240 us in place of 140).
    """
    share = -(-blocks // launcher.sm_count(device))
    return attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR", device) // (share + 1) // PACK_NBYTES * PACK_NBYTES
