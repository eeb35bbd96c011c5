"""Algorithms from outside the package among the builtin ones: found by name, and by the number in a record."""

import copy
import pickle

import pytest

from graphar.plan import algorithms
from graphar.plan.algorithms import ROWS, Algorithm

pytestmark = pytest.mark.usefixtures("nothing_stays_loaded")

ROW = ROWS[Algorithm.ONE_SHOT_PUSH]


def test_an_algorithm_from_outside_is_found_by_its_name():
    ring = algorithms.add("ring", "0123456789ab", ROW)

    assert ring == ring.value == "ring@0123456789ab"
    assert Algorithm("ring@0123456789ab") is ring
    assert (ring.row, ring.op, ring.kernel_name) == (ROW, "allreduce", "ring")


def test_a_record_names_it_by_a_number_after_the_builtin_ones():
    first, second = (algorithms.add("ring", digest, ROW) for digest in ("one", "two"))

    assert (first.number, second.number) == (len(Algorithm), len(Algorithm) + 1)
    assert [algorithms.of_number(one.number) for one in (first, second)] == [first, second]
    assert [algorithms.of_number(one.number) for one in Algorithm] == list(Algorithm)


def test_it_is_no_builtin_one():
    ring = algorithms.add("ring", "one", ROW)

    assert ring not in list(Algorithm)
    assert not hasattr(Algorithm, "ring")
    assert algorithms.is_from_outside(ring)
    assert not any(map(algorithms.is_from_outside, Algorithm))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_the_algorithm_itself(copied):
    ring = algorithms.add("ring", "one", ROW)

    assert copied(ring) is ring


def test_one_that_is_not_loaded_is_refused_in_these_words():
    with pytest.raises(ValueError, match=r"'ring@one' is not loaded in this process; graphar\.load_algorithm loads it"):
        Algorithm("ring@one")

    with pytest.raises(ValueError, match="'ring' is not a valid Algorithm"):
        Algorithm("ring")
