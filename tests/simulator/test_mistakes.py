"""How the simulator says what is wrong with what came out."""

from __future__ import annotations

import pytest
import torch

from graphar import reference
from graphar.runtime.arguments import Record
from graphar.simulator.check import DISAGREED, OVERLAPPED, TIMED_OUT, mistakes
from graphar.simulator.simulation import Outcome

EXPECTED = torch.tensor([1.5, 2.0, -0.0], dtype=torch.bfloat16)


def outcome(*results, record=None, gave_up_at=0, broken_guards=0, unmarked_polls=0, ended_at=(100, 200)):
    """An outcome of calls that give these results."""
    raw, record = [one.view(torch.uint8) for one in results], record or Record()
    return Outcome(raw, record, record, broken_guards, unmarked_polls, 0, 0, (), gave_up_at, ended_at)


def test_what_is_expected_is_no_mistake():
    assert mistakes([[EXPECTED, EXPECTED]] * 2, [outcome(EXPECTED, EXPECTED), outcome(EXPECTED, EXPECTED)]) == []


def test_the_first_wrong_element_is_named_with_both_values_and_their_bits():
    wrong = torch.tensor([1.5, 2.5, 0.0], dtype=torch.bfloat16)

    (found,) = mistakes([[EXPECTED]] * 2, [outcome(EXPECTED, wrong)])

    assert found.what == "rank 0, call 1: element 1 is 2.5 (0x4020), expected 2 (0x4000); 2 of 3 are wrong"
    assert (found.call, found.step) == (1, 200)


def test_an_output_that_was_never_written_is_told():
    half = torch.cat([EXPECTED[:1].view(torch.uint8), torch.full((4,), 0xA5, dtype=torch.uint8)])

    (found,) = mistakes([[EXPECTED]], [outcome(half, ended_at=(100,))])

    assert found.what == "rank 0, call 0: element 1 was never written (0xa5a5), expected 2 (0x4000); 2 of 3 are wrong"


@pytest.mark.parametrize("ranks", [3, 8])
def test_a_sum_of_the_same_terms_in_another_order_is_told(ranks):
    terms = list(torch.randn(ranks, 100, generator=torch.Generator().manual_seed(1)))
    order = [*range(1, ranks), 0]
    found = reference.allreduce([terms[rank] for rank in order])

    def what(result):
        (one,) = mistakes([[reference.allreduce(terms)]], [outcome(result, ended_at=(1,))], lambda call, rank: terms)
        return one.what

    told = f" of 100 are wrong: they are the same terms in another order, of ranks {', '.join(map(str, order))}"
    assert what(found).endswith(told)
    assert what(found + 1).endswith(" of 100 are wrong")


def test_an_empty_part_has_no_wrong_elements():
    assert mistakes([[EXPECTED[:0]]], [outcome(EXPECTED[:0], ended_at=(100,))]) == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (TIMED_OUT, "waited for rank 3 until the deadline; expected 0x10, saw 0xf"),
        (OVERLAPPED, "began while another call ran"),
        (DISAGREED, "calls 0x10 where rank 3 calls 0xf"),
    ],
)
def test_a_record_is_told_in_words(kind, said):
    record = Record(kind=kind, peer=3, block=2, expected=0x10, seen=0xF)

    (found,) = mistakes([[EXPECTED]] * 2, [outcome(EXPECTED, EXPECTED, record=record, gave_up_at=150)])

    assert (found.what, found.call, found.step) == (f"rank 0, call 1, block 2: {said}", 1, 150)


def test_mistakes_are_in_the_order_in_which_they_happened():
    late, early = Record(kind=TIMED_OUT, peer=1), Record(kind=TIMED_OUT, peer=0)
    zeros = torch.zeros_like(EXPECTED)

    found = mistakes(
        [[EXPECTED, EXPECTED]] * 2,
        [
            outcome(zeros, EXPECTED, record=late, gave_up_at=180),
            outcome(EXPECTED, EXPECTED, record=early, gave_up_at=90),
        ],
    )

    assert [one.step for one in found] == [90, 100, 180]


def test_writes_beside_tensors_and_polls_of_unmarked_blocks_are_told():
    found = mistakes([[EXPECTED]] * 2, [outcome(EXPECTED, EXPECTED, broken_guards=2, unmarked_polls=3)])

    assert [one.what for one in found] == [
        "rank 0: 2 writes beside the tensors or the scratch, or to the input",
        "rank 0: 3 polls by blocks that were not marked as busy",
    ]
