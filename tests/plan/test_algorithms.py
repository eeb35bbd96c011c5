"""The tuning tables, and the algorithms that are chosen by them."""

import re
from dataclasses import replace
from importlib import resources

import pytest

from graphar.numerics.codecs import TILE_NUMEL
from graphar.plan import scratch
from graphar.plan.algorithms import Algorithm, with_kernels
from graphar.plan.config import Config
from graphar.plan.scratch import MAX_BLOCKS, WORLD_SIZES
from graphar.plan.tables import Table, config_of, entry_of, fitted, measured_config, serving, shipped_table
from graphar.runtime import compiler
from graphar.runtime.catalogue import file_of
from graphar.runtime.user_tables import find_table

FILES = {path.name.removesuffix(".json"): path for path in resources.files("graphar.plan").joinpath("tables").iterdir()}
TABLES = sorted(FILES)
DEFAULT = shipped_table("default")
KERNEL_ALGORITHMS = with_kernels("allreduce")
SENTINEL = {
    Algorithm.ONE_SHOT_PUSH,
    Algorithm.TWO_SHOT_PUSH,
    Algorithm.REDUCESCATTER_PUSH,
    Algorithm.QUANTIZED_TWO_SHOT_PUSH,
    Algorithm.MATMUL_ONE_SHOT,
    Algorithm.MATMUL_TWO_SHOT,
    Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT,
    Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT,
    Algorithm.REDUCESCATTER_RMSNORM,
}
ELEMENT_NBYTES = 2
TMA_PIECE = Algorithm.TWO_SHOT_TMA.row.scratch(4).capacity
MOST_SHARED_NBYTES = 227 << 10  # of a block on sm_90 and sm_100, less what static variables take
SM_80_MOST_SHARED_NBYTES = 163 << 10

every_kernel = pytest.mark.parametrize("algorithm", KERNEL_ALGORITHMS)
every_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


def tables():
    return [(table, size) for table in TABLES for size in shipped_table(table).rows]


every_table = pytest.mark.parametrize(("table", "world_size"), tables())


def entries_of(table, world_size):
    return shipped_table(table).rows[world_size]


@pytest.mark.parametrize("name", TABLES)
def test_a_shipped_table_is_valid_and_laid_out_as_tables_are_written(name):
    text = FILES[name].read_text()
    table = Table.from_json(text)

    assert (table.name, table.to_json()) == (name, text)
    assert name == "default" or (table.machine and table.report)


def assert_can_run(config, world_size):
    assert 1 <= config.blocks <= config.algorithm.row.max_blocks <= MAX_BLOCKS
    assert 32 <= config.threads <= config.algorithm.row.max_threads
    assert config.threads % 32 == 0
    if config.algorithm.row.chunked:
        assert 1 <= config.chunk <= config.algorithm.row.scratch(world_size).capacity
    else:
        assert config.chunk == 0
    if config.algorithm is Algorithm.TWO_SHOT_TMA:
        assert config.threads == scratch.TMA_THREADS


def source_of(algorithm):
    return text_of(file_of(algorithm))


def text_of(file):
    return (compiler.source_directory() / file).read_text()


def constant(file, name):
    return int(re.search(rf"constexpr (?:int|u32) {name} = (\d+);", text_of(file))[1])


@every_table
def test_an_algorithm_that_is_asked_for_takes_its_own_entries(table, world_size):
    for entry in entries_of(table, world_size):
        nbytes = entry["max_nbytes"] or 1 << 33
        config = measured_config(shipped_table(table), world_size, nbytes, Algorithm(entry["algorithm"]))
        assert config == fitted(config_of(entry), world_size, nbytes)


def test_each_size_takes_the_first_entry_that_is_large_enough():
    grids = [Config(Algorithm.ONE_SHOT_PUSH, 128, threads) for threads in (32, 64, 96)]
    entries = [entry_of(config, limit) for config, limit in zip(grids, (4096, 4098, None), strict=True)]
    table = replace(DEFAULT, name="made up", rows={2: entries})

    taken = {nbytes: measured_config(table, 2, nbytes).threads for nbytes in (1, 4094, 4096, 4097, 4098, 4099, 1 << 40)}

    assert taken == {1: 32, 4094: 32, 4096: 32, 4097: 64, 4098: 64, 4099: 96, 1 << 40: 96}


@every_world_size
def test_a_block_of_two_shot_push_has_a_group_of_whole_warps_for_every_owner(world_size):
    for table in TABLES:
        for nbytes in (1, 1 << 16, 1 << 20, 1 << 26):
            config = measured_config(shipped_table(table), world_size, nbytes, Algorithm.TWO_SHOT_PUSH)
            assert config.threads % (32 * world_size) == 0


@pytest.mark.parametrize(
    ("algorithm", "chunk", "packs", "more"),
    [
        (Algorithm.ONE_SHOT, 0, 256, 0),
        (Algorithm.ONE_SHOT_PUSH, 0, 256, 1),  # the last block tells what is called
        (Algorithm.TWO_SHOT_PUSH, 0, 256, 1),  # a group of 64 threads handles a shard
        (Algorithm.MULTIMEM_TWO_SHOT, 0, 4 * 256, 0),  # a thread has a pack of every shard
        (Algorithm.TWO_SHOT_TMA, TMA_PIECE, 4 * TMA_PIECE * scratch.TMA_CHANNELS, 0),
        (Algorithm.TWO_SHOT_LOSSLESS, 3, 4 * 3 * TILE_NUMEL * ELEMENT_NBYTES // scratch.PACK_NBYTES, 0),
    ],
)
def test_as_many_blocks_are_launched_as_have_packs_and_one_more_that_tells(algorithm, chunk, packs, more):
    grid, in_block = Config(algorithm, 64, algorithm.row.only_threads or 256, chunk), packs * scratch.PACK_NBYTES

    blocks = [fitted(grid, 4, nbytes).blocks for nbytes in (1, in_block, in_block + 1, 3 * in_block, 1 << 33)]

    assert blocks == [1 + more, 1 + more, 2 + more, 3 + more, 64]


@pytest.mark.parametrize(
    ("device", "table"), [("NVIDIA B999", "default"), ("NVIDIA H200", "nvidia_h200"), ("../default", "default")]
)
def test_a_device_takes_its_own_table_where_there_is_one(device, table):
    assert find_table(device) == shipped_table(table)


def test_a_world_size_that_was_not_measured_takes_the_default_table():
    table = shipped_table("nvidia_h200")

    assert set(table.rows) < set(WORLD_SIZES)
    for world_size in WORLD_SIZES:
        assert serving(table, world_size) is (table if world_size in table.rows else DEFAULT)


@every_kernel
@every_world_size
def test_a_given_algorithm_is_the_one_that_is_shaped(algorithm, world_size):
    for table in TABLES:
        for nbytes in (1, 4096, algorithm.row.limit(world_size) or 1 << 36):
            config = measured_config(shipped_table(table), world_size, nbytes, algorithm)
            assert config.algorithm is algorithm
            assert_can_run(config, world_size)


@pytest.mark.parametrize(
    "algorithm", [one for one in Algorithm if one not in (Algorithm.FALLBACK, Algorithm.HIERARCHICAL)]
)
def test_slots_whose_data_carry_their_readiness_begin_as_not_yet(algorithm):
    assert algorithm.row.scratch(2).fill == (0xFF if algorithm in SENTINEL else 0)


@every_kernel
@every_world_size
def test_a_block_finds_its_shared_memory_on_every_chip_its_kernel_runs_on(algorithm, world_size):
    limit = MOST_SHARED_NBYTES if algorithm is Algorithm.TWO_SHOT_TMA else SM_80_MOST_SHARED_NBYTES

    assert algorithm.row.scratch(world_size).shared_nbytes <= limit


@every_kernel
@every_world_size
def test_a_kernel_can_count_its_packs_in_32_bits(algorithm, world_size):
    needs = algorithm.row.scratch(world_size)

    assert algorithm.row.limit(world_size) is not None or algorithm not in SENTINEL
    assert (needs.nbytes // 16 if algorithm in SENTINEL else needs.capacity) < 1 << 32


TMA = file_of(Algorithm.TWO_SHOT_TMA)


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        (file_of(Algorithm.ONE_SHOT), "max_threads", scratch.ONE_SHOT_THREADS),
        (TMA, "channels", scratch.TMA_CHANNELS),
        (TMA, "tma_depth", scratch.TMA_DEPTH),
        (TMA, "reduce_warps", scratch.TMA_REDUCE_WARPS),
        ("device/sync/two_shot_pipeline.cuh", "pipeline_depth", scratch.PIPELINE_DEPTH),
        ("device/sync/push_pipeline.cuh", "push_depth", scratch.PUSH_DEPTH),
    ],
)
def test_scratch_is_laid_out_by_the_constants_of_the_kernels(file, name, value):
    assert constant(file, name) == value
