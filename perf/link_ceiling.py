"""What NVLink carries at most: every rank pushes to all peers at once, by torch's own kernels.

    rank r:   x ----> slot r of rank r+1, r+2, ... r-1

torch takes a peer's mapped buffer for local memory, so an elementwise kernel writes it with register stores. A plain
copy_ might choose the copy engine, which carries little more than half.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from graphar.plan.sizes import MB
from perf.cases import Case
from perf.ranks import ProcessRanks

SLOT_NBYTES = 64 * MB  # past every cache, and long enough that a kernel's start and end do not count
ROUNDS = 20  # in one timed repeat
REPEATS = 5


def measure(ranks: ProcessRanks) -> float:
    """GB/s (1e9 bytes) a rank sends while all ranks push to all peers: the best of three ways. Collective.

    Allocates world_size x 64 MB of symmetric memory on every rank. With it torch would make a multicast object, unless
    TORCH_SYMM_MEM_DISABLE_MULTICAST is 1 before.

    Raises:
        RuntimeError: on every rank, if data did not arrive as it was sent; or if ranks cannot map each other's memory.
    """
    case = Case(ranks.size, form="process", mode="graph", dtype="float32", nbytes=SLOT_NBYTES)
    x = ranks.random(case)
    expected = ranks.gather(x, slice(None))
    received = symmetric_memory.empty(ranks.size, case.numel, dtype=x.dtype, device=ranks.device)
    slots = peer_slots(received, ranks)
    sent_nbytes = len(slots) * case.nbytes * ROUNDS
    rates = []
    for way in (push_in_turn, push_on_streams, push_as_list):
        received.fill_(torch.nan)
        ranks.level()
        way(x, slots)  # loads the kernel
        times_us = [ranks.time_us(partial(way, x, slots), case.mode) for _ in range(REPEATS)]
        slowest_us = ranks.slowest([times_us])[0]
        (wrong,) = ranks.total([count_wrong(received, expected, ranks.rank)])
        if wrong:
            raise RuntimeError(f"link_ceiling.{way.__name__}: {wrong} slots do not hold what was pushed")
        rates.append(sent_nbytes / statistics.median(slowest_us) / 1e3)
    return max(rates)


def peer_slots(received: Tensor, ranks: ProcessRanks) -> list[Tensor]:
    """This rank's slot on every peer, the next rank's first, so that no two ranks begin with the same peer."""
    handle = symmetric_memory.rendezvous(received, dist.group.WORLD.group_name)
    first = handle.offset // received.itemsize  # get_buffer counts from the allocation, which may hold other tensors
    peers = ((ranks.rank + step) % ranks.size for step in range(1, ranks.size))
    return [handle.get_buffer(peer, received.shape, received.dtype, first)[ranks.rank] for peer in peers]


def count_wrong(received: Tensor, expected: Sequence[Tensor], rank: int) -> int:
    """How many peers' slots differ from what the peer sent."""
    return sum(not torch.equal(received[peer], x) for peer, x in enumerate(expected) if peer != rank)


def push(x: Tensor, slot: Tensor) -> None:
    """A copy that is arithmetic, which no copy engine can do."""
    torch.mul(x, 1, out=slot)


def push_in_turn(x: Tensor, slots: Sequence[Tensor]) -> None:
    """One peer after another, so that each rank hears from one at a time; all ranks together still reach all."""
    for slot in slots:
        for _ in range(ROUNDS):
            push(x, slot)


def push_on_streams(x: Tensor, slots: Sequence[Tensor]) -> None:
    """A stream for each peer: one kernel's end overlaps another's start."""
    here = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in slots]
    for stream in streams:
        stream.wait_stream(here)
    for _ in range(ROUNDS):
        for stream, slot in zip(streams, slots, strict=True):
            with torch.cuda.stream(stream):
                push(x, slot)
    for stream in streams:
        here.wait_stream(stream)


def push_as_list(x: Tensor, slots: Sequence[Tensor]) -> None:
    """All peers by one kernel, whose blocks are fewer and loop."""
    for _ in range(ROUNDS):
        torch._foreach_copy_(slots, [x] * len(slots))
