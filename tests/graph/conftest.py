"""Fixtures of the tests of Inductor's pass."""

import functools

import pytest

from graphar.graph import places
from tests.graph.graphs import PAYS
from tests.processes import run_ranks


@pytest.fixture
def pays(monkeypatch):
    """Has the pass take all sizes of matmuls for faster as one op."""
    monkeypatch.setattr(places, "shipped_table", lambda name: PAYS)


@pytest.fixture(scope="session")
def results_of():
    """Results of a function on two ranks, which run it once."""
    return functools.cache(lambda function: run_ranks(function, 2, timeout_s=400))
