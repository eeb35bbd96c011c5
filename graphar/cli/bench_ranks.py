"""`torchrun ... -m graphar bench`: times a collective between processes, with the columns of nccl-tests."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.distributed as dist

import graphar

BACKENDS = ("graphar", "nccl", "gloo")
_HOPS = {"allreduce": 2, "reducescatter": 1, "allgather": 1}  # times that (N - 1) / N of the size crosses a link
_SMALL = 2.0**-100  # scale of the timed input: sums in place grow with each iteration and must stay finite
_COLUMNS = "{:>12} {:>13} {:>9} {:>6} {:>8}  {:>9} {:>7} {:>7} {:>6}  {:>9} {:>7} {:>7} {:>6}"

Call = Callable[[], torch.Tensor]  # makes one call, and returns its result


@dataclass(frozen=True)
class Measured:
    """One call's time, bandwidths and check; in or out of place."""

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


def run(options: argparse.Namespace, sizes: Sequence[int]) -> int:
    """Runs the command on this rank; rank 0 prints. Returns the exit status: 1 if a result is wrong."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        rows = measure(options, sizes, device)
        if dist.get_rank() == 0:
            show(options, rows, torch.cuda.get_device_name() if on_gpu else "CPU")
        return int(any(one.wrong for row in rows for one in (row.out_of_place, row.in_place) if one))
    finally:
        dist.destroy_process_group()


def measure(options: argparse.Namespace, sizes: Sequence[int], device: torch.device) -> list[Row]:
    """Times each backend at each size, with tensors on ``device``. Collective."""
    names = options.backend or ["graphar", "gloo" if device.type == "cpu" else "nccl"]
    calls = {name: calls_of(name, options.op, options.algorithm) for name in names}
    return [_row(options, name, calls[name], nbytes, device) for nbytes in sizes for name in names]


# ---- calls ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calls:
    """A backend's collective, from an input into an output of its size, and with an output that holds its input."""

    out_of_place: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None
    in_place: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None


def calls_of(backend: str, op: str, algorithm: str) -> Calls:
    """Returns the calls of a backend, graphar's by ``algorithm``. Collective: it may make a process group."""
    if backend == "graphar":
        own = partial(getattr(graphar, op), algorithm=algorithm)
        if op == "allreduce":
            return Calls(lambda x, out: own(x, out=out), lambda x, out: own(x, out=x))
        return Calls(lambda x, out: own(x), None)  # a new result each time
    group = dist.new_group(backend=backend)
    if op == "allreduce":

        def summed(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x, group=group)
            return x

        return Calls(None, summed)
    function = dist.all_gather_into_tensor if op == "allgather" else dist.reduce_scatter_tensor

    def moved(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        function(out, x, group=group)
        return out

    return Calls(moved, moved)


# ---- times and checks -----------------------------------------------------------------------------------------------


def _row(options: argparse.Namespace, backend: str, calls: Calls, nbytes: int, device: torch.device) -> Row:
    dtype, world_size = getattr(torch, options.dtype), dist.get_world_size()
    count = max(1, nbytes // dtype.itemsize)
    if options.op != "allreduce":
        count = -(-count // world_size) * world_size
    measured = [
        call and _measure(options, partial(call), options.op, count, dtype, device, in_place)
        for in_place, call in ((False, calls.out_of_place), (True, calls.in_place))
    ]
    redop = "none" if options.op == "allgather" else "sum"
    return Row(count * dtype.itemsize, count, options.dtype, redop, backend, *measured)


def _measure(options, call, op: str, count: int, dtype: torch.dtype, device: torch.device, in_place: bool) -> Measured:
    wrong = None
    if options.check:
        x, out = _tensors(op, count, dtype, device, in_place)
        x.copy_(_integers(dist.get_rank(), x.numel()))
        wrong = _total(int((call(x, out) != _expected(op, count, dtype, device)).sum()))
    x, out = _tensors(op, count, dtype, device, in_place)
    x.copy_(torch.randn(x.numel(), device=device) * _SMALL)
    for _ in range(options.warmup_iters):
        call(x, out)
    time_us = _slowest(_elapsed_us(partial(call, x, out), options.iters, device))
    return Measured(time_us, *bandwidths(op, count * dtype.itemsize, dist.get_world_size(), time_us), wrong)


def bandwidths(op: str, nbytes: int, world_size: int, time_us: float) -> tuple[float, float]:
    """Returns algbw and busbw of a call in GB/s, as nccl-tests has them. ``nbytes`` are those of the whole tensor."""
    algbw = nbytes / time_us / 1e3
    return algbw, algbw * _HOPS[op] * (world_size - 1) / world_size


def _tensors(op: str, count: int, dtype, device, in_place: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns this rank's input and output. In place, the smaller one is this rank's part of the larger one."""
    rank, part = dist.get_rank(), count // dist.get_world_size()
    sizes = {"allreduce": (count, count), "allgather": (part, count), "reducescatter": (count, part)}[op]
    whole = torch.empty(count, dtype=dtype, device=device)
    if not in_place:
        first, second = (torch.empty(size, dtype=dtype, device=device) for size in sizes)
    else:
        first, second = (whole if size == count else whole[rank * part : (rank + 1) * part] for size in sizes)
    return first, second


def _integers(rank: int, count: int) -> torch.Tensor:
    """Returns small integers that depend on the rank and the place. Sums of 8 ranks are exact in every dtype."""
    return (torch.arange(count) * 7 + rank * 3) % 29 - 14


def _expected(op: str, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    part = count // world_size
    if op == "allgather":
        whole = torch.cat([_integers(one, part) for one in range(world_size)])
    else:
        whole = torch.stack([_integers(one, count) for one in range(world_size)]).sum(0)
    own = whole[rank * part : (rank + 1) * part] if op == "reducescatter" else whole
    return own.to(dtype).to(device)


def _elapsed_us(call: Call, iterations: int, device: torch.device) -> float:
    """Returns the microseconds of one of ``iterations`` calls, by CUDA events if there is a GPU."""
    dist.barrier()
    if device.type == "cpu":
        begin = time.perf_counter()
        for _ in range(iterations):
            call()
        return (time.perf_counter() - begin) * 1e6 / iterations
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(iterations):
        call()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e3 / iterations


def _slowest(time_us: float) -> float:
    times = torch.tensor([time_us], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.item()


def _total(wrong: int) -> int:
    counts = torch.tensor([wrong])
    dist.all_reduce(counts)
    return int(counts.item())


# ---- output ---------------------------------------------------------------------------------------------------------


def show(options: argparse.Namespace, rows: Sequence[Row], where: str) -> None:
    if options.json:
        call = {"device": where, "world_size": dist.get_world_size(), "op": options.op}
        print(json.dumps(call | {"rows": [asdict(row) for row in rows]}, indent=1))
    else:
        print("\n".join(lines(options, rows, where)))


def lines(options: argparse.Namespace, rows: Sequence[Row], where: str) -> Iterator[str]:
    """Yields the table."""
    yield (
        f"# {options.op}, {dist.get_world_size()} ranks on {where}, graphar {graphar.__version__}, torch "
        f"{torch.__version__}: {options.iters} iterations after {options.warmup_iters}"
    )
    yield "#"
    yield f"#{'out-of-place':>77} {'in-place':>35}"
    times = ("time", "algbw", "busbw", "#wrong")
    yield "#" + _COLUMNS.format("size", "count", "type", "redop", "backend", *times, *times)
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    yield "#" + _COLUMNS.format("(B)", "(elements)", "", "", "", *units, *units).rstrip()
    for row in rows:
        cells = [cell for one in (row.out_of_place, row.in_place) for cell in _cells(one)]
        yield " " + _COLUMNS.format(row.nbytes, row.count, row.dtype, row.redop, row.backend, *cells)
    measured = [one for row in rows for one in (row.out_of_place, row.in_place) if one]
    if options.check:
        wrong = sum(one.wrong or 0 for one in measured)
        yield f"# Wrong elements: {wrong} {'OK' if not wrong else 'FAILED'}"
    for backend in dict.fromkeys(row.backend for row in rows):
        own = [row for row in rows if row.backend == backend]
        rates = [one.busbw for row in own for one in (row.out_of_place, row.in_place) if one]
        yield f"# Average bus bandwidth, {backend}: {sum(rates) / len(rates):.4g} GB/s"


def _cells(one: Measured | None) -> tuple[str, ...]:
    if one is None:
        return ("N/A",) * 4
    return f"{one.time_us:.2f}", f"{one.algbw:.3g}", f"{one.busbw:.3g}", "N/A" if one.wrong is None else f"{one.wrong}"
