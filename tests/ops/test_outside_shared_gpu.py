"""An algorithm from outside the package on a GPU that ranks in processes share: like graphar's own in every way."""

import shutil
from dataclasses import replace

import pytest
import torch

import graphar
from tests.cases import integers, normal, same_bits
from tests.outside import MAX_NBYTES, PUSHED_SUM, load
from tests.processes import on_ranks, run_ranks

pytestmark = pytest.mark.gpu(1)

WORLD_SIZE, NUMELS = 2, (1, 8, 8193, 100_000, 64, MAX_NBYTES // 4)


@pytest.fixture(autouse=True)
def shared_gpu(monkeypatch):
    monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", "1")


def parts(numel, dtype, fill=normal):
    return [fill(rank, numel, dtype) for rank in range(WORLD_SIZE)]


@on_ranks(WORLD_SIZE, timeout_s=300)
def test_every_way_to_call_it_gives_the_specifications_bits_by_its_kernel(rank, world_size):
    torch.cuda.set_device(0)
    mine, wrong = load(), {}
    compiled = torch.compile(lambda x: graphar.allreduce(x, algorithm=mine), backend="eager")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for numel in NUMELS:
            expected, x = graphar.reference.allreduce(parts(numel, dtype)), parts(numel, dtype)[rank].cuda()
            ways = {"new": [graphar.allreduce(x, algorithm=mine) for _ in range(4)]}
            ways["out"] = [graphar.allreduce(x, out=torch.empty_like(x), algorithm=mine)]
            ways["in place"] = [graphar.allreduce(x.clone(), algorithm=mine)]
            ways["compiled"] = [compiled(x)]
            out = graphar.empty(numel, dtype=dtype)
            ways["symmetric"] = [graphar.allreduce(x, out=out, algorithm=mine)]
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured = [graphar.allreduce(x, algorithm=mine) for _ in range(3)]
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
            ways["replayed"] = captured
            for way, found in ways.items():
                wrong[way] = wrong.get(way, 0) + sum(same_bits(y.cpu(), expected) for y in found)
    launches = graphar.stats().launches
    launches, explained = launches[mine], graphar.explain(x, algorithm=mine).algorithm == mine
    assert wrong == dict.fromkeys(wrong, 0)
    assert launches == 3 * len(NUMELS) * (4 + 1 + 1 + 1 + 1 + 3 * 5)
    assert explained


def miss(rank, world_size):
    """What the record of an expired wait says, and what it says of the op and the algorithm."""
    torch.cuda.set_device(0)
    mine, x = load(), torch.ones(8192, dtype=torch.bfloat16, device="cuda")
    communicator = graphar.Communicator(timeout_s=2)
    communicator.allreduce(x, algorithm=mine)
    record = None
    if rank == 0:
        communicator.allreduce(x, algorithm=mine)
        with pytest.raises(graphar.CollectiveTimeout) as error:
            communicator.synchronize()
        found = error.value.record
        record = found.op, found.algorithm == mine, found.sequence, found.rank, found.peer
    torch.distributed.barrier()
    communicator.close()
    return record


def test_an_absent_rank_is_named_with_the_algorithm():
    assert run_ranks(miss, WORLD_SIZE)[0] == ("allreduce", True, 1, 0, 1)


def differ(rank, world_size, folder):
    """What each rank is told whose source has another line on rank 1."""
    torch.cuda.set_device(0)
    source = shutil.copytree(PUSHED_SUM.parent, f"{folder}/{rank}") + "/pushed_sum.cu"
    if rank == 1:
        with open(source, "a") as file:
            file.write("// another line\n")
    mine, x = load(source), torch.ones(8192, dtype=torch.bfloat16, device="cuda")
    with pytest.raises(graphar.CommunicatorError) as error:
        graphar.allreduce(x, algorithm=mine)
    return str(error.value), str(mine)


def test_ranks_that_loaded_different_sources_are_told_both(tmp_path):
    found = run_ranks(differ, WORLD_SIZE, str(tmp_path))

    names = [name for _, name in found]
    assert names[0] != names[1]
    for said, _ in found:
        assert all(name in said for name in names)


@on_ranks(WORLD_SIZE)
def test_a_prepared_algorithm_is_captured_without_a_call_and_suspended(rank, world_size):
    torch.cuda.set_device(0)
    mine, x = load(), integers(rank, 8192, torch.bfloat16).cuda()
    with graphar.Communicator() as communicator:
        communicator.prepare(dtypes=[torch.bfloat16], ops=["allreduce", mine])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = communicator.allreduce(x, algorithm=mine)
        graph.replay()
        torch.cuda.synchronize()
        first = same_bits(y.cpu(), graphar.reference.allreduce(parts(8192, torch.bfloat16, integers)))
        communicator.suspend()
        communicator.resume()
        y.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
        again = same_bits(y.cpu(), graphar.reference.allreduce(parts(8192, torch.bfloat16, integers)))
        assert (first, again, str(mine) in communicator.memory().scratch) == (0, 0, True)


@on_ranks(WORLD_SIZE)
def test_auto_takes_what_a_table_names(rank, world_size):
    torch.cuda.set_device(0)
    mine, x = load(), integers(rank, 8192, torch.bfloat16).cuda()
    entry = {"max_nbytes": 64 << 10, "algorithm": str(mine), "blocks": 20, "threads": 256}
    with graphar.Communicator() as communicator:
        communicator.explain(x)  # sets up the kernels
        table = communicator.engine.table
        others = [one for one in table.rows[world_size] if (one["max_nbytes"] or 1 << 60) > 64 << 10]
        communicator.engine.use_table(replace(table, rows=table.rows | {world_size: [entry, *others]}))
        y = communicator.allreduce(x)
        wrong = same_bits(y.cpu(), graphar.reference.allreduce(parts(8192, torch.bfloat16, integers)))
        assert (communicator.explain(x).algorithm == mine, communicator.stats().launches.get(mine), wrong) == (
            True,
            1,
            0,
        )
