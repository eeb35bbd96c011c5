"""Calls of three communicators of a rank end in rotated orders of launches, if three are declared."""

import time

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import normal, same_bits
from tests.processes import run_on_gpus, run_ranks
from tests.ranks.test_two_communicators_gpu import CALLS, MB

WORLD_SIZE, MEMBERS = 4, 3
ROUNDS, CHAIN, TIMEOUT_S = 5, 3, 10.0
SWITCH = "GRAPHAR_CONCURRENT_COMMUNICATORS"
KINDS = (
    ("2 MB", "2 MB", "2 MB"),
    ("4 MB", "64 MB", "192 MB"),
    ("256 KB", "reduce-scatter", "all-gather"),
    ("norm of 4 rows", "norm of 60 rows", "norm of 512 rows"),
    ("norm of 16 rows", "norm of 32 rows", "matmul of 2048 rows"),
    ("int8 of 2 MB", "int8 of 64 MB", "int8 reduce-scatter"),
    ("lossless", "lossless", "64 MB"),
    ("bulk copies", "matmul of 2048 rows", "matmul of 64 rows"),
    ("matmul of 2048 rows", "matmul of 2048 rows", "matmul of 2048 rows"),
    ("matmul of 8 rows", "matmul of 2048 gathered rows", "64 MB"),
)


def communicators_of(rank, groups):
    """This rank's communicators by the number of their group. Every rank launches another one last."""
    made = [dist.new_group(sorted(one)) for one in groups]
    own = {at: made[at] for at in range(len(groups)) if rank in groups[at]}
    return {at: graphar.Communicator(group, timeout_s=TIMEOUT_S) for at, group in own.items()}


def wrong_elements(rank, groups, names, numel, pause_s):
    """How many elements of the results are wrong, or the error of the first wait that expired."""
    x = normal(rank, numel, torch.bfloat16).cuda()
    communicators = communicators_of(rank, groups)
    calls = {at: CALLS[names[at % len(names)]] for at in communicators}
    expected = {at: calls[at](x, one) for at, one in communicators.items()}
    streams = {at: torch.cuda.Stream() for at in communicators}
    torch.cuda.synchronize()
    dist.barrier()
    found, last = {}, rank % len(groups)
    try:
        for _ in range(ROUNDS):
            for at in sorted(communicators, key=lambda at: (at - last - 1) % len(groups)):
                with torch.cuda.stream(streams[at]):
                    for _ in range(CHAIN):
                        found[at] = calls[at](x, communicators[at])
                time.sleep(pause_s)  # by then the kernels wait for their peers
            torch.cuda.synchronize()
        for one in communicators.values():
            one.synchronize()
    except graphar.CollectiveTimeout as error:
        return str(error)
    return sum(same_bits(found[at], expected[at]) for at in communicators)


def cross(rank, world_size, names):
    """Calls of four groups of three of the four ranks, on as many GPUs."""
    groups = [[(at + one) % world_size for one in range(MEMBERS)] for at in range(world_size)]
    return wrong_elements(rank, groups, names, 96 * MB, 2e-3)


def cross_on_one_gpu(rank, world_size, names):
    """Calls of three groups of the same three ranks. The processes share a GPU in time slices, and each has all SMs."""
    torch.cuda.set_device(0)
    return wrong_elements(rank, [list(range(world_size))] * 3, names, 16 * MB, 0.05)


@pytest.mark.promise(
    "Calls of two communicators, or as many as declared, end in any order, if a matmul's K is equal on all ranks."
)
@pytest.mark.gpu(WORLD_SIZE)
@pytest.mark.parametrize("names", KINDS, ids=" and ".join)
def test_calls_of_three_communicators_of_a_rank_end_in_rotated_orders(monkeypatch, names):
    monkeypatch.setenv(SWITCH, "3")

    assert run_on_gpus(cross, WORLD_SIZE, names, timeout_s=240) == [0] * WORLD_SIZE


@pytest.mark.gpu(WORLD_SIZE)
def test_calls_of_three_communicators_of_a_rank_block_each_other_without_a_declaration(monkeypatch):
    """The negative control: every group lacks room on one rank."""
    monkeypatch.delenv(SWITCH, raising=False)

    found = run_on_gpus(cross, WORLD_SIZE, ("64 MB",) * 3, timeout_s=240)

    assert any(isinstance(one, str) for one in found)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("names", [("2 MB",) * 3, ("256 KB", "norm of 60 rows", "matmul of 64 rows")], ids=" and ".join)
def test_ranks_that_share_a_gpu_end_in_rotated_orders(monkeypatch, names):
    monkeypatch.setenv(SWITCH, "3")
    monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", "1")

    assert run_ranks(cross_on_one_gpu, MEMBERS, names, timeout_s=300) == [0] * MEMBERS
