"""allgather on the CPU, in one process and over gloo: every rank's bits, of any dtype, one after another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.ranks import fallback
from tests.cases import same_bits
from tests.processes import run_ranks

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.uint16,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
)
# Of every rank up to the eighth, along the axis.
LENGTHS = {
    "equal": (4,) * 8,
    "falling": (5, 4, 4, 3, 2, 1, 1, 0),
    "one has all": (0, 9, 0, 0, 0, 0, 0, 0),
    "one element": (1, 0, 0, 0, 0, 0, 0, 0),
    "none": (0,) * 8,
    "mixed": (17, 1, 129, 8, 33, 2, 64, 7),
}

in_process = pytest.mark.parametrize("world_size", range(1, 9))
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
all_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)


def raw(rank, shape, dtype):
    """A tensor of random bytes, all of them legal: a bool is 0 or 1."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(1000 * rank + nbytes)
    data = torch.randint(2 if dtype == torch.bool else 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def parts_of(world_size, lengths, dtype, axis=0, beside=(3, 2)):
    shapes = [(*beside[:axis], lengths[rank], *beside[axis:]) for rank in range(world_size)]
    return [raw(rank, shape, dtype) for rank, shape in enumerate(shapes)]


def bytes_of(x):
    return x.contiguous().view(-1).view(torch.uint8)


def assert_joined(y, parts, axis=0, what=""):
    """By bytes, and with no cat: the parts are what is found where they belong."""
    assert y.dtype == parts[0].dtype, what
    assert y.is_contiguous(), what
    assert y.shape[axis] == sum(part.shape[axis] for part in parts), what
    for rank, (mine, part) in enumerate(zip(y.split([part.shape[axis] for part in parts], axis), parts, strict=True)):
        assert mine.shape == part.shape, what
        assert torch.equal(bytes_of(mine), bytes_of(part)), f"part {rank} {what}"


# ---- every dtype and length -----------------------------------------------------------------------------------------


@in_process
@every_dtype
@all_lengths
def test_every_rank_of_a_list_gets_all_parts(world_size, dtype, lengths):
    parts = parts_of(world_size, lengths, dtype)

    outs = graphar.allgather(parts)

    assert len(outs) == world_size
    for out in outs:
        assert_joined(out, parts)
    assert torch.equal(bytes_of(outs[0]), bytes_of(graphar.reference.allgather(parts)))


@in_process
@all_lengths
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_a_list_is_joined_along_any_axis(world_size, lengths, axis):
    parts = parts_of(world_size, lengths, torch.bfloat16, axis % 3)

    for out in graphar.allgather(parts, axis=axis):
        assert_joined(out, parts, axis)


@pytest.mark.parametrize("length", [0, 1])
def test_a_single_element_may_have_any_stride(length):
    parts = [torch.arange(2.0)[::2][:length] for _ in range(2)]

    assert graphar.allgather(parts)[0].tolist() == [0.0] * 2 * length


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_pattern_of_bits_is_changed(dtype):
    patterns = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16 if dtype.itemsize == 4 else dtype)
    parts = [patterns.view(dtype), patterns.flip(0).view(dtype)]

    for out in graphar.allgather(parts):
        assert_joined(out, parts)


def test_vectors_are_joined():
    assert [y.tolist() for y in graphar.allgather([torch.tensor([1, 2]), torch.tensor([3])])] == [[1, 2, 3]] * 2


def gather_all(rank, world_size):
    for dtype in DTYPES:
        for name, lengths in LENGTHS.items():
            parts = parts_of(world_size, lengths, dtype)
            out = graphar.allgather(parts[rank], sizes=lengths[:world_size])
            assert_joined(out, parts, 0, f"{dtype}, {name}")
    for axis in (1, 2, -1, -2):
        parts = parts_of(world_size, LENGTHS["falling"], torch.float32, axis % 3)
        assert_joined(graphar.allgather(parts[rank], axis=axis, sizes=[*LENGTHS["falling"][:world_size]]), parts, axis)
    parts = parts_of(world_size, LENGTHS["equal"], torch.complex64)
    assert_joined(graphar.allgather(parts[rank]), parts)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_process_gets_all_parts(world_size):
    run_ranks(gather_all, world_size)


def gather_in_chunks(rank, world_size):
    fallback._CHUNK_NBYTES = 100
    for lengths in ((1, 0, 2), (100, 7, 33), (25, 26, 50), (0, 0, 1000)):
        parts = parts_of(world_size, lengths, torch.float32, beside=())
        assert_joined(graphar.allgather(parts[rank], sizes=lengths), parts, 0, f"{lengths}")


def test_processes_send_large_parts_in_chunks():
    run_ranks(gather_in_chunks, 3)


# ---- any tensor -----------------------------------------------------------------------------------------------------

VIEWS = {
    "transposed": lambda x: x.t(),
    "every third": lambda x: x[::3],
    "misaligned": lambda x: x.reshape(-1)[1:],
    "expanded": lambda x: x[:1].expand(4, 12),
    "column": lambda x: x[:, 5],
}
every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


@every_view
@every_dtype
def test_a_list_takes_any_view(view, dtype):
    parts = [view(raw(rank, (10, 12), dtype)) for rank in range(3)]

    for axis in range(parts[0].ndim):
        for out in graphar.allgather(parts, axis=axis):
            assert_joined(out, parts, axis)


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view], ids=["conjugated", "negated"])
def test_what_a_view_shows_is_what_is_gathered(view):
    parts = [view(torch.complex(torch.randn(3), torch.randn(3))) for _ in range(2)]

    for out in graphar.allgather(parts):
        assert not out.is_conj()
        assert not out.is_neg()
        assert_joined(out, [part.resolve_conj().resolve_neg() for part in parts])


def gather_views(rank, world_size):
    for view in VIEWS.values():
        parts = [view(raw(r, (10, 12), torch.float16)) for r in range(world_size)]
        assert_joined(graphar.allgather(parts[rank]), parts)
    parts = [torch.complex(torch.full((3,), 1.0), torch.full((3,), float(r))) for r in range(world_size)]
    assert_joined(graphar.allgather(parts[rank].conj()), [part.conj_physical() for part in parts])


def test_processes_take_any_view():
    run_ranks(gather_views, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_input_stays_as_it_was_and_shares_no_memory_with_the_result(world_size):
    parts = parts_of(world_size, LENGTHS["equal"], torch.bfloat16)

    outs = graphar.allgather(parts)

    assert [
        same_bits(a, b) for a, b in zip(parts, parts_of(world_size, LENGTHS["equal"], torch.bfloat16), strict=True)
    ] == [0] * world_size
    assert len({x.untyped_storage().data_ptr() for x in (*parts, *outs)}) == 2 * world_size


# ---- groups and communicators ---------------------------------------------------------------------------------------


def gather_in_subgroup(rank, world_size, members):
    group = dist.new_group(members)
    if rank not in members:
        return
    mine, sizes = members.index(rank), [member + 1 for member in members]
    parts = [raw(member, (member + 1, 3), torch.bfloat16) for member in members]
    assert_joined(graphar.allgather(parts[mine], group, sizes=sizes), parts)
    with graphar.Communicator(group) as communicator:
        assert_joined(communicator.allgather(parts[mine], sizes=sizes, timeout_s=20), parts)


@pytest.mark.parametrize("members", [[1, 3], [0, 2, 3], [2]])
def test_a_subgroup_gathers_its_own_ranks_only(members):
    run_ranks(gather_in_subgroup, 4, members)


def scatter_then_gather(rank, world_size):
    x = raw(rank, (7, 5), torch.bfloat16)
    sizes = [len(part) for part in torch.empty(7).tensor_split(world_size)]
    assert same_bits(graphar.allgather(graphar.reducescatter(x), sizes=sizes), graphar.allreduce(x)) == 0


def test_scattering_and_gathering_is_an_all_reduce():
    run_ranks(scatter_then_gather, 3)


def test_a_communicator_of_devices_takes_a_list():
    parts = parts_of(3, LENGTHS["mixed"], torch.bool)

    with graphar.Communicator(devices=["cpu"] * 3) as communicator:
        for out in communicator.allgather(parts):
            assert_joined(out, parts)
