"""One interface to every kernel that ranks run together: draws calls from a seed, and runs them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import Algorithm
from graphar.plan.scratch import WORLD_SIZES
from graphar.runtime.catalogue import KERNELS, NORM_KERNELS, SKINNY_KERNELS, SUMMED_TILE_KERNELS
from graphar.simulator.calls import Drawn, first_epoch
from graphar.simulator.simulation import Call, Outcome, Simulation
from tests.host import cases, test_norms
from tests.host.build import build
from tests.host.cases import Kernels, dtypes_of
from tests.host.products import Products, of_ranks
from tests.host.test_norms import Norms

# At which the kernels' own test files run them.
_WORLD_SIZES = {
    **dict.fromkeys(KERNELS, cases.WORLD_SIZES),
    **dict.fromkeys(NORM_KERNELS, test_norms.WORLD_SIZES),
    **dict.fromkeys(SUMMED_TILE_KERNELS, (2, 3, 4)),
    **dict.fromkeys(SKINNY_KERNELS, (2, 3)),
    Algorithm.ALLGATHER_MATMUL: (2, 3, 4),
}
EVERY_KERNEL = tuple(_WORLD_SIZES)


def other_world_sizes(algorithm: Algorithm) -> tuple[int, ...]:
    """The world sizes at which the kernel's own test file does not run it."""
    return tuple(n for n in WORLD_SIZES if n not in _WORLD_SIZES[algorithm])


def draw(algorithm: Algorithm, world_size: int, seed: int, calls: int) -> Drawn:
    """Calls, and the bytes that each rank must get. A test with norms needs the fixture few_slots."""
    if algorithm in KERNELS:
        return cases.draw(algorithm, world_size, dtypes_of(algorithm)[0], seed, calls)
    choices = random.Random(f"{algorithm} {world_size} {seed}")
    if algorithm not in NORM_KERNELS:
        return _products(algorithm, world_size).draw(choices, calls)
    norms, made = _norms(algorithm, world_size), []
    for _ in range(calls):
        call, result = test_norms.draw_call(norms, world_size, torch.bfloat16, choices)
        made.append((call, result if isinstance(result, list) else [result] * world_size))
    return Drawn([call for call, _ in made], [results for _, results in made])


def run(
    algorithm: Algorithm, world_size: int, seed: int, calls: Sequence[Call], sanitizer: str = "plain", **options
) -> list[Outcome]:
    """The outcome of every rank, by the programs of the kernel's own tests. ``options`` go to Simulation."""
    if algorithm in KERNELS:
        kernels = _kernels(algorithm, world_size, sanitizer)
        program, first = build(kernels.sources(), sanitizer), kernels.first(world_size, kernels.dtypes[0])
    elif algorithm in NORM_KERNELS:
        norms = _norms(algorithm, world_size)
        program, first = norms.build(sanitizer), norms.first(world_size, torch.bfloat16)
    else:
        return _products(algorithm, world_size, sanitizer).run(calls, seed, **options)
    scratch, epoch = cases.scratch_of(algorithm, world_size), first_epoch(seed)
    return Simulation(program, algorithm, world_size, scratch, first, seed, epoch, **options).run(calls)


def _kernels(algorithm: Algorithm, world_size: int, sanitizer: str) -> Kernels:
    dtypes, others = dtypes_of(algorithm), other_world_sizes(algorithm)
    if world_size in others:
        return Kernels(algorithm, others, dtypes[:1])
    return Kernels(
        algorithm, cases.world_sizes_of(algorithm, sanitizer), dtypes if sanitizer == "plain" else dtypes[:1]
    )


def _norms(algorithm: Algorithm, world_size: int) -> Norms:
    others = other_world_sizes(algorithm)
    return Norms(algorithm, (torch.bfloat16,), others) if world_size in others else Norms(algorithm, tuple(TYPE_NAMES))


def _products(algorithm: Algorithm, world_size: int, sanitizer: str = "plain") -> Products:
    made = of_ranks(algorithm, world_size, sanitizer)
    return replace(made, kinds=made.kinds[:1]) if world_size in other_world_sizes(algorithm) else made
