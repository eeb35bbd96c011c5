"""Calls that graphar does not make as they are: right data, or an error that says what to do."""

import pickle
import re
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphar
from graphar.nn import ColumnParallelLinear, RowParallelLinear
from tests.processes import on_ranks, run_ranks

OPS = ("allreduce", "reducescatter", "allgather")


def of_rank(rank: int) -> torch.Tensor:
    return torch.arange(6.0) + rank


def strided_nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)


def over_a_destroyed_group(rank):
    group = dist.new_group([0, 1])
    graphar.allreduce(of_rank(rank), group)
    dist.destroy_process_group(group)
    graphar.allreduce(of_rank(rank), group)


def differentiated(transform, op):
    return lambda rank: transform(lambda x: getattr(graphar, op)(x).sum())(of_rank(rank))


WITH_ADVICE = {
    "a destroyed group": (
        over_a_destroyed_group,
        "CommunicatorError: allreduce: .* destroyed; make another by .*new_gr",
    ),
    "a whole input of row-parallel features": (
        lambda rank: RowParallelLinear(nn.Linear(6, 4))(of_rank(rank)),
        r"ValueError: RowParallelLinear: takes 3 features on each rank, got 6; pass this rank's part, x.chunk\(2, -1\)",
    ),
    "a part of the input of column-parallel features": (
        lambda rank: ColumnParallelLinear(nn.Linear(6, 4))(of_rank(rank)[:3]),
        "ValueError: ColumnParallelLinear: takes 6 features on each rank, got 3$",
    ),
}
for _op in OPS:
    for _name in ("grad", "jacrev"):
        _advice = rf"NotImplementedError: {_op}: torch.func.grad cannot .* use torch.autograd.grad\(\) or backward\(\)"
        WITH_ADVICE[f"torch.func.{_name} of {_op}"] = differentiated(getattr(torch.func, _name), _op), _advice
    WITH_ADVICE[f"{_op} of a strided nested tensor"] = (
        lambda rank, op=_op: getattr(graphar, op)(strided_nested()),
        rf"TypeError: {_op}: x must be a dense \(strided\) tensor, got a nested tensor; pass its values\(\)",
    )


def make_every_misuse(rank, world_size):
    said = {}
    for name, (call, _) in WITH_ADVICE.items():
        try:
            said[name] = f"returned {call(rank)}"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


@pytest.fixture(scope="module")
def of_ranks():
    return run_ranks(make_every_misuse, 2)


@pytest.mark.parametrize("name", WITH_ADVICE)
def test_an_error_says_what_to_do(of_ranks, name):
    for said in of_ranks:
        assert re.match(WITH_ADVICE[name][1], said[name]), said[name]


@on_ranks(2)
def test_a_meta_tensor_gives_the_shape_of_the_result(rank, world_size):
    x = torch.empty(6, device="meta")
    assert [(getattr(graphar, op)(x).device.type, *getattr(graphar, op)(x).shape) for op in OPS] == [
        ("meta", 6),
        ("meta", 3),
        ("meta", 12),
    ]


def test_vmap_of_a_list_makes_a_call_for_each_slice():
    x, y = torch.arange(6.0).view(2, 3), torch.arange(6.0).view(3, 2) + 1

    first, second = torch.vmap(lambda x, y: tuple(graphar.allreduce([x, y])), in_dims=(0, 1))(x, y)

    assert torch.equal(first, x + y.t())
    assert torch.equal(second, x + y.t())


@on_ranks(2)
def test_two_threads_with_equal_sizes_on_one_group_are_told_to_take_two_groups(rank, world_size):
    communicator, both_begin, said = graphar.Communicator(timeout_s=2), threading.Barrier(2), []

    def call(value):
        both_begin.wait()
        try:
            for _ in range(1000):
                communicator.allreduce(torch.full((5000,), value))
        except graphar.ConcurrentCallError as error:
            said.append(str(error))

    threads = [threading.Thread(target=call, args=(value,)) for value in (1.0, 2.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 2
    assert all("give each thread a process group of its own, by torch.distributed.new_group()" in one for one in said)


@on_ranks(2)
def test_a_hook_can_be_pickled(rank, world_size):
    torch.manual_seed(0)
    hook = pickle.loads(pickle.dumps(graphar.ddp.exact_hook()))
    model = DistributedDataParallel(nn.Linear(6, 1))
    model.register_comm_hook(None, hook)
    model(of_rank(rank)).sum().backward()
    assert model.module.weight.grad.flatten().tolist() == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
