"""Config: the algorithm and launch configuration of a call; and the kernel that it launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.plan.algorithms import WITHOUT_KERNEL, Algorithm
from graphar.plan.call import Call
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
    direct: bool = False  # whether the kernel is the direct variant, for symmetric tensors
    cluster: int = 1  # the blocks of a thread block cluster


FALLBACK, HIERARCHICAL = (Config(WITHOUT_KERNEL[across_hosts], 0, 0) for across_hosts in (False, True))


class Kernel(NamedTuple):
    """What a kernel is compiled and loaded by."""

    algorithm: Algorithm
    dtype: torch.dtype  # the dtype of the elements; BYTE if the kernel only moves data
    direct: bool = False  # whether it is the direct variant, for symmetric tensors
    codec: Codec | None = None  # the codec on the wire
    epilogue: Pointwise | None = None
    template: str | None = None  # the template arguments by the call's work

    @property
    def key(self) -> tuple:
        """The key of the loaded kernel. The seed of a codec and the columns of an epilogue are not part of it."""
        codec = self.codec and self.codec.type_name
        epilogue = self.epilogue and self.epilogue.kernel
        return self.algorithm, self.dtype, self.direct, codec, epilogue, self.template


def kernel_of(config: Config, call: Call) -> Kernel:
    """Returns the kernel that a call launches."""
    element = BYTE if BYTE in config.algorithm.row.dtypes else call.dtype
    work = call.work
    return Kernel(config.algorithm, element, config.direct, call.wire, work.epilogue, template_of(work, config.cluster))
