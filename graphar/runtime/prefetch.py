"""Prefetching into L2: an all-reduce loads the weight of the next matmul while it waits for its peers.

A small all-reduce spends most of its time waiting, and the matmul after it most of its time reading the weight. The
kernels of algorithms whose row has ``prefetches`` fetch the memory; cuda_src/device/prefetch.cuh has the loop.
"""

from __future__ import annotations

import torch

from graphar.plan import tensor_checks
from graphar.plan.scratch import PACK_NBYTES
from graphar.runtime.arguments import Arguments


def put(arguments: Arguments, following: torch.Tensor, budget_nbytes: int) -> None:
    """Sets a kernel's arguments to prefetch the memory that a tensor spans, at most ``budget_nbytes`` of it."""
    place = interior(*tensor_checks.span(following), budget_nbytes) if following.numel() else (0, 0)
    arguments.prefetch, arguments.prefetch_nbytes = place


def interior(begin: int, end: int, budget_nbytes: int) -> tuple[int, int]:
    """Returns the first multiple of 16 bytes between two addresses, and how many bytes to fetch from there on."""
    first = -(-begin // PACK_NBYTES) * PACK_NBYTES
    return first, max(0, min(end // PACK_NBYTES * PACK_NBYTES - first, budget_nbytes))
