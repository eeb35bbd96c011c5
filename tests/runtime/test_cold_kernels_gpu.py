"""Another library's kernel that CUDA loads for the first time between the launches of one call's ranks: the call ends.

Kernels of the first rank spin until the second rank's are launched, and CUDA may load a kernel only once a device is
idle. Each test has a process of its own, in which the other library's kernel is cold.
"""

from __future__ import annotations

import importlib.util
import threading
import time

import pytest
import torch

import graphar
from graphar import reference
from graphar.plan.algorithms import Algorithm
from graphar.runtime.launcher import Grid
from tests.cases import normal, same_bits
from tests.one_gpu import RanksOfOneGpu
from tests.processes import run_ranks
from tests.small_kernels import bind

NUMEL, LONGEST_S = 8192, 20  # a deadline is later


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


def load_between(rank, world_size, name, in_thread):
    """The seconds of a call of two ranks of one GPU with a cold kernel between its launches, and its wrong bits."""
    ranks, parts = RanksOfOneGpu(2), [normal(rank, NUMEL, torch.bfloat16) for rank in range(2)]
    ranks.allreduce(parts, Algorithm.ONE_SHOT_PUSH)
    x, stream = torch.ones(64, 64, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    threads = []

    def load():
        with torch.cuda.stream(stream):
            COLD[name](x)

    def before(rank):
        if rank == 1:
            threads.append(threading.Thread(target=load))
            threads[0].start()
            threads[0].join(0.2 if in_thread else None)

    ranks.before_launch = before
    begin = time.monotonic()
    outs = ranks.allreduce(parts, Algorithm.ONE_SHOT_PUSH)
    took_s = time.monotonic() - begin
    threads[0].join()
    return took_s, [same_bits(out.cpu(), reference.allreduce(parts)) for out in outs]


@pytest.mark.gpu(1)
@pytest.mark.parametrize("in_thread", [True, False], ids=["in another thread", "in the launching thread"])
@every_cold_kernel
def test_a_call_of_ranks_that_share_a_gpu_ends(name, in_thread):
    ((took_s, wrong),) = run_ranks(load_between, 1, name, in_thread, timeout_s=180)

    assert wrong == [0, 0]
    assert took_s < LONGEST_S


def load_beside(rank, world_size, name):
    """The seconds of a hundred calls with a list, while a thread launches a cold kernel on each device."""
    parts = [normal(rank, NUMEL, torch.bfloat16) for rank in range(2)]
    xs, squares = [part.cuda(at) for at, part in enumerate(parts)], [torch.ones(64, 64, device=at) for at in range(2)]
    with graphar.Communicator(devices=[0, 1], timeout_s=60.0) as communicator:
        communicator.allreduce(xs)
        communicator.synchronize()
        thread = threading.Thread(target=lambda: [COLD[name](square) for square in squares])
        begin = time.monotonic()
        thread.start()
        results = [communicator.allreduce(xs) for _ in range(100)]
        thread.join()
        communicator.synchronize()
        took_s = time.monotonic() - begin
        return took_s, {same_bits(y.cpu(), reference.allreduce(parts)) for of_call in results for y in of_call}


@pytest.mark.gpu(2)
@every_cold_kernel
def test_calls_with_a_list_end_beside_a_thread_that_launches_a_cold_kernel(name):
    ((took_s, wrong),) = run_ranks(load_beside, 1, name, timeout_s=180)

    assert wrong == {0}
    assert took_s < LONGEST_S
