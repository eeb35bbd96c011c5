"""What is wrong with the outcome of a simulation, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch

from graphar import reference
from graphar.runtime.arguments import Record
from graphar.simulator.simulation import Outcome

UNWRITTEN = 0xA5  # each byte of an output before a call: `guard` in sources/run.cpp
# Kinds of records, as in cuda_src/device/sync/record.cuh.
TIMED_OUT, OVERLAPPED, DISAGREED = 1, 2, 3


Terms = Callable[[int, int], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong."""

    what: str  # in words
    call: int | None  # in which call, counted from 0; None if that is not known
    step: int  # the number of the scheduler's step at which it happened, or by which it had


def mistakes(
    expected: Sequence[Sequence[torch.Tensor]], outcomes: Sequence[Outcome], terms: Terms = lambda call, rank: ()
) -> list[Mistake]:
    """Returns all that is wrong, in the order in which it happened.

    ``expected`` is by call and rank. ``terms`` returns the tensors whose sum a rank gets, or none, by call and rank.
    """
    wrong = []
    for rank, outcome in enumerate(outcomes):
        if outcome.record.kind:
            call = sum(end < outcome.gave_up_at for end in outcome.ended_at)
            wrong.append(Mistake(_given_up(rank, call, outcome.record), call, outcome.gave_up_at))
        for call, by_rank in enumerate(expected):
            what = _difference(outcome.results[call], by_rank[rank], terms(call, rank))
            if what:
                wrong.append(Mistake(f"rank {rank}, call {call}: {what}", call, outcome.ended_at[call]))
        for what in _beside(outcome):
            wrong.append(Mistake(f"rank {rank}: {what}", None, outcome.ended_at[-1]))
    return sorted(wrong, key=lambda mistake: mistake.step)


def _given_up(rank: int, call: int, record: Record) -> str:
    where = f"rank {rank}, call {call}, block {record.block}"
    if record.kind == OVERLAPPED:
        return f"{where}: began while another call ran"
    values = f"0x{record.expected:x}", f"0x{record.seen:x}"
    if record.kind == DISAGREED:
        return f"{where}: calls {values[0]} where rank {record.peer} calls {values[1]}"
    return f"{where}: waited for rank {record.peer} until the deadline; expected {values[0]}, saw {values[1]}"


def _difference(result: torch.Tensor, expected: torch.Tensor, terms: Sequence[torch.Tensor]) -> str:
    """Returns the first wrong element of a result, which is bytes, and how many there are; or an empty string."""
    expected = expected.contiguous().view(-1)
    elements = result.view(-1, expected.itemsize)
    wrong = (elements != expected.view(torch.uint8).view_as(elements)).any(1).nonzero().view(-1)
    if not len(wrong):
        return ""
    at, got = int(wrong[0]), elements[wrong].view(expected.dtype).view(-1)
    unwritten = bool((elements[at] == UNWRITTEN).all())
    text = f"was never written (0x{bytes(elements[at].numpy()).hex()})" if unwritten else f"is {_value(got[:1])}"
    count = f"{len(wrong)} of {len(expected)} are wrong{_reordered(got, [x.reshape(-1)[wrong] for x in terms])}"
    return f"element {at} {text}, expected {_value(expected[at : at + 1])}; {count}"


def _reordered(got: torch.Tensor, terms: Sequence[torch.Tensor]) -> str:
    """Returns in which order the ranks' terms add up to what was got, or an empty string."""
    forward = [tuple(rank % len(terms) for rank in range(at, at + len(terms))) for at in range(len(terms))]
    few = len(terms) < 6
    for order in permutations(forward[0]) if few and terms else (*forward, *(order[::-1] for order in forward)):
        if torch.equal(reference.allreduce([terms[rank] for rank in order]).view(torch.uint8), got.view(torch.uint8)):
            return f": they are the same terms in another order, of ranks {', '.join(map(str, order))}"
    return ""


def _value(number: torch.Tensor) -> str:
    """Returns a number and its bits: 1.5 (0x3fc0)."""
    raw = bytes(number.clone().view(torch.uint8).numpy())
    return f"{number.item():g} (0x{int.from_bytes(raw, 'little'):0{2 * len(raw)}x})"


def _beside(outcome: Outcome) -> Iterator[str]:
    if outcome.broken_guards:
        yield f"{outcome.broken_guards} writes beside the tensors or the scratch, or to the input"
    if outcome.unmarked_polls:
        yield f"{outcome.unmarked_polls} polls by blocks that were not marked as busy"
