"""Calls of three communicators of a rank end in rotated orders of launches, if three are declared."""

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import normal
from tests.processes import run_on_gpus, run_ranks
from tests.ranks.test_two_communicators_gpu import MB, cross

WORLD_SIZE, MEMBERS = 4, 3
ROUNDS, TIMEOUT_S = 5, 10.0
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


def wrong_elements(rank, groups, names, numel, pause_s):
    """How many elements of the results are wrong, or the error of the first wait that expired.

    Every rank launches the calls of another group last.
    """
    x = normal(rank, numel, torch.bfloat16).cuda()
    made = [dist.new_group(sorted(members)) for members in groups]
    own = [at for at, members in enumerate(groups) if rank in members]
    communicators = [graphar.Communicator(made[at], timeout_s=TIMEOUT_S) for at in own]
    order = sorted(range(len(own)), key=lambda place: (own[place] - rank - 1) % len(groups))
    try:
        return sum(cross(x, communicators, [names[at % len(names)] for at in own], order, ROUNDS, pause_s))
    except graphar.CollectiveTimeout as error:
        return str(error)


def cross_groups(rank, world_size, names):
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

    assert run_on_gpus(cross_groups, WORLD_SIZE, names, timeout_s=240) == [0] * WORLD_SIZE


@pytest.mark.gpu(WORLD_SIZE)
def test_calls_of_three_communicators_of_a_rank_block_each_other_without_a_declaration(monkeypatch):
    """The negative control: every group lacks room on one rank."""
    monkeypatch.delenv(SWITCH, raising=False)

    found = run_on_gpus(cross_groups, WORLD_SIZE, ("64 MB",) * 3, timeout_s=240)

    assert any(isinstance(one, str) for one in found)


@pytest.mark.gpu(1)
@pytest.mark.parametrize("names", [("2 MB",) * 3, ("256 KB", "norm of 60 rows", "matmul of 64 rows")], ids=" and ".join)
def test_ranks_that_share_a_gpu_end_in_rotated_orders(monkeypatch, names):
    monkeypatch.setenv(SWITCH, "3")
    monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", "1")

    assert run_ranks(cross_on_one_gpu, MEMBERS, names, timeout_s=300) == [0] * MEMBERS
