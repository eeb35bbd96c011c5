"""VirtualBuffer: an allocation on each rank whose addresses stay while its memory is given back; and the guard."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence

from graphar.runtime.arguments import Counters
from graphar.runtime.driver import call, driver
from graphar.runtime.memory import virtual_memory


class VirtualBuffer:
    """One allocation of ``nbytes`` on each rank, at addresses that are reserved when the first memory is created.

    ``device_of`` is the CUDA device of each rank of this process. ``pointers`` are the addresses of the allocations in
    this process, in rank order, and ``resident`` says whether there is memory.
    """

    multicast_pointer = 0  # only a TorchBuffer has one

    def __init__(self, nbytes: int, device_of: Mapping[int, int], world_size: int) -> None:
        self.nbytes, self._own, self._world_size = nbytes, dict(device_of), world_size
        self._devices = list(dict.fromkeys(device_of.values()))  # kernels of these devices use the addresses
        self._reserved = 0  # bytes at each address
        self._mapped: dict[int, int] = {}  # the bytes that are mapped at each rank's address
        self.resident = False
        self.pointers: list[int] = []
        self._held: set[int] = set()  # the ranks whose addresses are reserved

    def create(self) -> dict[int, object]:
        """Returns handles of new memory for the ranks of this process, by rank; if an allocation fails, for no rank."""
        if not self.pointers:
            self._reserved = virtual_memory.whole(self.nbytes, self._devices[0])
            for rank in range(self._world_size):
                self.pointers.append(virtual_memory.ranges.take(self._reserved))
                self._held.add(rank)
        made: dict[int, object] = {}
        try:
            for rank, device in self._own.items():
                made[rank] = virtual_memory.create(device, self._reserved)
        except BaseException:
            for memory in made.values():
                virtual_memory.release(memory)
            raise
        return made

    def map(self, memories: Mapping[int, object]) -> None:
        """Maps every rank's memory, given by handles that the caller releases, in place of what was mapped there.

        If that fails, nothing stays mapped.
        """
        self.clear()
        try:
            for rank, pointer in enumerate(self.pointers):
                virtual_memory.place(pointer, self._reserved, memories[rank], self._devices)
                self._mapped[rank] = self._reserved
        except BaseException:
            self.clear()
            raise
        self.resident = True

    def map_guard(self, guard: Guard, copied: bool = False) -> None:
        """Gives the memory back, and maps a guard over all allocations of this process and over the peers' counters.

        Copy engines do not read counters. If they write there (``copied``), a sink lies behind all counters.
        """
        self.clear()
        pages = self._reserved // guard.nbytes
        for rank, pointer in enumerate(self.pointers):
            times = pages if rank in self._own and not copied else 1
            virtual_memory.place(pointer, guard.nbytes, guard.memory, self._devices, times)
            self._mapped[rank] = times * guard.nbytes
            if copied and pages > 1:
                virtual_memory.place(pointer + guard.nbytes, guard.nbytes, guard.sink(), self._devices, pages - 1)
                self._mapped[rank] = self._reserved

    def clear(self) -> None:
        """Gives the memory back. The addresses stay reserved: an access there is an error of the CUDA context."""
        self._clear(range(self._world_size))

    def unmap(self) -> None:
        """Gives the peers' addresses back; this process must no longer use them."""
        self._give_back([rank for rank in range(self._world_size) if rank not in self._own])

    def free(self) -> None:
        """Gives this process's allocations and their addresses back. Peers that have them mapped keep the memory."""
        self._give_back(list(self._own))

    def _give_back(self, ranks: Sequence[int]) -> None:
        self._clear(ranks)
        for rank in self._held.intersection(ranks):
            virtual_memory.ranges.give_back(self.pointers[rank], self._reserved)
        self._held.difference_update(ranks)

    def _clear(self, ranks: Sequence[int]) -> None:
        self.resident = False
        for rank in ranks:
            if nbytes := self._mapped.get(rank):
                virtual_memory.displace(self.pointers[rank], nbytes)
                del self._mapped[rank]


class Guard:
    """What kernels of replayed graphs find in place of scratch while their communicator is suspended.

    All allocations of scratch begin with counters. The guard's tell every block that its call is aborted, so it
    sends and awaits nothing, and that another call runs, which it reports in the record of its rank
    (``end_aborted_call`` in cuda_src/device/sync/call.cuh). Blocks of a tile may still read, from their own rank's
    scratch, what its peers did not send. ``device`` has the memory; ``devices`` use it.
    """

    def __init__(self, device: int, devices: Sequence[int]) -> None:
        self._device, self._sink = device, None
        self.nbytes = virtual_memory.granularity(device)
        self.memory = virtual_memory.create(device, self.nbytes)
        with contextlib.ExitStack() as failing:
            failing.callback(self.free)
            with contextlib.ExitStack() as ends:
                address = virtual_memory.ranges.take(self.nbytes)
                ends.callback(virtual_memory.ranges.give_back, address, self.nbytes)
                virtual_memory.place(address, self.nbytes, self.memory, devices)
                ends.callback(virtual_memory.displace, address, self.nbytes)
                _write_guard(address)
            failing.pop_all()

    def sink(self):
        """Returns memory of the guard's size in which copies of replayed graphs end."""
        if self._sink is None:
            self._sink = virtual_memory.create(self._device, self.nbytes)
        return self._sink

    def free(self) -> None:
        """Gives the handles back. The memory is freed once no allocation maps it any more."""
        for memory in (self.memory, self._sink):
            if memory is not None:
                virtual_memory.release(memory)


def _write_guard(address: int) -> None:
    counters = Counters()
    for state in counters.epoch_state:
        state.aborted = 1
    counters.busy[:] = [1] * len(counters.busy)
    call(driver.cuMemcpyHtoD, address, ctypes.addressof(counters), ctypes.sizeof(counters))
    call(driver.cuCtxSynchronize)  # a copy from pageable memory may still be under way
