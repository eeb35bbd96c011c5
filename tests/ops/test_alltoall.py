"""All-to-all on the CPU: what its sizes mean beside torch's, what ranks are told that disagree, and Ulysses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.plan.call import Call
from graphar.plan.select import Facts, select
from graphar.plan.tables import shipped_table
from graphar.plan.work import Exchange
from graphar.runtime.arguments import ExchangeArguments
from tests.processes import run_ranks


def beside_torch(rank, world_size):
    ranks = range(world_size)
    sent, got = [[(rank + 2 * one) % 4 for one in ranks], [(one + 2 * rank) % 4 for one in ranks]]
    x = torch.arange(3 * sum(sent)).view(-1, 3) + 100 * rank
    wanted = torch.empty(sum(got), 3, dtype=x.dtype)
    dist.all_to_all_single(wanted, x, got, sent)
    return torch.equal(graphar.alltoall(x, sizes=(sent, got)), wanted)


def test_sizes_are_the_input_and_output_split_sizes_of_torch():
    assert run_ranks(beside_torch, 3) == [True] * 3


def unlike(rank, world_size):
    """What each rank is told of: other lengths between two ranks, a rank without sizes, and other dimensions."""
    received, ones, said = [1, 2, 2] if rank == 1 else [1] * 3, [1] * 3, []
    for call in (
        lambda group: graphar.alltoall(torch.ones(4), group, sizes=([1, 2, 1], received)),
        lambda group: graphar.alltoall(torch.ones(3), group, sizes=None if rank == 2 else (ones, ones)),
        lambda group: graphar.alltoall(torch.ones(3, 3), group, gather_dim=int(rank == 1)),
    ):
        with pytest.raises(graphar.CommunicatorError) as error:
            call(dist.new_group())
        said.append(str(error.value))
    return said


def test_ranks_that_disagree_are_told_how():
    for sizes, without, dims in run_ranks(unlike, 3):
        assert sizes.endswith("what others receive, got\nrank 0: 2 to rank 1\nrank 1: 1 from rank 0")
        assert "rank 1: alltoall of [*] torch.float32, sizes of each rank" in without
        assert "rank 2: alltoall of [3] torch.float32 " in without
        assert "rank 1: alltoall of [3, 3] torch.float32, scatter_dim 0, gather_dim 1" in dims


def choice_of(work, algorithm="auto", table="default", copies_from=None, symmetric=False):
    table = shipped_table(table)
    least = {4: copies_from} if copies_from else {}
    table = replace(table, copies=replace(table.copies, alltoall_from_nbytes=least))
    return select(Call(work, torch.bfloat16, 0, algorithm, symmetric=symmetric), Facts(4, table, table.chip))


COLUMNS = {"scatter_dim": 1, "gather_dim": 1}


def even(elements):
    return Exchange(1, (1,), ((elements,) * 4,), ((elements,) * 4,))


@pytest.mark.parametrize("table", ["default", "nvidia_h200"])
def test_small_equal_parts_travel_with_their_readiness_and_large_ones_in_chunks(table):
    small, large = (choice_of(even(elements), table=table).config for elements in (128 << 10, (128 << 10) + 1))

    assert small.algorithm == "alltoall_flagged"
    assert large.algorithm == "alltoall_push"


def test_parts_that_only_some_ranks_know_have_one_grid_on_every_rank():
    works = [Exchange(0, (1,), (own,), (own,), known=False) for own in ((0,) * 4, (1, 0, 0, 0), (1 << 20,) * 4)]

    configs = {choice_of(work).config for work in works}

    (config,) = configs
    assert config.algorithm == "alltoall_push"
    with pytest.raises(graphar.UnsupportedError, match="no rank knows all sizes; alltoall_push does"):
        choice_of(works[0], "alltoall_flagged")


HEADS = Exchange(1, (2, 1, 1, 64), ((8,) * 4,), ((8,) * 4,), 2, 1)
UNEVEN = Exchange(0, (1,), ((1, 2, 3, 4),) * 4, tuple((n,) * 4 for n in (1, 2, 3, 4)))


@pytest.mark.parametrize(
    "work", [HEADS, UNEVEN, even(4)._replace(known=False), even(4)._replace(row=(2, 1), **COLUMNS)]
)
def test_copy_engines_take_equal_parts_alone_that_follow_one_another(work):
    with pytest.raises(graphar.UnsupportedError, match="alltoall_copies cannot serve this call: it takes equal parts"):
        choice_of(work, "alltoall_copies")
    assert not choice_of(work, copies_from=1, symmetric=True).config.algorithm.row.copies


def test_equal_parts_travel_by_copy_engines_by_name_or_into_symmetric_outputs_from_a_size_of_the_table_on():
    by_name = choice_of(even(8)._replace(row=(1, 1), **COLUMNS), "alltoall_copies", symmetric=True)
    few, many = (1 << 19) - 1, 1 << 19
    small, large = (choice_of(even(elements), copies_from=1 << 20, symmetric=True) for elements in (few, many))
    through_scratch = choice_of(even(many), copies_from=1 << 20)

    assert (by_name.config.direct, large.config.direct) == (True, True)
    assert through_scratch.config.algorithm == "alltoall_push"
    assert by_name.reason.startswith("by copy engines, 1 block while ranks meet, asked for, shaped by table 'default'")
    assert by_name.reason.endswith("16 bytes, straight into the symmetric output")
    assert small.config.algorithm == "alltoall_push"
    assert (large.config.algorithm, large.config.blocks) == ("alltoall_copies", 1)
    assert large.reason.startswith("by copy engines, 1 block while ranks meet, chosen by table 'default' for 4 ranks")


def test_ranks_agree_on_words_without_lengths_of_their_own():
    works = [Exchange(rank, (1, 7), ((rank, 2),), ((rank, 2),), known=False) for rank in range(2)]

    assert {(work.amount(torch.int8), *work.options) for work in works} == {("[*, 7] torch.int8", "sizes of each rank")}


def test_heads_lie_in_runs_of_the_input_and_a_sequence_in_runs_of_the_result():
    arguments, heads = ExchangeArguments(), (8, 8)  # [2, 3, 16, 64] of rank 1, and [2, 7, 8, 64]
    work = Exchange(1, (2, 1, 1, 64), (heads,), ((4, 3),), 2, 1)
    arguments.describe(work, 0, 2)

    of_rank_0, of_rank_1 = arguments.sends[:2]
    assert work.shapes(0) == ([2, 3, 16, 64], [2, 7, 8, 64])
    assert (of_rank_0.begin, of_rank_0.nbytes, of_rank_0.run, of_rank_0.gap) == (0, 2 * 3 * 1024, 1024, 1024)
    assert (of_rank_1.begin, of_rank_1.whole, of_rank_1.run_packs) == (1024, 2 * 3 * 64, 64)
    from_0, from_1 = arguments.receives[:2]
    assert (from_0.begin, from_0.nbytes, from_0.run, from_0.gap) == (0, 2 * 4 * 1024, 4096, 3072)
    assert (from_1.begin, from_1.nbytes, from_1.run, from_1.gap) == (4096, 2 * 3 * 1024, 3072, 4096)
    assert arguments.most == 2 * 4 * 1024
