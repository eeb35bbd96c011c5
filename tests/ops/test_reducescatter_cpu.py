"""reducescatter on the CPU, in one process and over gloo: to each rank its part of the specification's sum."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.ranks import fallback
from tests.cases import (
    ALL_DTYPES,
    EVERY_16_BIT_PATTERN,
    FLOAT_FILLS,
    INTEGERS,
    KERNEL_DTYPES,
    SMALL_NUMELS,
    bit_patterns,
    integers,
    normal,
    same_bits,
)
from tests.processes import run_ranks

SMALL_CASES = [(fill, dtype) for fill in FLOAT_FILLS for dtype in (*KERNEL_DTYPES, torch.float64)]
SMALL_CASES += [(integers, dtype) for dtype in INTEGERS]
SHAPES = ((16, 128), (15, 128), (9, 7168), (32, 256), (5, 3, 7), (2, 1, 4), (1, 5), (3, 0, 2), (0, 4))
LARGE = ((2, 16777216, torch.bfloat16), (4, 16777224, torch.bfloat16), (2, 16777240, torch.float32))

in_process = pytest.mark.parametrize("world_size", range(1, 9))


def parts_of(fill, world_size, shape, dtype):
    return [fill(rank, torch.Size(shape).numel(), dtype).view(shape) for rank in range(world_size)]


def assert_part(y, rank, parts, axis=0, what=""):
    assert same_bits(y, graphar.reference.reducescatter(parts, axis)[rank]) == 0, f"rank {rank} {what}"


def assert_parts(ys, parts, axis=0, what=""):
    assert len(ys) == len(parts)
    for rank, y in enumerate(ys):
        assert_part(y, rank, parts, axis, what)


# ---- the specification ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_the_specification_is_allreduce_split_as_torch_splits(axis):
    parts = parts_of(bit_patterns, 3, (5, 7), torch.bfloat16)

    expected = graphar.reference.allreduce(parts).tensor_split(3, axis)

    assert [same_bits(y, e) for y, e in zip(graphar.reference.reducescatter(parts, axis), expected, strict=True)] == [
        0
    ] * 3


# ---- every size, dtype and fill -------------------------------------------------------------------------------------


@in_process
@pytest.mark.parametrize(("fill", "dtype"), SMALL_CASES)
def test_each_rank_of_a_list_gets_its_part(world_size, fill, dtype):
    for numel in SMALL_NUMELS:
        parts = parts_of(fill, world_size, (numel,), dtype)

        assert_parts(graphar.reducescatter(parts), parts, what=f"{numel} elements")


@in_process
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_list_is_split_along_any_axis(world_size, shape):
    parts = parts_of(normal, world_size, shape, torch.bfloat16)

    for axis in range(-len(shape), len(shape)):
        outs = graphar.reducescatter(parts, axis=axis)

        assert_parts(outs, parts, axis, f"axis {axis}")
        assert all(out.is_contiguous() for out in outs)


@in_process
def test_a_list_takes_any_bits(world_size):
    for dtype in KERNEL_DTYPES:
        parts = parts_of(bit_patterns, world_size, (EVERY_16_BIT_PATTERN,), dtype)

        assert_parts(graphar.reducescatter(parts), parts, what=dtype)


@pytest.mark.parametrize(("world_size", "numel", "dtype"), LARGE[:1])
def test_a_list_takes_large_tensors(world_size, numel, dtype):
    parts = parts_of(normal, world_size, (numel,), dtype)

    assert_parts(graphar.reducescatter(parts), parts)


@in_process
@pytest.mark.parametrize("axis", [0, 1])
def test_gathering_the_parts_is_the_all_reduce_bit_for_bit(world_size, axis):
    parts = parts_of(bit_patterns, world_size, (13, 29), torch.bfloat16)

    gathered = graphar.allgather(graphar.reducescatter(parts, axis=axis), axis=axis)

    for mine, expected in zip(gathered, graphar.allreduce(parts), strict=True):
        assert same_bits(mine, expected) == 0


def test_a_rank_without_a_row_gets_an_empty_tensor():
    outs = graphar.reducescatter([torch.ones(2, 3)] * 4)

    assert [out.tolist() for out in outs] == [[[4.0] * 3], [[4.0] * 3], [], []]
    assert outs[3].shape == (0, 3)


def scatter_small(rank, world_size):
    for fill, dtype in SMALL_CASES:
        for numel in SMALL_NUMELS:
            parts = parts_of(fill, world_size, (numel,), dtype)
            assert_part(graphar.reducescatter(parts[rank]), rank, parts, 0, f"{fill.__name__}, {dtype}, {numel}")
    for shape in SHAPES:
        parts = parts_of(bit_patterns, world_size, shape, torch.float16)
        for axis in range(-len(shape), len(shape)):
            y = graphar.reducescatter(parts[rank], axis=axis)
            assert_part(y, rank, parts, axis, f"{shape}, axis {axis}")
            assert y.is_contiguous()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_process_gets_its_part(world_size):
    run_ranks(scatter_small, world_size)


def scatter_in_chunks(rank, world_size):
    fallback._CHUNK_NBYTES = 100
    for numel in (1, 13, 50, 51, 1000):
        parts = parts_of(integers, world_size, (numel,), torch.int32)
        assert_part(graphar.reducescatter(parts[rank]), rank, parts, 0, f"{numel} elements")


def test_processes_send_large_parts_in_chunks():
    run_ranks(scatter_in_chunks, 3)


def scatter_large(rank, world_size, numel, dtype):
    parts = parts_of(normal, world_size, (numel,), dtype)
    assert_part(graphar.reducescatter(parts[rank]), rank, parts)


@pytest.mark.parametrize(("world_size", "numel", "dtype"), LARGE[1:])
def test_processes_take_large_tensors(world_size, numel, dtype):
    run_ranks(scatter_large, world_size, numel, dtype)


# ---- any tensor -----------------------------------------------------------------------------------------------------

VIEWS = {
    "transposed": lambda x: x[:120].view(10, 12).t(),
    "every third": lambda x: x[::3],
    "misaligned": lambda x: x[1:],
    "expanded": lambda x: x[:5].expand(4, 5),
    "channels last": lambda x: x[:120].view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "negated": lambda x: torch._neg_view(x[:120]),
    "one element": lambda x: x[:1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_list_takes_any_view(view, dtype):
    parts = [VIEWS[view](integers(rank, 125, dtype)) for rank in range(3)]

    for axis in range(parts[0].ndim):
        assert_parts(graphar.reducescatter(parts, axis=axis), parts, axis)


def scatter_views(rank, world_size):
    for name, view in VIEWS.items():
        parts = [view(integers(r, 125, torch.float16)) for r in range(world_size)]
        for axis in range(parts[0].ndim):
            assert_part(graphar.reducescatter(parts[rank], axis=axis), rank, parts, axis, name)


def test_processes_take_any_view():
    run_ranks(scatter_views, 3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_input_stays_as_it_was_and_shares_no_memory_with_the_result(world_size):
    parts = parts_of(integers, world_size, (100,), torch.bfloat16)

    outs = graphar.reducescatter(parts)

    assert [same_bits(part, integers(rank, 100, torch.bfloat16)) for rank, part in enumerate(parts)] == [0] * world_size
    assert len({x.untyped_storage().data_ptr() for x in (*parts, *outs)}) == 2 * world_size


# ---- groups and communicators ---------------------------------------------------------------------------------------


def scatter_in_pairs(rank, world_size):
    pairs = [[0, 1], [2, 3]]
    pair, group = pairs[rank // 2], [dist.new_group(pair) for pair in pairs][rank // 2]
    for rows in (5, 3):
        with graphar.Communicator(group) as two:
            parts = [normal(10 * rows + member, rows * 64, torch.bfloat16).view(rows, 64) for member in pair]
            mine = parts[pair.index(rank)]
            assert_part(graphar.reducescatter(mine, group), pair.index(rank), parts, 0, f"group, {rows} rows")
            assert_part(two.reducescatter(mine, axis=1), pair.index(rank), parts, 1, f"communicator, {rows} rows")


def test_pairs_of_four_ranks_split_five_and_three_rows():
    run_ranks(scatter_in_pairs, 4)


def scatter_in_subgroup(rank, world_size, members):
    group = dist.new_group(members)
    if rank in members:
        parts = [normal(member, 8199, torch.bfloat16) for member in members]
        mine = members.index(rank)
        assert_part(graphar.reducescatter(parts[mine], group), mine, parts)


@pytest.mark.parametrize("members", [[1, 3], [0, 2, 3], [2]])
def test_a_subgroup_splits_among_its_own_ranks(members):
    run_ranks(scatter_in_subgroup, 4, members)


def test_a_communicator_of_devices_takes_a_list():
    parts = parts_of(integers, 3, (10,), torch.float32)

    with graphar.Communicator(devices=["cpu"] * 3) as communicator:
        assert_parts(communicator.reducescatter(parts), parts)
        assert_parts(graphar.reducescatter(parts, communicator, timeout_s=3), parts)
        communicator.prepare(ops=("reducescatter", "allgather"))
