"""allreduce on the CPU, in one process and over gloo: on every rank the bits of the specification."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import (
    ALL_DTYPES,
    EVERY_16_BIT_PATTERN,
    FLOAT_FILLS,
    HUGE_NUMEL,
    INTEGERS,
    KERNEL_DTYPES,
    LARGE_NUMELS,
    MEDIUM_NUMELS,
    SMALL_NUMELS,
    bit_patterns,
    integers,
    normal,
    same_bits,
)
from tests.processes import run_ranks

FLOAT_CASES = [(fill, dtype) for fill in FLOAT_FILLS for dtype in (*KERNEL_DTYPES, torch.float64)]
SMALL_CASES = FLOAT_CASES + [(integers, dtype) for dtype in INTEGERS]
GLOO_WORLD_SIZES = (2, 3, 4, 5, 8)

in_process = pytest.mark.parametrize("world_size", range(1, 9))
over_gloo = pytest.mark.parametrize("world_size", GLOO_WORLD_SIZES)


def parts_of(fill, world_size, numel, dtype):
    return [fill(rank, numel, dtype) for rank in range(world_size)]


def assert_sum(y, parts, what=""):
    assert same_bits(y, graphar.reference.allreduce(parts)) == 0, what


# ---- every size, dtype and fill -------------------------------------------------------------------------------------


@in_process
@pytest.mark.parametrize(("fill", "dtype"), SMALL_CASES)
def test_every_rank_of_a_list_gets_the_sum(world_size, fill, dtype):
    for numel in SMALL_NUMELS:
        parts = parts_of(fill, world_size, numel, dtype)

        outs = graphar.allreduce(parts)

        assert len(outs) == world_size
        for out in outs:
            assert_sum(out, parts, f"{numel} elements")


@in_process
def test_a_list_takes_any_bits(world_size):
    for dtype in KERNEL_DTYPES:
        parts = parts_of(bit_patterns, world_size, EVERY_16_BIT_PATTERN, dtype)

        assert_sum(graphar.allreduce(parts)[-1], parts, dtype)


@pytest.mark.parametrize("numel", LARGE_NUMELS)
def test_a_list_takes_large_tensors(numel):
    parts = parts_of(normal, 2, numel, torch.bfloat16)

    assert_sum(graphar.allreduce(parts)[1], parts)


def reduce_small(rank, world_size):
    for fill, dtype in SMALL_CASES:
        for numel in SMALL_NUMELS:
            parts = parts_of(fill, world_size, numel, dtype)
            assert_sum(graphar.allreduce(parts[rank]), parts, f"{fill.__name__}, {dtype}, {numel} elements")


@over_gloo
def test_every_process_gets_the_sum(world_size):
    run_ranks(reduce_small, world_size)


def reduce_medium(rank, world_size):
    for numel in MEDIUM_NUMELS:
        parts = parts_of(bit_patterns, world_size, numel, torch.bfloat16)
        assert_sum(graphar.allreduce(parts[rank]), parts, f"{numel} elements")


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_take_medium_tensors(world_size):
    run_ranks(reduce_medium, world_size)


def reduce_large(rank, world_size, numel, dtype):
    parts = parts_of(normal, world_size, numel, dtype)
    assert_sum(graphar.allreduce(parts[rank]), parts)


@pytest.mark.parametrize(
    ("world_size", "numel", "dtype"),
    [
        (2, 16777216, torch.bfloat16),
        (3, 16777224, torch.float16),
        (2, 16777240, torch.float32),  # two chunks
        (2, HUGE_NUMEL, torch.bfloat16),
    ],
)
def test_processes_take_large_tensors(world_size, numel, dtype):
    run_ranks(reduce_large, world_size, numel, dtype)


# ---- any tensor -----------------------------------------------------------------------------------------------------

VIEWS = {
    "transposed": lambda x: x[:120].view(10, 12).t(),
    "every third": lambda x: x[::3],
    "misaligned": lambda x: x[1:],
    "column": lambda x: x[:120].view(10, 12)[:, 5],
    "expanded": lambda x: x[:5].expand(4, 5),
    "channels last": lambda x: x[:120].view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "0-d": lambda x: x[3],
    "negated": lambda x: torch._neg_view(x[:120]),
    "empty": lambda x: x[:0].view(3, 0, 2),
    "one element": lambda x: x[:1],
}

every_view = pytest.mark.parametrize("view", VIEWS)


@every_view
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_a_list_takes_any_view(view, dtype):
    parts = [VIEWS[view](integers(rank, 125, dtype)) for rank in range(3)]

    for out in graphar.allreduce(parts):
        assert_sum(out, parts)
        assert out.is_contiguous()


def reduce_views(rank, world_size):
    for name, view in VIEWS.items():
        for dtype in ALL_DTYPES:
            parts = [view(integers(r, 125, dtype)) for r in range(world_size)]
            out = graphar.allreduce(parts[rank])
            assert_sum(out, parts, f"{name}, {dtype}")
            assert out.is_contiguous(), name


def test_processes_take_any_view():
    run_ranks(reduce_views, 3)


def test_the_input_stays_as_it_was():
    parts = parts_of(integers, 3, 100, torch.bfloat16)

    graphar.allreduce(parts)

    assert [same_bits(part, integers(rank, 100, torch.bfloat16)) for rank, part in enumerate(parts)] == [0, 0, 0]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_result_shares_no_memory_with_the_input(world_size):
    parts = parts_of(integers, world_size, 100, torch.float32)

    outs = graphar.allreduce(parts)

    assert len({x.untyped_storage().data_ptr() for x in (*parts, *outs)}) == 2 * world_size


# ---- out= -----------------------------------------------------------------------------------------------------------


def new_tensor(x):
    return torch.full_like(x, 99)


def every_other_element(x):
    return torch.full((2 * x.numel(),), 99, dtype=x.dtype)[::2]


def misaligned(x):
    return torch.full((x.numel() + 1,), 99, dtype=x.dtype)[1:]


def the_input(x):
    return x


every_out = pytest.mark.parametrize("make_out", [new_tensor, every_other_element, misaligned, the_input])


@every_out
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_list_is_written_to_out(make_out, world_size):
    parts = parts_of(bit_patterns, world_size, 8199, torch.bfloat16)
    expected = graphar.reference.allreduce(parts)
    outs = [make_out(part) for part in parts]

    returned = graphar.allreduce(parts, out=outs)

    assert [same_bits(out, expected) for out in outs] == [0] * world_size
    assert [a is b for a, b in zip(returned, outs, strict=True)] == [True] * world_size


def reduce_to_out(rank, world_size, make_out):
    parts = parts_of(bit_patterns, world_size, 8199, torch.bfloat16)
    expected = graphar.reference.allreduce(parts)
    out = make_out(parts[rank])
    assert graphar.allreduce(parts[rank], out=out) is out
    assert same_bits(out, expected) == 0


@every_out
def test_a_process_writes_to_out(make_out):
    run_ranks(reduce_to_out, 3, make_out)


def test_nothing_is_written_between_the_elements_of_a_strided_out():
    parts = parts_of(integers, 2, 50, torch.float32)
    rooms = [torch.full((100,), 99.0) for _ in parts]

    graphar.allreduce(parts, out=[room[::2] for room in rooms])

    assert all(bool((room[1::2] == 99).all()) for room in rooms)


# ---- groups and communicators ---------------------------------------------------------------------------------------


def reduce_in_subgroup(rank, world_size, members):
    group = dist.new_group(members)
    if rank not in members:
        return
    for fill in FLOAT_FILLS:
        parts = [fill(member, 8199, torch.bfloat16) for member in members]
        assert_sum(graphar.allreduce(parts[members.index(rank)], group), parts, fill.__name__)


@pytest.mark.parametrize("members", [[1, 3], [0, 2, 3], [2]])
def test_a_subgroup_sums_its_own_ranks_only(members):
    run_ranks(reduce_in_subgroup, 4, members)


def reduce_in_three_groups(rank, world_size):
    pairs = [[0, 1], [2, 3]]
    pair, group = pairs[rank // 2], [dist.new_group(pair) for pair in pairs][rank // 2]
    with graphar.Communicator() as everyone, graphar.Communicator(group) as two:
        for numel in (7, 8199, 64, 8192):
            parts = parts_of(normal, world_size, numel, torch.float16)
            assert_sum(everyone.allreduce(parts[rank]), parts, "everyone")
            assert_sum(two.allreduce(parts[rank]), [parts[member] for member in pair], "the pair")
            assert_sum(graphar.allreduce(parts[rank]), parts, "the default group")


def test_communicators_of_overlapping_groups_take_turns():
    run_ranks(reduce_in_three_groups, 4)


def test_communicators_of_different_sizes_take_turns():
    parts = parts_of(integers, 5, 64, torch.float32)

    with graphar.Communicator(devices=["cpu"] * 5) as five, graphar.Communicator(devices=["cpu"] * 2) as two:
        for _ in range(3):
            assert_sum(five.allreduce(parts)[4], parts)
            assert_sum(two.allreduce(parts[3:])[1], parts[3:])


def reduce_in_two_worlds(rank, world_size):
    x = torch.full((3,), 2.0)
    first = graphar.allreduce(x)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return first.tolist(), graphar.allreduce(x).tolist()


def test_a_default_group_made_anew_is_the_one_used():
    assert run_ranks(reduce_in_two_worlds, 2) == [([4.0] * 3, [2.0] * 3)] * 2


def reduce_random_sizes(rank, world_size):
    choose = random.Random(7)
    for call in range(300):
        numel, dtype = choose.randrange(choose.choice([10, 1000, 30_000])), choose.choice(ALL_DTYPES)
        parts = parts_of(integers, world_size, numel, dtype)
        assert_sum(graphar.allreduce(parts[rank]), parts, f"call {call}: {numel} elements of {dtype}")


def test_sizes_and_dtypes_may_change_from_call_to_call():
    run_ranks(reduce_random_sizes, 3)


def sums_of_twenty_runs(rank, world_size, numel, flip):
    x = normal(rank, numel, torch.bfloat16)
    if flip and rank == 1:
        x.view(torch.int16)[numel // 2] ^= 0x4000
    sums = [graphar.allreduce(x) for _ in range(20)]
    assert [same_bits(one, sums[0]) for one in sums] == [0] * 20
    return sums[0]


@pytest.mark.parametrize("numel", [16384, 262144])
def test_ranks_and_runs_agree_and_a_flipped_bit_is_seen(numel):
    first, *others = run_ranks(sums_of_twenty_runs, 4, numel, False)
    flipped = run_ranks(sums_of_twenty_runs, 4, numel, True)

    assert [same_bits(other, first) for other in others] == [0] * 3
    assert [same_bits(other, first) for other in flipped] == [1] * 4


# ---- a communicator's life ------------------------------------------------------------------------------------------


def use_and_close(rank, world_size):
    with graphar.Communicator() as communicator:
        communicator.prepare()
        total = communicator.allreduce(torch.ones(2))
        communicator.synchronize()
    communicator.close()
    with pytest.raises(graphar.CommunicatorError, match="closed"):
        communicator.allreduce(torch.ones(2))
    with pytest.raises(graphar.CommunicatorError, match="closed"):
        graphar.allreduce(torch.ones(2), communicator)
    return total.tolist(), graphar.allreduce(torch.ones(2)).tolist()


def test_a_communicator_of_processes_ends_with_its_context():
    assert run_ranks(use_and_close, 2) == [([2.0, 2.0], [2.0, 2.0])] * 2


def test_a_closed_communicator_refuses_every_call():
    xs = [torch.ones(2)] * 2
    with graphar.Communicator(devices=["cpu"] * 2) as communicator:
        communicator.allreduce(xs)
    communicator.close()

    assert communicator.closed
    for call in (communicator.allreduce, communicator.explain, lambda xs: graphar.allreduce(xs, communicator)):
        with pytest.raises(graphar.CommunicatorError, match="this communicator is closed"):
            call(xs)
    with pytest.raises(graphar.CommunicatorError, match="this communicator is closed"):
        communicator.prepare()


def test_a_communicator_is_kept_until_it_is_closed():
    engine = weakref.ref(graphar.Communicator(devices=["cpu"] * 2).engine)
    gc.collect()
    assert engine() is not None

    engine().close()
    gc.collect()

    assert engine() is None


# ---- explain --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "algorithm", "reason"),
    [(1, "auto", "one rank has nothing to add"), (2, "auto", "the tensor is on the CPU"), (2, "fallback", "asked for")],
)
def test_explain_says_why_a_list_takes_the_fallback(world_size, algorithm, reason):
    explanation = graphar.explain([torch.ones(2)] * world_size, algorithm=algorithm)

    assert explanation == graphar.Explanation("fallback", blocks=0, threads=0, reason=reason)
    assert str(explanation) == f"fallback: {reason}"


def explain_both_ways(rank, world_size):
    with graphar.Communicator() as communicator:
        return str(graphar.explain(torch.ones(2))), str(communicator.explain(torch.ones(2)))


def test_explain_says_why_a_process_takes_the_fallback():
    assert run_ranks(explain_both_ways, 2) == [("fallback: the tensor is on the CPU",) * 2] * 2


def test_an_explanation_shows_the_grid_of_a_kernel():
    explanation = graphar.Explanation("one_shot_push", blocks=16, threads=128, reason="the fastest")

    assert str(explanation) == "one_shot_push (16 blocks of 128): the fastest"
