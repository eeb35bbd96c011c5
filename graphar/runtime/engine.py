"""Engine: one communicator. It makes calls by plans that it finds or makes; it is suspended, resumed and closed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled as _is_profiling

from graphar.errors import CollectiveTimeout, CommunicatorError, GrapharError, Reason, UnsupportedError
from graphar.plan import select
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Explanation
from graphar.plan.scratch import MAX_RANKS
from graphar.plan.select import Facts
from graphar.plan.tables import DEFAULT, Table, shipped_table
from graphar.plan.work import ALLGATHER_MATMUL, MOVING
from graphar.ranks import agreement
from graphar.ranks.capture import check_can_prepare, check_not_capturing
from graphar.ranks.cpu.without_kernels import WithoutKernels
from graphar.ranks.groups import device_of_process, known_group
from graphar.ranks.hierarchical import Hierarchy
from graphar.ranks.rendezvous import Alone, RanksAbsent, StoreRendezvous, exchange_json, meet
from graphar.runtime.availability import missing_software
from graphar.runtime.bind.local_codec import coder_of
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.memory import multicast
from graphar.runtime.memory.suspension import Suspension
from graphar.runtime.memory.symmetric_tensors import SymmetricTensors
from graphar.runtime.plan import Plan, Plans
from graphar.runtime.runner import Runner, set_up
from graphar.runtime.watch import hook
from graphar.runtime.watch.stats import Memory, Stats, memory_of

_log = logging.getLogger(__name__)

_MAX_PLANS = 4096  # a plan has a few hundred bytes
LOSSLESS_SWITCH = "GRAPHAR_LOSSLESS"
NOT_MADE = (
    "this call was not made: an earlier one of its communicator failed, as told below; go on with another communicator "
    "in a new process group, as graphar.allreduce(x, dist.new_group()) does\n"
)
NAME_PREFIX = "graphar:"  # no name of a process group begins with this prefix
_names = itertools.count()
open_engines: dict[str, Engine] = {}  # by name; an engine stays here until it is closed

binders: dict[type, Callable[[Engine, Call, Sequence[Operands]], Plan]] = {}  # make plans, by the kind of work


class Engine:
    """One communicator, with the arguments of :class:`graphar.Communicator`: its calls, its failures and its end."""

    # Tests set it before the first call: multimem kernels then use ordinary accesses and need no multicast.
    multimem_stand_in = False
    _has_said = False  # whether the log says how calls are made

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        devices: tuple[torch.device, ...] | None,
        timeout_s: float,
        hosts: list[list[int]] | None = None,
        lossless: bool | None = None,
    ) -> None:
        self.lossless, self.timeout_s = compresses(lossless), float(timeout_s)
        self.name = f"{NAME_PREFIX}{next(_names)}"
        self.group, self.devices = group, devices
        self.world_size = len(devices) if devices else known_group(group).size()
        self.rank = None if devices else known_group(group).rank()  # with devices, this process has all ranks
        self.hierarchy = Hierarchy(self, hosts, self._part)
        self.is_part = False  # whether another engine uses it for the ranks of one host
        self._making = threading.RLock()  # held to make what threads must not make twice
        self.runner: Runner | None = None
        self.why_no_runner: Reason | None = None  # set when a set-up found that kernels cannot run
        self.table: Table = shipped_table(DEFAULT)  # rank 0's once kernels are set up
        self.symmetric: SymmetricTensors | None = None  # the runner's symmetric tensors, from the first one on
        self.closed = self.suspended = False
        self._suspension: Suspension | None = None  # while an engine with kernels is suspended, what resumes it
        self.plans = Plans(_MAX_PLANS)
        self._rendezvous: StoreRendezvous | None = None  # made at first use
        self._failure: GrapharError | None = None  # the host's error that ended this engine; kernels report theirs
        self.without_kernels = WithoutKernels(self, self.hierarchy, coder_of)
        self.find_warm_plans()
        open_engines[self.name] = self

    def _part(self, inside: dist.ProcessGroup, timeout_s: float) -> Engine:
        part = Engine(inside, None, timeout_s, lossless=self.lossless)
        part.is_part = True
        return part

    def run(self, call: Call, ranks: Sequence[Operands]) -> Plan | None:
        """Makes a call, with the checked operands of each rank of this process. Collective.

        Returns the call's plan if it was cached, and neither a sink nor torch's profiler is active; else None.
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
            any_dtype = call.op in (*MOVING, ALLGATHER_MATMUL) or x.dtype != call.dtype  # 8 bits have 16-bit results
            (tensor_checks.check_strided if any_dtype else tensor_checks.check_tensor)(call.op, "x", x)
            announced = self.runner.announced(agreement.words(call)) if self.runner else contextlib.nullcontext()
            with self.keeping_failure(call.op), announced:
                plan = binders[type(call.work)](self, call, ranks)
            if not self._has_said:
                self._has_said = True
                self._say_how_calls_are_made(plan)
            plan = self.plans.keep(call, plan)
        return plan

    def _say_how_calls_are_made(self, first: Plan) -> None:
        how = f"no kernels: {first.reason}"
        if self.runner:
            chip, forbidden = self.runner.chip, multicast.why_not(os.environ)
            how = f"kernels for {chip.sms} SMs of {chip.arch}, tuning table {self.table.name}, lossless compression "
            how += f"{'on' if self.lossless else 'off'}, {forbidden or 'NVLink multicast allowed'}"
        _log.info("communicator of ranks %s: %s", hook.ranks_of(self), how)

    def deadline(self, call: Call) -> float:
        return call.timeout_s or self.timeout_s

    def use_table(self, table: Table) -> None:
        self.table = table
        self.plans.clear()

    def is_symmetric(self, out: torch.Tensor | Sequence[torch.Tensor]) -> bool:
        """Whether an output, or one for each rank of this process, lies in symmetric memory."""
        return self.symmetric is not None and self.symmetric.hold(out)

    def explain(self, call: Call, x: torch.Tensor) -> Explanation:
        """Returns the algorithm of a call whose first tensor is like ``x``, and why. The first call is collective."""
        return select.explain(call, self.facts(call, x))

    def select(self, call: Call, x: torch.Tensor) -> select.Choice:
        """Returns the configuration of a call whose first tensor is like ``x``. The first call is collective."""
        return select.select(call, self.facts(call, x))

    def stats(self) -> Stats:
        waited_s = self._rendezvous.waited_s if self._rendezvous else 0.0
        launches = self.runner.launches() if self.runner else {}
        failure = self._failure or (self.runner and self.runner.failure())
        return Stats(self.plans.calls(), self.plans.made, launches, waited_s, str(failure or "").removeprefix(NOT_MADE))

    def facts(self, call: Call, x: torch.Tensor) -> Facts:
        """Returns the facts that decide on the kernel of a call. The first call is collective."""
        # A call that names an algorithm without a kernel does not set up this group's kernels.
        needs_none = call.algorithm != "auto" and not Algorithm(call.algorithm).row.layout
        problem = None if needs_none else self.why_no_kernel(call.op, x)
        runner, hosts = None if problem else self.runner, partial(self.hierarchy.set_up, x)
        chip, why_not = (runner.chip, runner.why_no_multicast) if runner else (self.table.chip, lambda: None)
        return Facts(self.world_size, self.table, chip, problem, why_not, hosts, self.multimem_stand_in, self.lossless)

    def why_no_kernel(self, op: str, x: torch.Tensor) -> Reason | None:
        """Returns why no kernel serves calls of ``op`` with ``x``. The first call is collective."""
        reason = select.why_no_kernel(self.world_size, x.device.type, x.dtype, op)
        if reason or self.find_runner(x.device):
            return reason
        return self.why_no_runner or f"the tensor is on {x.device}"

    def first_device(self) -> torch.device:
        return self.devices[0] if self.devices else device_of_process(known_group(self.group))

    def find_runner(self, device: torch.device) -> bool:
        """Whether graphar's kernels reach all ranks. The first call sets them up, and is collective."""
        if device.type == "cuda" and self.runner is None and not self.why_no_runner:
            if self.world_size == 1 or self.world_size > MAX_RANKS:
                self.why_no_runner = f"kernels serve 2 to {MAX_RANKS} ranks, not {self.world_size}"
            else:
                self._set_up(device)
        if self.runner and self.group and device.index != (index := self.runner.members[0].device):
            raise ValueError(f"graphar: this rank's communicator is on cuda:{index}, got {device}")
        return self.runner is not None

    def _set_up(self, device: torch.device) -> None:
        check_can_prepare("this communicator", self.devices or [device])
        with self._making:
            if self.runner or self.why_no_runner:  # by another thread meanwhile
                return
            try:
                self.rendezvous().agree_on_none("set-up", missing_software())
                self.runner, self.table = set_up(self, device, self.lossless, self.multimem_stand_in)
            except UnsupportedError as error:
                self.why_no_runner = str(error)

    def rendezvous(self) -> StoreRendezvous:
        """Returns the rendezvous of the ranks' processes. The first call makes it."""
        with self._making:
            if self._rendezvous is None:
                self._rendezvous = Alone() if self.devices else meet(known_group(self.group), self.timeout_s)
            return self._rendezvous

    def find_warm_plans(self) -> None:
        """Sets ``warm``, the plans that ops may run directly: none while there is a sink or a suspension."""
        self.warm = Plans(0) if hook.sinks or self.suspended else self.plans

    def keeping_failure(self, op: str = "graphar") -> KeepingFailure:
        return KeepingFailure(self, op)

    def check_open(self, op: str = "graphar") -> None:
        """Raises CommunicatorError with the ``op`` if the engine is closed or suspended. torch.compile traces it."""
        if self.closed:
            raise closed(op)
        if self.suspended:
            raise CommunicatorError(f"{op}: this communicator is suspended; call its resume() on every rank before")

    def keep_failure(self, error: GrapharError) -> None:
        self._failure = error.again(NOT_MADE)

    def synchronize(self) -> None:
        """Waits for all work on this process's devices, and raises the errors that kernels reported."""
        if self.hierarchy.kernels:
            self.hierarchy.kernels.synchronize()
        if self.runner:
            self.runner.synchronize()

    def common_order(self) -> str | None:
        """Returns a key by which all ranks sort engines alike; None if other ranks may not have this engine yet."""
        if self.devices:
            return ""
        # A rank may make an engine alone, as an explanation does. Once all ranks have met, all of them have it.
        return self._rendezvous.prefix if self._rendezvous and self._rendezvous.has_met else None

    def is_usable(self) -> bool:
        """Whether calls can be made, or can after a resumption."""
        failed = self._failure or (self.runner and not self.suspended and self.runner.failure())
        return not (self.closed or failed)

    def why_stays(self) -> Reason | None:
        """Returns why memory of this process cannot be given back while its addresses stay."""
        reason = self.runner.memory.why_stays if self.runner else None
        inside = self.hierarchy.kernels.why_stays() if self.hierarchy.kernels else None
        return reason or (inside and f"inside a host, {inside}")

    def suspend(self, keep: str | None) -> None:
        """Gives shared memory back. Collective. If work does not end on a rank, all ranks stay as they are."""
        if self.suspended:
            return
        with self.keeping_failure("suspend"):
            everyone = exchange_json(self.rendezvous(), "suspend", [str(keep), self.why_stays() or ""])
            kept, reasons = zip(*everyone, strict=True)
            if len(set(kept)) > 1:
                raise CommunicatorError(f"suspend: ranks must pass the same keep, got, in rank order, {[*kept]}")
            if reason := next(filter(None, reasons), ""):
                raise UnsupportedError(f"suspend: this memory cannot be given back while its addresses stay: {reason}")
            self.end_work(keep)
            self.give_back()

    def end_work(self, keep: str | None) -> None:
        """Ends all ranks' work, and saves what to keep: the first half of :meth:`suspend`. Collective."""
        with self.keeping_failure("suspend"):
            self.hierarchy.in_hosts("ending all work", lambda engine: engine.end_work(keep))
            if self.runner:
                self._suspension = Suspension(self.runner, keep == "symmetric")

    def give_back(self) -> None:
        """Gives memory back once all work has ended: the second half of :meth:`suspend`. Collective."""
        with self.keeping_failure("suspend"):
            self.set_suspended(True)
            self.hierarchy.in_hosts("giving memory back", lambda engine: engine.give_back())
            if self._suspension:
                self._suspension.give_back()

    def resume(self) -> None:
        """Brings the memory back, and lets calls be made again. Collective."""
        if self.closed:
            raise closed("resume")
        if not self.suspended:
            return
        if self._failure:
            raise self._failure.again()
        try:
            self.rendezvous().exchange("resume", b"")
            self.hierarchy.in_hosts("restoring memory", lambda engine: engine.resume())
            if self._suspension:
                self._suspension.resume()
        except RanksAbsent as error:
            self.keep_failure(error)
            raise
        self._suspension = None
        self.set_suspended(False)

    def set_suspended(self, suspended: bool) -> None:
        """Refuses or accepts calls. Not collective: an engine that some rank does not have holds no memory."""
        self.suspended = suspended
        self.find_warm_plans()

    def memory(self) -> Memory:
        return memory_of(self.runner.regions, self.runner.symmetric.buffers) if self.runner else memory_of({}, [])

    def close(self) -> None:
        """Frees the memory shared with other ranks, but for what an absent rank may still use. Collective."""
        if self.closed:
            return
        if self.runner:
            check_not_capturing("close", [member.device for member in self.runner.members])
        open_engines.pop(self.name, None)
        self.closed = True
        self.plans.clear()
        with contextlib.ExitStack() as ends:
            ends.callback(self.let_go_of_group)
            ends.callback(self.hierarchy.close)
            if self._suspension:
                self._suspension.end()
            if self.runner:
                self.runner.close()

    def let_go_of_group(self) -> None:
        """Drops the process group and its store. Later calls fail; memory and captured graphs stay valid."""
        if not self.closed:  # closing is no failure
            self._failure = self._failure or CommunicatorError("the process group of this communicator was destroyed")
        self.plans.clear()
        self.hierarchy.let_go_of_groups()
        if self._rendezvous:
            self._rendezvous.leave()
        self.without_kernels.let_go_of_group()
        self.group = None

    def __deepcopy__(self, memo: dict) -> Engine:  # a copied model has the same ranks
        return self


def runner_of(engine: Engine) -> Runner:
    """Returns the runner of an engine. It has a runner, since a kernel was chosen for the call."""
    assert engine.runner
    return engine.runner


class KeepingFailure(contextlib.ContextDecorator):
    """Checks that calls can be made, and keeps a failure of the code inside or of the decorated function, for later."""

    def __init__(self, engine: Engine, op: str) -> None:
        self._engine, self._op = engine, op

    def __enter__(self) -> None:
        """Raises as check_open does, or raises an earlier failure again. Launches of kernels do so, too."""
        self._engine.check_open(self._op)
        if self._engine.runner:
            self._engine.runner.raise_failure()
        if self._engine._failure:
            raise self._engine._failure.again()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, (CollectiveTimeout, RanksAbsent)):
            self._engine.keep_failure(error)


def _find_warm_plans() -> None:
    for engine in [*open_engines.values()]:  # another thread may add one
        engine.find_warm_plans()


hook.when_changed.append(_find_warm_plans)


def closed(op: str) -> CommunicatorError:
    return CommunicatorError(
        f"{op}: this communicator is closed; make another, and whatever was compiled or captured with this one again"
    )


def compresses(lossless: bool | None) -> bool:
    """Returns ``lossless``; if it is None, False if the environment has GRAPHAR_LOSSLESS=0, else True."""
    return os.environ.get(LOSSLESS_SWITCH) != "0" if lossless is None else lossless
