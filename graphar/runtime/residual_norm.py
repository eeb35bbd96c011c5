"""Residual and norm of a sum that is already there: cuda_src/residual_rmsnorm.cu, which is no collective."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch

from graphar.matmul.gemm import sm_count
from graphar.numerics.epilogues.epilogue import Operands
from graphar.plan.algorithms import NORM_SHARED_NBYTES, PACK_NBYTES, WARP
from graphar.runtime import launcher, loader
from graphar.runtime.arguments import Arguments
from graphar.runtime.catalogue import residual_norm_source

_BLOCKS_AN_SM = 2  # the kernel's launch bounds


def norm(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, summed: torch.Tensor, eps: float, offset: float
) -> None:
    """What graphar.norms.specification gives, in place of ``total`` and in ``summed``; on torch's current stream.

    Args:
        total: [rows, columns], of graphar.kernels.TYPE_NAMES, on a GPU; rows that
            :func:`graphar.plan.choice.has_norm_kernel` has a kernel for. Contiguous, as are the others, and not empty.
        residual, summed: like ``total``.
        weight: [columns], likewise.
        eps, offset: as there.

    Raises:
        UnsupportedError: the kernel is not loaded yet while a graph is captured.
    """
    device = total.device.index
    launch = _bind(device, total.dtype, total.numel(), weight.numel())
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        launch(total.data_ptr(), stream, Operands([residual, weight, summed], [eps, offset]))


@functools.cache
def load(device: int, dtype: torch.dtype):
    """The kernel, loaded: as any, before one is launched beside it that waits for other ranks."""
    return loader.load(residual_norm_source(dtype), device, NORM_SHARED_NBYTES, f"residual_rmsnorm for {dtype}")


@functools.lru_cache(maxsize=1024)
def _bind(device: int, dtype: torch.dtype, numel: int, columns: int) -> Callable[[int, int, Operands], None]:
    """A function of the sums' address, a stream and the rest, that launches one norm as often as it is called."""
    arguments = Arguments(numel=numel)
    arguments.epilogue.columns = columns
    packs = columns * dtype.itemsize // PACK_NBYTES
    threads = min(1024, max(WARP, 1 << (packs - 1).bit_length()))
    launch = launcher.make_launch(
        load(device, dtype),
        arguments,
        min(numel // columns, _BLOCKS_AN_SM * sm_count(device)),
        threads,
        NORM_SHARED_NBYTES,
        launcher.can_overlap(device),
    )
    lock = threading.Lock()

    def launch_with(total: int, stream: int, operands: Operands) -> None:
        with lock:  # all threads share the launch's arguments
            operands.put(arguments.epilogue)
            launch(total, total, stream)

    return launch_with
