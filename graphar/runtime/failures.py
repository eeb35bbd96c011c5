"""What is said of a kernel that gave up waiting: which call, which rank, and what every rank was last doing."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

from cuda.bindings import driver

from graphar.errors import CollectiveTimeout, ConcurrentCallError, DriverError, GrapharError, TimeoutRecord
from graphar.plan.algorithms import Algorithm
from graphar.runtime.arguments import Record, Turn
from graphar.runtime.driver import call, on_device

_OVERLAPPED = 2  # `overlapped` in cuda_src/device/call.cuh


def failure_of_kernel(record: Record, last_calls: Sequence[str]) -> GrapharError:
    """What to raise for the ``record`` of a kernel that gave up; ``last_calls`` as :func:`last_calls_of` gives them."""
    algorithm = list(Algorithm)[record.algorithm]
    what = f"{algorithm.op} call {record.sequence} by {algorithm.value}"
    if record.kind == _OVERLAPPED:
        return ConcurrentCallError(
            f"{what} ran while another call of this communicator did, on another stream or in another graph; order "
            "them, or give each its own Communicator"
        )
    return CollectiveTimeout(
        f"{what}: rank {record.rank} waited past the deadline for rank {record.peer} (block {record.block}, expected "
        f"{record.expected:#x}, saw {record.seen:#x}); close this communicator",
        TimeoutRecord(
            algorithm.op,
            algorithm.value,
            record.sequence,
            record.rank,
            record.peer,
            tuple(last_calls),
            record.block,
            record.expected,
            record.seen,
        ),
    )


def last_calls_of(
    counters: Mapping[Algorithm, Sequence[int]], devices: Sequence[int], ended: Sequence[int]
) -> list[str]:
    """For each rank its last call of each algorithm, by number, as its GPU counts them.

    Args:
        counters: where each rank's Counters of an algorithm lie in this process.
        devices: for each rank the CUDA device index it is read by.
        ended: ranks whose processes have ended; their memory outlives them where it is mapped.
    """
    said = []
    for rank, device in enumerate(devices):
        begun = {algorithm: calls_begun(pointers[rank], device) for algorithm, pointers in counters.items()}
        calls = [f"{algorithm.value} call {count - 1}" for algorithm, count in begun.items() if count]
        known = "unknown" if None in begun.values() and not calls else ", ".join(calls) or "none"
        said.append(f"{known}; its process has ended" if rank in ended else known)
    return said


def calls_begun(counters: int, device: int) -> int | None:
    """How many calls of an algorithm a rank has begun, modulo 2^32; None where its memory cannot be read.

    Args:
        counters: where the rank's Counters lie in this process.
        device: the CUDA device index they are read by.
    """
    turn = Turn()  # the first: block 0's, which advances it once it has sent its first data
    try:
        with on_device(device):
            stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            try:  # a stream of its own waits for no kernel
                call(driver.cuMemcpyDtoHAsync, ctypes.addressof(turn), counters, ctypes.sizeof(turn), stream)
                call(driver.cuStreamSynchronize, stream)
            finally:
                call(driver.cuStreamDestroy, stream)
    except DriverError:
        return None
    return turn.epoch
