"""What the benches of a model share: their plans and rows, the columns of the whole model, and sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from perf.harness.ranks import ProcessRanks
from perf.md import NOT_SERVED, plural
from perf.models.decoder import SIZES, Elementwise, Shard, make_decoder, make_head
from perf.ratios import group
from perf.report import Timing

Row = TypeVar("Row", bound=Timing)


UNSHARDED = "unsharded"  # the method that has the whole model on each GPU
ALONE = "alone"  # the method without communication


@dataclass(frozen=True)
class BenchPlan:
    """What to measure with one number of ranks.

    Attributes:
        size: a name in perf.models.decoder.SIZES.
    """

    device: str
    world_size: int
    size: str
    layers: int


@dataclass(frozen=True)
class BenchRow(Timing):
    """The measured and verified time of one method.

    A subclass adds the case, with a number of ``tokens``, and these:

    - error: the largest relative error of a token's logits, compared with the unsharded model; None if that has no
      meaning.
    - wrong: the number of wrong results, summed over all ranks. A token is wrong if the error of its logits is too
      large. If a method promises the same bits on all ranks, a token whose bits differ is wrong too.
    """

    method: str
    size: str
    world_size: int
    layers: int

    @property
    def is_peer(self) -> bool:
        return not self.is_own and self.method not in (ALONE, UNSHARDED)

    @property
    def of_layers(self) -> str:
        return f"{plural(self.layers, 'layer')} of {self.size}"

    @property
    def whole_us(self) -> float:
        """The time of a step of all layers, extrapolated from the timed layers."""
        return self.median * SIZES[self.size].layers / self.layers


class ModelBench:
    """A model as it is whole, and this rank's shard of it: what the methods of a bench compute with."""

    def __init__(self, plan: BenchPlan, ranks: ProcessRanks, elementwise: Elementwise) -> None:
        self._plan, self._ranks, self._elementwise = plan, ranks, elementwise
        self._size, self._shard = SIZES[plan.size], Shard(ranks.rank, ranks.size, ranks.device)
        self._whole = make_decoder(self._size, plan.layers, Shard(0, 1, ranks.device))
        self._own = make_decoder(self._size, plan.layers, self._shard)
        self._head = make_head(self._size, ranks.device)


def after_linear(linear: Callable, add_and_norm: Callable, a: Tensor, weight: Tensor, residual: Tensor, scale: Tensor):
    """Makes a row-parallel linear layer with its sum, and then the norm: see perf.models.decoder.RowParallelAndNorm."""
    return add_and_norm(linear(a, weight), residual, scale)


def verdict(errors: Tensor, bad: Tensor, ranks: ProcessRanks) -> tuple[float, int]:
    """Returns the largest error of a token, and how many tokens are wrong, over all ranks. Collective."""
    (error,) = ranks.slowest([worst_of(errors)])
    (wrong,) = ranks.total([int(bad.sum())])
    return error, wrong


def whole_columns(any_row: BenchRow) -> dict[str, Callable[[BenchRow], str]]:
    """Returns the columns of a table that have the time of a step of the whole model, and its tokens per second."""
    return {
        f"whole model, {SIZES[any_row.size].layers} layers (ms)": lambda row: f"{row.whole_us / 1e3:.4g}",
        "tokens/s": lambda row: f"{row.tokens / row.whole_us * 1e6:,.0f}",
    }


def error_cell(row: BenchRow) -> str:
    return NOT_SERVED if row.error is None else f"{row.error:.4f}"


def by_title(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    return {title: {row.method: row for row in mine} for title, mine in group(rows, lambda row: row.title).items()}


def worst_of(errors: Tensor) -> float:
    """Returns the largest error; infinity for NaN."""
    return errors.nan_to_num(nan=math.inf).max().item()
