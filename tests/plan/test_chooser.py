"""The grids of calls for which tables have no entries, and the work of their blocks."""

from dataclasses import replace

import pytest
import torch

from graphar.numerics.codecs import NAMES, TILE_NUMEL, codec
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config
from graphar.plan.policy import Chip
from graphar.plan.scratch import MAX_BLOCKS, WORLD_SIZES
from graphar.plan.select import Facts, select
from graphar.plan.tables import measured_config, shipped_table
from graphar.plan.work import Norm, Parts, Sum

H200 = shipped_table("nvidia_h200")
CHIP = Chip(132, "sm_90a")
INT4 = codec("int4")
PUSH, PIPELINED = Algorithm.QUANTIZED_TWO_SHOT_PUSH, Algorithm.QUANTIZED_TWO_SHOT_PIPELINED
ONE_SHOT_NORM, TWO_SHOT_NORM = Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT, Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT


def config_of(work, world_size):
    return select(Call(work, torch.bfloat16, 0), Facts(world_size, H200, CHIP)).config


def test_what_a_table_has_no_entry_of_has_a_grid_all_the_same():
    entry = {"max_nbytes": None, "algorithm": "one_shot", "blocks": 1, "threads": 32}
    table = replace(shipped_table("default"), rows={2: [entry]})

    config = measured_config(table, 2, 1 << 30, Algorithm.TWO_SHOT_PIPELINED)

    assert config == Config(Algorithm.TWO_SHOT_PIPELINED, 128, 256, 512)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("one", [codec(name) for name in NAMES], ids=str)
def test_no_block_of_a_quantized_all_reduce_is_without_a_tile(world_size, one):
    for numel in (1, 5 << 10, 1 << 20, 1 << 25, 1 << 31):
        config = config_of(Sum(numel, one.text), world_size)
        tiles = -(-one.tiles(numel) // world_size)
        at_once = config.chunk if config.algorithm is PIPELINED else config.threads // (32 * world_size)
        assert (config.blocks - 1) * at_once < tiles


@pytest.mark.parametrize(
    ("world_size", "tiles", "config"),
    [
        (2, 1, Config(PUSH, 1, 64)),
        (2, 131, Config(PUSH, 131, 64)),  # a warp for an owner, so that all SMs have some
        (2, 132, Config(PUSH, 66, 128)),
        (2, 131 * 8, Config(PUSH, 131, 256)),  # half an SM, with two tiles for a warp
        (2, 131 * 8 + 1, Config(PUSH, 131, 512)),
        (3, 131 * 4, Config(PUSH, 131, 192)),
        (3, 131 * 4 + 1, Config(PUSH, 105, 480)),
        (8, 131 * 2, Config(PUSH, 131, 256)),
        (8, 1024, Config(PUSH, 131, 512)),
        (2, 1 << 14, Config(PUSH, 131, 512)),
        (8, 1 << 13, Config(PIPELINED, 131, 512, 8)),
        (8, (1 << 13) + 1, Config(PIPELINED, MAX_BLOCKS, 256, 8)),
    ],
)
def test_a_quantized_all_reduce_has_as_many_warps_as_its_owners_have_tiles(world_size, tiles, config):
    assert config_of(Sum(world_size * tiles * TILE_NUMEL, INT4.text), world_size) == config


@pytest.mark.parametrize(
    ("world_size", "tiles", "blocks", "threads", "chunk"),
    [
        (4, 3, 3, 128, 1),
        (2, 131, 131, 64, 1),
        (2, 132, 131, 128, 2),
        (8, 131 * 20, 131, 512, 5),  # four steps
        (2, 131 * 20, 131, 512, 8),  # a tile for each warp
    ],
)
def test_a_block_of_a_quantized_reduce_scatter_has_some_four_steps(world_size, tiles, blocks, threads, chunk):
    found = config_of(Parts("reducescatter", (tiles * TILE_NUMEL,) * world_size, INT4.text), world_size)

    assert found == Config(Algorithm.QUANTIZED_REDUCESCATTER, blocks, threads, chunk)


def norm(rows, columns):
    return Norm("allreduce_residual_rmsnorm", (rows * columns,), columns)


@pytest.mark.parametrize(
    ("rows", "columns", "algorithm", "blocks", "threads", "cluster"),
    [
        (1, 8, ONE_SHOT_NORM, 1, 32, 1),
        (1, 4104, ONE_SHOT_NORM, 8, 128, 8),
        (10, 8192, ONE_SHOT_NORM, 80, 128, 8),  # of 3 times 160 KB
        (11, 8192, TWO_SHOT_NORM, 88, 128, 8),
        (65, 8192, TWO_SHOT_NORM, 130, 512, 2),
        (66, 8192, TWO_SHOT_NORM, 66, 512, 1),
        (4096, 8192, TWO_SHOT_NORM, 128, 512, 1),
        (4096, 1024, TWO_SHOT_NORM, 128, 128, 1),
        (4096, 8, ONE_SHOT_NORM, 131, 32, 1),
    ],
)
def test_as_many_blocks_share_a_row_as_leave_an_sm_free_and_take_half_of_one_each(
    rows, columns, algorithm, blocks, threads, cluster
):
    assert config_of(norm(rows, columns), 4) == Config(algorithm, blocks, threads, cluster=cluster)


@pytest.mark.parametrize("world_size", range(2, 9))
def test_a_cluster_of_blocks_has_one_row(world_size):
    chosen = {rows: config_of(norm(rows, 8192), world_size) for rows in range(1, 200)}

    assert all(config.cluster == 1 or config.blocks == rows * config.cluster for rows, config in chosen.items())


@pytest.mark.parametrize(
    ("counts", "columns", "blocks", "threads", "cluster"),
    [
        ((1, 0, 0, 0), 8192, 8, 128, 8),  # a row of the largest part on 8 SMs
        ((17, 16, 16, 16), 8192, 68, 256, 4),
        ((4096,) * 4, 8192, 131, 512, 1),
        ((70,) * 4, 512, 70, 64, 1),
    ],
)
def test_norms_of_parts_have_a_team_for_each_row_of_the_largest_part(counts, columns, blocks, threads, cluster):
    elements = tuple(rows * columns for rows in counts)

    found = config_of(Norm("reducescatter_residual_rmsnorm", elements, columns), 4)

    assert found == Config(Algorithm.REDUCESCATTER_RMSNORM, blocks, threads, cluster=cluster)


def test_norms_of_two_shot_give_each_rank_as_many_rows_at_a_time():
    assert config_of(norm(4096, 8192), 7).blocks == 126
