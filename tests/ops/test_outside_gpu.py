"""Calls by algorithms from outside the package, on several GPUs; test_outside_shared_gpu.py has every way to call."""

import pytest
import torch

import graphar
from graphar import reference
from graphar.plan import algorithms
from tests.cases import bit_patterns, normal, same_bits
from tests.gpu import DTYPES, Ranks
from tests.outside import FOLDER, MAX_NBYTES, load, load_own
from tests.processes import on_ranks, run_on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("nothing_stays_loaded")]


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


def test_a_source_that_does_not_compile_is_told_with_its_line(fresh_ranks: Ranks, tmp_path):
    for file in FOLDER.iterdir():
        (tmp_path / file.name).write_text(file.read_text().replace("output.store", "output.stow"))
    xs = [torch.ones(8, device=f"cuda:{rank}") for rank in range(fresh_ranks.world_size)]

    with pytest.raises(graphar.CompileError) as raised:
        fresh_ranks.communicator.allreduce(xs, algorithm=load(tmp_path / "pushed_sum.cu"))

    assert raised.value.file == str(tmp_path / "pushed_sum.cu")
    assert raised.value.line > 0


@pytest.mark.gpu(2, shared=True)
@on_ranks(2, by=run_on_gpus)
def test_processes_may_load_them_in_another_order(rank, world_size):
    """A record's number is that of its process."""
    if rank:
        load(threads=64)
    pushed_sum = load()
    assert pushed_sum.number == len(algorithms.Algorithm) + rank

    y = graphar.allreduce(torch.full((64,), 1.0 + rank, device="cuda"), algorithm=pushed_sum)

    assert y.tolist() == [3.0] * 64
