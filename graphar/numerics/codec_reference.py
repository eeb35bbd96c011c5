"""What the codecs do, bit for bit: the kernels' encode and decode, on the CPU. Written to be read, not to be fast.

Arithmetic. All of it is fp32, each operation rounded once, to nearest and ties to even, unless said otherwise;
subnormals are kept. `r` is the fp32 number nearest to 1 / largest_code.

    absmax    scale = up(max(largest magnitude x r, smallest scale))
              code  = round(value x inverse)                        decodes to code x scale
    minmax    zero  = down(smallest value),  -0 as +0
              scale = up(max((largest value - zero) x r, smallest scale))
              code  = round((value - zero) x inverse)               decodes to code x scale + zero, rounded twice

`inverse` is 1 / scale, of the scale as it was rounded. An integer code is rounded straight from the exact product; e4m3
is rounded from the product in fp32. A bucket whose scale x largest_code is not finite in fp32 has a NaN for its scale
and zeros for the rest.

Stochastic. `inverse` is 1 / scale x (1 - 2^-20), which keeps the largest value within the codes. With 16 random bits u,
an integer code is floor(product + 128 + u / 2^16) - 128, where the sum is rounded once; an e4m3 code is the magnitude
in units of 2^-20 of its own last place, plus 16 u + 8, cut off there. The random bits of 8 consecutive elements come
from one Philox-4x32-7 (seven rounds: the fewest that pass BigCrush; Salmon et al., 2011), key (seed), counter (index of
the 8 in the whole tensor, call, source), where source is the rank, or SUM for what is encoded a second time. A tensor
that goes in parts, each a message of its own, counts as if each part but the last were filled up to whole tiles.

Wire. A tensor is cut into tiles of 1024 elements; the last one is filled up with copies of the tensor's last element,
which take part like any other. First come the codes of all tiles, then the scales of all tiles, all little-endian.

    codes of a tile    element 256 j + 8 l + e, for j < 4, l < 32, e < 8, belongs to lane l of a warp; a lane's 32
                       codes, in the order of 8 j + e, fill `bits` words from the lowest bit on. Of all lanes come first
                       words 0 to 3, 16 bytes a lane, then words 4 to 7; what is left over goes in pieces of 8 and 4
                       bytes a lane. An absmax code is sent as code + largest_code, so no code is all ones; nor is any
                       e4m3 number. Each word holds a whole code, so no word is all ones.
    scales of a tile   of buckets of up to 256 elements: those of the four rows j together, 4 x (bucket in its row) + j;
                       of larger ones in their order. With minmax each scale is followed by its zero point. A scale is
                       not negative, so no word that holds one is all ones. What is left of a word is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from graphar.numerics.codecs import TILE_NUMEL, WORD_NBYTES, Codec

ROWS, LANES, RUN = 4, 32, 8  # a tile as lanes of a warp hold it: in each row, a run of consecutive elements
SUM = 0xFF  # the source of random numbers of what is encoded a second time
WORD = 0xFFFFFFFF

_SMALLEST_SCALE = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-24, torch.float32: 2.0**-126}
_SAME_SIZE_INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


class Noise(NamedTuple):
    """What stochastic rounding depends on, beside the position in the tensor.

    Attributes:
        seed: 64 bits.
        call: how many calls came before, modulo 2^32.
        source: the rank, or SUM.
        first: where what is encoded begins in the whole tensor, in elements: a multiple of TILE_NUMEL.
    """

    seed: int
    call: int
    source: int
    first: int = 0


def encode(values: Tensor, codec: Codec, noise: Noise | None = None) -> Tensor:
    """The wire's bytes for a tensor.

    Args:
        values: 1-D; taken as fp32. Of none nothing is sent.
        codec: the format.
        noise: for stochastic rounding.

    Returns:
        uint8, ``codec.wire_nbytes(values.numel())`` of them.
    """
    values = fill_up(values.float())
    buckets = values.view(-1, codec.bucket_size)
    scale, zero = scales(buckets, codec)
    good = scale.isfinite()
    inverse = torch.where(good, 1 / scale, 0)
    halves = None
    if codec.rounding == "stochastic":
        inverse = inverse * torch.tensor(1 - 2.0**-20)
        halves = random_halves(values.numel(), noise, values.device).view(buckets.shape)
    values = torch.where(good[:, None], buckets - zero[:, None] if codec.scheme == "minmax" else buckets, 0)
    to_codes = _e4m3_codes if codec.is_float else _integer_codes
    codes = to_codes(values, inverse[:, None], codec, halves)
    return torch.cat([_pack_codes(codes, codec), _pack_scales(scale, zero, codec)])


def decode(wire: Tensor, codec: Codec) -> Tensor:
    """The values, fp32, of all elements of all tiles of a wire, its last one's filling included."""
    tiles = wire.numel() // (codec.tile_codes_nbytes + codec.tile_scales_nbytes)
    codes, scales = wire.split([tiles * codec.tile_codes_nbytes, tiles * codec.tile_scales_nbytes])
    codes = _unpack_codes(codes, codec).view(-1, codec.bucket_size)
    scale, zero = _unpack_scales(scales, codec)
    if codec.is_float:
        units = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    elif codec.scheme == "absmax":
        units = (codes - codec.largest_code).float()
    else:
        return (codes.float() * scale[:, None] + zero[:, None]).view(-1)
    return (units * scale[:, None]).view(-1)


def fill_up(values: Tensor) -> Tensor:
    """``values`` and as many copies of the last one as make whole tiles."""
    missing = -values.numel() % TILE_NUMEL
    return torch.cat([values, values[-1:].expand(missing)]) if missing else values


# ---- scales ---------------------------------------------------------------------------------------------------------


def scales(buckets: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Scale and zero point of each bucket, fp32, as rounded to the scale's dtype; NaN and 0 where there is none."""
    r = torch.tensor(1 / codec.largest_code, dtype=torch.float32)  # of no dimension: for values on any device
    smallest = torch.tensor(_SMALLEST_SCALE[codec.scale_dtype], device=buckets.device)
    zero = torch.zeros(len(buckets), device=buckets.device)
    if codec.scheme == "minmax":
        zero = _round_down(buckets.amin(1) + 0.0, codec.scale_dtype)
        largest = buckets.amax(1) - zero
    else:
        largest = buckets.abs().amax(1)
    scale = -_round_down(-torch.maximum(largest * r, smallest), codec.scale_dtype)
    good = (scale * codec.largest_code).isfinite()
    return torch.where(good, scale, torch.nan), torch.where(good, zero, 0)


def _round_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Each value as the largest of ``dtype`` that is not above it."""
    nearest = values.to(dtype)
    bits = nearest.view(_SAME_SIZE_INTEGER[dtype])
    lower = torch.where(nearest > 0, bits - 1, bits + 1).view(dtype)  # no zero is above a value but a negative one
    return torch.where(nearest.float() > values, lower, nearest).float()


# ---- codes ----------------------------------------------------------------------------------------------------------


def _integer_codes(values: Tensor, inverse: Tensor, codec: Codec, halves: Tensor | None) -> Tensor:
    if halves is None:
        codes = torch.round(values.double() * inverse.double())  # exact: 24 bits each
    else:
        codes = torch.floor(_fma(values, inverse, 128 + halves.float() * 2.0**-16)) - 128
    offset = codec.largest_code if codec.scheme == "absmax" else 0
    return codes.long() + offset


def _e4m3_codes(values: Tensor, inverse: Tensor, codec: Codec, halves: Tensor | None) -> Tensor:
    products = values * inverse
    if halves is None:
        return products.to(torch.float8_e4m3fn).view(torch.uint8).long()
    bits = (products * 2.0**-120).view(torch.int32).long()  # now e4m3's last place is bit 20, for subnormals too
    return (bits >> 24 & 0x80) | ((bits & 0x7FFFFFFF) + 16 * halves + 8 >> 20)


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a x b + c``, rounded once: in fp64 to odd, and from there, with more than two bits to spare, to fp32."""
    product, c = a.double() * b.double(), c.double()
    total = product + c
    taken = total - product
    error = (product - (total - taken)) + (c - taken)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where((error != 0) & (bits & 1 == 0), bits + away, bits).view(torch.float64).float()


# ---- random bits ----------------------------------------------------------------------------------------------------


def random_halves(numel: int, noise: Noise, device: torch.device | None = None) -> Tensor:
    """16 random bits for each element, as int64; ``numel`` is a multiple of 8."""
    index = torch.arange(numel // RUN, device=device) + noise.first // RUN
    counter = [index & WORD, index >> 32, torch.full_like(index, noise.call), torch.full_like(index, noise.source)]
    words = torch.stack(philox(counter, noise.seed & WORD, noise.seed >> 32 & WORD), 1)
    return torch.stack([words & 0xFFFF, words >> 16], 2).view(-1)


def philox(counter: list[Tensor], key_low: int, key_high: int, rounds: int = 7) -> list[Tensor]:
    """Philox-4x32 of four words, each in an int64 tensor."""
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key_low, low1, high0 ^ c3 ^ key_high, low0
        key_low, key_high = (key_low + 0x9E3779B9) & WORD, (key_high + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, by halves, since int64 holds only 63 bits."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = (low >> 16) + (high & 0xFFFF)
    return (high >> 16) + (middle >> 16), (middle << 16 & WORD) | (low & 0xFFFF)


# ---- the wire -------------------------------------------------------------------------------------------------------


def _pieces(words: int) -> list[int]:
    """How the words of a lane are cut: 4 at a time, then 2, then 1."""
    return [4] * (words // 4) + [piece for piece in (2, 1) if words & piece]


def _pack_codes(codes: Tensor, codec: Codec) -> Tensor:
    bits = codec.code_bits
    by_lane = codes.view(-1, ROWS, LANES, RUN).transpose(1, 2).flatten(2)
    words = codes.new_zeros(len(by_lane), LANES, bits + 1)  # one more, into which nothing is carried
    for i in range(ROWS * RUN):
        word, shift = divmod(i * bits, 32)
        words[..., word] |= by_lane[..., i] << shift & WORD
        words[..., word + 1] |= by_lane[..., i] << shift >> 32
    words = words[..., :bits]
    planes = [plane.flatten(1) for plane in words.split(_pieces(bits), 2)]
    return _bytes(torch.cat(planes, 1), WORD_NBYTES)


def _unpack_codes(wire: Tensor, codec: Codec) -> Tensor:
    bits = codec.code_bits
    pieces = _pieces(bits)
    planes = _integers(wire, WORD_NBYTES).view(-1, LANES * bits).split([LANES * piece for piece in pieces], 1)
    words = torch.cat([plane.view(-1, LANES, piece) for plane, piece in zip(planes, pieces, strict=True)], 2)
    words = torch.nn.functional.pad(words, (0, 1))
    codes = words.new_empty(len(words), LANES, ROWS * RUN)
    for i in range(ROWS * RUN):
        word, shift = divmod(i * bits, 32)
        codes[..., i] = (words[..., word] | words[..., word + 1] << 32) >> shift & (1 << bits) - 1
    return codes.view(-1, LANES, ROWS, RUN).transpose(1, 2).reshape(-1)


def _pack_scales(scale: Tensor, zero: Tensor, codec: Codec) -> Tensor:
    numbers = torch.stack([scale, zero], 1) if codec.scheme == "minmax" else scale[:, None]
    numbers = numbers.to(codec.scale_dtype)
    bits = numbers.view(_SAME_SIZE_INTEGER[codec.scale_dtype])
    bits = torch.where(numbers.isnan(), torch.iinfo(bits.dtype).max, bits)
    in_order = bits.view(-1, *_rows_and_buckets(codec), bits.shape[1]).transpose(1, 2).reshape(-1, bits.shape[1])
    held = TILE_NUMEL // codec.bucket_size * bits.shape[1] * codec.scale_dtype.itemsize
    wire = _bytes(in_order, codec.scale_dtype.itemsize).view(-1, held)
    return torch.nn.functional.pad(wire, (0, codec.tile_scales_nbytes - held)).view(-1)


def _unpack_scales(wire: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    per_bucket = 2 if codec.scheme == "minmax" else 1
    held = TILE_NUMEL // codec.bucket_size * per_bucket * codec.scale_dtype.itemsize
    numbers = wire.view(-1, codec.tile_scales_nbytes)[:, :held].contiguous().view(codec.scale_dtype)
    rows, buckets = _rows_and_buckets(codec)
    in_order = numbers.float().view(-1, buckets, rows, per_bucket).transpose(1, 2).reshape(-1, per_bucket)
    return in_order[:, 0], in_order[:, -1]


def _rows_and_buckets(codec: Codec) -> tuple[int, int]:
    """How many rows of a tile hold a bucket of their own each, and how many; larger buckets count as one row's."""
    row = TILE_NUMEL // ROWS
    return (ROWS, row // codec.bucket_size) if codec.bucket_size <= row else (1, TILE_NUMEL // codec.bucket_size)


def _bytes(integers: Tensor, nbytes: int) -> Tensor:
    """The low ``nbytes`` bytes of each integer, one after another."""
    return (integers.long().reshape(-1, 1) >> 8 * _upto(nbytes, integers) & 0xFF).to(torch.uint8).view(-1)


def _integers(wire: Tensor, nbytes: int) -> Tensor:
    return (wire.view(-1, nbytes).long() << 8 * _upto(nbytes, wire)).sum(1)


def _upto(end: int, like: Tensor) -> Tensor:
    return torch.arange(end, device=like.device)
