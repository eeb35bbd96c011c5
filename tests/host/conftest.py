"""What tests of the kernels on the host share."""

from __future__ import annotations

import pytest

from graphar.numerics import norms
from tests.host.build import NORM_SLOTS


@pytest.fixture
def few_slots(monkeypatch):
    """The specification of norms adds in the order of as few slots as the simulated kernels have."""
    monkeypatch.setattr(norms, "SLOTS", NORM_SLOTS)
