"""What an all-reduce brings into the L2 cache while it waits for its peers: the weight that the next matmul reads.

A hint to kernels that can (algorithms.PREFETCHING), where the sum is small: then waiting takes most of the time, and
reading weights most of the matmul's. cuda_src/device/prefetch.cuh does it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from graphar.plan import checks
from graphar.plan.algorithms import PACK_NBYTES, PREFETCHING, Algorithm, Shape
from graphar.runtime.arguments import Arguments

# Of a call. On four H200s sums of 1, 16 and 64 rows of 8192, with the matmul behind them, gained 0 to 0.9 us by 4 MB;
# by 16 MB those of one row lost 1 us of 18, for the sum itself then takes longer.
BUDGET_NBYTES = 4 << 20
LARGEST_NBYTES = 2 << 20  # of a sum: 128 rows of 8192 bf16; with more, a matmul has other limits than its weight
BLOCKS = 132  # of a kernel that prefetches, at least: a block without a share of the sum has one of the weight


def pays(algorithm: Algorithm, nbytes: int) -> bool:
    """Whether ``algorithm`` can prefetch, and the sum, of so many bytes, is small enough for it to matter."""
    return algorithm in PREFETCHING and nbytes <= LARGEST_NBYTES


def prefetching(shape: Shape) -> Shape:
    """The shape of the same all-reduce with something to prefetch: all SMs take part."""
    return replace(shape, blocks=max(shape.blocks, BLOCKS), prefetches=True)


def interior(begin: int, end: int) -> tuple[int, int]:
    """Where the first whole 16 bytes lie between two addresses, and how many bytes are fetched from there on."""
    first = -(-begin // PACK_NBYTES) * PACK_NBYTES
    return first, max(0, min(end // PACK_NBYTES * PACK_NBYTES - first, BUDGET_NBYTES))


def make_launch(launch: Callable, arguments: Arguments) -> Callable:
    """``launch``, of a tensor to prefetch as well, whose place it puts among its ``arguments``."""

    def launch_with_prefetch(input_pointer: int, output_pointer: int, stream: int, following: torch.Tensor) -> None:
        place = interior(*checks.span(following)) if following.numel() else (0, 0)
        arguments.prefetch, arguments.prefetch_nbytes = place
        launch(input_pointer, output_pointer, stream)

    return launch_with_prefetch


def without(run: Callable) -> Callable:
    """``run``, of input and output, of something to prefetch as well, which it ignores."""
    return lambda x, out, following: run(x, out)
