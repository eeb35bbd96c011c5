"""The ranks that `bench` times, all in this process or under torchrun one of them: their calls and their times."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import graphar
from graphar.cli.specified import OfRanks, SpecifiedCall, count_wrong
from graphar.cli.timing import Stopwatch
from graphar.communicator import Communicator
from graphar.runtime.availability import is_available

BACKENDS = ("graphar", "nccl", "gloo")
_HOPS = {"allreduce": 2, "reducescatter": 1, "allgather": 1}  # times that (N - 1) / N of the size crosses a link
_SMALL = 2.0**-100  # scale of the timed input: sums in place grow with each iteration and must stay finite
_FEW, _MANY = 29, 65521  # different values of the checked input: of few, sums of 8 ranks are exact in every order

Call = Callable[[Any, Any], Any]  # of an input and an output, in one process of lists of them; returns the results
Calls = tuple[Call | None, Call | None]  # out of place and in place; None: the backend has no such call


@dataclass(frozen=True)
class Measured:
    time_us: float  # microseconds of one call, of the slowest rank
    algbw: float  # GB/s (1e9 bytes), as nccl-tests defines it: the size over the time
    busbw: float  # GB/s, as nccl-tests defines it
    wrong: int | None  # elements that differ from the exact result, over all ranks; None: not checked


@dataclass(frozen=True)
class Row:
    """A line of the table. As in nccl-tests, the size is one rank's input, and of an all-gather its result."""

    nbytes: int
    count: int  # elements
    dtype: str
    redop: str
    backend: str
    out_of_place: Measured | None  # None: the backend has no such call
    in_place: Measured | None

    def measured(self) -> list[Measured]:
        return [measured for measured in (self.out_of_place, self.in_place) if measured]


class Ranks(AbstractContextManager):
    """The ranks of a measurement, and which of them this process has; a context manager.

    ``world_size`` is the number of ranks in this process; None: this process is a rank of torch's default group.
    """

    def __init__(self, options: argparse.Namespace, world_size: int | None) -> None:
        self._options, self._dtype = options, getattr(torch, options.dtype)
        self._how = {"algorithm": options.algorithm} | ({"codec": options.codec} if options.codec else {})
        self._communicator: Communicator | None = None
        self._stopwatch: Stopwatch | None = None
        on_gpu = torch.cuda.is_available() if world_size is None else bool(is_available())
        if world_size is None:
            index = int(os.environ["LOCAL_RANK"])
            self.devices = [torch.device("cuda", index) if on_gpu else torch.device("cpu")]
            if on_gpu:
                torch.cuda.set_device(index)
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
            self.world_size, self.numbers = dist.get_world_size(), [dist.get_rank()]
        else:
            self.world_size, self.numbers = world_size, list(range(world_size))
            self.devices = [torch.device("cuda", rank) if on_gpu else torch.device("cpu") for rank in self.numbers]
            self._communicator = Communicator(devices=self.devices)
            if on_gpu:  # one thread launches for all ranks, and its time does not count
                streams = [torch.cuda.current_stream(device) for device in self.devices]
                self._stopwatch = Stopwatch(self._communicator, streams)

    def __exit__(self, *_) -> None:
        if self._communicator:
            self._communicator.close()
        else:
            dist.destroy_process_group()

    def calls_of(self, backend: str) -> Calls:
        """Returns the calls of a backend. Collective: it may make a process group."""
        op = self._options.op
        if backend == "graphar":
            run = partial(getattr(graphar, op), group=self._communicator, **self._how)
            if op == "allreduce":
                return lambda x, out: run(x, out=out), lambda x, out: run(x, out=x)
            return lambda x, out: run(x), None  # a new result each time
        group = dist.new_group(backend=backend)

        def summed(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=group)
            return x

        def moved(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            (dist.all_gather_into_tensor if op == "allgather" else dist.reduce_scatter_tensor)(out, x, group=group)
            return out

        return (None, summed) if op == "allreduce" else (moved, moved)

    def row(self, backend: str, calls: Calls, nbytes: int) -> Row:
        """Times and checks a backend's calls of a size. Collective."""
        count = max(1, nbytes // self._dtype.itemsize)
        if self._options.op != "allreduce":
            count = -(-count // self.world_size) * self.world_size
        measured = [call and self._measure(backend, call, count, at > 0) for at, call in enumerate(calls)]
        redop = "none" if self._options.op == "allgather" else "sum"
        return Row(count * self._dtype.itemsize, count, self._options.dtype, redop, backend, *measured)

    def _measure(self, backend: str, call: Call, count: int, in_place: bool) -> Measured:
        wrong = self._count_wrong(backend, call, *self._tensors(count, in_place)) if self._options.check else None
        xs, outs = self._tensors(count, in_place)
        for x in xs:
            x.copy_(torch.randn(x.numel(), device=x.device) * _SMALL)
        tensors = (xs, outs) if self._communicator else (xs[0], outs[0])

        def run(calls: int) -> None:
            for _ in range(calls):
                call(*tensors)

        run(self._options.warmup_iters)
        elapsed_us = self._of_all_processes(self._elapsed_us(partial(run, self._options.iters)), dist.ReduceOp.MAX)
        time_us = elapsed_us / self._options.iters
        rates = bandwidths(self._options.op, count * self._dtype.itemsize, self.world_size, time_us)
        return Measured(time_us, *rates, wrong)

    def _count_wrong(self, backend: str, call: Call, xs: OfRanks, outs: OfRanks) -> int:
        """Makes a call, and returns how many elements of all ranks differ from the specification."""
        values, how = (_MANY, self._how) if backend == "graphar" else (_FEW, {})
        numel, first = xs[0].numel(), xs[0].device
        inputs = [_input(rank, numel, values, first).to(self._dtype) for rank in range(self.world_size)]
        expected = SpecifiedCall(self._options.op, [inputs], **how).expected()
        for rank, x in zip(self.numbers, xs, strict=True):
            x.copy_(inputs[rank])
        results = call(xs, outs) if self._communicator else [call(xs[0], outs[0])]
        pairs = zip(results, (expected[rank][0] for rank in self.numbers), strict=True)
        wrong = sum(count_wrong(result, right.to(result.device)) for result, right in pairs)
        return int(self._of_all_processes(wrong, dist.ReduceOp.SUM))

    def _tensors(self, count: int, in_place: bool) -> tuple[OfRanks, OfRanks]:
        """Returns the inputs and outputs. In place, a rank's smaller tensor is its part of the larger one."""
        part = count // self.world_size
        sizes = {"allreduce": (count, count), "allgather": (part, count), "reducescatter": (count, part)}
        pairs = []
        for rank, device in zip(self.numbers, self.devices, strict=True):
            make = partial(torch.empty, dtype=self._dtype, device=device)
            whole = make(count)
            places = {part: whole[rank * part : (rank + 1) * part], count: whole}
            pairs.append([places[size] if in_place else make(size) for size in sizes[self._options.op]])
        xs, outs = zip(*pairs, strict=True)
        return list(xs), list(outs)

    def _elapsed_us(self, run: Callable[[], None]) -> float:
        """Returns the time of the work that ``run`` queues, in microseconds, by CUDA events if there is a GPU."""
        if self._stopwatch:
            return self._stopwatch.elapsed_us(run)
        if self._communicator is None:
            dist.barrier()
        if self.devices[0].type == "cpu":
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e6
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) * 1e3

    def _of_all_processes(self, number: float, op: Any) -> float:
        numbers = torch.tensor(number, dtype=torch.float64)
        if self._communicator is None:
            dist.all_reduce(numbers, op)
        return numbers.item()


def _input(rank: int, count: int, values: int, device: torch.device) -> torch.Tensor:
    """Returns multiples of 2**-12 that depend on the rank and the place, and are the same on every device."""
    return ((torch.arange(count, device=device) * 2654435761 + rank * 40503) % values - values // 2) / 4096


def bandwidths(op: str, nbytes: int, world_size: int, time_us: float) -> tuple[float, float]:
    """Returns algbw and busbw of a call in GB/s, as nccl-tests has them. ``nbytes`` are the whole tensor's."""
    algbw = nbytes / time_us / 1e3
    return algbw, algbw * _HOPS[op] * (world_size - 1) / world_size
