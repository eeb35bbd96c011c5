"""two_shot_lossless on real GPUs, with data that pack well, badly and not at all."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar.plan.algorithms import Algorithm, Shape
from graphar.plan.scratch import LOSSLESS_CHUNK, PIPELINE_BLOCKS
from graphar.plan.slices import Slice
from tests.cases import bit_patterns, far_apart, normal
from tests.gpu import Ranks

pytestmark = pytest.mark.gpu

NAME = "two_shot_lossless"

every_fill = pytest.mark.parametrize("fill", [normal, far_apart, bit_patterns], ids=lambda fill: fill.__name__)


@every_fill
@pytest.mark.parametrize("numel", [1, 1023, 1024, 1025, 262149, 2097152, 4194313])
def test_any_data_give_the_specification(ranks: Ranks, numel, fill):
    ranks.check(fill, numel, torch.bfloat16, NAME)


@pytest.mark.parametrize("numel", [16777216, 67108873])
def test_many_chunks_give_the_specification(ranks: Ranks, numel):
    ranks.check_on_gpu(numel, torch.bfloat16, NAME)


@every_fill
@pytest.mark.parametrize("blocks", [1, 7, PIPELINE_BLOCKS])
@pytest.mark.parametrize("chunk", [1, 3, LOSSLESS_CHUNK])
def test_every_grid_and_chunk_gives_the_specification(ranks: Ranks, blocks, chunk, fill):
    ranks.check(fill, 8192, torch.bfloat16, NAME)  # makes the plan
    numel = 5 * min(blocks, 8) * ranks.world_size * chunk * 1024 + 5
    parts = [fill(rank, numel, torch.bfloat16) for rank in range(ranks.world_size)]
    xs = ranks.place(parts)
    outs = [torch.full_like(x, torch.nan) for x in xs]
    shape = Shape(Algorithm(NAME), blocks, 512, chunk)
    for launch, x, out in zip(
        ranks.communicator.engine.runner.bind_members(shape, Slice(numel), torch.bfloat16, 10), xs, outs, strict=True
    ):
        launch(x, out)
    ranks.communicator.synchronize()
    ranks.check_result(outs, parts)


def test_other_dtypes_are_refused(ranks: Ranks):
    xs = ranks.place([torch.ones(8, dtype=torch.float16)] * ranks.world_size)

    with pytest.raises(graphar.UnsupportedError, match=r"it has no kernel for torch\.float16"):
        ranks.communicator.allreduce(xs, algorithm=NAME)
