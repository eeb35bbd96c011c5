"""Starts the ranks of a plan, one process a rank, and yields what they measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from queue import Queue

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from perf import traffic
from perf.cases import Plan
from perf.catalogue import make_methods
from perf.harness import measure
from perf.ranks import InProcessRanks, ProcessRanks, Ranks
from perf.rows import LinkCeiling, Row

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=3)

# NVLink multicast can put a host's GPUs out of service, for the others who share it too.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "MSCCLPP_FORCE_DISABLE_NVLS": "1",
}


def run(plan: Plan) -> Iterator[Row | LinkCeiling | str]:
    """The plan's rows and links as they are measured; a string says what was not measured, and why."""
    processes = plan.world_size if plan.form == "process" else 1
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    messages = mp.get_context("spawn").Queue()
    context = mp.spawn(run_rank, args=(plan, store.port, messages), nprocs=processes, join=False, daemon=True)
    finished = False
    while not finished:
        finished = context.join(timeout=0.1)
        while not messages.empty():
            yield messages.get()


def run_rank(rank: int, plan: Plan, port: int, messages: Queue) -> None:
    """Works through the plan as one of its ranks; the first one reports."""
    ranks = join(rank, plan, port)
    for message in work_through(plan, ranks):
        if rank == 0:
            messages.put(message)
    ranks.level()
    # The peers' packages and torch's threads end in no order that all of them survive, and nothing is needed any more.
    messages.close()
    messages.join_thread()
    os._exit(0)


def work_through(plan: Plan, ranks: Ranks) -> Iterator[Row | LinkCeiling | str]:
    """What one rank finds: the same kinds of messages in the same order on all. Collective."""
    methods, skipped = make_methods(plan, ranks)
    yield from skipped
    ranks.warm_up()  # after the compiling, which leaves a GPU idle
    counters = None
    if plan.device == "cuda":
        yield traffic.find_ceiling(ranks)
        counters, reason = traffic.find_counters(ranks)
        if reason:
            yield f"NVLink's counters, {plan.world_size} ranks: {reason}"
    for case in plan.cases():
        taking_part = [method for method in methods if plan.takes_part(method.name, case)]
        rows, refusals = measure(case, taking_part, ranks, counters)
        if plan.device == "cuda":
            torch.cuda.empty_cache()  # a graph's memory went back to torch's pool, where the next size cannot use it
        yield from (*rows, *refusals)


def join(rank: int, plan: Plan, port: int) -> Ranks:
    """Bring the plan's ranks together. The first thing a process does, since NCCL reads its environment only once."""
    if os.environ.get("GRAPHAR_MULTICAST") != "1":
        os.environ.update(NO_MULTICAST)
    if plan.form == "list":
        return InProcessRanks(plan.world_size)
    store = dist.TCPStore(HOST, port, is_master=False)
    world = {"store": store, "rank": rank, "world_size": plan.world_size, "timeout": TIMEOUT}
    if plan.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.world_size))
        dist.init_process_group("gloo", **world)
        return ProcessRanks(torch.device("cpu"), store)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **world)
    return ProcessRanks(device, store)
