"""Where the calls of a process group go: to graphar, or to torch's own group of the same ranks.

    all_reduce, reduce_scatter (sums, averages), all_gather -> Communicator  graphar's kernels; its fallback on the CPU
    every other call, dtype and device                      -> TorchGroup    NCCL for CUDA tensors, gloo for CPU tensors

Both are made when first needed. The communicator is one of the TorchGroup, not of the backend's own group, so that
the collectives of its fallback do not come back here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from graphar.communicator import Communicator
from graphar.errors import GrapharError
from graphar.integrations import collectives
from graphar.integrations.torch_group import TorchGroup
from graphar.integrations.works import GrapharWork, combined
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.ranks import fallback
from graphar.runtime.side_stream import SideStream

NAME = "graphar"
_BETWEEN_TWO = ("send", "recv", "recv_anysource")
_TENSORS = (torch.Tensor, torch.nn.Parameter)  # other subclasses need not have memory of their own
_log = logging.getLogger("graphar")


def tensors_in(given: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of a call's arguments, which may be lists of lists."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from tensors_in(one)


def _method_of_torch(name: str) -> Callable:
    """Returns the method of a call that goes to torch's own group."""

    def call(self: Routing, *given, **named):
        return self._by_torch(name, *given, **named)

    call.__name__ = name
    return call


def _options(kind: type, tensors: object, given: tuple, named: dict) -> object | None:
    """Returns a call's options object: None for overloads that take a tensor, or an operation in place of options."""
    found = given[0] if given else named.get("opts", kind())
    alone = len(given) + len(named) == (1 if given or "opts" in named else 0)
    return found if alone and isinstance(tensors, list) and isinstance(found, kind) else None


def _check_one(op: str, tensors: object) -> None:
    """Raises ValueError for several tensors of a rank in one call: gloo adds them to each other, and NCCL does not."""
    if isinstance(tensors, list) and len(tensors) != 1:
        raise ValueError(f"{op}: takes one tensor of each rank, got {len(tensors)}; make a call for each, coalesced")


# This keeps them until they are shut down. With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch does not keep the Python object
# of a Backend.
_open_groups: set[Routing] = set()


class Routing:
    """The calls of a process group. Each goes to graphar, or to torch's own group of the same ranks.

    Methods have the names and arguments that torch calls. They take what torch.distributed's functions pass: lists of
    tensors, and an options object. Other overloads of ProcessGroup's methods go to torch's own group.

    A subclass also has one of torch's classes as a base, which is made with the rank and the number of ranks.

    Args:
        ranks: their numbers in the default group.
        name: the name of the group.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: list[int], name: str, timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self._rank, self._ranks, self._name = rank, ranks, name
        self._timeout = timeout
        self._given_timeout_s: float | None = None  # that of set_timeout; None: the communicator's
        self._torch = TorchGroup(store, rank, ranks, name, timeout)
        self._communicator: Communicator | None = None
        self._served: dict[tuple, bool] = {}
        self._collectives = 0  # made so far
        self._sides: dict[torch.device, SideStream] = {}
        self._window: list[dist.Work] | None = None  # the works of calls between start_ and end_coalescing
        self._window_device: torch.device | None = None
        _open_groups.add(self)

    # ---- calls that go to graphar -----------------------------------------------------------------------------------

    def allreduce(self, tensors, *given, **named):
        _check_one("all_reduce", tensors)
        opts = _options(c10d.AllreduceOptions, tensors, given, named)
        average = None if opts is None else self._average("allreduce", tensors, opts.reduceOp)
        if average is None:
            return self._by_torch("allreduce", tensors, *given, **named)
        return self._queue(opts, tensors, tensors, collectives.allreduce, average, tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        opts = opts or c10d.AllreduceCoalescedOptions()
        average = self._average("allreduce", tensors, opts.reduceOp)
        if average is None:
            return self._by_torch("allreduce_coalesced", tensors, opts)
        return self._queue(opts, tensors, tensors, collectives.allreduce, average, tensors)

    def reduce_scatter(self, outputs, inputs, *given, **named):
        _check_one("reduce_scatter", outputs)
        opts = _options(c10d.ReduceScatterOptions, outputs, given, named)
        all_tensors = list(tensors_in([outputs, inputs]))
        average = None if opts is None else self._average("reducescatter", all_tensors, opts.reduceOp)
        if average is None:
            return self._by_torch("reduce_scatter", outputs, inputs, *given, **named)
        return self._queue(opts, outputs, all_tensors, collectives.reducescatter_lists, average, outputs, inputs)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        opts = opts or c10d.ReduceScatterOptions()
        average = self._average("reducescatter", [*outputs, *inputs], opts.reduceOp)
        if average is None:
            works = [self._by_torch("_reduce_scatter_base", *pair, opts) for pair in zip(outputs, inputs, strict=True)]
            return combined(works)
        return self._queue(opts, outputs, [*outputs, *inputs], collectives.reducescatter, average, outputs, inputs)

    def reduce_scatter_single(self, output, input, opts=None):
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def allgather(self, outputs, inputs, *given, **named):
        _check_one("all_gather", inputs)
        return self._allgather(outputs, inputs, *given, **named)

    def _allgather(self, outputs, inputs, *given, **named):
        opts, all_tensors = _options(c10d.AllgatherOptions, inputs, given, named), list(tensors_in([inputs, outputs]))
        if opts is None or not self._serves("allgather", all_tensors):
            return self._by_torch("allgather", outputs, inputs, *given, **named)
        return self._queue(opts, list(tensors_in(outputs)), all_tensors, collectives.allgather_lists, outputs, inputs)

    def allgather_coalesced(self, outputs, inputs, opts=None):
        # Here the outer lists are the ranks': outputs[rank][tensor].
        opts = opts or c10d.AllgatherOptions()
        return self._allgather([list(one) for one in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        opts = opts or c10d.AllgatherOptions()
        if not self._serves("allgather", [*outputs, *inputs]):
            works = [self._by_torch("_allgather_base", *pair, opts) for pair in zip(outputs, inputs, strict=True)]
            return combined(works)
        return self._queue(opts, outputs, [*outputs, *inputs], collectives.allgather, outputs, inputs)

    def all_gather_single(self, output, input, opts=None):
        return self.all_gather_single_coalesced([output], [input], opts)

    # Their names before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # ---- calls that go to torch's own group -------------------------------------------------------------------------

    broadcast = _method_of_torch("broadcast")
    reduce = _method_of_torch("reduce")
    gather = _method_of_torch("gather")
    scatter = _method_of_torch("scatter")
    alltoall = _method_of_torch("alltoall")
    alltoall_base = _method_of_torch("alltoall_base")
    all_to_all_single = _method_of_torch("all_to_all_single")
    send = _method_of_torch("send")
    recv = _method_of_torch("recv")
    recv_anysource = _method_of_torch("recv_anysource")
    allreduce_sparse = _method_of_torch("allreduce")

    def barrier(self, opts=None, timeout: timedelta | None = None):
        self._begin("barrier", ())
        opts = opts or c10d.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        opts.device = opts.device or torch.device("cpu")  # the same on every rank, also where some use no GPU yet
        group = self._torch.serving(opts.device)
        if opts.asyncOp or opts.device.type != "cpu" or not self._is_backend_of(opts.device):
            return group.barrier(opts)
        engine = self.communicator.engine
        calls = engine.without_kernels.group_calls()
        given_s = opts.timeout.total_seconds()
        timeout_s = given_s if given_s > 0 else self._timeout.total_seconds()
        with engine.keeping_failure(), calls.naming_absent("barrier", "barrier", "gloo", timeout_s):
            work = group.barrier(opts)
            fallback.wait(work, timeout_s)
        return work

    def _by_torch(self, name: str, *given, **named):
        if name not in _BETWEEN_TWO:
            self._begin(name, [*given, *named.values()])
        device = next(tensors_in([*given, *named.values()])).device
        group = self._torch.serving(device)
        if self._window is None:
            return getattr(group, name)(*given, **named)
        if device.type == "cuda" and self._window_device is None:
            self._window_device = device
            group._start_coalescing(device)
        work = getattr(group, name)(*given, **named)
        if device.type != "cuda":
            self._window.append(work)
        return work

    def start_coalescing(self) -> None:
        self._window, self._window_device = [], None

    def end_coalescing(self) -> dist.Work:
        works, device, self._window, self._window_device = self._window, self._window_device, None, None
        if device is not None:
            works.append(self._torch.group._end_coalescing(device))
        return combined([work for work in works if work is not None])

    # ---- which calls graphar serves ---------------------------------------------------------------------------------

    def _average(self, op: str, tensors: Sequence[torch.Tensor], how: object) -> bool | None:
        """Returns whether a call is an average, where graphar serves it: None if torch's own group does."""
        average = how == dist.ReduceOp.AVG
        return average if (average or how == dist.ReduceOp.SUM) and self._serves(op, tensors) else None

    def _serves(self, op: str, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether graphar serves ``op`` with these tensors. On GPUs the first call is collective."""
        first = tensors[0]
        dtype, device = first.dtype, first.device
        for x in tensors:
            if (
                type(x) not in _TENSORS
                or x.dtype is not dtype
                or x.device != device
                or x.layout is not torch.strided
                or x.is_conj()
                or x.is_neg()
            ):
                return False
        served = self._served.get((op, dtype, device))
        if served is None:
            served = self._served[op, dtype, device] = self._can_serve(op, first)
        return served

    def _can_serve(self, op: str, x: torch.Tensor) -> bool:
        """Whether graphar serves ``op`` with tensors of this dtype and device. Collective on GPUs."""
        if not self._is_backend_of(x.device) or (op != "allgather" and x.dtype not in TYPE_NAMES):
            return False
        self._torch.serving(x.device)  # a communicator's fallback asks its group for a backend
        if x.device.type == "cpu":  # which has no kernels: graphar's fallback gives the bits that kernels give
            return True
        engine = self.communicator.engine
        with engine.keeping_failure():
            return x.is_cuda and not engine.why_no_kernel(op, x)

    def _is_backend_of(self, device: torch.device) -> bool:
        """Whether the group was made with this backend for tensors on ``device``."""
        return True

    @property
    def communicator(self) -> Communicator:
        """The communicator of graphar's calls; made at first."""
        if self._communicator is None:
            self._communicator = Communicator(self._torch.group, timeout_s=self._timeout.total_seconds())
        return self._communicator

    def _begin(self, op: str, given: Sequence[object]) -> None:
        """Counts a collective call, which has these arguments."""
        self._collectives += 1

    def _queue(self, opts, outputs: list, all_tensors: Sequence[torch.Tensor], step: Callable, *given) -> dist.Work:
        """Makes a call: on the current stream, or beside it if the call is asynchronous."""
        self._begin(step.__name__, [*all_tensors, opts])
        seconds = opts.timeout.total_seconds()
        timeout_s = seconds if seconds > 0 else self._given_timeout_s
        step = functools.partial(step, self.communicator, *given, timeout_s=timeout_s)
        work = self._run(step, outputs, all_tensors, opts.asyncOp)
        if self._window is not None:
            self._window.append(work)
        return work

    def _run(self, step: Callable, outputs: list, all_tensors: Sequence[torch.Tensor], asynchronous: bool) -> dist.Work:
        device = all_tensors[0].device
        if device.type == "cpu" or not asynchronous:
            step()
            return GrapharWork(outputs)
        side = self._sides.get(device)
        if side is None:
            side = self._sides[device] = SideStream(device)
        with side.behind_the_caller():
            step()
        for x in all_tensors:
            x.record_stream(side.stream)  # their memory is not used again before the call has ended
        return GrapharWork(outputs, side.stream)

    # ---- the group's life -------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout, self._given_timeout_s = timeout, timeout.total_seconds()
        self._torch.set_timeout(timeout)

    def shutdown(self) -> None:
        """Closes the communicator. Collective on GPUs; ranks whose processes have ended are not waited for."""
        _open_groups.discard(self)
        communicator, self._communicator = self._communicator, None
        try:
            if communicator:
                communicator.close()
        except GrapharError as error:  # torch ends its groups one after another, and must come to the last
            _log.warning("destroying the process group %s: %s", self._name, error)
        finally:
            self._torch.end("shutdown")

    def abort(self) -> None:
        """Ends calls of torch's own group. The communicator's memory, which other ranks may use, is not freed."""
        _open_groups.discard(self)
        self._torch.end("abort")
