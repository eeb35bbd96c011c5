"""Runs collective kernels on this process's GPUs: loading, scratch, launches, stream order, failures."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Sequence

import torch

from graphar.errors import CommunicatorError, GrapharError
from graphar.numerics.norms import RmsNorm
from graphar.plan.algorithms import Algorithm, Shape
from graphar.plan.policy import Chip
from graphar.plan.select import Kernel, kernel_of
from graphar.plan.slices import Slice
from graphar.plan.tensor_tuple import TensorTuple
from graphar.ranks.capture import is_capturing
from graphar.ranks.rendezvous import Alone, RanksAbsent, StoreRendezvous
from graphar.runtime import catalogue, launcher, prefetch
from graphar.runtime.arguments import Arguments, Counters, NormArguments, Record, TupleArguments
from graphar.runtime.driver import call, driver, on_device
from graphar.runtime.failures import calls_begun, compare_last_calls, failure_of_kernel, last_calls_of
from graphar.runtime.launcher import Grid, Launch
from graphar.runtime.multicast_memory import TorchBuffer, TorchMemory
from graphar.runtime.peer_memory import LocalMemory, ProcessMemory, SharedBuffer
from graphar.runtime.symmetric_tensors import SymmetricTensors

_COUNTERS_NBYTES = -(-ctypes.sizeof(Counters) // 4096) * 4096  # the scratch follows, and begins at a page
_ABORT_NBYTES = 256
_KEPT_WORDS = 1024  # the calls that other ranks can look up in words; later ones take the place of the first

_log = logging.getLogger(__name__)

_ARGUMENTS = {TensorTuple: TupleArguments, RmsNorm: NormArguments}  # by the form; Arguments for others

Fill = Callable[..., None]  # takes a launch's arguments and a call's tensors, and writes all but two addresses


class Member:
    """A rank of this process: its device, the record in which its kernels report failures, and its last stream."""

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
        self.stream: int | None = None  # calls on this stream need no follow() and leave(); None: all calls do
        self._last: dict[bool, int | None] = {}  # the stream of the last follow(), by whether it was captured
        self._left: torch.cuda.Event | None = None  # the end of the last eager call, if it was on a stream of others

    def follow(self, stream: int) -> None:
        """Makes ``stream``, torch's current one, wait for the call before, which may be on another stream.

        A captured call waits for captured calls only, and an eager call for eager calls only. Work inside a graph
        cannot wait for work outside it; whoever replays a graph orders it as a whole.

        Torch keeps its own streams for ever. The handle of another one may be destroyed, and then name a new stream,
        so after each eager call on such a stream leave() records an event.
        """
        capturing = is_capturing(self.device)
        if self._left is not None and not capturing:
            torch.cuda.current_stream(self.device).wait_event(self._left)
            self._left = None
        # A first captured call on the eager calls' stream skips follow(), so wait for that stream too.
        for previous in {self._last.get(capturing), self._last.get(False)} - {None, stream}:
            before = _stream_of(previous, self.device)
            if (previous != 0 and is_capturing(self.device, before)) == capturing:  # the default stream cannot capture
                event = torch.cuda.Event()
                event.record(before)
                torch.cuda.current_stream(self.device).wait_event(event)
        external = not capturing and _is_external(stream, self.device)
        self._last[capturing] = None if external else stream
        self.stream = None if capturing or external else stream

    def leave(self) -> None:
        """Notes the end of a call that called :meth:`follow`, for the next call to wait for."""
        if self.stream is None and not is_capturing(self.device):
            self._left = torch.cuda.Event()
            self._left.record(torch.cuda.current_stream(self.device))

    def free(self) -> None:
        with on_device(self.device):
            call(driver.cuMemFree, self.abort)
            call(driver.cuMemFreeHost, self.record_pointer)
        self.record = Record()


class Runner:
    """The loaded kernels of one communicator, their scratch and their launches.

    ``members`` are the ranks of this process, and ``chip`` has the properties that the GPUs of all ranks share. The
    scratch of the multimem algorithms comes from ``multicast_memory``. If that is None, in tests, it comes from
    ``memory``, and their kernels use ordinary accesses in place of multimem instructions.
    """

    def __init__(
        self,
        members: list[Member],
        world_size: int,
        chip: Chip,
        memory: ProcessMemory | LocalMemory,
        rendezvous: StoreRendezvous | Alone,
        multicast_memory: TorchMemory | None,
    ) -> None:
        self.members, self.world_size, self.chip = members, world_size, chip
        self._memory, self._rendezvous, self._multicast_memory = memory, rendezvous, multicast_memory
        self._regions: dict[Algorithm, SharedBuffer | TorchBuffer] = {}
        self._functions: dict[Hashable, list] = {}
        self.symmetric = SymmetricTensors({one.rank: one.device for one in members}, memory, rendezvous)
        # Held during launches: threads share the arguments, and must reach the members in the same order.
        self.lock = threading.RLock()
        self._failure: GrapharError | None = None
        self._agreed: dict[int, str] = {}  # by fingerprint, what launches have alike on all ranks

    # ---- loading ----------------------------------------------------------------------------------------------------

    def why_no_multicast(self) -> str:
        """Returns why multimem algorithms cannot run, or an empty string. The first call is collective."""
        return self._multicast_memory.why_not() if self._multicast_memory else ""

    def prepare(self, kernel: Kernel) -> None:
        """Compiles and loads a kernel and allocates its scratch, once. Collective.

        Raises:
            CommunicatorError: a graph is being captured, or a rank did not arrive in time.
            CompileError: the kernel does not compile.
            UnsupportedError: a device is too old for the kernel, or a multimem kernel has no multicast address.
        """
        key = _kernel_key(kernel)
        described = f"{kernel.dtype}{', direct' if kernel.direct else ''}{f', {key[2]}' if kernel.codec else ''}"
        described += f", epilogue {kernel.epilogue.text}" if kernel.epilogue else ""
        self.prepare_kernel(key, kernel.algorithm, described, lambda: self._load(kernel))

    def loaded(self, key: Hashable) -> list | None:
        """Returns the functions that :meth:`prepare_kernel` loaded under a key; None if it has not."""
        return self._functions.get(key)

    def prepare_kernel(self, key: Hashable, algorithm: Algorithm, described: str, load: Callable[[], list]) -> list:
        """Loads kernels and allocates the algorithm's scratch, once for each key; returns the functions. Collective.

        ``described`` is the kernels in words, equal on all ranks. ``load`` returns a list with the functions of each
        member.

        Raises:
            CommunicatorError: a graph is being captured, or a rank did not arrive in time.
        """
        if functions := self._functions.get(key):
            return functions
        if any(is_capturing(member.device) for member in self.members):
            raise CommunicatorError(
                f"{algorithm.value} for {described} has no plan yet and none can be made during graph capture; "
                "call Communicator.prepare(), or make one such call, before capturing"
            )
        begin = time.perf_counter()
        functions = self._rendezvous.agree(f"loading {algorithm.value} for {described}", load)
        if algorithm not in self._regions:
            self._regions[algorithm] = self._allocate(algorithm)
        # No rank may launch before all have loaded the kernel and cleared their scratch.
        self._rendezvous.exchange(f"preparing {algorithm.value} for {described}", b"")
        self._functions[key] = functions
        _log.debug("loaded %s for %s in %.2f s", algorithm.value, described, time.perf_counter() - begin)
        return functions

    def _load(self, kernel: Kernel) -> list:
        algorithm = kernel.algorithm
        variant = "direct" if kernel.direct else None if algorithm.exact or self._multicast_memory else "StandIn"
        source = catalogue.source_of(kernel, self.world_size, variant)
        shared_nbytes = algorithm.row.scratch(self.world_size).shared_nbytes
        what = f"{algorithm.op}: {algorithm.value}"
        return [launcher.load(source, member.device, shared_nbytes, what) for member in self.members]

    def _allocate(self, algorithm: Algorithm) -> SharedBuffer | TorchBuffer:
        needs = algorithm.row.scratch(self.world_size)
        memory = self._memory if algorithm.exact else self._multicast_memory or self._memory
        region = memory.allocate(_COUNTERS_NBYTES + needs.nbytes)
        for member in self.members:
            counters = region.pointers[member.rank]
            with on_device(member.device):
                call(driver.cuMemsetD8, counters, 0, _COUNTERS_NBYTES)
                call(driver.cuMemsetD8, counters + _COUNTERS_NBYTES, needs.fill, needs.nbytes)
                call(driver.cuCtxSynchronize)
        return region

    def scratch(self, algorithm: Algorithm) -> list[int]:
        """Returns the addresses of a prepared algorithm's scratch, by rank."""
        return [pointer + _COUNTERS_NBYTES for pointer in self._regions[algorithm].pointers]

    # ---- launching --------------------------------------------------------------------------------------------------

    def bind(
        self,
        shape: Shape,
        slices: Sequence[Slice],
        dtype: torch.dtype,
        timeout_s: float,
        prefetch_nbytes: int = 0,
        agreed: str = "",
    ) -> Callable:
        """Returns a function of input and output that launches a prepared kernel on the current streams, by slices.

        With an epilogue or a tuple the function also takes its inputs, and with a prefetch the tensor of which it
        fetches at most ``prefetch_nbytes``. With several members each argument is a list. The tensors are contiguous.
        The function raises the error that an earlier call reported. ``timeout_s`` is the deadline of each wait on
        another rank, in seconds. ``agreed`` is what the call must have alike on all ranks, in words, which kernels
        compare.
        """
        runs = [self._bind_slice(shape, one, dtype, timeout_s, prefetch_nbytes, agreed) for one in slices]
        if len(runs) == 1:
            return runs[0]

        def launch_slices(inputs, outputs, *more) -> None:
            with self.lock:
                for run, one in zip(runs, slices, strict=True):
                    run(_after(one.offset, inputs), _after(one.offset, outputs), *more)

        return launch_slices

    def _bind_slice(
        self, shape: Shape, one: Slice, dtype: torch.dtype, timeout_s: float, prefetch_nbytes: int, agreed: str
    ) -> Callable:
        launches = self.bind_members(shape, one, dtype, timeout_s, prefetch_nbytes, agreed)
        if len(launches) == 1:
            return launches[0]

        def launch_all(*lists: Sequence) -> None:
            with self.lock:
                self.raise_failure()  # before any member launches
                for launch, *ones in zip(launches, *lists, strict=True):
                    launch(*ones)

        return launch_all

    def bind_members(
        self,
        shape: Shape,
        one: Slice,
        dtype: torch.dtype,
        timeout_s: float,
        prefetch_nbytes: int = 0,
        agreed: str = "",
    ) -> list[Callable]:
        """Returns, for each member, a function of its own tensors that launches the slice ``one`` of a prepared kernel.

        It takes the arguments of :meth:`bind`, with one slice.
        """
        functions = self._functions[_kernel_key(kernel_of(shape, dtype))]
        needs = shape.algorithm.row.scratch(self.world_size)
        launches, launched = [], f"{agreed} by {_described(shape)}"
        for member, function in zip(self.members, functions, strict=True):
            kind = _ARGUMENTS.get(type(shape.epilogue), Arguments)
            arguments = self.arguments(member, shape.algorithm, one, timeout_s, launched, kind)
            arguments.seed = shape.codec.seed or 0 if shape.codec else 0
            arguments.chunk = shape.chunk
            if isinstance(arguments, TupleArguments):
                arguments.describe(shape.epilogue)
            elif isinstance(arguments, NormArguments):
                arguments.columns, arguments.skipped = shape.epilogue.columns, one.offset
            elif shape.epilogue:
                arguments.epilogue.columns, arguments.epilogue.skipped = shape.epilogue.columns, one.offset
            cluster = shape.epilogue.cluster if shape.epilogue else 1
            overlaps = launcher.can_overlap(member.device)
            grid = Grid(shape.blocks, shape.threads, needs.shared_nbytes, overlaps, cluster)
            launch = Launch(function, [arguments], grid)
            launches.append(self.bind_member(member, launch, arguments, self._fill(shape, prefetch_nbytes)))
        return launches

    def _fill(self, shape: Shape, prefetch_nbytes: int) -> Fill | None:
        """Returns a function that writes symmetric addresses, epilogue inputs or a prefetch into a launch's arguments.

        With a TensorTuple it writes the addresses of a rank's tensors. None if the kernel needs only the addresses of
        input and output.
        """
        direct = self.symmetric.direct_filler(shape.algorithm.row.direct) if shape.direct else None
        if shape.prefetches:
            return lambda arguments, x, out, following: prefetch.put(arguments, following, prefetch_nbytes)
        if not shape.epilogue:
            return direct
        if isinstance(shape.epilogue, TensorTuple):
            return lambda arguments, x, out, tensors: arguments.put(tensors)
        if isinstance(shape.epilogue, RmsNorm):
            return _norm_fill(shape.epilogue)

        def fill(arguments: Arguments, x: torch.Tensor, out: torch.Tensor, inputs) -> None:
            if direct is not None:
                direct(arguments, x, out)
            arguments.epilogue.put(inputs)

        return fill

    def arguments(
        self,
        member: Member,
        algorithm: Algorithm,
        one: Slice,
        timeout_s: float,
        agreed: str = "",
        kind: type[Arguments] = Arguments,
    ) -> Arguments:
        """Returns the arguments that all kernels of a prepared algorithm take, for one member and slice.

        ``agreed`` is what the launch must have alike on all ranks beside the slice, in words, which kernels compare.
        """
        region = self._regions[algorithm]
        arguments = kind(
            numel=one.numel,
            timeout_ns=int(timeout_s * 1e9),
            capacity=algorithm.row.scratch(self.world_size).capacity,
            multicast=region.multicast_pointer and region.multicast_pointer + _COUNTERS_NBYTES,
            counters=region.pointers[member.rank],
            abort=member.abort,
            record=member.record_pointer,
            rank=member.rank,
            world_size=self.world_size,
            algorithm=algorithm.index,
            fingerprint=self._fingerprint(agreed, one),
        )
        for rank, pointer in enumerate(region.pointers):
            arguments.scratch[rank], arguments.peer_counters[rank] = pointer + _COUNTERS_NBYTES, pointer
            arguments.ring[(rank - member.rank) % self.world_size] = arguments.scratch[rank]
        for rank, (begin, count) in enumerate(zip(one.begin, one.count, strict=True)):
            arguments.begin[rank], arguments.count[rank] = begin, count
        return arguments

    def _fingerprint(self, agreed: str, one: Slice) -> int:
        """Returns a number for what a launch must have alike on all ranks, in words that other ranks can look up."""
        offset = f", from element {one.offset} of each part on" if one.offset else ""
        words = f"{agreed}{offset}"
        number = zlib.crc32(words.encode()) or 1  # 0 means no call
        if number not in self._agreed:
            if len(self._agreed) >= _KEPT_WORDS:
                oldest = next(iter(self._agreed))
                del self._agreed[oldest]
                self._rendezvous.withdraw(_name_of_call(oldest))
            self._agreed[number] = words
            self._rendezvous.publish(_name_of_call(number), words)
        return number

    def _call_of(self, fingerprint: int, rank: int) -> str:
        """Returns in words what a rank called: the call with a fingerprint."""
        words = self._agreed.get(fingerprint) or self._rendezvous.published(_name_of_call(fingerprint), rank)
        return words or "another call"

    def bind_member(
        self, member: Member, launch: Launch, arguments: Arguments, fill: Fill | None = None
    ) -> Callable[..., None]:
        """Returns a function of the member's input and output, and the further arguments of ``fill``, that launches.

        It launches on torch's current stream, and raises the error that an earlier call reported. If a launch needs
        only the two addresses, the function has an attribute ``at_addresses``: the same as a function of the addresses,
        for callers that have made the member's device the current one.
        """
        device, record = member.device, member.record
        acquire, release = self.lock.acquire, self.lock.release  # `with` takes twice as long
        current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
        launch_kernel, launch_arguments = launcher.launch_kernel(), launch.arguments

        def launch_at(input_address: int, output_address: int, *tensors) -> None:
            acquire()
            try:
                if record.kind:
                    self.raise_failure()
                stream = current_stream(device)
                if follows := stream != member.stream:
                    member.follow(stream)
                arguments.input, arguments.output = input_address, output_address
                if fill is not None:
                    fill(arguments, *tensors)
                if stream != launch.stream:
                    launch.on(stream)
                if status := launch_kernel(*launch_arguments):
                    launcher.fail(status)
                if follows:
                    member.leave()
            finally:
                release()

        def launch_one(x: torch.Tensor, out: torch.Tensor, *more) -> None:
            if current_device() == device:
                launch_at(x.data_ptr(), out.data_ptr(), x, out, *more)
            else:
                with torch.cuda.device(device):
                    launch_at(x.data_ptr(), out.data_ptr(), x, out, *more)

        if fill is None:
            launch_one.at_addresses = launch_at
        return launch_one

    # ---- failures and the end -------------------------------------------------------------------------------------

    def calls_begun(self) -> dict[Algorithm, list[int | None]]:
        """Returns, for each prepared algorithm, how many calls its kernels have counted, by member.

        A count is None if the member's memory cannot be read.
        """
        return {
            algorithm: [calls_begun(region.pointers[member.rank], member.device) for member in self.members]
            for algorithm, region in self._regions.items()
        }

    def raise_failure(self) -> None:
        """Raises the error that a kernel of this process reported, if any; from then on always the same error."""
        if self._failure is None:
            record = next((member.record for member in self.members if member.record.kind), None)
            if record is None:
                return
            self._failure = failure_of_kernel(record, self._last_calls, self._call_of)
        raise self._failure.again()

    def _last_calls(self) -> list[str]:
        own = {member.rank: member.device for member in self.members}
        devices = [own.get(rank, self.members[0].device) for rank in range(self.world_size)]
        counters = {algorithm: region.pointers for algorithm, region in self._regions.items()}
        try:
            ended = self._rendezvous.ended()
        except CommunicatorError:  # the store ends with the rank that serves it
            ended = []
        return last_calls_of(counters, devices, ended)

    def synchronize(self) -> None:
        """Waits for all work on the members' devices, then raises the error that a kernel reported, if any.

        The last calls of the ranks are compared here. Kernels compare those before.
        """
        for member in self.members:
            torch.cuda.synchronize(member.device)
            with on_device(member.device):
                for algorithm, region in self._regions.items():
                    compare_last_calls(
                        member.record, algorithm, region.pointers[member.rank], member.rank, self.world_size
                    )
        self.raise_failure()

    def close(self) -> None:
        """Frees all memory after every rank that still runs has finished its work. Collective.

        Raises:
            RanksAbsent: a rank did not arrive in time; memory that its kernels may still write is not freed.
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
            if error.absent != error.ended:  # an ended process no longer writes
                raise


def _norm_fill(norm: RmsNorm) -> Fill:
    takes_scale = norm.output == "static_fp8"

    def fill(arguments: NormArguments, x: torch.Tensor, out: torch.Tensor, inputs) -> None:
        residual, weight, summed, *more = inputs.tensors
        scale, scales = (more, ()) if takes_scale else ((), more)
        arguments.put((x, residual, weight, *scale), (out, summed, *scales))
        arguments.eps, arguments.weight_offset = inputs.scalars

    return fill


def _name_of_call(fingerprint: int) -> str:
    return f"call {fingerprint:08x}"


def _described(shape: Shape) -> str:
    """Returns what a shape must have alike on all ranks, in words.

    Algorithms that can prefetch work with unlike grids: one rank alone may ask for a prefetch, which takes more blocks.
    """
    grid = "" if shape.algorithm.row.prefetches else f" in {shape.blocks} blocks of {shape.threads} threads"
    columns = f", {shape.epilogue.columns} columns" if shape.epilogue and shape.epilogue.columns > 1 else ""
    return f"{shape.algorithm.value}{grid}{columns}{', in symmetric memory' if shape.direct else ''}"


def _kernel_key(kernel: Kernel) -> tuple:
    """Returns the key of a kernel. The seed of a codec and the columns of an epilogue are not part of it."""
    key = kernel.algorithm, kernel.dtype, kernel.codec.type_name if kernel.codec else kernel.direct
    return (*key, kernel.epilogue.kernel) if kernel.epilogue else key


def _is_external(stream: int, device: int) -> bool:
    """Returns whether ``stream``, torch's current one, is not torch's own: its id is then its handle."""
    return stream != 0 and torch.cuda.current_stream(device).stream_id == stream


def _stream_of(handle: int, device: int) -> torch.cuda.Stream:
    """Returns the stream of a handle. Handle 0 is the default stream, for which ExternalStream would make a new one."""
    return torch.cuda.ExternalStream(handle, device) if handle else torch.cuda.default_stream(device)


def _after(offset: int, tensors):
    """Returns a flat view of contiguous tensors without their first ``offset`` elements."""
    if isinstance(tensors, torch.Tensor):
        return tensors.view(-1)[offset:]
    return [_after(offset, one) for one in tensors]
