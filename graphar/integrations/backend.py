"""The process group backend "graphar": torch.distributed's calls, with sums and all-gathers in graphar's kernels.

``dist.init_process_group("cpu:gloo,cuda:graphar")``, after ``import graphar``, needs no other change to a program.

    all_reduce, reduce_scatter (sums, averages), all_gather -> Communicator  graphar's kernels; its fallback on the CPU
    every other call, dtype and device                      -> TorchGroup    NCCL for CUDA tensors, gloo for CPU tensors

Both are made when first needed. The communicator is one of the TorchGroup, not of the backend's own group, so that
the collectives of its fallback do not come back here.

torch has two places for a backend in Python. From 2.14 on it is a Backend, which a process group of torch's has for
each device type; before, it is a ProcessGroup of its own. :class:`Routing` serves both.
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
from graphar.errors import GrapharError, UnsupportedError
from graphar.integrations.torch_group import TorchGroup
from graphar.integrations.works import GrapharWork, combined
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.ops import allreduce, options, reducescatter
from graphar.plan.call import NO_OPTIONS
from graphar.runtime.side_stream import SideStream

NAME = "graphar"
_PACK_NBYTES = 1 << 20  # to copy more takes longer than the launches that it saves
_BETWEEN_TWO = ("send", "recv", "recv_anysource")
_TENSORS = (torch.Tensor, torch.nn.Parameter)  # other subclasses need not have memory of their own
_log = logging.getLogger("graphar")


def register() -> None:
    """Makes the backend known to torch.distributed."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(given: c10d._DistributedBackendOptions, backend_options: object) -> object:
    """Returns the backend of a new group's process. torch calls it."""
    ranks = given.global_ranks_in_group or range(given.group_size)  # the default group has none
    return _FORM(given.store, given.group_rank, list(ranks), given.group_id, given.timeout)


# ---- where calls go -------------------------------------------------------------------------------------------------


def _tensors_in(given: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of a call's arguments, which may be lists of lists."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _tensors_in(one)


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


def _run_into(out: torch.Tensor, x: torch.Tensor, run: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """Runs ``run(x, out)`` with both flattened, contiguous and without shared memory. ``out`` has the result."""
    out, x = out.detach(), x.detach().contiguous()
    target = _contiguous(out)
    begin, end = x.data_ptr(), target.data_ptr()
    if begin < end + target.nbytes and end < begin + x.nbytes:
        x = x.clone()
    run(x.view(-1), target.view(-1))
    if target is not out:
        out.copy_(target)


def _contiguous(out: torch.Tensor) -> torch.Tensor:
    """Returns ``out``, or a contiguous tensor in its place."""
    return out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)


def _packs(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Yields slices of a coalesced call's tensors that make one launch: as many as have ``_PACK_NBYTES`` together."""
    begin = nbytes = 0
    for end, x in enumerate(tensors):
        if end > begin and nbytes + x.nbytes > _PACK_NBYTES:
            yield slice(begin, end)
            begin, nbytes = end, 0
        nbytes += x.nbytes
    yield slice(begin, len(tensors))


def _unpack(rows: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copies the columns of ``rows`` into the outputs, in one kernel."""
    outputs = [out.detach() for out in outputs]
    targets = [_contiguous(out) for out in outputs]
    columns = [out.numel() // len(rows) for out in outputs]
    views = [target.view(len(rows), count) for target, count in zip(targets, columns, strict=True)]
    torch.split_with_sizes_copy(rows, columns, dim=1, out=views)
    for out, target in zip(outputs, targets, strict=True):
        if target is not out:
            out.copy_(target)


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

    def _is_backend_for(self, device: torch.device) -> bool:
        """Whether graphar is the backend for this device."""
        return True

    # ---- calls that go to graphar -----------------------------------------------------------------------------------

    def allreduce(self, tensors, *given, **named):
        opts = _options(c10d.AllreduceOptions, tensors, given, named)
        average = None if opts is None else self._average("allreduce", tensors, opts.reduceOp)
        if average is None:
            return self._by_torch("allreduce", tensors, *given, **named)
        return self._queue(opts, tensors, tensors, self._sum, average, tensors)

    def allreduce_coalesced(self, tensors, opts=None):
        opts = opts or c10d.AllreduceCoalescedOptions()
        average = self._average("allreduce", tensors, opts.reduceOp)
        if average is None:
            return self._by_torch("allreduce_coalesced", tensors, opts)
        return self._queue(opts, tensors, tensors, self._sum, average, tensors)

    def reduce_scatter(self, outputs, inputs, *given, **named):
        opts = _options(c10d.ReduceScatterOptions, outputs, given, named)
        all_tensors = list(_tensors_in([outputs, inputs]))
        average = None if opts is None else self._average("reducescatter", all_tensors, opts.reduceOp)
        if average is None:
            return self._by_torch("reduce_scatter", outputs, inputs, *given, **named)
        return self._queue(opts, outputs, all_tensors, self._scatter_lists, average, outputs, inputs)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=None):
        opts = opts or c10d.ReduceScatterOptions()
        average = self._average("reducescatter", [*outputs, *inputs], opts.reduceOp)
        if average is None:
            works = [self._by_torch("_reduce_scatter_base", *pair, opts) for pair in zip(outputs, inputs, strict=True)]
            return combined(works)
        return self._queue(opts, outputs, [*outputs, *inputs], self._scatter, average, outputs, inputs)

    def reduce_scatter_single(self, output, input, opts=None):
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def allgather(self, outputs, inputs, *given, **named):
        opts, all_tensors = _options(c10d.AllgatherOptions, inputs, given, named), list(_tensors_in([inputs, outputs]))
        if opts is None or not self._serves("allgather", all_tensors):
            return self._by_torch("allgather", outputs, inputs, *given, **named)
        return self._queue(opts, list(_tensors_in(outputs)), all_tensors, self._gather_lists, outputs, inputs)

    def allgather_coalesced(self, outputs, inputs, opts=None):
        # Here the outer lists are the ranks': outputs[rank][tensor].
        opts = opts or c10d.AllgatherOptions()
        return self.allgather([list(one) for one in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        opts = opts or c10d.AllgatherOptions()
        if not self._serves("allgather", [*outputs, *inputs]):
            works = [self._by_torch("_allgather_base", *pair, opts) for pair in zip(outputs, inputs, strict=True)]
            return combined(works)
        return self._queue(opts, outputs, [*outputs, *inputs], self._gather, outputs, inputs)

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
        self._collectives += 1
        opts = opts or c10d.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        opts.device = opts.device or torch.device("cpu")  # the same on every rank, also where some use no GPU yet
        return self._torch.serving(opts.device).barrier(opts)

    def _by_torch(self, name: str, *given, **named):
        self._collectives += name not in _BETWEEN_TWO
        device = next(_tensors_in([*given, *named.values()])).device
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
        if not self._is_backend_for(x.device) or (op != "allgather" and x.dtype not in TYPE_NAMES):
            return False
        self._torch.serving(x.device)  # a communicator's fallback asks its group for a backend
        if x.device.type == "cpu":  # which has no kernels: graphar's fallback gives the bits that kernels give
            return True
        engine = self.communicator.engine
        with engine.keeping_failure():
            return x.is_cuda and not engine.why_no_kernel(op, x)

    @property
    def communicator(self) -> Communicator:
        """The communicator of graphar's calls; made at first."""
        if self._communicator is None:
            self._communicator = Communicator(self._torch.group, timeout_s=self._timeout.total_seconds())
        return self._communicator

    # ---- how graphar serves them ------------------------------------------------------------------------------------

    def _queue(self, opts, outputs: list, all_tensors: Sequence[torch.Tensor], step: Callable, *given) -> dist.Work:
        """Makes a call: on the current stream, or beside it if the call is asynchronous."""
        self._collectives += 1
        seconds = opts.timeout.total_seconds()
        step = functools.partial(step, *given, timeout_s=seconds if seconds > 0 else self._given_timeout_s)
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

    def _sum(self, average: bool, tensors: list[torch.Tensor], timeout_s: float | None) -> None:
        for pack in _packs(tensors):
            xs = tensors[pack]
            if len(xs) == 1:
                self._sum_one(average, xs[0], timeout_s)
                continue
            flat = torch.cat([x.detach().reshape(-1) for x in xs])
            self._sum_one(average, flat, timeout_s)
            _unpack(flat.view(1, -1), xs)

    def _sum_one(self, average: bool, x: torch.Tensor, timeout_s: float | None) -> None:
        x = x.detach() if x.requires_grad else x
        if average:
            given = {"communicator": self.communicator.engine.name, "timeout_s": timeout_s}
            given["epilogue"] = self._division(x)
            allreduce.OP.into(x, [], x, *allreduce.OP.arguments(**given), plain=True)
        else:
            allreduce.allreduce(x, self.communicator, out=x, timeout_s=timeout_s)

    def _scatter(self, average: bool, outputs: list, inputs: list, timeout_s: float | None) -> None:
        ranks = len(self._ranks)
        for out, x in zip(outputs, inputs, strict=True):
            if x.numel() != out.numel() * ranks:
                raise ValueError(
                    f"reduce_scatter: the input must have {ranks} times the output's {out.numel()} elements, got "
                    f"{x.numel()}"
                )
        for pack in _packs(inputs):
            xs, outs = inputs[pack], outputs[pack]
            if len(xs) == 1:
                self._scatter_one(average, outs[0], xs[0], (outs[0].numel(),) * ranks, timeout_s)
                continue
            rows = torch.cat([x.detach().reshape(ranks, out.numel()) for x, out in zip(xs, outs, strict=True)], dim=1)
            part = rows.new_empty(1, rows.shape[1])
            self._scatter_one(average, part, rows, (part.numel(),) * ranks, timeout_s)
            _unpack(part, outs)

    def _scatter_lists(self, average: bool, outputs: list, inputs: list, timeout_s: float | None) -> None:
        for out, parts in zip(outputs, inputs, strict=True):
            counts = self._counts("reduce_scatter", parts, out)
            self._scatter_one(average, out, torch.cat([one.detach().reshape(-1) for one in parts]), counts, timeout_s)

    def _scatter_one(
        self, average: bool, out: torch.Tensor, x: torch.Tensor, counts: tuple[int, ...], timeout_s: float | None
    ) -> None:
        engine = self.communicator.engine
        if average:
            given = {"communicator": engine.name, "rank": self._rank, "axis": 0, "sizes": counts}
            arguments = reducescatter.OP.arguments(**given, timeout_s=timeout_s, epilogue=self._division(x))
            _run_into(out, x, lambda x, out: reducescatter.OP.into(x, [], out, *arguments, plain=True))
        else:
            key = ("reducescatter", counts, x.dtype, x.get_device(), "auto", timeout_s, *NO_OPTIONS)
            _run_into(out, x, functools.partial(engine.run, key))

    def _gather(self, outputs: list, inputs: list, timeout_s: float | None) -> None:
        ranks = len(self._ranks)
        for out, x in zip(outputs, inputs, strict=True):
            if out.numel() != x.numel() * ranks:
                raise ValueError(
                    f"all_gather: the output must have {ranks} times the input's {x.numel()} elements, got "
                    f"{out.numel()}"
                )
        for pack in _packs(outputs):
            xs, outs = inputs[pack], outputs[pack]
            if len(xs) == 1:
                self._gather_one(outs[0], xs[0], (xs[0].numel(),) * ranks, timeout_s)
                continue
            flat = torch.cat([x.detach().reshape(-1) for x in xs])
            rows = flat.new_empty(ranks, flat.numel())
            self._gather_one(rows, flat, (flat.numel(),) * ranks, timeout_s)
            _unpack(rows, outs)

    def _gather_lists(self, outputs: list, inputs: list, timeout_s: float | None) -> None:
        for parts, x in zip(outputs, inputs, strict=True):
            counts = self._counts("all_gather", parts, x)
            flat = x.new_empty(sum(counts))
            self._gather_one(flat, x, counts, timeout_s)
            for part, found in zip(parts, flat.split(counts), strict=True):
                part.detach().copy_(found.view(part.shape))

    def _gather_one(self, out: torch.Tensor, x: torch.Tensor, counts: tuple[int, ...], timeout_s: float | None) -> None:
        key = ("allgather", counts, x.dtype, x.get_device(), "auto", timeout_s, *NO_OPTIONS)
        run = functools.partial(self.communicator.engine.run, key)
        own = out.data_ptr() + sum(counts[: self._rank]) * out.itemsize
        if x.data_ptr() == own and x.is_contiguous() and out.is_contiguous():
            run(x.detach().view(-1), out.detach().view(-1))  # kernels write this rank's part where they have read it
        else:
            _run_into(out, x, run)

    def _counts(self, op: str, parts: Sequence[torch.Tensor], own: torch.Tensor) -> tuple[int, ...]:
        """Returns the elements of each rank's part."""
        counts = tuple([one.numel() for one in parts])
        if len(counts) != len(self._ranks) or counts[self._rank] != own.numel():
            raise ValueError(
                f"{op}: needs a tensor for each of {len(self._ranks)} ranks, and of {own.numel()} elements for rank "
                f"{self._rank}, got {list(counts)}"
            )
        return counts

    def _division(self, x: torch.Tensor) -> str:
        """Returns the epilogue of an average, which divides the fp32 sum before it is rounded."""
        return options.epilogue_option("average", f"v / {len(self._ranks)}", x, None).text

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


# ---- the two forms --------------------------------------------------------------------------------------------------


class GrapharBackend(Routing, dist._Backend):
    """The backend of a process group of torch's, from torch 2.14 on."""

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives  # torch's debug mode compares it between ranks

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def options(self):
        found = dist._Backend.Options(NAME, timeout=self._timeout)
        found.global_ranks_in_group, found.group_name = self._ranks, self._name
        return found

    def split(self, store: dist.Store, ranks: Sequence[int], opts: dist._Backend.Options) -> GrapharBackend:
        """Returns the backend of a group of these of the group's ranks."""
        if self._rank not in ranks:  # for None, which says so, torch 2.15 reads a null pointer
            raise UnsupportedError(f"split_group: rank {self._rank} of {self._name} must be in one of the groups")
        processes = [self._ranks[one] for one in ranks]
        return GrapharBackend(store, list(ranks).index(self._rank), processes, opts.group_name, opts._timeout)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: ranks outside a new group need not take part."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Does nothing: connections are made when first needed."""


class GrapharProcessGroup(Routing, dist.ProcessGroup):
    """A process group before torch 2.14. It is the whole group, also in "cpu:gloo,cuda:graphar"."""

    def __init__(self, store: dist.Store, rank: int, ranks: list[int], name: str, timeout: timedelta) -> None:
        super().__init__(store, rank, ranks, name, timeout)
        dist.batch_isend_irecv = c10d.batch_isend_irecv = _batch_isend_irecv
        self._devices: set[str] | None = None
        # torch drops what it has made for other devices. Let no rank do so while another still connects to it.
        store.set(f"graphar/made/{rank}", b"1")
        store.wait([f"graphar/made/{one}" for one in range(len(ranks))], timeout)

    def _is_backend_for(self, device: torch.device) -> bool:
        if self._devices is None:
            given = c10d._world.pg_backend_config[self]  # such as "cpu:gloo,cuda:graphar"
            self._devices = {one.partition(":")[0] for one in given.split(",") if one.endswith(f":{NAME}")}
        return device.type in self._devices

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        backend = str(dist.get_backend_config(self._torch.group))
        return [torch.device(one.partition(":")[0]) for one in backend.split(",")]

    def _get_backend(self, device: torch.device):
        device = torch.device(device)
        return self._torch.serving(device)._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self.end_coalescing()


_batch_by_torch = dist.batch_isend_irecv


@functools.wraps(_batch_by_torch)
def _batch_isend_irecv(p2p_op_list):
    # For a group in Python torch makes the calls one by one. NCCL needs them at once: in a ring, each rank would
    # otherwise wait in its send for the next one's recv.
    if isinstance(p2p_op_list, list):
        p2p_op_list = [_of_torch_group(op) for op in p2p_op_list]
    return _batch_by_torch(p2p_op_list)


def _of_torch_group(op: dist.P2POp) -> dist.P2POp:
    """Returns the operation, in torch's own group if its group has this backend."""
    if not isinstance(getattr(op, "group", None), GrapharProcessGroup):
        return op
    group = op.group._torch.serving(op.tensor.device)
    return dist.P2POp(op.op, op.tensor, group=group, tag=op.tag, group_peer=op.group_peer)


_FORM = GrapharBackend if torch.__version__ >= "2.14" else GrapharProcessGroup
