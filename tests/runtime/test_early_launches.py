"""Which kernels are launched while the one before in the stream still waits for other ranks: (18)."""

from types import SimpleNamespace

import pytest
import torch

from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config
from graphar.plan.policy import Chip
from graphar.plan.slices import Slice
from graphar.plan.work import Sum
from graphar.runtime import launcher
from graphar.runtime.bind import collective, residual_norm

SMS = 132


@pytest.fixture
def grid_of(monkeypatch):
    """The launched grid of a configuration where so many communicators are declared."""
    monkeypatch.setattr(collective, "KernelLaunch", lambda function, parameters, grid: grid)
    monkeypatch.setattr(collective, "bind_launch", lambda runner, member, grid, *rest: grid)
    monkeypatch.setattr(launcher, "can_overlap", lambda device: True)

    def bound(config, communicators):
        runner = SimpleNamespace(
            chip=Chip(SMS, "sm_90a", communicators),
            world_size=2,
            members=[SimpleNamespace(device=0)],
            prepare=lambda kernel: [None],
            arguments=lambda *given: SimpleNamespace(bind=lambda *of_call: None),
        )
        call = Call(Sum(1024, "int8" if config.algorithm.row.takes_codec else ""), torch.bfloat16, 0)
        (grid,) = collective.bind_slice(runner, call, config, Slice(1024), 1.0)
        return grid

    return bound


@pytest.mark.parametrize(
    ("algorithm", "blocks", "threads", "early"),
    [
        (Algorithm.TWO_SHOT_PUSH, 131, 512, {2}),
        (Algorithm.TWO_SHOT_PUSH, 43, 512, {2, 3}),
        (Algorithm.TWO_SHOT_PUSH, 44, 512, {2}),
        (Algorithm.TWO_SHOT_PUSH, 21, 512, {2, 3, 4}),
        (Algorithm.ONE_SHOT_PUSH, 1, 64, {2, 3, 4}),
        (Algorithm.TWO_SHOT_LOSSLESS, 131, 512, {2}),
        (Algorithm.TWO_SHOT_LOSSLESS, 21, 512, {2, 3}),
        (Algorithm.QUANTIZED_TWO_SHOT_PUSH, 43, 256, {2, 3}),
        (Algorithm.QUANTIZED_TWO_SHOT_PUSH, 43, 512, {2}),
        (Algorithm.QUANTIZED_TWO_SHOT_PIPELINED, 256, 256, set()),
    ],
)
def test_a_kernel_is_launched_early_where_room_is_left_for_the_other_communicators(
    grid_of, algorithm, blocks, threads, early
):
    config = Config(algorithm, blocks, threads, 1 if algorithm.row.chunked else 0)

    assert {declared for declared in (2, 3, 4) if grid_of(config, declared).overlaps} == early


@pytest.mark.parametrize(("declared", "most"), [("", 132), ("3", 43)])
def test_a_norm_of_one_rank_is_launched_early_if_it_leaves_room_behind_a_sum_that_waits(monkeypatch, declared, most):
    monkeypatch.setenv("GRAPHAR_CONCURRENT_COMMUNICATORS", declared)
    for name, found in {"sm_count": SMS, "can_overlap": True, "architecture": "sm_90a"}.items():
        monkeypatch.setattr(launcher, name, lambda device, found=found: found)
    monkeypatch.setattr(residual_norm, "load", lambda device, dtype, total_dtype: None)
    grids = []
    monkeypatch.setattr(residual_norm, "Launch", lambda function, parameters, grid: grids.append(grid))

    for rows in (1, most, most + 1, 2 * SMS, 4 * SMS):
        residual_norm._bind.__wrapped__(0, torch.bfloat16, torch.bfloat16, rows * 8192, 8192, 1e-5, 0.0)

    assert [grid.overlaps for grid in grids] == [True, True, False, False, False]
