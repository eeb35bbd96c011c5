"""Fixtures of the tests of Inductor's pass."""

import pytest

from graphar.graph import places
from tests.graph.graphs import PAYS


@pytest.fixture
def pays(monkeypatch):
    """Has the pass take all sizes of matmuls for faster as one op."""
    monkeypatch.setattr(places, "shipped_table", lambda name: PAYS)
