"""Engine: runs the collectives of one communicator. It finds or makes the plan of a call, and runs the plan."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist

from graphar.errors import CollectiveTimeout, CommunicatorError, GrapharError, UnsupportedError
from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.form import Form
from graphar.plan import call_checks, select, tensor_checks
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.explanation import Explanation
from graphar.plan.scratch import MAX_RANKS
from graphar.plan.select import Facts
from graphar.plan.slices import slices
from graphar.plan.tables import DEFAULT, Table, shipped_table
from graphar.ranks import fallback
from graphar.ranks.capture import check_not_capturing
from graphar.ranks.debug import Comparison
from graphar.ranks.group_calls import GroupCalls
from graphar.ranks.groups import device_of_process
from graphar.ranks.hierarchical import Hierarchy
from graphar.ranks.rendezvous import Alone, RanksAbsent, StoreRendezvous, meet
from graphar.runtime.availability import missing_software
from graphar.runtime.bounded_cache import BoundedCache

_MAX_PLANS = 4096  # a plan has a few hundred bytes
LOSSLESS_SWITCH = "GRAPHAR_LOSSLESS"
NAME_PREFIX = "graphar:"  # no name of a process group begins with this prefix

Plan = Callable[..., None]  # takes a call's input, its output, and the tensors of its options
# Takes the input of a call, its output or None, its algorithm and its deadline.
Repeat = Callable[[torch.Tensor, torch.Tensor | None, str, float | None], torch.Tensor | None]
Watcher = Callable[..., None]  # takes an engine, a call, its input, a note, and the function that makes the call

open_engines: dict[str, Engine] = {}  # by name; an engine stays here until it is closed
profilers: list[Watcher] = []  # watch the calls of all engines
_names = itertools.count()
T = TypeVar("T")

_log = logging.getLogger(__name__)


class Plans(BoundedCache[Plan]):
    """A cache of plans by call.

    Attributes:
        repeats: functions that repeat a call by a plan, by the number of elements. Dropped with the plans: there is a
            new cache from then on, and a thread that is about to add a repeat of a dropped plan adds it to the old one.
        unrepeated: a count of the calls that could be repeated, but were not.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__(max_entries)
        self.repeats: BoundedCache[Repeat] = BoundedCache()
        self.unrepeated = 0

    def clear(self) -> None:
        self.repeats = BoundedCache()
        super().clear()


class Engine:
    """Runs the collectives of one communicator.

    Args:
        group: the process group, whose ranks are processes; None with ``devices``.
        devices: the devices of this process's ranks: CUDA devices, or the CPU once for each rank.
        timeout_s: the deadline of every wait on another rank, in seconds.
        debug: whether ranks compare each call before they make it.
        hosts: the ranks of each host, for the hierarchical algorithm; None: found by the processes.
        lossless: whether "auto" may compress bf16 without loss; None: unless the environment has GRAPHAR_LOSSLESS=0.

    Attributes:
        plans: a cache of plans by call.
        warm: the plans that an op may run directly: ``plans``, or an empty cache while a watcher is active.
        table: the tuning table that choices go by: the default one, and rank 0's after kernels are set up.
    """

    # Tests set it before the first call: multimem kernels then use ordinary accesses and need no multicast.
    multimem_stand_in = False

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        devices: tuple[torch.device, ...] | None,
        timeout_s: float,
        debug: bool = False,
        hosts: list[list[int]] | None = None,
        lossless: bool | None = None,
    ) -> None:
        self.lossless = compresses(lossless)
        self.timeout_s = float(timeout_s)
        self.name = f"{NAME_PREFIX}{next(_names)}"
        self.group, self.devices = group, devices
        self.world_size = len(devices) if devices else group.size()
        self.rank = None if devices else group.rank()  # with devices, this process has all ranks
        self.hierarchy = Hierarchy(
            self, hosts, lambda inside, seconds: Engine(inside, None, seconds, lossless=self.lossless)
        )
        self.runner = None
        self.why_no_runner = ""  # set when a set-up found that kernels cannot run
        self.table: Table = shipped_table(DEFAULT)
        self.symmetric = None  # the runner's symmetric tensors, from the first one on
        self.closed = False
        self.plans = Plans(_MAX_PLANS)
        self._attached: dict[type, object] = {}
        self._rendezvous: StoreRendezvous | None = None  # made at first use
        self._group_calls: GroupCalls | None = None
        self._quantized_calls = itertools.count()  # calls of the fallback; kernels count their own calls
        self._failure: GrapharError | None = None  # the host's error that ended this engine; kernels report theirs
        self._comparison = Comparison(self) if debug and group and self.world_size > 1 else None
        self.find_watchers()
        open_engines[self.name] = self

    # ---- calls ------------------------------------------------------------------------------------------------------

    def run(self, call: Call | tuple, x, out, *more) -> None:
        """Makes a call. Collective.

        Args:
            call: the call, or its fields as a bare tuple. The op has checked its tensors, which are contiguous.
            x, out: this rank's input and output; lists with one for each rank if the engine has devices.
            more: the inputs of the call's epilogue, or the tensor to prefetch; lists if ``x`` is a list.
        """
        plan = self.warm.get(call)
        if plan is not None:
            plan(x, out, *more)
            return
        call = Call(*call)
        first = x if self.devices is None else x[0]

        def run_planned() -> None:
            (self.plans.get(call) or self._plan(call, first))(x, out, *more)

        says_places = self._comparison and self.symmetric and call.op == "allreduce"
        self.watch(call, x, run_planned, self.symmetric.describe(x, out) if says_places else "")

    def watch(self, call: Call, x, run: Callable[[], None], note: str = "") -> None:
        """Runs ``run``, which makes the call, inside the watchers: debug mode and profilers.

        ``x`` is the call's input, or a list of inputs. Debug mode compares ``note`` as well.
        """
        watchers = [self._comparison.watch] if self._comparison else []
        for watcher in (*watchers, *profilers):
            run = partial(watcher, self, call, x, note, run)
        run()

    def use_table(self, table: Table) -> None:
        """Makes later calls go by ``table``."""
        self.table = table
        self.plans.clear()

    def find_watchers(self) -> None:
        """Updates ``warm``: ops run plans directly only while there is no watcher."""
        self.warm = Plans(0) if self._comparison or profilers else self.plans

    def symmetric_sides(self, x, out) -> tuple[str, ...]:
        """Returns which of "input" and "output" of a call lie in symmetric memory."""
        return self.symmetric.sides(x, out) if self.symmetric else ()

    def explain(self, call: Call, x: torch.Tensor) -> Explanation:
        """Returns the algorithm of a call whose first tensor is like ``x``, and why. The first call is collective."""
        return select.explain(call, self.facts(call, x))

    def select(self, call: Call, x: torch.Tensor) -> select.Choice:
        """Returns the kernel of a call whose first tensor is like ``x``. The first call is collective."""
        return select.select(call, self.facts(call, x))

    def facts(self, call: Call, x: torch.Tensor) -> Facts:
        """Returns the facts that decide on the kernel of a call. The first call is collective.

        A call that names an algorithm without a kernel does not set up this group's kernels.
        """
        needs_none = call.algorithm in (Algorithm.FALLBACK, Algorithm.HIERARCHICAL)
        problem = "" if needs_none else self.why_no_kernel(call.op, x)
        runner = None if problem else self.runner
        return Facts(
            self.world_size,
            self.table,
            runner.chip if runner else self.table.chip,
            problem,
            runner.why_no_multicast if runner else str,
            partial(self.hierarchy.set_up, x),
            self.multimem_stand_in,
            self.lossless,
        )

    def why_no_kernel(self, op: str, x: torch.Tensor) -> str:
        """Returns why no kernel serves calls of ``op`` with ``x``, or an empty string. The first call is collective."""
        reason = select.why_no_kernel(self.world_size, x.device.type, x.dtype, op)
        if reason or self.find_runner(x.device):
            return reason
        return self.why_no_runner or f"the tensor is on {x.device}"

    def attached(self, kind: type[T]) -> T:
        """Returns this engine's ``kind``, a class of a higher layer. The first call makes it by ``kind(self)``."""
        found = self._attached.get(kind)
        if found is None:
            found = self._attached[kind] = kind(self)
        return found

    # ---- plans ------------------------------------------------------------------------------------------------------

    def _plan(self, call: Call, x: torch.Tensor) -> Plan:
        call_checks.check_call(call.op, "auto" if call.codec else call.algorithm, call.timeout_s)
        (tensor_checks.check_strided if call.op == "allgather" else tensor_checks.check_tensor)(call.op, "x", x)
        with self.keeping_failure():
            plan = self._bind(call, x)
        return self.plans.keep(call, plan)

    def _bind(self, call: Call, x: torch.Tensor) -> Plan:
        if call.codec and call.wire.seed is None:
            call = call._replace(codec=replace(call.wire, seed=secrets.randbits(64)).text)
        shape, reason = self.select(call, x)
        if call.prefetches and not shape.prefetches:
            plain = self._bind(call._replace(prefetches=False), x)
            return lambda x, out, following: plain(x, out)
        chosen = Explanation(shape.algorithm.value, shape.blocks, shape.threads, reason)
        _log.debug("%s: %s", call.agreed, chosen)
        if self.world_size == 1:
            return fallback.alone(call, self.devices is not None)
        if not any(call.parts):
            return self.keeping_failure()(fallback.do_nothing)
        timeout_s = call.timeout_s or self.timeout_s
        if shape.blocks:
            kernel = select.kernel_of(shape, call.dtype)
            self.runner.prepare(kernel)
            columns = call.epilogue.columns if call.epilogue else 1
            launches = slices(shape.algorithm, self.world_size, call.parts, call.dtype.itemsize, columns)
            return self.runner.bind(
                shape, launches, kernel.dtype, timeout_s, self.table.prefetch.budget_nbytes, call.agreed
            )
        if self.devices:
            return self.keeping_failure()(fallback.in_process(call, self._quantized_calls))
        compares = self._comparison is None  # otherwise debug mode compares the calls
        self._group_calls = self._group_calls or GroupCalls(self.group, self.rendezvous(), compares)
        if shape.algorithm is Algorithm.HIERARCHICAL:
            run = partial(self.hierarchy.allreduce, timeout_s=timeout_s, codec=call.wire)
        else:
            run = fallback.over_group(call, self.group, timeout_s, self._quantized_calls)
        return self.keeping_failure()(self._group_calls.bind(call, x, timeout_s, run, shape.algorithm))

    # ---- set-up -----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        ops: Sequence[str],
        dtypes: Iterable[torch.dtype],
        max_nbytes: int | None,
        codecs: Sequence[Codec] = (),
        forms: Sequence[Form] = (),
    ) -> None:
        """Compiles and loads the kernels of later calls of ``ops``, and allocates their scratch. Collective.

        It takes the arguments of graphar.Communicator.prepare, checked.
        """
        added = [dtype for dtype in dtypes if dtype in TYPE_NAMES]
        named = f", codecs {[codec.text for codec in codecs]}" if codecs else ""
        named += f", epilogues {[form.text for form in forms]}" if forms else ""
        with self.keeping_failure():
            self.compare("prepare", f"of {ops} for {added}, max_nbytes {max_nbytes}{named}")
            device = self.first_device()
            if self.find_runner(device):
                facts = Facts(self.world_size, self.table, self.runner.chip, lossless=self.lossless)
                needed = select.needed_kernels(facts, ops, added, max_nbytes, codecs, forms, self.symmetric is not None)
                for kernel in needed:
                    self.runner.prepare(kernel)

    def empty(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Returns an uninitialised symmetric tensor like ``like`` for each rank of this process. Collective."""
        with self.keeping_failure():
            devices = self.devices or (self.first_device(),)
            check_not_capturing("empty", devices)
            self.compare("empty", f"of {list(like.shape)} {like.dtype}")
            if not self.find_runner(devices[0]):
                return [torch.empty_like(like, device=device) for device in devices]
            tensors = self.runner.symmetric.empty(like)
            self.symmetric = self.runner.symmetric
            return tensors

    def first_device(self) -> torch.device:
        """Returns the device of this process's first rank."""
        return self.devices[0] if self.devices else device_of_process(self.group)

    def find_runner(self, device: torch.device) -> bool:
        """Whether graphar's kernels reach all ranks. The first call sets them up, and is collective."""
        if device.type == "cuda" and self.runner is None and not self.why_no_runner:
            if self.world_size == 1 or self.world_size > MAX_RANKS:
                self.why_no_runner = f"kernels serve 2 to {MAX_RANKS} ranks, not {self.world_size}"
            else:
                self._set_up(device)
        if self.runner and self.group and device.index != (own := self.runner.members[0].device):
            raise ValueError(f"graphar: this rank's communicator is on cuda:{own}, got {device}")
        return self.runner is not None

    def _set_up(self, device: torch.device) -> None:
        rendezvous = Alone() if self.devices else self.rendezvous()
        try:
            rendezvous.agree_on_none("set-up", missing_software())
            from graphar.runtime.setup import set_up  # needs cuda-python

            self.runner, self.table = set_up(
                self.group, self.devices, device, rendezvous, self.lossless, self.multimem_stand_in
            )
        except UnsupportedError as error:
            self.why_no_runner = str(error)

    def rendezvous(self) -> StoreRendezvous:
        """Returns the rendezvous of the group's processes. The first call makes it."""
        self._rendezvous = self._rendezvous or meet(self.group, self.timeout_s)
        return self._rendezvous

    def compare(self, what: str, details: str = "") -> None:
        """In debug mode, raises CommunicatorError unless every rank does ``what`` with the same ``details``."""
        if self._comparison:
            self._comparison.compare(what, details)

    # ---- failures and the end ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def keeping_failure(self) -> Iterator[None]:
        """Records a failure of the code inside, which needs all ranks: every later call raises the same error.

        Raises:
            CommunicatorError: the engine is closed.
            GrapharError: the error of an earlier failure.
        """
        self.check_open()
        if self.runner:
            self.runner.raise_failure()
        if self._failure:
            raise self._failure.again()
        try:
            yield
        except (CollectiveTimeout, RanksAbsent) as error:
            self._failure = error.again()
            raise

    def check_open(self, op: str = "graphar") -> None:
        """Raises CommunicatorError, which names ``op``, if the engine is closed."""
        if self.closed:
            raise closed(op)

    def synchronize(self) -> None:
        """Waits for all work on this process's devices, and raises the errors that kernels reported."""
        self.hierarchy.synchronize()
        if self.runner:
            self.runner.synchronize()

    def close(self) -> None:
        """Frees the memory shared with other ranks. Collective.

        Raises:
            RanksAbsent: a rank did not arrive in time; memory that it may still use is not freed.
        """
        if self.closed:
            return
        try:
            if self._failure is None:
                self.compare("close")
        except RanksAbsent:
            self._end()
            raise
        self._end()

    def _end(self) -> None:
        self.closed = True
        self.plans.clear()
        del open_engines[self.name]
        with contextlib.ExitStack() as ends:
            ends.callback(self.let_go_of_group)
            ends.callback(self.hierarchy.close)
            if self.runner:
                self.runner.close()

    def let_go_of_group(self) -> None:
        """Drops the process group and its store. Later calls fail; memory and captured graphs stay valid."""
        self._failure = self._failure or CommunicatorError("the process group of this communicator was destroyed")
        self.plans.clear()
        self.hierarchy.let_go_of_groups()
        if self._rendezvous:
            self._rendezvous.leave()
        self.group = self._group_calls = None

    def __deepcopy__(self, memo: dict) -> Engine:  # a copied model has the same ranks
        return self


def compresses(lossless: bool | None) -> bool:
    """Returns ``lossless``; if it is None, False if the environment has GRAPHAR_LOSSLESS=0, else True."""
    return os.environ.get(LOSSLESS_SWITCH) != "0" if lossless is None else lossless


def closed(op: str) -> CommunicatorError:
    """Returns the error of a call with a closed communicator."""
    return CommunicatorError(
        f"{op}: this communicator is closed; make another, and whatever was compiled or captured with this one again"
    )


def as_taken(engine: Engine, of_ranks: Sequence):
    """Returns the arguments of this process's ranks as ``engine`` takes them: a list for devices, else one rank's."""
    return of_ranks if engine.devices else of_ranks[0]
