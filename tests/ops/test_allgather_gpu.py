"""All-gather's kernels on real GPUs, in one process with a tensor on each device: every byte is in its place."""

import random

import pytest
import torch

from graphar.plan.scratch import PACK_NBYTES, PUSH_DEPTH
from tests.gpu import Ranks, poison
from tests.ops.gpu_cases import LAST_FLAGGED, STEP_NBYTES

pytestmark = pytest.mark.gpu

KERNELS = ("allgather_flagged", "allgather_push")
NBYTES_OF_MANY_STEPS = (2 * PUSH_DEPTH + 1) * STEP_NBYTES + 7


def bytes_on(rank, nbytes, seed=0):
    """Random bytes on a rank's device, other ones for each rank."""
    generator = torch.Generator(f"cuda:{rank}").manual_seed(1000 * seed + rank)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, device=f"cuda:{rank}", generator=generator)


def inputs_of(lengths, seed=0):
    return [bytes_on(rank, length, seed) for rank, length in enumerate(lengths)]


def gather(ranks: Ranks, xs):
    poison([sum(x.nbytes for x in xs)] * ranks.world_size)
    ys = ranks.communicator.allgather(xs)
    ranks.communicator.synchronize()
    return ys


def assert_joined(ys, xs, what=""):
    for rank, y in enumerate(ys):
        places = y.split([len(x) for x in xs])
        for source, (mine, x) in enumerate(zip(places, xs, strict=True)):
            assert mine.shape == x.shape, what
            assert same_bytes(mine, x.to(y.device)), f"rank {rank}, part {source} {what}"


def calls_of_both(ranks: Ranks) -> list[int]:
    return [ranks.calls_of(kernel) for kernel in KERNELS]


def same_bytes(a, b):
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.resolve_neg().contiguous().view(-1).view(torch.uint8)
    )


def uneven(ranks: Ranks, choices: random.Random, largest: int) -> list[int]:
    return [choices.choice([0, 1, choices.randrange(64), choices.randrange(largest)]) for _ in range(ranks.world_size)]


@pytest.mark.parametrize("longest", [17, 8199, 300_001, STEP_NBYTES + 5, NBYTES_OF_MANY_STEPS])
def test_parts_of_very_different_sizes(ranks: Ranks, longest):
    for owner in range(ranks.world_size):
        for others in (0, 1, longest // 3):
            xs = inputs_of([longest if rank == owner else others for rank in range(ranks.world_size)])
            assert_joined(gather(ranks, xs), xs, what=f"{longest} on rank {owner}, {others} on others")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_16_bit_pattern_and_every_pack_of_equal_bytes_is_moved(ranks: Ranks, dtype):
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    packs = torch.arange(256, dtype=torch.uint8).repeat_interleave(PACK_NBYTES)  # all ones, all zeros, ...
    one = torch.cat([patterns.view(torch.uint8), packs]).view(dtype)
    xs = ranks.place([one.roll(rank) for rank in range(ranks.world_size)])
    assert_joined(gather(ranks, xs), xs)


def test_more_than_four_gigabytes(ranks: Ranks):
    if ranks.world_size > 2:
        pytest.skip("one world size is enough for the width of an index")
    xs = inputs_of([(1 << 32) + 9, (1 << 31) + 3])
    for rank, y in enumerate(gather(ranks, xs)):
        for source, mine in enumerate(y.split([len(x) for x in xs])):
            for at in range(0, len(mine), 1 << 28):
                window = slice(at, at + (1 << 28))
                assert torch.equal(mine[window], xs[source][window].to(y.device)), f"rank {rank}, part {source}, {at}"


def test_the_kernel_runs_once_for_a_call_of_any_size_and_dtype(ranks: Ranks):
    gather(ranks, inputs_of([8] * ranks.world_size))
    for nbytes in (8, LAST_FLAGGED, LAST_FLAGGED + 8, NBYTES_OF_MANY_STEPS + 1):
        before = calls_of_both(ranks)
        gather(ranks, [x.view(torch.float64) for x in inputs_of([nbytes // 8 * 8] * ranks.world_size)])
        flagged = nbytes <= LAST_FLAGGED
        assert calls_of_both(ranks) == [before[0] + flagged, before[1] + (not flagged)]
        assert all(ranks.grid_is_idle(kernel) and ranks.scratch_is_as_before(kernel) for kernel in KERNELS)


def test_strided_negated_and_conjugated_inputs(ranks: Ranks):
    xs = [x.view(torch.int16) for x in inputs_of([10_000] * ranks.world_size)]
    for view in (lambda x: x[::3], lambda x: x.view(50, 100).t(), torch._neg_view):
        views = [view(x) for x in xs]
        assert_joined(gather(ranks, views), views)
    complexes = [torch.complex(torch.full((9,), 1.0), torch.full((9,), 1.0 + rank)) for rank in range(ranks.world_size)]
    outs = gather(ranks, [x.conj() for x in ranks.place(complexes)])
    assert [y.imag.tolist() for y in outs] == [
        [-1.0 - rank for rank in range(ranks.world_size) for _ in range(9)]
    ] * len(outs)


def test_sizes_and_delays_at_random(ranks: Ranks):
    """A thousand calls that shrink, grow and change grid, with one rank late now and then."""
    choices = random.Random(7)
    pool = inputs_of([1 << 21] * ranks.world_size)
    for call in range(1000):
        lengths = uneven(ranks, choices, int(2 ** choices.uniform(1, 21)))
        xs = [x[start : start + n] for x, n in zip(pool, lengths, strict=True) for start in [choices.randrange(99)]]
        ranks.be_late(choices)
        ys = ranks.communicator.allgather(xs)
        if call % 10 == 0:
            ranks.communicator.synchronize()
            assert_joined(ys, xs, what=f"call {call}: {lengths}")
