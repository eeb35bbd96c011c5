"""The twins of the PTX order no more than the instructions they stand for: small programs, right and wrong.

In each, one thread accesses memory, an instruction follows, and another thread accesses the same memory. If PTX says
that the instruction orders the two, no run may notice anything. If it does not, a run must.
"""

from __future__ import annotations

import pytest
import torch

from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import Scratch
from graphar.runtime.catalogue import KernelSource
from graphar.simulator.simulation import Call, KernelFailure, Simulation
from tests.host.build import build, seeds

pytestmark = pytest.mark.host

# By program and what lies between the accesses: whether that orders them.
RACES = {
    "store_then_load<Nothing>": False,
    "store_then_load<Vote>": False,
    "store_then_load<Shuffle>": False,
    "store_then_load<ProductWait>": False,
    "store_then_load<ClusterMbarriers>": False,
    "store_then_load<RelaxedArrival>": False,
    "store_then_load<WarpBarrier>": True,
    "store_then_load<BlockBarrier>": True,
    "store_then_load<BlockVote>": True,
    "store_then_load<ClusterBarrier>": True,
    "store_then_load<Arrival>": True,
    "store_then_load<ReleaseTo<BlockWait>>": False,
    "store_then_load<ReleaseTo<ClusterWait>>": True,
    "store_async_then_load<BlockWait>": False,
    "store_async_then_load<ClusterWait>": True,
    "load_then_store_async<Unfenced>": False,
    "load_then_store_async<Fenced>": True,
    "matrices_then_load<Nothing>": False,
    "matrices_then_load<WarpBarrier>": True,
    "init_then_wait<Vote>": False,
    "init_then_wait<ClusterMbarriers>": True,
    "init_then_wait<BlockBarrier>": True,
}
LATE_STORES = {
    "tell<Atomic>": False,
    "tell<ReleaseAfterVote>": False,
    "tell<ReleaseAfterWarpBarrier>": True,
    "tell<ReleaseAfterBlockBarrier>": True,
    "tell<ReleaseAfterArrival>": True,
    "bulk_store_then_load<SourceWait>": False,
    "bulk_store_then_load<StoreWait>": True,
    "bulk_store_then_overwrite<SourceWaitWithoutCommit>": False,
    "bulk_store_then_overwrite<SourceWait>": True,
}
SEEDS = 20
ANY = Algorithm.ONE_SHOT_PUSH  # Simulation requires one
BLOCKS = 2  # a cluster


def until_noticed(is_ordered: bool) -> range:
    return seeds(SEEDS) if is_ordered else range(SEEDS)


def is_noticed(programs, name: str, sanitizer: str, seed: int) -> bool:
    """Whether a run fails, or a thread loads something else than 1."""
    program = build(tuple(KernelSource("litmus.cu", one) for one in programs), sanitizer)
    simulation = Simulation(program, ANY, 1, Scratch(0, 2048, 0, 4096), list(programs).index(name), seed)
    nbytes = 4 * 32 * BLOCKS
    call = Call(0, Config(ANY, BLOCKS, 32), [torch.zeros(1)], (1,), (nbytes,), cluster=BLOCKS)
    try:
        (outcome,) = simulation.run([call])
    except KernelFailure as failure:
        return "stuck" not in str(failure)
    return bool((outcome.results[0].view(torch.int32) != 1).any())


@pytest.mark.promise("Kernels run on the CPU, on models of the PTX they use, and mistakes in ordering are noticed.")
@pytest.mark.parametrize("name", RACES)
def test_threadsanitizer_reports_what_an_instruction_does_not_order(name):
    noticed = any(is_noticed(RACES, name, "thread", seed) for seed in until_noticed(RACES[name]))

    assert noticed is not RACES[name]


@pytest.mark.parametrize("name", LATE_STORES)
def test_stores_are_late_where_an_instruction_does_not_order_them(name):
    noticed = any(is_noticed(LATE_STORES, name, "plain", seed) for seed in until_noticed(LATE_STORES[name]))

    assert noticed is not LATE_STORES[name]
