"""Runs collective kernels on the GPUs of this process: plans, buffers, launches, streams, failures."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Hashable, Sequence

import torch
from cuda.bindings import driver

from graphar.errors import CommunicatorError, GrapharError
from graphar.matmul.skinny import MatmulTokens
from graphar.matmul.tiled import MatmulParts
from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.epilogues.epilogue import Form, Operands
from graphar.plan.algorithms import Algorithm, Shape, Slice, scratch
from graphar.plan.checks import is_capturing
from graphar.ranks.rendezvous import Alone, RanksAbsent, StoreRendezvous
from graphar.runtime import catalogue, launcher, loader, prefetch
from graphar.runtime.arguments import Arguments, Counters, EpilogueArguments, Record
from graphar.runtime.driver import call, on_device
from graphar.runtime.failures import calls_begun, failure_of_kernel, last_calls_of
from graphar.runtime.peer_memory import LocalMemory, ProcessMemory, SharedBuffer
from graphar.runtime.symmetric_tensors import SymmetricTensors
from graphar.runtime.torch_memory import TorchBuffer, TorchMemory

_COUNTERS_NBYTES = ctypes.sizeof(Counters)
_ABORT_NBYTES = 256


class Member:
    """A rank of this process: its device, the words its kernels report failures in, and the stream it used last."""

    def __init__(self, rank: int, device: int) -> None:
        self.rank, self.device = rank, device
        size = ctypes.sizeof(Record)
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        with on_device(device):
            self.abort = int(call(driver.cuMemAlloc, _ABORT_NBYTES))
            call(driver.cuMemsetD8, self.abort, 0, _ABORT_NBYTES)
            self.record_pointer = int(call(driver.cuMemHostAlloc, size, flags))
        ctypes.memset(self.record_pointer, 0, size)
        self.record = Record.from_address(self.record_pointer)
        self.stream: int | None = None  # where a call needs no follow; None: nowhere
        self._last: dict[bool, int] = {}  # the stream of the last call to follow, by whether it was captured

    def follow(self, stream: int) -> None:
        """Makes ``stream``, torch's current one, wait for the call before, on whichever stream that was.

        What is captured waits for what is captured too, and what is not for what is not: a graph is ordered as a whole,
        by whoever replays it, and nothing inside one can wait for what is outside.
        """
        capturing = is_capturing(self.device)
        # A first captured call on the stream of the eager ones did not come here, so that may have to be waited for.
        for previous in {self._last.get(capturing), self._last.get(False)} - {None, stream}:
            before = _stream_of(previous, self.device)
            if (previous != 0 and is_capturing(self.device, before)) == capturing:  # the default stream never is
                event = torch.cuda.Event()
                event.record(before)
                torch.cuda.current_stream(self.device).wait_event(event)
        self._last[capturing] = stream
        self.stream = None if capturing else stream

    def free(self) -> None:
        with on_device(self.device):
            call(driver.cuMemFree, self.abort)
            call(driver.cuMemFreeHost, self.record_pointer)
        self.record = Record()


class Runner:
    """The kernels of one communicator.

    Args:
        members: the ranks of this process.
        world_size: all ranks, 2 to 8.
        memory: where scratch comes from.
        rendezvous: where the processes of the group meet.
        multicast_memory: where the scratch of the multimem algorithms comes from; None: they take ``memory``, and have
            ordinary accesses in place of multimem instructions, for tests.
    """

    def __init__(
        self,
        members: list[Member],
        world_size: int,
        memory: ProcessMemory | LocalMemory,
        rendezvous: StoreRendezvous | Alone,
        multicast_memory: TorchMemory | None,
    ) -> None:
        self.members, self.world_size = members, world_size
        self._memory, self._rendezvous, self._multicast_memory = memory, rendezvous, multicast_memory
        self._regions: dict[Algorithm, SharedBuffer | TorchBuffer] = {}
        self._functions: dict[Hashable, list] = {}
        self.symmetric = SymmetricTensors({one.rank: one.device for one in members}, memory, rendezvous)
        self.matmuls = MatmulParts(self)
        self.short_matmuls = MatmulTokens(self)
        # Of what is launched: all threads share its arguments, and no two may reach the members in different orders.
        self._lock = threading.RLock()
        self._failure: GrapharError | None = None
        self._has_clusters: bool | None = None  # once that is known

    def least(self, what: str, number: int) -> int:
        """The least of all ranks' numbers; ``what`` they come for, in words. Collective."""
        return min(int(word) for word in self._rendezvous.exchange(what, str(int(number)).encode()))

    # ---- plans ----------------------------------------------------------------------------------------------------

    def why_no_multicast(self) -> str:
        """Why multimem algorithms cannot be had, or nothing. Collective the first time."""
        return self._multicast_memory.why_not() if self._multicast_memory else ""

    def has_clusters(self) -> bool:
        """Whether every rank can launch kernels in clusters of blocks. Collective the first time."""
        if self._has_clusters is None:
            own = all(launcher.has_clusters(member.device) for member in self.members)
            self._has_clusters = bool(self.least("asking for clusters", own))
        return self._has_clusters

    def can_prefetch(self) -> bool:
        """Whether this process's kernels can bring memory into L2 while they wait: its peers' need not."""
        return all(launcher.can_prefetch(member.device) for member in self.members)

    def prepare(
        self,
        algorithm: Algorithm,
        dtype: torch.dtype,
        direct: bool = False,
        codec: Codec | None = None,
        epilogue: Form | None = None,
    ) -> None:
        """Collective: compiles, loads and allocates what ``algorithm`` needs for ``dtype``, once.

        Args:
            direct: its direct variant, for symmetric tensors.
            codec: of an algorithm that has one on the wire.
            epilogue: what is done to the sums, if anything.

        Raises:
            CommunicatorError: during graph capture, or when a rank did not come in time.
            CompileError: when the kernel does not compile.
            UnsupportedError: when a device is too old for the kernel, or a multimem one is given no multicast address.
        """
        way = algorithm, dtype, direct, codec, epilogue
        key = _kernel_key(*way)
        described = f"{dtype}{', direct' if direct else ''}{f', {key[2]}' if codec else ''}"
        described += f", epilogue {epilogue.text}" if epilogue else ""
        self.prepare_kernel(key, algorithm, described, lambda: self._load(*way))

    def prepare_kernel(self, key: Hashable, algorithm: Algorithm, described: str, load: Callable[[], list]) -> list:
        """As :meth:`prepare`, for what ``load`` loads: a list, kept and returned, of what each member launches."""
        if functions := self._functions.get(key):
            return functions
        if any(is_capturing(member.device) for member in self.members):
            raise CommunicatorError(
                f"{algorithm.value} for {described} has no plan yet and none can be made during graph capture; "
                "call Communicator.prepare(), or make one such call, before capturing"
            )
        functions = self._rendezvous.agree(f"loading {algorithm.value} for {described}", load)
        if algorithm not in self._regions:
            self._regions[algorithm] = self._allocate(algorithm)
        # No rank launches before all have loaded and cleared.
        self._rendezvous.exchange(f"preparing {algorithm.value} for {described}", b"")
        self._functions[key] = functions
        return functions

    def _load(self, algorithm: Algorithm, dtype: torch.dtype, direct: bool, codec=None, epilogue=None) -> list:
        variant = "direct" if direct else None if algorithm.exact or self._multicast_memory else "StandIn"
        if codec:
            variant = codec.type_name
        way = algorithm.value, dtype, self.world_size, variant
        source = epilogue.source(*way) if epilogue else catalogue.kernel_source(*way)
        shared_nbytes = scratch(algorithm, self.world_size).shared_nbytes
        what = f"{algorithm.op}: {algorithm.value}"
        return [loader.load(source, member.device, shared_nbytes, what) for member in self.members]

    def _allocate(self, algorithm: Algorithm) -> SharedBuffer | TorchBuffer:
        needs = scratch(algorithm, self.world_size)
        memory = self._memory if algorithm.exact else self._multicast_memory or self._memory
        region = memory.allocate(_COUNTERS_NBYTES + needs.nbytes)
        for member in self.members:
            counters = region.pointers[member.rank]
            with on_device(member.device):
                call(driver.cuMemsetD8, counters, 0, _COUNTERS_NBYTES)
                call(driver.cuMemsetD8, counters + _COUNTERS_NBYTES, needs.fill, needs.nbytes)
                call(driver.cuCtxSynchronize)
        return region

    def bind(self, shape: Shape, slices: Sequence[Slice], dtype: torch.dtype, timeout_s: float) -> Callable:
        """A function of input and output, lists of them for several members, that launches on their current streams.

        Where the shape has an epilogue, that has operands, too: it takes them, or a list of them, last; and likewise
        what is to be prefetched.

        The plan exists; the tensors are those of the ``slices``, contiguous, and each slice is a launch. The function
        raises what an earlier call has reported.
        """
        runs = [self._bind_slice(shape, one, dtype, timeout_s) for one in slices]
        if len(runs) == 1:
            return runs[0]

        def launch_slices(inputs, outputs, *operands) -> None:
            with self._lock:
                for run, one in zip(runs, slices, strict=True):
                    run(_after(one.offset, inputs), _after(one.offset, outputs), *operands)

        return launch_slices

    def _bind_slice(self, shape: Shape, one: Slice, dtype: torch.dtype, timeout_s: float) -> Callable:
        launches = self.bind_members(shape, one, dtype, timeout_s)
        if len(launches) == 1:
            return launches[0]

        def launch_all(*lists: Sequence) -> None:
            with self._lock:
                self.raise_failure()  # before any of them launches
                for launch, *ones in zip(launches, *lists, strict=True):
                    launch(*ones)

        return launch_all

    def bind_members(self, shape: Shape, one: Slice, dtype: torch.dtype, timeout_s: float) -> list[Callable]:
        """One launch as :meth:`bind` has it, in parts: a function of a member's own tensors for each member."""
        functions = self._functions[_kernel_key(shape.algorithm, dtype, shape.direct, shape.codec, shape.epilogue)]
        return [
            self.bind_member(member, self._launch(member, function, shape, one, timeout_s))
            for member, function in zip(self.members, functions, strict=True)
        ]

    def _launch(self, member: Member, function, shape: Shape, one: Slice, timeout_s: float) -> Callable:
        needs = scratch(shape.algorithm, self.world_size)
        arguments = self.arguments(member, shape.algorithm, one, timeout_s)
        arguments.seed = shape.codec.seed or 0 if shape.codec else 0
        arguments.chunk = shape.chunk
        grid = shape.blocks, shape.threads, needs.shared_nbytes, launcher.can_overlap(member.device)
        launch = launcher.make_launch(function, arguments, *grid, shape.epilogue.cluster if shape.epilogue else 1)
        if shape.direct:
            launch = self.symmetric.make_direct_launch(launch, arguments, catalogue.DIRECT_OPERANDS[shape.algorithm])
        if shape.prefetches:
            launch = prefetch.make_launch(launch, arguments)
        if shape.epilogue:
            arguments.epilogue.columns, arguments.epilogue.skipped = shape.epilogue.columns, one.offset
            launch = _make_launch_with_operands(launch, arguments.epilogue)
        return launch

    def arguments(self, member: Member, algorithm: Algorithm, one: Slice, timeout_s: float) -> Arguments:
        """What every kernel of ``algorithm``, which is prepared, is given."""
        region = self._regions[algorithm]
        arguments = Arguments(
            numel=one.numel,
            timeout_ns=int(timeout_s * 1e9),
            capacity=scratch(algorithm, self.world_size).capacity,
            multicast=region.multicast_pointer and region.multicast_pointer + _COUNTERS_NBYTES,
            counters=region.pointers[member.rank],
            abort=member.abort,
            record=member.record_pointer,
            rank=member.rank,
            algorithm=algorithm.index,
        )
        for rank, pointer in enumerate(region.pointers):
            arguments.scratch[rank] = pointer + _COUNTERS_NBYTES
            arguments.ring[(rank - member.rank) % self.world_size] = arguments.scratch[rank]
        for rank, (begin, count) in enumerate(zip(one.begin, one.count, strict=True)):
            arguments.begin[rank], arguments.count[rank] = begin, count
        return arguments

    def run_matmul(self, algorithm: Algorithm, a, w, bias, out, counts, timeout_s, epilogue, codec: str) -> None:
        """Launches a matmul whose result is summed, as MatmulParts.run has them. Collective at first."""
        with self._lock:
            if algorithm.value in catalogue.MATMUL_TOKENS_KERNELS:  # whose ranks share no rows
                self.short_matmuls.run(algorithm, a, w, bias, out, timeout_s)
            else:
                found = codec_of_text(codec) if codec else None
                self.matmuls.run(algorithm, a, w, bias, out, counts, timeout_s, epilogue=epilogue, codec=found)

    def bind_member(self, member: Member, launch: Callable) -> Callable:
        """``launch``, of two pointers and a stream, as a function of the member's input and output.

        It launches on torch's current stream and raises what an earlier call has reported.
        """
        device, record, lock = member.device, member.record, self._lock
        current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

        def launch_one(x: torch.Tensor, out: torch.Tensor, *operands: Operands | torch.Tensor) -> None:
            if current_device() != device:
                with torch.cuda.device(device):
                    launch_one(x, out, *operands)
                return
            with lock:
                if record.kind:
                    self.raise_failure()
                stream = current_stream(device)
                if stream != member.stream:
                    member.follow(stream)
                launch(x.data_ptr(), out.data_ptr(), stream, *operands)

        return launch_one

    def bind_with_operands(self, member: Member, launch: Callable, arguments: EpilogueArguments) -> Callable:
        """As :meth:`bind_member`, of the operands of an epilogue as well, which go into the launch's ``arguments``."""
        return self.bind_member(member, _make_launch_with_operands(launch, arguments))

    # ---- failures and the end -------------------------------------------------------------------------------------

    def calls_begun(self) -> dict[Algorithm, list[int | None]]:
        """For each prepared algorithm, the calls that its kernels themselves have counted, by member.

        None: its memory cannot be read.
        """
        return {
            algorithm: [calls_begun(region.pointers[member.rank], member.device) for member in self.members]
            for algorithm, region in self._regions.items()
        }

    def raise_failure(self) -> None:
        """Raises what a kernel of this process has reported, if any has; always the same from the first time on."""
        if self._failure is None:
            record = next((member.record for member in self.members if member.record.kind), None)
            if record is None:
                return
            self._failure = failure_of_kernel(record, self._last_calls())
        raise self._failure.again()

    def _last_calls(self) -> list[str]:
        own = {member.rank: member.device for member in self.members}
        devices = [own.get(rank, self.members[0].device) for rank in range(self.world_size)]
        counters = {algorithm: region.pointers for algorithm, region in self._regions.items()}
        try:
            ended = self._rendezvous.ended()
        except CommunicatorError:  # the store may have ended with the rank that served it
            ended = []
        return last_calls_of(counters, devices, ended)

    def synchronize(self) -> None:
        """Waits for everything on the members' devices, then raises what a kernel has reported."""
        for member in self.members:
            torch.cuda.synchronize(member.device)
        self.raise_failure()

    def close(self) -> None:
        """Collective: frees everything, once every rank that still runs is done with it.

        Raises:
            RanksAbsent: when a rank did not come in time; the memory its kernels may still write to is kept.
        """
        for member in self.members:
            torch.cuda.synchronize(member.device)
        regions = [*self._regions.values(), *self.symmetric.buffers]
        self._regions, self._functions = {}, {}
        with on_device(self.members[0].device):
            for member in self.members:
                member.free()
            self._wait_for_all(0)
            for region in regions:
                region.unmap()
            self._wait_for_all(1)
            for region in regions:
                region.free()

    def _wait_for_all(self, step: int) -> None:
        try:
            self._rendezvous.close(step)
        except RanksAbsent as error:
            if error.absent != error.ended:  # what has ended writes nowhere
                raise


def _kernel_key(
    algorithm: Algorithm, dtype: torch.dtype, direct: bool, codec: Codec | None, epilogue: Form | None
) -> tuple:
    """What tells kernels apart: codecs that differ in their seed share one, and so do epilogues in their columns."""
    key = algorithm, dtype, codec.type_name if codec else direct
    return (*key, epilogue.kernel) if epilogue else key


def _make_launch_with_operands(launch: Callable, arguments: EpilogueArguments) -> Callable:
    """``launch``, of the operands of an epilogue as well, which it puts among its ``arguments``."""

    def launch_with_operands(input_pointer: int, output_pointer: int, stream: int, operands: Operands) -> None:
        operands.put(arguments)
        launch(input_pointer, output_pointer, stream)

    return launch_with_operands


def _stream_of(handle: int, device: int) -> torch.cuda.Stream:
    """The stream that CUDA knows by ``handle``; ExternalStream takes 0 for a request for a new one."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


def _after(offset: int, tensors):
    """Contiguous tensors without their first ``offset`` elements; nothing where they have no more."""
    if isinstance(tensors, torch.Tensor):
        return tensors.view(-1)[offset:]
    return [_after(offset, one) for one in tensors]
