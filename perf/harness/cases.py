"""What is measured of all-reduces, sizes, modes and repetitions, and the row that comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from graphar.plan.sizes import GB, KB, MB, format_nbytes
from perf.harness.timing import spread
from perf.report import Spread, Timing

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
SIZES = (2 * KB, 8 * KB, 32 * KB, *(64 * KB << step for step in range(16)))
CHAIN_MAX_NBYTES = 16 * MB
EAGER_SIZES = (2 * KB, 64 * KB, MB, 16 * MB)
CPU_MAX_NBYTES = 16 * MB

# One layer's activations in a large model: tokens of so many elements.
HIDDEN = 8192
TOKENS = (32, 64, 96, 128, 192, 256, 1024, 2048, 3062, 4096)

DTYPE_SIZES = (2 * KB, 64 * KB, MB, 16 * MB, 256 * MB)
PLAIN_METHODS = ("graphar", "nccl", "gloo")  # measured in every dtype, and at the sizes of BACKEND_SIZES

# Where torch's backends are usually compared, and on how many ranks, as far as a machine has them.
BACKEND_SIZES = (MB, 10 * MB, 100 * MB, GB)
BACKEND_WORLD_SIZES = (2, 4, 6)
GLOO_MAX_NBYTES = 100 * MB  # beside GPUs, unless asked for more: beyond, one all-reduce takes gloo seconds

# A call's cost to the host is of interest where calls are made one by one; that is not how the others are used.
EAGER_METHODS = (
    "graphar",
    "graphar_symmetric",
    "nccl",
    "symm_one_shot",
    "symm_two_shot",
    "vllm",
    "sglang_one_shot_push",
    "sglang_two_shot_push",
    "sglang_two_shot_pull",
)


@dataclass(frozen=True)
class Case:
    """One all-reduce to measure.

    Attributes:
        world_size: how many ranks take part.
        form: "process" is one process a rank, "list" one process with one tensor a rank.
        mode: "graph" replays a CUDA graph of independent operations, "chain" one in which each reads the result of the
            one before, "eager" calls one after another, "host" is the host's share of that, "cpu" is eager on CPU
            tensors.
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
        if self.nbytes <= 16 * MB:
            return 11
        return 7 if self.nbytes < 512 * MB else 5 if self.nbytes <= GB else 3


@dataclass(frozen=True)
class Plan:
    """The cases one world of ranks works through.

    Attributes:
        device: "cuda" or "cpu".
        dtypes: the first is measured at every size with every method, the others are compared with it.
        methods: names from perf/peers/catalogue.py.
        max_nbytes: the largest size.
        full: whether the sizes of TOKENS and the other dtypes are measured, too.
    """

    device: str
    world_size: int
    form: str
    dtypes: tuple[str, ...]
    methods: tuple[str, ...]
    max_nbytes: int
    full: bool = True

    def cases(self) -> Iterator[Case]:
        for nbytes in self.up_to_max(SIZES):
            for mode in self._modes(nbytes):
                yield self.case(mode, nbytes)
        if self.form == "process":
            for nbytes in self.up_to_max(BACKEND_SIZES):
                if nbytes not in SIZES:
                    yield self.case(self._modes(nbytes)[0], nbytes)
        if self.full and self.device == "cuda":
            for nbytes in self.up_to_max(token_sizes(self.dtypes[0])):
                if nbytes not in SIZES:
                    yield self.case("graph", nbytes)
        if self.full:
            for dtype in self.dtypes[1:]:
                for nbytes in self.up_to_max(DTYPE_SIZES):
                    yield self.case(self._modes(nbytes)[0], nbytes, dtype)

    def takes_part(self, method: str, case: Case) -> bool:
        """Whether a method is measured in a case, if it can serve it."""
        is_extra = case.dtype != self.dtypes[0] or (case.nbytes in BACKEND_SIZES and case.nbytes not in SIZES)
        if is_extra and method not in PLAIN_METHODS:
            return False
        return case.mode not in ("eager", "host") or method in EAGER_METHODS or method.startswith("graphar:")

    def row_count(self) -> int:
        """How many rows the plan yields if no method's own limit cuts it short."""
        return sum(self.takes_part(method, case) for case in self.cases() for method in self.methods)

    def case(self, mode: str, nbytes: int, dtype: str | None = None) -> Case:
        return Case(self.world_size, self.form, mode, dtype or self.dtypes[0], nbytes)

    def up_to_max(self, sizes: tuple[int, ...]) -> list[int]:
        return [size for size in sizes if size <= self.max_nbytes]

    def _modes(self, nbytes: int) -> list[str]:
        if self.device == "cpu":
            return ["cpu"]
        modes = {
            "graph": True,
            "chain": nbytes <= CHAIN_MAX_NBYTES,
            "eager": nbytes in EAGER_SIZES,
            "host": nbytes == SIZES[0],
        }
        return [mode for mode, wanted in modes.items() if wanted]


@dataclass(frozen=True)
class BackendPlan(Plan):
    """The sizes of BACKEND_SIZES alone: for a world that has no other table."""

    def cases(self) -> Iterator[Case]:
        for nbytes in self.up_to_max(BACKEND_SIZES):
            yield self.case(self._modes(nbytes)[0], nbytes)


def token_sizes(dtype: str) -> tuple[int, ...]:
    """The sizes of TOKENS, in bytes."""
    return tuple(tokens * HIDDEN * ITEMSIZES[dtype] for tokens in TOKENS)


@dataclass(frozen=True)
class Link:
    """What one link sent: see Utilisation."""

    link: int
    raw_tx_nbytes: int
    raw_share: float | None


@dataclass(frozen=True)
class Utilisation:
    """What one GPU sent over NVLink, against what it had to; None where a ratio is to nothing.

    Attributes:
        must_send_nbytes: what the algorithm cannot do without.
        data_tx_nbytes: payload the links counted.
        raw_tx_nbytes: the same with all that the protocol adds.
        payload_efficiency: must_send / data_tx; below 1 where more was sent than had to be.
        protocol_overhead: raw_tx / data_tx - 1.
        link_balance: data_tx of the least loaded link / that of the most loaded; 1 is even.
        raw_share: raw_tx / what the links' raw rate allows in the time; None where the time or the rate is unknown.
        links: the same of each.
    """

    must_send_nbytes: int
    data_tx_nbytes: int
    raw_tx_nbytes: int
    payload_efficiency: float | None
    protocol_overhead: float | None
    link_balance: float | None
    raw_share: float | None
    links: list[Link] = field(default_factory=list)


@dataclass(frozen=True)
class Row(Timing):
    """One measured and verified figure, as the JSON report holds it.

    Attributes:
        algorithm: what graphar.explain names; None for a peer.
        quantised: the method sends fewer bits than it is given, so it is no peer of an exact one.
        time_us: median, p10 and p99 over the repeats, each the slowest rank's time of one operation.
        algbw, busbw: GB/s (1e9 bytes) of the median, as nccl-tests defines them.
        wrong: elements that differ from what the method promises, over all ranks.
        nvlink: what the first rank's links carried during one replay, as Utilisation names it; None where it was
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
    time_us: Spread
    algbw: float
    busbw: float
    wrong: int
    nvlink: Utilisation | None = None

    @property
    def what(self) -> tuple[str, ...]:
        return self.dtype, self.mode, self.form, format_nbytes(self.nbytes)

    @property
    def is_peer(self) -> bool:
        return not self.is_own and not self.quantised


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
    nvlink: Utilisation | None = None,
) -> Row:
    """The row of a method whose repeats took times_us an operation."""
    time_us = spread(times_us)
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
