"""Fixtures for tests of the kernels on the host."""

from __future__ import annotations

import pytest

from graphar.numerics import norms
from tests.host.build import NORM_SLOTS


@pytest.fixture(scope="session", autouse=True)
def kernel_cache():
    """Keeps the programs in the user's kernel cache, unlike other tests: they take longer to compile than to run."""


@pytest.fixture
def few_slots(monkeypatch):
    """Has the specification of norms add in the order of the simulated kernels, which have few slots."""
    monkeypatch.setattr(norms, "SLOTS", NORM_SLOTS)
