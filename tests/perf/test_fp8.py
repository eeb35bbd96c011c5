"""perf fp8: scales, and what torch refuses. test_products.py has what it shares with other topics."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from perf.topics.fp8 import BLOCKS, METHODS, ROWS, TORCH, TORCH_BLOCKS, Scaled
from tests.perf.test_products import CPU, SMALL, gpu, scaled_by_torch

__all__ = ("gpu",)  # a fixture


@pytest.mark.parametrize("method", [TORCH, TORCH_BLOCKS, ROWS, BLOCKS])
@pytest.mark.parametrize("which", [0, 1])
def test_a_result_with_another_scale_is_wrong(gpu, method, which):
    operands = Scaled.operands(SMALL, CPU)
    launch = partial(Scaled.multiply, method, operands, 0)
    scale = operands.scales(method)[which]

    assert Scaled.count_wrong({method: launch}, operands, 1) == {method: 0}
    kept = scale.clone()

    def with_another():
        scale[0, 0] *= 1.5
        launch()
        scale.copy_(kept)

    assert Scaled.count_wrong({method: with_another}, operands, 1)[method] > 0


def test_scales_of_blocks_that_torch_refuses_are_told(gpu, monkeypatch):
    def refusing(a, w, a_scale, w_scale, **keywords):
        if w_scale.shape[0] > 1:
            raise RuntimeError("Invalid scaling configuration.\nMore.")
        return scaled_by_torch(a, w, a_scale, w_scale, **keywords)

    monkeypatch.setattr(torch, "_scaled_mm", refusing)

    told, *found = Scaled().measure([SMALL])

    assert told == f"24 x 16 x 512: {TORCH_BLOCKS}: Invalid scaling configuration."
    assert [one.method for one in found] == [method for method in METHODS if method != TORCH_BLOCKS]
