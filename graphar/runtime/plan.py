"""Plan: what a call of any op becomes once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from graphar.plan.call import Operands
from graphar.plan.config import Config
from graphar.plan.explanation import Explanation

Tensors = tuple[torch.Tensor, ...]
# Launches with the parts of one rank's operands, for a caller that has made the rank's device the current one.
Launch = Callable[..., None]  # takes the inputs, outputs and numbers of a rank, and perhaps its Corner


@dataclass(slots=True)
class Count:
    """How many calls a plan has served. Callers add to it directly, since the time of a small call is the host's."""

    looked_up: int = 0  # calls that looked the plan up, or made it
    repeated: int = 0  # calls that repeated its launch


class Plan(NamedTuple):
    """What a call became: the kernel or kernels that it launches, or a function without kernels.

    It is used again for every equal call. A call with other tensors may need other launches: a matmul's kernels are
    bound to the addresses of its operands.
    """

    # Makes the call with the operands of each rank of this process. Launches on torch's current streams.
    run: Callable[[Sequence[Operands]], None]
    config: Config  # the algorithm, and its launch configuration
    reason: str = ""  # why it is this one
    # Returns the launch of calls with tensors like the given ones of this process's only rank, which differ from them
    # in their addresses only; None if such calls need more than that.
    launch_like: Callable[[Operands], Launch | None] = lambda operands: None
    # Returns in words whose matmul multiplies one rank's operands like the given ones, and why. It depends on K, which
    # equal calls may not share. An empty string: none does, or it is part of the kernel.
    matmul: Callable[[Operands], str] = lambda operands: ""
    served: Count = Count()  # plans that no engine keeps share one

    @property
    def explanation(self) -> Explanation:
        """The algorithm and grid of the call and the reason for them, without an expected time."""
        return Explanation(self.config.algorithm.value, self.config.blocks, self.config.threads, self.reason)

    def explain(self, operands: Operands) -> Explanation:
        """Returns the explanation of a call with such operands of one rank, which also says whose matmul multiplies."""
        reason = "; ".join(filter(None, (self.reason, self.matmul(operands))))
        return replace(self.explanation, reason=reason)
