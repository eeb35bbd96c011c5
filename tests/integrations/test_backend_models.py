"""The process group backend "graphar" under models between processes on the CPU: training, inference, checkpoints."""

from __future__ import annotations

import importlib.util

import pytest

from tests.integrations.every_call import by_rank, check_program
from tests.integrations.models import MODELS, NEEDS

HERE = [name for name in MODELS if all(importlib.util.find_spec(one) for one in NEEDS.get(name, ()))]


@pytest.fixture(scope="module")
def of_ranks():
    return by_rank(2, "cpu:graphar", HERE)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_what_it_gives_elsewhere(of_ranks, name):
    if name not in HERE:
        pytest.skip(f"needs {' and '.join(NEEDS[name])}")
    check_program(of_ranks, name)
