"""Processes that work through something together, one a rank, and what the first of them finds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import Queue
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from perf.ranks import ProcessRanks

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=3)

# NVLink multicast can put a host's GPUs out of service, for the others who share it too.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "MSCCLPP_FORCE_DISABLE_NVLS": "1",
}
T = TypeVar("T")


def run(processes: int, work: Callable[[int, int], Iterator[T]]) -> Iterator[T]:
    """What ``work(rank, port)`` yields on the first rank, as it does; it is pickled, and the same on all ranks.

    Raises:
        torch.multiprocessing.spawn.ProcessException: a rank failed. What was found before comes first.
    """
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    messages = mp.get_context("spawn").Queue()
    context = mp.spawn(_be_rank, args=(work, store.port, messages), nprocs=processes, join=False, daemon=True)
    finished, failure = False, None
    while not finished:
        try:
            finished = context.join(timeout=0.1)
        except ProcessException as error:
            finished, failure = True, error
        while not messages.empty():
            yield messages.get()
    if failure:
        raise failure


def _be_rank(rank: int, work: Callable[[int, int], Iterator[T]], port: int, messages: Queue) -> None:
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
