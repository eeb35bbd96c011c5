"""Another library's kernel that CUDA loads for the first time between the launches of one call's ranks.

Kernels of the first rank spin until the second rank's are launched, and CUDA loads a kernel only once the device is
idle: so such a call ends at its deadline, and says which rank it waited for. Each test has a process of its own, in
which the other library's kernel is cold.
"""

import importlib.util
import threading
import time
from unittest import mock

import pytest
import torch

import graphar
from graphar import reference
from graphar.plan.algorithms import Algorithm
from graphar.runtime.launcher import Grid
from tests import one_gpu
from tests.cases import normal, same_bits
from tests.processes import run_ranks
from tests.small_kernels import bind

NUMEL, DEADLINE_S, LONGEST_S = 8192, 3.0, 30


def own_module(x):
    bind('extern "C" __global__ void idle() {}', "idle", x.get_device(), [], Grid(1, 32, 0, False)).enqueue(
        torch.cuda.current_stream(x.device).cuda_stream
    )


COLD = {
    "torch": torch.special.bessel_j0,
    "cuBLAS": lambda x: x @ x,
    "a module": own_module,
    "Triton": lambda x: torch.compile(lambda x: x.sin() * 2)(x),
}
HAS_TRITON = importlib.util.find_spec("triton") is not None
every_cold_kernel = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.skipif(name == "Triton" and not HAS_TRITON, reason="no Triton"))
        for name in COLD
    ],
)


def load_between(rank, world_size, name):
    """What a call of two ranks of one GPU says with a cold kernel between its launches, and its seconds."""
    with mock.patch.object(one_gpu, "_TIMEOUT_S", DEADLINE_S):
        ranks, parts = one_gpu.RanksOfOneGpu(2), [normal(rank, NUMEL, torch.bfloat16) for rank in range(2)]
        ranks.allreduce(parts, Algorithm.ONE_SHOT_PUSH)
        x, stream = torch.ones(64, 64, device="cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()

        def before(rank):
            if rank == 1:
                with torch.cuda.stream(stream):
                    COLD[name](x)

        ranks.before_launch = before
        begin = time.monotonic()
        with pytest.raises(graphar.CollectiveTimeout) as error:
            ranks.allreduce(parts, Algorithm.ONE_SHOT_PUSH)
        return str(error.value), time.monotonic() - begin


@pytest.mark.gpu(1)
@every_cold_kernel
def test_a_cold_kernel_between_the_launches_ends_a_call_at_its_deadline(name):
    ((said, took_s),) = run_ranks(load_between, 1, name)

    assert "rank 0 waited past the deadline for rank 1" in said
    assert DEADLINE_S <= took_s < LONGEST_S


def load_beside(rank, world_size, name):
    """The wrong bits of a hundred calls with a list, while a thread launches a cold kernel on each device."""
    parts = [normal(rank, NUMEL, torch.bfloat16) for rank in range(2)]
    xs, squares = [part.cuda(at) for at, part in enumerate(parts)], [torch.ones(64, 64, device=at) for at in range(2)]
    with graphar.Communicator(devices=[0, 1], timeout_s=DEADLINE_S) as communicator:
        communicator.allreduce(xs)
        communicator.synchronize()
        thread = threading.Thread(target=lambda: [COLD[name](square) for square in squares])
        begin, results = time.monotonic(), []
        thread.start()
        try:
            results += [communicator.allreduce(xs) for _ in range(100)]
            thread.join()
            communicator.synchronize()
        except graphar.CollectiveTimeout:
            results = []
        thread.join()
        took_s = time.monotonic() - begin
        return took_s, sum(same_bits(y.cpu(), reference.allreduce(parts)) for of_call in results for y in of_call)


@pytest.mark.gpu(2)
@every_cold_kernel
def test_calls_with_a_list_beside_a_thread_that_launches_a_cold_kernel_are_right_or_end_at_the_deadline(name):
    ((took_s, wrong),) = run_ranks(load_beside, 1, name)

    assert wrong == 0
    assert took_s < LONGEST_S
