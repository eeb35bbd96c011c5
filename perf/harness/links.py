"""NVLink traffic: the hardware's counters during a timed graph, and the measured bandwidth of plain pushes.

The counters belong to the GPU, so they also count what other processes send. They count KiB for each link, so a
difference may be off by 1 KiB per link. Count operations that together send a megabyte or more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pynvml
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from graphar.plan.sizes import MB
from perf.harness.cases import Case, Link, LinkCeiling, Utilisation
from perf.harness.ranks import ProcessRanks, Ranks, agreed
from perf.peers.methods import Method

KIB = 1 << 10

# NVML does not document when its counters are updated. So counters are read every POLL_S until two reads agree. If
# other processes use the links, they may never agree. The last read before SETTLE_S is then used.
POLL_S = 5e-3
SETTLE_S = 100e-3


@dataclass(frozen=True)
class Reading:
    """Bytes by active link, since the driver was loaded. A difference has the bytes between two readings.

    Attributes:
        data_tx, data_rx: payload sent and received.
        raw_tx, raw_rx: payload and protocol overhead, sent and received.
    """

    data_tx: tuple[int, ...]
    data_rx: tuple[int, ...]
    raw_tx: tuple[int, ...]
    raw_rx: tuple[int, ...]

    def __sub__(self, before: Reading) -> Reading:
        fields = zip(vars(self).values(), vars(before).values(), strict=True)
        return Reading(*(tuple(a - b for a, b in zip(*one, strict=True)) for one in fields))


def must_send(world_size: int, nbytes: int, operations: int) -> int:
    """Returns the bytes that a rank must send without multicast: 2(N-1)/N times ``nbytes`` for each all-reduce."""
    return 2 * (world_size - 1) * nbytes * operations // world_size


def utilisation(
    counted: Reading,
    must_send_nbytes: int,
    links: Sequence[int],
    time_us: float | None = None,
    raw_rates: Sequence[float] | None = None,
) -> Utilisation:
    """Returns the figures for a difference between two readings.

    Args:
        counted: the difference.
        must_send_nbytes: the result of :func:`must_send`.
        links: Counters.links.
        time_us: the time of the operations.
        raw_rates: Counters.raw_rates, in GB/s in one direction.
    """
    data, raw = sum(counted.data_tx), sum(counted.raw_tx)
    allowed = [(time_us or 0) * rate * 1e3 for rate in raw_rates or [0] * len(links)]
    by_link = [
        Link(link, nbytes, _ratio(nbytes, most))
        for link, nbytes, most in zip(links, counted.raw_tx, allowed, strict=True)
    ]
    overhead = _ratio(raw, data)
    return Utilisation(
        must_send_nbytes=must_send_nbytes,
        data_tx_nbytes=data,
        raw_tx_nbytes=raw,
        payload_efficiency=_ratio(must_send_nbytes, data),
        protocol_overhead=None if overhead is None else overhead - 1,
        link_balance=_ratio(min(counted.data_tx, default=0), max(counted.data_tx, default=0)),
        raw_share=_ratio(raw, sum(allowed)),
        links=by_link,
    )


def find(device: torch.device | int | str) -> Counters | str:
    """Returns a GPU's counters, or a message that says why they cannot be read.

    Args:
        device: a torch device or its index, or the GPU's UUID as nvidia-smi prints it.
    """
    try:
        pynvml.nvmlInit()  # stays initialised, because the counters need NVML
        counters = Counters(device)
        counters.read()
    except pynvml.NVMLError as error:
        return f"NVML: {error}"
    except NoLinksError as error:
        return str(error)
    return counters


class NoLinksError(Exception):
    """There is no GPU, or it has no active NVLink."""


class Counters:
    """One GPU's NVLink counters. NVML must be initialised; use :func:`find` to make them.

    Attributes:
        uuid: the GPU's UUID in NVML.
        links: the indices of the active links.
        raw_rates: the raw rate of each link in one direction, in GB/s (1e9 bytes); None if NVML does not report it.

    Raises:
        NoLinksError: torch has no GPU, or no link is active.
        pynvml.NVMLError: NVML has no such GPU.
    """

    def __init__(self, device: torch.device | int | str) -> None:
        self.uuid = device if isinstance(device, str) else _uuid(device)
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(self.uuid)
        self.links = tuple(link for link in range(pynvml.NVML_NVLINK_MAX_LINKS) if self._is_active(link))
        if not self.links:
            raise NoLinksError(f"{self.uuid} has no active NVLink")
        self.raw_rates = self._raw_rates()

    def read(self) -> Reading:
        """Returns the counters once they no longer change. Synchronize the device before, so that all kernels count.

        Raises:
            pynvml.NVMLError: the driver does not have a counter.
        """
        deadline = time.monotonic() + SETTLE_S
        reading = self._sample()
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            last, reading = reading, self._sample()
            if reading == last:
                break
        return reading

    def _sample(self) -> Reading:
        return Reading(
            data_tx=self._nbytes(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX),
            data_rx=self._nbytes(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX),
            raw_tx=self._nbytes(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_TX),
            raw_rx=self._nbytes(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_RAW_RX),
        )

    def _nbytes(self, field: int) -> tuple[int, ...]:
        return self._values(field, lambda value: value.ullVal * KIB)

    def _raw_rates(self) -> tuple[float, ...] | None:
        try:
            megabytes = self._values(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, lambda value: value.uiVal)
        except pynvml.NVMLError:
            return None
        return tuple(rate / 1e3 for rate in megabytes) if all(megabytes) else None

    def _values(self, field: int, member: Callable[..., int]) -> tuple[int, ...]:
        """Returns a field of every link. The scope of a query is the link; by default NVML reads the first link."""
        results = pynvml.nvmlDeviceGetFieldValues(self._handle, [(field, link) for link in self.links])
        for result in results:
            if result.nvmlReturn != pynvml.NVML_SUCCESS:
                raise pynvml.NVMLError(result.nvmlReturn)
        return tuple(member(result.value) for result in results)

    def _is_active(self, link: int) -> bool:
        try:
            return pynvml.nvmlDeviceGetNvLinkState(self._handle, link) != pynvml.NVML_FEATURE_DISABLED
        except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotSupported):
            return False  # this GPU has fewer links


def _uuid(device: torch.device | int) -> str:
    """Returns the GPU's UUID in NVML. CUDA_VISIBLE_DEVICES renumbers torch's devices, but not NVML's."""
    if not torch.cuda.is_available():
        raise NoLinksError("torch sees no GPU")
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


# ---- the ceiling: every rank pushes to all peers at once, by torch's own kernels -------------------------------------
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


# ---- traffic of a timed graph, counted in a separate replay because reading the counters takes long -----------------

METHODS = ("graphar", "nccl", "symm_two_shot")
MIN_NBYTES = 16 * MB  # at smaller sizes the counters' resolution and other messages would distort the figures


def is_counted(method: Method, case: Case) -> bool:
    return case.mode == "graph" and case.nbytes >= MIN_NBYTES and method.name in METHODS


def count(launch: Callable[[], None], time_us: float, case: Case, ranks: Ranks, counters: Counters) -> Utilisation:
    """Returns the traffic that this rank sends during one launch. The launch takes ``time_us``. Collective."""
    ranks.barrier()
    before = counters.read()
    ranks.barrier()  # no rank may launch before all ranks have read their counters
    launch()
    ranks.barrier()
    counted = counters.read() - before
    needed = must_send(case.world_size, case.nbytes, case.iterations)
    return utilisation(counted, needed, counters.links, time_us, counters.raw_rates)


def find_counters(ranks: ProcessRanks) -> tuple[Counters | None, str]:
    """Returns this rank's counters if every rank has counters. Otherwise returns the reason. Collective."""

    def find_own() -> Counters:
        found = find(ranks.device)
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    return agreed(ranks, find_own)


def find_ceiling(ranks: ProcessRanks) -> LinkCeiling | str:
    """Returns the links' measured bandwidth, or a message that says why it was not measured. Collective."""
    rate, reason = agreed(ranks, lambda: measure_ceiling(ranks), (RuntimeError,))
    return f"link ceiling, {ranks.size} ranks: {reason}" if reason else LinkCeiling(ranks.size, rate)
