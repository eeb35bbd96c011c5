"""Sums as a tree with residual and norm, executed on the host: the specification's bits at 2, 4 and 8 ranks.

A communicator's calls take turns: in the order of ranks and as a tree, with results of 32 bits and of 16. All share
their slots.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import product

import pytest
import torch

from graphar import reference
from graphar.numerics import norms as specification
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import PACK_NBYTES
from graphar.plan.work import Norm, template_of
from graphar.runtime.catalogue import NORM_KERNELS, kernel_source
from graphar.simulator.build import Mutation
from graphar.simulator.calls import Drawn
from graphar.simulator.simulation import Call
from tests.cases import bit_patterns, far_apart, normal
from tests.host.build import NORM_SLOTS, build, known, seeds
from tests.host.cases import faults, scratch_of
from tests.host.mutant import notices
from tests.host.test_norms import GUARD, LARGE_CLUSTERS, MANY_SLOTS, bytes_of, more_slots

pytestmark = pytest.mark.host

FP32 = torch.float32
WORLD_SIZES = (2, 4, 8)
MOST_RANKS = {"plain": 8, "thread": 4, "address": 8}
SEEDS = {"plain": 6, "thread": 2, "address": 2}
CALLS = 6
CLUSTERS = (1, 2)
KINDS = (None, *TYPE_NAMES)  # in the order of ranks, and as a tree with each result
ROW_PACKS = (1, 8, 33, 64, 130)  # of a result's row, up to three for each slot
ROWS = (1, 2, 5, 13)
_, TWO_SHOT, SCATTER = (f"norm/{one.value}.cu" for one in NORM_KERNELS)


def program(algorithm: Algorithm, world_sizes, sanitizer: str, *mutations: Mutation, clusters=CLUSTERS):
    sources = []
    for world_size, cluster, kind in product(world_sizes, clusters, KINDS):
        template = template_of(Norm(algorithm.op, (), 1, order="tree" if kind else "rank", out_dtype=kind), cluster)
        sources.append(kernel_source(algorithm, FP32, world_size, template))
    return build(tuple(sources), sanitizer, *mutations)


def draw(algorithm: Algorithm, world_size: int, seed: int, clusters=CLUSTERS, slots: int = NORM_SLOTS) -> Drawn:
    """A sequence of calls, and the bytes that each rank must get."""
    choices = random.Random(f"tree norm {algorithm} {world_size} {seed}")
    made = [draw_call(algorithm, world_size, choices, clusters, slots) for _ in range(CALLS)]
    return Drawn([call for call, _ in made], [results for _, results in made])


def draw_call(algorithm: Algorithm, world_size: int, choices: random.Random, clusters, slots: int):
    """A call, and the bytes that each rank must get: normed rows, guards, and sums behind them.

    Of a reduce-scatter all ranks have one residual, of which each adds its first rows, and rows of an earlier launch
    come before. What is not written keeps its guards.
    """
    kind, cluster = choices.choice([*KINDS, *TYPE_NAMES]), choices.choice(clusters)
    dtype, scatters = kind or FP32, algorithm is Algorithm.REDUCESCATTER_RMSNORM
    most, packs = choices.choice(fitting(algorithm, world_size, dtype))
    columns, skipped = packs * PACK_NBYTES // dtype.itemsize, choices.choice([0, 0, 3]) if scatters else 0
    rows = [choices.choice([0, 1, most, most]) for _ in range(world_size)] if scatters else [most]
    rows[choices.randrange(len(rows))] = most
    fill = choices.choice([normal, far_apart, bit_patterns])
    xs = [fill(10 * rank, sum(rows) * columns, FP32).view(-1, columns) for rank in range(world_size)]
    residual = choices.choice([normal, bit_patterns])(20, most * columns, dtype).view(most, columns)
    weight, numbers = normal(21, columns, dtype), choices.choice([(1e-6, 0.0), (1e-5, 1.0)])
    sums_at = most * columns * dtype.itemsize
    nbytes = sums_at + (skipped + most) * columns * dtype.itemsize
    few = [1, 2, 3] if algorithm is not Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT else [world_size, 2 * world_size]
    teams = min(most, choices.choice(few)) if cluster == 1 else most  # a cluster has one row
    call = Call(
        kernel=clusters.index(cluster) * len(KINDS) + KINDS.index(kind),
        shape=Config(algorithm, teams * cluster, slots // max(2, cluster)),
        cluster=cluster,
        inputs=[x.reshape(-1) for x in xs],
        counts=tuple(one * columns for one in rows),
        output_nbytes=(nbytes,) * world_size,
        offset=choices.choice([0, 0, 16, 4]),
        operands=(torch.cat([normal(22, skipped * columns, dtype), residual.view(-1)]), weight, sums_at),
        scalars=numbers,
        columns=columns,
        skipped=skipped * columns,
    )
    found = []
    for parts in zip(*(x.split(rows) for x in xs), strict=True):
        total = reference.allreduce(parts, order="tree" if kind else "rank")
        normed, summed = specification.specification(total, residual[: len(total)], weight, *numbers)
        result = torch.full((nbytes,), GUARD, dtype=torch.uint8)
        for at, one in ((0, normed), (sums_at + skipped * columns * dtype.itemsize, summed)):
            result[at : at + one.nbytes] = bytes_of(one)
        found.append(result)
    return call, found if scatters else found * world_size


def fitting(algorithm: Algorithm, world_size: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """The rows of the largest part, and the packs of a result's row, whose sums fit the slots."""
    capacity = scratch_of(algorithm, world_size).capacity
    owners = world_size if algorithm is Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT else 1
    packs_of_sums = FP32.itemsize // dtype.itemsize
    return [
        (rows, packs)
        for rows, packs in product(ROWS, ROW_PACKS)
        if -(-rows // owners) * packs * packs_of_sums <= capacity
    ]


def simulate(algorithm, made, world_sizes, world_size: int, seed: int, **how) -> list[str]:
    """Descriptions of all errors of one sequence."""
    clusters = how.get("clusters", CLUSTERS)
    drawn, first = draw(algorithm, world_size, seed, **how), world_sizes.index(world_size) * len(clusters) * len(KINDS)
    return faults(drawn, made, algorithm, world_size, first, seed)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sanitizer", SEEDS)
@pytest.mark.parametrize("algorithm", NORM_KERNELS)
def test_every_rank_gets_the_specifications_bits(algorithm, sanitizer, world_size, few_slots):
    if world_size > MOST_RANKS[sanitizer]:
        pytest.skip("so many threads are more than ThreadSanitizer can take")
    these = tuple(size for size in WORLD_SIZES if size <= MOST_RANKS[sanitizer])
    made = program(algorithm, these, sanitizer)
    for seed in seeds(SEEDS[sanitizer]):
        assert simulate(algorithm, made, these, world_size, seed) == [], f"seed {seed}"


@pytest.mark.parametrize("algorithm", NORM_KERNELS)
def test_clusters_of_four_and_eight_blocks_give_the_specifications_bits(algorithm, monkeypatch):
    monkeypatch.setattr(specification, "SLOTS", MANY_SLOTS)
    how = {"clusters": LARGE_CLUSTERS}
    made = program(algorithm, (2,), "plain", more_slots, **how)

    for seed in range(4):
        assert simulate(algorithm, made, (2,), 2, seed, slots=MANY_SLOTS, **how) == [], f"seed {seed}"


NORM_HEADER, PACK, SENTINEL = "device/rms_norm.cuh", "device/pack.cuh", "device/sync/sentinel.cuh"
ADD = "total[0] = sum_of_tree<N>(part, w);"
MUTANTS = {
    "the order of ranks in place of the tree": (
        PACK,
        ADD,
        "RankOrder::add<T, N>(part, w, total);",
        "allreduce_rmsnorm_one_shot",
    ),
    "a sum rounded before the residual is added": (
        NORM_HEADER,
        "T::unpack(from.word[w], more);",
        "T::unpack(from.word[w], more);\n      const u32 rounded = T::round(v);\n      T::unpack(rounded, v);",
        "reducescatter_rmsnorm",
    ),
    "squares of sums that are not rounded": (
        NORM_HEADER,
        "result.word[w] = T::round(v);\n      T::unpack(result.word[w], v);",
        "result.word[w] = T::round(v);",
        "allreduce_rmsnorm_one_shot",
    ),
    "the first pack of sums twice": (
        NORM_HEADER,
        "next(sums * i + 1, sum)",
        "next(sums * i, sum)",
        "allreduce_rmsnorm_one_shot",
    ),
    "a residual added by the owner and by its peers": (
        TWO_SHOT,
        "norm.template take<are_same<Order, TreeOrder>>(row,",
        "norm.take(row,",
        "allreduce_rmsnorm_two_shot",
    ),
    "sums of a row that lie as closely as its results": (
        TWO_SHOT,
        "a.rank * a.capacity + offset<sums>(row, i), input",
        "a.rank * a.capacity + offset(row, i), input",
        "allreduce_rmsnorm_two_shot",
    ),
    "a row of which half the sums are sent": (
        SCATTER,
        "packs = Norm::sums * norm.packs;",
        "packs = norm.packs;",
        "reducescatter_rmsnorm",
    ),
    "squares of gathered rows that are not added": (
        NORM_HEADER,
        "add_squares(r = sum[0], of_slot);",
        "r = sum[0];",
        "allreduce_rmsnorm_two_shot",
    ),
}


known(Mutation(*one[:3]) for one in MUTANTS.values())


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake, few_slots):
    file, old, new, name = MUTANTS[mistake]
    algorithm = Algorithm(name)
    made = program(algorithm, (4,), "plain", Mutation(file, old, new))

    assert any(notices(partial(simulate, algorithm, made, (4,), 4, seed)) for seed in range(12))
