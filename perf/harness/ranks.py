"""The ranks of a run: processes, data, barriers and reductions.

ProcessRanks has one process for each rank. InProcessRanks has one process with a CPU tensor for each rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from queue import Queue
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

from perf.harness.cases import HOST_MODES, Case
from perf.harness.timing import time_in_turn

# After this many calls the host waits for the device, untimed. The driver queues about 1024 launches. With a full queue
# the host time of a call would be the time of its kernel.
QUEUED_CALLS = 250

# The input and output of a method: this rank's tensor, or a list with every rank's tensor.
Data = Tensor | list[Tensor]
T = TypeVar("T")

WARM_UP_S = 1.0  # time for the clocks of an idle GPU to rise

# About 150 us at 2 GHz. This is longer than the host takes to queue a graph, so the launch is not part of the time.
LAUNCH_CYCLES = 300_000

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=3)

# NVLink multicast can put all GPUs of a shared host out of service.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "MSCCLPP_FORCE_DISABLE_NVLS": "1",
}

BUILD_TIMEOUT = timedelta(minutes=20)  # for packages that compile their kernels


def random_tensor(case: Case, rank: int, device: torch.device) -> Tensor:
    """Returns normal data with a different seed on every rank. Zeros would hide errors and need less power."""
    generator = torch.Generator(device).manual_seed(1000 + rank)
    return torch.randn(case.numel, dtype=case.torch_dtype, device=device, generator=generator)


def tensors(data: Data) -> list[Tensor]:
    return data if isinstance(data, list) else [data]


class ProcessRanks:
    """This process as a rank of torch.distributed."""

    def __init__(self, device: torch.device, store: dist.Store) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = store
        self._turns = 0
        self._token = torch.zeros(1, device=device)

    def warm_up(self) -> None:
        """Runs matmuls until the device's clocks have risen."""
        if self.device.type == "cuda":
            raise_clocks(self.device)

    def first_rank_first(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on the first rank, and then on the others, which use what it compiled. Collective.

        If it fails on the first rank, the others raise RuntimeError and do not run it.
        """
        self._turns += 1
        key = f"first rank {self._turns}"
        if self.rank == 0:
            reason = "did not finish"
            try:
                work()
                reason = ""
            except Exception as error:
                reason = first_line(error)
                raise
            finally:
                self._store.set(key, reason)
            return
        self._store.wait([key], BUILD_TIMEOUT)  # a barrier would time out sooner
        if reason := self._store.get(key).decode():
            raise RuntimeError(reason)
        work()

    def random(self, case: Case) -> Data:
        return random_tensor(case, self.rank, self.device)

    def gather(self, data: Data, window: slice) -> list[Tensor]:
        """Returns every rank's elements in the window. They are sent as bytes, which every backend supports."""
        mine = data[window].view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return [part.view(data.dtype) for part in parts]

    def slowest(self, times: list) -> list:
        """Returns the maximum of each time over the ranks. ``times`` may be a nested list."""
        return self._reduce(times, dist.ReduceOp.MAX)

    def total(self, counts: list[int]) -> list[int]:
        return self._reduce(counts, dist.ReduceOp.SUM)

    def _reduce(self, values: list, op: dist.ReduceOp) -> list:
        kind = torch.int64 if isinstance(values[0], int) else torch.float64
        tensor = torch.tensor(values, dtype=kind, device=self.device)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def barrier(self) -> None:
        """Waits until all ranks have arrived and their devices are idle."""
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time_us(self, launch: Callable[[], float | None], mode: str) -> float:
        """Returns the time of one launch in microseconds, after a barrier. A launch for host times returns its time."""
        self.barrier()
        if mode in HOST_MODES:
            return launch()
        if mode == "cpu":
            return host_time_us(launch)
        if mode in ("graph", "chain"):
            # The device sleeps and then synchronises with the other ranks, while the host queues the graph. The time
            # then excludes the launch and the skew of hosts. Eager times skip this, because they include launches.
            torch.cuda._sleep(LAUNCH_CYCLES)
            dist.all_reduce(self._token)
        return device_time_us(launch)


class InProcessRanks:
    """All ranks in this process, on the CPU."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def warm_up(self) -> None:
        """Does nothing: the CPU needs no warm-up."""

    def first_rank_first(self, work: Callable[[], None]) -> None:
        work()

    def random(self, case: Case) -> Data:
        return [random_tensor(case, rank, torch.device("cpu")) for rank in range(self.size)]

    def gather(self, data: Data, window: slice) -> list[Tensor]:
        return [tensor[window] for tensor in data]

    def slowest(self, times: list) -> list:
        return times

    def total(self, counts: list[int]) -> list[int]:
        return counts

    def barrier(self) -> None:
        """Does nothing: a single process needs no barrier."""

    def time_us(self, launch: Callable[[], None], mode: str) -> float:
        return host_time_us(launch)


def raise_clocks(gpu: torch.device) -> None:
    """Runs matmuls on a GPU until its clocks have risen."""
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device=gpu)
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_UP_S:
        x @ x
        torch.cuda.synchronize()


def device_time_us(launch: Callable[[], None]) -> float:
    """Returns the time of one launch on the current GPU in microseconds, from its arrival on the current stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def graph_time_us(replay: Callable[[], None]) -> float:
    """Returns the time of one replay of a graph on the current GPU in microseconds, without its launch by the host."""
    torch.cuda.synchronize()
    torch.cuda._sleep(LAUNCH_CYCLES)
    return device_time_us(replay)


def host_time_us(launch: Callable[[], None]) -> float:
    begin = time.perf_counter()
    launch()
    return (time.perf_counter() - begin) * 1e6


def host_time_of_calls_us(run: Callable[[int], None], calls: int) -> float:
    """Returns the host time of ``calls`` calls in microseconds. ``run(n)`` makes n calls."""
    spent = 0.0
    for start in range(0, calls, QUEUED_CALLS):
        spent += host_time_us(partial(run, min(QUEUED_CALLS, calls - start)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return spent


Ranks = ProcessRanks | InProcessRanks


def agreed(
    ranks: Ranks, work: Callable[[], T], refusals: tuple[type[Exception], ...] = (Exception,)
) -> tuple[T | None, str]:
    """Returns the result of ``work`` if it succeeds on every rank. Otherwise returns None and the reason. Collective.

    Args:
        refusals: the exceptions that count as failure. Others are raised.
    """
    result, reason = None, ""
    try:
        result = work()
    except refusals as error:
        reason = first_line(error)
    (failures,) = ranks.total([int(bool(reason))])
    if failures:
        return None, reason or "refused on another rank"
    return result, ""


def timed_in_turn(
    ranks: Ranks, trials: Iterable[tuple[str, T]], repeats: int, mode: str, iterations: int = 1
) -> tuple[list[tuple[T, Callable[[], None], list[float]]], list[str]]:
    """Times the trials that can be launched on every rank, in turn. Collective.

    Returns these trials, each with its launch and its times by repeat in microseconds, and messages for the others. A
    time is the slowest rank's, divided by ``iterations``.

    Args:
        trials: pairs of a name and a trial. ``make_launch`` of a trial is called before the next pair is made. Its
            ``refusals``, if it has them, are what it may raise, and its ``refill`` restores its input before a launch.
    """
    ready, refused = [], []
    for name, trial in trials:
        ranks.barrier()
        launch, reason = agreed(ranks, trial.make_launch, getattr(trial, "refusals", (Exception,)))
        if reason:
            refused.append(f"{name}: {reason}")
        else:
            ready.append((trial, launch))
    if not ready:
        return [], refused
    launches = [launch for _, launch in ready]
    refills = [getattr(trial, "refill", lambda: None) for trial, _ in ready]
    mine = time_in_turn(launches, repeats, lambda launch: ranks.time_us(launch, mode) / iterations, refills)
    times = ranks.slowest(mine)
    return [(trial, launch, of_trial) for (trial, launch), of_trial in zip(ready, times, strict=True)], refused


def case_by_case(ranks: ProcessRanks, cases: Iterable[Iterator[T]]) -> Iterator[T]:
    """Yields the rows of each case. Collective."""
    for rows in cases:
        yield from rows
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()  # a graph's memory stays in torch's pool, where the next case cannot use it
    ranks.barrier()


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def run(processes: int, work: Callable[[int, int], Iterator[T]]) -> Iterator[T]:
    """Runs ``work(rank, port)`` in a process for each rank, and yields the first rank's results.

    Raises:
        torch.multiprocessing.spawn.ProcessException: a rank failed. Earlier results are yielded before.
    """
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    messages = mp.get_context("spawn").Queue()
    with _interrupts_blocked():
        context = mp.spawn(_rank_main, args=(work, store.port, messages), nprocs=processes, join=False, daemon=True)
    finished, failure = False, None
    try:
        while not finished:
            try:
                finished = context.join(timeout=0.1)
            except ProcessException as error:
                finished, failure = True, error
            while not messages.empty():
                yield messages.get()
    finally:
        for process in context.processes:  # after an interrupt some are still alive
            process.kill()
            process.join()
    if failure:
        raise failure


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Blocks SIGINT, so that processes started inside the ``with`` block inherit the blocked signal."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _leave_interrupts_to_parent() -> None:
    """Makes Ctrl-C of a terminal reach only the parent, which then ends its ranks.

    The ranks still receive SIGINT when the parent dies.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops a pending SIGINT
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _rank_main(rank: int, work: Callable[[int, int], Iterator[T]], port: int, messages: Queue) -> None:
    _leave_interrupts_to_parent()
    forbid_multicast()
    for message in work(rank, port):
        if rank == 0:
            messages.put(message)
    if dist.is_initialized():
        dist.barrier()
    # Exit at once. An ordinary exit ends other packages and torch's threads in an order that can crash.
    messages.close()
    messages.join_thread()
    os._exit(0)


def forbid_multicast() -> None:
    """Forbids NVLink multicast unless the user allows it. Call it first, because NCCL reads its environment once."""
    if os.environ.get("GRAPHAR_MULTICAST") != "1":
        os.environ.update(NO_MULTICAST)


def join(rank: int, world_size: int, device: str, port: int) -> ProcessRanks:
    """Joins the process group and returns the ranks. On "cuda" each rank uses its own GPU."""
    store = dist.TCPStore(HOST, port, is_master=False)
    world = {"store": store, "rank": rank, "world_size": world_size, "timeout": TIMEOUT}
    if device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
        dist.init_process_group("gloo", **world)
        return ProcessRanks(torch.device("cpu"), store)
    mine = torch.device("cuda", rank)
    torch.cuda.set_device(mine)
    dist.init_process_group("nccl", device_id=mine, **world)
    return ProcessRanks(mine, store)
