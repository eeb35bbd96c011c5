"""The tuning tables and what is chosen from them."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from graphar import algorithms, chooser, compiler
from graphar.algorithms import Algorithm, Shape, largest_nbytes, scratch
from graphar.chooser import choose, table_name, tuning_table
from graphar.kernels import KERNELS, MAX_BLOCKS, MAX_RANKS, WORLD_SIZES

TABLES = sorted(path.name.removesuffix(".json") for path in resources.files("graphar").joinpath("tuning").iterdir())
KERNEL_ALGORITHMS = [algorithm for algorithm in Algorithm if algorithm is not Algorithm.FALLBACK]
UNKNOWN_DEVICE = "NVIDIA B999"
ELEMENT_NBYTES = 2

every_kernel = pytest.mark.parametrize("algorithm", KERNEL_ALGORITHMS)
every_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


def tables():
    return [(table, int(size)) for table in TABLES for size in tuning_table(table)["rows"]]


every_table = pytest.mark.parametrize(("table", "world_size"), tables())


def rows_of(table, world_size):
    return tuning_table(table)["rows"][str(world_size)]


def limit_of(row):
    return float("inf") if row["max_nbytes"] is None else row["max_nbytes"]


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_the_default_table_has_every_world_size():
    assert [int(size) for size in tuning_table("default")["rows"]] == list(WORLD_SIZES)


@every_table
def test_rows_are_sorted_and_the_last_takes_any_size(table, world_size):
    limits = [limit_of(row) for row in rows_of(table, world_size)]

    assert world_size in WORLD_SIZES
    assert limits == sorted(limits)
    assert limits[-1] == float("inf")
    assert float("inf") not in limits[:-1]


@every_table
def test_a_row_is_complete_and_names_a_kernel(table, world_size):
    for row in rows_of(table, world_size):
        assert row["algorithm"] in KERNELS
        assert Algorithm(row["algorithm"]).exact
        expected = {"max_nbytes", "algorithm", "blocks", "threads"}
        assert row.keys() == expected | ({"chunk"} if row["algorithm"] == "two_shot_pipelined" else set())


@every_table
def test_no_row_reaches_beyond_its_algorithms_scratch(table, world_size):
    for row in rows_of(table, world_size):
        largest = largest_nbytes(Algorithm(row["algorithm"]), world_size)
        assert largest is None or limit_of(row) <= largest, row


@every_table
def test_a_rows_grid_is_one_its_kernel_can_run(table, world_size):
    for row in rows_of(table, world_size):
        assert_can_run(Shape(Algorithm(row["algorithm"]), row["blocks"], row["threads"], row.get("chunk", 0)))


@every_kernel
def test_the_generic_grid_is_one_every_kernel_can_run(algorithm):
    row = chooser.GENERIC_ROW

    assert_can_run(Shape(algorithm, row["blocks"], row["threads"], row["chunk"]))


def assert_can_run(shape):
    source = (compiler.source_directory() / f"{shape.algorithm.value}.cu").read_text()
    most_threads = int(re.search(r"__launch_bounds__\((\d+)\)", source)[1])
    most_blocks = algorithms.PIPELINE_BLOCKS if shape.algorithm is Algorithm.TWO_SHOT_PIPELINED else MAX_BLOCKS
    assert 1 <= shape.blocks <= most_blocks
    assert 32 <= shape.threads <= most_threads
    assert shape.threads % 32 == 0
    if shape.algorithm is Algorithm.TWO_SHOT_PIPELINED:
        assert 1 <= shape.chunk <= algorithms.PIPELINE_CHUNK


def test_a_measured_table_says_where_its_figures_are_from():
    for table in TABLES:
        assert tuning_table(table)["machine"]
        assert table == "default" or tuning_table(table)["report"], table


# ---- choosing -------------------------------------------------------------------------------------------------------


@every_table
def test_a_threshold_is_the_last_size_of_its_row(table, world_size):
    rows = rows_of(table, world_size)
    thresholds = sorted({row["max_nbytes"] for row in rows if row["max_nbytes"]})

    for threshold in thresholds:
        below, at, above = (first_row(rows, threshold + step * ELEMENT_NBYTES) for step in (-1, 0, 1))
        for row, nbytes in ((below, threshold - ELEMENT_NBYTES), (at, threshold), (above, threshold + ELEMENT_NBYTES)):
            shape, used = choose(table, world_size, nbytes)
            assert (shape.algorithm.value, shape.threads, used) == (row["algorithm"], row["threads"], table)
        assert at["max_nbytes"] == threshold
        assert limit_of(above) > threshold


def first_row(rows, nbytes):
    return next(row for row in rows if nbytes <= limit_of(row))


@every_world_size
def test_what_is_chosen_serves_the_size(world_size):
    for table in TABLES:
        for nbytes in (1, 16, 17, 4095, *(1 << power for power in range(12, 40, 3))):
            shape, _ = choose(table, world_size, nbytes)
            largest = largest_nbytes(shape.algorithm, world_size)
            assert largest is None or nbytes <= largest
            assert_can_run(shape)


def test_no_more_blocks_are_launched_than_have_a_pack():
    row = rows_of("default", 2)[0]
    in_one_block = row["threads"] * algorithms.PACK_NBYTES

    assert choose(UNKNOWN_DEVICE, 2, 1)[0].blocks == 1
    assert choose(UNKNOWN_DEVICE, 2, in_one_block)[0].blocks == 1
    assert choose(UNKNOWN_DEVICE, 2, in_one_block + 1)[0].blocks == 2


@pytest.mark.parametrize("algorithm", [Algorithm.TWO_SHOT_PUSH, Algorithm.MULTIMEM_TWO_SHOT])
def test_a_thread_of_a_two_shot_has_a_pack_of_every_shard(algorithm):
    nbytes = 4 * 256 * algorithms.PACK_NBYTES

    shape, _ = choose(UNKNOWN_DEVICE, 4, nbytes, algorithm)

    assert shape.blocks * shape.threads >= 256
    assert (shape.blocks - 1) * shape.threads < 256


@every_world_size
def test_an_unknown_device_takes_the_default_table(world_size):
    assert table_name(UNKNOWN_DEVICE) == "default"
    assert choose(UNKNOWN_DEVICE, world_size, 4096) == choose("default", world_size, 4096)


def test_a_device_takes_its_own_table():
    assert table_name("NVIDIA H200") == "nvidia_h200"


def test_a_world_size_that_was_not_measured_takes_the_default_table():
    unmeasured = [n for n in WORLD_SIZES if str(n) not in tuning_table("nvidia_h200")["rows"]]

    for world_size in unmeasured:
        assert choose("NVIDIA H200", world_size, 4096) == choose("default", world_size, 4096)
    for world_size in set(WORLD_SIZES) - set(unmeasured):
        assert choose("NVIDIA H200", world_size, 4096)[1] == "nvidia_h200"


@every_kernel
@every_world_size
def test_a_given_algorithm_is_the_one_that_is_shaped(algorithm, world_size):
    for table in TABLES:
        for nbytes in (1, 4096, largest_nbytes(algorithm, world_size) or 1 << 36):
            shape, _ = choose(table, world_size, nbytes, algorithm)
            assert shape.algorithm is algorithm
            assert_can_run(shape)


# ---- scratch --------------------------------------------------------------------------------------------------------


def test_only_those_that_let_the_switch_add_are_not_exact():
    assert [one for one in Algorithm if not one.exact] == [Algorithm.MULTIMEM_ONE_SHOT, Algorithm.MULTIMEM_TWO_SHOT]


@every_kernel
def test_an_algorithms_number_is_its_place(algorithm):
    assert list(Algorithm)[algorithm.index] is algorithm


@every_world_size
def test_one_shot_push_has_room_for_every_ranks_tensor_twice(world_size):
    needs = scratch(Algorithm.ONE_SHOT_PUSH, world_size)

    assert needs.capacity * 16 == largest_nbytes(Algorithm.ONE_SHOT_PUSH, world_size)
    assert needs.nbytes == 2 * world_size * needs.capacity * 16
    assert needs.fill == 0xFF


@every_world_size
def test_one_shot_has_a_signal_pad_and_room_for_two_tensors(world_size):
    needs = scratch(Algorithm.ONE_SHOT, world_size)

    assert needs.capacity * 16 == largest_nbytes(Algorithm.ONE_SHOT, world_size)
    assert needs.nbytes == MAX_BLOCKS * MAX_RANKS * 4 + 2 * needs.capacity * 16
    assert needs.fill == 0


@every_world_size
def test_multimem_one_shot_has_a_signal_pad_and_room_for_two_tensors(world_size):
    needs = scratch(Algorithm.MULTIMEM_ONE_SHOT, world_size)

    assert needs.capacity * 16 == largest_nbytes(Algorithm.MULTIMEM_ONE_SHOT, world_size)
    assert needs.nbytes == MAX_BLOCKS * MAX_RANKS * 4 + 2 * needs.capacity * 16
    assert needs.fill == 0


@every_world_size
def test_multimem_two_shot_has_a_signal_pad_and_room_for_one_tensor(world_size):
    needs = scratch(Algorithm.MULTIMEM_TWO_SHOT, world_size)

    assert needs.capacity * 16 == largest_nbytes(Algorithm.MULTIMEM_TWO_SHOT, world_size)
    assert needs.nbytes == MAX_BLOCKS * MAX_RANKS * 4 + needs.capacity * 16
    assert needs.fill == 0


@every_world_size
def test_two_shot_push_has_room_for_a_shard_of_every_rank_in_both_phases_twice(world_size):
    needs = scratch(Algorithm.TWO_SHOT_PUSH, world_size)

    assert needs.capacity * 16 * world_size >= largest_nbytes(Algorithm.TWO_SHOT_PUSH, world_size)
    assert needs.nbytes == 2 * 2 * world_size * needs.capacity * 16
    assert needs.fill == 0xFF


@every_world_size
def test_two_shot_pipelined_has_a_signal_pad_and_room_for_a_chunk_of_every_block_rank_and_step(world_size):
    needs = scratch(Algorithm.TWO_SHOT_PIPELINED, world_size)
    source = (compiler.source_directory() / "two_shot_pipelined.cu").read_text()
    depth = int(re.search(r"constexpr int depth = (\d+);", source)[1])

    assert needs.capacity == algorithms.PIPELINE_CHUNK
    slots = 2 * depth * algorithms.PIPELINE_BLOCKS * world_size
    assert needs.nbytes == MAX_BLOCKS * MAX_RANKS * 4 + slots * needs.capacity * 16
    assert needs.fill == 0


@every_kernel
@every_world_size
def test_a_kernel_can_count_its_packs_in_32_bits(algorithm, world_size):
    needs = scratch(algorithm, world_size)

    if algorithm in (Algorithm.ONE_SHOT_PUSH, Algorithm.TWO_SHOT_PUSH):
        assert needs.nbytes // 16 < 1 << 32
        assert largest_nbytes(algorithm, world_size) is not None
    assert needs.capacity < 1 << 32
