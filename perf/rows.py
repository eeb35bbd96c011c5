"""The figures a row is made of."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from perf.cases import Case


@dataclass(frozen=True)
class Row:
    """One measured and verified figure, as the JSON report holds it.

    Attributes:
        algorithm: what graphar.explain names; None for a peer.
        quantised: the method sends fewer bits than it is given, so it is no peer of an exact one.
        time_us: median, p10 and p99 over the repeats, each the slowest rank's time of one operation.
        algbw, busbw: GB/s (1e9 bytes) of the median, as nccl-tests defines them.
        wrong: elements that differ from what the method promises, over all ranks.
        nvlink: what the first rank's links carried during one replay, as nvlink.Utilisation names it; None where it was
            not counted.
    """

    op: str
    method: str
    algorithm: str | None
    quantised: bool
    nbytes: int
    dtype: str
    world_size: int
    mode: str
    form: str
    time_us: dict[str, float]
    algbw: float
    busbw: float
    wrong: int
    nvlink: dict[str, object] | None = None

    @property
    def is_own(self) -> bool:
        """Whether it is graphar's, called in whichever way."""
        return self.method.startswith("graphar")

    @property
    def median(self) -> float:
        return self.time_us["median"]


@dataclass(frozen=True)
class LinkCeiling:
    """GB/s (1e9 bytes) in one direction of a GPU's links, when all ranks push to all others."""

    world_size: int
    busbw: float


def make_row(
    case: Case,
    method: str,
    times_us: Sequence[float],
    wrong: int,
    *,
    algorithm: str | None = None,
    quantised: bool = False,
    nvlink: dict[str, object] | None = None,
) -> Row:
    """The row of a method whose repeats took times_us an operation."""
    time_us = summarise(times_us)
    bandwidth = algbw(case.nbytes, time_us["median"])
    return Row(
        op="allreduce",
        method=method,
        algorithm=algorithm,
        quantised=quantised,
        nbytes=case.nbytes,
        dtype=case.dtype,
        world_size=case.world_size,
        mode=case.mode,
        form=case.form,
        time_us=time_us,
        algbw=bandwidth,
        busbw=busbw(bandwidth, case.world_size),
        wrong=wrong,
        nvlink=nvlink,
    )


def algbw(nbytes: int, time_us: float) -> float:
    """GB/s (1e9 bytes) of one rank's input over the time."""
    return nbytes / time_us / 1e3


def busbw(algbw: float, world_size: int) -> float:
    """GB/s a link must carry in one direction for an all-reduce of that algbw, whatever the number of ranks."""
    return algbw * 2 * (world_size - 1) / world_size


def summarise(times_us: Sequence[float]) -> dict[str, float]:
    """The median, the 10th and the 99th percentile."""
    return {
        "median": statistics.median(times_us),
        "p10": percentile(times_us, 10),
        "p99": percentile(times_us, 99),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, linear between the two nearest."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
