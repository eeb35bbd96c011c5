"""The process group backend "graphar" under models between processes on the CPU: training, inference, checkpoints."""

import pytest

from tests.integrations.every_call import by_rank, check_program
from tests.integrations.models import MODELS


@pytest.fixture(scope="module")
def of_ranks():
    return by_rank(2, "cpu:graphar", list(MODELS))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_what_it_gives_elsewhere(of_ranks, name):
    check_program(of_ranks, name)
