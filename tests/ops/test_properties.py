"""Whatever is called in whatever order, every rank gets the specification's bits: all ranks on this CPU."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import graphar
from tests.strategies import calls, make_and_check


@pytest.mark.promise("Long sequences of mixed calls stay right, and memory does not grow.")
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_sequence_of_calls_gives_the_specification(world_size, data):
    sequence = data.draw(st.lists(calls(world_size, ["auto", "fallback"], most=4096), min_size=1, max_size=4))

    with graphar.Communicator(devices=["cpu"] * world_size) as communicator:
        for call in sequence:
            make_and_check(call, communicator)
