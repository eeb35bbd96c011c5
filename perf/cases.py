"""What is measured: sizes, modes and repetitions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from graphar.plan.sizes import GB, KB, MB

ITEMSIZES = {"bfloat16": 2, "float16": 2, "float32": 4}
SIZES = (2 * KB, 8 * KB, 32 * KB, *(64 * KB << step for step in range(16)))
CHAIN_MAX_NBYTES = 16 * MB
EAGER_SIZES = (2 * KB, 64 * KB, MB, 16 * MB)
CPU_MAX_NBYTES = 16 * MB
QUANTISED_MIN_NBYTES = 256 * KB

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
        methods: names from perf/catalogue.py.
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
        for nbytes in self._up_to_max(SIZES):
            for mode in self._modes(nbytes):
                yield self._case(mode, nbytes)
        if self.form == "process":
            for nbytes in self._up_to_max(BACKEND_SIZES):
                if nbytes not in SIZES:
                    yield self._case(self._modes(nbytes)[0], nbytes)
        if self.full and self.device == "cuda":
            for nbytes in self._up_to_max(token_sizes(self.dtypes[0])):
                if nbytes not in SIZES:
                    yield self._case("graph", nbytes)
        if self.full:
            for dtype in self.dtypes[1:]:
                for nbytes in self._up_to_max(DTYPE_SIZES):
                    yield self._case(self._modes(nbytes)[0], nbytes, dtype)

    def takes_part(self, method: str, case: Case) -> bool:
        """Whether a method is measured in a case, if it can serve it."""
        is_extra = case.dtype != self.dtypes[0] or (case.nbytes in BACKEND_SIZES and case.nbytes not in SIZES)
        if is_extra and method not in PLAIN_METHODS:
            return False
        return case.mode not in ("eager", "host") or method in EAGER_METHODS or method.startswith("graphar:")

    def row_count(self) -> int:
        """How many rows the plan yields if no method's own limit cuts it short."""
        return sum(self.takes_part(method, case) for case in self.cases() for method in self.methods)

    def _case(self, mode: str, nbytes: int, dtype: str | None = None) -> Case:
        return Case(self.world_size, self.form, mode, dtype or self.dtypes[0], nbytes)

    def _up_to_max(self, sizes: tuple[int, ...]) -> list[int]:
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
class QuantisedPlan(Plan):
    """The sizes at which a codec is of interest, in CUDA graphs."""

    def cases(self) -> Iterator[Case]:
        for nbytes in self._up_to_max(SIZES):
            if nbytes >= QUANTISED_MIN_NBYTES:
                yield self._case("graph", nbytes)


@dataclass(frozen=True)
class BackendPlan(Plan):
    """The sizes of BACKEND_SIZES alone: of a world that is measured for their table, and for nothing else."""

    def cases(self) -> Iterator[Case]:
        for nbytes in self._up_to_max(BACKEND_SIZES):
            yield self._case(self._modes(nbytes)[0], nbytes)


def token_sizes(dtype: str) -> tuple[int, ...]:
    """The sizes of TOKENS, in bytes."""
    return tuple(tokens * HIDDEN * ITEMSIZES[dtype] for tokens in TOKENS)
