"""``constant_weight`` on its way from a call to the kernel, and where it is dropped. Needs no GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.plan.algorithms import MATMUL_ARCH, Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.policy import Chip
from graphar.plan.slices import Slice
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import LAYOUTS, skinny_tile
from graphar.plan.work import MATMUL_ALLREDUCE, Product
from graphar.product import fused, products, tile_launches
from graphar.product.fused import FusedMatmul, fused_matmul
from graphar.product.operands import MatmulOperands, operands_of
from graphar.ranks import agreement
from graphar.runtime.arguments import MatmulArguments
from graphar.runtime.watch.hook import watching
from tests import inside
from tests.cases import normal
from tests.processes import run_ranks

ROWS, COLUMNS, K = 4, 16, 24
MEMBER = SimpleNamespace(rank=0, device=0)


def product(rows=ROWS, **how):
    return Product(MATMUL_ALLREDUCE, (rows, 0), COLUMNS, **how)


def operands(rows=ROWS, k=K, w=None):
    a = torch.zeros(rows, k, dtype=torch.bfloat16)
    w = torch.zeros(COLUMNS, k, dtype=torch.bfloat16) if w is None else w
    return Operands((a, w), (a.new_empty(rows, COLUMNS),))


# ---- to the kernel --------------------------------------------------------------------------------------------------


@pytest.fixture
def launches_of(monkeypatch):
    """The fused matmul of two ranks for a work; its launches are recorded, and bound to nothing."""
    monkeypatch.setattr(fused, "KernelLaunch", lambda function, parameters, grid: parameters)
    monkeypatch.setattr(fused, "bind_launch", lambda runner, member, launch, *rest: launch)
    monkeypatch.setattr(fused, "_why_not", lambda own: "")  # the operands are on the CPU
    monkeypatch.setattr(tile_launches, "tensor_map", lambda *given: None)
    functions = {(skinny_tile(ROWS), layout): None for layout in LAYOUTS}
    runner = SimpleNamespace(
        chip=Chip(132, MATMUL_ARCH),
        members=[MEMBER],
        kernels=SimpleNamespace(prepare_all=lambda *given: [functions]),
        arguments=lambda *given: None,
    )
    table = shipped_table("nvidia_h200")
    engine = SimpleNamespace(runner=runner, world_size=2, devices=None, table=table, deadline=lambda call: 1.0)

    def launches(work):
        call = Call(work, torch.bfloat16, 0)
        return fused_matmul(engine, call, Algorithm.MATMUL_ONE_SHOT)

    return launches


def told(launches: FusedMatmul, own: MatmulOperands) -> bool:
    """Whether a launch tells the kernel that the weight is constant."""
    placed = launches._place(own)
    (arguments,) = [
        one for one in launches._launch(MEMBER, placed, Slice(ROWS * COLUMNS)) if isinstance(one, MatmulArguments)
    ]
    return bool(arguments.constant_weight)


@pytest.mark.parametrize("constant_weight", [False, True])
def test_a_skinny_kernel_is_told_what_the_caller_said(launches_of, constant_weight):
    work = product(constant_weight=constant_weight)

    assert told(launches_of(work), operands_of(work, operands())) is constant_weight


def test_a_weight_that_is_copied_first_is_not_constant(launches_of):
    work = product(constant_weight=True)
    misaligned = torch.zeros(COLUMNS * K + 1, dtype=torch.bfloat16)[1:].view(COLUMNS, K)

    assert not told(launches_of(work), operands_of(work, operands(w=misaligned)))


def test_zeros_in_place_of_no_columns_are_not_constant(launches_of):
    work = product(constant_weight=True)

    assert not told(launches_of(work), operands_of(work, operands(k=0)))


def test_launches_at_equal_addresses_are_apart(launches_of):
    launches, own = launches_of(product()), operands_of(product(), operands())
    constant = operands_of(product(constant_weight=True), Operands((own.a, own.w), (own.out,)))

    assert [told(launches, one) for one in (own, constant, own)] == [False, True, False]


@pytest.mark.parametrize(("rows", "says"), [(ROWS, True), (8192, False)])
def test_the_reason_names_it_where_the_kernel_heeds_it(monkeypatch, rows, says):
    monkeypatch.setattr(products, "fused_matmul", lambda *given: SimpleNamespace(plan=lambda reason: reason))
    engine = SimpleNamespace(table=shipped_table("nvidia_h200"), world_size=2)

    reasons = [
        products._fused(engine, Call(product(rows, constant_weight=said), torch.bfloat16, 0)) for said in (True, False)
    ]

    assert ["constant weight" in reason for reason in reasons] == [says, False]


# ---- from calls -----------------------------------------------------------------------------------------------------


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
