"""Exhaustive search of a small model: every state that any order of its moves can reach, the nearest first.

A model has three methods, and its states are hashable:

    start()        the first state
    moves(state)   every (move, next state) that may come next; a Violation in place of a state breaks an invariant
    ended(state)   whether a run may stop here
    describe(state, move)   a line for people
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
        problem: what is wrong; empty where nothing is.
        trace: a shortest run to it, one line a move.
    """

    states: int
    problem: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([self.problem or f"no problem in {self.states} states", *self.trace])


def explore(model) -> Exploration:
    """Searches breadth first for a broken invariant, a state with no way on, or one from which no run can end."""
    start = model.start()
    parents: dict[Hashable, tuple | None] = {start: None}
    queue, edges = [start], []
    for state in queue:  # grows meanwhile
        stuck = True
        for move, after in model.moves(state):
            stuck = False
            if isinstance(after, Violation):
                return Exploration(len(queue), after.what, (*_trace(model, parents, state), model.describe(state, move)))
            edges.append((after, state))
            if after not in parents:
                parents[after] = (state, move)
                queue.append(after)
        if stuck and not model.ended(state):
            return Exploration(len(queue), "stuck", (*_trace(model, parents, state), *model.where(state)))
    endless = _first_without_end(queue, edges, model)
    if endless is not None:
        return Exploration(len(queue), "no run ends from here", _trace(model, parents, endless))
    return Exploration(len(queue))


def _first_without_end(states: list, edges: list[tuple], model) -> Hashable | None:
    """The first state from which no sequence of moves leads to an end."""
    before: dict[Hashable, list] = {}
    for after, state in edges:
        before.setdefault(after, []).append(state)
    reached = [state for state in states if model.ended(state)]
    can_end = set(reached)
    for state in reached:  # grows meanwhile
        for earlier in before.get(state, ()):
            if earlier not in can_end:
                can_end.add(earlier)
                reached.append(earlier)
    return next((state for state in states if state not in can_end), None)


def _trace(model, parents: dict, state: Hashable) -> tuple[str, ...]:
    lines = []
    while parents[state] is not None:
        state, move = parents[state]
        lines.append(model.describe(state, move))
    return tuple(reversed(lines))
