"""The kernels that encode and add where torch.distributed moves codes, executed on the host: the reference's bits."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from graphar.numerics.codec_reference import SUM, Noise, encode, error_of_wire, part_of_wires, sum_of_wires, total_of
from graphar.numerics.codecs import NAMES, TILE_NUMEL, Codec
from graphar.numerics.codecs import codec as named
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import PACK_NBYTES, Scratch
from graphar.runtime.catalogue import KernelSource, local_codec_sources
from graphar.simulator.build import Mutation
from graphar.simulator.simulation import Call, Simulation
from tests.cases import bit_patterns, normal, same_bits
from tests.host.build import build, known, seeds
from tests.host.mutant import notices

pytestmark = pytest.mark.host

FILE, OF_ANY_KIND = "quantized/local_codec.cu", Algorithm.ONE_SHOT_PUSH  # any: Simulation requires one
SEED = 0x0123456789ABCDEF
CODECS = (
    *map(named, NAMES),
    Codec(4, 128, "stochastic", feedback=True),
    Codec(8, 512, "stochastic", "minmax", torch.float32, feedback=True),
    Codec(2, 1024, "nearest", "minmax"),
)
KINDS = [(codec, dtype) for codec in CODECS for dtype in TYPE_NAMES]
SOURCES = tuple(
    KernelSource("one_local_codec.cu", f"one_{source.name}")
    for codec, dtype in KINDS
    for source in local_codec_sources(dtype, codec)
)
ENCODE, SUM_UP, RECODE = range(3)  # the kernels of a kind
MISTAKES = {
    "tiles left out": Mutation(FILE, "tile += gridDim.x * warps", "tile += gridDim.x * warps + 1"),
    "random bits of the first tile": Mutation(
        FILE, "a.first_tile + tile, {a.seed, a.call, a.source}", "tile, {a.seed, a.call, a.source}"
    ),
    "random bits of a rank for a sum": Mutation(FILE, "{a.seed, a.call, noise_of_sum}", "{a.seed, a.call, a.source}"),
    "a message left out": Mutation(FILE, "message < a.count", "message + 1 < a.count"),
    "a sum that begins anew": Mutation(FILE, "take(message, true)", "take(message, false)"),
    "errors that stay": Mutation(FILE, "if constexpr (C::feedback)", "if constexpr (!C::feedback && false)"),
}
known(MISTAKES.values())


def run(sanitizer: str, mistake: Mutation | None, seed: int, kernel: int, x: torch.Tensor, **of_call) -> tuple:
    """The result's bytes of one call of a kernel, and its broken guards."""
    choices = random.Random(seed)
    shape = Config(OF_ANY_KIND, choices.randint(1, 3), choices.choice([32, 64]))
    call = Call(kernel, shape, [x.clone()], seed=SEED, **of_call)
    program = build(SOURCES, sanitizer, mistake)
    (outcome,) = Simulation(program, OF_ANY_KIND, 1, Scratch(0, 128, 0), 0, seed).run([call])
    return outcome.results[0], outcome.broken_guards


def wrong_bytes(sanitizer: str, seed: int, mistake: Mutation | None = None, **of_call) -> int:
    """How many bytes and guards are wrong after a tensor is encoded, and after messages are added in both ways."""
    choices = random.Random(seed)
    kind = choices.randrange(len(KINDS))
    codec, dtype = KINDS[kind]
    numel, ranks = choices.choice([1, 7, 1024, choices.randrange(1, 5000), 4096]), choices.choice([1, 2, 3, 9])
    call, source, first = choices.randrange(1 << 20), choices.randrange(8), choices.randrange(9)
    xs = [choices.choice([normal, bit_patterns])(rank, numel, dtype) for rank in range(ranks)]
    wires = [encode(x, codec, Noise(SEED, call, source, first * TILE_NUMEL)) for x in xs]
    wrong = 0

    skipped = choices.choice([0, 0, 1, 8])
    whole = torch.cat([torch.zeros(skipped, dtype=dtype), xs[0]])
    found, broken = run(
        *(sanitizer, mistake, seed, 3 * kind + ENCODE, whole),
        counts=(numel,),
        output_nbytes=(wires[0].numel(),),
        feeds_back=codec.feedback,
        scalars=(source, call, first, skipped * dtype.itemsize),
        **of_call,
    )
    sent, left = found.split([wires[0].numel(), len(found) - wires[0].numel()])
    wrong += broken + int((sent != wires[0]).sum())
    if codec.feedback:
        wrong += same_bits(left.view(dtype)[skipped:], error_of_wire(xs[0], wires[0], codec))

    pitch = -(-wires[0].numel() // PACK_NBYTES) * PACK_NBYTES
    rows = torch.stack([torch.nn.functional.pad(wire, (0, pitch - wire.numel())) for wire in wires])
    noise, of_sum = Noise(SEED, call, SUM, first * TILE_NUMEL), (ranks, call, first, pitch)
    coded = encode(total_of(wires, codec), codec, noise)
    for kernel, expected in (
        (SUM_UP, part_of_wires(wires, codec, xs[0]).view(torch.uint8)),
        (RECODE, torch.cat([coded, sum_of_wires(wires, codec, noise, xs[0]).view(torch.uint8)])),
    ):
        found, broken = run(
            *(sanitizer, mistake, seed, 3 * kind + kernel, rows.view(-1)),
            counts=(numel,),
            output_nbytes=(expected.numel(),),
            scalars=of_sum,
            **of_call,
        )
        wrong += broken + int((found != expected).sum())
    return wrong


@pytest.mark.promise("A codec's results have the bits of its specification, at every size and on every rank.")
@pytest.mark.parametrize(("sanitizer", "most_seeds"), [("plain", 60), ("thread", 6), ("address", 20)])
def test_they_give_the_specifications_bits(sanitizer, most_seeds):
    for seed in seeds(most_seeds):
        assert wrong_bytes(sanitizer, seed) == 0, seed


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_noticed(mistake):
    assert any(notices(partial(wrong_bytes, "plain", seed, mistake)) for seed in range(40))


def test_a_kernel_without_its_wait_for_the_one_before_is_noticed():
    assert any(wrong_bytes("plain", seed, waits=False) for seed in range(4))
