"""The codecs in torch: their specification, with the bits of the kernels, and what encodes and decodes on the CPU.

Arithmetic. All arithmetic is fp32. Each operation is rounded once, to nearest with ties to even, unless stated
otherwise. Subnormals are preserved. `r` is the fp32 number nearest to 1 / largest_code.

    absmax    scale = up(max(largest magnitude x r, smallest scale))
              code  = round(value x inverse)                        decodes to code x scale
    minmax    zero  = down(smallest value),  -0 as +0
              scale = up(max((largest value - zero) x r, smallest scale))
              code  = round((value - zero) x inverse)               decodes to code x scale + zero, rounded twice

`up` and `down` round to the scale's dtype. `inverse` is 1 / scale, with the rounded scale. An integer code is rounded
from the exact product. An e4m3 code is rounded from the product in fp32. If scale x largest_code of a bucket is not
finite in fp32, the bucket's scale is NaN, its zero point is 0, and its elements are encoded as zeros.

Stochastic rounding. `inverse` is 1 / scale x (1 - 2^-20), so that the largest value does not exceed the codes. `u` is
16 random bits. An integer code is floor(product + 128 + u / 2^16) - 128, where the sum is rounded once. For an e4m3
code the magnitude is taken in units of 2^-20 of its last place, 16 u + 8 is added, and the bits below the last place
are cut off. One Philox-4x32-7 gives the random bits of 8 consecutive elements. (Seven rounds are the fewest that pass
BigCrush; Salmon et al., 2011.) Its key is the seed. Its counter is (index of the 8 in the whole tensor, call, source).
The source is the rank, or SUM where a sum is encoded. In a tensor whose parts are separate messages, the index counts
each part but the last as if it were padded to whole tiles.

Wire. A tensor is cut into tiles of 1024 elements. The last tile is padded with copies of the tensor's last element,
which are encoded like any other element. The codes of all tiles come first, then the scales of all tiles. All words are
little-endian.

    codes of a tile    Element 256 j + 8 l + e, for j < 4, l < 32, e < 8, belongs to lane l of a warp. A lane's 32
                       codes, in the order of 8 j + e, fill `bits` words from the lowest bit on. The words 0 to 3 of all
                       lanes come first, 16 bytes a lane, then the words 4 to 7. The remaining words follow in pieces of
                       8 and 4 bytes a lane. An absmax code is sent as code + largest_code, so no code is all ones. No
                       e4m3 code is all ones either. Each word holds a whole code, so no word is all ones.
    scales of a tile   Buckets of up to 256 elements: the scales of the four rows j stand together, at
                       4 x (bucket in its row) + j. Larger buckets: in their order. With minmax each scale is followed
                       by its zero point. A scale is not negative, so no word that holds one is all ones. The unused
                       bytes of a word are zero.

Speed. A tensor is encoded and decoded in chunks whose temporaries stay in the cache. Operations that give a bool for
each element, and reductions over few elements, are avoided: in torch they take ten times as long as arithmetic. A
product is first rounded to fp32. That can change an integer code only where the product is close to the middle between
two codes. Runs of 32 elements with such a product are rounded again, from the exact product. Tensors on other devices
are encoded and decoded on the CPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.exact_fma import fma
from graphar.numerics.nan import SAME_SIZE_INTEGER, with_canonical_nan

ROWS, LANES, RUN = 4, 32, 8  # a tile in a warp: each lane holds a run of consecutive elements of each row
SUM = 0xFF  # the source of random numbers for encoding a sum

_WORD = 0xFFFFFFFF
_SMALLEST_SCALE = 2.0**-126
_CHUNK_TILES = 256  # 1 MB of fp32. Of less, calling torch's functions would take longer than they do
_CHECKED = 32  # elements that are looked at together, and rounded again together
_DOUBT = 2.0**-13  # above the errors of two additions in fp32 to a code below 2^8, and of the exact code's own


class Noise(NamedTuple):
    """The inputs of stochastic rounding besides the position in the tensor."""

    seed: int  # 64 bits
    call: int  # how many calls came before, modulo 2^32
    source: int  # the rank, or SUM
    first: int = 0  # the index in the whole tensor of the first element that is encoded: a multiple of TILE_NUMEL


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
    """Returns the bytes of a tensor on the wire: uint8, ``codec.wire_nbytes(values.numel())`` of them.

    ``values`` is 1-D, of any floating-point dtype; an empty tensor takes no bytes. ``noise`` is for stochastic rounding
    alone.
    """
    wire = torch.empty(codec.wire_nbytes(values.numel()), dtype=torch.uint8)
    for first, size, codes, scales in _chunks(wire, codec):
        x, held = _room.floats[0][:size], min(size, values.numel() - first)
        x[:held].copy_(values.detach()[first : first + held])
        if held < size:
            x[held:] = x[held - 1]
        buckets = x.view(-1, codec.bucket_size)
        scale, zero, bad = _scales(buckets, codec)
        inverse = 1 / scale
        halves = None
        if codec.rounding == "stochastic":
            assert noise
            inverse *= 1 - 2.0**-20
            halves = random_halves(size, noise._replace(first=noise.first + first))
        if zero is not None:
            buckets.sub_(zero[:, None])
        if bad is not None:
            buckets[bad] = inverse[bad] = 0
        _pack_codes(codes, _codes(x, inverse, codec, halves), codec)
        _pack_scales(scales, scale, zero, bad, codec)
    return wire.to(values.device)


def decode(wire: Tensor, codec: Codec) -> Tensor:
    """Returns the fp32 values of all tiles of encoded bytes, with the padding of the last tile."""
    values = wire.new_empty(wire.numel() // codec.tile_nbytes * TILE_NUMEL, dtype=torch.float32)
    decode_into(values, wire, codec)
    return values


def decode_into(target: Tensor, wire: Tensor, codec: Codec, *, adds: bool = False) -> None:
    """Writes the values of as many encoded elements as ``target`` has into it, or adds them to it.

    ``target`` is 1-D and contiguous, of any floating-point dtype. NaNs that are written are canonical; sums are not.
    """
    wire = wire.cpu()
    if wire.storage_offset() % 8:
        wire = wire.clone()  # words of 64 bits are read from it
    for first, size, codes, scales in _chunks(wire, codec):
        units, part = _room.floats[0][:size], target[first : first + size]
        scale, zero = _unpack_scales(scales, codec)
        _to_units(units, _unpack_codes(codes, codec), codec)
        buckets = units.view(-1, codec.bucket_size).mul_(scale[:, None])
        if codec.scheme == "minmax":
            buckets.add_(zero[:, None])
        if adds:
            part.add_(units[: part.numel()].to(part.device))
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


# ---- scales ---------------------------------------------------------------------------------------------------------


def _scales(buckets: Tensor, codec: Codec) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns each bucket's scale, its zero point if codes have one, and which buckets have no finite scale, if any.

    Scales and zero points are in fp32, rounded to the scale's dtype.
    """
    r = torch.tensor(1 / codec.largest_code)
    zero = None
    if codec.scheme == "minmax":
        zero = _round_down(buckets.amin(1) + 0.0, codec.scale_dtype)
        largest = buckets.amax(1) - zero
    else:
        magnitudes = _room.floats[1][: buckets.numel()].view(buckets.shape)
        largest = torch.abs(buckets, out=magnitudes).amax(1)
        if codec.scale_dtype is torch.bfloat16 and largest.max() < 2.0**120:  # false of NaN: all are finite
            scale = largest.mul_(r).clamp_(min=_SMALLEST_SCALE)
            scale.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)  # up to a bf16 number
            return scale, None, None
    scale = -_round_down(-torch.maximum(largest * r, torch.tensor(_SMALLEST_SCALE)), codec.scale_dtype)
    bad = ~(scale * codec.largest_code).isfinite()
    if not bad.any():
        return scale, zero, None
    return scale.masked_fill_(bad, torch.nan), zero if zero is None else zero.masked_fill_(bad, 0), bad


def _round_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the largest number of ``dtype`` that is not above each value."""
    nearest = values.to(dtype)
    bits = nearest.view(SAME_SIZE_INTEGER[dtype.itemsize])
    lower = torch.where(nearest > 0, bits - 1, bits + 1).view(dtype)  # only a negative value is below a zero
    return torch.where(nearest.float() > values, lower, nearest).float()


# ---- codes ----------------------------------------------------------------------------------------------------------


def _codes(x: Tensor, inverse: Tensor, codec: Codec, halves: Tensor | None) -> Tensor:
    """Returns the codes of ``x`` as bytes."""
    size = x.numel()
    _, products, rounded = (memory[:size] for memory in _room.floats)
    codes = _room.codes[:size]
    torch.mul(x.view(-1, codec.bucket_size), inverse[:, None], out=products.view(-1, codec.bucket_size))
    if codec.is_float:
        return _e4m3_codes(products, halves, codes)
    if halves is not None:
        # The halves begin at -1/2: floor(product + u + 1/2) is the nearest integer.
        products.add_(rounded.copy_(halves), alpha=2.0**-16)
    torch.round(products, out=rounded)
    distances = products.sub_(rounded).abs_().view(-1, _CHECKED).amax(1)
    again = (distances >= (0.5 if halves is None else 0.5 - _DOUBT)).nonzero()[:, 0]
    if again.numel():
        noise = None if halves is None else halves.view(-1, _CHECKED)[again].float() + (1 << 15)
        of_buckets = inverse[again * _CHECKED // codec.bucket_size, None]
        rounded.view(-1, _CHECKED)[again] = _exactly_rounded(x.view(-1, _CHECKED)[again], of_buckets, noise)
    if codec.scheme == "absmax":
        return codes.copy_(rounded).add_(codec.largest_code)
    return codes.copy_(rounded.sub_(128)).add_(-128)  # bytes wrap: these codes reach 255, beyond int8


def _exactly_rounded(values: Tensor, inverse: Tensor, noise: Tensor | None) -> Tensor:
    """Returns integer codes, before largest_code is added. ``noise`` are the 16 random bits; None: to nearest."""
    if noise is None:
        return torch.round(values.double() * inverse.double()).float()  # exact: 24 bits each
    return torch.floor(fma(values, inverse, 128 + noise * 2.0**-16)) - 128


def _e4m3_codes(products: Tensor, halves: Tensor | None, codes: Tensor) -> Tensor:
    if halves is None:
        return codes.copy_(products.to(torch.float8_e4m3fn).view(torch.int8))
    bits = products.mul_(2.0**-120).view(torch.int32)  # e4m3's last place is now bit 20, for subnormals too
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


# ---- codes on the wire ----------------------------------------------------------------------------------------------
#
# Eight codes of `bits` bits lie in the bytes of an int64. They are packed in three steps: codes into pairs, pairs into
# fours, and fours into eight codes in `bits` bytes. In each step every second group moves by the same distance. A
# lane's 32 codes are four such runs.


def _seconds(numbers: int, bits: int, first: int) -> int:
    """Returns the mask of each second group of ``numbers`` codes, in an int64 of eight; ``first`` is its first bit."""
    return sum((1 << numbers * bits) - 1 << at for at in range(first, 64, 16 * numbers))


def _lane_words(wire: Tensor, bits: int) -> list[Tensor]:
    """Returns the words of all lanes on the wire, each [tiles, 32]: of 64 bits, and a last one of 32."""
    words, at = [], 0
    for piece in [4] * (bits // 4) + [piece for piece in (2, 1) if bits & piece]:
        plane = wire[:, at : at + LANES * piece * 4]
        at += LANES * piece * 4
        words += plane.view(torch.int64 if piece > 1 else torch.int32).view(len(wire), LANES, -1).unbind(2)
    return words


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
        whole = parts[0]
        for part in parts[1:]:
            whole = whole | part
        word.copy_(whole)


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


# ---- scales on the wire ---------------------------------------------------------------------------------------------


def _pack_scales(wire: Tensor, scale: Tensor, zero: Tensor | None, bad: Tensor | None, codec: Codec) -> None:
    numbers = scale[:, None] if zero is None else torch.stack([scale, zero], 1)
    bits = numbers.to(codec.scale_dtype).view(SAME_SIZE_INTEGER[codec.scale_dtype.itemsize])
    if bad is not None:
        bits[bad, 0] = torch.iinfo(bits.dtype).max
    in_order = bits.view(len(wire), *_rows_and_buckets(codec), -1).transpose(1, 2)
    held = in_order[0].numel() * bits.itemsize
    wire[:, :held].view(bits.dtype).view(in_order.shape).copy_(in_order)
    wire[:, held:] = 0


def _unpack_scales(wire: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Returns each bucket's scale and its zero point, or the scale again if codes have none."""
    per_bucket = 2 if codec.scheme == "minmax" else 1
    held = TILE_NUMEL // codec.bucket_size * per_bucket * codec.scale_dtype.itemsize
    numbers = wire[:, :held].contiguous().view(codec.scale_dtype)
    rows, buckets = _rows_and_buckets(codec)
    in_order = numbers.float().view(-1, buckets, rows, per_bucket).transpose(1, 2).reshape(-1, per_bucket)
    return in_order[:, 0], in_order[:, -1]


def _rows_and_buckets(codec: Codec) -> tuple[int, int]:
    """Returns how many rows a tile's buckets are grouped by, and the buckets of each row.

    Buckets that span several rows count as buckets of a single row.
    """
    row = TILE_NUMEL // ROWS
    return (ROWS, row // codec.bucket_size) if codec.bucket_size <= row else (1, TILE_NUMEL // codec.bucket_size)


# ---- random bits ----------------------------------------------------------------------------------------------------


def random_halves(numel: int, noise: Noise) -> Tensor:
    """Returns 16 random bits for each element, less 2^15, as int16. ``numel`` is a multiple of 8, of a chunk at most.

    The next call of this thread overwrites them.
    """
    first, count = noise.first // RUN, numel // RUN
    words, others, products, halves = (memory[:, :count] for memory in _room.random)
    torch.arange(first, first + count, out=words[0])
    torch.bitwise_right_shift(words[0], 32, out=others[1])
    words[0].bitwise_and_(_WORD)
    words[1], others[0] = noise.call, noise.source
    words, others = philox(words, others, products, noise.seed)
    others.bitwise_left_shift_(32)
    halves = halves.reshape(-1)[: 2 * count].view(count, 2)
    for mine, other in ((0, 1), (1, 0)):
        torch.bitwise_or(words[mine], others[other], out=halves[:, mine])
    return halves.bitwise_xor_(0x8000800080008000 - (1 << 64)).view(torch.int16).view(-1)


def philox(words: Tensor, others: Tensor, products: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Returns Philox-4x32-7 of counters: its words 0 and 2, and its words 3 and 1, above which other bits may be set.

    ``words`` and ``others`` [2, n] are such words of the counters, in int64. They and ``products`` are overwritten.
    """
    factors = torch.tensor([[0xD2511F53], [0xCD9E8D57]])
    for turn in range(7):
        keys = [[seed + turn * 0x9E3779B9 & _WORD], [(seed >> 32) + turn * 0xBB67AE85 & _WORD]]
        torch.mul(words, factors, out=products)  # wraps, and has the right 64 bits
        for mine, other in ((0, 1), (1, 0)):
            torch.bitwise_right_shift(products[other], 32, out=words[mine]).bitwise_xor_(others[other])
        words.bitwise_xor_(torch.tensor(keys)).bitwise_and_(_WORD)
        products, others = others, products  # whose low words alone count
    return words, others


# ---- sums of wires --------------------------------------------------------------------------------------------------


def first_elements(counts: Sequence[int]) -> list[int]:
    """Returns the index of each message's first element for random numbers: earlier messages count as whole tiles."""
    return [tiles * TILE_NUMEL for tiles in accumulate((-(-count // TILE_NUMEL) for count in counts), initial=0)][:-1]


def sum_of_wires(wires: Sequence[Tensor], codec: Codec, noise: Noise, like: Tensor) -> Tensor:
    """Returns the sum of all ranks' encoded tensors, rounded by the codec once more, as a tensor like ``like``."""
    return part_of_wires([encode(total_of(wires, codec), codec, noise)], codec, like)


def part_of_wires(wires: Sequence[Tensor], codec: Codec, like: Tensor) -> Tensor:
    """Returns the sum of the encoded messages that one rank received, as a tensor like its part, ``like``."""
    return with_canonical_nan(total_of(wires, codec)[: like.numel()].to(like.dtype)).view(like.shape)


def total_of(wires: Sequence[Tensor], codec: Codec) -> Tensor:
    """Returns the fp32 sum of what is encoded, in the order of ranks."""
    total = decode(wires[0], codec)
    for wire in wires[1:]:
        decode_into(total, wire, codec, adds=True)
    return total


def error_of_wire(part: Tensor, wire: Tensor, codec: Codec) -> Tensor:
    """Returns the error of encoding ``part``, computed in fp32 and rounded to its dtype.

    The error is zero where a bucket became NaN. :func:`graphar.allreduce` with a codec leaves it in ``residual``;
    ``part`` is then the sum of the tensor and the residual.
    """
    decoded = decode(wire, codec)[: part.numel()]
    error = torch.where(decoded.isnan(), 0, part.float().view(-1) - decoded)
    return error.to(part.dtype).view(part.shape)
