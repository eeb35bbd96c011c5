"""Pushes by copy engines, and the meetings of ranks around them.

    caller's stream    ... | meet |                              | meet | reads what peers copied here
    side stream                   | copies to peers (no SM held) |

A meeting is an all-gather of one byte of each rank, by allgather_flagged in one block. It ends on a rank only after all
ranks have begun it. It has the deadline, the record, the comparison of calls and the place in captured graphs that all
kernels have.

- Visibility. A meeting is launched after this rank's copies have ended: the caller's stream holds them, or waits for
  their event. So when the meeting has ended on a rank, the copies of all ranks have ended that were enqueued before it,
  and what runs after it on the caller's stream reads their bytes.
- Reuse. A copy begins after a meeting that every rank begins after its last access to the memory that the copy
  overwrites. So the first copies of a call come after a meeting, too: the ranks' earlier calls, and whatever their
  streams did before this call, have ended by then.
- Progress. Only meetings wait for other ranks. Each rank enqueues its meetings and copies in one order, in which
  nothing depends on what comes later. So no queue of the hardware that takes them in that order blocks itself.
- Failure. After a meeting that expired nothing waits any more: copies go on, results are undefined, and the next call
  raises. While a communicator is suspended, copies of a replayed graph end in the guard in place of scratch.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import torch

from graphar.numerics.dtypes import BYTE
from graphar.plan.algorithms import MEETING, Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.scratch import PACK_NBYTES
from graphar.plan.work import Parts
from graphar.runtime.bind.launches import runner_of
from graphar.runtime.driver import check, driver, on_device
from graphar.runtime.engine import Engine
from graphar.runtime.kernels import COUNTERS_NBYTES
from graphar.runtime.member import Member
from graphar.runtime.memory.symmetric_tensors import tensor_at
from graphar.runtime.plan import BoundedCache, Plan

Event = torch.cuda.Event | torch.Event
Move = tuple[int, int, int]  # the address to copy to, the address to copy from, and bytes


_HERE = contextlib.nullcontext()


def here(device: int) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a device is current. The caller has used the CUDA runtime in this thread."""
    return _HERE if torch._C._cuda_getDevice() == device else on_device(device)


@functools.cache
def _functions() -> tuple[Callable[..., int], Callable[..., int] | None]:
    """Returns the driver's copy, and its batch of copies if it has one; ctypes takes half of cuda.bindings' time."""
    library = ctypes.CDLL("libcuda.so.1")
    copy_one, copy_batch = library.cuMemcpyAsync, getattr(library, "cuMemcpyBatchAsync_v2", None)
    copy_one.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    if copy_batch is not None:
        pointers = (ctypes.c_void_p,) * 3
        copy_batch.argtypes = (*pointers, ctypes.c_size_t, *pointers[:2], ctypes.c_size_t, ctypes.c_void_p)
    return copy_one, copy_batch


@functools.cache
def _attributes():
    """Returns the attributes of every copy in a batch: it reads in the order of the stream, by a copy engine."""
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    attributes.flags = driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
    return attributes


def enqueue(moves: Iterable[Move], stream: int, batched: bool) -> None:
    """Copies on a stream, whose device is current.

    A batch is one call of the driver. Neither graphs nor the default stream, whose handle is 0, take one.
    """
    copy_one, copy_batch = _functions()
    moves = [move for move in moves if move[2]]
    if batched and stream and copy_batch is not None and len(moves) > 1:
        columns = [(ctypes.c_uint64 * len(moves))(*column) for column in zip(*moves, strict=True)]
        first = ctypes.c_size_t(0)  # the index of the first copy to which the attributes apply
        status = copy_batch(*columns, len(moves), _attributes().getPtr(), ctypes.addressof(first), 1, stream)
        if status:
            check("cuMemcpyBatchAsync", driver.CUresult(status))
        return
    for move in moves:
        if status := copy_one(*move, stream):
            check("cuMemcpyAsync", driver.CUresult(status))


@dataclass
class Lane:
    """A rank of this process, the caller's stream, and the streams of its copies. Not for two threads at once."""

    member: Member
    main: torch.cuda.Stream
    sides: Sequence[torch.cuda.Stream]
    events: Iterator[Event | None] = field(default=repeat(None), kw_only=True)  # to record in; None: in a new event
    batched: bool = field(default=False, kw_only=True)  # whether copies that begin together are a batch

    def copy(self, moves: Iterable[Move], side: int = 0) -> Event | None:
        """Copies on a side stream, after what the caller's stream holds now; returns the end of the copies.

        A side stream may be the caller's stream itself: there is nothing to wait for then, and the result is None.
        """
        stream = self.sides[side]
        if apart := stream is not self.main:
            stream.wait_event(self.main.record_event(next(self.events)))
        with here(self.member.device):
            enqueue(moves, stream.cuda_stream, self.batched)
        return stream.record_event(next(self.events)) if apart else None

    def wait(self, end: Event | None) -> None:
        if end is not None:
            self.main.wait_event(end)

    def join(self) -> None:
        """Lets the caller's stream wait for all copies: they read tensors, also after an error."""
        for side in self.sides:
            if side is not self.main:
                side.wait_stream(self.main)  # under capture, one that has copied nothing yet must be part of it
                self.main.wait_stream(side)


def meetings(engine: Engine, call: Call, algorithm: Algorithm, words: str) -> Callable[[str], None]:
    """Returns a function that lets the current streams wait until all ranks have come. Collective.

    ``algorithm`` is prepared: the bytes lie behind its counters, as long as graphs may be replayed. ``words`` say what
    the ranks call. The function takes more words on which they must agree; new ones make a plan.
    """
    xs, outs = [], []
    for member in runner_of(engine).members:
        end = runner_of(engine).kernels.counters()[algorithm][member.rank] + COUNTERS_NBYTES
        for made, count in ((xs, 1), (outs, engine.world_size)):
            end -= PACK_NBYTES
            made.append(tensor_at(end, member.device, torch.empty(count, dtype=BYTE, device="meta")))
    ranks = [Operands((x,), (out,)) for x, out in zip(xs, outs, strict=True)]
    how = {"algorithm": MEETING.value, "timeout_s": call.timeout_s, "blocks": 1}
    plans: BoundedCache[Plan] = BoundedCache()

    def plan_of(more: str) -> Plan:
        work = Parts("allgather", (1,) * engine.world_size, beside=f"a meeting of {words}{more}")
        return plans.keep(more, engine.plan(Call.of(work, xs[0], **how), ranks))

    def meet(more: str = "") -> None:
        (plans.get(more) or plan_of(more)).run(ranks)

    plan_of("")  # loads the kernel
    return meet
