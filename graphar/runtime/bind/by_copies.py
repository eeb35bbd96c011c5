"""The calls whose parts travel by copy engines: pushes, the meetings of ranks around them, and what is made of both.

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

Each call is a plan of copies, made once. Part r of a tensor belongs to rank r:

    all-gather       x of rank r    -- push --> scratch of every peer  -- keep --> part r of its output
    all-to-all       part p of x    -- push --> scratch of rank p      -- keep --> part r of its output
    reduce-scatter   part p of x    -- push --> scratch of rank p      -- add  --> its output
    all-reduce       part p of x    -- push --> scratch of rank p      -- add  --> part p of its output, and then
                     part r of sum  -- back --> scratch of every peer  -- keep --> part r of its output

Ranks meet after a push, and between sending back and keeping. With a symmetric output, what would be kept is copied
into the peers' outputs directly.

This is done chunk by chunk. While chunk k is added or kept, the chunks k + 1 and k + 2 travel: every peer has three
places for a chunk in a rank's scratch. Chunk k + 2 takes the place of chunk k - 1, and its copies begin after the
meeting of chunk k, which each rank begins after it has taken chunk k - 1. Sums of chunk k that were sent back are here
after the meeting of chunk k + 2, or the last.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, repeat
from typing import Any, NamedTuple

import torch

from graphar.numerics.dtypes import BYTE
from graphar.numerics.partitions import split_units
from graphar.plan.algorithms import MEETING, Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config, Kernel
from graphar.plan.scratch import COPY_PLACES, PACK_NBYTES
from graphar.plan.slices import Slice, copied_chunks, row_slices
from graphar.plan.work import Exchange, Parts, Sum
from graphar.ranks import agreement
from graphar.ranks.capture import is_capturing
from graphar.runtime.arguments import Arguments
from graphar.runtime.driver import check, driver
from graphar.runtime.engine import Engine, runner_of
from graphar.runtime.launcher import Grid, Launch, here
from graphar.runtime.member import Member
from graphar.runtime.memory.symmetric_tensors import tensor_at
from graphar.runtime.plan import BoundedCache, Plan
from graphar.runtime.runner import COUNTERS_NBYTES
from graphar.runtime.side_stream import stream_beside

_AHEAD = COPY_PLACES - 1  # chunks that travel while a chunk is taken
_PUSHES, _RESULTS, _KEPT = range(3)  # the side streams
_EVENTS = 32  # of a rank; each is waited for before as many others are recorded

current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # its handle; None in a build for the CPU
Event = torch.cuda.Event | torch.Event
Move = tuple[int, int, int]  # the address to copy to, the address to copy from, and bytes


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
    runner, plans = runner_of(engine), BoundedCache[Plan]()

    def bytes_of(member: Member, count: int, packs: int) -> torch.Tensor:
        """Returns the bytes that begin so many packs before the end of a member's counters."""
        begin = runner.regions[algorithm].pointers[member.rank] + COUNTERS_NBYTES - packs * PACK_NBYTES
        return tensor_at(begin, member.device, torch.empty(count, dtype=BYTE, device="meta"))

    ranks = [Operands((bytes_of(one, 1, 1),), (bytes_of(one, engine.world_size, 2),)) for one in runner.members]
    how = {"algorithm": MEETING.value, "timeout_s": call.timeout_s, "blocks": 1}

    def plan_of(more: str) -> Plan:
        work = Parts("allgather", (1,) * engine.world_size, beside=f"a meeting of {words}{more}")
        plan = engine.plan(Call.of(work, ranks[0].inputs[0], **how), ranks)
        return plans.keep(more, plan)

    def meet(more: str = "") -> None:
        (plans.get(more) or plan_of(more)).run(ranks)

    plan_of("")  # loads the kernel
    return meet


@dataclass
class _Rank(Lane):
    """A rank of this process on a stream of the caller's, with the addresses of its tensors in the present call."""

    bases: list[int] = field(default_factory=list)  # 0, the input, the output, and all ranks' symmetric outputs
    factor: float = 1.0  # by which the rounded sum is multiplied
    ends: list[Event | None] = field(default_factory=list)  # of the copies that the next meeting must come after

    @property
    def rank(self) -> int:
        return self.member.rank

    def moves(self, copies: Sequence[Copy]) -> list[Move]:
        bases = self.bases
        return [(bases[to] + there, bases[source] + begin, nbytes) for (to, there), (source, begin), nbytes in copies]


Address = tuple[int, int]  # what it counts from, and bytes after that
_NULL, _X, _OUT, _PEERS = range(4)  # 0; this rank's input; its output; the output of rank r is _PEERS + r
Copy = tuple[Address, Address, int]  # to, from, and bytes


class _Chunk(NamedTuple):
    """What a rank does with a chunk: the steps of the module's picture, in their order."""

    push: list[Copy]
    add: Sequence[tuple[int, int]] = ()  # the peers whose parts a local sum adds, and the addresses of these
    back: Sequence[Copy] = ()
    keep: Sequence[Copy] = ()


class ByCopies:
    """A call by copy engines. Making it is collective.

    A call of one chunk copies on the caller's stream: there is nothing to copy beside.
    """

    def __init__(self, engine: Engine, call: Call[Sum | Parts | Exchange], config: Config) -> None:
        self._runner, self._config, self._op, self._world_size = runner_of(engine), config, call.op, engine.world_size
        self._itemsize, self._gathers = call.dtype.itemsize, call.op in ("allgather", "alltoall")
        is_allreduce = call.op == "allreduce"
        self._keeps_after = _AHEAD if is_allreduce else 0  # chunks: so much later the sums that are sent back are here
        self._ends_left = 1 if is_allreduce else 0  # of a chunk's copies: the next meeting need not come after `back`
        # Whether ranks meet before the first copy. They read the places of gathers and of parts after the last meeting.
        # With a symmetric output, the places of an all-reduce's parts are twice as large, and hold the places of sums:
        # another call's sums may still be copied from there. Otherwise its parts are free after the last meeting, and
        # outputs are written after the first.
        self._meets_first = config.direct or not is_allreduce
        areas = 2 if is_allreduce and config.direct else 1
        self._place_nbytes = areas * config.algorithm.row.scratch(self._world_size).capacity * PACK_NBYTES
        self._counts: Sequence[int] = call.work.parts
        if is_allreduce:
            self._counts = split_units(self._counts[0], self._world_size, PACK_NBYTES // self._itemsize)
        if config.direct and self._gathers:
            self._slices = row_slices(self._counts, max(self._counts))
        else:
            # Beside other work the kernels of each chunk wait for SMs, and calls overlap that work, not one another.
            chunks = engine.table.copies.chunk_nbytes, 1 if call.blocks else engine.table.copies.chunks
            self._slices = copied_chunks(self._counts, self._itemsize, self._place_nbytes, *chunks)
        # Bytes from a part of the input to the next rank's. An all-to-all has equal parts, an all-gather one for all.
        self._stride = self._counts[0] * self._itemsize if call.op == "alltoall" else 0
        loaded = self._runner.prepare(Kernel(config.algorithm, BYTE if self._gathers else call.dtype))
        grid = Grid(config.blocks, config.threads, 0, overlaps=False)
        self._scratch = self._runner.scratch(config.algorithm)
        self._sums = {  # by rank; none in a gather
            member.rank: (Launch(function, [arguments], grid), arguments)
            for member, function in zip(self._runner.members, loaded, strict=True)
            if not self._gathers
            for arguments in [Arguments()]
        }
        self._ranks: BoundedCache[_Rank] = BoundedCache()  # by rank, and the handle of the caller's stream
        self._chunk = functools.cache(self._chunk_of)
        words = agreement.words_of_launch(call, config, Slice(0))
        self._meet = meetings(engine, call, config.algorithm, words)

    def _chunk_of(self, rank: int, at: int) -> _Chunk:
        chunk, ranks, direct = self._slices[at], self._world_size, self._config.direct
        begins, sizes = ([number * self._itemsize for number in numbers] for numbers in (chunk.begin, chunk.count))
        after = [(hop, (rank + hop) % ranks) for hop in range(1, ranks)]
        before = [(hop, (rank - hop) % ranks) for hop in range(1, ranks)]

        def place(to: int, hop: int, area: int = 0) -> Address:
            """Returns the place on rank ``to`` of the chunk of the rank ``hop`` before it."""
            number = (area * COPY_PLACES + at % COPY_PLACES) * (ranks - 1) + hop - 1
            return _NULL, self._scratch[to] + number * self._place_nbytes

        def to_all(area: int, base: int, own: int, stride: int = 0) -> list[Copy]:
            """Returns the copies of this rank's part to every peer: to peer p what is ``stride`` * p after ``own``."""
            return [
                ((_PEERS + p, begins[rank]) if direct else place(p, hop, area), (base, own + p * stride), sizes[rank])
                for hop, p in after
            ]

        def from_all(area: int) -> list[Copy]:
            """Returns the copies of the peers' parts to the output, unless the peers copied them there directly."""
            return [] if direct else [((_OUT, begins[p]), place(rank, hop, area), sizes[p]) for hop, p in before]

        if self._gathers:
            return _Chunk(to_all(0, _X, chunk.offset * self._itemsize, self._stride), keep=from_all(0))
        to_owners = [(place(p, hop), (_X, begins[p]), sizes[p]) for hop, p in after]
        arrived = [(p, place(rank, hop)[1]) for hop, p in before]
        if self._op == "reducescatter":
            return _Chunk(to_owners, arrived)
        return _Chunk(to_owners, arrived, back=to_all(1, _OUT, begins[rank]), keep=from_all(1))

    def run(self, ranks: Sequence[Operands]) -> None:
        """Enqueues the call on the members' current streams, for the operands of each rank of this process."""
        with self._runner.lock:
            self._runner.raise_failure()  # before any member enqueues anything
            where = self._runner.symmetric.where
            outs, place = where(ranks[0].outputs[0].data_ptr()) if self._config.direct else ((), "")
            states = [self._rank(member, tensors) for member, tensors in zip(self._runner.members, ranks, strict=True)]
            for state in states:
                state.bases += outs
            if self._meets_first:
                self._meet(place)
            try:
                self._go(states, place)
            except BaseException:
                for state in states:
                    state.join()
                raise
            for state in states:
                state.member.leave()

    def _rank(self, member: Member, operands: Operands) -> _Rank:
        stream = current_stream(member.device)
        if stream != member.stream:
            member.follow(stream)  # not only the first meeting comes after the calls on other streams
        state = self._ranks.get(key := (member.rank, stream))
        if state is None:
            main = torch.cuda.current_stream(member.device)
            apart = (_PUSHES, _RESULTS, _KEPT) if len(self._slices) > 1 else (_RESULTS,) if self._gathers else ()
            beside = [stream_beside(main.device, main.cuda_stream, at) for at in (_PUSHES, _RESULTS, _KEPT)]
            sides = [side if at in apart else main for at, side in enumerate(beside)]
            events = cycle([torch.cuda.Event() for _ in range(_EVENTS)])
            state = self._ranks.keep(key, _Rank(member, main, sides, events=events))
        state.bases = [0, operands.inputs[0].data_ptr(), operands.outputs[0].data_ptr()]
        state.factor, state.ends = operands.numbers[0] if operands.numbers else 1.0, []
        state.batched = self._world_size > 2 and not is_capturing(member.device)
        return state

    def _go(self, states: Sequence[_Rank], place: str) -> None:
        count = len(self._slices)
        copied = [state for state in states if self._gathers and self._copy_own_part(state)]
        sent = [self._push(states, at) for at in range(min(_AHEAD, count))]
        for at in range(count):
            for state, end in zip(states, sent[at], strict=True):
                state.wait(end)
            self._meet_after(states, self._ends_left, "" if at or self._meets_first else place)
            if at + _AHEAD < count:
                sent.append(self._push(states, at + _AHEAD))
            for state in states:
                self._take(state, at)
        if self._keeps_after:
            self._meet_after(states, 0)
        for state in states:
            for at in range(max(0, count - self._keeps_after), count):
                self._keep(state, at)
            for end in state.ends:
                state.wait(end)
        for state in copied:
            state.main.wait_stream(state.sides[_RESULTS])

    def _copy_own_part(self, state: _Rank) -> bool:
        """Copies a rank's own part of a gather to its output beside the pushes; False if the input lies there."""
        source, begin = state.bases[_X] + state.rank * self._stride, self._slices[0].begin[state.rank]
        if source != (to := state.bases[_OUT] + begin * self._itemsize):
            state.copy([(to, source, self._counts[state.rank] * self._itemsize)], _RESULTS)
        return source != to

    def _push(self, states: Sequence[_Rank], at: int) -> list[Event | None]:
        return [state.copy(state.moves(self._chunk(state.rank, at).push), _PUSHES) for state in states]

    def _meet_after(self, states: Sequence[_Rank], left: int, words: str = "") -> None:
        """Waits for each rank's noted copies except the last ``left``, and then lets the ranks meet."""
        for state in states:
            while len(state.ends) > left:
                state.wait(state.ends.pop(0))
        self._meet(words)

    def _take(self, state: _Rank, at: int) -> None:
        """Does what follows the meeting after which chunk ``at`` has arrived."""
        if at >= self._keeps_after:
            self._keep(state, at - self._keeps_after)
        chunk = self._chunk(state.rank, at)
        if chunk.add and self._slices[at].count[state.rank]:
            self._add(state, self._slices[at], chunk.add)
        if chunk.back:
            state.ends.append(state.copy(state.moves(chunk.back), _RESULTS))

    def _keep(self, state: _Rank, at: int) -> None:
        if keep := self._chunk(state.rank, at).keep:
            state.ends.append(state.copy(state.moves(keep), _KEPT))

    def _add(self, state: _Rank, chunk: Slice, arrived: Sequence[tuple[int, int]]) -> None:
        """Adds this rank's own part of a chunk and its peers' parts, in rank order."""
        launch, arguments = self._sums[state.rank]
        own = chunk.begin[state.rank]
        to = chunk.offset if self._op == "reducescatter" else own
        arguments.numel, arguments.output = chunk.count[state.rank], state.bases[_OUT] + to * self._itemsize
        arguments.epilogue.scalar[0] = state.factor
        arguments.peer_input[state.rank] = state.bases[_X] + own * self._itemsize
        for peer, part in arrived:
            arguments.peer_input[peer] = part
        with here(state.member.device):
            launch.enqueue(state.main.cuda_stream)
