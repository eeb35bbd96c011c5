"""Exhaustive search of a small model: every state that any order of its moves can reach, the nearest first.

A model has these methods, and its states are hashable. Every move goes forward: no run comes to a state twice, so each of
them ends if no state is stuck.

    start()        the first state
    moves(state)   every (move, next state) that may come next; a Violation in place of a state breaks an invariant
    ended(state)   whether a run may stop here
    describe(state, move), where(state)   lines for people: a move, and what each thread waits for
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """What a move may not do, and this one does."""

    what: str


@dataclass(frozen=True)
class Exploration:
    """What a search found.

    Attributes:
        states: how many were reached.
        ends: in how many of them a run ended.
        problem: what is wrong; empty where nothing is.
        trace: a shortest run to it, one line a move.
    """

    states: int
    ends: int
    problem: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.problem or f"no problem in {self.states} states, {self.ends} of them ends", *self.trace])


def explore(model) -> Exploration:
    """Searches breadth first for a broken invariant, or a state that is no end and has no way on."""
    start = model.start()
    parents: dict[Hashable, tuple | None] = {start: None}
    queue, ends = [start], 0
    for state in queue:  # grows meanwhile
        stuck = True
        for move, after in model.moves(state):
            stuck = False
            if isinstance(after, Violation):
                trace = (*_trace(model, parents, state), model.describe(state, move))
                return Exploration(len(queue), ends, after.what, trace)
            if after not in parents:
                parents[after] = (state, move)
                queue.append(after)
        if model.ended(state):
            ends += 1
        elif stuck:
            return Exploration(len(queue), ends, "stuck", (*_trace(model, parents, state), *model.where(state)))
    return Exploration(len(queue), ends)


def _trace(model, parents: dict, state: Hashable) -> tuple[str, ...]:
    lines = []
    while parents[state] is not None:
        state, move = parents[state]
        lines.append(model.describe(state, move))
    return tuple(reversed(lines))


def assert_holds(model, states: int) -> None:
    """Every run of a model keeps its invariants and ends, and the model is no smaller than it was meant to be.

    Args:
        model: what is searched.
        states: how many it has, at least.
    """
    found = explore(model)
    assert not found.problem, str(found)
    assert found.ends > 0, "no run ends"
    assert found.states >= states, f"{found.states} states are too few to have covered what {states} did"


def assert_caught(model, symptom: str) -> None:
    """Some run of a model that has a fault shows it."""
    found = explore(model)
    assert symptom in found.problem, f"{symptom!r} was to be seen; {found}"
