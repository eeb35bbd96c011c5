"""Errors from the records of kernels: waits that expired, calls that overlapped, and ranks whose calls differ."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from graphar.errors import (
    CollectiveTimeout,
    CommunicatorError,
    ConcurrentCallError,
    DriverError,
    GrapharError,
    TimeoutRecord,
)
from graphar.plan.algorithms import Algorithm, of_number
from graphar.runtime.arguments import KEPT_CALLS, Counters, EpochState, Record
from graphar.runtime.driver import call, driver, on_device

T = TypeVar("T", bound=ctypes.Structure)

_OVERLAPPED, _DISAGREED = 2, 3  # `overlapped` and `disagreed` in cuda_src/device/sync/record.cuh
_CALLS = 1 << 32  # epochs and fingerprints are smaller


class Unlike(NamedTuple):
    """The calls, in words, of a rank and of a peer that it waited for in vain."""

    own: str
    other: str


def failure_of_kernel(
    record: Record,
    last_calls: Callable[[], Sequence[str]],
    call_of: Callable[[int, int], str],
    unlike: Callable[[], Unlike | None],
) -> GrapharError:
    """Returns the error for the record of a kernel that gave up.

    The functions return the last calls of each rank, in words; the call with a fingerprint, of a
    rank, in words; and what the ranks of an expired wait called, if the awaited rank called something else.
    """
    algorithm = of_number(record.algorithm)
    what = f"{algorithm.op} call {record.sequence} by {algorithm.value}"
    if record.kind == _OVERLAPPED:
        return ConcurrentCallError(
            f"{what} ran while another call of this communicator did, on another stream or in another graph; order "
            "them, or give each its own Communicator"
        )
    if record.kind == _DISAGREED:
        calls = Unlike(call_of(record.expected, record.rank), call_of(record.seen, record.peer))
    else:
        calls = unlike()
    if calls:
        return CommunicatorError(
            f"{what}: ranks must make the same graphar calls in the same order, got\n"
            f"rank {record.rank}: {calls.own}\nrank {record.peer}: {calls.other}\n"
            "Results since that call may be wrong; close this communicator."
        )
    waited = record.sequence, record.rank, record.peer, tuple(last_calls()), record.block, record.expected, record.seen
    return CollectiveTimeout(
        f"{what}: rank {record.rank} waited past the deadline for rank {record.peer} (block {record.block}, expected "
        f"{record.expected:#x}, saw {record.seen:#x}); close this communicator",
        TimeoutRecord(algorithm.op, algorithm.value, *waited),
    )


def compare_last_calls(record: Record, algorithm: Algorithm, counters: int, rank: int, world_size: int) -> None:
    """Writes ``record`` if a peer told this rank of another call than its own, among an algorithm's last calls.

    Kernels compare all but the last few. A peer that runs behind may not have told its last call yet. ``counters`` is
    the address of the rank's Counters. The current device is the rank's own, and has no work queued.
    """
    copy = read(Counters, counters)
    called, begun = copy.called[:world_size], copy.epoch_state[0].epoch
    unlike = [
        (fingerprint, told, peer)
        for peer, entries in enumerate(called)
        for fingerprint, told in zip(called[rank], entries, strict=True)
        if fingerprint != told and fingerprint and told and fingerprint // _CALLS == told // _CALLS
    ]
    if unlike and not record.kind:
        fingerprint, told, peer = max(unlike, key=lambda entry: (begun - entry[0] // _CALLS) % _CALLS)  # the earliest
        record.algorithm, record.rank, record.peer = algorithm.number, rank, peer
        record.sequence = (fingerprint // _CALLS - 1) % _CALLS
        record.expected, record.seen, record.kind = fingerprint % _CALLS, told % _CALLS, _DISAGREED


def call_at(counters: Counters, rank: int, sequence: int) -> int:
    """Returns the fingerprint of what a rank called in call ``sequence`` of an algorithm; 0 if it has told of none."""
    entry = counters.called[rank][sequence % KEPT_CALLS]
    return entry % _CALLS if entry and entry // _CALLS == (sequence + 1) % _CALLS else 0


def call_ahead_of(peer: int, counters: Mapping[Algorithm, Counters]) -> int:
    """Returns the fingerprint of a call that a peer has begun and this rank, with these counters, not; 0: unknown."""
    ahead = (call_at(counts, peer, counts.epoch_state[0].epoch) for counts in counters.values())
    return next(filter(None, ahead), 0)


def calls_begun(counters: int, device: int) -> int | None:
    """Returns how many calls a rank has begun, modulo 2^32, as ``device`` reads at its Counters; None: it cannot."""
    try:
        with on_device(device):
            return read(EpochState, counters).epoch  # of block 0, which advances it after it has sent its first data
    except DriverError:
        return None


def read(struct: type[T], address: int) -> T:
    """Returns a copy of device memory. It does not wait for kernels of the current device."""
    copy = struct()
    stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    try:  # a new stream does not wait for kernels
        call(driver.cuMemcpyDtoHAsync, ctypes.addressof(copy), address, ctypes.sizeof(copy), stream)
        call(driver.cuStreamSynchronize, stream)
    finally:
        call(driver.cuStreamDestroy, stream)
    return copy
