"""The specification of lossless bf16 compression: what fits, and what is sent."""

import pytest
import torch

from graphar.numerics.lossless_reference import encode, odd_elements

TILE = 1024


def ones(**elements: float) -> torch.Tensor:
    """A tile of ones, except the elements named at_N."""
    x = torch.ones(TILE, dtype=torch.bfloat16)
    for place, value in elements.items():
        x[int(place.removeprefix("at_"))] = value
    return x


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
