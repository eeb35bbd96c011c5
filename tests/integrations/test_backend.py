"""The process group backend "graphar" between processes on the CPU: every entry point, its route and its results."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.integrations.entry_points import ENTRIES
from tests.integrations.every_call import FOR_ONE_RANK, by_rank, check, check_entry, check_program
from tests.integrations.programs import PROGRAMS
from tests.pages import FOLDER
from tests.processes import run_ranks


@pytest.fixture(scope="module")
def of_ranks():
    return by_rank(4, "cpu:graphar", [*ENTRIES, *PROGRAMS])


@pytest.fixture(scope="module")
def of_one_rank():
    return by_rank(1, "cpu:graphar", FOR_ONE_RANK)


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_point_gives_what_gloo_gives(of_ranks, name):
    check_entry(of_ranks, name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_what_it_gives_elsewhere(of_ranks, name):
    check_program(of_ranks, name)


@pytest.mark.parametrize("name", FOR_ONE_RANK)
def test_a_group_of_one_rank_gives_what_gloo_gives(of_one_rank, name):
    check(of_one_rank, name)


def test_the_page_says_where_every_entry_point_goes(of_ranks):
    text = (FOLDER / "backend.md").read_text()
    rows = dict(re.findall(r"^\| (.*?) \| (graphar|gloo or NCCL) \|$", text, re.MULTILINE))

    routes = {(ENTRIES[name].row, found[name].route) for found in of_ranks for name in ENTRIES}

    assert routes == set(rows.items())


def gather_in_place(rank, world_size):
    out = torch.zeros(3 * world_size)
    own = out[3 * rank :][:3].fill_(rank + 1)
    with mock.patch("torch.Tensor.clone", side_effect=AssertionError("the input was copied")):
        dist.all_gather_into_tensor(out, own)
    return out.tolist()


def test_an_all_gather_in_place_copies_nothing():
    for gathered in run_ranks(gather_in_place, 3, backend="cpu:graphar"):
        assert gathered == [1, 1, 1, 2, 2, 2, 3, 3, 3]
