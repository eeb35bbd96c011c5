"""What is measured: sizes, repetitions, and the figures a row is made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
SIZES = (2 * KB, 8 * KB, 32 * KB, *(64 * KB << step for step in range(16)))
EAGER_MAX_NBYTES = 16 * MB
CPU_MAX_NBYTES = 16 * MB


@dataclass(frozen=True)
class Case:
    """One all-reduce to measure.

    Attributes:
        world_size: how many ranks take part.
        form: "process" is one process a rank, "list" one process with one tensor a rank.
        mode: "graph" replays a CUDA graph, "eager" calls one after another, "host" is the host's share of that,
            "cpu" is eager on CPU tensors.
        dtype: the element type, as torch names it.
        nbytes: the size of one rank's input.
    """

    world_size: int
    form: str
    mode: str
    dtype: str
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def numel(self) -> int:
        return self.nbytes // ITEMSIZES[self.dtype]

    @property
    def iterations(self) -> int:
        """How many operations one timed repeat holds."""
        if self.mode == "cpu":
            return 10 if self.nbytes <= 256 * KB else 1
        return 50 if self.nbytes <= MB else 20 if self.nbytes <= 64 * MB else 5

    @property
    def repeats(self) -> int:
        if self.mode == "cpu":
            return 7
        return 15 if self.nbytes <= 16 * MB else 7 if self.nbytes < 512 * MB else 5


@dataclass(frozen=True)
class Plan:
    """The cases one world of ranks works through.

    Attributes:
        device: "cuda" or "cpu".
        methods: names from perf/methods.py.
        max_nbytes: the largest size.
    """

    device: str
    world_size: int
    form: str
    dtype: str
    methods: tuple[str, ...]
    max_nbytes: int

    def cases(self) -> Iterator[Case]:
        for nbytes in (size for size in SIZES if size <= self.max_nbytes):
            for mode in self._modes(nbytes):
                yield Case(self.world_size, self.form, mode, self.dtype, nbytes)

    def row_count(self) -> int:
        """How many rows the plan yields if no method's own limit cuts it short."""
        return sum(1 for _ in self.cases()) * len(self.methods)

    def _modes(self, nbytes: int) -> tuple[str, ...]:
        if self.device == "cpu":
            return ("cpu",)
        if nbytes == SIZES[0]:
            return ("graph", "eager", "host")
        return ("graph", "eager") if nbytes <= EAGER_MAX_NBYTES else ("graph",)


@dataclass(frozen=True)
class Row:
    """One measured and verified figure, as the JSON report holds it.

    Attributes:
        algorithm: what graphar.explain names; None for a peer.
        time_us: median, p10 and p99 over the repeats, each the slowest rank's time of one operation.
        algbw, busbw: GB/s (1e9 bytes) of the median, as nccl-tests defines them.
        wrong: elements that differ from what the method promises, over all ranks.
    """

    op: str
    method: str
    algorithm: str | None
    nbytes: int
    dtype: str
    world_size: int
    mode: str
    form: str
    time_us: dict[str, float]
    algbw: float
    busbw: float
    wrong: int


def make_row(case: Case, method: str, algorithm: str | None, times_us: Sequence[float], wrong: int) -> Row:
    """The row of a method whose repeats took times_us an operation."""
    time_us = summarise(times_us)
    bandwidth = algbw(case.nbytes, time_us["median"])
    return Row(
        op="allreduce",
        method=method,
        algorithm=algorithm,
        nbytes=case.nbytes,
        dtype=case.dtype,
        world_size=case.world_size,
        mode=case.mode,
        form=case.form,
        time_us=time_us,
        algbw=bandwidth,
        busbw=busbw(bandwidth, case.world_size),
        wrong=wrong,
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


def format_nbytes(nbytes: int) -> str:
    """2048 is "2 KB": sizes are binary, bandwidths decimal."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def parse_nbytes(text: str) -> int:
    """ "64M" is 64 binary megabytes; a bare number counts bytes."""
    units = {"K": KB, "M": MB, "G": GB}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    return int(number) * unit
