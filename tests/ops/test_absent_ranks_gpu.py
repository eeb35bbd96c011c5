"""A rank that leaves out a call of any op is named by the others, whose GPUs stay usable."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.processes import run_on_gpus
from tests.worlds import GPU_COUNTS

TIMEOUT_S = 2.0


def ones(*shape):
    return torch.ones(shape, dtype=torch.bfloat16, device="cuda")


def sum_of(op, **options):
    return lambda: partial(op, ones(8192), **options)


def matmul(op, rows, **options):
    return lambda: partial(op, ones(rows, 256), ones(2048, 256), **options)


def uneven_sizes():
    ranks = dist.get_world_size()
    return [[8] + [0] * (ranks - 1), [8 if dist.get_rank() == 0 else 0] * ranks]


# By name: makes a call between two ranks.
CALLS = {
    "norm": lambda: partial(graphar.allreduce_residual_rmsnorm, ones(4, 1024), ones(4, 1024), ones(1024)),
    "norm of parts": lambda: partial(graphar.reducescatter_residual_rmsnorm, ones(4, 1024), ones(2, 1024), ones(1024)),
    "matmul in panels": matmul(graphar.fused_matmul_allreduce, 2048, partition="split_m"),
    "matmul and norm": lambda: partial(
        graphar.fused_matmul_allreduce_residual_rmsnorm,
        *(ones(300, 64), ones(512, 64), ones(300, 512), ones(512)),
        partition="tiles",
    ),
}
# Between any number of ranks.
OF_ONE_WAIT = {
    "all-reduce": sum_of(graphar.allreduce),
    "all-reduce with a codec": sum_of(graphar.allreduce, codec="int4"),
    "reduce-scatter": sum_of(graphar.reducescatter),
    "reduce-scatter with a codec": sum_of(graphar.reducescatter, codec="int4"),
    "all-gather": sum_of(graphar.allgather),
    "all-to-all": lambda: partial(graphar.alltoall, ones(6720)),
    "all-to-all of any sizes": lambda: partial(graphar.alltoall, ones(8), sizes=uneven_sizes()),
}
OF_ANY_RANKS = OF_ONE_WAIT | {
    "all-reduce by copies": sum_of(graphar.allreduce, algorithm="two_shot_copies"),
    "reduce-scatter by copies": sum_of(graphar.reducescatter, algorithm="reducescatter_copies"),
    "all-gather by copies": sum_of(graphar.allgather, algorithm="allgather_copies"),
    "all-to-all by copies": lambda: partial(graphar.alltoall, ones(6720), algorithm="alltoall_copies"),
    "matmul in tiles": matmul(graphar.fused_matmul_allreduce, 2048, partition="tiles"),
    "matmul in tiles of parts": matmul(graphar.fused_matmul_reducescatter, 2048, partition="tiles"),
    "gathered chunks": matmul(graphar.fused_allgather_matmul, 256, partition="chunks"),
    "gathered tiles": matmul(graphar.fused_allgather_matmul, 256, partition="tiles"),
}


def leave_out(rank, world_size, name):
    """The rank that this one has waited for in vain, and after how long; nothing of the last, which is not there."""
    call = (CALLS | OF_ANY_RANKS)[name]()
    communicator = graphar.Communicator(timeout_s=30.0)

    def call_in_vain():
        call(group=communicator, timeout_s=TIMEOUT_S)
        communicator.synchronize()

    call(group=communicator)
    communicator.synchronize()
    found = None
    if rank < world_size - 1:
        begin = time.monotonic()
        with pytest.raises(graphar.CollectiveTimeout, match=f"for rank {world_size - 1} ") as error:
            call_in_vain()
        found = error.value.record.peer, time.monotonic() - begin
        with pytest.raises(graphar.CollectiveTimeout):
            call(group=communicator, timeout_s=TIMEOUT_S)
        torch.cuda.synchronize()
        assert ones(8192).float().sum().item() == 8192
    dist.barrier(dist.new_group(backend="gloo"))
    return found


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *(pytest.param(name, 2, marks=pytest.mark.gpu(2)) for name in CALLS),
        *(pytest.param(name, n, marks=pytest.mark.gpu(n)) for name in OF_ANY_RANKS for n in GPU_COUNTS),
    ],
)
def test_a_rank_that_leaves_out_a_call_is_named_by_the_others(name, world_size):
    *others, last = run_on_gpus(leave_out, world_size, name)

    assert last is None
    for peer, seconds in others:
        assert peer == world_size - 1
        assert seconds < TIMEOUT_S + 2 or name not in OF_ONE_WAIT
