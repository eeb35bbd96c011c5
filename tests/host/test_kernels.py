"""Every kernel, executed on the host at 2 to 8 ranks: the specification's bits, whatever happens when.

`nox -s host -- -k "two_shot_push and 3 and plain" --seeds 7` runs one kernel, at 3 ranks, with one seed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphar.plan.algorithms import Algorithm
from tests.host.build import build, seeds
from tests.host.cases import ALGORITHMS, WAYS, Kernels, differences, draw, dtypes_of, simulate, world_sizes_of

pytestmark = pytest.mark.host

_LARGE = Algorithm.TWO_SHOT_TMA  # of which a run takes ten times as long
SEEDS = {"plain": 8, "thread": 6, "address": 3}
SEEDS_OF_LARGE = {"plain": 2, "thread": 1, "address": 1}
SEEDS_OF_OTHER_DTYPES = 3
SEEDS_IN_TILES = {"plain": 3, "thread": 2, "address": 1}  # whole warps, and a reference that takes its time


def runs():
    for algorithm in ALGORITHMS:
        for sanitizer in SEEDS:
            for world_size in world_sizes_of(algorithm, sanitizer):
                yield algorithm, sanitizer, world_size


def seeds_of(algorithm: Algorithm, sanitizer: str, asked: str | None) -> range:
    if asked:
        first, _, last = asked.partition("-")
        return range(int(first), int(last or first) + 1)
    in_tiles = WAYS[algorithm].codecs or algorithm.row.compresses
    most = SEEDS_OF_LARGE if algorithm is _LARGE else SEEDS_IN_TILES if in_tiles else SEEDS
    return seeds(most[sanitizer])


@pytest.mark.promise("All-reduce has the bits of its specification: fp32 sums in rank order, rounded once.")
@pytest.mark.parametrize(("algorithm", "sanitizer", "world_size"), list(runs()))
def test_every_rank_gets_the_specifications_bits(algorithm, sanitizer, world_size, request):
    dtypes = dtypes_of(algorithm) if sanitizer == "plain" else dtypes_of(algorithm)[:1]
    kernels = Kernels(algorithm, world_sizes_of(algorithm, sanitizer), dtypes)
    program = build(kernels.sources(), sanitizer)
    drawn_seeds = seeds_of(algorithm, sanitizer, request.config.getoption("--seeds"))
    for seed in drawn_seeds:
        # Schedules do not depend on dtypes: the others are there for their arithmetic, which takes fewer seeds.
        for dtype in dtypes if seed in drawn_seeds[:SEEDS_OF_OTHER_DTYPES] else dtypes[:1]:
            drawn = draw(algorithm, world_size, dtype, seed)
            outcomes = simulate(program, kernels, world_size, dtype, seed, drawn.calls)
            assert differences(drawn, outcomes) == [], f"{dtype}, --seeds {seed}"


@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT_PUSH, Algorithm.TWO_SHOT_LOSSLESS])  # in packs, and in tiles
def test_tensors_aligned_to_half_a_pack_are_accessed_by_elements(algorithm):
    dtype = dtypes_of(algorithm)[0]
    kernels = Kernels(algorithm, world_sizes_of(algorithm, "address"), (dtype,))
    drawn = draw(algorithm, 2, dtype, 0, 2)
    calls = [replace(call, offset=8) for call in drawn.calls]

    assert differences(drawn, simulate(build(kernels.sources(), "address"), kernels, 2, dtype, 0, calls)) == []
