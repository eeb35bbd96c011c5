"""The codecs on the CPU, in a few passes over memory, with the bits of their specification in codec_reference.py.

A tensor is encoded and decoded in chunks whose temporaries stay in the cache. Operations that give a bool for each
element, and reductions over few elements, are avoided: in torch they take ten times as long as arithmetic.

Rounding. The specification rounds once: an exact product, or its exact sum with a random number. Here the product is
first rounded to fp32. That can change a code only where the product is close to the middle between two codes. Runs of
32 elements with such a product are rounded again as the specification does.

Packing. Eight codes of ``bits`` bits lie in the bytes of an int64. They are packed in three steps: codes into pairs,
pairs into fours, and fours into eight codes in ``bits`` bytes. In each step every second group moves by the same
distance. A lane's 32 codes are four such runs.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from graphar.numerics import codec_reference as specification
from graphar.numerics.codec_reference import LANES, ROWS, RUN, WORD, Noise
from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.dtypes import SAME_SIZE_INTEGER, with_canonical_nan

_CHUNK_TILES = 256  # 1 MB of fp32. Of less, calling torch's functions would take longer than they do
_CHECKED = 32  # elements that are looked at together, and rounded again together
_DOUBT = 2.0**-13  # above the errors of two additions in fp32 to a code below 2^8, and of the reference's own


class _Room(threading.local):
    """Memory for the temporaries of a chunk, which each thread keeps: new pages would take as long as the work."""

    def __init__(self) -> None:
        numel = _CHUNK_TILES * TILE_NUMEL
        with torch.inference_mode(False):
            self.floats = torch.empty(3, numel).unbind()
            self.codes = torch.empty(numel, dtype=torch.int8)
            self.random = torch.empty(4, 2, numel // RUN, dtype=torch.int64).unbind()


_room = _Room()


def encode(values: Tensor, codec: Codec, noise: Noise | None = None) -> Tensor:
    """Returns what codec_reference.encode gives for a tensor on the CPU, of any floating-point dtype."""
    wire = torch.empty(codec.wire_nbytes(values.numel()), dtype=torch.uint8)
    for first, size, codes, scales in _chunks(wire, codec):
        x, held = _room.floats[0][:size], min(size, values.numel() - first)
        x[:held].copy_(values[first : first + held])
        if held < size:
            x[held:] = x[held - 1]
        buckets = x.view(-1, codec.bucket_size)
        scale, zero, bad = _scales(buckets, codec)
        inverse = 1 / scale
        halves = None
        if codec.rounding == "stochastic":
            assert noise
            inverse *= 1 - 2.0**-20
            halves = _random_halves(size, noise._replace(first=noise.first + first))
        if zero is not None:
            buckets.sub_(zero[:, None])
        if bad is not None:
            buckets[bad] = inverse[bad] = 0
        _pack_codes(codes, _codes(x, inverse, codec, halves), codec)
        _pack_scales(scales, scale, zero, bad, codec)
    return wire


def decode(wire: Tensor, codec: Codec, target: Tensor, *, adds: bool = False) -> None:
    """Writes what codec_reference.decode gives for the elements of ``target`` into it, or adds it to them.

    ``target`` is 1-D and contiguous, of any floating-point dtype. NaNs that are written are canonical; sums are not.
    """
    if wire.storage_offset() % 8:
        wire = wire.clone()  # words of 64 bits are read from it
    for first, size, codes, scales in _chunks(wire, codec):
        units, part = _room.floats[0][:size], target[first : first + size]
        scale, zero = specification._unpack_scales(scales, codec)
        _to_units(units, _unpack_codes(codes, codec), codec)
        buckets = units.view(-1, codec.bucket_size).mul_(scale[:, None])
        if codec.scheme == "minmax":
            buckets.add_(zero[:, None])
        if adds:
            part.add_(units[: part.numel()])
            continue
        part.copy_(units[: part.numel()])
        if scale.isnan().any():
            part.copy_(with_canonical_nan(part))


def _chunks(wire: Tensor, codec: Codec) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """For each chunk its first element, its elements, and its codes and scales on the wire: a row for each tile."""
    tiles = wire.numel() // codec.tile_nbytes
    codes, scales = wire.split([tiles * codec.tile_codes_nbytes, tiles * codec.tile_scales_nbytes])
    codes, scales = codes.view(tiles, codec.tile_codes_nbytes), scales.view(tiles, codec.tile_scales_nbytes)
    for begin in range(0, tiles, _CHUNK_TILES):
        window = slice(begin, begin + _CHUNK_TILES)
        numel = min(_CHUNK_TILES, tiles - begin) * TILE_NUMEL
        yield begin * TILE_NUMEL, numel, codes[window], scales[window]


def _scales(buckets: Tensor, codec: Codec) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns each bucket's scale, its zero point if codes have one, and which buckets have no finite scale, if any."""
    if codec.scheme == "minmax":
        ends = torch.stack([buckets.amin(1), buckets.amax(1)], 1)
    else:
        magnitudes = _room.floats[1][: buckets.numel()].view(buckets.shape)
        ends = torch.abs(buckets, out=magnitudes).amax(1, keepdim=True)
        if codec.scale_dtype is torch.bfloat16 and ends.max() < 2.0**120:  # false of NaN: all are finite
            scale = ends[:, 0].mul_(torch.tensor(1 / codec.largest_code)).clamp_(min=2.0**-126)
            scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)  # up to a bf16 number
            return scale, None, None
    scale, zero = specification.scales(ends, codec)
    bad = scale.isnan()
    return scale, zero if codec.scheme == "minmax" else None, bad if bad.any() else None


def _pack_scales(wire: Tensor, scale: Tensor, zero: Tensor | None, bad: Tensor | None, codec: Codec) -> None:
    numbers = scale[:, None] if zero is None else torch.stack([scale, zero], 1)
    bits = numbers.to(codec.scale_dtype).view(SAME_SIZE_INTEGER[codec.scale_dtype.itemsize])
    if bad is not None:
        bits[bad, 0] = torch.iinfo(bits.dtype).max
    in_order = bits.view(len(wire), *specification._rows_and_buckets(codec), -1).transpose(1, 2)
    held = in_order[0].numel() * bits.itemsize
    wire[:, :held].view(bits.dtype).view(in_order.shape).copy_(in_order)
    wire[:, held:] = 0


def _codes(x: Tensor, inverse: Tensor, codec: Codec, halves: Tensor | None) -> Tensor:
    """Returns the codes of ``x`` as bytes."""
    size = x.numel()
    _, products, rounded = (memory[:size] for memory in _room.floats)
    codes = _room.codes[:size]
    buckets = x.view(-1, codec.bucket_size)
    torch.mul(buckets, inverse[:, None], out=products.view(buckets.shape))
    if codec.is_float:
        return _e4m3_codes(products, halves, codes)
    if halves is not None:
        # The halves begin at -1/2: floor(product + u + 1/2) is the nearest integer.
        products.add_(rounded.copy_(halves), alpha=2.0**-16)
    torch.round(products, out=rounded)
    distances = products.sub_(rounded).abs_().view(-1, _CHECKED).amax(1)
    again = (distances >= (0.5 if halves is None else 0.5 - _DOUBT)).nonzero()[:, 0]
    if again.numel():
        noise = None if halves is None else halves.view(-1, _CHECKED)[again].long() + (1 << 15)
        of_buckets = inverse[again * _CHECKED // codec.bucket_size, None]
        exact = specification._integer_codes(x.view(-1, _CHECKED)[again], of_buckets, codec, noise)
        rounded.view(-1, _CHECKED)[again] = (exact - (codec.largest_code if codec.scheme == "absmax" else 0)).float()
    if codec.scheme == "absmax":
        return codes.copy_(rounded).add_(codec.largest_code)
    return codes.copy_(rounded.sub_(128)).add_(-128)  # bytes wrap: these codes reach 255, beyond int8


def _e4m3_codes(products: Tensor, halves: Tensor | None, codes: Tensor) -> Tensor:
    if halves is None:
        return codes.copy_(products.to(torch.float8_e4m3fn).view(torch.int8))
    bits = products.mul_(2.0**-120).view(torch.int32)
    signs = (bits >> 24).bitwise_and_(0x80)
    bits.bitwise_and_(0x7FFFFFFF).add_(halves.int(), alpha=16).add_((16 << 15) + 8)  # 2^15 is missing from halves
    return codes.copy_(bits.bitwise_right_shift_(20).bitwise_or_(signs))


def _to_units(units: Tensor, codes: Tensor, codec: Codec) -> None:
    """Writes what codes stand for, in scales, as fp32."""
    if codec.is_float:
        bits = units.view(torch.int32).copy_(codes.view(torch.int8))  # with copies of the sign above it
        bits.bitwise_left_shift_(20).bitwise_and_(0x87F00000 - (1 << 32))
        units.mul_(2.0**120)  # exact: e4m3's subnormals are fp32's, 2^-120 as large
    elif codec.scheme == "absmax":
        units.copy_(codes.view(torch.int8).sub_(codec.largest_code))
    else:
        units.copy_(codes.view(torch.uint8))


def _seconds(numbers: int, bits: int, first: int) -> int:
    """Returns the mask of each second group of ``numbers`` codes, in an int64 of eight; ``first`` is its first bit."""
    return sum((1 << numbers * bits) - 1 << at for at in range(first, 64, 16 * numbers))


def _lane_words(wire: Tensor, bits: int) -> list[Tensor]:
    """Returns the words of all lanes on the wire, each [tiles, 32]: of 64 bits, and a last one of 32."""
    planes, at = [], 0
    for piece in specification._pieces(bits):
        plane = wire[:, at : at + LANES * piece * 4]
        at += LANES * piece * 4
        wide = plane.view(torch.int64 if piece > 1 else torch.int32).view(len(wire), LANES, -1)
        planes += wide.unbind(2)
    return planes


def _pack_codes(wire: Tensor, codes: Tensor, codec: Codec) -> None:
    bits = codec.code_bits
    runs = codes.view(torch.int64)
    for count in (1, 2, 4) if bits < 8 else ():
        moved = runs & _seconds(count, bits, 8 * count)
        runs.bitwise_xor_(moved).bitwise_or_(moved.bitwise_right_shift_(count * (8 - bits)))
    rows, nbits = runs.view(-1, ROWS, LANES).unbind(1), RUN * bits
    for place, word in enumerate(_lane_words(wire, bits)):
        parts = []
        for row, values in enumerate(rows):
            shift = row * nbits - place * 64
            if -nbits < shift < 64:
                parts.append(values << shift if shift > 0 else values >> -shift if shift else values)
        word.copy_(functools.reduce(torch.bitwise_or, parts))


def _unpack_codes(wire: Tensor, codec: Codec) -> Tensor:
    """Returns the codes of tiles as bytes in an int64 tensor, eight a number."""
    bits = codec.code_bits
    runs, nbits = torch.empty(len(wire), ROWS, LANES, dtype=torch.int64), RUN * bits
    words = _lane_words(wire, bits)
    for row, target in enumerate(runs.unbind(1)):
        place, shift = divmod(row * nbits, 64)
        if not shift:
            target.copy_(words[place])
        else:
            torch.bitwise_right_shift(words[place].long(), shift, out=target)
            if shift + nbits > 64:
                target.bitwise_and_((1 << 64 - shift) - 1).bitwise_or_(words[place + 1].long() << 64 - shift)
    if bits < 8:
        runs &= (1 << nbits) - 1
        for count in (4, 2, 1):
            moved = runs & _seconds(count, bits, bits * count)
            runs.bitwise_xor_(moved).bitwise_or_(moved.bitwise_left_shift_(count * (8 - bits)))
    return runs.view(-1)


def _random_halves(numel: int, noise: Noise) -> Tensor:
    """Returns codec_reference.random_halves less 2^15, as int16."""
    first, count = noise.first // RUN, numel // RUN
    words, others, products, halves = (memory[:, :count] for memory in _room.random)
    torch.arange(first, first + count, out=words[0])  # word 0 of the counter; words[1] is 2, and others are 3 and 1
    torch.bitwise_right_shift(words[0], 32, out=others[1])
    words[0].bitwise_and_(WORD)
    words[1], others[0] = noise.call, noise.source
    factors = torch.tensor([[0xD2511F53], [0xCD9E8D57]])
    for turn in range(7):
        keys = [[noise.seed + turn * 0x9E3779B9 & WORD], [(noise.seed >> 32) + turn * 0xBB67AE85 & WORD]]
        torch.mul(words, factors, out=products)  # wraps, and has the right 64 bits
        for mine, other in ((0, 1), (1, 0)):
            torch.bitwise_right_shift(products[other], 32, out=words[mine]).bitwise_xor_(others[other])
        words.bitwise_xor_(torch.tensor(keys)).bitwise_and_(WORD)
        products, others = others, products  # whose low words alone count
    others.bitwise_left_shift_(32)
    halves = halves.reshape(-1)[: 2 * count].view(count, 2)
    for mine, other in ((0, 1), (1, 0)):
        torch.bitwise_or(words[mine], others[other], out=halves[:, mine])
    return halves.bitwise_xor_(0x8000800080008000 - (1 << 64)).view(torch.int16).view(-1)
