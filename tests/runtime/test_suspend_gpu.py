"""Suspend and resume: ranks in processes that share one GPU, and ranks of one process on one GPU."""

import os
import signal
import warnings
from functools import partial

import pytest
import torch

import graphar
from graphar.plan.algorithms import Algorithm
from graphar.ranks.rendezvous import RanksAbsent
from graphar.runtime.memory import virtual_memory
from graphar.runtime.memory.suspension import Suspension
from graphar.runtime.registry import engine_of_group
from tests.cases import integers, normal, same_bits
from tests.fake_gpu import descriptors
from tests.one_gpu import RanksOfOneGpu
from tests.ops.conformance import copies
from tests.processes import on_ranks, run_ranks
from tests.ranks.test_shared_gpu import EVERY_FORM, questions, tensors_of

pytestmark = pytest.mark.gpu(1)

WORLD_SIZE, MB = 2, 1 << 20
PREPARED = ("allreduce", "reducescatter", "allgather", "allreduce_residual_rmsnorm")


@pytest.fixture(autouse=True)
def shared_gpu(monkeypatch):
    monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", "1")


def part(rank, numel=8193, dtype=torch.bfloat16):
    return integers(rank, numel, dtype)


def total(numel=8193, dtype=torch.bfloat16):
    return graphar.reference.allreduce([part(rank, numel, dtype) for rank in range(WORLD_SIZE)])


def captured(call):
    """A graph of a call that was made before."""
    graph = torch.cuda.CUDAGraph()
    call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def restore(on_gpu, tensors, form):
    """Gives the tensors that calls of a form write, such as residuals, the content that they had before the first."""
    for name in form.writes:
        for changed, before in zip(on_gpu[name], tensors[name], strict=True):
            changed.copy_(before)


def call_every_form(rank, world_size):
    """By form: a repeated call, what restores its tensors, what it must give, and a graph of it with its results.

    Without a graph are torch.distributed's calls between such ranks, which are no GPU's.
    """
    made = {}
    for form in EVERY_FORM:
        tensors = tensors_of(form, world_size, *next(questions(form, world_size)))
        expected = form.expected(copies(tensors))[rank]
        on_gpu = {name: [one.cuda() for one in ones] for name, ones in tensors.items()}
        before, call = len(graphar.stats().fallbacks), partial(form.of_rank, rank, on_gpu)
        for _ in range(3):
            call()
        graph = captured(call) if len(graphar.stats().fallbacks) == before else None
        made[str(form)] = call, partial(restore, on_gpu, tensors, form), expected, graph
    return made


def replay(graph, results, prepare):
    for result in results:
        result.view(-1).view(torch.uint8).fill_(7)
    prepare()
    graph.replay()
    torch.cuda.synchronize()


@pytest.mark.promise("A suspended communicator holds no GPU memory. Resumed, it has the same addresses; graphs replay.")
@on_ranks(WORLD_SIZE, timeout_s=400)
def test_plans_and_graphs_of_every_op_are_valid_after_a_suspension(rank, world_size):
    torch.cuda.set_device(0)
    made, wrong = call_every_form(rank, world_size), {}
    plans, launches = graphar.stats().plans, graphar.stats().launches

    graphar.suspend()
    graphar.resume()

    for form, (call, prepare, expected, graph) in made.items():
        prepare()
        results = [one.clone() for one in call()]
        if graph:
            replay(*graph, prepare)
            results += graph[1]
        wrong[form] = sum(same_bits(y.cpu(), right) for y, right in zip(results, (*expected, *expected), strict=False))
    more = graphar.stats()
    grown = all(more.launches[name] > count for name, count in launches.items())
    graphs, new_plans, launches_go_on = sum(graph is not None for *_, graph in made.values()), more.plans - plans, grown
    assert wrong == dict.fromkeys(wrong, 0)
    assert graphs > len(EVERY_FORM) // 2
    assert (new_plans, launches_go_on) == (0, True)


def free_memory(rank, world_size):
    """The MiB that were resident, those that a suspension freed on the GPU by NVML, and those a resumption took."""
    torch.cuda.set_device(0)
    with graphar.Communicator() as communicator:
        communicator.prepare(ops=PREPARED, dtypes=[torch.bfloat16])
        tensor = communicator.empty(16 * MB, dtype=torch.float32)
        tensor.fill_(1)
        torch.cuda.synchronize()
        torch.distributed.barrier()
        total_mb = communicator.memory().total.resident_nbytes / MB
        used = [torch.cuda.device_memory_used() / MB]
        torch.distributed.barrier()
        for change in (communicator.suspend, communicator.resume):
            change()
            torch.distributed.barrier()
            used.append(torch.cuda.device_memory_used() / MB)
            torch.distributed.barrier()
        return total_mb, used[0] - used[1], used[2] - used[1]


def test_a_suspension_frees_ninety_nine_hundredths():
    found = run_ranks(free_memory, WORLD_SIZE, timeout_s=200)

    held = sum(resident for resident, _, _ in found)
    for _, freed, taken in found:
        assert freed >= 0.99 * held
        assert abs(taken - freed) <= 8  # the driver's own tables


@pytest.mark.parametrize("keep", ["symmetric", None])
@on_ranks(WORLD_SIZE)
def test_symmetric_tensors_stay_where_they_are_and_keep_their_content_if_asked(rank, world_size, keep):
    torch.cuda.set_device(0)
    with graphar.Communicator() as communicator:
        x, out = communicator.empty(8192, dtype=torch.bfloat16), communicator.empty(8192, dtype=torch.bfloat16)
        x.copy_(part(rank, 8192))
        communicator.allreduce(x, out=out)
        pointers = x.data_ptr(), out.data_ptr()
        use = [communicator.memory().symmetric]
        communicator.suspend(keep)
        use.append(communicator.memory().symmetric)
        communicator.resume()
        kept = same_bits(out.cpu(), total(8192)), same_bits(x.cpu(), part(rank, 8192))
        x.copy_(part(rank, 8192))
        again = same_bits(communicator.allreduce(x, out=out).cpu(), total(8192))
        same_place, (before, suspended) = (x.data_ptr(), out.data_ptr()) == pointers, use
        assert (again, same_place) == (0, True)
        assert kept == (0, 0) or keep is None
        assert (before.resident_nbytes, suspended.resident_nbytes) == (before.reserved_nbytes, 0)


@on_ranks(WORLD_SIZE, timeout_s=400)
def test_graphs_that_are_replayed_meanwhile_do_nothing_and_are_reported(rank, world_size):
    torch.cuda.set_device(0)
    made = call_every_form(rank, world_size)
    graphs = {name: (graph, prepare, expected) for name, (_, prepare, expected, graph) in made.items() if graph}
    graphar.suspend()
    for (graph, _), *_ in graphs.values():
        for _ in range(3):
            graph.replay()
    torch.cuda.synchronize()  # an illegal address would be raised here
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        graphar.resume()
    wrong = {}
    for name, ((graph, results), prepare, expected) in graphs.items():
        replay(graph, results, prepare)
        wrong[name] = sum(same_bits(y.cpu(), right) for y, right in zip(results, expected, strict=True))
    warned = [str(one.message) for one in warned]
    assert len(wrong) > len(EVERY_FORM) // 2
    assert wrong == dict.fromkeys(wrong, 0)
    assert len(warned) == 1
    assert warned[0].startswith("graphar: a captured graph was replayed while its communicator was suspended")


@on_ranks(WORLD_SIZE, timeout_s=200)
def test_large_graphs_that_are_replayed_meanwhile_touch_no_memory_that_is_gone(rank, world_size):
    torch.cuda.set_device(0)
    x = part(rank, 16 * MB).cuda()
    rows, residual = part(rank, 2048 * 2048).view(2048, 2048).cuda(), torch.zeros(2048, 2048).bfloat16().cuda()
    ones = torch.ones(2048, dtype=torch.bfloat16, device="cuda")
    w = (torch.eye(2048) * (1 + rank)).bfloat16().cuda()
    calls = {
        "allreduce": partial(graphar.allreduce, x),
        "pipelined": partial(graphar.allreduce, x, algorithm="two_shot_pipelined"),
        "int8": partial(graphar.allreduce, x, codec="int8"),
        "reducescatter": partial(graphar.reducescatter, x),
        "allgather": partial(graphar.allgather, x),
        "norm": partial(graphar.allreduce_residual_rmsnorm, rows, residual, ones),
        "tiles": partial(graphar.fused_matmul_allreduce, rows, w, partition="tiles"),
        "scattered tiles": partial(graphar.fused_matmul_reducescatter, rows, w),
        "gathered rows": partial(graphar.fused_allgather_matmul, rows, w),
    }
    made = {name: (*captured(call), call()) for name, call in calls.items()}
    graphar.suspend()
    for graph, *_ in made.values():
        graph.replay()
    torch.cuda.synchronize()  # an illegal address would be raised here
    with pytest.raises(
        graphar.CommunicatorError, match="a captured graph was replayed while its communicator was susp"
    ):
        engine_of_group("").synchronize()
    with pytest.warns(RuntimeWarning, match="was replayed while its communicator was suspended"):
        graphar.resume()
    wrong = {}
    for name, (graph, results, expected) in made.items():
        graph.replay()
        torch.cuda.synchronize()
        pairs = zip(results, expected, strict=True) if isinstance(results, tuple) else [(results, expected)]
        wrong[name] = sum(same_bits(y.cpu(), right.cpu()) for y, right in pairs)
    assert wrong == dict.fromkeys(wrong, 0)


def resident_nbytes():
    """Bytes of host memory that this process uses."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@on_ranks(WORLD_SIZE, timeout_s=300)
def test_a_thousand_cycles_leak_nothing(rank, world_size):
    cycles = 1000
    torch.cuda.set_device(0)
    x = part(rank).cuda()
    with graphar.Communicator() as communicator:
        communicator.prepare(ops=("allreduce",), dtypes=[torch.bfloat16])
        held, wrong = [], 0
        for number in range(cycles):
            communicator.suspend()
            communicator.resume()
            wrong += same_bits(communicator.allreduce(x).cpu(), total())
            if number in (9, cycles - 1):
                torch.distributed.barrier()
                held.append((torch.cuda.mem_get_info()[0], descriptors(), resident_nbytes()))
                torch.distributed.barrier()
        (free, files, host), (free_at_end, files_at_end, host_at_end) = held
        gpu, files, host = free - free_at_end, files_at_end - files, host_at_end - host
        assert (wrong, gpu, files) == (0, 0, 0)
        assert host < 16 * MB


def miss_a_call(rank, world_size):
    """The ranks that an expired wait names after a resumption, and whether another communicator then works."""
    torch.cuda.set_device(0)
    x = part(rank).cuda()
    communicator = graphar.Communicator(timeout_s=2)
    communicator.allreduce(x)
    communicator.suspend()
    communicator.resume()
    found = None
    if rank == 0:
        communicator.allreduce(x)
        with pytest.raises(graphar.CollectiveTimeout) as error:
            communicator.synchronize()
        found = error.value.record.rank, error.value.record.peer, error.value.record.sequence
    torch.distributed.barrier()
    communicator.close()
    with graphar.Communicator() as other:
        return found, same_bits(other.allreduce(x).cpu(), total())


def test_a_wait_that_expires_after_a_resumption_names_the_ranks():
    assert run_ranks(miss_a_call, WORLD_SIZE) == [((0, 1, 0), 0), (None, 0)]


def die(rank, world_size, when):
    """What the survivor's calls raised, after rank 1 was killed in that step."""
    torch.cuda.set_device(0)
    x = part(rank).cuda()
    communicator = graphar.Communicator(timeout_s=20)
    communicator.allreduce(x)
    steps = {"suspend": communicator.suspend, "suspended": lambda: None, "resume": communicator.resume}
    for name, step in steps.items():
        if rank == 1 and name == when:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            step()
        except RanksAbsent as error:
            communicator.close()
            return str(error), torch.ones(3, device="cuda").sum().item()
    return "nothing", 0


@pytest.mark.parametrize("when", ["suspend", "suspended", "resume"])
def test_a_rank_that_is_killed_is_named_and_torch_works_on(when):
    said, works = run_ranks(die, WORLD_SIZE, when, lost=[1])[0]

    assert "rank 0 waits for rank(s) [1], whose process has ended" in said
    assert works == 3


@on_ranks(WORLD_SIZE)
def test_with_cuda_ipc_it_is_refused_with_the_reason_and_calls_go_on(rank, world_size):
    torch.cuda.set_device(0)
    virtual_memory.why_not = lambda device: "it is a sandbox"
    x = part(rank).cuda()
    with graphar.Communicator() as communicator:
        right = same_bits(communicator.allreduce(x).cpu(), total())
        with pytest.raises(graphar.UnsupportedError) as error:
            communicator.suspend()
        said, before, after = str(error.value), right, same_bits(communicator.allreduce(x).cpu(), total())
        assert said.endswith("cannot be given back while its addresses stay: rank 0: it is a sandbox")
        assert (before, after) == (0, 0)


def test_ranks_of_one_process_are_suspended_and_resumed():
    ranks = RanksOfOneGpu(4)
    parts = [normal(rank, 8199, torch.bfloat16) for rank in range(4)]
    expected = graphar.reference.allreduce(parts)
    algorithms = (Algorithm.ONE_SHOT_PUSH, Algorithm.TWO_SHOT_PIPELINED)
    try:
        for algorithm in algorithms:
            ranks.allreduce(parts, algorithm)
        for _ in range(3):
            suspension = Suspension(ranks._runner, keeps_tensors=True)
            free = torch.cuda.mem_get_info()[0]
            suspension.give_back()
            assert torch.cuda.mem_get_info()[0] > free
            suspension.resume()
            for algorithm in algorithms:
                assert [same_bits(y.cpu(), expected) for y in ranks.allreduce(parts, algorithm)] == [0] * 4
    finally:
        ranks.close()
