"""Ranks that call different things on GPUs: the kernels tell every rank what each called, within the deadline."""

import contextlib
import re
import time

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.processes import on_ranks, run_on_gpus

pytestmark = pytest.mark.gpu(2)

TIMEOUT_S = 1.5
BF16, FP16 = torch.bfloat16, torch.float16


def ones(*sizes, dtype=BF16):
    return torch.ones(*sizes, dtype=dtype, device="cuda")


def sums(numel, dtype=BF16, **options):
    return lambda group: graphar.allreduce(ones(numel, dtype=dtype), group, **options)


def scaled(numel, scale):
    return lambda group: graphar.allreduce(ones(numel), group, epilogue=graphar.Epilogue("v * scale", scale=scale))


def norms(rows, **options):
    return lambda group: graphar.allreduce_residual_rmsnorm(
        ones(rows, 4096), ones(rows, 4096), ones(4096), group=group, **options
    )


def matmuls(rows, columns, bias=False):
    return lambda group: graphar.fused_matmul_allreduce(
        ones(rows, 512), ones(columns, 512), bias=ones(columns) if bias else None, group=group, partition="tiles"
    )


def gathered(rows, epilogue=None, partition="tiles"):
    return lambda group: graphar.fused_allgather_matmul(
        ones(rows, 512), ones(1024, 512), group=group, partition=partition, epilogue=epilogue
    )


def exchanged(numel):
    return lambda group: graphar.alltoall(ones(numel), group, algorithm="alltoall_copies")


def into_symmetric(which):
    def call(group):
        outs = [graphar.empty(1 << 20, dtype=BF16, group=group) for _ in range(2)]
        return graphar.allreduce(ones(1 << 20), group, algorithm="two_shot_pipelined", out=outs[which])

    return call


def gather_fp16(group):
    return graphar.allgather(ones(512, dtype=FP16), group)


def tuples(*columns):
    return lambda group: graphar.allgather(tuple([ones(2, each) for each in columns]), group)


# What rank 0 calls, and what the others do: of one algorithm.
UNLIKE = {
    "sizes": (sums(1000), sums(1008)),
    "sizes of two algorithms": (sums(1 << 12), sums(1 << 22)),
    "two ops": (sums(1 << 12), lambda group: graphar.allgather(ones(1 << 12), group)),
    "large sizes": (sums(1 << 23), sums((1 << 23) - 8)),
    "sizes of chunks": (sums(1 << 27, FP16), sums((1 << 27) - (1 << 14), FP16)),
    "dtypes": (sums(1 << 12), sums(1 << 12, FP16)),
    "codecs": (sums(1 << 20, codec="int8"), sums(1 << 20, codec="fp8_e4m3")),
    "shapes": (
        lambda group: graphar.allreduce(ones(64, 32), group),
        lambda group: graphar.allreduce(ones(32, 64), group),
    ),
    "rows of parts": (
        lambda group: graphar.reducescatter(ones(64, 32), group),
        lambda group: graphar.reducescatter(ones(64, 8, 4), group),
    ),
    "numbers of an epilogue": (scaled(1 << 12, 2.0), scaled(1 << 12, 3.0)),
    "numbers of an epilogue that large sums have": (scaled(1 << 24, 2.0), scaled(1 << 24, 3.0)),
    "eps of norms": (norms(4), norms(4, eps=1e-5)),
    "epilogues": (sums(1 << 12, epilogue="v + 1"), sums(1 << 12, epilogue="v + 2")),
    "sizes of copies": tuple(sums(numel, algorithm="two_shot_copies") for numel in (1 << 20, (1 << 20) - 8)),
    "sizes without a loss": (
        sums(1 << 24, algorithm="two_shot_lossless"),
        sums((1 << 24) - (1 << 20), algorithm="two_shot_lossless"),
    ),
    "parts to sum": (
        lambda group: graphar.reducescatter(ones(1 << 12), group),
        lambda group: graphar.reducescatter(ones(1 << 13), group),
    ),
    "parts to gather": (
        lambda group: graphar.allgather(ones(1 << 20), group),
        lambda group: graphar.allgather(ones((1 << 20) - 8), group),
    ),
    "parts to exchange by copies": (exchanged(6720), exchanged(3360)),
    "symmetric tensors": (into_symmetric(0), into_symmetric(1)),
    "small parts to gather": (
        lambda group: graphar.allgather(ones(2), group),
        lambda group: graphar.allgather(ones(1), group),
    ),
    "columns of a tuple": (tuples(4, 2), tuples(4, 1)),
    "tensors of a tuple": (tuples(4, 4), tuples(4, 4, 4)),
    "a tuple and a tensor": (tuples(4, 4), lambda group: graphar.allgather(ones(2, 4), group)),
    "rows of norms": (norms(4), norms(2)),
    "columns of tiles": (matmuls(512, 1024), matmuls(512, 512)),
    "columns of skinny matmuls": (matmuls(8, 8192), matmuls(8, 4096)),
    "rows to gather and multiply": (gathered(512), gathered(256)),
    "epilogues of gathered rows": (gathered(512, "v + 1"), gathered(512, "v + 2")),
    "an epilogue of gathered rows and none": (gathered(512, "-v"), gathered(512)),
    "epilogues behind an all-gather": (gathered(512, "v + 1", "none"), gathered(512, "v + 2", "none")),
}


def what_is_raised(rank, world_size):
    """By pair, the error that the first unlike calls end in."""
    raised = {}
    for name, pair in UNLIKE.items():
        with graphar.Communicator(dist.new_group(), timeout_s=TIMEOUT_S) as communicator:
            for call in pair:  # alike, and compiled
                call(communicator)
            communicator.synchronize()
            try:
                pair[min(rank, 1)](communicator)
                communicator.synchronize()
            except graphar.CommunicatorError as error:
                raised[name] = str(error)
            dist.barrier()  # a rank may have waited for the deadline, while others go on to close
    return raised


@pytest.fixture(scope="module")
def raised():
    return run_on_gpus(what_is_raised, torch.cuda.device_count(), timeout_s=300)


@pytest.mark.promise("Ranks whose calls differ all get an error that says what each called.")
@pytest.mark.parametrize("name", UNLIKE)
def test_every_rank_is_told_what_ranks_called(name, raised):
    for rank, of_rank in enumerate(raised):
        assert "ranks must make the same graphar calls in the same order" in of_rank[name]
        calls = dict(re.findall(r"^rank ([0-9]+): (.*)$", of_rank[name], re.MULTILINE))
        assert str(rank) in calls
        assert len(set(calls.values())) == 2
        assert "another call" not in calls.values()


# Pairs in which flags announce the data.
AT_ONCE = {
    "large sums": (sums(1 << 24, algorithm="two_shot_pipelined"), sums(1 << 24, FP16, algorithm="two_shot_pipelined")),
    "pulled sums": (sums(1 << 12, algorithm="one_shot"), sums(1 << 12, FP16, algorithm="one_shot")),
    "gathered parts": (lambda group: graphar.allgather(ones(512), group), gather_fp16),
    "tiles": (matmuls(512, 1024), matmuls(512, 1024, bias=True)),
}


@on_ranks(2, by=run_on_gpus)
def test_ranks_are_told_in_the_same_call_where_flags_announce_the_data(rank, world_size):
    told = {}
    for name, pair in AT_ONCE.items():
        with graphar.Communicator(dist.new_group(), timeout_s=TIMEOUT_S) as communicator:
            for call in pair:
                call(communicator)
            torch.cuda.synchronize()
            pair[min(rank, 1)](communicator)
            torch.cuda.synchronize()
            told[name] = bool(communicator.engine.runner.members[0].record.kind)
            dist.barrier()
            with contextlib.suppress(graphar.CommunicatorError):
                communicator.synchronize()
            dist.barrier()
    assert all(told.values()), told


def time_until_sizes_are_told_apart(rank, world_size):
    """Seconds until the ranks of two sizes are told, in kernels of which some threads wait for what never comes."""
    with graphar.Communicator(dist.new_group(), timeout_s=60) as communicator:
        pair = sums(1024, algorithm="one_shot_push"), sums(2048, algorithm="one_shot_push")
        for call in pair:
            call(communicator)
        communicator.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        with pytest.raises(graphar.CommunicatorError, match="ranks must make the same graphar calls"):
            call_and_wait(communicator, pair[min(rank, 1)])
        seconds = time.perf_counter() - begin
        dist.barrier()
    return seconds


def test_ranks_that_wait_for_what_another_does_not_send_are_told_long_before_the_deadline():
    assert max(run_on_gpus(time_until_sizes_are_told_apart, 2)) < 20


def call_and_wait(communicator, call):
    call(communicator)
    communicator.synchronize()


def what_a_new_call_meets(rank, world_size):
    """The error of a rank whose call is new to it, while the others repeat one that they know; and theirs."""
    with graphar.Communicator(dist.new_group(), timeout_s=3) as communicator:
        UNLIKE["dtypes"][0](communicator)
        communicator.synchronize()
        with pytest.raises(graphar.GrapharError) as raised:
            call_and_wait(communicator, UNLIKE["dtypes"][min(rank, 1)])
        dist.barrier()
    return str(raised.value)


def test_a_rank_with_a_new_call_and_one_that_waits_for_it_are_told_what_each_called():
    known, new = run_on_gpus(what_a_new_call_meets, 2)

    assert "torch.bfloat16" in new
    assert "torch.float16" in known


def call_on_after_unlike_ones(rank, world_size):
    """How many calls are made until one raises, without any synchronisation that is asked for."""
    with graphar.Communicator(dist.new_group(), timeout_s=TIMEOUT_S) as communicator:
        for call in UNLIKE["dtypes"]:
            call(communicator)
        torch.cuda.synchronize()
        UNLIKE["dtypes"][min(rank, 1)](communicator)
        for made in range(20):
            torch.cuda.synchronize()
            try:
                UNLIKE["dtypes"][0](communicator)
            except graphar.CommunicatorError:
                dist.barrier()
                return made
    return None


def test_calls_that_follow_raise():
    for made in run_on_gpus(call_on_after_unlike_ones, 2):
        assert made is not None
        assert made < 10  # kernels compare at every eighth call, and the error of one is raised by the next


@on_ranks(2, by=run_on_gpus)
def test_replays_of_unlike_graphs_are_told_apart(rank, world_size):
    with graphar.Communicator(dist.new_group(), timeout_s=TIMEOUT_S) as communicator:
        graphs = []
        for call in UNLIKE["dtypes"]:
            call(communicator)
            torch.cuda.synchronize()
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                call(communicator)
        graphs[min(rank, 1)].replay()
        with pytest.raises(graphar.CommunicatorError, match="ranks must make the same graphar calls"):
            communicator.synchronize()
        dist.barrier()
