"""Reduce-scatter with an epilogue on real GPUs: to each rank the specification's bits of its part."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import Epilogue
from graphar.plan.scratch import Sizes
from tests.cases import normal, same_bits
from tests.gpu import Ranks, parts_of, poison

pytestmark = pytest.mark.gpu

KERNEL = "reducescatter_push"


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
