"""Reduce-scatter with an epilogue on real GPUs: to each rank the specification's bits of its part."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import Epilogue
from graphar.plan.scratch import Sizes
from tests.cases import bit_patterns, normal, same_bits
from tests.gpu import DTYPES, Ranks, parts_of, poison
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu

KERNEL = "reducescatter_push"
EXACT = {
    "-v": (),
    "v * 0.3 + b[col] - c[index]": ("b", "c"),
    "max(v, a[row]) / (abs(d[0]) + 1) + sqrt(row) - col + index": ("a", "d"),
}
SHAPES = ((1, 1), (1, 8192), (15, 128), (9, 7168), (4099, 64))


def tensors_of(names, rows: int, world_size: int, columns: int) -> dict[str, list[torch.Tensor]]:
    """For each name, a tensor for each rank's part. They differ by rank."""
    lengths = [len(part) for part in torch.empty(rows, device="meta").tensor_split(world_size)]
    numels = {name: [{"a": n, "b": columns, "c": n * columns, "d": 1}[name] for n in lengths] for name in names}
    return {
        name: [normal(30 + rank, numel, torch.bfloat16) for rank, numel in enumerate(each)]
        for name, each in numels.items()
    }


def check(ranks: Ranks, parts, what, tensors: dict[str, list[torch.Tensor]], axis: int = 0) -> None:
    placed = {name: ranks.place(each) for name, each in tensors.items()}
    xs = ranks.place(parts)
    poison([x.tensor_split(ranks.world_size, axis)[rank].nbytes for rank, x in enumerate(xs)])
    ys = ranks.communicator.reducescatter(xs, axis=axis, epilogue=Epilogue(what, **placed))
    ranks.communicator.synchronize()
    expected = graphar.reference.reducescatter(parts, axis, Epilogue(what, **tensors))
    for rank, (y, part) in enumerate(zip(ys, expected, strict=True)):
        assert same_bits(y.cpu(), part) == 0, f"rank {rank}, {what}, {list(parts[0].shape)}"


@pytest.mark.promise("An epilogue has the bits of its specification; only expressions reach the compiler.")
@pytest.mark.parametrize("what", EXACT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_part_has_the_specifications_bits(ranks: Ranks, what, dtype):
    for shape in SHAPES:
        before = ranks.calls_of(KERNEL)
        for fill in (normal, bit_patterns):
            tensors = tensors_of(EXACT[what], shape[0], ranks.world_size, shape[1])
            check(ranks, parts_of(ranks, fill, shape, dtype), what, tensors)
        assert ranks.calls_of(KERNEL) == before + 2
    assert ranks.scratch_is_as_before(KERNEL)


def test_places_go_on_from_one_slice_to_the_next(ranks: Ranks):
    columns = 1000
    rows = 3 * Sizes.reducescatter_nbytes // (2 * columns)
    parts = parts_of(ranks, normal, (rows, columns), torch.bfloat16)
    before = ranks.calls_of(KERNEL)

    check(ranks, parts, "v + c[index] - row + b[col]", tensors_of("bc", rows, ranks.world_size, columns))

    assert ranks.calls_of(KERNEL) > before + 1


def test_other_axes_and_one_dimension(ranks: Ranks):
    check(ranks, parts_of(ranks, normal, (3, 17, 40), torch.float16), "-v", {}, axis=2)
    bias = {"b": [normal(9, 40, torch.float32)] * ranks.world_size}
    check(ranks, parts_of(ranks, normal, (3, 17, 40), torch.float16), "v + b[col]", bias, axis=1)
    check(ranks, parts_of(ranks, normal, (4099,), torch.bfloat16), "v + index - col + row", {})


def test_calls_with_and_without_an_epilogue_follow_one_another(ranks: Ranks):
    for turn in range(40):
        parts = parts_of(ranks, normal, ((3, 5), (64, 128), (17, 999), (1, 8))[turn % 4], torch.bfloat16)
        if turn % 3 == 0:
            ys = ranks.communicator.reducescatter(ranks.place(parts))
            ranks.communicator.synchronize()
            expected = graphar.reference.reducescatter(parts)
            assert [same_bits(y.cpu(), part) for y, part in zip(ys, expected, strict=True)] == [0] * len(ys)
        else:
            check(ranks, parts, ("-v", "v + row")[turn % 2], {})
    assert ranks.scratch_is_as_before(KERNEL)
    assert ranks.grid_is_idle(KERNEL)


def test_what_was_prepared_is_captured_the_first_time(fresh_ranks: Ranks):
    parts = parts_of(fresh_ranks, normal, (9, 64), torch.bfloat16)
    xs, what = fresh_ranks.place(parts), "v * 5 - row"
    fresh_ranks.communicator.prepare([torch.bfloat16], ops=["reducescatter"], epilogues=[what])
    kept = []

    graph = fresh_ranks.capture(lambda: kept.extend(fresh_ranks.communicator.reducescatter(xs, epilogue=what)))
    graph.replay()

    fresh_ranks.communicator.synchronize()
    expected = graphar.reference.reducescatter(parts, epilogue=what)
    assert [same_bits(y.cpu(), part) for y, part in zip(kept, expected, strict=True)] == [0] * len(kept)


# ---- one process a GPU ----------------------------------------------------------------------------------------------


def added(v, residual, bias):
    return v + residual + bias


def scatter_as_rank(rank, world_size):
    """How many elements of each call are wrong, by a description of the call."""
    wrong, bias = {}, normal(9, 128, torch.bfloat16)
    for rows in (1, 2, 67, 32768):
        parts = [normal(peer, rows * 128, torch.bfloat16).view(rows, 128) for peer in range(world_size)]
        shares = torch.empty(rows, 128).tensor_split(world_size)
        residuals = [normal(50 + at, part.numel(), torch.bfloat16).view(part.shape) for at, part in enumerate(shares)]
        what = "v + residual[index] + bias[col]"
        expected = graphar.reference.reducescatter(parts, epilogue=Epilogue(what, residual=residuals, bias=bias))
        epilogue = Epilogue(added, residual=residuals[rank].cuda(), bias=bias.cuda())
        mine = graphar.reducescatter(parts[rank].cuda(), epilogue=epilogue)
        wrong[rows] = same_bits(mine.cpu(), expected[rank])
    return wrong


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_processes_get_the_specification(world_size):
    for wrong in run_on_gpus(scatter_as_rank, world_size):
        assert not any(wrong.values()), wrong
