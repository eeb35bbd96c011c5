"""allreduce(prefetch=) and fused_matmul_allreduce(prefetch=): the hint is checked, reaches kernels, changes nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.ops import allreduce, matmul_allreduce
from graphar.plan import select
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.policy import Chip
from graphar.plan.select import Facts
from graphar.plan.slices import Slice
from graphar.plan.tables import shipped_table
from graphar.plan.work import Sum
from graphar.runtime import launcher, prefetch
from graphar.runtime.arguments import Arguments
from graphar.runtime.bind.collective import put_of
from graphar.runtime.bind.launches import bind_launch
from tests.cases import normal, same_bits
from tests.ops.conformance import world_of_one  # noqa: F401, a fixture
from tests.processes import run_ranks

ALLREDUCE, FUSED = allreduce.OP, matmul_allreduce.OP
H200 = shipped_table("nvidia_h200")
BUDGET_NBYTES, LARGEST_NBYTES = H200.prefetch.budget_nbytes, H200.prefetch.largest_nbytes


# ---- the ops --------------------------------------------------------------------------------------------------------


# ---- what is refused ------------------------------------------------------------------------------------------------


# ---- bits -----------------------------------------------------------------------------------------------------------

FOLLOWING = {
    "a transposed weight": torch.randn(5, 7).t(),
    "a parameter": torch.nn.Parameter(torch.randn(9)),
    "an empty tensor": torch.empty(0),
    "with gaps": torch.randn(8, 8)[:, ::2],
}


def sums_of_rank(rank, world_size):
    x, a, w = (normal(seed + rank, 40, torch.bfloat16).view(5, 8) for seed in (0, 10, 20))
    for following in FOLLOWING.values():
        yield graphar.allreduce(x, prefetch=following), graphar.allreduce(x)
        out = torch.empty_like(x)
        yield graphar.allreduce(x, out=out, prefetch=following), out
        given = {"codec": "int4"}, {"epilogue": "-v"}, {"algorithm": "fallback"}
        for more in given:
            yield graphar.allreduce(x, prefetch=following, **more), graphar.allreduce(x, **more)
        for more in ({}, {"codec": "int8"}, {"partition": "split_m", "num_partitions": 2}, {"partition": "tiles"}):
            fused = graphar.fused_matmul_allreduce
            yield fused(a, w, prefetch=following, **more), fused(a, w, **more)


def differing_bits(rank, world_size):
    return [same_bits(mine, expected) for mine, expected in sums_of_rank(rank, world_size)]


@pytest.mark.promise("A prefetch reads all of its tensor once, and changes no result.")
def test_between_processes_on_the_cpu_it_is_ignored():
    found = run_ranks(differing_bits, 2)

    assert found == [[0] * 9 * len(FOLLOWING)] * 2


# ---- gradients and compilers ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world_of_one")
def test_a_hint_that_wants_a_gradient_gets_none_and_gives_none():
    x, weight = torch.ones(3), torch.nn.Parameter(torch.ones(4))

    assert not graphar.allreduce(x, prefetch=weight).requires_grad
    (graphar.allreduce(x.requires_grad_(), prefetch=weight) * 2).sum().backward()
    sum(graphar.allreduce([x, x], prefetch=[weight, weight])).sum().backward()

    assert weight.grad is None
    assert x.grad.tolist() == [2 + 4] * 3


# ---- what kernels are given -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("begin", "end", "found"),
    [
        (4096, 8192, (4096, 4096)),
        (4098, 8190, (4112, 4064)),
        (4097, 4127, (4112, 0)),
        (4097, 4111, (4112, 0)),
        (4096, 4096 + 2 * BUDGET_NBYTES, (4096, BUDGET_NBYTES)),
    ],
)
def test_only_whole_packs_inside_a_tensor_are_fetched_up_to_the_budget(begin, end, found):
    assert prefetch.interior(begin, end, BUDGET_NBYTES) == found


def launched_with(following) -> tuple[int, int]:
    arguments = Arguments()
    prefetch.put(arguments, BUDGET_NBYTES, (None, following), (None,), (), None)
    return arguments.prefetch, arguments.prefetch_nbytes


def test_a_launch_is_told_the_memory_that_a_tensor_spans():
    whole = torch.empty(64, 64)
    assert whole.data_ptr() % 16 == 0

    assert launched_with(whole) == launched_with(whole.t()) == (whole.data_ptr(), whole.nbytes)
    assert launched_with(whole[1:, 1:]) == (whole[1, 4:].data_ptr(), whole.nbytes - 64 * 4 - 16)
    assert launched_with(whole[0, 0].expand(4096)) == (whole.data_ptr(), 0)
    assert launched_with(torch.empty(100, 0)) == (0, 0)


def test_a_launch_with_something_to_prefetch_is_made(monkeypatch):
    made, arguments, (x, out, following) = [], Arguments(), (torch.empty(64) for _ in range(3))
    member = SimpleNamespace(device=0, record=SimpleNamespace(kind=0), stream=3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 3, raising=False)
    monkeypatch.setattr(launcher, "launch_kernel", lambda: lambda *given: made.append(given) or 0)
    runner = SimpleNamespace(lock=threading.RLock(), symmetric=None)
    engine, call = SimpleNamespace(runner=runner, table=H200), call_of(2048)
    put = put_of(engine, call)(arguments, config_of(2048), Slice(call.work.numel))

    launch = bind_launch(runner, member, SimpleNamespace(arguments=(1, 2), stream=3), arguments, put)
    launch((x, following), (out,))

    assert made == [(1, 2)]
    assert (arguments.input, arguments.output) == (x.data_ptr(), out.data_ptr())
    assert (arguments.prefetch, arguments.prefetch_nbytes) == (following.data_ptr(), following.nbytes)


def call_of(nbytes, algorithm="auto", blocks=None, prefetches=True):
    return Call(Sum(nbytes // 2), torch.bfloat16, 0, algorithm, blocks=blocks, prefetches=prefetches)


def config_of(nbytes, algorithm="auto", arch="sm_90a", why_no_kernel="", blocks=None, prefetches=True):
    call = call_of(nbytes, algorithm, blocks, prefetches)
    return select.select(call, Facts(4, H200, Chip(132, arch), why_no_kernel)).config


@pytest.mark.parametrize("nbytes", [2, 2048, 1 << 20, LARGEST_NBYTES])
def test_small_sums_prefetch_on_all_sms_but_one_by_the_algorithm_they_have_without(nbytes):
    config = config_of(nbytes)

    assert config.prefetches
    assert config.algorithm.row.prefetches
    assert config.algorithm is config_of(nbytes, prefetches=False).algorithm
    assert config.blocks == 131


@pytest.mark.parametrize(
    "call",
    [
        {"nbytes": LARGEST_NBYTES + 2},
        {"nbytes": 2048, "algorithm": Algorithm.TWO_SHOT_PIPELINED.value},
        {"nbytes": 2048, "arch": "sm_80"},
        {"nbytes": 2048, "why_no_kernel": "the tensor is on the CPU"},
        {"nbytes": 2048, "algorithm": "fallback"},
        {"nbytes": 1 << 20, "blocks": 16},
    ],
    ids=str,
)
def test_what_cannot_prefetch_or_gains_nothing_is_chosen_as_without(call):
    assert not config_of(**call).prefetches
