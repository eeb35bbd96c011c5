"""What the search leaves out makes no difference: small random programs have the same verdict and ends without it."""

import random

import pytest

from tests.model import programs as do
from tests.model.explore import Exploration, explore
from tests.model.machine import Machine
from tests.model.programs import Thread

WORDS = [(rank, f"word {i}") for rank in (0, 1) for i in (0, 1)]
FLAGS = [(rank, "flag") for rank in (0, 1)]
STAGE, MBARRIER = (0, "stage"), (0, "mbarrier")


def random_threads(seed: int) -> list[Thread]:
    """Three threads, two of them of one rank, each with two kernels of one to three operations."""
    rng = random.Random(seed)

    def operation():
        word, flag = rng.choice(WORDS), rng.choice(FLAGS)
        return rng.choice(
            [
                do.Store(word, "data"),
                do.Store(word, do.NOT_YET),
                do.Read((word,), ("data",), (word,)),
                do.Read((word,), ("data",), (word,)),
                do.Read((word,), ("data",)),
                do.Signal((flag,), rng.choice([1, 2]), release=rng.random() < 0.7),
                do.Signal(tuple(FLAGS), 1),
                do.Wait(flag, 1),
                do.Put(STAGE, "data"),
                do.Copy(STAGE, word, "data"),
                do.WaitForCopies(),
                do.Arrive(MBARRIER),
                do.WaitForPhase(MBARRIER, 0),
            ]
        )

    def program(name: str) -> tuple:
        kernels = []
        for call in (0, 1):
            kernels += [do.Begin(call), do.LeaveIfAborted(name, call), *(operation() for _ in range(rng.randint(1, 3)))]
        return tuple(kernels)

    return [Thread(name, rank, program(name)) for name, rank in (("a", 0), ("b", 0), ("c", 1))]


def last_states(found: Exploration) -> set:
    return {(state.at, state.memory, state.unread, state.aborted) for state in found.ends}


@pytest.mark.parametrize("options", [{}, {"deadlines": True}, {"deadlines": True, "dies": 1}])
def test_what_the_search_leaves_out_makes_no_difference(options):
    verdicts, states, reduced_states = [], 0, 0
    for seed in range(400):
        threads = random_threads(seed)
        everything, reduced = explore(Machine(threads, **options, reduced=False)), explore(Machine(threads, **options))
        assert bool(reduced.problem) == bool(everything.problem), f"seed {seed}: {reduced}\n{everything}"
        assert everything.problem or last_states(reduced) == last_states(everything), f"seed {seed}"
        verdicts.append(everything.problem)
        states, reduced_states = states + everything.states, reduced_states + reduced.states
    assert {"", "stuck"} <= set(verdicts)
    assert reduced_states < 0.7 * states
