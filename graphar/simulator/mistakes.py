"""What is wrong with the outcome of a simulation, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from graphar.runtime.arguments import Record
from graphar.simulator.simulation import Outcome

# Kinds of records, as in cuda_src/device/sync/record.cuh.
TIMED_OUT, OVERLAPPED, DISAGREED = 1, 2, 3


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong.

    Attributes:
        what: in words.
        call: in which call, counted from 0; None if that is not known.
        step: the number of the scheduler's step at which it happened, or by which it had.
    """

    what: str
    call: int | None
    step: int


def mistakes(expected: Sequence[Sequence[torch.Tensor]], outcomes: Sequence[Outcome]) -> list[Mistake]:
    """Returns all that is wrong, in the order in which it happened.

    Args:
        expected: what each rank must get, by call and rank.
        outcomes: what came out, by rank.
    """
    found = []
    for rank, outcome in enumerate(outcomes):
        if outcome.record.kind:
            call = sum(end < outcome.gave_up_at for end in outcome.ended_at)
            found.append(Mistake(_given_up(rank, call, outcome.record), call, outcome.gave_up_at))
        for call, by_rank in enumerate(expected):
            what = _difference(outcome.results[call], by_rank[rank])
            if what:
                found.append(Mistake(f"rank {rank}, call {call}: {what}", call, outcome.ended_at[call]))
        for what in _beside(outcome):
            found.append(Mistake(f"rank {rank}: {what}", None, outcome.ended_at[-1]))
    return sorted(found, key=lambda one: one.step)


def _given_up(rank: int, call: int, record: Record) -> str:
    where = f"rank {rank}, call {call}, block {record.block}"
    if record.kind == OVERLAPPED:
        return f"{where}: began while another call ran"
    values = f"0x{record.expected:x}", f"0x{record.seen:x}"
    if record.kind == DISAGREED:
        return f"{where}: calls {values[0]} where rank {record.peer} calls {values[1]}"
    return f"{where}: waited for rank {record.peer} until the deadline; expected {values[0]}, saw {values[1]}"


def _difference(result: torch.Tensor, expected: torch.Tensor) -> str:
    """Returns the first wrong element of a result, which is bytes, and how many there are; or an empty string."""
    expected = expected.contiguous().view(-1)
    wrong = (result != expected.view(torch.uint8)).view(-1, expected.itemsize).any(1).nonzero()
    if not len(wrong):
        return ""
    at = int(wrong[0])
    got = result[at * expected.itemsize :][: expected.itemsize].clone().view(expected.dtype)
    values = f"{_value(got)}, expected {_value(expected[at : at + 1])}"
    return f"element {at} is {values}; {len(wrong)} of {len(expected)} are wrong"


def _value(one: torch.Tensor) -> str:
    """Returns a number and its bits: 1.5 (0x3fc0)."""
    raw = bytes(one.clone().view(torch.uint8).numpy())
    return f"{one.item():g} (0x{int.from_bytes(raw, 'little'):0{2 * len(raw)}x})"


def _beside(outcome: Outcome) -> Iterator[str]:
    if outcome.broken_guards:
        yield f"{outcome.broken_guards} writes beside the tensors or the scratch, or to the input"
    if outcome.unmarked_polls:
        yield f"{outcome.unmarked_polls} polls by blocks that were not marked as busy"
