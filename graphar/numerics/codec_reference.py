"""The specification of the codecs: encode and decode in torch, with the exact bits of the kernels.

Written to be read, not to be fast.

Arithmetic. All arithmetic is fp32. Each operation is rounded once, to nearest with ties to even, unless stated
otherwise. Subnormals are preserved. `r` is the fp32 number nearest to 1 / largest_code.

    absmax    scale = up(max(largest magnitude x r, smallest scale))
              code  = round(value x inverse)                        decodes to code x scale
    minmax    zero  = down(smallest value),  -0 as +0
              scale = up(max((largest value - zero) x r, smallest scale))
              code  = round((value - zero) x inverse)               decodes to code x scale + zero, rounded twice

`up` and `down` round to the scale's dtype, so that every element lies within the range of the codes. The smallest scale
is 2^-126. `inverse` is 1 / scale, with the rounded scale. An integer code is rounded from the exact product. An e4m3
code is rounded from the product in fp32. If scale x largest_code of a bucket is not finite in fp32, the bucket's scale
is NaN, its zero point is 0, and its elements are encoded as zeros.

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
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.dtypes import SAME_SIZE_INTEGER, with_canonical_nan
from graphar.numerics.exact_fma import fma

ROWS, LANES, RUN = 4, 32, 8  # a tile in a warp: each lane holds a run of consecutive elements of each row
SUM = 0xFF  # the source of random numbers for encoding a sum
WORD = 0xFFFFFFFF


class Noise(NamedTuple):
    """The inputs of stochastic rounding besides the position in the tensor."""

    seed: int  # 64 bits
    call: int  # how many calls came before, modulo 2^32
    source: int  # the rank, or SUM
    first: int = 0  # the index in the whole tensor of the first element that is encoded: a multiple of TILE_NUMEL


def encode(values: Tensor, codec: Codec, noise: Noise | None = None) -> Tensor:
    """Returns the bytes of a tensor on the wire: uint8, ``codec.wire_nbytes(values.numel())`` of them.

    ``values`` is 1-D, and converted to fp32; an empty tensor takes no bytes. ``noise`` is for stochastic rounding
    alone.
    """
    values = fill_up(values.float())
    buckets = values.view(-1, codec.bucket_size)
    scale, zero = scales(buckets, codec)
    good = scale.isfinite()
    inverse = torch.where(good, 1 / scale, 0)
    halves = None
    if codec.rounding == "stochastic":
        assert noise
        inverse = inverse * torch.tensor(1 - 2.0**-20)
        halves = random_halves(values.numel(), noise, values.device).view(buckets.shape)
    values = torch.where(good[:, None], buckets - zero[:, None] if codec.scheme == "minmax" else buckets, 0)
    to_codes = _e4m3_codes if codec.is_float else _integer_codes
    codes = to_codes(values, inverse[:, None], codec, halves)
    return torch.cat([_pack_codes(codes, codec), _pack_scales(scale, zero, codec)])


def decode(wire: Tensor, codec: Codec) -> Tensor:
    """Returns the fp32 values of all tiles of encoded bytes, with the padding of the last tile."""
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
    """Returns ``values`` padded to whole tiles with copies of the last value."""
    missing = -values.numel() % TILE_NUMEL
    return torch.cat([values, values[-1:].expand(missing)]) if missing else values


def scales(buckets: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    """Returns the scale and the zero point of each bucket, in fp32, after rounding to the scale's dtype.

    A bucket without a finite scale has the scale NaN and the zero point 0.
    """
    r = torch.tensor(1 / codec.largest_code, dtype=torch.float32)  # a 0-d CPU tensor multiplies values on any device
    zero = torch.zeros(len(buckets), device=buckets.device)
    if codec.scheme == "minmax":
        zero = _round_down(buckets.amin(1) + 0.0, codec.scale_dtype)
        largest = buckets.amax(1) - zero
    else:
        largest = buckets.abs().amax(1)
    scale = -_round_down(-(largest * r).clamp(min=2.0**-126), codec.scale_dtype)
    good = (scale * codec.largest_code).isfinite()
    return torch.where(good, scale, torch.nan), torch.where(good, zero, 0)


def _round_down(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the largest number of ``dtype`` that is not above each value."""
    nearest = values.to(dtype)
    bits = nearest.view(SAME_SIZE_INTEGER[dtype.itemsize])
    lower = torch.where(nearest > 0, bits - 1, bits + 1).view(dtype)  # only a negative value is below a zero
    return torch.where(nearest.float() > values, lower, nearest).float()


def _integer_codes(values: Tensor, inverse: Tensor, codec: Codec, halves: Tensor | None) -> Tensor:
    if halves is None:
        codes = torch.round(values.double() * inverse.double())  # exact: 24 bits each
    else:
        codes = torch.floor(fma(values, inverse, 128 + halves.float() * 2.0**-16)) - 128
    offset = codec.largest_code if codec.scheme == "absmax" else 0
    return codes.long() + offset


def _e4m3_codes(values: Tensor, inverse: Tensor, codec: Codec, halves: Tensor | None) -> Tensor:
    products = values * inverse
    if halves is None:
        return products.to(torch.float8_e4m3fn).view(torch.uint8).long()
    bits = (products * 2.0**-120).view(torch.int32).long()  # e4m3's last place is now bit 20, for subnormals too
    return (bits >> 24 & 0x80) | ((bits & 0x7FFFFFFF) + 16 * halves + 8 >> 20)


def random_halves(numel: int, noise: Noise, device: torch.device | None = None) -> Tensor:
    """Returns 16 random bits for each element, as int64. ``numel`` is a multiple of 8."""
    index = torch.arange(numel // RUN, device=device) + noise.first // RUN
    counter = [index & WORD, index >> 32, torch.full_like(index, noise.call), torch.full_like(index, noise.source)]
    words = torch.stack(philox(counter, noise.seed & WORD, noise.seed >> 32 & WORD), 1)
    return torch.stack([words & 0xFFFF, words >> 16], 2).view(-1)


def philox(counter: list[Tensor], key_low: int, key_high: int) -> list[Tensor]:
    """Returns Philox-4x32-7 of a counter of four 32-bit words, each in an int64 tensor, as four such words."""
    c0, c1, c2, c3 = counter
    for _ in range(7):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high1, low1 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ key_low, low1, high0 ^ c3 ^ key_high, low0
        key_low, key_high = (key_low + 0x9E3779B9) & WORD, (key_high + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Returns the high and the low word of a 32 x 32 bit product, by halves, since int64 holds only 63 bits."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = (low >> 16) + (high & 0xFFFF)
    return (high >> 16) + (middle >> 16), (middle << 16 & WORD) | (low & 0xFFFF)


def _pieces(words: int) -> list[int]:
    """Returns how a lane's words are cut into pieces: of 4 words, then 2, then 1."""
    return [4] * (words // 4) + [piece for piece in (2, 1) if words & piece]


def _places(bits: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the word in which each code of a lane begins, and at which bit."""
    first = torch.arange(ROWS * RUN, device=like.device) * bits
    return first // 32, first % 32


def _pack_codes(codes: Tensor, codec: Codec) -> Tensor:
    bits = codec.code_bits
    word, shift = _places(bits, codes)
    shifted = codes.view(-1, ROWS, LANES, RUN).transpose(1, 2).flatten(2) << shift
    words = codes.new_zeros(len(shifted), LANES, bits + 1)  # one spare word, which stays zero
    words.index_add_(2, word, shifted & WORD).index_add_(2, word + 1, shifted >> 32)  # no two codes share a bit
    planes = [plane.flatten(1) for plane in words[..., :bits].split(_pieces(bits), 2)]
    return torch.cat(planes, 1).int().view(torch.uint8).view(-1)


def _unpack_codes(wire: Tensor, codec: Codec) -> Tensor:
    bits = codec.code_bits
    pieces = _pieces(bits)
    words = wire.clone().view(torch.int32).long() & WORD
    planes = words.view(-1, LANES * bits).split([LANES * piece for piece in pieces], 1)
    words = torch.cat([plane.view(-1, LANES, piece) for plane, piece in zip(planes, pieces, strict=True)], 2)
    words = torch.nn.functional.pad(words, (0, 1))
    word, shift = _places(bits, words)
    codes = (words[..., :-1] | words[..., 1:] << 32).index_select(2, word) >> shift & (1 << bits) - 1
    return codes.view(-1, LANES, ROWS, RUN).transpose(1, 2).reshape(-1)


def _pack_scales(scale: Tensor, zero: Tensor, codec: Codec) -> Tensor:
    numbers = torch.stack([scale, zero], 1) if codec.scheme == "minmax" else scale[:, None]
    numbers = numbers.to(codec.scale_dtype)
    bits = numbers.view(SAME_SIZE_INTEGER[codec.scale_dtype.itemsize])
    bits = torch.where(numbers.isnan(), torch.iinfo(bits.dtype).max, bits)
    wire = bits.view(-1, *_rows_and_buckets(codec), bits.shape[1]).transpose(1, 2).flatten(1).view(torch.uint8)
    return torch.nn.functional.pad(wire, (0, codec.tile_scales_nbytes - wire.shape[1])).view(-1)


def _unpack_scales(wire: Tensor, codec: Codec) -> tuple[Tensor, Tensor]:
    (rows, buckets), per_bucket = _rows_and_buckets(codec), 2 if codec.scheme == "minmax" else 1
    numbers = wire.view(codec.scale_dtype).view(-1, codec.tile_scales_nbytes // codec.scale_dtype.itemsize).float()
    numbers = numbers[:, : rows * buckets * per_bucket].view(-1, buckets, rows, per_bucket)
    in_order = numbers.transpose(1, 2).reshape(-1, per_bucket)
    return in_order[:, 0], in_order[:, -1]


def _rows_and_buckets(codec: Codec) -> tuple[int, int]:
    """Returns how many rows a tile's buckets are grouped by, and the buckets of each row.

    Buckets that span several rows count as buckets of a single row.
    """
    row = TILE_NUMEL // ROWS
    return (ROWS, row // codec.bucket_size) if codec.bucket_size <= row else (1, TILE_NUMEL // codec.bucket_size)


def first_elements(counts: Sequence[int]) -> list[int]:
    """Returns the index of each message's first element for random numbers: earlier messages count as whole tiles."""
    return [tiles * TILE_NUMEL for tiles in accumulate((-(-count // TILE_NUMEL) for count in counts), initial=0)][:-1]


def sum_of_wires(wires: Sequence[torch.Tensor], codec: Codec, noise: Noise, like: torch.Tensor) -> torch.Tensor:
    """Returns the sum of all ranks' encoded tensors, rounded by the codec once more, as a tensor like ``like``."""
    total = decode(encode(total_of(wires, codec), codec, noise), codec)
    return with_canonical_nan(total[: like.numel()].to(like.dtype)).view(like.shape)


def part_of_wires(wires: Sequence[torch.Tensor], codec: Codec, like: torch.Tensor) -> torch.Tensor:
    """Returns the sum of the encoded messages that one rank received, as a tensor like its part, ``like``."""
    return with_canonical_nan(total_of(wires, codec)[: like.numel()].to(like.dtype)).view(like.shape)


def total_of(wires: Sequence[torch.Tensor], codec: Codec) -> Tensor:
    return reduce(torch.add, (decode(wire, codec) for wire in wires))


def error_of_wire(part: torch.Tensor, wire: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns the error of encoding ``part``, computed in fp32 and rounded to its dtype.

    The error is zero where a bucket became NaN. :func:`graphar.allreduce` with a codec leaves it in ``residual``;
    ``part`` is then the sum of the tensor and the residual.
    """
    return rounding_error(part, decode(wire, codec)[: part.numel()])


def rounding_error(part: torch.Tensor, decoded: Tensor) -> torch.Tensor:
    """Returns :func:`error_of_wire` of a part that is decoded as fp32."""
    error = torch.where(decoded.isnan(), 0, part.float().view(-1) - decoded)
    return error.to(part.dtype).view(part.shape)
