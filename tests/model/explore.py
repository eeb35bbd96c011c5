"""Exhaustive search of a small model: every state that any order of its moves can reach, the nearest first.

A model has these methods, and its states are hashable. Every move goes forward: no run comes to a state twice, so each
of them ends if no state is stuck.

    start()        the first state
    moves(state)   every (move, next state) that may come next; a Violation in place of a state breaks an invariant
    ended(state)   whether a run may stop here
    describe(state, move), where(state)   lines for people: a move, and what each thread waits for
"""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True)
class Violation:
    """An invariant that a move breaks."""

    what: str


@dataclass(frozen=True)
class Exploration:
    """What a search found.

    Attributes:
        states: how many were reached.
        ends: those of them in which a run ended.
        problem: what is wrong; empty if nothing is.
        trace: a shortest run to it, one line a move.
    """

    states: int
    ends: tuple[Hashable, ...]
    problem: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        clean = f"no problem in {self.states} states, {len(self.ends)} of them ends"
        return "\n".join([self.problem or clean, *self.trace])


def explore(model) -> Exploration:
    """Searches breadth first for a broken invariant, or a state that is no end and has no further move."""
    start = model.start()
    parents: dict[Hashable, tuple | None] = {start: None}
    queue, ends = [start], []

    def found(problem: str = "", *trace: str) -> Exploration:
        return Exploration(len(queue), tuple(ends), problem, trace)

    for state in queue:  # grows meanwhile
        moves = model.moves(state)
        for move, after in moves:
            if isinstance(after, Violation):
                return found(after.what, *_trace(model, parents, state), model.describe(state, move))
            if after not in parents:
                parents[after] = (state, move)
                queue.append(after)
        if not moves and not model.ended(state):
            return found("stuck", *_trace(model, parents, state), *model.where(state))
        if not moves:
            ends.append(state)
    return found()


def _trace(model, parents: dict, state: Hashable) -> tuple[str, ...]:
    lines = []
    while parents[state] is not None:
        state, move = parents[state]
        lines.append(model.describe(state, move))
    return tuple(reversed(lines))


def assert_holds(model, states: int, one_end: bool = True) -> None:
    """Every run of a model keeps its invariants and ends, and the model is no smaller than it was meant to be.

    Args:
        model: what is searched.
        states: how many it has, at least.
        one_end: whether all orders lead to the same end; else there are several.
    """
    found = explore(model)
    assert not found.problem, str(found)
    assert found.states >= states, f"{found} are too few to have covered what {states} did"
    assert (len(found.ends) == 1) is one_end, str(found)


def assert_caught(model, symptom: str) -> None:
    """Some run of a model that has a fault shows it."""
    found = explore(model)
    assert symptom in found.problem, f"{symptom!r} was to be seen; {found}"
