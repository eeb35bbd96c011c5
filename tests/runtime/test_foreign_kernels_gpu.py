"""Foreign kernels that wait for nothing, and destroyed streams, between graphar's calls: calls must not overlap."""

import pytest
import torch

import graphar
from graphar.runtime.driver import call, driver
from graphar.runtime.launcher import Grid
from tests.cases import normal, same_bits
from tests.processes import on_ranks, run_on_gpus
from tests.small_kernels import bind
from tests.worlds import GPU_WORLD_SIZES

every_world_size = pytest.mark.parametrize("world_size", GPU_WORLD_SIZES)
IDLE = 'extern "C" __global__ void idle() {}'  # launched early; does not wait for its predecessor
NUMELS = (1024, 1 << 20, 32 << 20)
ROUNDS = 50
LATE_CLOCKS = 2_000_000


@every_world_size
@on_ranks(by=run_on_gpus)
def test_calls_are_right_though_a_kernel_between_them_waits_for_nothing(rank, world_size):
    idle = bind(IDLE, "idle", rank, [], Grid(1, 32, 0, overlaps=True))
    stream, wrong = torch.cuda.Stream(), []
    with graphar.Communicator(timeout_s=10.0) as communicator, torch.cuda.stream(stream):
        for numel in NUMELS:
            parts = [normal(r, numel, torch.bfloat16).cuda() for r in range(world_size)]
            expected = graphar.reference.allreduce(parts)
            communicator.allreduce(parts[rank])
            torch.cuda.synchronize()
            for at in range(ROUNDS):
                if at % world_size == rank:
                    torch.cuda._sleep(LATE_CLOCKS)
                results = []
                for _ in range(4):
                    results.append(communicator.allreduce(parts[rank]))
                    idle.enqueue(stream.cuda_stream)
                wrong += [same_bits(y, expected) for y in results]
        communicator.synchronize()
    assert set(wrong) == {0}


@every_world_size
@on_ranks(by=run_on_gpus)
def test_calls_follow_each_other_though_their_streams_are_destroyed_and_handles_used_again(rank, world_size):
    parts = [normal(r, NUMELS[-1], torch.bfloat16).cuda() for r in range(world_size)]
    expected = graphar.reference.allreduce(parts)
    results, handles = [], []
    torch.cuda.synchronize()
    with graphar.Communicator(timeout_s=10.0) as communicator:
        for at in range(ROUNDS):
            handle = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            handles.append(int(handle))
            with torch.cuda.stream(torch.cuda.ExternalStream(int(handle))):
                if at % world_size == rank:
                    torch.cuda._sleep(LATE_CLOCKS)
                results.append(communicator.allreduce(parts[rank]))
            call(driver.cuStreamDestroy, handle)  # with the call still under way
        results.append(communicator.allreduce(parts[rank]))
        communicator.synchronize()
    reused, wrong = len(set(handles)) < len(handles), [same_bits(y, expected) for y in results]
    assert reused
    assert set(wrong) == {0}
