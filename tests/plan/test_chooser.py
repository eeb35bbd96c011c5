"""The shapes of calls for which tables have no rows, and the work of their blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphar.numerics.codecs import NAMES, TILE_NUMEL, codec
from graphar.numerics.norms import RmsNorm
from graphar.plan.algorithms import Algorithm, Shape
from graphar.plan.call import Call
from graphar.plan.policy import Chip
from graphar.plan.scratch import LOSSLESS_CHUNK, MAX_BLOCKS, WORLD_SIZES
from graphar.plan.select import measured_shape
from graphar.plan.shapes import for_norm, for_quantized, for_quantized_parts
from graphar.plan.tables import shipped_table

H200 = shipped_table("nvidia_h200")
CHIP = Chip(132, "sm_90a")
INT4 = codec("int4")
PUSH, PIPELINED = Algorithm.QUANTIZED_TWO_SHOT_PUSH, Algorithm.QUANTIZED_TWO_SHOT_PIPELINED
ONE_SHOT_NORM, TWO_SHOT_NORM = Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT, Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT


def test_what_a_table_has_no_row_of_is_shaped_all_the_same():
    row = {"max_nbytes": None, "algorithm": "one_shot_unstaged", "blocks": 1, "threads": 32}
    table = replace(shipped_table("default"), rows={2: [row]})

    shape, _ = measured_shape(table, 2, 1 << 30, Algorithm.TWO_SHOT_PIPELINED)

    assert shape == Shape(Algorithm.TWO_SHOT_PIPELINED, 128, 256, 512)


def test_a_block_of_two_shot_lossless_has_a_chunk_of_every_shard():
    in_block = LOSSLESS_CHUNK * 4 * TILE_NUMEL * torch.bfloat16.itemsize
    blocks = [
        measured_shape(shipped_table("default"), 4, nbytes, Algorithm.TWO_SHOT_LOSSLESS)[0].blocks
        for nbytes in (in_block, in_block + 1)
    ]

    assert blocks == [1, 2]


# ---- codecs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("one", [codec(name) for name in NAMES], ids=str)
def test_no_block_of_a_quantized_all_reduce_is_without_a_tile(world_size, one):
    for numel in (1, 5 << 10, 1 << 20, 1 << 25, 1 << 31):
        shape = for_quantized(H200.quantized, 132, one, world_size, numel, 2)
        tiles = -(-one.tiles(numel) // world_size)
        at_once = shape.chunk if shape.algorithm is PIPELINED else shape.threads // (32 * world_size)
        assert (shape.blocks - 1) * at_once < tiles
        assert shape.codec is one


@pytest.mark.parametrize(
    ("world_size", "tiles", "shape"),
    [
        (2, 1, Shape(PUSH, 1, 64)),
        (2, 131, Shape(PUSH, 131, 64)),  # a warp for an owner, so that all SMs have some
        (2, 132, Shape(PUSH, 66, 128)),
        (2, 131 * 8, Shape(PUSH, 131, 256)),  # half an SM, with two tiles for a warp
        (2, 131 * 8 + 1, Shape(PUSH, 131, 512)),
        (3, 131 * 4, Shape(PUSH, 131, 192)),
        (3, 131 * 4 + 1, Shape(PUSH, 105, 480)),
        (8, 131 * 2, Shape(PUSH, 131, 256)),
        (8, 1024, Shape(PUSH, 131, 512)),
        (2, 1 << 14, Shape(PUSH, 131, 512)),
        (8, 1 << 13, Shape(PIPELINED, 131, 512, 8)),
        (8, (1 << 13) + 1, Shape(PIPELINED, MAX_BLOCKS, 256, 8)),
    ],
)
def test_a_quantized_all_reduce_has_as_many_warps_as_its_owners_have_tiles(world_size, tiles, shape):
    found = for_quantized(H200.quantized, 132, INT4, world_size, world_size * tiles * TILE_NUMEL, 2)

    assert found == replace(shape, codec=INT4)


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
    found = for_quantized_parts(132, INT4, world_size, tiles * TILE_NUMEL)

    assert found == Shape(Algorithm.QUANTIZED_REDUCESCATTER, blocks, threads, chunk, codec=INT4)


# ---- norms ----------------------------------------------------------------------------------------------------------


def norm_call(rows, columns):
    return Call("allreduce_residual_rmsnorm", rows * columns, torch.bfloat16, 0, epilogue=RmsNorm(columns))


@pytest.mark.parametrize(
    ("rows", "columns", "algorithm", "blocks", "threads", "cluster"),
    [
        (1, 8, ONE_SHOT_NORM, 1, 32, 1),
        (1, 4104, ONE_SHOT_NORM, 8, 128, 8),
        (8, 8192, ONE_SHOT_NORM, 64, 128, 8),  # of 3 times 128 KB
        (9, 8192, TWO_SHOT_NORM, 72, 128, 8),
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
    found = for_norm(H200.norm, CHIP, 4, norm_call(rows, columns))

    assert found == Shape(algorithm, blocks, threads, epilogue=RmsNorm(columns, cluster))


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
    call = Call("reducescatter_residual_rmsnorm", elements, torch.bfloat16, 0, epilogue=RmsNorm(columns))

    found = for_norm(H200.norm, CHIP, 4, call)

    assert found.algorithm is Algorithm.REDUCESCATTER_RMSNORM
    assert (found.blocks, found.threads, found.epilogue.cluster) == (blocks, threads, cluster)


def test_norms_of_two_shot_give_each_rank_as_many_rows_at_a_time():
    assert for_norm(H200.norm, CHIP, 7, norm_call(4096, 8192)).blocks == 126
