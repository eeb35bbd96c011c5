"""Config: the algorithm and launch configuration of a call; the kernel that it launches; and why, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.plan.algorithms import WITHOUT_KERNEL, Algorithm
from graphar.plan.call import Call
from graphar.plan.sizes import format_nbytes
from graphar.plan.work import template_of


@dataclass(frozen=True)
class Config:
    """The algorithm and launch configuration of a call."""

    algorithm: Algorithm
    blocks: int  # thread blocks in the grid; 0 if no kernel of graphar runs
    threads: int  # threads in a block
    # Packs (with a codec tiles) that a block sends to one peer in one step; of two_shot_tma, each channel of a block.
    # 0 for algorithms without chunks.
    chunk: int = 0
    direct: bool = False  # whether the kernel is the direct variant, for symmetric outputs
    cluster: int = 1  # the blocks of a thread block cluster


FALLBACK, HIERARCHICAL = (Config(WITHOUT_KERNEL[across_hosts], 0, 0) for across_hosts in (False, True))


class Kernel(NamedTuple):
    """What a kernel is compiled and loaded by."""

    algorithm: Algorithm
    dtype: torch.dtype  # the dtype of the elements; BYTE if the kernel only moves data
    direct: bool = False  # whether it is the direct variant, for symmetric outputs
    codec: Codec | None = None  # the codec on the wire
    epilogue: Pointwise | None = None
    template: str | None = None  # the template arguments by the call's work

    @property
    def key(self) -> tuple:
        """The key of the loaded kernel. The seed of a codec and the columns of an epilogue are not part of it."""
        codec = self.codec and self.codec.type_name
        epilogue = self.epilogue and self.epilogue.generated.name
        return self.algorithm, self.dtype, self.direct, codec, epilogue, self.template


def kernel_of(config: Config, call: Call) -> Kernel:
    """Returns the kernel that a call launches."""
    element = BYTE if BYTE in config.algorithm.row.dtypes else call.dtype
    work = call.work
    return Kernel(config.algorithm, element, config.direct, call.wire, work.epilogue, template_of(work, config.cluster))


@dataclass(frozen=True)
class Explanation:
    """The algorithm and grid of a call, the reason for them, and the expected time.

    Attributes:
        algorithm: the algorithm's name.
        blocks: thread blocks on each GPU; 0 if no kernel of graphar runs.
        threads: threads in a block; 0 if no kernel of graphar runs.
        reason: why this algorithm is chosen.
        expected_us: expected microseconds inside a CUDA graph, from the measurements in the tuning table. None if there
            are none, if no kernel runs, if the caller named an algorithm, if symmetric tensors save a copy, with an
            epilogue, and with lossless compression, whose time depends on the data.
        exact_us: for a call with a codec, the expected microseconds without any compression, inside a CUDA graph. None
            for other calls, and if there are no measurements.
        scratch_nbytes: bytes of scratch on each GPU, which all calls by this algorithm share; 0 if no kernel runs.
    """

    algorithm: str
    blocks: int
    threads: int
    reason: str
    expected_us: float | None = None
    exact_us: float | None = None
    scratch_nbytes: int = 0

    def __str__(self) -> str:
        """One line: algorithm, grid, expected time, reason and scratch; with a codec also whether it is faster."""
        grid = f"{self.blocks} blocks of {self.threads}" if self.blocks else ""
        time = f"about {format_us(self.expected_us)} us" if self.expected_us is not None else ""
        scratch = f"; {format_nbytes(self.scratch_nbytes)} of scratch on each GPU" if self.scratch_nbytes else ""
        detail = ", ".join(part for part in (grid, time) if part)
        gain = ""
        if self.expected_us is not None and self.exact_us is not None:
            word = "faster" if self.expected_us < self.exact_us else "slower"
            gain = f"; {word} than exact: {time} instead of {format_us(self.exact_us)} us"
        return f"{self.algorithm}{f' ({detail})' if detail else ''}: {self.reason}{gain}{scratch}"


def format_us(us: float) -> str:
    """Returns microseconds as text: with one decimal below 100, else with none."""
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"
