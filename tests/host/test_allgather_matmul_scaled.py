"""The matmul of all ranks' rows of e4m3 with their scales, executed on the host: exact integers, the specified bits.

tests/matmul/test_scaled_allgather_one_gpu.py tests what needs a GPU.
"""

from __future__ import annotations

import random

import pytest
import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.fp8_products import Scales
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import SIGNAL_PAD_NBYTES, Scratch, gathered_flags
from graphar.plan.tiles import MatmulTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import SCALE_FORMATS, KernelSource
from graphar.runtime.compiler import source_directory
from graphar.simulator.build import Mutation
from graphar.simulator.calls import first_epoch
from graphar.simulator.simulation import Call, Simulation
from tests.host.build import UNIT_PACKS, build, known
from tests.host.matmul_operands import aligned_rows, wrong_elements
from tests.host.mutant import notices
from tests.host.test_matmul_scaled import Integers, RandomData, scales_of, stored

pytestmark = pytest.mark.host

GATHER = Algorithm.ALLGATHER_MATMUL
CALLS = 3
MOST_ROWS, MOST_K = 300, 400  # of a rank
CAPACITY = MOST_ROWS * (-(-MOST_K // 16) + 1)  # packs in a slot: a row has at most a pack of scales
# Small tiles, with the fewest stages that are possible.
TILES = (MatmulTile(64, 64, 2), MatmulTile(128, 128, 2), MatmulTile(128, 192, 2, cluster=2))
KINDS = tuple((tile, form) for tile in TILES for form in SCALE_FORMATS)
SEEDS = {"plain": 4, "thread": 1, "address": 1}
MOST_THREADS = {"plain": 1 << 13, "thread": 2200, "address": 1 << 12}  # of all ranks, as in test_allgather_matmul.py


def dtype_of(world_size: int) -> torch.dtype:
    return torch.float16 if world_size == 2 else torch.bfloat16


def program_of(world_size: int, sanitizer: str, kinds=KINDS, mutation: Mutation | None = None):
    file, result = "one_scaled_allgather_matmul", TYPE_NAMES[dtype_of(world_size)]
    names = [f"{file}<{world_size}, {tile}, {result}, {form}>" for tile, form in kinds]
    return build(tuple(KernelSource(f"{file}.cu", name) for name in names), sanitizer, mutation)


def drawn_rows(choices: random.Random, world_size: int) -> list[int]:
    counts = [choices.choice([0, 1, 64, choices.randint(1, MOST_ROWS)]) for _ in range(world_size)]
    counts[choices.randrange(world_size)] = choices.randint(1, MOST_ROWS)
    return counts


def packed(sizes: list[int], rows, w, bias, scales: Scales, wants_rows: bool) -> torch.Tensor:
    """The bytes of one rank's sizes and operands, as one_scaled_allgather_matmul.cu takes them."""
    # A column that a scale has but once has no stride.
    strides = [s for one in (scales.a, scales.w) for s in (one.stride(0), one.stride(1) * scales.in_blocks)]
    in_memory = [stored(scales.a), stored(scales.w)]
    sizes = torch.tensor([*sizes, len(in_memory[0]), *strides, wants_rows, 0])
    parts = [sizes, *map(aligned_rows, (rows, w, bias)), *in_memory]
    return torch.cat([one.view(torch.uint8) for one in parts])


def draw_call(choices: random.Random, world_size: int, kinds, most_threads: int, data):
    """A call of any kind and size, and what each rank must get: a product, and all rows and scales if it wants them."""
    dtype = dtype_of(world_size)
    fitting = [i for i, (tile, _) in enumerate(kinds) if world_size * tile.cluster * tile.threads <= most_threads]
    kind = choices.choice(fitting)
    tile, form = kinds[kind]
    counts = drawn_rows(choices, world_size)
    m, k, wants_rows = sum(counts), choices.randint(1, MOST_K), choices.random() < 0.5
    most_blocks = min(2 * tile.cluster, most_threads // (world_size * tile.threads) // tile.cluster * tile.cluster)
    generator = torch.Generator().manual_seed(choices.getrandbits(32))
    n = STORE_COLUMNS * choices.randint(1, 30)
    a = [data.operand((rows, k), generator) for rows in counts]
    drawn = [scales_of(form, rows, n, k, data, choices, generator) for rows in counts]
    gathered, of_rows = torch.cat(a), torch.cat([scales.a for scales in drawn])
    inputs, results = [], []
    for rows, scales in zip(a, drawn, strict=True):
        w = data.operand((n, k), generator)
        bias, with_bias = torch.arange(n, dtype=dtype).remainder(17).view(1, n), choices.random() < 0.5
        sizes = [m, n, k, choices.randint(1, 3), with_bias]
        inputs.append(packed(sizes, rows, w, bias, scales, wants_rows))
        product = data.product(gathered, w, Scales(scales.in_blocks, of_rows, scales.w))
        product = (product + bias.to(product.dtype) if with_bias else product).to(dtype).view(-1).view(torch.uint8)
        both = aligned_rows(gathered).view(torch.uint8), of_rows.contiguous().view(-1).view(torch.uint8)
        results.append(torch.cat([product, *both]) if wants_rows else product)
    blocks = tuple(choices.randrange(tile.cluster, most_blocks + 1, tile.cluster) for _ in range(world_size))
    nbytes, shape = tuple(result.nbytes for result in results), Config(GATHER, blocks[0], tile.threads)
    call = Call(kind, shape, inputs, tuple(counts), nbytes, blocks=blocks, cluster=tile.cluster)
    return call, [result.view(torch.int16) for result in results]


def faults(
    program, world_size: int, seed: int, kinds=KINDS, most_threads: int = MOST_THREADS["plain"], data=Integers
) -> list[str]:
    """Descriptions of all errors after some calls in a row."""
    choices = random.Random(f"{world_size} {seed}")
    drawn = [draw_call(choices, world_size, kinds, most_threads, data) for _ in range(CALLS)]
    slots = 128 + (world_size - 1) * (4 * gathered_flags(CAPACITY, UNIT_PACKS) + 16 * CAPACITY)
    shared_nbytes = max(tile.shared_nbytes for tile in TILES) + 2048
    scratch = Scratch(CAPACITY, SIGNAL_PAD_NBYTES + slots, 0, shared_nbytes)
    simulation = Simulation(program, GATHER, world_size, scratch, 0, seed, first_epoch(seed))
    found = []
    for rank, outcome in enumerate(simulation.run([call for call, _ in drawn])):
        if outcome.record.kind:
            found.append(f"rank {rank} gave up waiting for rank {outcome.record.peer}")
        if outcome.broken_guards:
            found.append(f"rank {rank} wrote beside tensors or scratch")
        for number, (result, (_, expected)) in enumerate(zip(outcome.results, drawn, strict=True)):
            if wrong := wrong_elements(result, expected[rank]):
                found.append(f"rank {rank}, call {number}: {wrong} of {expected[rank].numel()} are wrong")
    return found


RUNS = [(2, "plain"), (3, "plain"), (4, "plain"), (8, "plain"), (2, "thread"), (2, "address")]


@pytest.mark.parametrize(("world_size", "sanitizer"), RUNS)
def test_calls_in_a_row_give_the_products_of_all_rows_with_their_scales(world_size, sanitizer):
    program = program_of(world_size, sanitizer)

    for seed in range(SEEDS[sanitizer]):
        assert faults(program, world_size, seed, most_threads=MOST_THREADS[sanitizer]) == [], seed


@pytest.mark.parametrize("form", SCALE_FORMATS)
def test_random_data_have_the_bits_of_the_specification(form):
    kinds = [kind for kind in KINDS if kind[1] == form]

    assert faults(program_of(3, "plain", kinds), 3, 0, kinds, data=RandomData) == []


# ---- negative controls: what is wrong, whose scales, the text that makes it so, and the sanitizer that notices -------

FILES = ("matmul/allgather_matmul.cu", "device/matmul/gathered_rows.cuh")
WAIT = "      while (!ring.filled[at.place].try_wait(at.use)) continue;\n"
MUTANTS = {
    "a peer's scales loaded before its rows have come": ("BlockScales", WAIT, "", "plain"),
    "a peer's scales of rows loaded before its rows have come": ("RowScales", WAIT, "", "thread"),
    "scales announced before all threads have stored them": (
        "BlockScales",
        "send_scales(unit);\n      __syncwarp();\n",
        "send_scales(unit);\n",
        "thread",
    ),
    "flags set before the scales are sent": (
        "BlockScales",
        "      if constexpr (scaled) send_scales(unit);\n      __syncwarp();\n"
        "      if (lane < N && lane != a.rank) store_release_sys(flag(lane, a.rank, unit), flag_value(call));\n",
        "      __syncwarp();\n"
        "      if (lane < N && lane != a.rank) store_release_sys(flag(lane, a.rank, unit), flag_value(call));\n"
        "      if constexpr (scaled) send_scales(unit);\n",
        "thread",
    ),
    "scales that are not sent": ("RowScales", "if constexpr (scaled) send_scales(unit);", "", "plain"),
    "the scales of another rank's rows": ("RowScales", "rows.of_rows(tile.owner)", "rows.of_rows(a.rank)", "plain"),
    "scales of the first rows for those of a later unit": (
        "BlockScales",
        "m.a_scale[(row + i / of_row) * m.a_scale_row",
        "m.a_scale[(i / of_row) * m.a_scale_row",
        "plain",
    ),
    "scales of every row in the first row's place": (
        "RowScales",
        "scales((a.rank + hop) % N, a.rank)[first + i] = scale",
        "scales((a.rank + hop) % N, a.rank)[i] = scale",
        "plain",
    ),
    "a peer's scales with the strides of the own ones": (
        "BlockScales",
        "      found.a_scale_block = 1;\n",
        "",
        "plain",
    ),
    "scales over the last rows of a slot": (
        "RowScales",
        "(slot(to, from) + a.count[from] * row_packs)",
        "(slot(to, from) + (a.count[from] - 1) * row_packs)",
        "plain",
    ),
    "own scales that are not gathered": (
        "RowScales",
        "      if (a.output != nullptr) gathered_scales(a.rank)[first + i] = scale;\n",
        "",
        "plain",
    ),
    "a peer's scales gathered in the place of the own ones": (
        "BlockScales",
        "gathered_scales(from)[i] =",
        "gathered_scales(a.rank)[i] =",
        "plain",
    ),
    "rows of all ranks as the limit of a rank's scales": (
        "BlockScales",
        "    found.m = a.count[from];\n",
        "",
        "address",
    ),
}


known(FILES, MUTANTS)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    form, old, new, sanitizer = MUTANTS[mistake]
    (file,) = [name for name in FILES if old in (source_directory() / name).read_text()]
    kinds = [(TILES[0], form)]
    program = program_of(3, sanitizer, kinds, Mutation(file, old, new))

    assert any(notices(lambda s=seed: faults(program, 3, s, kinds, MOST_THREADS[sanitizer])) for seed in range(12))
