"""Adds a residual to a finished sum and computes its RMSNorm, by a kernel on one GPU without communication."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.scratch import NORM_SHARED_NBYTES, PACK_NBYTES, WARP
from graphar.plan.select import has_norm_kernel
from graphar.runtime import launcher
from graphar.runtime.arguments import NormArguments
from graphar.runtime.availability import missing_software
from graphar.runtime.catalogue import residual_norm_source
from graphar.runtime.launcher import Grid, Launch

Tensors = Sequence[torch.Tensor]

_BLOCKS_AN_SM = 2  # as in the launch bounds of cuda_src/norm/residual_rmsnorm.cu


def serves(total: torch.Tensor) -> bool:
    """Whether the kernel can norm the rows of ``total``."""
    if not total.is_cuda or not total.numel() or total.dtype not in TYPE_NAMES:
        return False
    return has_norm_kernel(total.shape[-1] * total.element_size()) and _runs_on(total.device.index)


@functools.cache
def _runs_on(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0) and not missing_software()


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
    tensors are contiguous, and of one dtype. ``total``, which :func:`serves` approves, ``residual``, ``normed`` and
    ``summed`` have the same shape [..., columns]; ``weight`` is [columns].

    Raises:
        UnsupportedError: the kernel is not loaded yet while a graph is captured.
    """
    device = total.device.index
    launch = _bind(device, total.dtype, total.numel(), weight.numel(), eps, offset)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream().cuda_stream
        launch((total, residual, weight), (normed, summed), stream)


@functools.cache
def load(device: int, dtype: torch.dtype):
    """Loads and returns the kernel. Do so before a kernel that waits for other ranks runs: loading could hang."""
    return launcher.load(residual_norm_source(dtype), device, NORM_SHARED_NBYTES, f"residual_rmsnorm for {dtype}")


@functools.lru_cache(maxsize=1024)
def _bind(
    device: int, dtype: torch.dtype, numel: int, columns: int, eps: float, offset: float
) -> Callable[[Tensors, Tensors, int], None]:
    """Returns a function that launches one norm.

    It takes what :meth:`graphar.runtime.arguments.NormArguments.put` takes, and a stream.
    """
    arguments = NormArguments(numel=numel, columns=columns, eps=eps, weight_offset=offset)
    packs = columns * dtype.itemsize // PACK_NBYTES
    threads = min(1024, max(WARP, 1 << (packs - 1).bit_length()))
    blocks = min(numel // columns, _BLOCKS_AN_SM * launcher.sm_count(device))
    # By its launch bounds a block takes half an SM.
    is_early = launcher.can_overlap(device) and launcher.chip(device).may_overlap(blocks, halves=True)
    grid = Grid(blocks, threads, NORM_SHARED_NBYTES, is_early)
    bound, lock = Launch(load(device, dtype), [arguments], grid), threading.Lock()

    def launch(inputs: Tensors, outputs: Tensors, stream: int) -> None:
        with lock:  # all threads share the launch's arguments
            arguments.put(inputs, outputs)
            arguments.input, arguments.output = inputs[0].data_ptr(), outputs[0].data_ptr()
            bound.enqueue(stream)

    return launch
