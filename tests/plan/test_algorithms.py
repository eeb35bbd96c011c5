"""The tuning tables, and the algorithms that are chosen by them."""

import re
from dataclasses import replace
from importlib import resources

import pytest

from graphar.plan import scratch
from graphar.plan.algorithms import Algorithm, with_kernels
from graphar.plan.config import Config
from graphar.plan.entries import config_of, entry_of, fitted, measured_config
from graphar.plan.scratch import MAX_BLOCKS, MAX_RANKS, ONE_SHOT_DEPTH, WORLD_SIZES
from graphar.plan.tables import Table, shipped_table
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
MOST_SHARED_NBYTES = 227 << 10  # of a block on sm_90 and sm_100, less what static variables take
SM_80_MOST_SHARED_NBYTES = 163 << 10

every_kernel = pytest.mark.parametrize("algorithm", KERNEL_ALGORITHMS)
every_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


def tables():
    return [(table, size) for table in TABLES for size in shipped_table(table).rows]


every_table = pytest.mark.parametrize(("table", "world_size"), tables())


def entries_of(table, world_size):
    return shipped_table(table).rows[world_size]


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_the_default_table_has_every_world_size():
    assert list(DEFAULT.rows) == list(WORLD_SIZES)


@pytest.mark.parametrize("name", TABLES)
def test_a_shipped_table_is_valid_and_laid_out_as_tables_are_written(name):
    text = FILES[name].read_text()

    assert Table.from_json(text).name == name
    assert Table.from_json(text).to_json() == text


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


def test_a_measured_table_says_where_its_figures_are_from():
    for table in TABLES:
        assert shipped_table(table).machine
        assert table == "default" or shipped_table(table).report, table


# ---- choosing -------------------------------------------------------------------------------------------------------


@every_table
def test_an_algorithm_that_is_asked_for_takes_its_own_entries(table, world_size):
    for entry in entries_of(table, world_size):
        nbytes = entry["max_nbytes"] or 1 << 33
        config, _ = measured_config(shipped_table(table), world_size, nbytes, Algorithm(entry["algorithm"]))
        assert config == fitted(config_of(entry), world_size, nbytes)


@every_table
def test_a_threshold_is_the_last_size_of_its_entry(table, world_size):
    entries = entries_of(table, world_size)
    *thresholds, last = [entry["max_nbytes"] for entry in entries]

    assert thresholds
    assert last is None
    assert thresholds == sorted(set(thresholds))
    for threshold, at, above in zip(thresholds, entries, entries[1:], strict=False):
        for entry, nbytes in ((at, threshold - ELEMENT_NBYTES), (at, threshold), (above, threshold + ELEMENT_NBYTES)):
            config, used = measured_config(shipped_table(table), world_size, nbytes)
            assert (config, used) == (fitted(config_of(entry), world_size, nbytes), table), nbytes


def test_each_size_takes_the_first_entry_that_is_large_enough():
    grids = [Config(Algorithm.ONE_SHOT_PUSH, 128, threads) for threads in (32, 64, 96)]
    entries = [entry_of(config, limit) for config, limit in zip(grids, (4096, 4098, None), strict=True)]
    table = replace(DEFAULT, name="made up", rows={2: entries})

    taken = {
        nbytes: measured_config(table, 2, nbytes)[0].threads for nbytes in (1, 4094, 4096, 4097, 4098, 4099, 1 << 40)
    }

    assert taken == {1: 32, 4094: 32, 4096: 32, 4097: 64, 4098: 64, 4099: 96, 1 << 40: 96}


@every_world_size
def test_what_is_chosen_serves_the_size(world_size):
    for table in TABLES:
        for nbytes in (1, 16, 17, 4095, *(1 << power for power in range(12, 40, 3))):
            config, _ = measured_config(shipped_table(table), world_size, nbytes)
            largest = config.algorithm.row.limit(world_size)
            assert largest is None or nbytes <= largest
            assert_can_run(config, world_size)


def test_a_block_more_than_have_a_pack_is_launched_while_there_is_room():
    entry = entries_of("default", 2)[0]
    in_one_block = entry["threads"] * scratch.PACK_NBYTES

    assert measured_config(DEFAULT, 2, 1)[0].blocks == 2
    assert measured_config(DEFAULT, 2, in_one_block)[0].blocks == 2
    assert measured_config(DEFAULT, 2, in_one_block + 1)[0].blocks == 3
    largest, _ = measured_config(DEFAULT, 2, entry["blocks"] * in_one_block, Algorithm(entry["algorithm"]))
    assert largest.blocks == entry["blocks"]


@every_world_size
def test_a_block_of_two_shot_push_has_a_group_of_whole_warps_for_every_owner(world_size):
    for table in TABLES:
        for nbytes in (1, 1 << 16, 1 << 20, 1 << 26):
            config, _ = measured_config(shipped_table(table), world_size, nbytes, Algorithm.TWO_SHOT_PUSH)
            assert config.threads % (32 * world_size) == 0


def test_a_thread_of_multimem_two_shot_has_a_pack_of_every_shard():
    config, _ = measured_config(DEFAULT, 4, 4 * 256 * scratch.PACK_NBYTES, Algorithm.MULTIMEM_TWO_SHOT)

    assert config.blocks * config.threads >= 256
    assert (config.blocks - 1) * config.threads < 256


def test_two_shot_push_has_one_block_more_than_its_groups_need():
    config, _ = measured_config(DEFAULT, 4, 4 * 256 * scratch.PACK_NBYTES, Algorithm.TWO_SHOT_PUSH)

    width = config.threads // 4

    assert (config.blocks - 1) * width >= 256
    assert (config.blocks - 2) * width < 256


def test_a_block_of_two_shot_tma_has_a_chunk_for_every_channel():
    in_block = scratch.TMA_CHANNELS * 4 * Algorithm.TWO_SHOT_TMA.row.scratch(4).capacity * scratch.PACK_NBYTES

    assert measured_config(DEFAULT, 4, in_block, Algorithm.TWO_SHOT_TMA)[0].blocks == 1
    assert measured_config(DEFAULT, 4, in_block + 1, Algorithm.TWO_SHOT_TMA)[0].blocks == 2


@pytest.mark.parametrize(
    ("device", "table"), [("NVIDIA B999", "default"), ("NVIDIA H200", "nvidia_h200"), ("../default", "default")]
)
def test_a_device_takes_its_own_table_where_there_is_one(device, table):
    assert find_table(device) == shipped_table(table)


def test_a_world_size_that_was_not_measured_takes_the_default_table():
    table = shipped_table("nvidia_h200")

    assert set(table.rows) < set(WORLD_SIZES)
    for world_size in WORLD_SIZES:
        if world_size in table.rows:
            assert measured_config(table, world_size, 4096)[1] == "nvidia_h200"
        else:
            assert measured_config(table, world_size, 4096) == measured_config(DEFAULT, world_size, 4096)


@every_kernel
@every_world_size
def test_a_given_algorithm_is_the_one_that_is_shaped(algorithm, world_size):
    for table in TABLES:
        for nbytes in (1, 4096, algorithm.row.limit(world_size) or 1 << 36):
            config, _ = measured_config(shipped_table(table), world_size, nbytes, algorithm)
            assert config.algorithm is algorithm
            assert_can_run(config, world_size)


# ---- scratch --------------------------------------------------------------------------------------------------------


def test_only_those_that_let_the_switch_add_are_not_exact():
    assert [one for one in Algorithm if not one.exact] == [Algorithm.MULTIMEM_ONE_SHOT, Algorithm.MULTIMEM_TWO_SHOT]


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_an_algorithms_number_is_its_place(algorithm):
    assert list(Algorithm)[algorithm.number] is algorithm


@pytest.mark.parametrize(
    "algorithm", [one for one in Algorithm if one not in (Algorithm.FALLBACK, Algorithm.HIERARCHICAL)]
)
def test_slots_whose_data_carry_their_readiness_begin_as_not_yet(algorithm):
    assert algorithm.row.scratch(2).fill == (0xFF if algorithm in SENTINEL else 0)


def in_pipeline(header, name):
    return constant(f"device/sync/{header}.cuh", name)


def shard_nbytes(nbytes, n):
    """The largest shard: whole lines of 128 bytes."""
    return -(-nbytes // (128 * n)) * 128


def slots_of(algorithm, n):
    """How many slots a kernel's scratch has between ``n`` ranks, and their bytes."""
    of_pipeline = 2 * in_pipeline("two_shot_pipeline", "pipeline_depth") * scratch.Sizes.pipeline_blocks * n
    of_parts = in_pipeline("push_pipeline", "push_depth") * scratch.Sizes.allgather_blocks * n
    of_channels = 2 * constant(file_of(Algorithm.TWO_SHOT_TMA), "tma_depth") * MAX_BLOCKS // 2 * n
    tensor_nbytes = algorithm.row.limit(n)
    match algorithm:
        case Algorithm.ONE_SHOT | Algorithm.ONE_SHOT_UNSTAGED | Algorithm.MULTIMEM_ONE_SHOT:
            return 2, tensor_nbytes
        case Algorithm.MULTIMEM_TWO_SHOT:
            return 1, tensor_nbytes
        case Algorithm.ONE_SHOT_PUSH:
            return 2 * n, tensor_nbytes
        case Algorithm.TWO_SHOT_PUSH:
            return 4 * n, shard_nbytes(tensor_nbytes, n)  # in both phases, twice
        case Algorithm.REDUCESCATTER_PUSH:
            return 2 * n, shard_nbytes(scratch.Sizes.reducescatter_nbytes, n)
        case Algorithm.ALLGATHER_FLAGGED:
            return 2 * n, 2 * scratch.Sizes.allgather_flagged_nbytes
        case Algorithm.ALLGATHER_PUSH:
            return of_parts, 16 * scratch.Sizes.allgather_chunk
        case Algorithm.TWO_SHOT_PIPELINED:
            return of_pipeline, 16 * scratch.Sizes.pipeline_chunk
        case Algorithm.TWO_SHOT_LOSSLESS:
            return of_pipeline, scratch.Sizes.lossless_chunk * scratch.LOSSLESS_TILE_NBYTES
        case Algorithm.TWO_SHOT_TMA:
            return of_channels, 16 * algorithm.row.scratch(n).capacity


WITHOUT_PAD = {*SENTINEL, Algorithm.ALLGATHER_FLAGGED}
OF_PARTS = (Algorithm.REDUCESCATTER_PUSH, Algorithm.ALLGATHER_FLAGGED, Algorithm.ALLGATHER_PUSH)


@pytest.mark.parametrize("algorithm", [*KERNEL_ALGORITHMS, *OF_PARTS])
@every_world_size
def test_scratch_has_its_slots_behind_a_signal_pad_if_the_data_do_not_carry_their_readiness(world_size, algorithm):
    needs, (slots, slot_nbytes) = algorithm.row.scratch(world_size), slots_of(algorithm, world_size)

    pad_nbytes = 0 if algorithm in WITHOUT_PAD else MAX_BLOCKS * MAX_RANKS * 8
    assert needs.nbytes == pad_nbytes + slots * needs.capacity * 16
    assert needs.capacity * 16 == slot_nbytes
    assert needs.nbytes // 16 < 1 << 32 or algorithm not in SENTINEL


def test_the_pairs_of_allgather_flagged_are_whole_for_a_warp_and_two_shot_tma_has_no_more_channels_than_blocks():
    assert Algorithm.ALLGATHER_FLAGGED.row.scratch(2).capacity % 64 == 0
    assert scratch.TMA_BLOCKS * constant(file_of(Algorithm.TWO_SHOT_TMA), "channels") <= MAX_BLOCKS // 2


@every_world_size
def test_one_shot_has_shared_memory_for_the_packs_its_threads_have_in_flight(world_size):
    threads = constant(file_of(Algorithm.ONE_SHOT), "max_threads")

    assert threads == scratch.ONE_SHOT_THREADS
    assert Algorithm.ONE_SHOT.row.scratch(world_size).shared_nbytes == ONE_SHOT_DEPTH * world_size * threads * 16
    assert Algorithm.ONE_SHOT_UNSTAGED.row.scratch(world_size).shared_nbytes == 0


@every_world_size
def test_a_channel_of_two_shot_tma_has_a_piece_of_every_rank_in_shared_memory(world_size):
    needs = Algorithm.TWO_SHOT_TMA.row.scratch(world_size)
    channels = constant(file_of(Algorithm.TWO_SHOT_TMA), "channels")

    assert needs.capacity % 8 == 0  # lines of 128 bytes
    assert needs.shared_nbytes == channels * world_size * needs.capacity * 16


def test_the_threads_of_two_shot_tma_are_those_of_its_roles():
    file = file_of(Algorithm.TWO_SHOT_TMA)
    warps = constant(file, "channels") * (3 + constant(file, "reduce_warps"))

    assert warps * 32 == scratch.TMA_THREADS


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
    assert needs.capacity < 1 << 32
