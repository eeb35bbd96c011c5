"""Calls that graphar's kernels do not serve: over the process group, host by host, or within this process."""

from __future__ import annotations

import itertools
import threading
from functools import partial

import torch

from graphar.plan.call import Call
from graphar.plan.config import HIERARCHICAL, Config
from graphar.plan.work import Exchange, Parts, Sum
from graphar.ranks.cpu import fallback
from graphar.ranks.cpu.fallback import Run
from graphar.ranks.cpu.reduction import CoderOf
from graphar.ranks.cpu.transport import Group, InProcess
from graphar.ranks.group_calls import GroupCalls
from graphar.ranks.groups import known_group
from graphar.ranks.hierarchical import Hierarchy
from graphar.ranks.rendezvous import Ranks


class WithoutKernels:
    """The calls of one communicator without kernels. ``coder_of`` makes what encodes for calls with a codec."""

    def __init__(self, communicator: Ranks, hierarchy: Hierarchy, coder_of: CoderOf) -> None:
        self._communicator, self._hierarchy, self._coder_of = communicator, hierarchy, coder_of
        self._group_calls: GroupCalls | None = None  # made at first use
        self._making = threading.Lock()
        self._quantized_calls = itertools.count()  # kernels count their own calls

    def bind(self, call: Call[Sum | Parts | Exchange], x: torch.Tensor, config: Config, timeout_s: float) -> Run:
        """Returns the function of a call whose first tensor is like ``x``."""
        ranks, numbers = self._communicator, self._quantized_calls
        coded = call._replace(dtype=torch.float32) if config is HIERARCHICAL else call  # as sums of hosts are
        coder = self._coder_of(coded, call.wire, ranks.devices) if call.wire else None
        if ranks.devices:
            return fallback.bind(call, InProcess(ranks.world_size), timeout_s, numbers, coder)
        calls = self.group_calls()
        if config is HIERARCHICAL:
            run = self._hierarchical(call, timeout_s)
        else:
            messages = calls.messages if x.device.type == "cpu" else None
            run = fallback.bind(call, messages or Group(known_group(ranks.group)), timeout_s, numbers, coder)
        return calls.bind(call, x, timeout_s, run, config.algorithm)

    def group_calls(self) -> GroupCalls:
        """Returns the calls over the process group. The first call makes them."""
        ranks = self._communicator
        with self._making:
            self._group_calls = self._group_calls or GroupCalls(known_group(ranks.group), ranks.rendezvous())
            return self._group_calls

    def _hierarchical(self, call: Call, timeout_s: float) -> Run:
        by_op = {"allreduce": self._hierarchy.allreduce, "reducescatter": self._hierarchy.reducescatter}
        compute = partial(by_op[call.op], timeout_s=timeout_s, codec=call.wire)
        return lambda ranks: compute(ranks[0].inputs[0], ranks[0].outputs[0])

    def let_go_of_group(self) -> None:
        """Drops the process group. Calls over it fail from now on."""
        if self._group_calls:
            self._group_calls.let_go_of_group()
        self._group_calls = None
