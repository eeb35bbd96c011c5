"""Runs collective kernels on the GPUs of this process: plans, buffers, launches, streams, failures."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import torch
from cuda.bindings import driver

from graphar import kernels, launcher
from graphar.algorithms import Algorithm, Shape, scratch
from graphar.checks import is_capturing
from graphar.compiler import compile_kernel
from graphar.driver import call, on_device
from graphar.errors import CollectiveTimeout, CommunicatorError, ConcurrentCallError, TimeoutRecord
from graphar.symmetric_memory import LocalMemory, ProcessMemory, SharedBuffer
from graphar.symmetric_tensors import SymmetricTensors

_COUNTERS_NBYTES = ctypes.sizeof(kernels.Counters)
_ABORT_NBYTES = 256
_OVERLAPPED = 2  # `overlapped` in cuda_src/device/call.cuh


class Member:
    """A rank of this process: its device, the words its kernels report failures in, and the stream it used last."""

    def __init__(self, rank: int, device: int) -> None:
        self.rank, self.device = rank, device
        size = ctypes.sizeof(kernels.Record)
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        with on_device(device):
            self.abort = int(call(driver.cuMemAlloc, _ABORT_NBYTES))
            call(driver.cuMemsetD8, self.abort, 0, _ABORT_NBYTES)
            self.record_pointer = int(call(driver.cuMemHostAlloc, size, flags))
        ctypes.memset(self.record_pointer, 0, size)
        self.record = kernels.Record.from_address(self.record_pointer)
        self.stream: int | None = None

    def follow(self, stream: int) -> None:
        """Makes ``stream``, torch's current one, wait for the stream of the call before."""
        # A captured call is ordered by its graph; what runs outside a capture cannot be waited for inside.
        if is_capturing(self.device):
            return
        if self.stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.ExternalStream(self.stream, self.device))
            torch.cuda.current_stream(self.device).wait_event(event)
        self.stream = stream

    def free(self) -> None:
        with on_device(self.device):
            call(driver.cuMemFree, self.abort)
            call(driver.cuMemFreeHost, self.record_pointer)


class Runner:
    """The kernels of one communicator.

    Args:
        members: the ranks of this process.
        world_size: all ranks, 2 to 8.
        memory: where scratch comes from.
        rendezvous: where the processes of the group meet.
    """

    def __init__(self, members: list[Member], world_size: int, memory: ProcessMemory | LocalMemory, rendezvous) -> None:
        self.members, self.world_size = members, world_size
        self._memory, self._rendezvous = memory, rendezvous
        self._regions: dict[Algorithm, SharedBuffer] = {}
        self._functions: dict[tuple[Algorithm, torch.dtype, bool], list] = {}
        self.symmetric = SymmetricTensors({one.rank: one.device for one in members}, memory, rendezvous)
        self._lock = threading.Lock()

    # ---- plans ----------------------------------------------------------------------------------------------------

    def prepare(self, algorithm: Algorithm, dtype: torch.dtype, direct: bool = False) -> None:
        """Collective: compiles, loads and allocates what ``algorithm`` needs for ``dtype``, once.

        Args:
            direct: its direct variant, for symmetric tensors.

        Raises:
            CommunicatorError: during graph capture, or when a rank did not come in time.
            CompileError: when the kernel does not compile.
        """
        if (algorithm, dtype, direct) in self._functions:
            return
        if any(is_capturing(member.device) for member in self.members):
            raise CommunicatorError(
                f"{algorithm.value} for {dtype} has no plan yet and none can be made during graph capture; "
                "call Communicator.prepare(), or make one such call, before capturing"
            )
        functions = self._rendezvous.agree("loading a kernel", lambda: self._load(algorithm, dtype, direct))
        if algorithm not in self._regions:
            self._regions[algorithm] = self._allocate(algorithm)
        self._rendezvous.exchange("finishing a plan", b"")  # no rank launches before all have loaded and cleared
        self._functions[algorithm, dtype, direct] = functions

    def _load(self, algorithm: Algorithm, dtype: torch.dtype, direct: bool) -> list:
        source = kernels.kernel_source(algorithm.value, dtype, self.world_size, direct)
        shared_nbytes = scratch(algorithm, self.world_size).shared_nbytes
        return [
            launcher.load(compile_kernel(source, launcher.architecture(member.device)), member.device, shared_nbytes)
            for member in self.members
        ]

    def _allocate(self, algorithm: Algorithm) -> SharedBuffer:
        needs = scratch(algorithm, self.world_size)
        region = self._memory.allocate(_COUNTERS_NBYTES + needs.nbytes)
        for member in self.members:
            counters = region.pointers[member.rank]
            with on_device(member.device):
                call(driver.cuMemsetD8, counters, 0, _COUNTERS_NBYTES)
                call(driver.cuMemsetD8, counters + _COUNTERS_NBYTES, needs.fill, needs.nbytes)
                call(driver.cuCtxSynchronize)
        return region

    def bind(self, shape: Shape, numel: int, dtype: torch.dtype, timeout_s: float) -> Callable:
        """A function of input and output, lists of them for several members, that launches on their current streams.

        The plan exists; the tensors have ``numel`` elements. The function raises what an earlier call has reported.
        """
        functions = self._functions[shape.algorithm, dtype, shape.direct]
        launches = [
            self._bind(member, self._launch(member, function, shape, numel, timeout_s))
            for member, function in zip(self.members, functions, strict=True)
        ]
        if len(launches) == 1:
            return launches[0]

        def launch_all(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
            self.raise_failure()  # before any of them launches
            for launch, x, out in zip(launches, inputs, outputs, strict=True):
                launch(x, out)

        return launch_all

    def _launch(self, member: Member, function, shape: Shape, numel: int, timeout_s: float) -> Callable:
        region = self._regions[shape.algorithm]
        needs = scratch(shape.algorithm, self.world_size)
        arguments = kernels.Arguments(
            numel=numel,
            timeout_ns=int(timeout_s * 1e9),
            capacity=needs.capacity,
            chunk=shape.chunk,
            counters=region.pointers[member.rank],
            abort=member.abort,
            record=member.record_pointer,
            rank=member.rank,
            algorithm=shape.algorithm.index,
        )
        for rank, pointer in enumerate(region.pointers):
            arguments.scratch[rank] = pointer + _COUNTERS_NBYTES
        overlap = launcher.can_overlap(member.device)
        launch = launcher.make_launch(function, arguments, shape.blocks, shape.threads, needs.shared_nbytes, overlap)
        if shape.direct:
            launch = self.symmetric.make_direct_launch(launch, arguments, kernels.DIRECT_OPERANDS[shape.algorithm])
        return launch

    def _bind(self, member: Member, launch: Callable) -> Callable:
        device, record, lock = member.device, member.record, self._lock
        current_device, current_stream = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

        def launch_one(x: torch.Tensor, out: torch.Tensor) -> None:
            if current_device() != device:
                with torch.cuda.device(device):
                    launch_one(x, out)
                return
            with lock:  # all threads share the launch's arguments
                if record.kind:
                    self.raise_failure()
                stream = current_stream(device)
                if stream != member.stream:
                    member.follow(stream)
                launch(x.data_ptr(), out.data_ptr(), stream)

        return launch_one

    # ---- failures and the end -------------------------------------------------------------------------------------

    def raise_failure(self) -> None:
        """Raises what a kernel of this process has reported, if any has."""
        for member in self.members:
            r = member.record
            if r.kind == 0:
                continue
            op = list(Algorithm)[r.algorithm].value
            record = TimeoutRecord(op, r.sequence, r.rank, r.peer, r.block, r.expected, r.seen)
            if r.kind == _OVERLAPPED:
                raise ConcurrentCallError(
                    f"{op} call {r.sequence} ran while another call of this communicator did, on another stream or in "
                    "another graph; order them, or give each its own Communicator"
                )
            raise CollectiveTimeout(
                f"{op} call {r.sequence}: rank {r.rank} waited past the deadline for rank {r.peer} "
                f"(block {r.block}, expected {r.expected:#x}, saw {r.seen:#x}); close this communicator",
                record,
            )

    def synchronize(self) -> None:
        """Waits for everything on the members' devices, then raises what a kernel has reported."""
        for member in self.members:
            torch.cuda.synchronize(member.device)
        self.raise_failure()

    def close(self) -> None:
        """Collective: frees everything, once every rank is done with it.

        Raises:
            CommunicatorError: when a rank did not come in time; the memory its kernels may still write to is kept.
        """
        for member in self.members:
            torch.cuda.synchronize(member.device)
        regions = [*self._regions.values(), *self.symmetric.buffers]
        with on_device(self.members[0].device):
            self._rendezvous.exchange("closing", b"")
            for region in regions:
                region.unmap()
            self._rendezvous.exchange("closing", b"")
            for region in regions:
                region.free()
        for member in self.members:
            member.free()
        self._regions, self._functions = {}, {}
