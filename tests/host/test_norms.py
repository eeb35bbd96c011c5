"""All-reduce with residual and norm, executed on the host: the specification's bits, whatever the grid."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from graphar import reference
from graphar.numerics import norms as specification
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.norms import FP8
from graphar.plan.algorithms import Algorithm, Shape
from graphar.runtime.catalogue import NORM_KERNELS, kernel_source
from tests.cases import bit_patterns, normal, same_bits
from tests.host.build import NORM_SLOTS, Mutation, build
from tests.host.cases import scratch_of
from tests.host.simulate import Call, KernelFailure, Simulation

pytestmark = pytest.mark.host

WORLD_SIZES = (2, 3, 4)
CLUSTERS = (1, 2)
CALLS = 6
ROW_PACKS = (1, 8, 33, 64, 130)  # up to three for each slot
LONG_ROW_PACKS = (64, 130, 193, 256)
ROWS = (1, 2, 5, 13)


@dataclass(frozen=True)
class Norms:
    """The kernels of one program, for every combination of dtypes, ranks, clusters and outputs.

    Blocks of a cluster have whole warps. Large clusters therefore need more ``slots`` and longer rows.
    """

    algorithm: Algorithm
    dtypes: tuple[torch.dtype, ...]
    world_sizes: tuple[int, ...] = WORLD_SIZES
    outputs: tuple[str, ...] = ("like_input",)
    clusters: tuple[int, ...] = CLUSTERS
    slots: int = NORM_SLOTS

    def build(self, sanitizer: str, mutation: Mutation | None = None):
        ways = product(self.dtypes, self.world_sizes, self.clusters, self.outputs)
        sources = [
            kernel_source(self.algorithm, dtype, n, f"{cluster}, {output}") for dtype, n, cluster, output in ways
        ]
        return build(tuple(sources), sanitizer, mutation)

    def first(self, world_size: int, dtype: torch.dtype) -> int:
        """The index of the first kernel with this world size and dtype."""
        at = self.dtypes.index(dtype) * len(self.world_sizes) + self.world_sizes.index(world_size)
        return at * len(self.clusters) * len(self.outputs)


def draw_call(norms: Norms, world_size: int, dtype: torch.dtype, choices: random.Random):
    """A call, and the bytes that every rank must get: normed rows, their scales, and sums in the input's place."""
    algorithm = norms.algorithm
    pack, capacity = 16 // dtype.itemsize, scratch_of(algorithm, world_size).capacity
    in_whole = algorithm is Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT
    fitting = [
        (rows, packs)
        for rows in ROWS
        for packs in (ROW_PACKS if norms.slots == NORM_SLOTS else LONG_ROW_PACKS)
        if (rows if in_whole else -(-rows // world_size)) * packs <= capacity
    ]
    rows, packs = choices.choice(fitting)
    fill = choices.choice([normal, normal, bit_patterns])
    xs = [fill(rank, rows * packs * pack, dtype).view(rows, -1) for rank in range(world_size)]
    residual, weight = normal(20, xs[0].numel(), dtype).view_as(xs[0]), normal(21, packs * pack, dtype)
    weight[0] = choices.choice([weight[0].item(), torch.finfo(dtype).max])  # by which a norm overflows
    numbers = choices.choice([(1e-6, 0.0), (1e-5, 1.0)])
    output = choices.choice(norms.outputs)
    fp8 = {} if output == "like_input" else {"out_dtype": FP8}
    scale = [xs[0].numel()] if output == "dynamic_fp8" else []  # behind the normed rows
    if output == "static_fp8":
        scale = [torch.tensor([choices.choice([0.003, 0.3])])]
        fp8["scale"] = scale[0]
    normed, summed, *scales = reference.allreduce_residual_rmsnorm(xs, residual, weight, *numbers, **fp8)
    teams = choices.choice([1, 2, 3] if in_whole else [world_size, 4 // world_size * world_size or world_size])
    cluster = choices.choice(norms.clusters)
    threads = norms.slots // max(2, cluster)  # a block that is a team has half as many as there are slots
    call = Call(
        norms.clusters.index(cluster) * len(norms.outputs) + norms.outputs.index(output),
        Shape(algorithm, min(rows, teams) * cluster, threads),
        [x.reshape(-1) for x in xs],
        (normed.numel(),),
        (sum(one.nbytes for one in (normed, *scales)),) * world_size,
        offset=choices.choice([0, 16 if fp8 else dtype.itemsize]),
        feeds_back=True,
        operands=(residual, weight, None, *scale),
        scalars=numbers,
        columns=packs * pack,
        cluster=cluster,
    )
    return call, torch.cat([one.reshape(-1).view(torch.uint8) for one in (normed, *scales, summed)])


def simulate(norms: Norms, world_size: int, dtype: torch.dtype, sanitizer: str, seed: int, mutation=None):
    """Yields the number of wrong bytes of each result."""
    choices = random.Random(f"{norms.algorithm} {world_size} {dtype} {seed}")
    drawn = [draw_call(norms, world_size, dtype, choices) for _ in range(CALLS)]
    made, algorithm = norms.build(sanitizer, mutation), norms.algorithm
    run = Simulation(
        made, algorithm, world_size, scratch_of(algorithm, world_size), norms.first(world_size, dtype), seed
    )
    outcomes = run.run([call for call, _ in drawn])
    assert [(outcome.record.kind, outcome.broken_guards) for outcome in outcomes] == [(0, 0)] * world_size
    for outcome in outcomes:
        for result, (_, expected) in zip(outcome.results, drawn, strict=True):
            yield same_bits(result, expected)


def cases():
    for algorithm in NORM_KERNELS:
        for sanitizer in ("plain", "thread", "address"):
            for world_size in WORLD_SIZES:
                yield algorithm, sanitizer, world_size


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@pytest.mark.parametrize(("algorithm", "sanitizer", "world_size"), list(cases()))
def test_every_rank_gets_the_specifications_bits(algorithm, sanitizer, world_size, few_slots):
    norms = Norms(algorithm, tuple(TYPE_NAMES) if sanitizer == "plain" else (torch.bfloat16,))
    for dtype in norms.dtypes:
        for seed in range(4 if sanitizer == "plain" else 2):
            found = list(simulate(norms, world_size, dtype, sanitizer, seed))
            assert found == [0] * CALLS * world_size, f"{dtype}, seed {seed}"


LARGE_CLUSTERS, MANY_SLOTS = (4, 8), 256
more_slots = Mutation(
    "device/rms_norm.cuh", f"constexpr int slots = {NORM_SLOTS};", f"constexpr int slots = {MANY_SLOTS};"
)


@pytest.mark.parametrize("algorithm", NORM_KERNELS)
def test_clusters_of_four_and_eight_blocks_give_the_specifications_bits(algorithm, monkeypatch):
    monkeypatch.setattr(specification, "SLOTS", MANY_SLOTS)
    norms = Norms(algorithm, (torch.bfloat16,), (2,), ("like_input", "dynamic_fp8"), LARGE_CLUSTERS, MANY_SLOTS)

    for seed in range(4):
        assert list(simulate(norms, 2, torch.bfloat16, "plain", seed, more_slots)) == [0] * CALLS * 2, f"seed {seed}"


def released_polls(algorithm, seed, mutation=None):
    """How often threads wait for a rank after they release the next kernel, if a row is a cluster's."""
    norms, choices = Norms(algorithm, (torch.bfloat16,), (3,), clusters=(2,)), random.Random(seed)
    drawn = [draw_call(norms, 3, torch.bfloat16, choices)[0] for _ in range(40)]
    of_one_row = [call for call in drawn if call.shape.blocks == 2 * call.counts[0] // call.columns]
    program = norms.build("plain", mutation)
    made = Simulation(program, algorithm, 3, scratch_of(algorithm, 3), norms.first(3, torch.bfloat16), seed)
    return sum(outcome.released_polls for outcome in made.run(of_one_row[:CALLS]))


@pytest.mark.parametrize("algorithm", NORM_KERNELS)
def test_a_cluster_releases_the_next_kernel_once_it_waits_for_no_rank(algorithm, few_slots):
    """As (18) in cuda_src/device/sync/call.cuh needs it."""
    early = Mutation(f"norm/{algorithm.value}.cu", "if constexpr (C == 1) release", "release")

    assert [released_polls(algorithm, seed) for seed in range(3)] == [0, 0, 0]
    assert released_polls(algorithm, 0, early) > 0


FP8_OUTPUTS = ("static_fp8", "dynamic_fp8")
IN_FP8 = (
    (Norms(Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT, (torch.bfloat16, torch.float32), (3,), FP8_OUTPUTS), "plain"),
    (Norms(Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT, (torch.bfloat16,), (2,), ("dynamic_fp8",)), "thread"),
)


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@pytest.mark.parametrize(("norms", "sanitizer"), IN_FP8, ids=[f"{norms.algorithm}-{how}" for norms, how in IN_FP8])
def test_fp8_has_the_specifications_bits(norms, sanitizer, few_slots):
    (world_size,) = norms.world_sizes
    for dtype in norms.dtypes:
        for seed in range(4 if sanitizer == "plain" else 2):
            found = list(simulate(norms, world_size, dtype, sanitizer, seed))
            assert found == [0] * CALLS * world_size, f"{dtype}, seed {seed}"


MUTANTS = (
    ("a row's squares stand where the next one's do", "turn ^= 1;", ";"),
    (
        "a block does not wait for its cluster",
        "arrive_at_cluster();\n      wait_for_cluster();",
        "arrive_at_cluster();",
    ),
    ("squares are added in another order", "step = 1; step < 32; step *= 2", "step = 16; step > 0; step /= 2"),
)


def is_noticed(norms: Norms, mutation: Mutation, sanitizer: str, seed: int) -> bool:
    try:
        return any(simulate(norms, 2, torch.float32, sanitizer, seed, mutation))
    except KernelFailure:
        return True


@pytest.mark.parametrize(("what", "old", "new"), MUTANTS, ids=[what for what, *_ in MUTANTS])
def test_a_mistake_is_noticed(what, old, new, few_slots):
    norms, mutation = (
        Norms(Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT, (torch.float32,), (2,)),
        Mutation("device/rms_norm.cuh", old, new),
    )

    assert any(is_noticed(norms, mutation, sanitizer, seed) for seed in range(4) for sanitizer in ("plain", "thread"))


def test_a_scale_of_a_warp_alone_is_noticed(few_slots):
    norms = Norms(Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT, (torch.float32,), (2,), ("dynamic_fp8",))
    whole = "__reduce_max_sync(0xffffffff, __float_as_uint(of_warps(__uint_as_float(largest))))"
    mutation = Mutation("device/rms_norm.cuh", whole, "largest")

    assert any(is_noticed(norms, mutation, "plain", seed) for seed in range(4))
