"""Which algorithm adds as a tree, and which kernel it launches."""

from __future__ import annotations

import itertools

import pytest
import torch

import graphar
from graphar import UnsupportedError
from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.plan import select
from graphar.plan.algorithms import Algorithm, kernels_that, with_kernels, with_tree
from graphar.plan.call import Call
from graphar.plan.config import kernel_of
from graphar.plan.policy import Chip
from graphar.plan.select import Facts
from graphar.plan.tables import shipped_table
from graphar.plan.work import Parts, Sum
from graphar.runtime.catalogue import source_of
from tests.cases import KERNEL_DTYPES

NEGATED = form_to_prepare("-v")
SIZES = [1 << power for power in range(4, 32)]
TABLES = [shipped_table(name) for name in ("default", "nvidia_h200")]
FP32 = torch.float32


def choose(work, table=TABLES[1], world_size=4, **how):
    facts = Facts(world_size, table, Chip(132, "sm_90a"))
    call = Call(work, FP32, 0, **how)
    return call, select.select(call, facts)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_auto_adds_as_a_tree_in_a_kernel_at_every_size(table, world_size):
    for nbytes in SIZES:
        for blocks in (None, table.beside.blocks):
            _, (config, reason) = choose(Sum(nbytes // 4, order="tree"), table, world_size, blocks=blocks)

            assert config.algorithm in with_tree()
            limit = config.algorithm.row.limit(world_size)
            assert limit is None or nbytes <= limit
            assert "added as a tree" in reason
        _, (config, _) = choose(Parts("reducescatter", (nbytes,) * world_size, order="tree"), table, world_size)
        assert config.algorithm in with_tree("reducescatter")


def test_small_sums_take_the_algorithm_that_the_order_of_ranks_takes():
    for nbytes in (4096, 1 << 16, 1 << 19):
        as_tree, in_order = (choose(Sum(nbytes // 4, order=order))[1].config for order in ("tree", "rank"))

        assert as_tree == in_order


@pytest.mark.parametrize("algorithm", [*with_kernels("allreduce"), Algorithm.HIERARCHICAL])
def test_algorithms_by_name_add_as_a_tree_or_refuse(algorithm):
    work = Sum(1024, order="tree", out_dtype=torch.bfloat16)

    if algorithm.row.adds_tree:
        assert choose(work, algorithm=algorithm.value)[1].config.algorithm is algorithm
    else:
        with pytest.raises(UnsupportedError, match=f"{algorithm.value} has no kernel that adds as a tree; one_shot"):
            choose(work, algorithm=algorithm.value)


@pytest.mark.parametrize("algorithm", kernels_that(lambda row: row.adds_tree))
def test_the_kernel_of_a_tree_differs_by_the_results_dtype_and_has_the_epilogue(algorithm):
    names = set()
    for epilogue in (None, NEGATED):
        for out_dtype in KERNEL_DTYPES:
            given = {"epilogue": epilogue, "order": "tree", "out_dtype": None if out_dtype == FP32 else out_dtype}
            whole = algorithm.op == "allreduce"
            work = Sum(1024, **given) if whole else Parts(algorithm.op, (8, 8), **given)
            call, (config, _) = choose(work, algorithm=algorithm.value if whole else "auto")
            names.add(source_of(kernel_of(config, call), 4).name)

    assert len(names) == 6
    assert {name.rpartition(", ")[2] for name in names} == {"fp32>", "bf16>", "fp16>"}
    assert all("TreeOrder" in name for name in names)
    assert sum("Identity" in name for name in names) == 3


def test_explain_has_no_time_for_an_order_that_was_not_measured():
    facts = Facts(4, TABLES[1], Chip(132, "sm_90a"))
    times = [select.explain(Call(Sum(1024, order=order), FP32, 0), facts).expected_us for order in ("rank", "tree")]

    assert times[0] is not None
    assert times[1] is None


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("max_nbytes", [4096, 1 << 19, 1 << 31])
@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
def test_what_sums_as_a_tree_take_is_prepared_and_no_more(op, max_nbytes, symmetric):
    taken = set()
    for epilogue, out_dtype in itertools.product((None, NEGATED), (torch.bfloat16, FP32)):
        given = {"epilogue": epilogue, "order": "tree", "out_dtype": None if out_dtype == FP32 else out_dtype}
        for nbytes in {max_nbytes, *(one for one in SIZES if one <= max_nbytes)}:
            work = Sum(nbytes // 4, **given) if op == "allreduce" else Parts(op, (nbytes // 4,) * 4, **given)
            for sides, blocks in itertools.product(((), ("output",) * symmetric), (None, TABLES[1].beside.blocks)):
                call, (config, _) = choose(work, blocks=blocks, symmetric=sides)
                taken.add(kernel_of(config, call))

    facts = Facts(4, TABLES[1], Chip(132, "sm_90a"))
    dtypes = (torch.bfloat16, FP32)
    found = list(select.needed_kernels(facts, [f"{op}_tree"], dtypes, max_nbytes, (), [NEGATED], symmetric))

    assert set(found) == taken
    assert len(set(found)) == len(found)


def test_trees_of_other_numbers_of_ranks_are_not_prepared():
    with (
        graphar.Communicator(devices=["cpu"] * 3) as communicator,
        pytest.raises(ValueError, match="prepare: a tree of 8 leaves is for 1, 2, 4 or 8 ranks, got 3"),
    ):
        communicator.prepare(ops=["allreduce_tree"])
