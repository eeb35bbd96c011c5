"""Ranks in processes that share one GPU, by GRAPHAR_TEST_SHARE_GPU=1: every public op has its specification's bits.

Kernels of different processes take turns on the GPU in time slices, so a wait on a peer takes milliseconds.
"""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar.runtime.registry import engine_of_group
from tests.cases import integers, same_bits
from tests.ops.conformance import FORMS, copies, parameters
from tests.processes import RankFailed, run_ranks

pytestmark = pytest.mark.gpu(1)

WORLD_SIZE, CALLS = 2, 4
# A form that rounds at random gives something else at each call.
EVERY_FORM = [
    form for form in FORMS if torch.bfloat16 in form.dtypes and "stochastic" not in str(form) + str(form.options)
]
SHAPE, PRODUCT = (8, 128), (8, 128, 64)  # of products: [..., N, K]


def tensors_of(form):
    """Whole numbers, whose products are exact in fp32: no order of accumulation changes a bit."""
    shape = PRODUCT if "w" in parameters(form.op) else SHAPE
    return form.tensors(WORLD_SIZE, shape, torch.bfloat16, integers)


def every_op(rank, world_size):
    """By form, how many elements of this rank's results differ, and how many kernels have counted calls.

    Each call is made several times, since the later ones repeat the launch of the earlier ones.
    """
    torch.cuda.set_device(0)
    wrong = {}
    for form in EVERY_FORM:
        tensors = tensors_of(form)
        expected = form.expected(copies(tensors))[rank]
        on_gpu = {name: [one.cuda() for one in ones] for name, ones in tensors.items()}
        wrong[str(form)] = 0
        for _ in range(CALLS):
            found = form.of_rank(rank, copies(on_gpu))  # some calls write their arguments
            wrong[str(form)] += sum(same_bits(y.cpu(), right) for y, right in zip(found, expected, strict=True))
    runner = engine_of_group("").runner
    return wrong, len(runner.calls_begun()) if runner else 0


def test_every_public_op_has_its_specifications_bits(monkeypatch):
    monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", "1")

    for wrong, kernels in run_ranks(every_op, WORLD_SIZE, timeout_s=300):
        assert wrong == dict.fromkeys(map(str, EVERY_FORM), 0)
        assert kernels > 0


def test_without_the_switch_ranks_that_share_a_gpu_are_refused(monkeypatch):
    monkeypatch.delenv("GRAPHAR_TEST_SHARE_GPU", raising=False)

    with pytest.raises(RankFailed, match="ranks 0 and 1 both use GPU"):
        run_ranks(every_op, WORLD_SIZE)


def pass_unlike_tensors(rank, world_size):
    """Whether calls with the same symmetric tensor on all ranks are right, and what unlike ones raise."""
    torch.cuda.set_device(0)
    x, found = torch.full((4096,), rank + 1.0, dtype=torch.bfloat16, device="cuda"), []
    for algorithm, side in (("one_shot_unstaged", "x"), ("two_shot_pipelined", "out")):
        with graphar.Communicator(timeout_s=20) as communicator:
            made = [communicator.empty(x.shape, dtype=x.dtype).copy_(x) for _ in range(2)]

            def call(tensor, communicator=communicator, algorithm=algorithm, side=side):
                given = {"x": x, side: tensor}
                result = communicator.allreduce(**given, algorithm=algorithm)
                communicator.synchronize()
                return result

            right = [call(one).unique().tolist() for one in made]
            with pytest.raises(graphar.CommunicatorError) as error:
                call(made[rank])
            found.append((right, str(error.value)))
    return found


def test_ranks_that_pass_unlike_symmetric_tensors_are_told_which(monkeypatch):
    monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", "1")

    for found in run_ranks(pass_unlike_tensors, WORLD_SIZE):
        for (right, said), side in zip(found, ("input", "output"), strict=True):
            assert right == [[3.0]] * 2
            for rank in range(WORLD_SIZE):
                assert f"in symmetric memory, its {side} at byte 0 of symmetric tensor {rank}" in said


def capture_first(rank, world_size):
    """What a first call in a capture raises, and the sums of an eager one and of a replay afterwards."""
    torch.cuda.set_device(0)
    x = torch.full((4096,), rank + 1.0, dtype=torch.bfloat16, device="cuda")
    with graphar.Communicator(timeout_s=20) as communicator:
        with pytest.raises(graphar.CommunicatorError) as error, torch.cuda.graph(torch.cuda.CUDAGraph()):
            communicator.allreduce(x)
        eager, graph = communicator.allreduce(x), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = communicator.allreduce(x)
        graph.replay()
        communicator.synchronize()
        return str(error.value), eager.unique().tolist(), y.unique().tolist()


def test_a_first_call_in_a_capture_is_refused_and_the_communicator_works_afterwards(monkeypatch):
    monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", "1")

    for said, *sums in run_ranks(capture_first, WORLD_SIZE):
        assert said.startswith("this communicator has no plan yet and none can be made during graph capture")
        assert sums == [[3.0]] * 2
