"""The loaded kernels of one communicator, and the scratch of their algorithms on every rank."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial

from graphar.errors import Reason
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Kernel
from graphar.ranks import agreement
from graphar.ranks.capture import check_can_prepare
from graphar.ranks.rendezvous import StoreRendezvous
from graphar.runtime import catalogue, compiler, launcher
from graphar.runtime.arguments import Counters
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.driver import call, driver, on_device
from graphar.runtime.member import Member
from graphar.runtime.memory.multicast import TorchBuffer, TorchMemory
from graphar.runtime.memory.peer_memory import Buffer, PeerMemory

PART = 16  # the most kernels that a rank compiles before it meets the others, and the most threads for them
COUNTERS_NBYTES = -(-ctypes.sizeof(Counters) // 4096) * 4096  # the scratch follows, and begins at a page

_log = logging.getLogger(__name__)


def threads_for_compiling(ranks: int) -> int:
    """Returns how many cores each of the host's ranks has for itself, up to PART."""
    bound = len(os.sched_getaffinity(0))  # fewer than the host has if ranks are bound to cores
    return max(1, min(PART, bound, (os.cpu_count() or 1) // ranks))


class Kernels:
    """Compiles and loads kernels, and allocates their scratch, once on all ranks.

    ``regions`` is the memory of each prepared algorithm: its counters, and then its scratch. That of the multimem
    algorithms comes from ``multicast_memory``. If that is None, in tests, it comes from ``memory``, and their kernels
    use ordinary accesses in place of multimem instructions.
    """

    def __init__(
        self,
        members: Sequence[Member],
        world_size: int,
        memory: PeerMemory,
        rendezvous: StoreRendezvous,
        multicast_memory: TorchMemory | None,
    ) -> None:
        self._members, self._world_size = members, world_size
        self._memory, self._rendezvous, self._multicast_memory = memory, rendezvous, multicast_memory
        self.regions: dict[Algorithm, Buffer | TorchBuffer] = {}
        self._functions: dict[Hashable, list] = {}

    def why_no_multicast(self) -> Reason | None:
        """Returns why multimem algorithms cannot run. The first call is collective."""
        return self._multicast_memory.why_not() if self._multicast_memory else None

    def prepare(self, kernel: Kernel) -> list:
        """Returns the functions of a kernel for each member. The first call for a kernel is collective."""
        described = agreement.words_of_kernel(kernel)
        return self.prepare_all(kernel.key, kernel.algorithm, described, lambda member: self._load(kernel, member))

    def prepare_all(
        self, key: Hashable, algorithm: Algorithm, described: str, load: Callable[[Member], object]
    ) -> list:
        """Loads kernels and allocates the algorithm's scratch, once for each key; returns the members' functions.

        The first call for a key is collective. ``described`` is the kernels in words, equal on all ranks. ``load``
        returns the functions of a member.
        """
        if functions := self._functions.get(key):
            return functions
        check_can_prepare(described, [member.device for member in self._members])
        begin = time.perf_counter()
        functions = self._rendezvous.agree(f"loading {described}", lambda: [*map(load, self._members)])
        if algorithm not in self.regions:
            self.regions[algorithm] = self._allocate(algorithm)
        # No rank may launch before all have loaded the kernel and cleared their scratch.
        self._rendezvous.exchange(f"preparing {described}", b"")
        self._functions[key] = functions
        _log.debug("loaded %s in %.2f s", described, time.perf_counter() - begin)
        return functions

    def compile(self, sources: Iterable[KernelSource]) -> None:
        """Compiles kernels of this process's devices into the kernel cache, each of them on one rank. Collective.

        Ranks meet after every part of the kernels, so a rank with slow cores keeps none waiting for longer. A kernel
        that the cache does not bring to a rank, or that does not compile, is compiled when it is loaded.
        """
        wanted, ranks = list(dict.fromkeys(sources)), self._rendezvous.world_size
        archs = dict.fromkeys(launcher.architecture(member.device) for member in self._members)

        def compile_part(share: Sequence[KernelSource]) -> None:
            for arch in archs:
                able = [source for source in share if source.runs_on(arch)]
                compiler.compile_at_once(able, arch, threads_for_compiling(ranks))

        for begin in range(0, len(wanted), PART * ranks):
            share = wanted[begin : begin + PART * ranks][self._rendezvous.rank :: ranks]
            self._rendezvous.agree(f"compiling {len(wanted)} kernels", partial(compile_part, share))

    def source_of(self, kernel: Kernel) -> KernelSource:
        stands_in = kernel.algorithm.row.multimem and not self._multicast_memory
        variant = "direct" if kernel.direct else "StandIn" if stands_in else None
        return catalogue.source_of(kernel, self._world_size, variant)

    def _load(self, kernel: Kernel, member: Member):
        algorithm = kernel.algorithm
        shared_nbytes = algorithm.row.scratch(self._world_size).shared_nbytes
        return launcher.load(self.source_of(kernel), member.device, shared_nbytes, f"{algorithm.op}: {algorithm.value}")

    def _allocate(self, algorithm: Algorithm) -> Buffer | TorchBuffer:
        memory = (self._multicast_memory if algorithm.row.multimem else None) or self._memory
        region = memory.allocate(COUNTERS_NBYTES + algorithm.row.scratch(self._world_size).nbytes)
        self.arm(algorithm, region)
        return region

    def arm(self, algorithm: Algorithm, region: Buffer | TorchBuffer) -> None:
        """Writes what kernels expect at the first call: zeros and no data that has arrived. No kernel may run."""
        needs = algorithm.row.scratch(self._world_size)
        for member in self._members:
            counters = region.pointers[member.rank]
            with on_device(member.device):
                call(driver.cuMemsetD8, counters, 0, COUNTERS_NBYTES)
                call(driver.cuMemsetD8, counters + COUNTERS_NBYTES, needs.fill, needs.nbytes)
                call(driver.cuCtxSynchronize)

    # ---- scratch ----------------------------------------------------------------------------------------------------

    def counters(self) -> Mapping[Algorithm, Sequence[int]]:
        """Returns the addresses of each prepared algorithm's counters, by rank."""
        return {algorithm: region.pointers for algorithm, region in self.regions.items()}

    def scratch(self, algorithm: Algorithm) -> list[int]:
        """Returns the addresses of a prepared algorithm's scratch, by rank."""
        return [pointer + COUNTERS_NBYTES for pointer in self.regions[algorithm].pointers]

    def multicast_scratch(self, algorithm: Algorithm) -> int:
        """Returns the multicast address of a prepared algorithm's scratch; 0 without one."""
        pointer = self.regions[algorithm].multicast_pointer
        return pointer and pointer + COUNTERS_NBYTES
