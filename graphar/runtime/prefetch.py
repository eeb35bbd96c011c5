"""Prefetching into L2: an all-reduce loads the weight of the next matmul while it waits for its peers.

A small all-reduce spends most of its time waiting, and the matmul after it most of its time reading the weight. The
kernels of algorithms whose row has ``prefetches`` fetch the memory; cuda_src/device/prefetch.cuh has the loop.
"""

from __future__ import annotations

from graphar.plan import tensor_checks
from graphar.plan.scratch import PACK_NBYTES
from graphar.runtime.arguments import Arguments


def put(arguments: Arguments, budget_nbytes: int, inputs, outputs, numbers, corner) -> None:
    """Sets a kernel's arguments to prefetch the memory that the second input spans, at most ``budget_nbytes`` of it."""
    following = inputs[1]
    if following.is_contiguous():
        begin = following.data_ptr()
        end = begin + following.nbytes
    else:
        begin, end = tensor_checks.span(following)
    arguments.prefetch, arguments.prefetch_nbytes = interior(begin, end, budget_nbytes)


def interior(begin: int, end: int, budget_nbytes: int) -> tuple[int, int]:
    """Returns the first multiple of 16 bytes between two addresses, and how many bytes to fetch from there on."""
    first = -(-begin // PACK_NBYTES) * PACK_NBYTES
    return first, max(0, min(end // PACK_NBYTES * PACK_NBYTES - first, budget_nbytes))
