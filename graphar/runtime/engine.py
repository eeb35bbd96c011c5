"""Engine: runs the calls of one communicator. It finds the plan of a call, or has it made, and runs it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch._C._autograd import _profiler_enabled as _is_profiling

from graphar.errors import Reason
from graphar.plan import select
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.explanation import Explanation
from graphar.plan.select import Facts
from graphar.plan.tables import Table
from graphar.plan.work import ALLGATHER_MATMUL, MOVING
from graphar.ranks import agreement
from graphar.runtime import multicast
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.life import NOT_MADE, Life
from graphar.runtime.plan import Plan
from graphar.runtime.watch import hook
from graphar.runtime.watch.kineto import ranks_of
from graphar.runtime.watch.stats import Stats

_log = logging.getLogger(__name__)

Binder = Callable[["Engine", Call, Sequence[Operands]], Plan]  # makes the plan of a call with these operands

binders: dict[type, Binder] = {}  # by the kind of work


class Engine(Life):
    """Runs the calls of one communicator: looks a call's plan up, makes it if there is none, and runs it."""

    _has_said = False  # whether the log says how calls are made

    def run(self, call: Call, ranks: Sequence[Operands]) -> Plan | None:
        """Makes a call, with the operands of each rank of this process. Collective.

        The op has checked the operands. Returns the call's plan if it was cached, and neither a sink nor torch's
        profiler is active; else None.
        """
        plan = self.warm.get(call)
        if plan is not None and not _is_profiling():
            plan.served.looked_up += 1
            plan.run(ranks)
            return plan
        self.check_open(call.op)  # a suspended engine has no warm plan
        with hook.around(self, call, ranks):
            plan = self.plan(call, ranks)
            plan.served.looked_up += 1
            plan.run(ranks)
        return None

    def plan(self, call: Call, ranks: Sequence[Operands]) -> Plan:
        """Returns the cached plan of a call with these operands, or a new plan. Making a plan is collective."""
        plan = self.plans.get(call)
        if plan is None:
            algorithm = "auto" if call.work.codec else call.algorithm
            call_checks.check_call(call.op, algorithm, call.timeout_s, call.op)
            x = ranks[0].inputs[0]
            takes_any = (
                call.op in (*MOVING, ALLGATHER_MATMUL) or x.dtype != call.dtype
            )  # 8-bit operands have 16-bit results
            (tensor_checks.check_strided if takes_any else tensor_checks.check_tensor)(call.op, "x", x)
            announced = self.runner.announced(agreement.words(call)) if self.runner else contextlib.nullcontext()
            with self.keeping_failure(call.op), announced:
                plan = binders[type(call.work)](self, call, ranks)
            plan = self.plans.keep(call, plan)
            if not self._has_said:
                self._has_said = True
                self._say_how_calls_are_made(plan)
        return plan

    def _say_how_calls_are_made(self, first: Plan) -> None:
        how = f"no kernels: {first.explanation.reason}"
        if self.runner:
            chip, forbidden = self.runner.chip, multicast.why_not(os.environ)
            how = (
                f"kernels for {chip.sms} SMs of {chip.arch}, tuning table {self.table.name}, lossless compression "
                f"{'on' if self.lossless else 'off'}, {forbidden or 'NVLink multicast allowed'}"
            )
        _log.info("communicator of ranks %s: %s", ranks_of(self), how)

    def deadline(self, call: Call) -> float:
        """Returns the deadline of each wait on another rank in a call, in seconds."""
        return call.timeout_s or self.timeout_s

    def use_table(self, table: Table) -> None:
        """Makes later calls go by ``table``."""
        self.table = table
        self.plans.clear()

    def symmetric_sides(self, x, out) -> tuple[str, ...]:
        """Returns which of "input" and "output" of a call lie in symmetric memory."""
        return self.symmetric.sides(x, out) if self.symmetric else ()

    def explain(self, call: Call, x: torch.Tensor) -> Explanation:
        """Returns the algorithm of a call whose first tensor is like ``x``, and why. The first call is collective."""
        return select.explain(call, self.facts(call, x))

    def select(self, call: Call, x: torch.Tensor) -> select.Choice:
        """Returns the configuration of a call whose first tensor is like ``x``. The first call is collective."""
        return select.select(call, self.facts(call, x))

    def stats(self) -> Stats:
        """Returns counts of the calls so far. Not collective."""
        waited_s = self._rendezvous.waited_s if self._rendezvous else 0.0
        launches = self.runner.launches() if self.runner else {}
        failure = self._failure or (self.runner and self.runner.failure())
        calls = self.plans.totals.stats(self.plans.items())
        return Stats(calls, self.plans.made, launches, waited_s, str(failure or "").removeprefix(NOT_MADE))

    def facts(self, call: Call, x: torch.Tensor) -> Facts:
        """Returns the facts that decide on the kernel of a call. The first call is collective.

        A call that names an algorithm without a kernel does not set up this group's kernels.
        """
        needs_none = call.algorithm != "auto" and not Algorithm(call.algorithm).row.layout
        problem = None if needs_none else self.why_no_kernel(call.op, x)
        runner = None if problem else self.runner
        return Facts(
            self.world_size,
            self.table,
            runner.chip if runner else self.table.chip,
            problem,
            runner.kernels.why_no_multicast if runner else lambda: None,
            partial(self.hierarchy.set_up, x),
            self.multimem_stand_in,
            self.lossless,
        )

    def why_no_kernel(self, op: str, x: torch.Tensor) -> Reason | None:
        """Returns why no kernel serves calls of ``op`` with ``x``. The first call is collective."""
        reason = select.why_no_kernel(self.world_size, x.device.type, x.dtype, op)
        if reason or self.find_runner(x.device):
            return reason
        return self.why_no_runner or f"the tensor is on {x.device}"
