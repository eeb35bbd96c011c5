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

Calls are made chunk by chunk:

    all-gather      push | meet | keep              push: own part to every peer; keep: copy from scratch to the output
    all-to-all      push | meet | keep              push: each part to its owner
    reduce-scatter  push | meet | add               push: each part to its owner
    all-reduce      push | meet | add | push | meet | keep

While chunk k is added or kept, the chunks k + 1 and k + 2 travel: every peer has three places for a chunk in a rank's
scratch. Chunk k + 2 takes the place of chunk k - 1, and its copies begin after the meeting of chunk k, which each rank
begins after it has taken chunk k - 1. Into a symmetric output peers copy directly, and nothing is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle, pairwise, repeat
from typing import Any, NamedTuple

import torch

from graphar.numerics.dtypes import BYTE
from graphar.numerics.partitions import split
from graphar.plan.algorithms import MEETING, Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config, Kernel
from graphar.plan.scratch import COPY_PLACES, PACK_NBYTES
from graphar.plan.slices import Slice, copied_chunks, row_slices
from graphar.plan.work import Exchange, Parts, Sum
from graphar.ranks import agreement
from graphar.ranks.capture import is_capturing
from graphar.runtime import launcher
from graphar.runtime.arguments import Arguments
from graphar.runtime.bind.launches import runner_of
from graphar.runtime.catalogue import KernelSource, sum_of_parts_source
from graphar.runtime.driver import check, driver, on_device
from graphar.runtime.engine import Engine
from graphar.runtime.kernels import COUNTERS_NBYTES, Kernels
from graphar.runtime.launcher import Grid, Launch
from graphar.runtime.member import Member
from graphar.runtime.memory.symmetric_tensors import tensor_at
from graphar.runtime.plan import BoundedCache, Plan
from graphar.runtime.runner import Runner
from graphar.runtime.side_stream import stream_beside

_AHEAD = COPY_PLACES - 1  # chunks that travel while a chunk is taken
_PUSHES, _RESULTS, _KEPT = range(3)  # the side streams
_EVENTS = 32  # of a rank; each is waited for before as many others are recorded

current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # its handle; None in a build for the CPU
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


# ---- calls ----------------------------------------------------------------------------------------------------------


@dataclass
class _Rank(Lane):
    """A rank of this process on a stream of the caller's, with the addresses of its tensors in the present call."""

    x: int = 0
    out: int = 0
    outs: Sequence[int] = ()  # of the symmetric outputs of all ranks; empty if peers copy to scratch
    factor: float = 1.0  # by which the rounded sum is multiplied
    ends: list[Event | None] = field(default_factory=list)  # of the copies that the next meeting must come after

    @property
    def rank(self) -> int:
        return self.member.rank


_MEETING = Kernel(MEETING, BYTE)


def sources(kernels: Kernels, world_size: int, algorithm: Algorithm, dtype: torch.dtype) -> list[KernelSource]:
    """Returns the kernels that :func:`load` loads."""
    adds = [] if BYTE in algorithm.row.dtypes else [sum_of_parts_source(dtype, world_size)]
    return [kernels.source_of(_MEETING), *adds]


def load(runner: Runner, algorithm: Algorithm, dtype: torch.dtype) -> list:
    """Loads the kernels of an algorithm, and returns each member's local sum; empty for a gather. Collective."""
    runner.kernels.prepare(_MEETING)
    if BYTE in algorithm.row.dtypes:  # it only moves data
        runner.kernels.prepare_all((algorithm, "scratch"), algorithm, algorithm.value, lambda member: None)
        return []
    source = sum_of_parts_source(dtype, runner.world_size)
    key, what = (algorithm, source.name), f"{algorithm.value}, {source.name}"

    return runner.kernels.prepare_all(
        key, algorithm, what, lambda member: launcher.load(source, member.device, 0, what)
    )


class _Step(NamedTuple):
    """What a rank moves of a chunk: addresses of scratch, and bytes from the begin of a tensor."""

    begin: int  # of the rank's part of the chunk in the whole tensor
    nbytes: int
    offset: int  # of the chunk in each rank's part
    parts: list[Move]  # of each peer's part: its place there, its begin, and its bytes
    places: list[list[int]]  # by area, this rank's places on the peers
    kept: list[list[Move]]  # by area, of each peer's part: its begin, its place here, and its bytes


class ByCopies:
    """A call by copy engines. Making it is collective.

    A call of one chunk copies on the caller's stream: there is nothing to copy beside. The sums of an all-reduce's
    chunk k are pushed once it is added. They are here after the meeting of chunk k + 2, or the last.
    """

    def __init__(self, engine: Engine, call: Call[Sum | Parts | Exchange], config: Config) -> None:
        self._runner, self._config, self._world_size = runner_of(engine), config, engine.world_size
        self._itemsize, row = call.dtype.itemsize, config.algorithm.row
        self._adds, self._returns = call.op in ("allreduce", "reducescatter"), call.op == "allreduce"
        self._areas = 2 if self._returns else 1  # of the scratch: places of parts, and places of sums
        # Whether ranks meet before the first copy. They read the places of gathers and of parts after the last meeting.
        # With a symmetric output, the places of an all-reduce's parts are twice as large, and hold the places of sums:
        # another call's sums may still be copied from there. Otherwise its parts are free after the last meeting, and
        # outputs are written after the first.
        self._meets_first = config.direct or not self._returns
        # Of the copies that the last chunk's _take began, how many the next meeting need not come after.
        self._ends_left = 1 if self._returns else 0
        areas = self._areas if config.direct else 1  # those that copies share
        self._place_nbytes = areas * row.scratch(self._world_size).capacity * PACK_NBYTES
        self._counts = _elements_of_ranks(call, self._world_size)
        if config.direct and not self._adds:
            self._chunks = row_slices(self._counts, max(self._counts))
        else:
            # Beside other work the kernels of each chunk wait for SMs, and calls overlap that work, not one another.
            chunks = engine.table.copies.chunk_nbytes, 1 if call.blocks else engine.table.copies.chunks
            self._chunks = copied_chunks(self._counts, self._itemsize, self._place_nbytes, *chunks)
        # Bytes from a part of the input to the next rank's. An all-to-all has equal parts, an all-gather one for all.
        self._stride = self._counts[0] * self._itemsize if call.op == "alltoall" else 0
        functions = load(self._runner, config.algorithm, call.dtype)
        grid = Grid(config.blocks, config.threads, 0, overlaps=False)
        self._scratch = self._runner.kernels.scratch(config.algorithm)
        self._sums = {  # by rank; none in a gather
            member.rank: (Launch(function, [arguments], grid), arguments)
            for member, function in zip(self._runner.members, functions, strict=False)
            for arguments in [Arguments()]
        }
        self._ranks: BoundedCache[_Rank] = BoundedCache()  # by rank, and the handle of the caller's stream
        self._step = functools.cache(self._step_of)
        words = agreement.words_of_launch(call, config, Slice(0))
        self._meet = meetings(engine, call, config.algorithm, words)

    def run(self, ranks: Sequence[Operands]) -> None:
        """Enqueues the call on the members' current streams, for the operands of each rank of this process."""
        with self._runner.lock:
            self._runner.raise_failure()  # before any member enqueues anything
            where = self._runner.symmetric.where
            outs, place = where(ranks[0].outputs[0].data_ptr()) if self._config.direct else ((), "")
            states = [self._rank(member, tensors) for member, tensors in zip(self._runner.members, ranks, strict=True)]
            for state in states:
                state.outs = outs
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
            apart = (_PUSHES, _RESULTS, _KEPT) if len(self._chunks) > 1 else () if self._adds else (_RESULTS,)
            beside = [stream_beside(main.device, main.cuda_stream, at) for at in (_PUSHES, _RESULTS, _KEPT)]
            sides = [side if at in apart else main for at, side in enumerate(beside)]
            events = cycle([torch.cuda.Event() for _ in range(_EVENTS)])
            state = self._ranks.keep(key, _Rank(member, main, sides, events=events))
        state.x, state.out = operands.inputs[0].data_ptr(), operands.outputs[0].data_ptr()
        state.factor, state.ends = operands.numbers[0] if operands.numbers else 1.0, []
        state.batched = self._world_size > 2 and not is_capturing(member.device)
        return state

    def _go(self, states: Sequence[_Rank], place: str) -> None:
        count = len(self._chunks)
        copied = [] if self._adds else [state for state in states if self._copy_own_part(state)]
        sent = [self._send(states, at) for at in range(min(_AHEAD, count))]
        for at in range(count):
            for state, end in zip(states, sent[at], strict=True):
                state.wait(end)
            self._meet_after(states, self._ends_left, "" if at or self._meets_first else place)
            if at + _AHEAD < count:
                sent.append(self._send(states, at + _AHEAD))
            for state in states:
                self._take(state, at)
        if self._returns:
            self._meet_after(states, 0)
            for state in states:
                for at in range(max(0, count - _AHEAD), count):
                    self._keep(state, at, 1)
        for state in states:
            for end in state.ends:
                state.wait(end)
        for state in copied:
            state.main.wait_stream(state.sides[_RESULTS])

    def _copy_own_part(self, state: _Rank) -> bool:
        """Copies a rank's own part of a gather to its output beside the pushes; False if the input lies there."""
        mine, nbytes = state.out + self._at(0, state.rank)[0], self._counts[state.rank] * self._itemsize
        source = state.x + state.rank * self._stride
        if source != mine:
            state.copy([(mine, source, nbytes)], _RESULTS)
        return source != mine

    def _send(self, states: Sequence[_Rank], at: int) -> list[Event | None]:
        return [state.copy(self._pushed(state, at), _PUSHES) for state in states]

    def _meet_after(self, states: Sequence[_Rank], left: int, words: str = "") -> None:
        """Lets ranks meet after the copies whose ends they have noted, but for the last ``left`` copies."""
        for state in states:
            while len(state.ends) > left:
                state.wait(state.ends.pop(0))
        self._meet(words)

    def _pushed(self, state: _Rank, at: int) -> list[Move]:
        """Returns the copies of each part of the input to its owner, or of a gather's own part to all peers."""
        step = self._step(state.rank, at)
        if self._adds:
            return [(to, state.x + begin, nbytes) for to, begin, nbytes in step.parts]
        return self._to_all(state, at, state.x + step.offset, 0, self._stride)

    def _take(self, state: _Rank, at: int) -> None:
        """Keeps or adds a chunk that has arrived, and pushes the sums of an all-reduce."""
        if not self._adds:
            self._keep(state, at, 0)
        elif not self._returns:
            self._add(state, at, state.out + self._step(state.rank, at).offset)
        else:
            if at >= _AHEAD:
                self._keep(state, at - _AHEAD, 1)
            mine = state.out + self._at(at, state.rank)[0]
            self._add(state, at, mine)
            state.ends.append(state.copy(self._to_all(state, at, mine, 1), _RESULTS))

    # ---- addresses --------------------------------------------------------------------------------------------------

    def _hops(self, rank: int, sign: int) -> Iterator[tuple[int, int]]:
        """Yields each distance, and the rank at this distance after ``rank``, or with ``sign`` -1 before it."""
        for hop in range(1, self._world_size):
            yield hop, (rank + sign * hop) % self._world_size

    def _slot(self, rank: int, at: int, hop: int, area: int = 0) -> int:
        """Returns the address on ``rank`` of the place of chunk ``at`` of the rank ``hop`` before it."""
        place = (area * COPY_PLACES + at % COPY_PLACES) * (self._world_size - 1) + hop - 1
        return self._scratch[rank] + place * self._place_nbytes

    def _at(self, at: int, rank: int) -> tuple[int, int]:
        """Returns where chunk ``at`` of a rank's part begins in the whole tensor, and its size, in bytes."""
        chunk = self._chunks[at]
        return chunk.begin[rank] * self._itemsize, chunk.count[rank] * self._itemsize

    def _step_of(self, rank: int, at: int) -> _Step:
        after, before, areas = [*self._hops(rank, 1)], [*self._hops(rank, -1)], range(self._areas)
        parts = [(self._slot(peer, at, hop), *self._at(at, peer)) for hop, peer in after]
        places = [[self._slot(peer, at, hop, area) for hop, peer in after] for area in areas]
        ends = [(hop, *self._at(at, peer)) for hop, peer in before]
        kept = [[(begin, self._slot(rank, at, hop, area), nbytes) for hop, begin, nbytes in ends] for area in areas]
        return _Step(*self._at(at, rank), self._chunks[at].offset * self._itemsize, parts, places, kept)

    def _to_all(self, state: _Rank, at: int, source: int, area: int, stride: int = 0) -> list[Move]:
        """Returns the copies of this rank's part to every peer: to peer p what is ``stride`` * p after ``source``."""
        step, peers = self._step(state.rank, at), [peer for _, peer in self._hops(state.rank, 1)]
        places = [state.outs[peer] + step.begin for peer in peers] if state.outs else step.places[area]
        return [(to, source + peer * stride, step.nbytes) for to, peer in zip(places, peers, strict=True)]

    def _keep(self, state: _Rank, at: int, area: int) -> None:
        """Copies the peers' parts from scratch to the output, unless they were copied there directly."""
        if not state.outs:
            kept = self._step(state.rank, at).kept[area]
            state.ends.append(state.copy([(state.out + begin, place, nbytes) for begin, place, nbytes in kept], _KEPT))

    def _add(self, state: _Rank, at: int, output: int) -> None:
        """Adds all ranks' parts of a chunk that has arrived, in rank order, on the caller's stream."""
        step = self._step(state.rank, at)
        if not step.nbytes:
            return
        launch, arguments = self._sums[state.rank]
        arguments.numel, arguments.output = step.nbytes // self._itemsize, output
        arguments.epilogue.scalar[0] = state.factor
        arguments.peer_input[state.rank] = state.x + step.begin
        for hop, peer in self._hops(state.rank, -1):
            arguments.peer_input[peer] = step.kept[0][hop - 1][1]
        with here(state.member.device):
            launch.enqueue(state.main.cuda_stream)


def _elements_of_ranks(call: Call, world_size: int) -> Sequence[int]:
    """Returns the length of each rank's part: an all-reduce is divided in packs."""
    if call.op != "allreduce":
        return call.work.parts
    (numel,), pack = call.work.parts, PACK_NBYTES // call.dtype.itemsize
    ends = [min(end * pack, numel) for end in accumulate(split(-(-numel // pack), world_size), initial=0)]
    return [end - begin for begin, end in pairwise(ends)]
