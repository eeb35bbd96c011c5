"""reducescatter_push on real GPUs, one process with a tensor a device: to each rank its part of the exact sum."""

import random

import pytest
import torch

import graphar
from graphar.plan.scratch import Sizes
from tests.cases import bit_patterns, normal, same_bits
from tests.gpu import DTYPES, Ranks, parts_of, poison
from tests.ops.gpu_cases import SCATTER

pytestmark = pytest.mark.gpu

KERNEL = "reducescatter_push"
SHAPES = ((16, 128), (15, 128), (9, 7168), (32, 256), (5, 3, 7), (3, 1), (1, 5), (3, 0), (0, 4))
LARGE = (16777216, 16777224, 16777240, 67108864)


def check_on_gpu(ranks: Ranks, numel, dtype):
    """Random data whose expected parts are made on the GPU, in windows."""
    xs = [
        torch.randn(numel, dtype=dtype, device=f"cuda:{r}", generator=torch.Generator(f"cuda:{r}").manual_seed(r))
        for r in range(ranks.world_size)
    ]
    poison([part.nbytes for part in xs[0].tensor_split(ranks.world_size)])
    ys, start = ranks.communicator.reducescatter(xs), 0
    ranks.communicator.synchronize()
    for rank, y in enumerate(ys):
        assert len(y) == len(range(rank, numel, ranks.world_size))
        for at in range(0, len(y), 1 << 26):
            mine = y[at : at + (1 << 26)].to("cuda:0")
            window = slice(start + at, start + at + len(mine))
            expected = graphar.reference.allreduce([x[window].to("cuda:0") for x in xs])
            assert same_bits(mine, expected) == 0, f"rank {rank}, from element {at}"
        start += len(y)


def uneven(ranks: Ranks, total: int, choices: random.Random) -> tuple[int, ...]:
    """``total`` elements as parts of any size, some of them empty."""
    cuts = sorted(choices.choice([0, total, choices.randrange(total + 1)]) for _ in range(ranks.world_size - 1))
    return tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, total], strict=True))


def scatter_uneven(ranks: Ranks, xs, counts):
    """A reduce-scatter into parts of any sizes, as in the gradient of an all-gather."""
    ys = [x.new_full((count,), 7) for x, count in zip(xs, counts, strict=True)]
    ranks.run_parts("reducescatter", xs, ys, counts)
    return ys


def assert_uneven(ys, parts, counts, what=""):
    expected = graphar.reference.allreduce(parts).split(counts)
    for rank, (y, part) in enumerate(zip(ys, expected, strict=True)):
        assert same_bits(y.cpu(), part) == 0, f"rank {rank} of {counts} {what}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", LARGE)
def test_large_tensors_give_the_specification(ranks: Ranks, numel, dtype):
    check_on_gpu(ranks, numel, dtype)


def test_more_than_two_to_the_31_elements(ranks: Ranks):
    if ranks.world_size > 2:
        pytest.skip("one world size is enough for the width of an index")
    check_on_gpu(ranks, (1 << 31) + 9, torch.bfloat16)


@pytest.mark.promise("Reduce-scatter, then all-gather, gives the bits of the all-reduce.")
def test_gathering_the_parts_is_the_all_reduce_bit_for_bit(ranks: Ranks):
    for shape in SHAPES:
        for axis in range(len(shape)):
            xs = ranks.place(parts_of(ranks, bit_patterns, shape, torch.bfloat16))
            gathered = ranks.communicator.allgather(ranks.communicator.reducescatter(xs, axis=axis), axis=axis)
            for mine, expected in zip(gathered, ranks.communicator.allreduce(xs), strict=True):
                assert same_bits(mine, expected) == 0, f"{shape}, axis {axis}"


@pytest.mark.parametrize(
    ("numel", "launches"),
    [(1, 1), (8192, 1), (Sizes.reducescatter_nbytes // 2, 1), (Sizes.reducescatter_nbytes + 1024, 3)],
    ids=["one element", "small", "as much as fits", "three slices"],
)
def test_the_kernel_runs_once_for_each_slice(ranks: Ranks, numel, launches):
    SCATTER.check(ranks, (8,))
    before = ranks.calls_of(KERNEL)
    SCATTER.check(ranks, (numel,), torch.bfloat16, normal)
    assert ranks.calls_of(KERNEL) == before + launches
    assert ranks.grid_is_idle(KERNEL)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_may_begin_and_end_anywhere(ranks: Ranks, dtype):
    choices = random.Random(3)
    for total in (1, 2, 9, 100, 8199, 262149):
        parts = parts_of(ranks, bit_patterns, (total,), dtype)
        xs = ranks.place(parts)
        for _ in range(5):
            counts = uneven(ranks, total, choices)
            ys = scatter_uneven(ranks, xs, counts)
            ranks.communicator.synchronize()
            assert_uneven(ys, parts, counts, dtype)


def test_one_part_may_be_all_there_is(ranks: Ranks):
    total = 3 * Sizes.reducescatter_nbytes // 4  # of bf16: one and a half launches' worth of input, in one part many
    parts = parts_of(ranks, normal, (total,), torch.bfloat16)
    for owner in range(ranks.world_size):
        counts = tuple(total if rank == owner else 0 for rank in range(ranks.world_size))
        assert_uneven(scatter_uneven(ranks, ranks.place(parts), counts), parts, counts)
    assert ranks.scratch_is_as_before(KERNEL)


def test_a_rank_with_nothing_to_receive_does_not_run_ahead(ranks: Ranks):
    """All of the sum goes to one rank, which is often late. The other ranks have nothing to wait for."""
    numel, late = 4096, ranks.world_size - 1
    counts = tuple(numel if rank == late else 0 for rank in range(ranks.world_size))
    calls = [
        parts_of(ranks, lambda r, n, d, c=c: normal(100 * c + r, n, d), (numel,), torch.bfloat16) for c in range(60)
    ]
    placed, results = [ranks.place(parts) for parts in calls], []
    ranks.communicator.synchronize()
    for call, xs in enumerate(placed):
        if call % 5 == 0:
            with torch.cuda.device(late):
                torch.cuda._sleep(2_000_000)
        results.append(scatter_uneven(ranks, xs, counts))
    ranks.communicator.synchronize()
    for call, (ys, parts) in enumerate(zip(results, calls, strict=True)):
        assert_uneven(ys, parts, counts, f"call {call}")
    assert ranks.scratch_is_as_before(KERNEL)


def test_sizes_splits_and_delays_at_random(ranks: Ranks):
    """A thousand calls whose sizes and splits change, with one rank late now and then."""
    choices = random.Random(7)
    pool = ranks.place(parts_of(ranks, normal, (1 << 18,), torch.bfloat16))
    total = graphar.reference.allreduce([x.to("cuda:0") for x in pool]).cpu()
    for call in range(1000):
        numel = int(2 ** choices.uniform(0, 18))
        start = choices.randrange((1 << 18) - numel + 1)
        counts = uneven(ranks, numel, choices)
        ranks.be_late(choices)
        ys = scatter_uneven(ranks, [x[start : start + numel] for x in pool], counts)
        if call % 10 == 0:
            ranks.communicator.synchronize()
            for rank, (y, expected) in enumerate(zip(ys, total[start : start + numel].split(counts), strict=True)):
                assert same_bits(y.cpu(), expected) == 0, f"call {call}: rank {rank} of {counts}"
    assert ranks.scratch_is_as_before(KERNEL)
