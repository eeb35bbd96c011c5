"""``constant_weight`` on its way from a call to a plan; test_scaled_skinny.py has what the kernel is told."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.plan.call import Call
from graphar.plan.tables import shipped_table
from graphar.plan.work import MATMUL_ALLREDUCE, Product
from graphar.product import products
from graphar.ranks import agreement
from graphar.runtime.watch.hook import watching
from tests import inside
from tests.cases import normal
from tests.processes import run_ranks

ROWS, COLUMNS, K = 4, 16, 24


def product(rows=ROWS, **how):
    return Product(MATMUL_ALLREDUCE, (rows, 0), COLUMNS, **how)


@pytest.mark.parametrize(("rows", "says"), [(ROWS, True), (8192, False)])
def test_the_reason_names_it_where_the_kernel_heeds_it(monkeypatch, rows, says):
    monkeypatch.setattr(products, "fused_launches", lambda *given: SimpleNamespace(plan=lambda reason: reason))
    engine = SimpleNamespace(table=shipped_table("nvidia_h200"), world_size=2)

    reasons = [
        products._fused(engine, Call(product(rows, constant_weight=said), torch.bfloat16, 0)) for said in (True, False)
    ]

    assert ["constant weight" in reason for reason in reasons] == [says, False]


def test_ranks_may_differ_in_it():
    calls = [Call(product(constant_weight=said), torch.bfloat16, 0) for said in (False, True)]

    assert calls[0] != calls[1]  # of one rank they have a plan each
    assert agreement.words(calls[0]) == agreement.words(calls[1])


def asked(op, *tensors, **options):
    """The works that a call of an op with lists asks engines for."""
    found = []
    with watching(lambda engine, call, ranks: contextlib.nullcontext(found.append(call.work))):
        op(*[[one, one.clone()] for one in tensors], **options)
    return found


@pytest.mark.parametrize("normed", [False, True])
def test_an_op_asks_for_what_its_caller_says(normed):
    a, w, weight = normal(0, ROWS * K, torch.float32).view(ROWS, K), torch.zeros(COLUMNS, K), torch.ones(COLUMNS)
    more = (torch.zeros(ROWS, COLUMNS), weight) if normed else ()
    op = inside.fused_matmul_allreduce_residual_rmsnorm if normed else inside.fused_matmul_allreduce

    for options in ({}, {"constant_weight": False}, {"constant_weight": True}):
        (work,) = asked(op, a, w, *more, **options)
        assert work.constant_weight is options.get("constant_weight", False)


def run_different_ranks(rank, world_size):
    """A call that ranks make differently, then one that one of them makes for the first time."""
    communicator = graphar.Communicator()
    a, w = normal(rank, ROWS * K, torch.float32).view(ROWS, K), normal(10 + rank, COLUMNS * K, torch.float32)
    return [
        inside.fused_matmul_allreduce(a, w.view(COLUMNS, K), constant_weight=said, group=communicator)
        for said in (rank == 0, False)
    ]


def test_processes_that_differ_in_it_get_the_same_sum():
    (first, again), *others = run_ranks(run_different_ranks, 2)

    assert torch.equal(first, again)
    assert all(torch.equal(first, one) for results in others for one in results)
