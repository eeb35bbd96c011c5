"""Whatever is called in whatever order, every GPU gets the specification's bits: all exact algorithms, one process."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gpu import EXACT_ALGORITHMS, Ranks
from tests.strategies import calls, make_and_check

pytestmark = pytest.mark.gpu

few = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.mark.promise("Any number of elements works: 0, odd, and more than 2^31.")
@few
@given(data=st.data())
def test_any_sequence_of_calls_gives_the_specification(ranks: Ranks, data):
    algorithms = ["auto", "fallback", *EXACT_ALGORITHMS]
    sequence = data.draw(st.lists(calls(ranks.world_size, algorithms, most=1 << 17), min_size=1, max_size=6))

    for call in sequence:
        make_and_check(call, ranks.communicator)


@pytest.mark.parametrize("algorithm", EXACT_ALGORITHMS)
@few
@given(data=st.data())
def test_one_algorithm_takes_sizes_in_any_order(ranks: Ranks, algorithm, data):
    one = calls(ranks.world_size, [algorithm], most=1 << 16)

    for call in data.draw(st.lists(one, min_size=2, max_size=4)):
        make_and_check(call, ranks.communicator)
