"""The device code of lossless compression, executed on the host: it writes the wire of the specification, and reads it.

The kernels' results in test_kernels.py do not show which tiles are compressed. The headers on the wire do.
"""

from __future__ import annotations

import pytest
import torch

from graphar.numerics.lossless_reference import encode
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import Scratch
from graphar.runtime.catalogue import KernelSource
from graphar.simulator.build import Mutation
from graphar.simulator.simulation import Call, Simulation
from tests.cases import bit_patterns, far_apart, in_turns, normal
from tests.host.build import build, known

pytestmark = pytest.mark.host

TILE = 1024
SOURCES = tuple(KernelSource("lossless.cu", name) for name in ("send_tensor<1>", "send_tensor<2>", "receive_tensor"))
ONE_WARP = Config(Algorithm.ONE_SHOT_PUSH, 1, 32)


def with_odd(count: int) -> torch.Tensor:
    """A tile of normal values, of which so many lie far below the others."""
    tile = normal(5, TILE, torch.bfloat16)
    tile[7 : 7 + 100 * count : 100] = 2.0**-60
    return tile


def every_exponent() -> torch.Tensor:
    """Rows of 256 elements, in each of which three elements in 128 have one exponent, and the others all exponents."""
    exponents = torch.arange(256, dtype=torch.int16) << 7
    return torch.stack([torch.where(torch.arange(256) % 128 < 3, one | 0x7F, exponents) for one in exponents])


INPUTS = {
    "six and seven odd elements": torch.cat([with_odd(6), with_odd(7)]),
    "normal": normal(1, 3 * TILE + 5, torch.bfloat16),
    "far apart": far_apart(2, 20 * TILE - 1, torch.bfloat16),
    "any bits": bit_patterns(3, 5 * TILE + 1023, torch.bfloat16),
    "tiles that fit and tiles that do not": in_turns(0, 40 * TILE + 513, torch.bfloat16),
    "every exponent beside every other": every_exponent().flatten().view(torch.bfloat16),
    "one element": normal(4, 1, torch.bfloat16),
}


def run(kernel: int, inputs, numels, output_nbytes, sanitizer: str = "plain", mutation: Mutation | None = None):
    program = build(SOURCES, sanitizer, mutation)
    simulation = Simulation(program, Algorithm.ONE_SHOT_PUSH, 1, Scratch(0, 128, 0), kernel, 0)
    calls = [
        Call(0, ONE_WARP, [x], (numel,), (nbytes,))
        for x, numel, nbytes in zip(inputs, numels, output_nbytes, strict=True)
    ]
    (outcome,) = simulation.run(calls)
    assert outcome.broken_guards == 0
    return outcome.results


def wrongly_sent(slots: int, sanitizer: str = "plain", mutation: Mutation | None = None) -> list[str]:
    """The inputs whose wire differs from the specification's in any slot."""
    wires = [encode(x).repeat(slots) for x in INPUTS.values()]
    numels = [x.numel() for x in INPUTS.values()]
    sent = run(slots - 1, INPUTS.values(), numels, map(len, wires), sanitizer, mutation)
    return [name for name, wire, mine in zip(INPUTS, wires, sent, strict=True) if not torch.equal(mine, wire)]


@pytest.mark.promise("All-reduce has the bits of its specification: fp32 sums in rank order, rounded once.")
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("sanitizer", ["plain", "thread", "address"])
def test_the_wire_is_the_specifications(slots, sanitizer):
    assert wrongly_sent(slots, sanitizer) == []


@pytest.mark.parametrize("sanitizer", ["plain", "address"])
def test_a_wire_decodes_to_every_bit(sanitizer):
    numels = [x.numel() for x in INPUTS.values()]
    values = [x.view(torch.uint8) for x in INPUTS.values()]

    found = run(2, map(encode, INPUTS.values()), numels, map(len, values), sanitizer)

    assert [int((mine != x).sum()) for mine, x in zip(found, values, strict=True)] == [0] * len(values)


def mistake(old: str, new: str) -> Mutation:
    return Mutation("device/wire/lossless.cuh", old, new)


MISTAKES = {
    "an exponent that just fits": mistake("bytes_from<15>(offset[h])", "bytes_from<14>(offset[h])"),
    "one odd element too few": mistake("most_odd = header_words - 2", "most_odd = header_words - 3"),
    "a header does not say that a tile is uncompressed": mistake("total > most_odd ? as_it_is : total", "total"),
    "a tile is sent to the first slot alone": mistake("send_odd(to(i), t, c);", "send_odd(to(0), t, c);"),
}


known(MISTAKES.values())


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name):
    assert wrongly_sent(2, mutation=MISTAKES[name]) != []
