"""One way on one layer: what is launched, and whether its result is right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from perf import verify
from perf.fused.cases import Layer
from perf.fused.methods import Way
from perf.graphs import capture
from perf.ranks import Ranks

WARM_UP = 3
ROUNDED_SHARE = 2.0**-13  # of the largest sum of magnitudes: what products may differ by where nothing is left of them


class Trial:
    """One way on one layer's data; ``result`` is what its last call returned."""

    def __init__(self, way: Way, layer: Layer, a: Tensor, w: Tensor) -> None:
        self.way, self.layer, self.a, self.w = way, layer, a, w
        self.result: Tensor | None = None

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self.result = self.way.call(self.a, self.w)

    def make_launch(self) -> Callable[[], None]:
        self.run(WARM_UP)
        if not self.a.is_cuda:
            return partial(self.run, 1)
        return capture(partial(self.run, self.layer.iterations))


def count_wrong(trial: Trial, launch: Callable[[], None], ranks: Ranks) -> int:
    """Wrong elements on this process of what the timed launch computes."""
    trial.result.fill_(torch.nan)
    launch()
    ranks.level()
    product, result = trial.way.product(trial.a, trial.w).view(-1), trial.result.view(-1)
    if not trial.way.summed:
        return int(_is_far(result, product, [product]).sum())
    wrong = 0
    for window in verify.windows(product.numel()):
        parts = ranks.gather(product, window)
        expected = verify.reference(parts, 1, trial.way.codec)
        found = result[window]
        bad = verify.differs(found, expected) if trial.way.exact else _is_far(found, expected, parts)
        wrong += int(bad.sum())
    return wrong


def _is_far(result: Tensor, expected: Tensor, parts: list[Tensor]) -> Tensor:
    magnitude = sum(part.float().abs() for part in parts)
    bound = magnitude * verify.tolerance(result.dtype) + magnitude.max() * ROUNDED_SHARE
    return ~((result.float() - expected.float()).abs() <= bound)
