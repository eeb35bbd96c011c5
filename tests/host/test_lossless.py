"""The device code of lossless compression, executed on the host: it writes the wire of the specification, and reads it.

Which tiles a warp tries does not show in the sums of test_kernels.py. It shows in the headers on the wire.
"""

from __future__ import annotations

import pytest
import torch

from graphar.numerics.lossless_reference import encode
from graphar.plan.algorithms import Algorithm, Shape
from graphar.plan.scratch import Scratch
from graphar.runtime.catalogue import KernelSource
from tests.cases import bit_patterns, far_apart, in_turns, normal
from tests.host.build import Mutation, build
from tests.host.simulate import Call, Simulation

pytestmark = pytest.mark.host

TILE = 1024
SOURCES = tuple(KernelSource("lossless.cu", name) for name in ("send_tensor<1>", "send_tensor<2>", "receive_tensor"))
ONE_WARP = Shape(Algorithm.ONE_SHOT_PUSH, 1, 32)


def stream(fit: str) -> torch.Tensor:
    """A tile for each letter: "+" can be compressed, "-" cannot."""
    tiles = {"+": normal(0, TILE, torch.bfloat16), "-": bit_patterns(0, TILE, torch.bfloat16)}
    return torch.cat([tiles[letter] for letter in fit])


INPUTS = {
    "in turns": stream("+-" * 10),
    "failures begin again after a success": stream("---+---+----+++"),
    "the 64th tile": stream(63 * "-" + "+" + "---+----" + 58 * "+" + "----" + 4 * "+"),
    "the 64th tile fails": stream(10 * "-" + 54 * "-" + 66 * "+"),
    "normal": normal(1, 3 * TILE + 5, torch.bfloat16),
    "far apart": far_apart(2, 20 * TILE - 1, torch.bfloat16),
    "any bits": bit_patterns(3, 5 * TILE + 1023, torch.bfloat16),
    "mixed": in_turns(0, 40 * TILE + 513, torch.bfloat16),
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
    "every tile is tried": mistake("if (failures_ >= most_failures && ", "if (failures_ > most_failures && "),
    "a failure too few": mistake("most_failures = 4,", "most_failures = 3,"),
    "a failure too many": mistake("most_failures = 4,", "most_failures = 5,"),
    "no tile is tried again": mistake("++failures_ % tries_every != 0", "++failures_ != 0"),
    "another tile is tried again": mistake("tries_every = 64;", "tries_every = 65;"),
    "failures go on after a success": mistake("failures_ = 0;\n    else", ";\n    else"),
    "a header does not say that a tile is uncompressed": mistake("= {{0, as_it_is}};", "= {{0, 0}};"),
    "a tile is sent to the first slot alone": mistake(
        "send_as_it_is(to(i), tile, t);", "send_as_it_is(to(0), tile, t);"
    ),
    "a failed tile does not count": mistake("    return false;\n", "    return true;\n"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name):
    assert wrongly_sent(2, mutation=MISTAKES[name]) != []
