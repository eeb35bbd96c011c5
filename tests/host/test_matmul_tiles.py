"""Matmuls that end in a sum over ranks, executed on the host: the sum in rank order, whatever happens when."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from graphar import reference
from graphar.numerics.codecs import FP8, Codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import SIGNAL_PAD_NBYTES, Scratch
from graphar.plan.tiles import LAYOUTS, MatmulTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import source_directory
from graphar.simulator.build import Mutation
from graphar.simulator.calls import first_epoch
from graphar.simulator.simulation import Call, KernelFailure, Outcome, Simulation
from tests.cases import normal
from tests.host.build import build, known
from tests.host.matmul_operands import packed, wrong_elements

pytestmark = pytest.mark.host

SCATTER, REDUCE = Algorithm.MATMUL_REDUCESCATTER, Algorithm.MATMUL_ALLREDUCE
every_algorithm = pytest.mark.parametrize("algorithm", [SCATTER, REDUCE])
WORLD_SIZES = (2, 3, 4)
CALLS = 4
CAPACITY = 12  # boxes in a slot
# Small tiles, with the fewest stages that are possible.
TILES = tuple(
    MatmulTile(*sizes, whole=True, alternating=alternating)
    for sizes, alternating in (
        ((64, 64, 2), False),
        ((64, 128, 2, 2), True),
        ((128, 64, 2), False),
        ((128, 192, 2, 2), False),
    )
)
KINDS = tuple(itertools.product(TILES, LAYOUTS))
SEEDS = {"plain": 4, "thread": 1}
MOST_THREADS = {"plain": 1 << 13, "thread": 2200}  # of all ranks; ThreadSanitizer has 8128: 3 or 4 per thread


def dtype_of(world_size: int) -> torch.dtype:
    return torch.float16 if world_size == 2 else torch.bfloat16


def program_of(
    algorithm,
    world_size: int,
    sanitizer: str,
    kinds=KINDS,
    mutation: Mutation | None = None,
    form: Pointwise | None = None,
    codec: Codec | None = None,
):
    file, made = f"one_{algorithm}", form.generated if form else None
    element = TYPE_NAMES[dtype_of(world_size)]
    fixed = [element, str(world_size)]
    more = [made.name] if made else ["Identity", f"AsCodes<{element}, {codec.type_name}>"] if codec else []
    names = [f"{file}<{', '.join([*fixed, str(tile), layout, *more])}>" for tile, layout in kinds]
    text = made.text if made else ""
    return build(tuple(KernelSource(f"{file}.cu", name, generated=text) for name in names), sanitizer, mutation)


def draw_operands(choices: random.Random, world_size: int, m: int, n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Small integers, A [m, k] and W [n, k] of each rank.

    From three ranks on, rank 1's products are so large that a sum with them rounds. The last rank's products are their
    negatives, so another order of addition gives another result.
    """
    generator = torch.Generator().manual_seed(choices.getrandbits(32))
    pairs = []
    for _ in range(world_size):
        k = choices.randint(1, 150)
        shapes = (m, k), (n, k)
        pairs.append(tuple(torch.randint(-8, 9, shape, generator=generator, dtype=torch.float32) for shape in shapes))
    if world_size > 2:
        a, w = pairs[1]
        pairs[1], pairs[-1] = (a, w * 2**20), (a, w * -(2**20))
    return [(a.to(dtype_of(world_size)), w.to(dtype_of(world_size))) for a, w in pairs]


def draw_blocks(choices: random.Random, world_size: int, cluster: int, most: int) -> tuple[int, ...]:
    """The blocks of each rank's grid, in whole clusters. Ranks differ, as GPUs may differ in their SMs."""
    first, grids = choices.randrange(cluster, most + 1, cluster), most // cluster
    return tuple((first // cluster - 1 + rank) % grids * cluster + cluster for rank in range(world_size))


def draw_call(
    algorithm,
    choices: random.Random,
    world_size: int,
    kinds,
    most_threads: int,
    form: Pointwise | None = None,
    codec: Codec | None = None,
) -> tuple[Call, list[torch.Tensor]]:
    """A call of any kind and size that the scratch has room for, and what each rank must get.

    With a form, EPILOGUE is applied to the sums, and there is no bias. With a codec, rows are whole buckets.
    """
    dtype = dtype_of(world_size)
    fitting = [i for i, (tile, _) in enumerate(kinds) if world_size * tile.cluster * tile.threads <= most_threads]
    kind = choices.choice(fitting)
    tile, layout = kinds[kind]
    counts = [choices.choice([0, 1, 64, choices.randint(1, 150)]) for _ in range(world_size)]
    counts[choices.randrange(world_size)] = choices.randint(1, 150)
    most_columns = 64 * (CAPACITY // -(-max(counts) // 64))
    unit = codec.bucket_size if codec else STORE_COLUMNS
    m, n = sum(counts), unit * choices.randint(1, most_columns // unit)
    bias, with_bias = torch.arange(n, dtype=dtype).remainder(17).view(1, n), form is None and choices.random() < 0.5
    pairs = draw_operands(choices, world_size, m, n)
    products = [(a.double() @ w.double().t()).to(dtype).float() for a, w in pairs]
    if codec and algorithm is SCATTER:
        total = torch.cat(reference.quantized_reducescatter(products, codec, sizes=counts))
    elif codec:
        total = reference.quantized_allreduce(products, codec)
    else:
        total = torch.full((m, n), -0.0)
        for product in products:
            total += product
    total += bias.float() if with_bias else 0
    inputs = [packed([m, n, a.shape[1], 0, choices.randint(1, 3), with_bias], a, w, bias, layout) for a, w in pairs]
    most_blocks = min(2 * tile.cluster, most_threads // (world_size * tile.threads) // tile.cluster * tile.cluster)
    blocks = draw_blocks(choices, world_size, tile.cluster, most_blocks)
    shape = Config(algorithm, blocks[0], tile.threads)
    totals = list(total.split(counts)) if algorithm is SCATTER else [total] * world_size
    beside = {"blocks": blocks, "cluster": tile.cluster}
    if form:
        tensors = [normal(at, size, dtype) for at, size in enumerate((n, m * n, m))]
        beside |= {"operands": tuple(tensors), "scalars": (0.375,), "columns": n}
        epilogue, given = replace(form, columns=n), EpilogueInputs(tensors, [0.375])
        totals = [epilogue.apply(one.reshape(-1), given, 0, one.numel()).view_as(one) for one in totals]
    results = [one.to(dtype) for one in totals]
    nbytes = tuple(result.nbytes for result in results)
    return Call(kind, shape, inputs, tuple(counts), nbytes, **beside), results


def scratch_of(algorithm, world_size: int) -> Scratch:
    area = (world_size - 1) * CAPACITY * (4 + 8192)
    nbytes = SIGNAL_PAD_NBYTES + (area if algorithm is SCATTER else 2 * area)
    return Scratch(CAPACITY, nbytes, 0, max(tile.shared_nbytes for tile in TILES) + 2048)


def simulate(algorithm, program, world_size: int, seed: int, calls: list[Call]) -> list[Outcome]:
    scratch, epoch = scratch_of(algorithm, world_size), first_epoch(seed)
    return Simulation(program, algorithm, world_size, scratch, 0, seed, epoch).run(calls)


def faults(
    algorithm,
    program,
    world_size: int,
    seed: int,
    kinds=KINDS,
    most_threads: int = MOST_THREADS["plain"],
    form: Pointwise | None = None,
    codec: Codec | None = None,
) -> list[str]:
    """Descriptions of all errors after some calls in a row."""
    choices = random.Random(f"{world_size} {seed}")
    drawn = [draw_call(algorithm, choices, world_size, kinds, most_threads, form, codec) for _ in range(CALLS)]
    found = []
    for rank, outcome in enumerate(simulate(algorithm, program, world_size, seed, [call for call, _ in drawn])):
        if outcome.record.kind:
            found.append(f"rank {rank} gave up waiting for rank {outcome.record.peer}")
        if outcome.broken_guards:
            found.append(f"rank {rank} wrote beside tensors or scratch")
        for number, (result, (_, parts)) in enumerate(zip(outcome.results, drawn, strict=True)):
            if parts[rank].numel() and (wrong := wrong_elements(result, parts[rank])):
                found.append(f"rank {rank}, call {number}: {wrong} of {parts[rank].numel()} are wrong")
    return found


@every_algorithm
@pytest.mark.parametrize(("world_size", "sanitizer"), [(2, "plain"), (3, "plain"), (4, "plain"), (2, "thread")])
def test_calls_in_a_row_give_the_sum_of_what_all_ranks_round(algorithm, world_size, sanitizer, whole):
    kinds = KINDS if whole or sanitizer == "plain" else KINDS[::2]
    program = program_of(algorithm, world_size, sanitizer, kinds)

    for seed in range(SEEDS[sanitizer] if world_size < 4 else 2):
        assert faults(algorithm, program, world_size, seed, kinds, MOST_THREADS[sanitizer]) == [], seed


# ---- with an epilogue -----------------------------------------------------------------------------------------------

EPILOGUE = Pointwise("max(v * scale, c[col]) + f[index] - r[row] + row * 3 - col", (torch.bfloat16,) * 3, 1)


@every_algorithm
def test_an_epilogue_is_done_to_each_sum_in_its_place(algorithm):
    kinds = KINDS[4:5]
    program = program_of(algorithm, 3, "plain", kinds, form=EPILOGUE)

    assert faults(algorithm, program, 3, 0, kinds, form=EPILOGUE) == []


# ---- with a codec ---------------------------------------------------------------------------------------------------

CODED_KINDS = tuple(kind for kind in KINDS if kind[0].columns <= 128)
INT8, INT3 = Codec(8), Codec(3, 64, scale_dtype=torch.float32)
FP8_IN_64 = Codec(FP8, 64)


@pytest.mark.promise("A fused matmul has the bits of its specification, whatever the partition and the codec.")
@every_algorithm
@pytest.mark.parametrize(
    ("world_size", "codec", "sanitizer"),
    [(2, INT8, "plain"), (3, INT3, "plain"), (5, FP8_IN_64, "plain"), (2, INT3, "thread")],
)
def test_codes_give_what_a_matmul_and_a_collective_with_the_codec_do(algorithm, world_size, codec, sanitizer):
    program = program_of(algorithm, world_size, sanitizer, CODED_KINDS, codec=codec)
    call = CODED_KINDS, MOST_THREADS[sanitizer]

    for seed in range(SEEDS[sanitizer] if world_size < 4 else 2):
        assert faults(algorithm, program, world_size, seed, *call, codec=codec) == [], seed


CODED = "device/matmul/tile_as_codes.cuh"
CODING_MUTANTS = {
    "the scale of a neighbour's bucket": (
        "__shfl_sync(all_lanes, inverse[box], j, 4)",
        "__shfl_sync(all_lanes, inverse[box], 3 - j, 4)",
    ),
    "partial sums that are not rounded before they are coded": (
        "encode<T>(sums, 0, coded);",
        "encode<fp32>(sums, 0, coded);",
    ),
    "a sum that is rounded before it is coded": ("encode<fp32>(sums, 0, coded);", "encode<T>(sums, 0, coded);"),
    "an own tile that is not coded": ("r == a.rank ? own.scale[j]", "r == a.rank ? 0"),
    "ranks added in another order": ("part[r - first].decode(j, v, r > 0);", "part[N - 1 - r].decode(j, v, r > 0);"),
    "a bias that is left out": ("add_bias_to_pair(m, box, j * 32 + i * 8 + column, v + 2 * i);", ""),
    "halves of the wrong eight": ("(i + odd) * 8 + column / 4 * 4", "(i + 1 - odd) * 8 + column / 4 * 4"),
}


@pytest.mark.parametrize("change", CODING_MUTANTS.values(), ids=CODING_MUTANTS)
def test_a_mistake_in_coding_is_noticed(change):
    program = program_of(REDUCE, 3, "plain", CODED_KINDS[:1], Mutation(CODED, *change), codec=INT8)

    assert any(faults(REDUCE, program, 3, seed, CODED_KINDS[:1], codec=INT8) for seed in range(6))


# ---- negative controls: what is wrong, the text that makes it so, and the sanitizer that notices ---------------------

FILES = (
    *(f"device/matmul/{name}.cuh" for name in ("fused_tiles", "warpgroup_tile", "tile_as_elements")),
    "device/sync/entry.cuh",
)
SENT = "      wait_for_bulk_stores();\n"
STAGED = "      fence_async_proxy_shared();\n      __syncwarp();\n"
MUTANTS = {
    "a flag set before the tile is there": (
        SENT,
        "      commit_bulk_stores();\n      wait_for_bulk_sources<0>();\n",
        "thread",
    ),
    "a flag that stays set": ("    store_relaxed_gpu(there, 0);\n", "", "plain"),
    "tiles for ranks that have not entered the call": (
        " || !exchange.wait_until_all_entered(call);",
        ";",
        "plain",
    ),
    "an epoch that does not advance": ("  advance_epoch_in_warp(a, call);\n", "", "plain"),
    "partial tiles added in the order of distance": (
        "place(a.rank, r, tile.box)",
        "place(a.rank, (2 * a.rank + N - r) % N, tile.box)",
        "plain",
    ),
    "partial tiles read before they are there": (
        "        while (!handover.arrived.try_wait(own_tiles)) continue;\n",
        "",
        "plain",
    ),
    "a tile staged over one that is being sent": (SENT, "", "thread"),
    "tiles sent over what was read, without a fence": (
        "    if (threadIdx.x % 32 == 0) fence_async_proxy_global();\n",
        "",
        "thread",
    ),
    "a box staged without a fence": (STAGED, "      __syncwarp();\n", "thread"),
    "a box staged by lanes that only vote": (STAGED, STAGED.replace("__syncwarp()", "__any_sync(~0u, 0)"), "thread"),
    "ranks that have entered, to lanes that only vote": (
        "lane, call.epoch + 1);\n  __syncwarp();\n",
        "lane, call.epoch + 1);\n",
        "thread",
    ),
    "flags seen by lanes that only vote": (
        "(a.rank + hop) % N, box);\n    __syncwarp();\n",
        "(a.rank + hop) % N, box);\n",
        "thread",
    ),
}
GATHERING_MUTANTS = {
    "a finished tile announced before it is there": MUTANTS["a flag set before the tile is there"],
    "a result gathered before it is finished": (
        "      if (!TileExchange<N>{a, finished}.wait_for_finished(call, walk.owner(), tile.box)) return;\n",
        "",
        "plain",
    ),
    "finished tiles put where partial tiles are": (
        "bulk_store(TileExchange<N>{a, finished}.place((a.rank + hop)",
        "bulk_store(TileExchange<N>{a}.place((a.rank + hop)",
        "plain",
    ),
}
# In a cluster, between 2 ranks, whose consumers alternate.
CLUSTER_MUTANTS = {
    "tiles that are dealt and read with nothing but a relaxed arrival between": (
        "  if constexpr (Tile::cluster > 1) __syncthreads();",
        "",
        "thread",
    ),
    "a box whose arrival is relaxed": (
        "handover.staged[box].arrive();",
        "handover.staged[box].arrive_at(block_in_cluster());",
        "thread",
    ),
}
known([CODED, *FILES], CODING_MUTANTS, MUTANTS, GATHERING_MUTANTS, CLUSTER_MUTANTS)


ALL_MUTANTS = [(SCATTER, *one) for one in MUTANTS.items()] + [(REDUCE, *one) for one in GATHERING_MUTANTS.items()]


def is_noticed(algorithm, program, seed: int, kinds, sanitizer: str, world_size: int = 3) -> bool:
    try:
        return bool(faults(algorithm, program, world_size, seed, kinds, MOST_THREADS[sanitizer]))
    except KernelFailure:
        return True


@pytest.mark.parametrize(
    ("algorithm", "change"),
    [(one, change) for one, _, change in ALL_MUTANTS],
    ids=[mistake for _, mistake, _ in ALL_MUTANTS],
)
def test_a_mistake_is_noticed(algorithm, change):
    old, new, sanitizer = change
    (file,) = [name for name in FILES if old in (source_directory() / name).read_text()]
    kinds = KINDS[:1]
    program = program_of(algorithm, 3, sanitizer, kinds, Mutation(file, old, new))

    assert any(is_noticed(algorithm, program, seed, kinds, sanitizer) for seed in range(12))


@every_algorithm
@pytest.mark.parametrize("mistake", CLUSTER_MUTANTS)
def test_a_mistake_in_a_cluster_is_noticed(algorithm, mistake):
    old, new, sanitizer = CLUSTER_MUTANTS[mistake]
    kinds = KINDS[2:3]
    program = program_of(algorithm, 2, sanitizer, kinds, Mutation(FILES[0], old, new))

    assert any(is_noticed(algorithm, program, seed, kinds, sanitizer, 2) for seed in range(12))
