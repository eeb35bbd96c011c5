"""The codecs on the CPU have the bits of their specification: every format, dtype and length, and hard values."""

from collections.abc import Iterator

import pytest
import torch

from graphar.numerics import codec_reference, cpu_codec
from graphar.numerics.codec_reference import SUM, Noise
from graphar.numerics.codecs import BITS, Codec
from graphar.numerics.dtypes import with_canonical_nan
from tests.cases import KERNEL_DTYPES, normal, same_bits
from tests.numerics.test_codecs import EVERY_CODEC

NUMELS = (1, 1023, 1024, 2048, 5000)  # chunks have two tiles
NOISES = (Noise(1, 2, 0), Noise((1 << 64) - 3, (1 << 32) - 1, SUM, 1024 * 5), Noise(1 << 63, 7, 3, (1 << 35) - 2048))


def beside_the_middle(numel: int, one: Codec, noise: Noise) -> torch.Tensor:
    """Values whose products with 1 / scale, and random number, lie so near to the middle that fp32 rounds to it."""
    filled = codec_reference.fill_up(normal(1, numel, torch.float32))
    buckets = filled.view(-1, one.bucket_size)
    buckets[:, 0], buckets[:, 1] = 5.3, -5.3
    scale, zero = (found[:, None] for found in codec_reference.scales(buckets, one))
    halves, inverse = torch.full(buckets.shape, 1 << 15), 1 / scale
    if one.rounding == "stochastic":
        inverse = inverse * (1 - 2.0**-20)
        halves = codec_reference.random_halves(filled.numel(), noise).view(buckets.shape)
    if one.is_float:
        bits = (torch.arange(filled.numel()).view(buckets.shape) % 100 + 8 << 20) + (1 << 20) - 16 * halves - 4
        buckets[:, 2:] = (bits.int().view(torch.float32) * 2.0**120 / inverse)[:, 2:]
        return filled[:numel]
    middle = 1 - halves.double() * 2.0**-16
    codes = ((buckets - zero * (one.scheme == "minmax")) * inverse).floor()
    hard = ((codes + middle) / inverse.double() + zero.double() * (one.scheme == "minmax")).float()
    buckets[:, 2:] = hard.clamp(-5.25, 5.25)[:, 2:]
    return filled[:numel]


def values(numel: int, one: Codec, noise: Noise) -> Iterator[torch.Tensor]:
    x = normal(2, numel, torch.float32)
    yield x
    yield torch.ldexp(x, torch.arange(numel) % 250 - 140)  # subnormals, and numbers that a codec cannot hold
    yield (x * 8).round() / 2
    yield beside_the_middle(numel, one, noise)
    x = x.clone()
    for at, value in enumerate((torch.nan, torch.inf, -torch.inf, -0.0, 3.4e38)):
        x[at * 997 % numel] = value
    yield x


@pytest.mark.parametrize("bits", BITS)
def test_bytes_and_values_are_those_of_the_specification(bits, monkeypatch):
    monkeypatch.setattr(cpu_codec, "_CHUNK_TILES", 2)
    monkeypatch.setattr(cpu_codec, "_room", cpu_codec._Room())
    for place, one in enumerate(one for one in EVERY_CODEC if one.bits == bits):
        noise, numel, dtype = NOISES[place % 3], NUMELS[place % 5], KERNEL_DTYPES[place // 3 % 3]
        for x in values(numel, one, noise):
            wire = codec_reference.encode(x.to(dtype), one, noise)
            expected = codec_reference.decode(wire, one)[:numel]
            found = torch.empty(numel, dtype=dtype)

            assert torch.equal(cpu_codec.encode(x.to(dtype), one, noise), wire), one
            cpu_codec.decode(wire, one, found)
            assert same_bits(found, with_canonical_nan(expected.to(dtype))) == 0, one


@pytest.mark.parametrize("bits", BITS)
def test_a_wire_that_begins_anywhere_is_added_to_a_sum(bits):
    one, total, x = Codec(bits, 64), normal(3, 3000, torch.float32), normal(4, 3000, torch.float32)
    wire = codec_reference.encode(x, one)
    expected = total + codec_reference.decode(wire, one)[:3000]

    cpu_codec.decode(torch.cat([torch.zeros(5, dtype=torch.uint8), wire])[5:], one, total, adds=True)

    assert same_bits(total, expected) == 0
