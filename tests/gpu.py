"""Helpers of the GPU tests: all ranks in one process, and access to a communicator's device memory."""

from __future__ import annotations

import ctypes
import gc
import random
import struct
import time
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from cuda.bindings import driver

import graphar
from graphar.numerics.dtypes import BYTE
from graphar.plan.algorithms import Algorithm, kernels_that, with_kernels
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.scratch import MAX_BLOCKS, SIGNAL_PAD_NBYTES
from graphar.plan.slices import Slice
from graphar.plan.work import Parts
from graphar.runtime.arguments import Counters
from graphar.runtime.bind import collective
from graphar.runtime.bind.launches import on_own_device
from graphar.runtime.driver import call, on_device
from graphar.runtime.engine import Engine
from graphar.runtime.registry import engine_of_group
from graphar.runtime.runner import COUNTERS_NBYTES
from tests import cases
from tests.cases import same_bits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNEL_ALGORITHMS = tuple(one.value for one in with_kernels("allreduce"))
EXACT_ALGORITHMS = tuple(name for name in KERNEL_ALGORITHMS if Algorithm(name).exact)
DIRECT_ALGORITHMS = tuple(one.value for one in kernels_that(lambda row: row.direct))
# Algorithms whose data carry their own readiness: between calls, every word of their scratch says 'not yet'.
_WITHOUT_PAD = (
    "one_shot_push",
    "two_shot_push",
    "reducescatter_push",
    "allgather_flagged",
    "alltoall_flagged",
    "quantized_two_shot_push",
    "matmul_one_shot",
    "matmul_two_shot",
    "allreduce_rmsnorm_one_shot",
    "allreduce_rmsnorm_two_shot",
    "reducescatter_rmsnorm",
)


def fits(algorithm: str, world_size: int, numel: int, dtype: torch.dtype) -> bool:
    limit = Algorithm(algorithm).row.limit(world_size)
    dtypes = Algorithm(algorithm).row.dtypes
    return (dtype in dtypes or BYTE in dtypes) and (limit is None or numel * dtype.itemsize <= limit)


def poison(nbytes: Sequence[int]) -> None:
    """Fills the memory of each device's next two tensors of these sizes: no stale result passes for a new one."""
    for device, size in enumerate(nbytes):
        kept = [torch.full((size,), 7, dtype=torch.uint8, device=f"cuda:{device}") for _ in range(2)]
        del kept


def kernel_calls() -> int:
    """How many calls this process's kernels have counted in the default group."""
    return sum(calls for (calls,) in engine_of_group("").runner.calls_begun().values())


def operands(xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> list[Operands]:
    """The operands of each rank in a call with one input and one output."""
    return [Operands((x,), (out,)) for x, out in zip(xs, outs, strict=True)]


def launches_of(engine: Engine, call: Call, config: Config, one: Slice, timeout_s: float) -> list[Callable]:
    """Each member's launch of a slice of a sum or of parts: functions of input and output."""
    bound = collective.bind_slice(engine.runner, call, config, one, timeout_s)
    there = [on_own_device(member.device, launch) for member, launch in zip(engine.runner.members, bound, strict=True)]
    return [lambda x, out, launch=launch: launch((x,), (out,)) for launch in there]


def bare_launches(engine: Engine, call: Call, config: Config, one: Slice, timeout_s: float) -> list[Callable]:
    """launches_of() without the host's ordering and error checks: functions of input, output and stream."""

    def bind_launch(runner, member, launch, arguments, put=None) -> Callable:
        def launch_one(x: torch.Tensor, out: torch.Tensor, stream: int) -> None:
            arguments.input, arguments.output = x.data_ptr(), out.data_ptr()
            if put is not None:
                put((x,), (out,), (), None)
            launch.enqueue(stream)

        return launch_one

    with mock.patch.object(collective, "bind_launch", bind_launch):
        return collective.bind_slice(engine.runner, call, config, one, timeout_s)


def parts_of(ranks: Ranks, fill: Callable, shape, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The tensors of all ranks, on the CPU."""
    return cases.parts_of(fill, ranks.world_size, shape, dtype)


class Ranks:
    """A communicator of the first GPUs, and the checks made with it. Multimem kernels run their stand-in."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.communicator = graphar.Communicator(devices=range(world_size), timeout_s=10)
        self.communicator.engine.multimem_stand_in = True

    def place(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the parts, each on its rank's GPU: a call that writes its input leaves the parts as they are."""
        return [part.to(f"cuda:{rank}", copy=True) for rank, part in enumerate(parts)]

    def reduce(self, xs: list[torch.Tensor], algorithm: str) -> list[torch.Tensor]:
        poison([x.nbytes for x in xs])
        ys = self.communicator.allreduce(xs, algorithm=algorithm)
        self.communicator.synchronize()
        return ys

    @staticmethod
    def call_of_parts(op: str, x: torch.Tensor, counts: Sequence[int], codec: str = "", algorithm="auto") -> Call:
        """A reduce-scatter or all-gather. ``counts``: the elements of each rank's part."""
        return Call.of(Parts(op, tuple(counts), codec), x, algorithm=algorithm)

    def run_parts(self, op: str, xs, outs, counts: Sequence[int], codec: str = "", algorithm="auto") -> None:
        """A reduce-scatter or all-gather by the engine, not the op; see :meth:`call_of_parts`."""
        self.communicator.engine.run(self.call_of_parts(op, xs[0], counts, codec, algorithm), operands(xs, outs))

    def check(self, fill: Callable, numel: int, dtype: torch.dtype, algorithm: str) -> None:
        self.check_parts([fill(rank, numel, dtype) for rank in range(self.world_size)], algorithm)

    def check_parts(self, parts: Sequence[torch.Tensor], algorithm: str) -> None:
        self.check_result(self.reduce(self.place(parts), algorithm), parts)

    def check_result(self, ys: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
        expected = graphar.reference.allreduce(parts)
        for rank, y in enumerate(ys):
            assert same_bits(y.cpu(), expected) == 0, f"rank {rank}"

    def check_on_gpu(self, numel: int, dtype: torch.dtype, algorithm: str = "auto", seed: int = 0) -> None:
        """Checks random data against a sum made on the GPU, in windows, for sizes that take the CPU too long."""
        xs = []
        for rank in range(self.world_size):
            generator = torch.Generator(f"cuda:{rank}").manual_seed(8 * seed + rank)
            xs.append(torch.randn(numel, dtype=dtype, device=f"cuda:{rank}", generator=generator))
        ys = self.reduce(xs, algorithm)
        for start in range(0, numel, 1 << 26):
            window = slice(start, start + (1 << 26))
            expected = graphar.reference.allreduce([x[window].to("cuda:0") for x in xs])
            for rank, y in enumerate(ys):
                assert same_bits(y[window].to("cuda:0"), expected) == 0, f"rank {rank}, from element {start}"

    def assert_the_last_is_named(self, algorithm: str):
        """Waits in calls of which it made no one but the first. Returns the record."""
        begin = time.monotonic()
        with pytest.raises(graphar.CollectiveTimeout, match="waited past the deadline for rank") as raised:
            self.communicator.synchronize()
        assert time.monotonic() - begin < 5
        record = raised.value.record
        assert (record.algorithm, record.sequence, record.peer) == (algorithm, 1, self.world_size - 1)
        return record

    def launch_on_all_but_the_last(self, launches: Sequence[Callable], xs, outs) -> None:
        """``launches``: those of :func:`bare_launches`."""
        for rank, launch in enumerate(launches[:-1]):
            with torch.cuda.device(rank):
                launch(xs[rank], outs[rank], torch.cuda.current_stream().cuda_stream)

    def be_late(self, choices: random.Random, chance: float = 0.02, cycles: int = 3_000_000) -> None:
        """Has one rank sleep, now and then."""
        if choices.random() < chance:
            with torch.cuda.device(choices.randrange(self.world_size)):
                torch.cuda._sleep(choices.randrange(cycles))

    def in_turn_on_two_streams(self, calls: Sequence[Callable]) -> list:
        """The results of calls, every other one on a second stream of each device."""
        streams = [[torch.cuda.Stream(device) for device in range(self.world_size)] for _ in range(2)]
        results = []
        for turn, make in enumerate(calls):
            for stream in streams[turn % 2]:
                torch.cuda.set_stream(stream)
            torch.cuda.set_device(0)
            results.append(make())
        self._leave_streams()
        self.communicator.synchronize()
        return results

    def _leave_streams(self) -> None:
        for device in range(self.world_size):
            torch.cuda.set_stream(torch.cuda.default_stream(device))
        torch.cuda.set_device(0)

    def capture(self, call: Callable) -> torch.cuda.CUDAGraph:
        """``call`` on all devices in one graph: each device's side stream joins the capture and comes back."""
        gc.collect()  # the end of an older graph would end this capture
        graph = torch.cuda.CUDAGraph()
        streams = [torch.cuda.Stream(device) for device in range(self.world_size)]
        with torch.cuda.device(0), torch.cuda.graph(graph, stream=streams[0]):
            for stream in streams[1:]:
                stream.wait_stream(streams[0])
            for stream in streams[1:]:
                torch.cuda.set_stream(stream)
            torch.cuda.set_device(0)
            call()
            for stream in streams[1:]:
                streams[0].wait_stream(stream)
        self._leave_streams()
        return graph

    def _region(self, algorithm: str):
        runner = self.communicator.engine.runner
        return runner.regions.get(Algorithm(algorithm)) if runner else None

    def _counters(self, algorithm: str, rank: int) -> Counters:
        counters = Counters()
        nbytes = ctypes.sizeof(counters)
        ctypes.memmove(ctypes.addressof(counters), read(rank, self._region(algorithm).pointers[rank], nbytes), nbytes)
        return counters

    def calls_of(self, algorithm: str | Algorithm) -> int:
        """How many calls the kernels themselves have counted; the same on every rank and for every block."""
        if self._region(algorithm) is None:
            return 0
        seen = {state.epoch for rank in range(self.world_size) for state in self._counters(algorithm, rank).epoch_state}
        (calls,) = seen
        return calls

    def grid_is_idle(self, algorithm: str) -> bool:
        if self._region(algorithm) is None:
            return True
        return not any(any(self._counters(algorithm, rank).busy) for rank in range(self.world_size))

    def scratch_is_as_before(self, algorithm: str) -> bool:
        """Whether all slots say 'not yet' again and nothing was written behind them, if the data carry readiness."""
        region = self._region(algorithm)
        if algorithm not in _WITHOUT_PAD or region is None:
            return True
        slots = region.nbytes - COUNTERS_NBYTES
        fill = Algorithm(algorithm).row.scratch(self.world_size).fill
        blank = bytes([fill]) * slots
        return all(read(rank, at + COUNTERS_NBYTES, slots) == blank for rank, at in enumerate(region.pointers))

    def set_epochs(self, algorithm: str, value: int) -> None:
        """Sets the counters, and the flags that peers write, to their values after `value` calls."""
        for rank, pointer in enumerate(self._region(algorithm).pointers):
            counters = self._counters(algorithm, rank)
            for block in range(MAX_BLOCKS):
                counters.epoch_state[block].epoch = counters.steps[block] = value
            with on_device(rank):
                call(driver.cuMemcpyHtoD, pointer, ctypes.addressof(counters), ctypes.sizeof(counters))
                if algorithm not in _WITHOUT_PAD:
                    flags = struct.pack("2I", 0, 2 * value % (1 << 32)) * (SIGNAL_PAD_NBYTES // 8)
                    call(driver.cuMemcpyHtoD, pointer + COUNTERS_NBYTES, flags, SIGNAL_PAD_NBYTES)
                call(driver.cuCtxSynchronize)  # before a peer's next call writes there


def read(device: int, pointer: int, nbytes: int) -> bytes:
    """Bytes of device memory, once everything on the device is done."""
    torch.cuda.synchronize(device)
    raw = (ctypes.c_char * nbytes)()
    with on_device(device):
        call(driver.cuMemcpyDtoH, ctypes.addressof(raw), pointer, nbytes)
    return raw.raw
