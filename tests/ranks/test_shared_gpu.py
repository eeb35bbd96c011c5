"""Ranks in processes, which share a GPU by GRAPHAR_TEST_SHARE_GPU=1 where there is one: every public op's bits.

Kernels of different processes take turns on the GPU in time slices, so a wait on a peer takes milliseconds.
"""

from dataclasses import replace

import pytest
import torch

import graphar
from graphar.numerics.partitions import TP_INVARIANT
from graphar.plan.algorithms import COPYING, MATMUL_TYPES
from graphar.runtime.registry import engine_of_group
from tests.cases import integers, raw, same_bits
from tests.gpu import EXACT_ALGORITHMS, fits
from tests.ops.conformance import ALLGATHER, ALLREDUCE, ALLTOALL, FORMS, REDUCESCATTER, copies, parameters
from tests.processes import RankFailed, on_ranks, run_on_gpus, run_ranks
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu(1)

WORLD_SIZE, CALLS = 2, 4
RAW = (torch.bool, torch.uint16, torch.complex64, torch.complex128, torch.float8_e5m2, torch.float8_e8m0fnu)
# The rows, and plain sums by each exact kernel and by copy engines. A form that rounds at random gives something else
# at each call.
BY_KERNEL = [replace(ALLREDUCE[0], label=name, options={"algorithm": name}) for name in EXACT_ALGORITHMS]
BY_KERNEL += [
    replace(form, label=COPYING[op].value, options={"algorithm": COPYING[op].value})
    for form in (ALLREDUCE[0], REDUCESCATTER[0], ALLGATHER[0], ALLTOALL[0])
    for op in [form.op.__name__]
]
EVERY_FORM = [
    form
    for form in (*FORMS, *BY_KERNEL)
    if torch.bfloat16 in form.dtypes and "stochastic" not in str(form) + str(form.options)
]
SHAPES = ((8, 128), (1, 256), (67, 128), (300, 1024), (8192, 128))
# [..., N, K]: each of several blocks of K, so that no rank has scales of rows in their place.
PRODUCTS = ((8, 128, 200), (129, 136, 208), (640, 512, 264))


def questions(form, world_size):
    """Shapes and dtypes: all dtypes of the first shape, and the others in bf16."""
    has_dims = len(form.small) > 2  # named ones, which matrices lack
    partition = form.options.get("partition") if "w" in parameters(form.op) else None
    # Without a kernel for a K the specification adds, but not with bits that are the same for any number of rows.
    products = [shape for shape in PRODUCTS if shape[-1] % 16 == 0] if partition == "batch_invariant" else PRODUCTS
    first, *others = products if "w" in parameters(form.op) else form.shapes if has_dims else SHAPES
    is_invariant = partition == TP_INVARIANT
    dtypes = [one for one in form.dtypes if not is_invariant or one in MATMUL_TYPES]  # on GPUs fp32 is refused
    asked = [*((first, dtype) for dtype in dtypes), *((shape, torch.bfloat16) for shape in others)]
    algorithm = form.options.get("algorithm", "fallback")
    for shape, dtype in asked if form.ranks(world_size) == world_size else ():
        if algorithm == "fallback" or fits(algorithm, world_size, torch.Size(shape).numel(), dtype):
            yield shape, dtype


def tensors_of(form, world_size, shape, dtype):
    """Whole numbers, whose products are exact in fp32: no order of accumulation changes a bit."""
    return form.tensors(world_size, shape, dtype, raw if dtype in RAW else integers)


@pytest.mark.promise("All-reduce has the bits of its specification: fp32 sums in rank order, rounded once.")
@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
@on_ranks(by=run_on_gpus, timeout_s=600)
def test_every_public_op_has_its_specifications_bits(rank, world_size):
    wrong = {}
    for form in EVERY_FORM:
        for question in questions(form, world_size):
            tensors = tensors_of(form, world_size, *question)
            expected = form.expected(copies(tensors))[rank]
            on_gpu = {name: [one.cuda() for one in ones] for name, ones in tensors.items()}
            wrong[str(form), question] = 0
            for _ in range(CALLS):
                found = form.of_rank(rank, copies(on_gpu))  # some calls write their arguments
                of_call = [same_bits(y.cpu(), right) for y, right in zip(found, expected, strict=True)]
                wrong[str(form), question] += sum(of_call)
    runner = engine_of_group("").runner
    kernels = len(runner.calls_begun()) if runner else 0
    assert {asked: count for asked, count in wrong.items() if count} == {}
    assert {form for form, _ in wrong} == {str(one) for one in EVERY_FORM if one.ranks(world_size) == world_size}
    assert kernels > 0


def sum_on_one_gpu(rank, world_size):
    torch.cuda.set_device(0)
    graphar.allreduce(torch.ones(8, device="cuda"))


def test_without_the_switch_ranks_that_share_a_gpu_are_refused(monkeypatch):
    monkeypatch.delenv("GRAPHAR_TEST_SHARE_GPU", raising=False)

    with pytest.raises(RankFailed, match="ranks 0 and 1 both use GPU"):
        run_ranks(sum_on_one_gpu, WORLD_SIZE)


def pass_unlike_tensors(rank, world_size):
    """Whether calls with the same symmetric tensor on all ranks are right, and what unlike ones raise."""
    torch.cuda.set_device(0)
    x = torch.full((4096,), rank + 1.0, dtype=torch.bfloat16, device="cuda")
    with graphar.Communicator(timeout_s=20) as communicator:
        made = [communicator.empty(x.shape, dtype=x.dtype) for _ in range(2)]

        def call(out):
            result = communicator.allreduce(x, out=out, algorithm="two_shot_pipelined")
            communicator.synchronize()
            return result

        right = [call(out).unique().tolist() for out in made]
        with pytest.raises(graphar.CommunicatorError) as error:
            call(made[rank])
    return right, str(error.value)


def test_ranks_that_pass_unlike_symmetric_tensors_are_told_which(monkeypatch):
    monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", "1")

    for right, said in run_ranks(pass_unlike_tensors, WORLD_SIZE):
        assert right == [[3.0]] * 2
        for rank in range(WORLD_SIZE):
            assert f"in symmetric memory, its output at byte 0 of symmetric tensor {rank}" in said


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
