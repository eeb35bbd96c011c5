"""The calls whose parts travel by copy engines: all-gathers, reduce-scatters and all-reduces, chunk by chunk.

    all-gather      push | meet | keep              push: own part to every peer; keep: copy from scratch to the output
    reduce-scatter  push | meet | add               push: each part to its owner
    all-reduce      push | meet | add | push | meet | keep

While chunk k is added or kept, the chunks k + 1 and k + 2 travel: every peer has three places for a chunk in a rank's
scratch. Chunk k + 2 takes the place of chunk k - 1, and its copies begin after the meeting of chunk k, which each rank
begins after it has taken chunk k - 1. What else orders copies and readers is in copies.py. Into a symmetric output
peers copy directly, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch

from graphar.numerics.dtypes import BYTE
from graphar.numerics.partitions import split
from graphar.plan.algorithms import MEETING, Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config, Kernel
from graphar.plan.scratch import COPY_PLACES, PACK_NBYTES
from graphar.plan.slices import Slice, copied_chunks, row_slices
from graphar.plan.work import Parts, Sum
from graphar.ranks import agreement
from graphar.runtime import launcher
from graphar.runtime.arguments import Arguments
from graphar.runtime.bind.copies import Event, Lane, Move, here, meetings
from graphar.runtime.bind.launches import runner_of
from graphar.runtime.catalogue import sum_of_parts_source
from graphar.runtime.engine import Engine
from graphar.runtime.launcher import Grid, Launch
from graphar.runtime.member import Member
from graphar.runtime.runner import Runner
from graphar.runtime.side_stream import stream_beside

_AHEAD = COPY_PLACES - 1  # chunks that travel while one is taken
_PUSHES, _RESULTS, _KEPT = range(3)  # the side streams


@dataclass(frozen=True)
class _Rank(Lane):
    """A rank of this process in one call."""

    x: int  # the address of its input
    out: int  # and of its output
    outs: Sequence[int]  # of the symmetric outputs of all ranks; empty if peers copy to scratch
    factor: tuple[float, ...]  # by which the rounded sum is multiplied, if there is one
    ends: list[Event] = field(default_factory=list)  # of what the next meeting must come after

    @property
    def rank(self) -> int:
        return self.member.rank


def load(runner: Runner, algorithm: Algorithm, dtype: torch.dtype) -> list:
    """Loads what calls of an algorithm need, and returns each member's local sum; none of a gather. Collective."""
    runner.kernels.prepare(Kernel(MEETING, BYTE))
    if BYTE in algorithm.row.dtypes:  # it only moves data
        runner.kernels.prepare_all((algorithm, "scratch"), algorithm, algorithm.value, lambda member: None)
        return []
    source = sum_of_parts_source(dtype, runner.world_size)
    key, what = (algorithm, source.name), f"{algorithm.value}, {source.name}"

    def load_on(member: Member):
        return launcher.load(source, member.device, 0, what)

    return runner.kernels.prepare_all(key, algorithm, what, load_on)


class _ByCopies:
    """A call by copy engines. Subclasses say what is pushed, and what is done with chunks that are here."""

    _sides = _PUSHES + 1
    _meets_first = True  # whether ranks meet before the first copy: they read the places after the last meeting
    _ends_left = 0  # of the copies that the last chunk's _take began, how many the next meeting need not come after

    def __init__(self, engine: Engine, call: Call[Sum | Parts], config: Config) -> None:
        self._runner, self._config, self._world_size = runner_of(engine), config, engine.world_size
        self._itemsize, row = call.dtype.itemsize, config.algorithm.row
        parts, policy = self._parts(call), engine.table.copies
        self._place_nbytes = row.scratch(self._world_size).capacity * PACK_NBYTES
        self._counts = parts  # elements
        self._chunks = copied_chunks(parts, self._itemsize, self._place_nbytes, policy.chunk_nbytes, policy.chunks)
        functions = load(self._runner, config.algorithm, call.dtype)
        grid = Grid(config.blocks, config.threads, 0, overlaps=False)
        self._sums = [(Launch(one, [given], grid), given) for one in functions for given in [Arguments()]]
        words = agreement.words_of_launch(call, config, Slice(0))
        self._meet = meetings(engine, call, config.algorithm, words)

    def _parts(self, call: Call) -> Sequence[int]:
        return call.work.parts

    def run(self, ranks: Sequence[Operands]) -> None:
        """Enqueues the call on the members' current streams, for the operands of each rank of this process."""
        with self._runner.lock:
            self._runner.raise_failure()  # before any member enqueues anything
            own = [self._rank(member, one) for member, one in zip(self._runner.members, ranks, strict=True)]
            place = f" at {self._runner.symmetric.place(own[0].out)}" if own[0].outs else ""
            if self._meets_first:
                self._meet(place)
            try:
                self._go(own, place)
            except BaseException:
                for one in own:
                    one.join()
                raise
            for one in own:
                one.member.leave()

    def _rank(self, member: Member, own: Operands) -> _Rank:
        main = torch.cuda.current_stream(member.device)
        sides = [stream_beside(main.device, main.cuda_stream, at) for at in range(self._sides)]
        x, out = own.inputs[0].data_ptr(), own.outputs[0].data_ptr()
        outs = self._runner.symmetric.on_every_rank(out) if self._config.direct else None
        return _Rank(member, main, sides, x, out, outs or (), own.numbers)

    def _go(self, own: Sequence[_Rank], place: str) -> None:
        count = len(self._chunks)
        sent = [self._send(own, at) for at in range(min(_AHEAD, count))]
        for at in range(count):
            for one, end in zip(own, sent[at], strict=True):
                one.main.wait_event(end)
            self._meet_after(own, self._ends_left, "" if at or self._meets_first else place)
            if at + _AHEAD < count:
                sent.append(self._send(own, at + _AHEAD))
            for one in own:
                self._take(one, at)
        self._finish(own)
        for one in own:
            for end in one.ends:
                one.main.wait_event(end)

    def _send(self, own: Sequence[_Rank], at: int) -> list[Event]:
        return [one.copy(self._pushed(one, at), _PUSHES) for one in own]

    def _meet_after(self, own: Sequence[_Rank], left: int, words: str = "") -> None:
        """Lets ranks meet after the ends of the copies that they have noted, but for the ``left`` last ones."""
        for one in own:
            while len(one.ends) > left:
                one.main.wait_event(one.ends.pop(0))
        self._meet(words)

    def _pushed(self, one: _Rank, at: int) -> Iterator[Move]:
        raise NotImplementedError

    def _take(self, one: _Rank, at: int) -> None:
        raise NotImplementedError

    def _finish(self, own: Sequence[_Rank]) -> None:
        pass

    # ---- addresses --------------------------------------------------------------------------------------------------

    def _hops(self, rank: int, sign: int) -> Iterator[tuple[int, int]]:
        """Yields each distance and the rank that is so far after this one, or with ``sign`` -1 before it."""
        for hop in range(1, self._world_size):
            yield hop, (rank + sign * hop) % self._world_size

    def _slot(self, rank: int, at: int, hop: int, area: int = 0) -> int:
        """Returns the address on ``rank`` of the place of chunk ``at`` of the rank ``hop`` before it."""
        place = (area * COPY_PLACES + at % COPY_PLACES) * (self._world_size - 1) + hop - 1
        return self._runner.kernels.scratch(self._config.algorithm)[rank] + place * self._place_nbytes

    def _at(self, at: int, rank: int) -> tuple[int, int]:
        """Returns where chunk ``at`` of a rank's part begins in the whole tensor, and its size, in bytes."""
        chunk = self._chunks[at]
        return chunk.begin[rank] * self._itemsize, chunk.count[rank] * self._itemsize

    def _within_part(self, at: int) -> int:
        """Returns where chunk ``at`` begins in each rank's part, in bytes."""
        return self._chunks[at].offset * self._itemsize

    def _parts_of(self, one: _Rank, at: int) -> Iterator[Move]:
        """Yields the copies of each part of the input to its owner."""
        for hop, peer in self._hops(one.rank, 1):
            begin, nbytes = self._at(at, peer)
            yield self._slot(peer, at, hop), one.x + begin, nbytes

    def _to_all(self, one: _Rank, at: int, source: int, area: int) -> Iterator[Move]:
        """Yields the copies of this rank's part, which is at ``source``, to every peer."""
        begin, nbytes = self._at(at, one.rank)
        for hop, peer in self._hops(one.rank, 1):
            yield one.outs[peer] + begin if one.outs else self._slot(peer, at, hop, area), source, nbytes

    def _kept(self, one: _Rank, at: int, area: int) -> Iterator[Move]:
        """Yields the copies of the peers' parts from scratch to the output."""
        for hop, peer in self._hops(one.rank, -1):
            begin, nbytes = self._at(at, peer)
            yield one.out + begin, self._slot(one.rank, at, hop, area), nbytes

    def _add(self, one: _Rank, at: int, output: int) -> None:
        """Adds the parts of all ranks of a chunk that is here, in rank order, on the caller's stream."""
        begin, nbytes = self._at(at, one.rank)
        if not nbytes:
            return
        launch, arguments = self._sums[self._runner.members.index(one.member)]
        arguments.numel, arguments.output = nbytes // self._itemsize, output
        arguments.epilogue.scalar[0] = one.factor[0] if one.factor else 1.0
        arguments.peer_input[one.rank] = one.x + begin
        for hop, peer in self._hops(one.rank, -1):
            arguments.peer_input[peer] = self._slot(one.rank, at, hop)
        with here(one.member.device):
            launch.enqueue(one.main.cuda_stream)


class _AllGather(_ByCopies):
    def __init__(self, engine: Engine, call: Call[Sum | Parts], config: Config) -> None:
        super().__init__(engine, call, config)
        if config.direct:
            self._chunks = row_slices(call.work.parts, max(call.work.parts))

    _sides = _KEPT + 1

    def _go(self, own: Sequence[_Rank], place: str) -> None:
        copied = []  # beside the pushes; an input may be this rank's part of the output
        for one in own:
            mine, nbytes = one.out + self._at(0, one.rank)[0], self._counts[one.rank] * self._itemsize
            if one.x != mine:
                copied.append((one.main, one.copy([(mine, one.x, nbytes)], _RESULTS)))
        super()._go(own, place)
        for main, ended in copied:
            main.wait_event(ended)

    def _pushed(self, one: _Rank, at: int) -> Iterator[Move]:
        return self._to_all(one, at, one.x + self._within_part(at), 0)

    def _take(self, one: _Rank, at: int) -> None:
        if not one.outs:
            one.ends.append(one.copy(self._kept(one, at, 0), _KEPT))


class _ReduceScatter(_ByCopies):
    def _pushed(self, one: _Rank, at: int) -> Iterator[Move]:
        return self._parts_of(one, at)

    def _take(self, one: _Rank, at: int) -> None:
        self._add(one, at, one.out + self._within_part(at))


class _AllReduce(_ByCopies):
    """The sums of chunk k are pushed once it is added. They are here after the meeting of chunk k + 2, or the last."""

    def _parts(self, call: Call) -> Sequence[int]:
        (numel,), pack = call.work.parts, PACK_NBYTES // call.dtype.itemsize
        packs = split(-(-numel // pack), self._world_size)
        ends = [min(end * pack, numel) for end in accumulate(packs, initial=0)]
        return [end - begin for begin, end in pairwise(ends)]

    _meets_first = False  # the places of parts are free after the last meeting, and outputs are written after the first
    _ends_left = 1
    _sides = _KEPT + 1

    def _pushed(self, one: _Rank, at: int) -> Iterator[Move]:
        return self._parts_of(one, at)

    def _take(self, one: _Rank, at: int) -> None:
        if at >= _AHEAD:
            self._keep(one, at - _AHEAD)
        mine = one.out + self._at(at, one.rank)[0]
        self._add(one, at, mine)
        one.ends.append(one.copy(self._to_all(one, at, mine, 1), _RESULTS))

    def _keep(self, one: _Rank, at: int) -> None:
        if not one.outs:
            one.ends.append(one.copy(self._kept(one, at, 1), _KEPT))

    def _finish(self, own: Sequence[_Rank]) -> None:
        self._meet_after(own, 0)
        for one in own:
            for at in range(max(0, len(self._chunks) - _AHEAD), len(self._chunks)):
                self._keep(one, at)


_BY_OP = {"allgather": _AllGather, "reducescatter": _ReduceScatter, "allreduce": _AllReduce}


def bind_copies(engine: Engine, call: Call[Sum | Parts], config: Config) -> Callable[[Sequence[Operands]], None]:
    """Returns a function that makes a call by copy engines, with the operands of each rank. Collective."""
    return _BY_OP[call.op](engine, call, config).run
