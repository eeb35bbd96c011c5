"""All-gathers of tuples: how many launches a call takes, where GPUs have kernels, and what plans are kept for it."""

import pytest
import torch

import graphar
from graphar.plan.config import FALLBACK
from graphar.plan.work import Parts, TensorTuple
from graphar.runtime import engine as engines
from graphar.runtime.bind import collective
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Plan

FP8 = torch.float8_e4m3fn


@pytest.fixture
def launches(monkeypatch):
    """The calls that kernels would make, which copy each input to the begin of its output here. They are kept."""
    made = []

    def launch(ranks):
        for own in ranks:
            for one, target in zip(own.inputs, own.outputs, strict=True):
                target[: len(one)].view(torch.uint8).copy_(one.view(torch.uint8))

    def bind_kernel(engine, call, *_):
        made.append(call)
        return Plan(launch, FALLBACK)

    monkeypatch.setattr(collective, "bind", bind_kernel)
    monkeypatch.setitem(engines.binders, Parts, bind_kernel)
    monkeypatch.setattr(Engine, "why_no_kernel", lambda self, op, x: "")
    return made


@pytest.mark.parametrize(("tensors", "launched"), [(1, [1]), (2, [2]), (4, [4]), (5, [4, 1]), (9, [4, 4, 1])])
def test_four_tensors_of_each_rank_take_one_launch(launches, tensors, launched):
    xs = tuple([torch.full((2, at + 1), 10.0 * rank + at) for rank in range(2)] for at in range(tensors))

    found = graphar.allgather(xs)

    assert [len(one.work.dtypes) for one in launches] == launched
    for given, gathered in zip(xs, found, strict=True):
        assert [(y.shape, torch.equal(y[:2], x)) for x, y in zip(given, gathered, strict=True)] == [
            ((4, given[0].shape[1]), True)
        ] * 2


def test_a_second_call_of_a_process_runs_the_plan_of_the_first(launches, world_of_one):
    for turn in range(3):
        rows, scales = torch.full((3, 16), float(turn)).to(FP8), torch.full((2, 3), float(turn)).t()

        all_rows, all_scales = graphar.allgather((rows, scales))

        assert torch.equal(all_rows.float(), rows.float())
        assert torch.equal(all_scales, scales)
        assert all_scales.is_contiguous()
    (call,) = launches
    assert call.work == TensorTuple((FP8, torch.float32), ((16,), (2,)), (3,))
    assert call.work.parts == (48 + 32,)


def test_calls_of_other_shapes_have_plans_of_their_own(launches, world_of_one):
    for shapes in (((4, 8), (4, 2)), ((4, 2), (4, 8)), ((2, 8), (2, 2)), ((4, 8), (4, 2), (4, 2)), ((4, 8), (4, 1, 2))):
        found = graphar.allgather(tuple(map(torch.ones, shapes)))
        assert [tuple(y.shape) for y in found] == list(shapes)
    assert len(set(launches)) == len(launches) == 5


def test_only_calls_that_need_gradients_take_a_kernel_for_each_tensor(launches, world_of_one):
    rows, scales = torch.ones(2, 8), torch.ones(2, 1, requires_grad=True)

    with torch.no_grad():
        graphar.allgather((rows, scales))
    graphar.allgather((rows, scales))

    assert [isinstance(one.work, Parts) for one in launches] == [False, True, True]
