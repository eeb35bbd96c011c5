"""All-gathers of tuples on real GPUs: FP8 rows with their scales, and any other tensors, in one launch."""

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import normal, raw, same_bits
from tests.gpu import Ranks
from tests.processes import on_ranks, run_on_gpus

pytestmark = pytest.mark.gpu

KERNELS = ("allgather_flagged", "allgather_push")
FP8 = torch.float8_e4m3fn
# The dtypes and columns of what is gathered together: FP8 rows and their scales, and tensors that are never aligned.
KINDS = {
    "fp8 rows": ((FP8, 7168), (torch.float32, 56)),
    "odd rows": ((torch.uint8, 13), (torch.bfloat16, 3), (torch.bool, 1), (torch.int64, 1)),
    "narrow rows first": ((torch.float32, 1), (FP8, 4096)),
}


def parts_of(kinds, sizes):
    """By tensor, each rank's rows."""
    return tuple(
        [raw(10 * at + rank, rows * columns, dtype).view(rows, columns) for rank, rows in enumerate(sizes)]
        for at, (dtype, columns) in enumerate(kinds)
    )


def assert_gathered(found, parts):
    for at, (ys, xs) in enumerate(zip(found, parts, strict=True)):
        expected = graphar.reference.allgather(xs)
        for rank, y in enumerate(ys):
            assert same_bits(y.cpu(), expected) == 0, f"tensor {at}, rank {rank}"


def gather(ranks: Ranks, parts):
    found = ranks.communicator.allgather(tuple(map(ranks.place, parts)))
    ranks.communicator.synchronize()
    return found


def calls_of_both(ranks: Ranks) -> int:
    return sum(ranks.calls_of(kernel) for kernel in KERNELS)


@pytest.mark.parametrize("rows", [4096, 512, 40, 31, 7, 8, 1])
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_every_tensor_is_gathered_in_one_launch(ranks: Ranks, kinds, rows):
    parts = parts_of(kinds, [rows + 3 * rank if rank != 1 else rows // 2 for rank in range(ranks.world_size)])
    before = calls_of_both(ranks)

    assert_gathered(gather(ranks, parts), parts)

    assert calls_of_both(ranks) == before + 1
    assert all(ranks.grid_is_idle(kernel) and ranks.scratch_is_as_before(kernel) for kernel in KERNELS)


def test_ranks_may_have_no_rows(ranks: Ranks):
    for owner in range(ranks.world_size):
        parts = parts_of(KINDS["odd rows"], [9 if rank == owner else 0 for rank in range(ranks.world_size)])
        assert_gathered(gather(ranks, parts), parts)
    before = calls_of_both(ranks)
    empty = parts_of(KINDS["odd rows"], [0] * ranks.world_size)
    assert_gathered(gather(ranks, empty), empty)
    assert calls_of_both(ranks) == before


def test_more_tensors_than_a_launch_takes(ranks: Ranks):
    parts = parts_of([(torch.float16, columns) for columns in range(1, 10)], [17] * ranks.world_size)
    before = calls_of_both(ranks)

    assert_gathered(gather(ranks, parts), parts)

    assert calls_of_both(ranks) == before + 3


def test_strided_and_misaligned_tensors(ranks: Ranks):
    rows, scales = parts_of(((torch.uint8, 130), (torch.float32, 5)), [64] * ranks.world_size)
    parts = [x[:, 1:] for x in rows], [x.t().contiguous().t() for x in scales], [x.view(-1)[3:67] for x in rows]

    placed = [[x[:, 1:] for x in ranks.place(rows)], [x.t().contiguous().t() for x in ranks.place(scales)]]
    found = ranks.communicator.allgather((*placed, [x.view(-1)[3:67] for x in ranks.place(rows)]))

    ranks.communicator.synchronize()
    assert_gathered(found, [[x.contiguous() for x in xs] for xs in parts])


def test_tuples_and_tensors_in_turn(ranks: Ranks):
    """They share scratch, in which each call must leave what the next one expects."""
    for turn in range(30):
        rows = (5, 300, 1, 40)[turn % 4] + turn
        parts = parts_of(list(KINDS.values())[turn % 3], [rows] * ranks.world_size)
        single = [raw(turn + rank, 1000 * rows, torch.uint8) for rank in range(ranks.world_size)]
        found = ranks.communicator.allgather(tuple(map(ranks.place, parts)))
        whole = ranks.communicator.allgather(ranks.place(single))
        ranks.communicator.synchronize()
        assert_gathered(found, parts)
        assert_gathered([whole], [single])


def test_replays_of_a_graph_between_eager_calls(ranks: Ranks):
    parts = parts_of(KINDS["fp8 rows"], [20] * ranks.world_size)
    placed = tuple(map(ranks.place, parts))
    ranks.communicator.allgather(placed)
    outs = []
    graph = ranks.capture(lambda: outs.append(ranks.communicator.allgather(placed)))
    for turn in range(30):
        for xs, ones in zip(placed, parts, strict=True):
            for rank, x in enumerate(xs):
                x.copy_(ones[rank].roll(turn, 0))
        graph.replay()
        ranks.communicator.synchronize()
        assert_gathered(outs[0], [[x.roll(turn, 0) for x in xs] for xs in parts])
        assert_gathered(gather(ranks, parts), parts)


@pytest.mark.gpu(2, shared=True)
@on_ranks(2, by=run_on_gpus, timeout_s=300)
def test_fp8_rows_and_scales_of_a_norm_are_gathered_in_a_graph(rank, world_size):
    """FP8 rows and their scales of a reduce-scatter with a norm, in a graph that was captured before any such call."""
    group = dist.new_group()
    communicator = graphar.Communicator(group)
    communicator.prepare(dtypes=[torch.bfloat16], ops=["reducescatter_residual_rmsnorm_grouped_fp8", "allgather_tuple"])
    for tokens in (64, 2051):
        parts = [normal(r, tokens * 1024, torch.bfloat16).view(tokens, 1024) for r in range(world_size)]
        residuals = list(normal(20, tokens * 1024, torch.bfloat16).view(tokens, 1024).tensor_split(world_size))
        weight, sizes = normal(21, 1024, torch.bfloat16), list(map(len, residuals))
        x, residual, w = parts[rank].cuda(), residuals[rank].cuda(), weight.cuda()

        def layer(x=x, residual=residual, w=w, sizes=sizes):
            rows, _, scales = graphar.reducescatter_residual_rmsnorm(
                x, residual, w, out_dtype=FP8, group_size=128, group=communicator
            )
            return communicator.allgather((rows, scales), sizes=sizes)

        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer()
        expected = graphar.reference.reducescatter_residual_rmsnorm(
            parts, residuals, weight, out_dtype=FP8, group_size=128
        )
        for _ in range(3):
            graph.replay()
            for found in (captured, layer()):
                communicator.synchronize()
                for y, ones in zip(
                    found, ([one for one, _, _ in expected], [one for *_, one in expected]), strict=True
                ):
                    assert same_bits(y.cpu(), torch.cat(ones)) == 0
    communicator.close()
