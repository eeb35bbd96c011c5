"""The specification of lossless bf16 compression: what fits, what is sent, and that every bit comes back."""

import pytest
import torch

from graphar.numerics.lossless_reference import decode, encode, odd_elements
from tests.cases import bit_patterns, far_apart, in_turns, normal, same_bits

TILE = 1024


def ones(**elements: float) -> torch.Tensor:
    """A tile of ones, except the elements named at_N."""
    x = torch.ones(TILE, dtype=torch.bfloat16)
    for place, value in elements.items():
        x[int(place.removeprefix("at_"))] = value
    return x


@pytest.mark.parametrize("fill", [normal, far_apart, bit_patterns, in_turns], ids=lambda fill: fill.__name__)
@pytest.mark.parametrize("numel", [1, 1023, TILE, 5 * TILE + 7, 200 * TILE])
def test_every_bit_comes_back(fill, numel):
    x = fill(1, numel, torch.bfloat16)

    wire = encode(x)

    assert len(wire) == -(-numel // TILE) * (2 * TILE + 32)
    assert same_bits(decode(wire, numel), x) == 0


def test_every_exponent_comes_back_beside_every_other():
    exponents = torch.arange(256, dtype=torch.int16) << 7
    x = torch.stack([torch.where(torch.arange(256) % 128 < 3, one, exponents) for one in exponents])
    rows = torch.cat([x, x | 0x7F]).view(torch.bfloat16).flatten()

    assert same_bits(decode(encode(rows), rows.numel()), rows) == 0


@pytest.mark.parametrize(
    ("x", "odd"),
    [
        (ones(), 0),
        (ones(at_5=2.0**-14, at_6=0.0, at_7=-0.0), 0),
        (ones(at_5=2.0**-15, at_300=2.0**-15), 2),
        (ones(at_5=2.0**-130), 0),  # a subnormal
        (ones(at_5=torch.inf), 255),  # of its row of 256; nothing else lies near
    ],
    ids=["alike", "14 below, and zeros", "15 below", "subnormal", "beside infinity"],
)
def test_odd_elements_are_more_than_14_below_their_row_and_not_zero(x, odd):
    assert odd_elements(x).tolist() == [odd]


def test_a_compressed_tile_has_its_exponents_and_odd_elements_in_its_header():
    wire = encode(ones(at_9=-(2.0**-20), at_256=8.0))

    largest, count, entry = wire[2 * TILE :].view(torch.int32)[:3].tolist()
    assert largest == 127 | 130 << 8 | 127 << 16 | 127 << 24
    assert (count, entry) == (1, 1 | 1 << 5 | 107 << 16)  # lane 1, element 1
    assert not wire[1536 : 2 * TILE].any()


def test_a_tile_with_seven_odd_elements_is_sent_as_it_is():
    six, seven = (ones(**{f"at_{place}": 2.0**-20 for place in range(most)}) for most in (6, 7))

    assert encode(six)[2 * TILE :].view(torch.int32)[1] == 6
    assert encode(seven)[2 * TILE :].view(torch.int32)[1] == -1
    assert torch.equal(encode(seven)[: 2 * TILE], seven.view(torch.uint8))
