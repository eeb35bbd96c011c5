"""One interface to every kernel that ranks run together: draws calls from a seed, and runs them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import Algorithm
from graphar.plan.scratch import WORLD_SIZES
from graphar.runtime.catalogue import KERNELS, NORM_KERNELS, SKINNY_KERNELS, SUMMED_TILE_KERNELS
from graphar.simulator.calls import Drawn, first_epoch
from graphar.simulator.simulation import Call, Outcome, Simulation
from tests.host import cases, test_allgather_matmul, test_matmul_skinny, test_matmul_tiles, test_norms
from tests.host.build import build
from tests.host.cases import Kernels, dtypes_of
from tests.host.test_norms import Norms

_FILES = {
    **dict.fromkeys(KERNELS, cases),
    **dict.fromkeys(NORM_KERNELS, test_norms),
    **dict.fromkeys(SUMMED_TILE_KERNELS, test_matmul_tiles),
    **dict.fromkeys(SKINNY_KERNELS, test_matmul_skinny),
    Algorithm.ALLGATHER_MATMUL: test_allgather_matmul,
}
EVERY_KERNEL = tuple(_FILES)
_MOST_THREADS = 1 << 13  # of all ranks


def other_world_sizes(algorithm: Algorithm) -> tuple[int, ...]:
    """The world sizes at which the kernel's own test file does not run it."""
    return tuple(n for n in WORLD_SIZES if n not in _FILES[algorithm].WORLD_SIZES)


def draw(algorithm: Algorithm, world_size: int, seed: int, calls: int) -> Drawn:
    """Calls, and the bytes that each rank must get. A test with norms needs the fixture few_slots."""
    if algorithm in KERNELS:
        return cases.draw(algorithm, world_size, dtypes_of(algorithm)[0], seed, calls)
    choices, made = random.Random(f"{algorithm} {world_size} {seed}"), []
    for _ in range(calls):
        if algorithm in NORM_KERNELS:
            norms = _norms(algorithm, world_size)
            call, result = test_norms.draw_call(norms, world_size, torch.bfloat16, choices)
        else:
            kinds = _kinds(algorithm, world_size)
            call, result = _FILES[algorithm].draw_call(algorithm, choices, world_size, kinds, _MOST_THREADS)
        made.append((call, result if isinstance(result, list) else [result] * world_size))
    return Drawn([call for call, _ in made], [results for _, results in made])


def run(
    algorithm: Algorithm, world_size: int, seed: int, calls: Sequence[Call], sanitizer: str = "plain", **options
) -> list[Outcome]:
    """The outcome of every rank, by the programs of the kernel's own tests. ``options`` go to Simulation."""
    file, first = _FILES[algorithm], 0
    if algorithm in KERNELS:
        kernels = _kernels(algorithm, world_size, sanitizer)
        program, first = build(kernels.sources(), sanitizer), kernels.first(world_size, kernels.dtypes[0])
    elif algorithm in NORM_KERNELS:
        norms = _norms(algorithm, world_size)
        program, first = norms.build(sanitizer), norms.first(world_size, torch.bfloat16)
    else:
        program = file.program_of(algorithm, world_size, sanitizer, _kinds(algorithm, world_size))
    scratch, epoch = file.scratch_of(algorithm, world_size), first_epoch(seed)
    return Simulation(program, algorithm, world_size, scratch, first, seed, epoch, **options).run(calls)


def _kernels(algorithm: Algorithm, world_size: int, sanitizer: str) -> Kernels:
    dtypes, others = dtypes_of(algorithm), other_world_sizes(algorithm)
    if world_size in others:
        return Kernels(algorithm, others, dtypes[:1])
    return Kernels(algorithm, cases.WORLD_SIZES, dtypes if sanitizer == "plain" else dtypes[:1])


def _norms(algorithm: Algorithm, world_size: int) -> Norms:
    others = other_world_sizes(algorithm)
    return Norms(algorithm, (torch.bfloat16,), others) if world_size in others else Norms(algorithm, tuple(TYPE_NAMES))


def _kinds(algorithm: Algorithm, world_size: int) -> tuple:
    kinds = _FILES[algorithm].KINDS
    return kinds[:1] if world_size in other_world_sizes(algorithm) else kinds
