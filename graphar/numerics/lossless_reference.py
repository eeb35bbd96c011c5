"""The specification of lossless bf16 compression in plain torch: what a warp sends.

    wire of n tiles     2048 bytes for each tile | a header of 32 bytes for each tile
    compressed tile     1536 bytes: words 0 .. 3 of all lanes | words 4 .. 7 | words 8 .. 11
    a lane's words      for each row of 256 elements: 8 bytes (sign and mantissa), and 8 times 4 bits (exponents)
    uncompressed tile   its elements
    header              the rows' largest exponents, a byte each | the number of odd elements | odd elements

The 4 bits say how far an exponent lies below the largest one of its row; 15 means that the exponent is 0, or that the
element is odd: its exponent is then in the header. A tile with more odd elements than a header holds is uncompressed,
and the number in its header has all bits set.

Mirrored in cuda_src/device/wire/lossless.cuh. Bytes that are not sent are 0 here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from graphar.numerics.codec_reference import LANES, ROWS, RUN
from graphar.numerics.codecs import TILE_NUMEL

FURTHEST = 14  # the largest difference of exponents that 4 bits hold, beside the mark 15
HEADER_WORDS = 8
MOST_ODD = HEADER_WORDS - 2

_CODES_NBYTES = TILE_NUMEL * 3 // 2


def encode(x: Tensor) -> Tensor:
    """Returns the bytes of the wire for a bf16 tensor."""
    bits, exponents, below, odd = _in_tiles(x)
    rest, nibbles = bits & 0x7F | bits >> 8 & 0x80, below.clamp(max=FURTHEST + 1)
    lane_bytes = torch.cat([rest, nibbles[..., :4] | nibbles[..., 4:] << 4], -1).transpose(1, 2)
    codes = lane_bytes.to(torch.uint8).reshape(-1, LANES, 3, 16).transpose(1, 2).reshape(-1, _CODES_NBYTES)
    wire = bits.to(torch.int16).flatten(1).view(torch.uint8)
    headers = torch.zeros(len(wire), HEADER_WORDS, dtype=torch.int32)
    for tile, number in enumerate(odd.sum((1, 2, 3)).tolist()):
        headers[tile, 0] = int(exponents[tile].amax((1, 2)).to(torch.uint8).view(torch.int32))  # a byte for each row
        if number > MOST_ODD:
            headers[tile, 1] = -1
            continue
        wire[tile, :_CODES_NBYTES], wire[tile, _CODES_NBYTES:] = codes[tile], 0
        headers[tile, 1] = number
        by_lane = exponents[tile].transpose(0, 1).flatten()
        places = odd[tile].transpose(0, 1).flatten().nonzero().flatten()  # 32 for each lane
        headers[tile, 2 : 2 + number] = places // (ROWS * RUN) | places % (ROWS * RUN) << 5 | by_lane[places] << 16
    return torch.cat([wire.flatten(), headers.view(torch.uint8).flatten()])


def odd_elements(x: Tensor) -> Tensor:
    """Returns the number of odd elements of each tile of a bf16 tensor."""
    return _in_tiles(x)[-1].sum((1, 2, 3))


def _in_tiles(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the elements' bits, exponents, distances from the largest exponent of the row, and whether they are odd.

    Each by tile, row, lane and place. Past the end they repeat the last element.
    """
    bits = x.flatten().view(torch.int16).int() & 0xFFFF
    bits = torch.cat([bits, bits[-1:].expand(-len(bits) % TILE_NUMEL)]).view(-1, ROWS, LANES, RUN)
    exponents = bits >> 7 & 0xFF
    below = exponents.amax((2, 3), keepdim=True) - exponents
    return bits, exponents, below, (below > FURTHEST) & (exponents > 0)
