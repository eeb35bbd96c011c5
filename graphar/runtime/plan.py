"""Plan: what the first of several equal calls is turned into, and all of them run."""

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
    """The kernels that a call launches, or a function that makes the call without kernels.

    Every equal call uses it again. A call with other tensors may need other launches: a matmul's kernels are
    bound to the addresses of its operands.
    """

    # Makes the call with the operands of each rank of this process. Launches on torch's current streams.
    run: Callable[[Sequence[Operands]], None]
    config: Config  # the algorithm, and its launch configuration
    reason: str = ""  # why the call has this algorithm
    # Takes the tensors of this process's only rank. Returns the launch of calls whose tensors differ from these in
    # their addresses only; None if such calls need more than a launch.
    launch_like: Callable[[Operands], Launch | None] = lambda operands: None
    # Takes one rank's operands. Returns in words whose matmul multiplies them, and why. It depends on K, in which equal
    # calls may differ. An empty string: there is no matmul, or it is part of the kernel.
    matmul: Callable[[Operands], str] = lambda operands: ""
    served: Count = Count()  # plans that no engine keeps share a count

    @property
    def explanation(self) -> Explanation:
        """The algorithm and grid of the call and the reason for them, without an expected time."""
        return Explanation(self.config.algorithm.value, self.config.blocks, self.config.threads, self.reason)

    def explain(self, operands: Operands) -> Explanation:
        """Returns the explanation of a call with these operands of one rank, and says whose matmul multiplies them."""
        reason = "; ".join(filter(None, (self.reason, self.matmul(operands))))
        return replace(self.explanation, reason=reason)
