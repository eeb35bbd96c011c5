"""Warm eager calls of every op: they reach their launch in few Python calls, with the operands of the call before."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.runtime import engine as engines
from graphar.runtime.plan import Plan

MOST_CALLS = 8  # Python calls from the public op to the launch
BF16 = torch.bfloat16
ROWS, COLUMNS, K = 4, 16, 8


def zeros(*shape):
    return torch.zeros(shape, dtype=BF16)


A, W, BIAS, RESIDUAL, WEIGHT = zeros(ROWS, K), zeros(COLUMNS, K), zeros(COLUMNS), zeros(ROWS, COLUMNS), zeros(COLUMNS)
SUMMED = zeros(ROWS, COLUMNS)
SCALED = graphar.Epilogue("v * scale + bias[col]", scale=0.5, bias=BIAS)
OPS = {
    "allreduce": lambda group, **how: graphar.allreduce(SUMMED, group, **how),
    "allreduce, out": lambda group, **how: graphar.allreduce(SUMMED, group, out=torch.empty_like(SUMMED), **how),
    "allreduce, codec": lambda group, **how: graphar.allreduce(SUMMED, group, codec="int8", **how),
    "allreduce, residual": lambda group, **how: graphar.allreduce(
        SUMMED, group, codec="int8", residual=RESIDUAL, **how
    ),
    "allreduce, epilogue": lambda group, **how: graphar.allreduce(SUMMED, group, epilogue=SCALED, **how),
    "allreduce, expression": lambda group, **how: graphar.allreduce(SUMMED, group, epilogue="-v", **how),
    "allreduce, prefetch": lambda group, **how: graphar.allreduce(SUMMED, group, prefetch=W, **how),
    "reducescatter": lambda group, **how: graphar.reducescatter(SUMMED, group, **how),
    "reducescatter, codec": lambda group, **how: graphar.reducescatter(SUMMED, group, codec="int8", **how),
    "reducescatter, epilogue": lambda group, **how: graphar.reducescatter(SUMMED, group, epilogue=SCALED, **how),
    "allgather": lambda group, **how: graphar.allgather(SUMMED, group, **how),
    "allgather, sizes": lambda group, **how: graphar.allgather(SUMMED, group, sizes=[ROWS], **how),
    "allgather, tuple": lambda group, **how: graphar.allgather((SUMMED, A), group, **how),
    "allreduce_residual_rmsnorm": lambda group, **how: graphar.allreduce_residual_rmsnorm(
        SUMMED, RESIDUAL, WEIGHT, group=group, **how
    ),
    "reducescatter_residual_rmsnorm": lambda group, **how: graphar.reducescatter_residual_rmsnorm(
        SUMMED, RESIDUAL, WEIGHT, group=group, **how
    ),
    "fused_matmul_allreduce": lambda group, **how: graphar.fused_matmul_allreduce(A, W, group=group, **how),
    "fused_matmul_allreduce, out": lambda group, **how: graphar.fused_matmul_allreduce(
        A, W, group=group, out=torch.empty_like(SUMMED), **how
    ),
    "fused_matmul_allreduce, bias and epilogue": lambda group, **how: graphar.fused_matmul_allreduce(
        A, W, bias=BIAS, epilogue="relu(v)", group=group, **how
    ),
    "fused_matmul_reducescatter": lambda group, **how: graphar.fused_matmul_reducescatter(
        A, W, bias=BIAS, group=group, **how
    ),
    "fused_allgather_matmul": lambda group, **how: graphar.fused_allgather_matmul(
        A, W, gathered=True, group=group, **how
    ),
    "fused_matmul_allreduce_residual_rmsnorm": lambda group, **how: graphar.fused_matmul_allreduce_residual_rmsnorm(
        A, W, RESIDUAL, WEIGHT, group=group, **how
    ),
    "fused_matmul_reducescatter_residual_rmsnorm": lambda group, **how: (
        graphar.fused_matmul_reducescatter_residual_rmsnorm(A, W, RESIDUAL, WEIGHT, group=group, **how)
    ),
}


@pytest.fixture
def bound(communicator, monkeypatch):
    """The communicator, whose works of every kind are bound to a stand-in; and what it launched and how it ran."""
    machine = SimpleNamespace(launched=[], ran=[])

    def launch(inputs, outputs, numbers, corner=None):
        machine.launched.append((inputs, outputs, numbers))

    def bind(engine, call, ranks):
        return Plan(machine.ran.append, Config(Algorithm.ONE_SHOT_PUSH, 2, 32), launch_like=lambda own: launch)

    communicator.engine.plans.clear()
    for kind in engines.binders:
        monkeypatch.setitem(engines.binders, kind, bind)
    return communicator, machine


def python_calls(call):
    """The Python functions that are called until the launch, without lambdas, which stand in for functions of torch."""
    seen = []

    def profile(frame, event, argument):
        if event == "call":
            seen.append(frame.f_code.co_name)

    gc.collect()
    gc.disable()  # a collection of other tests' objects would call what awaits their end
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return [name for name in seen[: seen.index("launch")] if name != "<lambda>"]


@pytest.mark.parametrize("name", OPS)
def test_a_warm_call_of_every_op_reaches_its_launch_in_few_python_calls(bound, name):
    communicator, machine = bound
    for _ in range(3):
        OPS[name](communicator)
    ran = len(machine.ran)

    # Two more are the kernels' own: they write the operands' addresses, and a matmul's look up its tensor maps.
    calls = python_calls(lambda: OPS[name](communicator))

    assert len(machine.ran) == ran
    assert len(calls) + 2 <= MOST_CALLS, calls


@pytest.mark.parametrize("name", OPS)
def test_a_repeated_call_launches_with_the_operands_of_the_call_that_ran(bound, name):
    communicator, machine = bound
    for _ in range(3):
        OPS[name](communicator)
    (own,) = machine.ran[-1]

    result = OPS[name](communicator)

    ((inputs, outputs, numbers),) = machine.launched
    assert [one.data_ptr() for one in inputs] == [one.data_ptr() for one in own.inputs]
    assert numbers == own.numbers
    results = result if isinstance(result, tuple) else (result,)
    assert all(one is out for one, out in zip(results, outputs, strict=True))
    assert [(one.shape, one.dtype) for one in outputs] == [(one.shape, one.dtype) for one in own.outputs]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_with_a_layers_parameters_repeat_where_no_gradients_are_recorded(bound, mode):
    communicator, machine = bound
    weight, bias = torch.nn.Parameter(W.clone()), torch.nn.Parameter(BIAS.clone())
    with mode():
        for _ in range(4):
            y = graphar.fused_matmul_allreduce(A, weight, bias=bias, group=communicator)

    ((inputs, _, _),) = machine.launched
    assert [one.data_ptr() for one in inputs] == [one.data_ptr() for one in (A, weight, bias)]
    assert type(y) is torch.Tensor


def test_a_call_that_repeats_without_gradients_still_records_them_where_they_are_wanted(bound):
    communicator, machine = bound
    weight = torch.nn.Parameter(W.clone())
    with torch.no_grad():
        for _ in range(4):
            graphar.fused_matmul_allreduce(A, weight, group=communicator)

    y = graphar.fused_matmul_allreduce(A, weight, group=communicator)

    assert y.requires_grad
    assert len(machine.launched) == 1
