"""Which algorithm adds as a tree, and which kernel it launches."""

import itertools
from dataclasses import replace

import pytest
import torch

import graphar
from graphar import UnsupportedError
from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.plan import select
from graphar.plan.algorithms import Algorithm, with_kernels
from graphar.plan.call import Call
from graphar.plan.config import kernel_of
from graphar.plan.grids import CLUSTERS
from graphar.plan.policy import Chip
from graphar.plan.select import Facts
from graphar.plan.slices import slices
from graphar.plan.tables import shipped_table
from graphar.plan.work import Norm, Parts, Sum
from graphar.runtime.catalogue import source_of
from tests.cases import KERNEL_DTYPES

NEGATED = form_to_prepare("-v")
SIZES = [1 << power for power in range(4, 32)]
TABLES = [shipped_table(name) for name in ("default", "nvidia_h200")]
FP32 = torch.float32
TREES = [one for op in ("allreduce", "reducescatter") for one in with_kernels(op) if one.row.adds_tree]


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

            assert config.algorithm in TREES
            limit = config.algorithm.row.limit(world_size)
            assert limit is None or nbytes <= limit
            assert "added as a tree" in reason
        _, (config, _) = choose(Parts("reducescatter", (nbytes,) * world_size, order="tree"), table, world_size)
        assert config.algorithm in TREES


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


@pytest.mark.parametrize("algorithm", TREES)
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


def trees_of(*given):
    """The kernels that calls need in addition, if they add as a tree."""
    others = set(select.needed_kernels(*given))
    return [one for one in select.needed_kernels(*given, trees=True) if one not in others]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("max_nbytes", [4096, 1 << 19, 1 << 31])
@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
def test_what_sums_as_a_tree_take_is_prepared_and_no_more(op, max_nbytes, symmetric):
    taken = set()
    for epilogue, out_dtype in itertools.product((None, NEGATED), (torch.bfloat16, FP32)):
        given = {"epilogue": epilogue, "order": "tree", "out_dtype": None if out_dtype == FP32 else out_dtype}
        for nbytes in {max_nbytes, *(one for one in SIZES if one <= max_nbytes)}:
            work = Sum(nbytes // 4, **given) if op == "allreduce" else Parts(op, (nbytes // 4,) * 4, **given)
            for is_direct, blocks in itertools.product({False, symmetric}, (None, TABLES[1].beside.blocks)):
                call, (config, _) = choose(work, blocks=blocks, symmetric=is_direct)
                taken.add(kernel_of(config, call))

    facts = Facts(4, TABLES[1], Chip(132, "sm_90a"))
    dtypes = (torch.bfloat16, FP32)
    found = trees_of(facts, [op], dtypes, max_nbytes, (), [NEGATED], symmetric)

    assert set(found) == taken
    assert len(set(found)) == len(found)


def normed(op, rows, columns, out_dtype, world_size=4):
    parts = (rows * columns,) if op == ALLREDUCE_NORM else (rows * columns,) * world_size
    return Norm(op, parts, columns, order="tree", out_dtype=out_dtype)


@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("op", [ALLREDUCE_NORM, REDUCESCATTER_NORM])
def test_the_sums_of_normed_rows_fit_their_slots_and_a_team_has_a_thread_for_each_pack_of_results(op, world_size):
    for out_dtype, columns in itertools.product(KERNEL_DTYPES, (8, 1024, 7168, 16384)):
        for rows in (1, 31, 132, 257, (64 << 20) // (4 * columns)):
            work = normed(op, rows, columns, out_dtype, world_size)
            assert select.has_kernel_for_rows(work, FP32)
            _, (config, reason) = choose(work, TABLES[1], world_size)
            packs, row = columns * out_dtype.itemsize // 16, config.algorithm.row
            step = slices(config.algorithm, world_size, work.parts, 4, columns)[0].count or (rows * columns,)
            owners = world_size if config.algorithm is Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT else 1
            threads, teams = config.threads * config.cluster, config.blocks // config.cluster
            assert -(-max(step) // columns // owners) * columns // 4 <= row.scratch(world_size).capacity
            assert threads >= min(packs, 1024 if config.cluster > 1 else 512)
            assert threads & (threads - 1) == 0
            assert owners == 1 or teams == rows or teams % owners == 0
            assert reason.endswith("; added as a tree")


def test_rows_of_whole_packs_in_both_dtypes_have_a_kernel():
    def have_kernel(columns, out_dtype):
        return select.has_kernel_for_rows(normed(ALLREDUCE_NORM, 1, columns, out_dtype), FP32)

    assert [have_kernel(columns, torch.bfloat16) for columns in (8, 12, 16384, 16392)] == [True, False, True, False]
    assert [have_kernel(columns, FP32) for columns in (8, 12, 16384, 16392)] == [True, True, True, False]


@pytest.mark.parametrize("op", [ALLREDUCE_NORM, REDUCESCATTER_NORM])
def test_the_kernel_of_a_norm_differs_by_the_results_dtype(op):
    call, (config, _) = choose(normed(op, 1, 1024, torch.bfloat16))
    plain, (config_in_order, _) = choose(normed(op, 1, 1024, None)._replace(order="rank"))

    name = f"{config.algorithm.value}<fp32, 4, {config.cluster}, like_input, TreeOrder, bf16>"
    assert source_of(kernel_of(config, call), 4).name == name
    in_order = f"{config.algorithm.value}<fp32, 4, {config_in_order.cluster}, like_input>"
    assert source_of(kernel_of(config_in_order, plain), 4).name == in_order
    assert source_of(kernel_of(replace(config, cluster=1), call), 4).minimum_arch == 80
    assert source_of(kernel_of(replace(config, cluster=2), call), 4).minimum_arch == 90


@pytest.mark.parametrize("op", [ALLREDUCE_NORM, REDUCESCATTER_NORM])
def test_what_norms_as_a_tree_take_is_prepared(op):
    facts, dtypes = Facts(4, TABLES[1], Chip(132, "sm_90a")), (torch.bfloat16, FP32)
    found = trees_of(facts, [op], dtypes, None)
    taken = set()
    for rows, columns, out_dtype in itertools.product((1, 8, 64, 4096), (64, 1024, 8192), dtypes):
        call, (config, _) = choose(normed(op, rows, columns, out_dtype))
        taken.add(source_of(kernel_of(config, call), 4))

    made = {source_of(kernel, 4) for kernel in found}
    assert taken <= made
    assert len(made) == len(found) == len(with_kernels(op)) * len(CLUSTERS) * len(dtypes)
    assert all("TreeOrder" in source.name for source in made)


def test_trees_of_other_numbers_of_ranks_are_not_prepared():
    with (
        graphar.Communicator(devices=["cpu"] * 3) as communicator,
        pytest.raises(ValueError, match="prepare: a tree of 8 leaves is for 1, 2, 4 or 8 ranks, got 3"),
    ):
        communicator.prepare(tp_invariant=True)
