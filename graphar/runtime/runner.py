"""Runner: what the calls of one communicator share on this process's GPUs: ranks, kernels, scratch, failures.

Kernels report failures in records: waits that expired, calls that overlapped, and ranks whose calls differ.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TypeVar

import torch

from graphar.errors import (
    CollectiveTimeout,
    CommunicatorError,
    ConcurrentCallError,
    DriverError,
    GrapharError,
    Reason,
    TimeoutRecord,
)
from graphar.plan.algorithms import Algorithm, of_number
from graphar.plan.config import Kernel
from graphar.plan.policy import Chip
from graphar.plan.slices import Slice
from graphar.plan.tables import Table
from graphar.ranks.agreement import Fingerprints, words_of_kernel, words_with_numbers
from graphar.ranks.capture import check_can_prepare, is_capturing
from graphar.ranks.rendezvous import Ranks, RanksAbsent, StoreRendezvous, exchange_json
from graphar.runtime import catalogue, compiler, launcher
from graphar.runtime.arguments import KEPT_CALLS, Arguments, Counters, EpochState, Record
from graphar.runtime.availability import COMMUNICATORS
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.driver import call, driver, on_device
from graphar.runtime.member import Member
from graphar.runtime.memory.multicast import TorchBuffer, TorchMemory
from graphar.runtime.memory.peer_memory import Buffer, LocalMemory, PeerMemory, ProcessMemory
from graphar.runtime.memory.symmetric_tensors import SymmetricTensors
from graphar.runtime.user_tables import find_table

T = TypeVar("T", bound=Arguments)
Struct = TypeVar("Struct", bound=ctypes.Structure)

PART = 16  # the most kernels that a rank compiles before it meets the others, and the most threads for them
COUNTERS_NBYTES = -(-ctypes.sizeof(Counters) // 4096) * 4096  # the scratch follows, and begins at a page
_OVERLAPPED, _DISAGREED = 2, 3  # `overlapped` and `disagreed` in cuda_src/device/sync/record.cuh
_CALLS = 1 << 32  # epochs and fingerprints are smaller

_PATIENCE_S = 1.0  # how long a rank whose kernels found that calls differ has to tell what it called
REPLAYED = (
    "a captured graph was replayed while its communicator was suspended; the collectives in it sent nothing, so its "
    "results are wrong"
)
_PREPARING = "preparing"  # the name under which a rank publishes the call that it makes a plan for

_log = logging.getLogger(__name__)


def threads_for_compiling(ranks: int) -> int:
    """Returns how many cores each of the host's ranks has for itself, up to PART."""
    bound = len(os.sched_getaffinity(0))  # fewer than the host has if ranks are bound to cores
    return max(1, min(PART, bound, (os.cpu_count() or 1) // ranks))


class Runner:
    """The ranks of this process, their kernels and their failures.

    ``chip`` has the properties that the GPUs of all ranks share. ``regions`` is the memory of each prepared algorithm:
    its counters, and then its scratch. Multimem algorithms' regions come from ``multicast_memory``. If that is
    None, in tests, it comes from ``memory``, and their kernels use ordinary accesses in place of multimem instructions.
    """

    def __init__(
        self,
        members: list[Member],
        world_size: int,
        chip: Chip,
        memory: PeerMemory,
        rendezvous: StoreRendezvous,
        multicast_memory: TorchMemory | None,
    ) -> None:
        self.members, self.world_size, self.chip = members, world_size, chip
        self.memory, self.rendezvous, self._multicast_memory = memory, rendezvous, multicast_memory
        self.regions: dict[Algorithm, Buffer | TorchBuffer] = {}
        self._functions: dict[Hashable, list] = {}
        self.symmetric = SymmetricTensors({member.rank: member.device for member in members}, memory)
        # Held during launches: threads share the arguments, and must reach the members in the same order.
        self.lock = threading.RLock()
        self._failure: GrapharError | None = None
        self.suspended = False  # whether a guard is where scratch was (graphar.runtime.memory.suspension)
        self.launched: Counter[str] = Counter()  # by kernels whose counters are given back
        self._fingerprints = Fingerprints(rendezvous)
        self._announces = False

    def why_no_multicast(self) -> Reason | None:
        """Returns why multimem algorithms cannot run. The first call is collective."""
        return self._multicast_memory.why_not() if self._multicast_memory else None

    def prepare(self, kernel: Kernel) -> list:
        """Returns each member's function of a kernel, or None as its source. The first call for it is collective."""
        described = words_of_kernel(kernel)
        return self.prepare_all(kernel.key, kernel.algorithm, described, lambda member: self._load(kernel, member))

    def prepare_all(
        self, key: Hashable, algorithm: Algorithm, described: str, load: Callable[[Member], object]
    ) -> list:
        """Loads kernels and allocates the algorithm's scratch, once for each key; returns the members' functions.

        The first call for a key is collective. Its kernels are ``described`` in words that are equal on all ranks.
        """
        if functions := self._functions.get(key):
            return functions
        check_can_prepare(described, [member.device for member in self.members])
        begin = time.perf_counter()
        functions = self.rendezvous.agree(f"loading {described}", lambda: [*map(load, self.members)])
        if algorithm not in self.regions:
            # A new dict: another thread may be going through the old one, as stats() does.
            self.regions = {**self.regions, algorithm: self._allocate(algorithm)}
        # No rank may launch before all have loaded the kernel and cleared their scratch.
        self.rendezvous.exchange(f"preparing {described}", b"")
        self._functions[key] = functions
        _log.debug("loaded %s in %.2f s", described, time.perf_counter() - begin)
        return functions

    def compile(self, sources: Iterable[KernelSource]) -> None:
        """Compiles kernels of this process's devices into the kernel cache, each of them on one rank. Collective.

        Ranks meet after every part of the kernels, so a rank with slow cores keeps none waiting for longer. A kernel
        that the cache does not bring to a rank, or that does not compile, is compiled when it is loaded.
        """
        wanted, ranks = list(dict.fromkeys(sources)), self.rendezvous.world_size
        archs = dict.fromkeys(launcher.architecture(member.device) for member in self.members)

        def compile_part(share: Sequence[KernelSource]) -> None:
            for arch in archs:
                able = [source for source in share if source.runs_on(arch)]
                compiler.compile_at_once(able, arch, threads_for_compiling(ranks))

        for begin in range(0, len(wanted), PART * ranks):
            share = wanted[begin : begin + PART * ranks][self.rendezvous.rank :: ranks]
            self.rendezvous.agree(f"compiling {len(wanted)} kernels", partial(compile_part, share))

    def source_of(self, kernel: Kernel) -> KernelSource | None:
        stands_in = kernel.algorithm.row.multimem and not self._multicast_memory
        variant = "direct" if kernel.direct else "StandIn" if stands_in else None
        return catalogue.source_of(kernel, self.world_size, variant)

    def _load(self, kernel: Kernel, member: Member):
        algorithm = kernel.algorithm
        if (source := self.source_of(kernel)) is None:
            return None
        shared_nbytes = algorithm.row.scratch(self.world_size).shared_nbytes
        return launcher.load(source, member.device, shared_nbytes, f"{algorithm.op}: {algorithm.value}")

    def _allocate(self, algorithm: Algorithm) -> Buffer | TorchBuffer:
        memory = (self._multicast_memory if algorithm.row.multimem else None) or self.memory
        region = memory.allocate(COUNTERS_NBYTES + algorithm.row.scratch(self.world_size).nbytes)
        self.arm(algorithm, region)
        return region

    def arm(self, algorithm: Algorithm, region: Buffer | TorchBuffer) -> None:
        """Writes what kernels expect at the first call: zeros and no data that has arrived. No kernel may run."""
        needs = algorithm.row.scratch(self.world_size)
        for member in self.members:
            counters = region.pointers[member.rank]
            with on_device(member.device):
                call(driver.cuMemsetD8, counters, 0, COUNTERS_NBYTES)
                call(driver.cuMemsetD8, counters + COUNTERS_NBYTES, needs.fill, needs.nbytes)
                call(driver.cuCtxSynchronize)

    def scratch(self, algorithm: Algorithm) -> list[int]:
        """Returns the addresses of a prepared algorithm's scratch, by rank."""
        return [pointer + COUNTERS_NBYTES for pointer in self.regions[algorithm].pointers]

    def arguments(
        self, member: Member, algorithm: Algorithm, part: Slice, timeout_s: float, words: str, kind: type[T] = Arguments
    ) -> T:
        """Returns what all kernels of a prepared algorithm take, for a member and slice. Ranks have equal ``words``."""
        region, scratch = self.regions[algorithm], self.scratch(algorithm)
        arguments = kind(
            numel=part.numel,
            timeout_ns=int(timeout_s * 1e9),
            capacity=algorithm.row.scratch(self.world_size).capacity,
            multicast=region.multicast_pointer and region.multicast_pointer + COUNTERS_NBYTES,
            counters=region.pointers[member.rank],
            abort=member.abort,
            record=member.record_pointer,
            rank=member.rank,
            world_size=self.world_size,
            algorithm=algorithm.number,
            fingerprint=self._fingerprints.of(words),
        )
        for rank, pointer in enumerate(region.pointers):
            arguments.scratch[rank], arguments.peer_counters[rank] = scratch[rank], pointer
            arguments.ring[(rank - member.rank) % self.world_size] = scratch[rank]
        for rank, (begin, count) in enumerate(zip(part.begin, part.count, strict=True)):
            arguments.begin[rank], arguments.count[rank] = begin, count
        return arguments

    def fingerprint(self, words: str, numbers: Sequence[float], tells: bool) -> int:
        """Returns the fingerprint of a launch with numbers of its epilogue, as :meth:`Fingerprints.of` does."""
        return self._fingerprints.of(words_with_numbers(words, numbers), tells)

    def calls_begun(self) -> dict[Algorithm, list[int | None]]:
        """Returns how many calls the kernels of each prepared algorithm have counted, by member; None: unreadable."""
        return {
            algorithm: [calls_begun(region.pointers[member.rank], member.device) for member in self.members]
            for algorithm, region in self.regions.items()
        }

    def launches(self) -> dict[str, int]:
        """Returns the launches that the first member's GPU has counted, by algorithm; empty during graph capture."""
        if self.suspended:
            return dict(self.launched)  # where counters were is the guard
        if any(is_capturing(member.device) for member in self.members):
            return {}
        begun = {algorithm.value: counts[0] or 0 for algorithm, counts in self.calls_begun().items()}
        return dict(self.launched + Counter(begun))

    def raise_failure(self) -> None:
        if failure := self.failure():
            raise failure.again()

    def failure(self) -> GrapharError | None:
        """Returns the error that a kernel of this process reported, or None; once there is one, always the same."""
        if self._failure is None:
            record = next((member.record for member in self.members if member.record.kind), None)
            if record is not None and self.suspended:
                return CommunicatorError(REPLAYED)
            if record is not None:
                self._failure = self._failure_of(record)
        return self._failure

    def _failure_of(self, record: Record) -> GrapharError:
        algorithm = of_number(record.algorithm)
        what = f"{algorithm.op} call {record.sequence} by {algorithm.value}"
        if record.kind == _OVERLAPPED:
            return ConcurrentCallError(
                f"{what} ran while another call of this communicator did, on another stream or in another graph; order "
                "them, or give each its own Communicator"
            )
        if unlike := self._unlike_calls(record, algorithm):
            own, other = unlike
            return CommunicatorError(
                f"{what}: ranks must make the same graphar calls in the same order, got\n"
                f"rank {record.rank}: {own}\nrank {record.peer}: {other}\n"
                "Results since that call may be wrong; close this communicator."
            )
        seen = tuple(self._last_calls()), record.block, record.expected, record.seen
        return CollectiveTimeout(
            f"{what}: rank {record.rank} waited past the deadline for rank {record.peer} (block {record.block}, "
            f"expected {record.expected:#x}, saw {record.seen:#x}); close this communicator",
            TimeoutRecord(algorithm.op, algorithm.value, record.sequence, record.rank, record.peer, *seen),
        )

    def _unlike_calls(self, record: Record, algorithm: Algorithm) -> tuple[str, str] | None:
        """Returns the calls, in words, of a rank and of the peer that it waited for, if they are known to differ.

        After an expired wait they do if the peer has begun a call that this rank has not, and has not begun the call in
        which this rank waited.
        """
        words = self._fingerprints.words
        if record.kind == _DISAGREED:
            self._fingerprints.tell(record.expected)
            own = words(record.expected, record.rank, _PATIENCE_S)
            return own, words(record.seen, record.peer, _PATIENCE_S)
        if algorithm not in self.regions:  # its memory is freed
            return None
        counters = self._read_counters(next(member for member in self.members if member.rank == record.rank))
        ahead = _call_ahead_of(record.peer, counters)
        if not ahead or _call_at(counters[algorithm], record.peer, record.sequence):
            return None
        called = _call_at(counters[algorithm], record.rank, record.sequence)
        return words(called, record.rank), words(ahead, record.peer)

    @contextlib.contextmanager
    def announced(self, words: str) -> Iterator[None]:
        """Tells ranks that wait in a kernel meanwhile what this rank is about to call.

        To the message of RanksAbsent it adds what the absent ranks have called, if known.
        """
        if self._announces:  # this call is part of an announced call
            yield
            return
        self._announces, keeps = True, False
        self.rendezvous.publish(_PREPARING, words)
        try:
            yield
        except RanksAbsent as error:
            keeps = True  # ranks whose waits expire as well read it
            counters = self._read_counters(self.members[0])
            ahead = {rank: _call_ahead_of(rank, counters) for rank in error.absent}
            said = [f"rank {rank}: {self._fingerprints.words(call, rank)}" for rank, call in ahead.items() if call]
            raise RanksAbsent("\n".join([str(error), *said]), error.absent, error.ended) from None
        finally:
            self._announces = False
            if not keeps:
                self.rendezvous.withdraw(_PREPARING)

    def _read_counters(self, member: Member) -> Mapping[Algorithm, Counters]:
        with on_device(member.device):
            return {of: read(Counters, region.pointers[member.rank]) for of, region in self.regions.items()}

    def _last_calls(self) -> list[str]:
        """Returns, for each rank, its last call of each algorithm in words, such as "one_shot call 3"."""
        try:
            ended = self.rendezvous.ended()
        except CommunicatorError:  # the store ends with the rank that serves it
            ended = []
        local, said = {member.rank: member.device for member in self.members}, []
        for rank in range(self.world_size):  # memory of an ended process stays readable while it is mapped here
            device = local.get(rank, self.members[0].device)
            begun = {of: calls_begun(region.pointers[rank], device) for of, region in self.regions.items()}
            calls = [f"{algorithm.value} call {count - 1}" for algorithm, count in begun.items() if count]
            known = "unknown" if None in begun.values() and not calls else ", ".join(calls) or "none"
            if preparing := self.rendezvous.published(_PREPARING, rank):
                known += f"; preparing {preparing}"
            said.append(f"{known}; its process has ended" if rank in ended else known)
        return said

    def synchronize(self) -> None:
        """Waits for all work on the members' devices, compares the ranks' last calls, and raises a kernel's error."""
        for member in self.members:
            torch.cuda.synchronize(member.device)
            for algorithm, counters in self._read_counters(member).items():
                compare_last_calls(member.record, algorithm, counters, member.rank, self.world_size)
        self.raise_failure()

    def close(self) -> None:
        """Frees all memory, but not what an absent rank's kernels may still write, which raises. Collective."""
        for member in self.members:
            torch.cuda.synchronize(member.device)
        self.launched = Counter(self.launches())
        regions = [*self.regions.values(), *self.symmetric.buffers]
        self.regions, self.symmetric.buffers = {}, []
        with on_device(self.members[0].device):
            for member in self.members:
                member.free()
            self._wait_for_all(0)
            for region in regions:
                region.unmap()
            self._wait_for_all(1)
            for region in regions:
                region.free()
            self.memory.close()

    def _wait_for_all(self, step: int) -> None:
        try:
            self.rendezvous.close(step)
        except RanksAbsent as error:
            if error.absent != error.ended:  # an ended process no longer writes
                raise


def compare_last_calls(record: Record, algorithm: Algorithm, counters: Counters, rank: int, world_size: int) -> None:
    """Writes ``record`` if a peer told this rank of another call than its own, among an algorithm's last calls.

    Kernels compare all but these. A peer that runs behind may not have told its last call yet. The rank's device had no
    work queued when ``counters`` were read.
    """
    called, begun = counters.called[:world_size], counters.epoch_state[0].epoch
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


def _call_at(counters: Counters, rank: int, sequence: int) -> int:
    """Returns the fingerprint of what a rank called in call ``sequence`` of an algorithm; 0 if it has told of none."""
    entry = counters.called[rank][sequence % KEPT_CALLS]
    return entry % _CALLS if entry and entry // _CALLS == (sequence + 1) % _CALLS else 0


def _call_ahead_of(peer: int, counters: Mapping[Algorithm, Counters]) -> int:
    """Returns the fingerprint of a call that a peer has begun and this rank, with these counters, not; 0: unknown."""
    ahead = (_call_at(counts, peer, counts.epoch_state[0].epoch) for counts in counters.values())
    return next(filter(None, ahead), 0)


def calls_begun(counters: int, device: int) -> int | None:
    """Returns how many calls a rank has begun, modulo 2^32, as ``device`` reads at its Counters; None: it cannot."""
    try:
        with on_device(device):
            return read(EpochState, counters).epoch  # of block 0, which advances it after it has sent its first data
    except DriverError:
        return None


def read(struct: type[Struct], address: int) -> Struct:
    """Returns a copy of device memory. It does not wait for kernels of the current device."""
    copy = struct()
    stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    try:  # a new stream does not wait for kernels
        call(driver.cuMemcpyDtoHAsync, ctypes.addressof(copy), address, ctypes.sizeof(copy), stream)
        call(driver.cuStreamSynchronize, stream)
    finally:
        call(driver.cuStreamDestroy, stream)
    return copy


def set_up(engine: Ranks, device: torch.device, lossless: bool, stand_in: bool) -> tuple[Runner, Table]:
    """Returns the runner of an engine, and the tuning table of its calls. Collective.

    ``device`` is this process's, or the first of the engine's. With ``stand_in``, for tests, multimem kernels use
    ordinary accesses in place of multimem instructions. UnsupportedError on every rank if kernels cannot reach all.
    """
    rendezvous = engine.rendezvous()
    # With different settings they would wait for each other in different kernels.
    settings = {
        "lossless compression must be on or off on all ranks (Communicator(lossless=...), GRAPHAR_LOSSLESS)": (
            "on" if lossless else "off"
        ),
        f"{COMMUNICATORS} must be the same on all ranks": os.environ.get(COMMUNICATORS) or "2",
    }
    everyone = exchange_json(rendezvous, "agreeing on settings", [*settings.values()])
    for rule, of_ranks in zip(settings, zip(*everyone, strict=True), strict=True):
        if len(set(of_ranks)) > 1:
            said = [f"rank {rank}: {setting}" for rank, setting in enumerate(of_ranks)]
            raise CommunicatorError("\n".join([f"{rule}, got", *said]))
    if engine.devices:
        ranks = {rank: gpu.index for rank, gpu in enumerate(engine.devices)}
        memory = LocalMemory(list(ranks.values()))
    else:
        ranks = {rendezvous.rank: device.index}
        memory = ProcessMemory(device.index, rendezvous)
    memory.check()

    def prepare() -> tuple[list[Member], dict]:
        # All ranks use rank 0's table: with different tables they would wait for each other in different kernels.
        table = find_table(torch.cuda.get_device_name(device)).to_json() if rendezvous.rank == 0 else ""
        chip = Chip.in_common(launcher.chip(index) for index in ranks.values())
        if chip.communicators > chip.most_communicators:
            most = f"{chip.sms} SMs have room for the kernels of at most {chip.most_communicators} communicators"
            raise ValueError(f"{COMMUNICATORS} is {chip.communicators}, but {most}")
        return [Member(rank, index) for rank, index in ranks.items()], {"table": table, "chip": asdict(chip)}

    with contextlib.ExitStack() as failing:
        failing.callback(memory.close)
        members, facts = rendezvous.agree("preparing the GPUs", prepare)
        everyone = exchange_json(rendezvous, "reading the tuning table", facts)
        failing.pop_all()
    chip = Chip.in_common(Chip(**facts["chip"]) for facts in everyone)
    multicast = None if stand_in else TorchMemory(engine.group, device.index, rendezvous)
    runner = Runner(members, engine.world_size, chip, memory, rendezvous, multicast)
    return runner, Table.from_json(everyone[0]["table"])
