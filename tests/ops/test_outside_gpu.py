"""Calls by algorithms from outside the package, on real GPUs: eager, compiled, captured, prepared and late."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import reference
from graphar.plan import algorithms
from tests.cases import bit_patterns, normal, same_bits
from tests.gpu import DTYPES, Ranks
from tests.outside import FOLDER, MAX_NBYTES, forget_loaded, load, load_own
from tests.processes import run_on_gpus

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_stays_loaded(monkeypatch):
    forget_loaded(monkeypatch)


def of_every_rank(op, results, world_size):
    return list(results) if op == "reducescatter" else [results] * world_size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_users_kernel_gives_the_specification_bit_for_bit(ranks: Ranks, dtype):
    pushed_sum = load()

    for numel in (1, 7, 8192, 8199, MAX_NBYTES // dtype.itemsize):
        for fill in (normal, bit_patterns):
            ranks.check(fill, numel, dtype, pushed_sum)

    assert ranks.calls_of(pushed_sum) > 0
    assert ranks.grid_is_idle(pushed_sum)


@pytest.mark.parametrize("op", ["allreduce", "reducescatter", "allgather"])
def test_every_op_takes_a_kernel_from_outside(ranks: Ranks, op):
    own, parts = load_own()[op], [normal(rank, 8199, torch.bfloat16) for rank in range(ranks.world_size)]

    found = getattr(ranks.communicator, op)(ranks.place(parts), algorithm=own)
    ranks.communicator.synchronize()

    expected = of_every_rank(op, getattr(reference, op)(parts), ranks.world_size)
    assert [same_bits(one.cpu(), other) for one, other in zip(found, expected, strict=True)] == [0] * ranks.world_size
    assert ranks.calls_of(own) == 1


def test_a_prepared_one_is_captured_and_replayed(fresh_ranks: Ranks):
    ranks, pushed_sum = fresh_ranks, load()
    parts = [normal(rank, 8199, torch.bfloat16) for rank in range(ranks.world_size)]
    xs = ranks.place(parts)
    outs = [torch.empty_like(x) for x in xs]
    ranks.communicator.prepare(dtypes=[torch.bfloat16], ops=[pushed_sum])

    graph = ranks.capture(lambda: ranks.communicator.allreduce(xs, out=outs, algorithm=pushed_sum))
    for _ in range(20):
        graph.replay()
    ranks.communicator.synchronize()

    ranks.check_result(outs, parts)
    assert ranks.calls_of(pushed_sum) == 20


def test_a_compiled_graph_takes_it(ranks: Ranks):
    pushed_sum, parts = load(), [normal(rank, 8192, torch.float32) for rank in range(ranks.world_size)]
    torch.compiler.reset()
    compiled = torch.compile(lambda xs: graphar.allreduce(xs, algorithm=pushed_sum), fullgraph=True)

    found = compiled(ranks.place(parts))

    expected = reference.allreduce(parts)
    assert [same_bits(one.cpu(), expected) for one in found] == [0] * ranks.world_size


def test_what_its_kernel_cannot_serve_is_refused(ranks: Ranks):
    xs = [torch.ones(MAX_NBYTES, device=f"cuda:{rank}") for rank in range(ranks.world_size)]

    with pytest.raises(graphar.UnsupportedError, match=f"its scratch takes {MAX_NBYTES} bytes"):
        ranks.communicator.allreduce(xs, algorithm=load())


def test_a_source_that_does_not_compile_is_told_with_its_line(fresh_ranks: Ranks, tmp_path):
    for file in FOLDER.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("output.store", "output.stow"))
    xs = ranks_of_ones(fresh_ranks)

    with pytest.raises(graphar.CompileError) as raised:
        fresh_ranks.communicator.allreduce(xs, algorithm=load(tmp_path / "pushed_sum.cu"))

    assert raised.value.file == str(tmp_path / "pushed_sum.cu")
    assert raised.value.line > 0


def ranks_of_ones(ranks: Ranks) -> list[torch.Tensor]:
    return [torch.ones(8, device=f"cuda:{rank}") for rank in range(ranks.world_size)]


@pytest.mark.gpu(2, shared=True)
def test_processes_may_load_them_in_another_order():
    """A record's number is that of its process."""
    run_on_gpus(call_after_others, 2)


def call_after_others(rank, world_size):
    if rank:
        load(threads=64)
    pushed_sum = load()
    assert pushed_sum.number == len(algorithms.Algorithm) + rank

    y = graphar.allreduce(torch.full((64,), 1.0 + rank, device="cuda"), algorithm=pushed_sum)

    assert y.tolist() == [3.0] * 64
