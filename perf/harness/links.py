"""NVLink traffic: the hardware's counters during a timed graph, and the measured bandwidth of plain pushes.

The counters belong to the GPU, so they also count what other processes send. They count KiB for each link, so a
difference may be off by 1 KiB per link. Count operations that together send a megabyte or more.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from graphar.plan.sizes import MB
from perf.harness.cases import Case, LinkCeiling, Utilisation
from perf.harness.link_counters import Reading
from perf.harness.ranks import ProcessRanks, Ranks, agreed
from perf.peers.methods import Method

READER = (sys.executable, "-m", "perf.harness.link_counters")  # a UUID follows


def must_send(world_size: int, nbytes: int, operations: int) -> int:
    """Returns the bytes that a rank must send without multicast: 2(N-1)/N times ``nbytes`` for each all-reduce."""
    return 2 * (world_size - 1) * nbytes * operations // world_size


def utilisation(
    before: Reading, after: Reading, must_send_nbytes: int, time_us: float, raw_rate: float | None
) -> Utilisation:
    """Returns the figures for the bytes between two readings, of operations that took ``time_us``."""
    by_link, raw = ([b - a for a, b in zip(*of_both, strict=True)] for of_both in zip(before, after, strict=True))
    data_nbytes, raw_nbytes = sum(by_link), sum(raw)
    overhead = _ratio(raw_nbytes, data_nbytes)
    return Utilisation(
        must_send_nbytes=must_send_nbytes,
        data_tx_nbytes=data_nbytes,
        raw_tx_nbytes=raw_nbytes,
        payload_efficiency=_ratio(must_send_nbytes, data_nbytes),
        protocol_overhead=None if overhead is None else overhead - 1,
        link_balance=_ratio(min(by_link), max(by_link)),
        raw_share=_ratio(raw_nbytes, time_us * (raw_rate or 0) * 1e3),
    )


class Counters:
    """The counters of a GPU's active NVLinks, which a process of its own reads.

    Ranks that read them with NVML themselves died of a damaged heap, at times. Now that ends the reader alone, and the
    next reading starts another one.

    Attributes:
        links: the indices of the active links.
        raw_rate: the raw rate of all links in one direction, in GB/s (1e9 bytes); None if NVML does not report it.

    Raises:
        RuntimeError: torch has no GPU, no link is active, or NVML has no such GPU or counter.
    """

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError("torch sees no GPU")
        # CUDA_VISIBLE_DEVICES renumbers torch's devices, but not NVML's.
        self._uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        if not self._start():
            raise RuntimeError("the process that reads NVLink's counters ended")

    def read(self) -> Reading | None:
        """Returns the counters once they no longer change, or None if their reader ended.

        Synchronize the device before, so that all kernels count.
        """
        if self._reader.poll() is not None and not self._start():
            return None
        with contextlib.suppress(BrokenPipeError):
            print(file=self._reader.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError), self._reader:
            self._reader.terminate()

    def _start(self) -> bool:
        self._reader = subprocess.Popen((*READER, self._uuid), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if (answer := self._answer()) is None:
            return False
        self.links, self.raw_rate = answer
        return True

    def _answer(self) -> list | None:
        """Returns what the reader writes, or None if it ended without a word."""
        line = self._reader.stdout.readline()
        if not line:
            self.close()
            return None
        answer = json.loads(line)
        if "error" in answer:
            self.close()
            raise RuntimeError(answer["error"])
        return answer


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# The ceiling: every rank pushes to all peers at once, by torch's own kernels.
#
#   rank r:   x ----> slot r of rank r+1, r+2, ... r-1
#
# torch treats a peer's mapped buffer as local memory, so an elementwise kernel writes to it with register stores. A
# plain copy_ might use the copy engine, which reaches little more than half of that bandwidth.

SLOT_NBYTES = 64 * MB  # larger than every cache, so that the start and end of a kernel are negligible
ROUNDS = 20  # pushes in one timed repeat
REPEATS = 5


def measure_ceiling(ranks: ProcessRanks) -> float:
    """Returns the GB/s (1e9 bytes) that a rank sends while all ranks push to all peers. Collective.

    This is the best of three variants. It allocates world_size x 64 MB of symmetric memory on every rank. Set
    TORCH_SYMM_MEM_DISABLE_MULTICAST=1 before, or torch creates a multicast object for that memory.

    Raises:
        RuntimeError: received data are wrong, or ranks cannot map each other's memory. It is raised on every rank.
    """
    case = Case(ranks.size, form="process", mode="graph", dtype="float32", nbytes=SLOT_NBYTES)
    x = ranks.random(case)
    expected = ranks.gather(x, slice(None))
    received = symmetric_memory.empty(ranks.size, case.numel, dtype=x.dtype, device=ranks.device)
    slots = peer_slots(received, ranks)
    sent_nbytes = len(slots) * case.nbytes * ROUNDS
    rates = []
    for push_all in (push_in_turn, push_on_streams, push_as_list):
        received.fill_(torch.nan)
        ranks.barrier()
        push_all(x, slots)  # loads the kernel
        times_us = [ranks.time_us(partial(push_all, x, slots), case.mode) for _ in range(REPEATS)]
        slowest_us = ranks.slowest([times_us])[0]
        (wrong,) = ranks.total([count_wrong_slots(received, expected, ranks.rank)])
        if wrong:
            raise RuntimeError(f"link ceiling, {push_all.__name__}: {wrong} slots do not hold what was pushed")
        rates.append(sent_nbytes / statistics.median(slowest_us) / 1e3)
    return max(rates)


def peer_slots(received: Tensor, ranks: ProcessRanks) -> list[Tensor]:
    """Returns this rank's slot on every peer. Each rank begins with the next one, so all begin with different peers."""
    handle = symmetric_memory.rendezvous(received, dist.group.WORLD.group_name)
    first = handle.offset // received.itemsize  # get_buffer's offset counts from the allocation's start
    peers = ((ranks.rank + step) % ranks.size for step in range(1, ranks.size))
    return [handle.get_buffer(peer, received.shape, received.dtype, first)[ranks.rank] for peer in peers]


def count_wrong_slots(received: Tensor, expected: Sequence[Tensor], rank: int) -> int:
    """Returns how many slots differ from what the peer sent."""
    return sum(not torch.equal(received[peer], x) for peer, x in enumerate(expected) if peer != rank)


def push(x: Tensor, slot: Tensor) -> None:
    """Copies with an elementwise kernel, because the copy engine is slower."""
    torch.mul(x, 1, out=slot)


def push_in_turn(x: Tensor, slots: Sequence[Tensor]) -> None:
    """Pushes to one peer after another. Each rank then receives from one peer at a time."""
    for slot in slots:
        for _ in range(ROUNDS):
            push(x, slot)


def push_on_streams(x: Tensor, slots: Sequence[Tensor]) -> None:
    """Pushes to each peer on its own stream. The end of one kernel then overlaps the start of another."""
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
    """Pushes to all peers with one kernel. It has fewer blocks, and they loop."""
    for _ in range(ROUNDS):
        torch._foreach_copy_(slots, [x] * len(slots))


METHODS = ("graphar", "nccl", "symm_two_shot")
MIN_NBYTES = 16 * MB  # at smaller sizes the counters' resolution and other messages would distort the figures


def is_counted(method: Method, case: Case) -> bool:
    return case.mode == "graph" and case.nbytes >= MIN_NBYTES and method.name in METHODS


def count(
    launch: Callable[[], None], time_us: float, case: Case, ranks: Ranks, counters: Counters
) -> Utilisation | None:
    """Returns the traffic that this rank sends during one launch, or None if it could not be read. Collective.

    The launch takes ``time_us``.
    """
    ranks.barrier()
    before = counters.read()
    ranks.barrier()  # no rank may launch before all ranks have read their counters
    launch()
    ranks.barrier()
    after = counters.read()
    if before is None or after is None:
        return None
    needed = must_send(case.world_size, case.nbytes, case.iterations)
    return utilisation(before, after, needed, time_us, counters.raw_rate)


def find_counters(ranks: ProcessRanks) -> tuple[Counters | None, str]:
    """Returns this rank's counters if every rank has counters. Otherwise returns the reason. Collective."""
    return agreed(ranks, lambda: Counters(ranks.device))


def find_ceiling(ranks: ProcessRanks) -> LinkCeiling | str:
    """Returns the links' measured bandwidth, or a message that says why it was not measured. Collective."""
    rate, reason = agreed(ranks, lambda: measure_ceiling(ranks), (RuntimeError,))
    return f"link ceiling, {ranks.size} ranks: {reason}" if reason else LinkCeiling(ranks.size, rate)
