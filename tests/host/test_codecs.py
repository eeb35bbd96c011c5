"""The device code of the codecs, executed on the host: it writes the wire that the specification does, and reads it."""

from __future__ import annotations

import pytest
import torch

from graphar.numerics.codec_reference import Noise, decode, encode, error_of_wire, random_halves, scales
from graphar.numerics.codecs import BITS, BUCKET_SIZES, FP8, NAMES, SCALE_DTYPES, TILE_NUMEL, Codec
from graphar.numerics.codecs import codec as named
from graphar.numerics.dtypes import TYPE_NAMES, with_canonical_nan
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import Scratch
from graphar.runtime.catalogue import KernelSource
from graphar.simulator.simulation import Call, Simulation
from tests.cases import bit_patterns, normal
from tests.host.build import build

pytestmark = pytest.mark.host

SEED, CALL = 0x0123456789ABCDEF, (1 << 32) - 1
CODECS = (
    *map(named, NAMES),
    *(Codec(bits, 128, "stochastic", "minmax", torch.float32) for bits in BITS if bits not in (4, 6, FP8)),
    *(Codec(4, size, "nearest", "minmax") for size in BUCKET_SIZES),
    *(Codec(6, size, "stochastic", "absmax", scale) for size in (32, 1024) for scale in SCALE_DTYPES),
    *(Codec(FP8, size, "stochastic") for size in (64, 512)),
)
DTYPES = tuple(TYPE_NAMES)
KERNELS = ("encode_tensor", "decode_tensor", "error_of_tensor")


def special(numel: int) -> torch.Tensor:
    """Some buckets hold zeros, constants, subnormals, the largest values, one outlier, or values of one sign."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(5))
    fills = [
        lambda n: torch.zeros(n),
        lambda n: torch.full((n,), -3.1416),
        lambda n: torch.full((n,), 3.4028e38),
        lambda n: torch.full((n,), 1e-40) * torch.arange(n),
        lambda n: torch.arange(n) * 1e-38,
        lambda n: torch.nn.functional.one_hot(torch.tensor(n // 3), n) * -1e4,
        lambda n: torch.arange(n) + 1.0,
        lambda n: torch.full((n,), -0.0),
        lambda n: torch.linspace(65504 * 0.9, 65504, n),
        lambda n: torch.linspace(-3.3e38, 3.3e38, n),
    ]
    for at in range(0, numel - 1024, 32):
        size = (32, 64, 1024)[at // 32 % 3]
        if at // 32 % 5 < 2:
            x[at : at + size] = fills[at // 32 % len(fills)](size)
    return x


def beside_the_middle(codec: Codec) -> torch.Tensor:
    """Values whose products with 1 / scale, and random number, lie so near to the middle that fp32 rounds to it."""
    buckets = normal(1, 5 * TILE_NUMEL, torch.float32).view(-1, codec.bucket_size)
    buckets[:, 0], buckets[:, 1] = 5.3, -5.3
    scale, zero = (numbers[:, None] for numbers in scales(buckets, codec))
    halves, inverse = torch.full(buckets.shape, 1 << 15), 1 / scale
    if codec.rounding == "stochastic":
        inverse = inverse * (1 - 2.0**-20)
        halves = random_halves(buckets.numel(), Noise(SEED, CALL, 0)).view(buckets.shape)
    if codec.is_float:
        bits = (torch.arange(buckets.numel()).view(buckets.shape) % 100 + 8 << 20) + (1 << 20) - 16 * halves - 4
        hard = bits.int().view(torch.float32) * 2.0**120 / inverse
    else:
        codes = ((buckets - zero) * inverse).floor() + 1 - halves.double() * 2.0**-16
        hard = (codes / inverse.double() + zero.double()).float().clamp(-5.25, 5.25)
    buckets[:, 2:] = hard[:, 2:]
    return buckets.flatten()


def inputs(codec: Codec, dtype: torch.dtype) -> list[torch.Tensor]:
    whole = 5 * TILE_NUMEL
    clean = normal(3, whole, dtype)
    clean[700] = torch.inf
    clean[2500] = torch.nan
    hard = beside_the_middle(codec).to(dtype)
    return [clean, special(whole - 5).to(dtype), bit_patterns(2, whole - 1, dtype), normal(1, 1, dtype), hard]


@pytest.fixture(scope="module")
def program():
    sources = [
        KernelSource("codec.cu", f"{kernel}<{codec.type_name}, {TYPE_NAMES[dtype]}>")
        for codec in CODECS
        for dtype in DTYPES
        for kernel in KERNELS
    ]
    return build(tuple(sources), "plain")


@pytest.mark.promise("A codec's results have the bits of its specification, at every size and on every rank.")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.type_name)
def test_the_wire_what_it_decodes_to_and_the_error_are_the_specifications(codec, dtype, program):
    first = len(KERNELS) * (CODECS.index(codec) * len(DTYPES) + DTYPES.index(dtype))
    simulation = Simulation(program, Algorithm.ONE_SHOT_PUSH, 1, Scratch(0, 128, 0), first, 0, CALL)
    warp = Config(Algorithm.ONE_SHOT_PUSH, 1, 32)
    xs = inputs(codec, dtype)
    wires = [encode(x, codec, Noise(SEED, CALL, 0)) for x in xs]
    numels = [x.numel() for x in xs]
    values = [decode(wire, codec)[:n].to(dtype) for wire, n in zip(wires, numels, strict=True)]
    encodings = [
        Call(0, warp, [x], (n,), (wire.numel(),), seed=SEED) for x, n, wire in zip(xs, numels, wires, strict=True)
    ]
    decodings = [Call(1, warp, [wire], (n,), (n * dtype.itemsize,)) for wire, n in zip(wires, numels, strict=True)]
    differences = [Call(2, warp, [x], (n,), (x.nbytes,), seed=SEED) for x, n in zip(xs, numels, strict=True)]

    (outcome,) = simulation.run(encodings + decodings + differences)

    sent, received, errors = (outcome.results[at * len(wires) :][: len(wires)] for at in range(3))
    assert [int((mine != wire).sum()) for mine, wire in zip(sent, wires, strict=True)] == [0] * len(wires)
    expected = [with_canonical_nan(x).view(torch.uint8) for x in values]
    assert [int((mine != x).sum()) for mine, x in zip(received, expected, strict=True)] == [0] * len(wires)
    taken = [error_of_wire(*pair, codec) for pair in zip(xs, wires, strict=True)]
    assert [int((mine != x.view(torch.uint8)).sum()) for mine, x in zip(errors, taken, strict=True)] == [0] * len(wires)
    assert outcome.broken_guards == 0
