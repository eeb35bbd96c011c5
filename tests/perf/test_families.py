"""perf's methods: available ones are measured. One that fails is left out on every rank, with the reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.numerics.lossless_reference import MOST_ODD, odd_elements
from graphar.plan.sizes import KB
from graphar.plan.tables import shipped_table
from perf.harness.cases import Case, Plan
from perf.harness.ranks import InProcessRanks, ProcessRanks
from perf.harness.sweep import measure
from perf.peers import catalogue
from perf.peers.catalogue import make_graphar, make_methods
from perf.peers.methods import Family, Method
from tests.processes import run_ranks

PLAN = Plan("cpu", 3, "list", ("bfloat16",), ("graphar", "fast", "faster"), 2048)


def failing(plan, *ranks):
    raise ModuleNotFoundError("No module named 'fast'")


def made(plan, ranks):
    return [Method("fast", graphar.allreduce, exact=True), Method("faster", graphar.allreduce, exact=True)]


def use(monkeypatch, family):
    monkeypatch.setattr(catalogue, "FAMILIES", (family,))
    monkeypatch.setattr(catalogue, "OF_A_FAMILY", set(family.names))


def test_a_family_brings_the_methods_that_were_asked_for(monkeypatch):
    use(monkeypatch, Family(("fast", "faster"), made))

    methods, skipped = make_methods(replace(PLAN, methods=("faster", "graphar")), InProcessRanks(3))

    assert [method.name for method in methods] == ["faster", "graphar"]
    assert skipped == []


@pytest.mark.parametrize("stage", ["load", "make"])
def test_a_family_that_cannot_be_had_is_named_with_the_reason(monkeypatch, stage):
    stages = {"load": {"make": made, "load": failing}, "make": {"make": failing}}
    use(monkeypatch, Family(("fast", "faster"), **stages[stage]))

    methods, skipped = make_methods(PLAN, InProcessRanks(3))

    assert [method.name for method in methods] == ["graphar"]
    assert skipped == ["fast, 3 ranks: No module named 'fast'", "faster, 3 ranks: No module named 'fast'"]


def test_a_family_is_not_tried_on_ranks_its_kernels_do_not_serve(monkeypatch):
    use(monkeypatch, Family(("fast",), failing, failing, world_sizes=(2, 4)))

    _, skipped = make_methods(PLAN, InProcessRanks(3))

    assert skipped == ["fast, 3 ranks: its kernels serve 2, 4 ranks"]


def test_every_method_for_gpus_is_made_somewhere():
    made_alone = {"graphar", "graphar_out", "nccl"}

    assert set(catalogue.CUDA_METHODS) == catalogue.OF_A_FAMILY | made_alone


def test_without_symmetric_tensors_of_graphar_there_is_no_method_for_them(monkeypatch):
    monkeypatch.delattr(graphar, "empty", raising=False)

    methods, skipped = make_methods(replace(PLAN, methods=("graphar_symmetric",)), InProcessRanks(3))

    assert methods == []
    assert skipped == ["graphar_symmetric, 3 ranks: module 'graphar' has no attribute 'empty'"]


def test_symmetric_tensors_of_graphar_are_input_and_output_in_turn(monkeypatch):
    calls = []
    monkeypatch.setattr(graphar, "empty", lambda numel, dtype: torch.empty(numel, dtype=dtype), raising=False)
    monkeypatch.setattr(graphar, "allreduce", lambda x, out: calls.append((x.data_ptr(), out.data_ptr())) or out)

    (method,) = catalogue.make_symmetric(PLAN, InProcessRanks(3))
    result = method.call(method.call(method.buffer[:8]))

    assert calls[1] == calls[0][::-1]
    assert result.data_ptr() == method.buffer.data_ptr()


class GpuRanks(InProcessRanks):
    device = torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "world_size", "lossless", "reason"),
    [
        ("bfloat16", 4, True, ""),
        ("float16", 4, True, "only bfloat16 is compressed without loss"),
        ("bfloat16", 5, True, "graphar compresses nothing without loss here"),
        ("bfloat16", 4, False, "graphar compresses nothing without loss here"),
    ],
)
def test_arbitrary_bits_are_measured_where_they_may_be_compressed(monkeypatch, dtype, world_size, lossless, reason):
    engine = SimpleNamespace(table=shipped_table("nvidia_h200"), lossless=lossless)
    monkeypatch.setattr(graphar, "explain", lambda x: None)
    monkeypatch.setattr(catalogue, "engine_of_group", lambda name: engine)
    plan = replace(PLAN, world_size=world_size, dtypes=(dtype,), methods=("graphar_any_bits",))

    methods, skipped = make_methods(plan, GpuRanks(world_size))

    assert skipped == ([f"graphar_any_bits, {world_size} ranks: {reason}"] if reason else [])
    least = engine.table.lossless.least("allreduce", 4)
    assert [method.min_nbytes for method in methods] == ([] if reason else [least])


def test_arbitrary_bits_differ_by_rank_and_do_not_compress():
    first, second = (catalogue.any_bits(torch.empty(1 << 20), rank) for rank in range(2))

    assert first.isfinite().all()
    assert not torch.equal(first, second)
    assert int(odd_elements(first).min()) > MOST_ODD


def test_a_method_with_data_of_its_own_is_timed_and_verified_with_them():
    seen = []
    case = Case(world_size=2, form="list", mode="cpu", dtype="bfloat16", nbytes=2 * KB)
    method = replace(make_graphar(), call=lambda xs: seen.append(xs) or graphar.allreduce(xs))
    rows, _ = measure(case, [replace(method, data=lambda xs: [torch.full_like(x, 3) for x in xs])], InProcessRanks(2))

    assert [row.wrong for row in rows] == [0]
    assert all((x == 3).all() for xs in seen for x in xs)


def process_ranks():
    return ProcessRanks(torch.device("cpu"), dist.distributed_c10d._get_default_store())


def set_up_once(rank, world_size, failing_rank, stage):
    """Why a family that fails on one rank is left out, and what the next measurement finds."""

    def fail(plan, *_):
        if rank == failing_rank:
            raise RuntimeError("out of order")
        return [Method("fast", graphar.allreduce)]

    family = Family(("fast",), fail if stage == "make" else made, fail if stage == "load" else lambda plan: None)
    plan = replace(PLAN, world_size=2, form="process", methods=("fast",))
    ranks = process_ranks()
    methods, reason = catalogue.set_up(family, plan, ranks)
    case = Case(world_size=2, form="process", mode="cpu", dtype="bfloat16", nbytes=2 * KB)
    rows, _ = measure(case, [make_graphar()], ranks)
    return len(methods), reason, rows[0].wrong


@pytest.mark.parametrize("stage", ["load", "make"])
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_family_that_fails_on_one_rank_is_left_out_on_all_and_the_run_goes_on(stage, failing_rank):
    elsewhere = "out of order" if (failing_rank, stage) == (0, "load") else "refused on another rank"
    reasons = [elsewhere, elsewhere]
    reasons[failing_rank] = "out of order"

    assert run_ranks(set_up_once, 2, failing_rank, stage) == [(0, reason, 0) for reason in reasons]


def order_of_work(rank, world_size):
    ranks, done = process_ranks(), []
    ranks.first_rank_first(lambda: done.append(ranks._store.add("work", 1)))
    return done


def test_the_first_rank_works_before_the_others():
    assert run_ranks(order_of_work, 2) == [[1], [2]]
