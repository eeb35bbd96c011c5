"""Where the calls of a process group go: to graphar, or to torch's own group of the same ranks.

    all_reduce, reduce_scatter (sums, averages) -> Communicator  graphar's kernels; its fallback on the CPU
    all_gather, all_to_all                      -> Communicator  the same, of any dtype
    every other call, dtype and device          -> TorchGroup    NCCL for CUDA tensors, gloo for CPU tensors

Both are made when first needed. The communicator is one of the TorchGroup, not of the backend's own group, so that
the collectives of its fallback do not come back here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, Store
from torch.distributed import distributed_c10d as c10d

from graphar.communicator import Communicator
from graphar.errors import GrapharError, Reason
from graphar.integrations.collectives import Calls, why_no_splits
from graphar.integrations.torch_group import TorchGroup
from graphar.integrations.works import Arguments, GrapharWork, combined, untraced
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.work import MOVING
from graphar.ranks.cpu.transport import wait
from graphar.runtime.checks.call_checks import LONGEST_S
from graphar.runtime.checks.tensor_checks import check_own_memory
from graphar.runtime.side_stream import SideStream
from graphar.runtime.watch.stats import CallStats, Stats, beside

NAME = "graphar"
_OPS = {  # graphar's names of calls that have others as methods
    "allreduce_coalesced": "allreduce",
    "reduce_scatter": "reducescatter",
    "_reduce_scatter_base": "reducescatter",
    "_allgather_base": "allgather",
}
_BETWEEN_TWO = ("send", "recv", "recv_anysource")
_TENSORS = (torch.Tensor, torch.nn.Parameter)  # other subclasses need not have memory of their own
_log = logging.getLogger("graphar")


def _method_of_torch(name: str) -> Callable:
    """Returns the method of a call that goes to torch's own group."""

    def call(self: Routing, *args, **kwargs):
        return self._by_torch(name, f"graphar has no {name}", *args, **kwargs)

    call.__name__ = name
    return call


def _options(kind: type, tensors: object, args: tuple, kwargs: dict) -> object | None:
    """Returns a call's options; None if its overload takes a bare tensor, or an operation in place of options."""
    (opts, *more) = (*args, *kwargs.values()) or (kind(),)
    is_known = not more and kwargs.keys() <= {"opts"} and isinstance(opts, kind)
    return opts if is_known and isinstance(tensors, list) else None


def _seconds(timeout: timedelta) -> float:
    """Returns a deadline of torch's as graphar's calls take it, in seconds; 0 for none."""
    return max(0.0, min(timeout.total_seconds(), LONGEST_S))


def _check_one(op: str, tensors: object) -> None:
    """Raises ValueError for several tensors of a rank in one call: gloo adds them to each other, and NCCL does not."""
    if isinstance(tensors, list) and len(tensors) != 1:
        raise ValueError(f"{op}: takes one tensor of each rank, got {len(tensors)}; make a call for each, coalesced")


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of a call's arguments, which may be lists of lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from tensors_in(element)


# This keeps them until they are shut down. With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch does not keep the Python object
# of a Backend.
_open_groups: set[Routing] = set()


beside.append(lambda name: [stats for group in _open_groups if group._name == name for stats in group.stats()])


_OfTorch: Any = object  # a subclass has one of torch's classes, whose stubs name other arguments than torch passes


@untraced
class Routing(_OfTorch):
    """The calls of a process group. Each goes to graphar, or to torch's own group of the same ranks.

    Methods have the names and arguments that torch calls. They take what torch.distributed's functions pass: lists of
    tensors, and an options object. Other overloads of ProcessGroup's methods go to torch's own group. ``ranks`` are
    numbers in the default group.
    """

    def __init__(self, store: Store, rank: int, ranks: list[int], name: str, timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))
        self._rank, self._ranks, self._name = rank, ranks, name
        self._timeout = timeout
        self._set_timeout_s: float | None = None  # by set_timeout; None: the communicator's
        self._torch = TorchGroup(store, rank, ranks, name, timeout)
        self._communicator: Communicator | None = None
        self._reasons: dict[tuple, Reason | None] = {}  # why torch's own group serves an op, by op, dtype and device
        # Calls, and the bytes of their outputs or inputs, whichever are more, by op, library and reason.
        self._passed_on: dict[tuple[str, str, str], tuple[int, int]] = {}
        self._collectives = 0  # made so far
        self._sides: dict[torch.device, SideStream] = {}
        self._window: list[dist.Work | None] | None = None  # the works of calls between start_ and end_coalescing
        self._window_device: torch.device | None = None
        self._batched: list[Arguments] = []  # of calls in a window that NCCL makes
        _open_groups.add(self)

    def allreduce(self, tensors, *args, **kwargs):
        _check_one("all_reduce", tensors)
        opts = _options(c10d.AllreduceOptions, tensors, args, kwargs)
        if why := self._why_not("allreduce", opts, tensors):
            return self._by_torch("allreduce", why, tensors, *args, **kwargs)
        return self._queue("allreduce", opts, tensors, tensors, tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        opts = opts or c10d.AllreduceCoalescedOptions()
        if why := self._why_not("allreduce", opts, tensors):
            return self._by_torch("allreduce_coalesced", why, tensors, opts)
        return self._queue("allreduce", opts, tensors, tensors, tensors)

    def reduce_scatter(self, outputs, inputs, *args, **kwargs):
        _check_one("reduce_scatter", outputs)
        opts = _options(c10d.ReduceScatterOptions, outputs, args, kwargs)
        all_tensors = list(tensors_in([outputs, inputs]))
        if why := self._why_not("reducescatter", opts, all_tensors):
            return self._by_torch("reduce_scatter", why, outputs, inputs, *args, **kwargs)
        return self._queue("reducescatter_lists", opts, outputs, all_tensors, outputs, inputs)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        opts = opts or c10d.ReduceScatterOptions()
        return self._singles("reducescatter", "_reduce_scatter_base", outputs, inputs, opts)

    def reduce_scatter_single(self, output, input, opts=None):
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def allgather(self, outputs, inputs, *args, **kwargs):
        _check_one("all_gather", inputs)
        return self._allgather(outputs, inputs, *args, **kwargs)

    def _allgather(self, outputs, inputs, *args, **kwargs):
        opts, all_tensors = _options(AllgatherOptions, inputs, args, kwargs), list(tensors_in([inputs, outputs]))
        if why := self._why_not("allgather", opts, all_tensors):
            return self._by_torch("allgather", why, outputs, inputs, *args, **kwargs)
        return self._queue("allgather_lists", opts, list(tensors_in(outputs)), all_tensors, outputs, inputs)

    def allgather_coalesced(self, outputs, inputs, opts=None):
        # Here the outer lists are the ranks': outputs[rank][tensor].
        opts = opts or AllgatherOptions()
        return self._allgather([list(of_tensor) for of_tensor in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        return self._singles("allgather", "_allgather_base", outputs, inputs, opts or AllgatherOptions())

    def all_gather_single(self, output, input, opts=None):
        return self.all_gather_single_coalesced([output], [input], opts)

    def _singles(self, op: str, name: str, outputs: list, inputs: list, opts: object) -> dist.Work:
        """Makes a call for each output and its input, by torch's own group one after another."""
        if why := self._why_not(op, opts, [*outputs, *inputs]):
            pairs = zip(outputs, inputs, strict=True)
            return combined([self._by_torch(name, why, output, input, opts) for output, input in pairs])
        return self._queue(op, opts, outputs, [*outputs, *inputs], outputs, inputs)

    def alltoall(self, outputs, inputs, *args, **kwargs):
        opts, all_tensors = _options(c10d.AllToAllOptions, inputs, args, kwargs), [*outputs, *inputs]
        fits = len(outputs) == len(inputs) == self.size()
        if why := self._why_not("alltoall", opts, all_tensors) if fits else "it needs a tensor for each rank":
            return self._by_torch("alltoall", why, outputs, inputs, *args, **kwargs)
        return self._queue("alltoall_lists", opts, outputs, all_tensors, outputs, inputs)

    def _alltoall_single(self, name: str, out, x, receives, sends, *args, **kwargs):
        opts = _options(c10d.AllToAllOptions, [x], args, kwargs)
        why = self._why_not("alltoall", opts, [out, x])
        if why := why or why_no_splits(out, x, receives, sends, self.size()):
            return self._by_torch(name, why, out, x, receives, sends, *args, **kwargs)
        return self._queue("alltoall", opts, [out], [out, x], out, x, receives, sends)

    def alltoall_base(self, *args, **kwargs):
        return self._alltoall_single("alltoall_base", *args, **kwargs)

    def all_to_all_single(self, *args, **kwargs):
        return self._alltoall_single("all_to_all_single", *args, **kwargs)

    # Their names before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    broadcast = _method_of_torch("broadcast")
    reduce = _method_of_torch("reduce")
    gather = _method_of_torch("gather")
    scatter = _method_of_torch("scatter")
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
        self._count("barrier", opts.device, "graphar has no barrier", ())
        if opts.asyncOp or opts.device.type != "cpu" or not self._is_backend_of(opts.device):
            return group.barrier(opts)
        engine = self.communicator.engine
        calls = engine.without_kernels.group_calls()
        timeout_s = _seconds(opts.timeout) or _seconds(self._timeout)
        with engine.keeping_failure(), calls.one_call("barrier", "barrier", "gloo", timeout_s, notes=True):
            work = group.barrier(opts)
            wait([work], timeout_s)
        return work

    def _by_torch(self, name: str, why: str, *args, **kwargs):
        """Makes a call of torch's own group, by the ``name`` of its method, because of ``why``."""
        if name not in _BETWEEN_TWO:
            self._begin(name, [*args, *kwargs.values()])
        arguments = Arguments(name, self._rank, args, kwargs)
        device = next(tensors_in([*args, *kwargs.values()])).device
        group = self._torch.serving(device)
        self._count(name, device, why, args)
        in_batch = self._window is not None and device.type == "cuda"
        if in_batch and self._window_device is None:
            self._window_device = device
            group._start_coalescing(device)
        work = getattr(group, name)(*arguments.args, **arguments.kwargs)
        if in_batch:  # which NCCL makes at its end
            self._batched.append(arguments)
            return work
        work = arguments.finish(work)
        if self._window is not None:
            self._window.append(work)
        return work

    def _count(self, method: str, device: torch.device, why: str, args: Sequence[object]) -> None:
        key = _OPS.get(method, method), "nccl" if device.type == "cuda" else "gloo", why
        calls, nbytes = self._passed_on.get(key, (0, 0))
        more = max((sum(x.nbytes for x in tensors_in(argument)) for argument in args), default=0)
        self._passed_on[key] = calls + 1, nbytes + more

    def start_coalescing(self, *_) -> None:
        self._window, self._window_device, self._batched = [], None, []

    def end_coalescing(self, *_) -> dist.Work:
        works, device, self._window, self._window_device = self._window or [], self._window_device, None, None
        if device is not None:
            work, self._batched, batched = self._torch.group._end_coalescing(device), [], self._batched
            for arguments in batched:
                work = arguments.finish(work)
            works.append(work)
        return combined([work for work in works if work is not None])

    def _why_not(self, op: str, opts: Any, tensors: Sequence[torch.Tensor]) -> Reason | None:
        """Returns why torch's own group serves a call. On GPUs the first call is collective.

        ``opts`` are its options, None for an overload without.
        """
        if opts is None:
            return "the call is an overload that torch.distributed's functions do not use"
        if op not in MOVING and not (opts.reduceOp == dist.ReduceOp.SUM or opts.reduceOp == dist.ReduceOp.AVG):
            return "graphar's kernels add, and do nothing else"
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
                return "its tensors are not plain ones, of one dtype and on one device"
        key = op, dtype, device
        if key not in self._reasons:
            self._reasons[key] = self._why_no_tensor(op, first)
        return self._reasons[key]

    def _why_no_tensor(self, op: str, x: torch.Tensor) -> Reason | None:
        """Returns why graphar does not serve ``op`` with tensors of this dtype and device. Collective on GPUs."""
        if not self._is_backend_of(x.device):
            return f"the group has another backend for {x.device.type} tensors"
        if op not in MOVING and x.dtype not in TYPE_NAMES:
            return f"graphar's kernels do not add {x.dtype}"
        self._torch.serving(x.device)  # a communicator's fallback asks its group for a backend
        if x.device.type == "cpu":  # which has no kernels: graphar's fallback gives the bits that kernels give
            return None
        engine = self.communicator.engine
        with engine.keeping_failure():
            return engine.why_no_kernel(op, x) if x.is_cuda else f"graphar does not serve {x.device.type} tensors"

    def _is_backend_of(self, device: torch.device) -> bool:
        return True

    @property
    def communicator(self) -> Communicator:
        """The communicator of graphar's calls; made at first."""
        if self._communicator is None:
            self._communicator = Communicator(self._torch.group, timeout_s=_seconds(self._timeout))
        return self._communicator

    def stats(self) -> list[Stats]:
        """Returns counts of the calls that graphar served, and of those that it passed on."""
        own = [self._communicator.stats()] if self._communicator else []
        counts = dict(self._passed_on)  # a copy: another thread may add one
        calls = [CallStats(op, by, calls, 0, nbytes, why) for (op, by, why), (calls, nbytes) in counts.items()]
        return [*own, Stats(tuple(calls), 0, {}, 0.0, "")]

    def _begin(self, op: str, arguments: Sequence[object]) -> None:
        self._collectives += 1

    def _queue(self, op: str, opts, outputs: list, all_tensors: Sequence[torch.Tensor], *args) -> dist.Work:
        """Makes a call by a method of ``Calls``: on the current stream, or beside it if the call is asynchronous."""
        self._begin(op, [*all_tensors, opts])
        for out in outputs:
            if not out.is_contiguous():
                check_own_memory(op, out, "a tensor that is written")
        average = getattr(opts, "reduceOp", None) == dist.ReduceOp.AVG
        calls = Calls(self.communicator, _seconds(opts.timeout) or self._set_timeout_s, average)
        device, side, run = all_tensors[0].device, None, getattr(calls, op)
        if any(map(torch.is_inference, outputs)):  # which torch.distributed writes outside inference mode, too
            run = torch.inference_mode()(run)
        if device.type == "cpu" or not opts.asyncOp:
            run(*args)
        else:
            side = self._sides[device] = self._sides.get(device) or SideStream(device)
            with side.behind_the_caller():
                run(*args)
            for x in all_tensors:
                x.record_stream(side.stream)  # their memory is not used again before the call has ended
        work = GrapharWork(outputs, side.stream if side else None)
        if self._window is not None:
            self._window.append(work)
        return work

    def getBackendName(self) -> str:
        return NAME

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout, self._set_timeout_s = timeout, _seconds(timeout)
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
