"""The specification of lossless bf16 compression in plain torch: what a warp sends, and what it decodes to.

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

from graphar.numerics.codec_reference import LANES, ROWS, RUN, fill_up
from graphar.numerics.codecs import TILE_NUMEL

FURTHEST = 14  # the largest difference of exponents that 4 bits hold, beside the mark 15
HEADER_WORDS = 8
MOST_ODD = HEADER_WORDS - 2

_TILE_NBYTES, _CODES_NBYTES, _HEADER_NBYTES = 2 * TILE_NUMEL, 2 * TILE_NUMEL * 3 // 4, 4 * HEADER_WORDS
_UNCOMPRESSED = -1  # all bits set


def encode(x: Tensor) -> Tensor:
    """Returns the bytes of the wire for a bf16 tensor."""
    bits = _in_tiles(x)
    exponents = _exponents(bits)
    below, largest = _below_largest(exponents), exponents.amax((2, 3))
    odd = _are_odd(exponents, below)
    rest, nibbles = bits & 0x7F | bits >> 8 & 0x80, below.clamp(max=FURTHEST + 1)
    lane_bytes = torch.cat([rest, nibbles[..., :4] | nibbles[..., 4:] << 4], -1).transpose(1, 2)
    codes = lane_bytes.to(torch.uint8).reshape(-1, LANES, 3, 16).transpose(1, 2).reshape(-1, _CODES_NBYTES)
    wire = bits.to(torch.int16).flatten(1).view(torch.uint8)
    headers = torch.zeros(len(wire), HEADER_WORDS, dtype=torch.int32)
    for tile, number in enumerate(odd.sum((1, 2, 3)).tolist()):
        headers[tile, 0] = int(largest[tile].to(torch.uint8).view(torch.int32))  # a byte for each row
        if number > MOST_ODD:
            headers[tile, 1] = _UNCOMPRESSED
            continue
        wire[tile, :_CODES_NBYTES], wire[tile, _CODES_NBYTES:] = codes[tile], 0
        headers[tile, 1] = number
        by_lane = exponents[tile].transpose(0, 1).flatten()
        places = odd[tile].transpose(0, 1).flatten().nonzero().flatten()  # 32 for each lane
        headers[tile, 2 : 2 + number] = places // (ROWS * RUN) | places % (ROWS * RUN) << 5 | by_lane[places] << 16
    return torch.cat([wire.flatten(), headers.view(torch.uint8).flatten()])


def decode(wire: Tensor, numel: int) -> Tensor:
    """Returns the bf16 tensor of ``numel`` elements that a wire holds."""
    tiles = len(wire) // (_TILE_NBYTES + _HEADER_NBYTES)
    data = wire[: tiles * _TILE_NBYTES].view(tiles, _TILE_NBYTES)
    headers = wire[tiles * _TILE_NBYTES :].view(torch.int32).view(tiles, HEADER_WORDS)
    elements = data.clone().view(torch.int16).view(tiles, TILE_NUMEL)
    for tile in (headers[:, 1] != _UNCOMPRESSED).nonzero().flatten().tolist():
        elements[tile] = _decode_tile(data[tile, :_CODES_NBYTES], headers[tile])
    return elements.flatten()[:numel].view(torch.bfloat16)


def odd_elements(x: Tensor) -> Tensor:
    """Returns the number of odd elements of each tile of a bf16 tensor."""
    exponents = _exponents(_in_tiles(x))
    return _are_odd(exponents, _below_largest(exponents)).sum((1, 2, 3))


def _in_tiles(x: Tensor) -> Tensor:
    """Returns the bits of the elements by tile, row, lane and place. Past the end they repeat the last element."""
    return fill_up(x.flatten().view(torch.int16).int() & 0xFFFF).view(-1, ROWS, LANES, RUN)


def _exponents(bits: Tensor) -> Tensor:
    return bits >> 7 & 0xFF


def _below_largest(exponents: Tensor) -> Tensor:
    """Returns how far each exponent lies below the largest one of its row."""
    return exponents.amax((2, 3), keepdim=True) - exponents


def _are_odd(exponents: Tensor, below: Tensor) -> Tensor:
    return (below > FURTHEST) & (exponents > 0)


def _decode_tile(codes: Tensor, header: Tensor) -> Tensor:
    lane_bytes = codes.view(3, LANES, 16).transpose(0, 1).reshape(LANES, ROWS, 12).transpose(0, 1).int()
    rest, halves = lane_bytes[..., :RUN], lane_bytes[..., RUN:]
    below = torch.cat([halves & 0xF, halves >> 4], -1)
    largest = header[:1].view(torch.uint8).int().view(ROWS, 1, 1)
    exponents = torch.where(below > FURTHEST, 0, largest - below)
    for entry in header[2 : 2 + int(header[1])].tolist():
        lane, place = entry & 31, entry >> 5 & 31
        exponents[place // RUN, lane, place % RUN] = entry >> 16
    bits = exponents << 7 | rest & 0x7F | (rest & 0x80) << 8
    return bits.to(torch.int16).flatten()
