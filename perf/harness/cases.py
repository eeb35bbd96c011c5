"""The all-reduces to measure: their sizes, modes and repeats. Also the rows of the results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from graphar.cli.bench_ranks import bandwidths
from graphar.plan.algorithms import Algorithm, in_tables
from graphar.plan.sizes import GB, KB, MB, format_nbytes
from perf.harness.timing import spread
from perf.report import Spread, Timing

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
SIZES = (2 * KB, 8 * KB, 32 * KB, *(64 * KB << step for step in range(16)))
CHAIN_MAX_NBYTES = 16 * MB
EAGER_SIZES = (2 * KB, 64 * KB, MB, 16 * MB)
CPU_MAX_NBYTES = 16 * MB

# Activations of a large model: its hidden size, and numbers of tokens.
HIDDEN = 8192
TOKENS = (32, 64, 96, 128, 192, 256, 1024, 2048, 3062, 4096)

DTYPE_SIZES = (2 * KB, 64 * KB, MB, 16 * MB, 256 * MB)
PLAIN_METHODS = ("graphar", "nccl", "gloo")  # measured in every dtype, and at BACKEND_SIZES

# Sizes and numbers of ranks at which torch's backends are usually compared; a machine may have fewer GPUs.
BACKEND_SIZES = (MB, 10 * MB, 100 * MB, GB)
BACKEND_WORLD_SIZES = (2, 4, 6)
GLOO_MAX_NBYTES = 100 * MB  # the default limit of gloo on machines with GPUs; larger all-reduces take seconds

# the algorithms that tuning tables are made from
VARIANTS = tuple(f"graphar:{algorithm}" for algorithm in in_tables("allreduce"))

HOST_MODES = ("host_loop", "host_between")
HOST_CALLS = 2000  # in a loop of 50 calls without warm-up, a call takes twice as long

# Methods that users call eagerly. Host times of other methods are not measured.
EAGER_METHODS = ("graphar", "graphar_symmetric", "nccl", "symm_one_shot", "symm_two_shot", "vllm", "vllm_unregistered")
EAGER_METHODS += ("sglang_one_shot_push", "sglang_two_shot_push", "sglang_two_shot_pull")


@dataclass(frozen=True)
class Case:
    """One all-reduce to measure.

    Attributes:
        form: "process": one process for each rank. "list": one process with a tensor for each rank.
        mode: "graph": a replayed CUDA graph of independent operations. "chain": a replayed CUDA graph in which each
            operation reads the previous result. "eager": one call after another. "host_loop": host time of calls in a
            loop. "host_between": host time of calls that each follow an operation of torch. "cpu": eager calls on CPU
            tensors.
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
        """The number of operations in one timed repeat."""
        if self.mode in HOST_MODES:
            return HOST_CALLS
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
    """The cases to measure with one number of ranks.

    Attributes:
        dtypes: the first dtype is measured at every size with every method. The others are measured at a few sizes.
        methods: names from perf/peers/catalogue.py.
        full: whether the sizes of TOKENS and the other dtypes are measured too.
        variants: the methods that are measured only to check that "auto" takes the fastest algorithm.
    """

    device: str
    world_size: int
    form: str
    dtypes: tuple[str, ...]
    methods: tuple[str, ...]
    max_nbytes: int
    full: bool = True
    variants: tuple[str, ...] = ()

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
        """Whether a method is measured in a case, if it can run the case."""
        is_extra = case.dtype != self.dtypes[0] or (case.nbytes in BACKEND_SIZES and case.nbytes not in SIZES)
        if is_extra and method not in PLAIN_METHODS:
            return False
        if method in self.variants:
            return case.mode == "graph" and case.nbytes in SIZES and may_be_fastest(method, case)
        if method == "graphar_out":
            return case.mode in HOST_MODES
        return case.mode not in ("eager", *HOST_MODES) or method in EAGER_METHODS or method.startswith("graphar:")

    def row_count(self) -> int:
        """Returns the number of rows. Limits of single methods are not taken into account."""
        return sum(self.takes_part(method, case) for case in self.cases() for method in self.methods)

    def case(self, mode: str, nbytes: int, dtype: str | None = None) -> Case:
        return Case(self.world_size, self.form, mode, dtype or self.dtypes[0], nbytes)

    def up_to_max(self, sizes: tuple[int, ...]) -> list[int]:
        return [size for size in sizes if size <= self.max_nbytes]

    def _modes(self, nbytes: int) -> list[str]:
        if self.device == "cpu":
            return ["cpu"]
        modes = {"graph": True, "chain": nbytes <= CHAIN_MAX_NBYTES, "eager": nbytes in EAGER_SIZES} | dict.fromkeys(
            HOST_MODES, nbytes == SIZES[0]
        )
        return [mode for mode, wanted in modes.items() if wanted]


@dataclass(frozen=True)
class SizesPlan(Plan):
    """A plan with the named sizes alone, each measured with every method in one mode."""

    sizes: tuple[int, ...] = ()

    def cases(self) -> Iterator[Case]:
        for nbytes in self.sizes:
            yield self.case(self._modes(nbytes)[0], nbytes)

    def takes_part(self, method: str, case: Case) -> bool:
        return method != "graphar_out"


def may_be_fastest(method: str, case: Case) -> bool:
    """Whether tuning tables can choose a variant's algorithm at the case's size."""
    row = Algorithm(method.removeprefix("graphar:")).row
    limit = row.limit(case.world_size)
    return row.smallest_nbytes <= case.nbytes and (limit is None or case.nbytes <= limit)


def token_sizes(dtype: str) -> tuple[int, ...]:
    return tuple(tokens * HIDDEN * ITEMSIZES[dtype] for tokens in TOKENS)


@dataclass(frozen=True)
class Utilisation:
    """The bytes that one GPU sent over NVLink, and the bytes that it had to send. A ratio to zero is None.

    Attributes:
        must_send_nbytes: the bytes that the operations must send at least.
        data_tx_nbytes: the payload that the links sent.
        raw_tx_nbytes: the payload and protocol overhead that the links sent.
        payload_efficiency: must_send / data_tx; below 1 if more was sent than necessary.
        protocol_overhead: raw_tx / data_tx - 1.
        link_balance: data_tx of the least loaded link / data_tx of the most loaded link; 1 is even.
        raw_share: raw_tx / the bytes that the links' raw rate allows in that time; None if the rate or time is unknown.
    """

    must_send_nbytes: int
    data_tx_nbytes: int
    raw_tx_nbytes: int
    payload_efficiency: float | None
    protocol_overhead: float | None
    link_balance: float | None
    raw_share: float | None


@dataclass(frozen=True)
class Row(Timing):
    """The measured and verified time of one method in one case.

    Attributes:
        algorithm: the algorithm that graphar.explain names; None for a peer.
        quantised: whether the method sends fewer bits than its input has. Exact methods are not compared with it.
        algbw, busbw: GB/s (1e9 bytes) at the median time, as nccl-tests defines them.
        nvlink: the traffic of the first rank's links during one replay; None if it was not counted.
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
    """The bandwidth of a GPU's links in one direction, in GB/s (1e9 bytes), while all ranks push to all others."""

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
    """Returns the row of a method. ``times_us`` has the time of one operation in each repeat."""
    time_us = spread(times_us)
    where = case.nbytes, case.dtype, case.world_size, case.mode, case.form
    rates = bandwidths("allreduce", case.nbytes, case.world_size, time_us["median"])
    return Row("allreduce", method, algorithm, quantised, *where, time_us, *rates, wrong, nvlink)
