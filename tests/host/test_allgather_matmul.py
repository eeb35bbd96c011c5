"""The matmul of all ranks' rows, executed on the host: exact integers, and the rows' bits, whatever happens when."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import SIGNAL_PAD_NBYTES, Scratch, gathered_flags
from graphar.plan.tiles import MatmulTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import source_directory
from graphar.simulator.build import Mutation
from graphar.simulator.calls import first_epoch
from graphar.simulator.simulation import Call, KernelFailure, Outcome, Simulation
from tests.cases import normal
from tests.host.build import UNIT_PACKS, build, known
from tests.host.matmul_operands import aligned_rows, packed, wrong_elements
from tests.host.test_matmul_tiles import EPILOGUE

pytestmark = pytest.mark.host

GATHER = Algorithm.ALLGATHER_MATMUL
WORLD_SIZES = (2, 3, 4)
CALLS = 4
MOST_ROWS, MOST_K = 300, 150  # of a rank
CAPACITY = MOST_ROWS * -(-MOST_K // 8)  # packs in a slot
# Small tiles, with the fewest stages that are possible.
TILES = (
    MatmulTile(64, 64, 2),
    MatmulTile(64, 128, 2, cluster=2),
    MatmulTile(128, 64, 2),
    MatmulTile(128, 160, 2),
    MatmulTile(128, 192, 2, cluster=2),
)
KINDS = tuple((tile, layout) for tile in TILES for layout in tile.layouts)
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
):
    file, element, more = f"one_{algorithm}", TYPE_NAMES[dtype_of(world_size)], f", {form.kernel}" if form else ""
    names = [f"{file}<{element}, {world_size}, {tile}, {layout}{more}>" for tile, layout in kinds]
    text = form.generated.text if form else ""
    return build(tuple(KernelSource(f"{file}.cu", name, generated=text) for name in names), sanitizer, mutation)


def draw_call(
    algorithm, choices: random.Random, world_size: int, kinds, most_threads: int, form: Pointwise | None = None
) -> tuple[Call, list[torch.Tensor]]:
    """A call of any kind and size that the scratch has room for, and what each rank must get: its product, and the
    gathered rows, padded, if the call asks for them. Ranks have rows, weights and grids of their own.

    With a form, EPILOGUE is applied to the products, and there is no bias.
    """
    dtype = dtype_of(world_size)
    fitting = [i for i, (tile, _) in enumerate(kinds) if world_size * tile.cluster * tile.threads <= most_threads]
    kind = choices.choice(fitting)
    tile, layout = kinds[kind]
    counts = [choices.choice([0, 1, 64, choices.randint(1, MOST_ROWS)]) for _ in range(world_size)]
    counts[choices.randrange(world_size)] = choices.randint(1, MOST_ROWS)
    m, k, wants_rows = sum(counts), choices.randint(1, MOST_K), choices.random() < 0.5
    most_blocks = min(2 * tile.cluster, most_threads // (world_size * tile.threads) // tile.cluster * tile.cluster)
    generator = torch.Generator().manual_seed(choices.getrandbits(32))
    n = STORE_COLUMNS * choices.randint(1, 25)
    a = [torch.randint(-8, 9, (rows, k), generator=generator).to(dtype) for rows in counts]
    gathered = torch.cat(a)
    operands = tuple(normal(at, size, dtype) for at, size in enumerate((n, m * n, m))) if form else ()
    inputs, results = [], []
    for rows in a:
        w = torch.randint(-8, 9, (n, k), generator=generator).to(dtype)
        bias, with_bias = torch.arange(n, dtype=dtype).remainder(17).view(1, n), not form and choices.random() < 0.5
        inputs.append(packed([m, n, k, wants_rows, choices.randint(1, 3), with_bias], rows, w, bias, layout))
        product = gathered.double() @ w.double().t() + (bias.double() if with_bias else 0)
        if form:
            given = EpilogueInputs(list(operands), [0.375])
            product = replace(form, columns=n).apply_whole(product.float(), given)
        product = product.to(dtype)
        results.append(torch.cat([product.view(-1), aligned_rows(gathered)]) if wants_rows else product.view(-1))
    blocks = tuple(choices.randrange(tile.cluster, most_blocks + 1, tile.cluster) for _ in range(world_size))
    nbytes = tuple(result.nbytes for result in results)
    call = Call(kind, Config(algorithm, blocks[0], tile.threads), inputs, tuple(counts), nbytes, blocks=blocks)
    beside = {"operands": operands, "scalars": (0.375,), "columns": n} if form else {}
    return Call(**(vars(call) | {"cluster": tile.cluster} | beside)), [one.view(torch.int16) for one in results]


def scratch_of(algorithm, world_size: int) -> Scratch:
    slots = 128 + (world_size - 1) * (4 * gathered_flags(CAPACITY, UNIT_PACKS) + 16 * CAPACITY)
    return Scratch(CAPACITY, SIGNAL_PAD_NBYTES + slots, 0, max(tile.shared_nbytes for tile in TILES) + 2048)


def simulate(algorithm, program, world_size: int, seed: int, calls: list[Call]) -> list[Outcome]:
    scratch, epoch = scratch_of(algorithm, world_size), first_epoch(seed)
    return Simulation(program, algorithm, world_size, scratch, 0, seed, epoch).run(calls)


def faults(
    program,
    world_size: int,
    seed: int,
    kinds=KINDS,
    most_threads: int = MOST_THREADS["plain"],
    form: Pointwise | None = None,
) -> list[str]:
    """Descriptions of all errors after some calls in a row."""
    choices = random.Random(f"{world_size} {seed}")
    drawn = [draw_call(GATHER, choices, world_size, kinds, most_threads, form) for _ in range(CALLS)]
    found = []
    for rank, outcome in enumerate(simulate(GATHER, program, world_size, seed, [call for call, _ in drawn])):
        if outcome.record.kind:
            found.append(f"rank {rank} gave up waiting for rank {outcome.record.peer}")
        if outcome.broken_guards:
            found.append(f"rank {rank} wrote beside tensors or scratch")
        for number, (result, (_, expected)) in enumerate(zip(outcome.results, drawn, strict=True)):
            if wrong := wrong_elements(result, expected[rank]):
                found.append(f"rank {rank}, call {number}: {wrong} of {expected[rank].numel()} are wrong")
    return found


@pytest.mark.parametrize(("world_size", "sanitizer"), [(2, "plain"), (3, "plain"), (4, "plain"), (2, "thread")])
def test_calls_in_a_row_give_the_products_and_the_rows_of_all_ranks(world_size, sanitizer, whole):
    kinds = KINDS if whole or sanitizer == "plain" else KINDS[::2]
    program = program_of(GATHER, world_size, sanitizer, kinds)

    for seed in range(SEEDS[sanitizer]):
        assert faults(program, world_size, seed, kinds, MOST_THREADS[sanitizer]) == [], seed


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[-1:]], ids=["small tiles", "clusters"])
def test_an_epilogue_is_applied_to_each_element_in_its_place(kinds):
    program = program_of(GATHER, 3, "plain", kinds, form=EPILOGUE)

    for seed in range(3):
        assert faults(program, 3, seed, kinds, form=EPILOGUE) == [], seed


# ---- negative controls: what is wrong, the text that makes it so, and the sanitizer that notices ---------------------

FILES = ("matmul/allgather_matmul.cu", "device/matmul/gathered_rows.cuh")
MUTANTS = {
    "rows sent to ranks that have not entered the call": (
        " || !wait_until_all_entered<Rows::ranks>(a, call)",
        "",
        "plain",
    ),
    "rows multiplied before they have come": (
        "failed = failed || !rows.wait(call, tile.owner, row, Tile::rows);",
        "(void)failed, (void)row;",
        "plain",
    ),
    "rows announced before all threads have stored them": (
        "      send_unit(unit);\n      if constexpr (scaled) send_scales(unit);\n      __syncwarp();\n",
        "      send_unit(unit);\n",
        "thread",
    ),
    "rows loaded without a fence": (
        "      shared.awaited.arrive();\n      fence_async_proxy_global();\n",
        "      shared.awaited.arrive();\n",
        "thread",
    ),
    "a peer's rows that the producer does not wait for": (
        "      while (!shared.arrived.try_wait(number)) continue;\n",
        "",
        "plain",
    ),
    "phases that count own tiles as well": (
        "      fence_async_proxy_global();\n      ++number;\n    }\n",
        "      fence_async_proxy_global();\n    }\n    ++number;\n",
        "plain",
    ),
    "own rows that are waited for": ("    if (tile.owner == a.rank) continue;\n", "", "plain"),
    "bytes of the boxes of another's rows": (
        "producer.a_nbytes_of(a.count[tile.owner])",
        "producer.a_nbytes_of(a.count[a.rank])",
        "plain",
    ),
    "a unit too few is waited for": (
        "const u32 beyond = min(row + rows,",
        "const u32 beyond = min(row + rows / 2,",
        "plain",
    ),
    "a next unit that is never cleared": ("      rows.clear_next_call(call);\n", "", "plain"),
    "flags that do not tell the call": (
        "seen != flag_value(call); seen",
        "seen == 0; seen",
        "plain",
    ),
    "arrivals that run ahead of the producer": (
        "    while (!shared.awaited.try_wait(number - 1)) continue;\n",
        "",
        "plain",
    ),
    "a tensor map that nobody filled": ("if (a.count[a.rank] != 0) {", "if (true) {", "plain"),
    "own rows that are not gathered": ("copy<N>(packs", "copy<N - 1>(packs", "plain"),
}


EPILOGUE_MUTANTS = {
    "an epilogue whose rows count from their owner's first": ("begin + tile.row + 64 * index", "tile.row + 64 * index"),
    "an epilogue in the places of the other consumer": (
        "begin + tile.row + 64 * index",
        "begin + tile.row + 0 * index",
    ),
    "operands of an epilogue that end with the owner's count": ("end = begin + a.count", "end = a.count"),
}


def is_noticed(program, seed: int, kinds, sanitizer: str, form: Pointwise | None = None) -> bool:
    try:
        return bool(faults(program, 3, seed, kinds, MOST_THREADS[sanitizer], form))
    except KernelFailure:
        return True


known(FILES, MUTANTS, EPILOGUE_MUTANTS)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    old, new, sanitizer = MUTANTS[mistake]
    (file,) = [name for name in FILES if old in (source_directory() / name).read_text()]
    kinds = KINDS[:1]
    program = program_of(GATHER, 3, sanitizer, kinds, Mutation(file, old, new))

    assert any(is_noticed(program, seed, kinds, sanitizer) for seed in range(12))


@pytest.mark.parametrize("mistake", EPILOGUE_MUTANTS)
def test_a_mistake_of_an_epilogues_places_is_noticed(mistake):
    kinds = KINDS[4:5]  # with two consumers
    program = program_of(GATHER, 3, "plain", kinds, Mutation(FILES[0], *EPILOGUE_MUTANTS[mistake]), EPILOGUE)

    assert any(is_noticed(program, seed, kinds, "plain", EPILOGUE) for seed in range(12))
