"""The process group backend "graphar" between processes on the CPU: every entry point, its route and its results."""

from __future__ import annotations

import re

import pytest

from tests.integrations.entry_points import ENTRIES
from tests.integrations.every_call import FOR_ONE_RANK, by_rank, check, check_entry, check_program
from tests.integrations.programs import PROGRAMS
from tests.pages import FOLDER


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
