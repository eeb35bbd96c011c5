"""Sums with residual and norm, executed on the host: the specification's bits, whatever the grid."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from itertools import product

import pytest
import torch

from graphar import reference
from graphar.numerics import norms as specification
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.norms import FP8
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.runtime.catalogue import NORM_KERNELS, kernel_source
from graphar.simulator.build import SANITIZERS, Mutation
from graphar.simulator.calls import Drawn as Sequence
from graphar.simulator.simulation import Call, Simulation
from tests.cases import bit_patterns, normal
from tests.host.build import NORM_SLOTS, build, known, seeds
from tests.host.cases import faults, scratch_of
from tests.host.mutant import notices

pytestmark = pytest.mark.host

WORLD_SIZES = (2, 3, 4)
CLUSTERS = (1, 2)
CALLS = 6
ROW_PACKS = (1, 8, 33, 64, 130)  # up to three for each slot
LONG_ROW_PACKS = (64, 130, 193, 256)
ROWS = (1, 2, 5, 13)
GUARD = 0xA5  # `guard` in graphar/simulator/sources/run.cpp


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
    """A call, and the bytes that each rank must get: normed rows, their scales, and sums."""
    algorithm = norms.algorithm
    if algorithm is Algorithm.REDUCESCATTER_RMSNORM:
        return draw_scattered(norms, world_size, dtype, choices)
    in_whole = algorithm is Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT
    output = choices.choice(norms.outputs)
    rows, packs = draw_shape(norms, world_size, dtype, output, choices)
    drawn = draw_operands(world_size, rows, rows, packs, dtype, output, choices)
    normed, summed, *scales = reference.allreduce_residual_rmsnorm(
        drawn.xs, drawn.residual, drawn.weight, *drawn.numbers, **drawn.fp8
    )
    scale = [normed.numel()] if scales else drawn.scale  # behind the normed rows
    teams = choices.choice([1, 2, 3] if in_whole else [world_size, 4 // world_size * world_size or world_size])
    call = Call(
        **draw_grid(norms, output, rows, teams, choices),
        inputs=[x.reshape(-1) for x in drawn.xs],
        counts=(normed.numel(),),
        output_nbytes=(sum(one.nbytes for one in (normed, *scales)),) * world_size,
        offset=choices.choice([0, 16 if drawn.fp8 else dtype.itemsize]),
        feeds_back=True,  # the sums lie in the input's place
        operands=(drawn.residual, drawn.weight, None, *scale),
        scalars=drawn.numbers,
        columns=normed.shape[-1],
    )
    return call, [bytes_of(normed, *scales, summed)] * world_size


def draw_scattered(norms: Norms, world_size: int, dtype: torch.dtype, choices: random.Random):
    """The same for a reduce-scatter: all ranks have one residual, of which each adds its first rows.

    Rows, scales and sums of a launch may follow those of an earlier one. What is not written keeps its guards.
    """
    output = choices.choice(norms.outputs)
    most, packs = draw_shape(norms, world_size, dtype, output, choices)
    rows = [choices.choice([0, 1, most, most]) for _ in range(world_size)]
    rows[choices.randrange(world_size)] = most
    drawn = draw_operands(world_size, sum(rows), most, packs, dtype, output, choices)
    skipped, columns = choices.choice([0, 0, 3]), len(drawn.weight)
    each = specification.scales_of(output, columns)
    scales_at = most * columns * (1 if drawn.fp8 else dtype.itemsize)
    sums_at = scales_at + 4 * (skipped + most) * each
    nbytes = sums_at + (skipped + most) * columns * dtype.itemsize
    call = Call(
        **draw_grid(norms, output, most, choices.choice([1, 2, 3]), choices),
        inputs=[x.reshape(-1) for x in drawn.xs],
        counts=tuple(one * columns for one in rows),
        output_nbytes=(nbytes,) * world_size,
        offset=choices.choice([0, 16 if drawn.fp8 else dtype.itemsize]),
        operands=(
            torch.cat([normal(22, skipped * columns, dtype), drawn.residual.view(-1)]),
            drawn.weight,
            sums_at,
            *([scales_at] if each else drawn.scale),
        ),
        scalars=drawn.numbers,
        columns=columns,
        skipped=skipped * columns,
    )
    found = []
    residuals = [drawn.residual[:one] for one in rows]
    of_ranks = zip(*(x.split(rows) for x in drawn.xs), residuals, strict=True)
    for *parts, residual in of_ranks:
        normed, summed, *scales = reference.allreduce_residual_rmsnorm(
            parts, residual, drawn.weight, *drawn.numbers, **drawn.fp8
        )
        result = torch.full((nbytes,), GUARD, dtype=torch.uint8)
        places = [0, sums_at + skipped * columns * dtype.itemsize, scales_at + 4 * skipped * each]
        for at, one in zip(places, (normed, summed, *scales), strict=False):
            result[at : at + one.nbytes] = bytes_of(one)
        found.append(result)
    return call, found


def draw_shape(norms: Norms, world_size: int, dtype: torch.dtype, output: str, choices: random.Random):
    """The rows of the largest part and the packs of each, which fit the slots."""
    capacity = scratch_of(norms.algorithm, world_size).capacity
    are_split = norms.algorithm is Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT
    packs_of_row = ROW_PACKS if norms.slots == NORM_SLOTS else LONG_ROW_PACKS
    if output == "grouped_fp8":
        packs_of_row = [count * specification.BLOCK * dtype.itemsize // 16 for count in (1, 2, 3, 7)]
    fitting = [
        (rows, packs)
        for rows in ROWS
        for packs in packs_of_row
        if (-(-rows // world_size) if are_split else rows) * packs <= capacity
    ]
    return choices.choice(fitting)


@dataclass(frozen=True)
class Drawn:
    """The ranks' inputs, and what is the same on all of them."""

    xs: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor
    numbers: tuple[float, float]
    fp8: dict[str, object]
    scale: list[torch.Tensor]


def draw_operands(
    world_size: int, rows: int, most: int, packs: int, dtype: torch.dtype, output: str, choices: random.Random
) -> Drawn:
    """Inputs of ``rows``, and a residual of ``most``."""
    columns, fill = packs * 16 // dtype.itemsize, choices.choice([normal, normal, bit_patterns])
    xs = [fill(rank, rows * columns, dtype).view(rows, columns) for rank in range(world_size)]
    residual = normal(20, most * columns, dtype).view(most, columns)
    weight = normal(21, columns, dtype)
    weight[0] = choices.choice([weight[0].item(), torch.finfo(dtype).max])  # by which a norm overflows
    fp8 = {} if output == "like_input" else {"out_dtype": FP8}
    scale = [torch.tensor([choices.choice([0.003, 0.3])])] if output == "static_fp8" else []
    fp8 |= {"scale": scale[0]} if scale else {}
    fp8 |= {"group_size": specification.BLOCK} if output == "grouped_fp8" else {}
    return Drawn(xs, residual, weight, choices.choice([(1e-6, 0.0), (1e-5, 1.0)]), fp8, scale)


def draw_grid(norms: Norms, output: str, rows: int, teams: int, choices: random.Random) -> dict[str, object]:
    """At most ``teams`` blocks that have a row each, or a cluster for each row."""
    cluster = choices.choice(norms.clusters)
    teams = rows if cluster > 1 else min(rows, teams)
    threads = norms.slots // max(2, cluster)  # a block that is a team has half as many as there are slots
    return {
        "kernel": norms.clusters.index(cluster) * len(norms.outputs) + norms.outputs.index(output),
        "shape": Config(norms.algorithm, teams * cluster, threads),
        "cluster": cluster,
    }


def bytes_of(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat([one.reshape(-1).view(torch.uint8) for one in tensors])


def simulate(norms: Norms, world_size: int, dtype: torch.dtype, sanitizer: str, seed: int, mutation=None) -> list[str]:
    """Descriptions of all errors of one sequence."""
    algorithm, choices = norms.algorithm, random.Random(f"{norms.algorithm} {world_size} {dtype} {seed}")
    drawn = [draw_call(norms, world_size, dtype, choices) for _ in range(CALLS)]
    sequence = Sequence([call for call, _ in drawn], [results for _, results in drawn])
    made = norms.build(sanitizer, mutation)
    return faults(sequence, made, algorithm, world_size, norms.first(world_size, dtype), seed)


def expect_no_faults(norms: Norms, world_size: int, sanitizer: str) -> None:
    for dtype in norms.dtypes:
        for seed in seeds(4 if sanitizer == "plain" else 2):
            assert simulate(norms, world_size, dtype, sanitizer, seed) == [], f"{dtype}, seed {seed}"


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
@pytest.mark.parametrize("algorithm", NORM_KERNELS)
def test_every_rank_gets_the_specifications_bits(algorithm, sanitizer, world_size, few_slots):
    dtypes = tuple(TYPE_NAMES) if sanitizer == "plain" else (torch.bfloat16,)

    expect_no_faults(Norms(algorithm, dtypes), world_size, sanitizer)


LARGE_CLUSTERS, MANY_SLOTS = (4, 8), 256
more_slots = Mutation(
    "device/rms_norm.cuh", f"constexpr int norm_slots = {NORM_SLOTS};", f"constexpr int norm_slots = {MANY_SLOTS};"
)


@pytest.mark.parametrize("algorithm", NORM_KERNELS)
def test_clusters_of_four_and_eight_blocks_give_the_specifications_bits(algorithm, monkeypatch):
    monkeypatch.setattr(specification, "SLOTS", MANY_SLOTS)
    norms = Norms(algorithm, (torch.bfloat16,), (2,), ("like_input", "dynamic_fp8"), LARGE_CLUSTERS, MANY_SLOTS)

    for seed in range(4):
        assert simulate(norms, 2, torch.bfloat16, "plain", seed, more_slots) == [], f"seed {seed}"


def released_polls(algorithm, seed, mutation=None):
    """How often threads wait for a rank after they release the next kernel, if a row is a cluster's."""
    norms, choices = Norms(algorithm, (torch.bfloat16,), (3,), clusters=(2,)), random.Random(seed)
    drawn = [draw_call(norms, 3, torch.bfloat16, choices)[0] for _ in range(40)]
    of_one_row = [call for call in drawn if call.shape.blocks == 2 * max(call.counts) // call.columns]
    program = norms.build("plain", mutation)
    made = Simulation(program, algorithm, 3, scratch_of(algorithm, 3), norms.first(3, torch.bfloat16), seed)
    return sum(outcome.released_polls for outcome in made.run(of_one_row[:CALLS]))


@pytest.mark.parametrize("algorithm", NORM_KERNELS)
def test_a_cluster_releases_the_next_kernel_once_it_waits_for_no_rank(algorithm, few_slots):
    """As (18) in cuda_src/device/sync/kernel_order.cuh needs it."""
    after_wait = {TWO_SHOT: ("outgoing.load();", "release_next_kernel(), outgoing.load();")}
    early = Mutation(
        f"norm/{algorithm.value}.cu",
        *after_wait.get(algorithm, ("if constexpr (C == 1) release", "release")),
    )

    assert [released_polls(algorithm, seed) for seed in range(3)] == [0, 0, 0]
    assert released_polls(algorithm, 0, early) > 0


FP8_OUTPUTS = ("static_fp8", "dynamic_fp8", "grouped_fp8")
IN_FP8 = (
    (Norms(Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT, (torch.bfloat16, torch.float32), (3,), FP8_OUTPUTS), "plain"),
    (Norms(Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT, (torch.bfloat16,), (2,), ("dynamic_fp8", "grouped_fp8")), "thread"),
    (Norms(Algorithm.REDUCESCATTER_RMSNORM, (torch.bfloat16, torch.float32), (3,), FP8_OUTPUTS), "plain"),
    (Norms(Algorithm.REDUCESCATTER_RMSNORM, (torch.bfloat16,), (2,), ("dynamic_fp8", "grouped_fp8")), "thread"),
)


@pytest.mark.promise("All-reduce with residual and RMSNorm has the bits of its three steps, in FP8 too.")
@pytest.mark.parametrize(("norms", "sanitizer"), IN_FP8, ids=[f"{norms.algorithm}-{how}" for norms, how in IN_FP8])
def test_fp8_has_the_specifications_bits(norms, sanitizer, few_slots):
    expect_no_faults(norms, *norms.world_sizes, sanitizer)


NORM, SCATTER = "device/rms_norm.cuh", "norm/reducescatter_rmsnorm.cu"
ONE_SHOT, TWO_SHOT, SCATTERED = NORM_KERNELS
OF_A_WARP = "__reduce_max_sync(0xffffffff, __float_as_uint(of_warps(__uint_as_float(largest))))"
MISTAKES = {
    Norms(TWO_SHOT, (torch.float32,), (2,)): {
        "a row's squares stand where the next one's do": (NORM, "turn ^= 1;", ";"),
        "a block does not wait for its cluster": (
            NORM,
            "arrive_at_cluster();\n      wait_for_cluster();",
            "arrive_at_cluster();",
        ),
        "squares are added in another order": (
            "device/pack.cuh",
            "step = 1; step < 32; step *= 2",
            "step = 16; step > 0; step /= 2",
        ),
    },
    Norms(SCATTERED, (torch.bfloat16,), (3,)): {
        "one slot instead of two": (
            SCATTER,
            "slots_of_call = (call.epoch & 1) * N * a.capacity;",
            "slots_of_call = 0;",
        ),
        "an empty part that nobody hears of": (SCATTER, "/ elements_per_pack<T>, 1u)", "/ elements_per_pack<T>, 0u)"),
        "an empty part that its owner does not wait for": (SCATTER, "norm.rows == 0 && row == 0 &&", "false &&"),
        "a part for another owner": (SCATTER, "(a.rank + hop) % N).load(at)", "(a.rank + 0 * hop) % N).load(at)"),
        "the last packs are not sent": (SCATTER, "end = (packs + 31) / 32 * 32 * N", "end = packs / 32 * 32 * N"),
        "as many rows as the last part has": (SCATTER, "max(most, packs_of_part(rank));", "packs_of_part(rank);"),
        "a residual that begins anew": (
            NORM,
            "residual{element(a.residual, skipped)}",
            "residual{element(a.residual, 0)}",
        ),
    },
    Norms(SCATTERED, (torch.bfloat16,), (2,), ("grouped_fp8",)): {
        "a group of half as many columns": (NORM, "lanes = group_columns / E;", "lanes = 64 / E;"),
        "a scale of one pack": (NORM, "step < lanes; step *= 2) largest", "step < 1; step *= 2) largest"),
        "scales in the places of another row": (NORM, "u64(row) * (packs / lanes)", "u64(row) * packs"),
        "scales that begin anew in each launch": (NORM, "numel / group_columns : 0", "0 : 0"),
    },
    Norms(ONE_SHOT, (torch.float32,), (2,), ("dynamic_fp8",)): {
        "a scale of a warp alone": (NORM, OF_A_WARP, "largest")
    },
}
EVERY_MISTAKE = {what: (norms, Mutation(*texts)) for norms, of in MISTAKES.items() for what, texts in of.items()}
known(mutation for _, mutation in EVERY_MISTAKE.values())


@pytest.mark.parametrize("what", EVERY_MISTAKE)
def test_a_mistake_is_noticed(what, few_slots):
    norms, mutation = EVERY_MISTAKE[what]
    sanitizers = ("plain", "thread") if norms.algorithm is TWO_SHOT else ("plain",)

    def is_noticed(sanitizer, seed):
        return notices(partial(simulate, norms, *norms.world_sizes, *norms.dtypes, sanitizer, seed, mutation))

    assert any(is_noticed(sanitizer, seed) for seed in range(20) for sanitizer in sanitizers)
