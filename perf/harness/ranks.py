"""The ranks of a run: how they start, get their data, meet, and agree on figures.

ProcessRanks: one process a rank, each with a tensor of its own. InProcessRanks: one process with a CPU tensor for each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import Queue
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

from perf.harness.cases import Case

# What one method gets and gives: this rank's tensor, or a list of every rank's.
Data = Tensor | list[Tensor]
T = TypeVar("T")

WARM_UP_S = 1.0  # until the clocks of an idle GPU have risen

# Longer than the host takes to queue a graph, so that its launch does not count: about 150 us at 2 GHz.
LAUNCH_CYCLES = 300_000

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=3)

# NVLink multicast can put a host's GPUs out of service, for the others who share it too.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "MSCCLPP_FORCE_DISABLE_NVLS": "1",
}

BUILD_TIMEOUT = timedelta(minutes=20)  # the longest a package may compile


def random_tensor(case: Case, rank: int, device: torch.device) -> Tensor:
    """Normal data, another seed on every rank. Never zeros: they hide errors and draw less power."""
    generator = torch.Generator(device).manual_seed(1000 + rank)
    return torch.randn(case.numel, dtype=case.torch_dtype, device=device, generator=generator)


def tensors(data: Data) -> list[Tensor]:
    """The tensors of this process."""
    return data if isinstance(data, list) else [data]


class ProcessRanks:
    """This process's place in a torch.distributed world."""

    def __init__(self, device: torch.device, store: dist.Store) -> None:
        self.device = device
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._store = store
        self._turns = 0
        self._token = torch.zeros(1, device=device)

    def warm_up(self) -> None:
        """Works the device until it runs as fast as it will."""
        if self.device.type == "cuda":
            x = torch.randn(4096, 4096, dtype=torch.bfloat16, device=self.device)
            begin = time.perf_counter()
            while time.perf_counter() - begin < WARM_UP_S:
                x @ x
                torch.cuda.synchronize()

    def first_rank_first(self, work: Callable[[], None]) -> None:
        """The work, on the other ranks once the first one has done it: what it compiled they find. If it fails there,
        the others do not try. Collective."""
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
        self._store.wait([key], BUILD_TIMEOUT)  # not in a barrier, which gives up sooner
        if reason := self._store.get(key).decode():
            raise RuntimeError(reason)
        work()

    def random(self, case: Case) -> Data:
        return random_tensor(case, self.rank, self.device)

    def gather(self, data: Data, window: slice) -> list[Tensor]:
        """Every rank's elements in the window. As bytes: not every backend gathers every dtype."""
        mine = data[window].view(torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return [part.view(data.dtype) for part in parts]

    def slowest(self, times: list) -> list:
        """Each time, in lists of any depth, on the rank that took longest."""
        return self._reduce(times, dist.ReduceOp.MAX)

    def total(self, counts: list[int]) -> list[int]:
        """The counts, summed over the ranks."""
        return self._reduce(counts, dist.ReduceOp.SUM)

    def _reduce(self, values: list, op: dist.ReduceOp) -> list:
        kind = torch.int64 if isinstance(values[0], int) else torch.float64
        tensor = torch.tensor(values, dtype=kind, device=self.device)
        dist.all_reduce(tensor, op)
        return tensor.tolist()

    def level(self) -> None:
        """Return on every rank at about the same time, with nothing left on the device."""
        dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def time_us(self, launch: Callable[[], None], mode: str) -> float:
        """The time of one launch, ranks levelled first."""
        self.level()
        if mode in ("cpu", "host"):
            return host_time_us(launch)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if mode in ("graph", "chain"):
            # The device waits and levels the ranks again while the graph is being queued behind, so that neither the
            # hosts' skew nor the launch counts. An eager time is the host's as well: there the launches must count.
            torch.cuda._sleep(LAUNCH_CYCLES)
            dist.all_reduce(self._token)
        begin.record()
        launch()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


class InProcessRanks:
    """Every rank in this process, on the CPU."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def warm_up(self) -> None:
        """The CPU needs none."""

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

    def level(self) -> None:
        """One process is always level with itself."""

    def time_us(self, launch: Callable[[], None], mode: str) -> float:
        return host_time_us(launch)


def host_time_us(launch: Callable[[], None]) -> float:
    begin = time.perf_counter()
    launch()
    return (time.perf_counter() - begin) * 1e6


Ranks = ProcessRanks | InProcessRanks


def agreed(
    ranks: Ranks, work: Callable[[], T], refusals: tuple[type[Exception], ...] = (Exception,)
) -> tuple[T | None, str]:
    """What the work returns, if it succeeds on every rank; otherwise None, and why it does not. Collective.

    Args:
        refusals: the exceptions that count as a failure; others are raised.
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


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


# ---- processes -------------------------------------------------------------------------------------------------------


def run(processes: int, work: Callable[[int, int], Iterator[T]]) -> Iterator[T]:
    """What ``work(rank, port)`` yields on the first rank, as it does; it is pickled, and the same on all ranks.

    Raises:
        torch.multiprocessing.spawn.ProcessException: a rank failed. What was found before comes first.
    """
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    messages = mp.get_context("spawn").Queue()
    with _interrupts_blocked():
        context = mp.spawn(_be_rank, args=(work, store.port, messages), nprocs=processes, join=False, daemon=True)
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
        for process in context.processes:  # none is left, unless the run is interrupted
            process.kill()
            process.join()
    if failure:
        raise failure


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that start meanwhile begin with SIGINT blocked, and have it so until they unblock it."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _leave_interrupts_to_parent() -> None:
    """A terminal's Ctrl-C goes to the parent alone, which ends its ranks; SIGINT is what they get where it has died."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops one that came before
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _be_rank(rank: int, work: Callable[[int, int], Iterator[T]], port: int, messages: Queue) -> None:
    _leave_interrupts_to_parent()
    forbid_multicast()
    for message in work(rank, port):
        if rank == 0:
            messages.put(message)
    if dist.is_initialized():
        dist.barrier()
    # The peers' packages and torch's threads end in no order that all of them survive, and nothing is needed any more.
    messages.close()
    messages.join_thread()
    os._exit(0)


def forbid_multicast() -> None:
    """Unless the user allows it. The first thing a process does, since NCCL reads its environment only once."""
    if os.environ.get("GRAPHAR_MULTICAST") != "1":
        os.environ.update(NO_MULTICAST)


def join(rank: int, world_size: int, device: str, port: int) -> ProcessRanks:
    """This process's place among the ranks, with a GPU of its own or on the CPU."""
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
