"""Calls by copy engines, between ranks in the host's memory: streams run as late, torn and out of order as they may."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from graphar import reference
from graphar.plan.algorithms import COPYING
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.tables import shipped_table
from graphar.plan.work import Exchange, Parts, Sum
from graphar.runtime.arguments import Arguments
from graphar.runtime.bind import by_copies
from tests.cases import bit_patterns, same_bits

OPS, UNIT = tuple(COPYING), 4096
FREE = {"stream": None, "follow": lambda stream: None, "leave": lambda: None}  # of a member whose streams follow none
every_op = pytest.mark.parametrize("op", OPS)


def bytes_at(address: int, like: torch.Tensor) -> torch.Tensor:
    raw = (ctypes.c_char * like.nbytes).from_address(address)
    return torch.frombuffer(raw, dtype=like.dtype)


class Stream:
    """A queue of steps, which :meth:`Machine.run` takes. A step returns whether it is done."""

    def __init__(self, machine: Machine, device: int) -> None:
        self.device, self.steps, self.cuda_stream = device, [], len(machine.streams)
        machine.streams.append(self)

    def record_event(self, event=None):
        """Notes a new end in an event. Who waits waits for the last one that it had then."""
        event, end = event or SimpleNamespace(), SimpleNamespace(done=False)
        event.end = end
        self.steps.append(lambda: setattr(end, "done", True) or True)
        return event

    def wait_event(self, event) -> None:
        self.steps.append(lambda end=event.end: end.done)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Machine:
    """GPUs of as many ranks. The seed decides which stream takes its next step when."""

    def __init__(self, world_size: int, seed: int, monkeypatch) -> None:
        self.world_size, self.streams, self._choices = world_size, [], random.Random(seed)
        self._streams_of_callers = [[Stream(self, rank) for rank in range(world_size)] for _ in range(2)]
        self.mains, self._begun = self._streams_of_callers[0], [0] * world_size
        self._sides, self.table = {}, shipped_table("default")
        least = self._choices.choice([UNIT, UNIT, 64 * UNIT])  # in the last case tensors have one chunk
        self.table = replace(self.table, copies=replace(self.table.copies, chunk_nbytes=least, chunks=1 << 20))
        scratch = COPYING["allreduce"].row.scratch(world_size)
        self._scratch = [torch.empty(scratch.nbytes, dtype=torch.uint8) for _ in range(world_size)]
        members = [self._member(rank) for rank in range(world_size)]
        self.symmetric: dict[int, list[int]] = {}
        self.runner = SimpleNamespace(
            lock=threading.Lock(),
            world_size=world_size,
            members=members,
            raise_failure=lambda: None,
            scratch=lambda algorithm: [one.data_ptr() for one in self._scratch],
            prepare=lambda kernel: [kernel.dtype for _ in members],
            symmetric=SimpleNamespace(where=lambda pointer: (self.symmetric[pointer], "")),
        )
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.mains[device])
        monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
        monkeypatch.setattr(by_copies, "current_stream", lambda device: self.mains[device].cuda_stream)
        monkeypatch.setattr(by_copies, "is_capturing", lambda device: self._choices.random() < 0.5)
        monkeypatch.setattr(by_copies, "stream_beside", self._side)
        monkeypatch.setattr(by_copies, "here", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(by_copies, "meetings", lambda *given: self._meet)
        monkeypatch.setattr(by_copies, "Launch", lambda dtype, arguments, grid: Add(self, dtype, *arguments))
        monkeypatch.setattr(by_copies, "_functions", lambda: (self._copy, self._copy_batch))
        monkeypatch.setattr(by_copies, "_attributes", lambda: SimpleNamespace(getPtr=lambda: 0))

    def _side(self, device: int, main: int, at: int) -> Stream:
        if (main, at) not in self._sides:
            self._sides[main, at] = Stream(self, device)
        return self._sides[main, at]

    def _member(self, rank: int) -> SimpleNamespace:
        """A member, the calls of which are in one order whatever stream they are on, as those of a real one."""
        member = SimpleNamespace(rank=rank, device=rank, stream=None, leave=lambda: None)

        def follow(stream: int) -> None:
            if member.stream is not None:
                self.streams[stream].wait_stream(self.streams[member.stream])
            member.stream = stream

        member.follow = follow
        return member

    def use_other_streams(self) -> None:
        """Makes later calls on streams of the caller's that wait for nothing."""
        self.mains = self._streams_of_callers[self.mains is self._streams_of_callers[0]]

    def _meet(self, more: str = "") -> None:
        """Lets each rank note that it has come, and then wait until all have."""
        for member, main in zip(self.runner.members, self.mains, strict=True):
            if main.cuda_stream != member.stream:
                member.follow(main.cuda_stream)
            self._come(member.rank, main)

    def _come(self, rank: int, main: Stream) -> None:
        at = SimpleNamespace(number=None)

        def meet() -> bool:
            if at.number is None:
                self._begun[rank] += 1
                at.number = self._begun[rank]
            return min(self._begun) >= at.number

        main.steps.append(meet)

    def _copy_batch(self, to, source, nbytes, count, attributes, first, kinds, stream) -> None:
        """The copies of a batch, in any order."""
        assert stream, "the default stream takes no batch"
        assert (len(to), len(source), len(nbytes), kinds) == (count,) * 3 + (1,)
        for move in self._choices.sample([*zip(to, source, nbytes, strict=True)], count):
            self._copy(*move, stream)

    def _copy(self, to, source, nbytes, stream) -> None:
        """A copy in two steps: it is torn, and reads late."""
        cut = self._choices.randrange(nbytes)
        for begin, count in ((cut, nbytes - cut), (0, cut)):
            self.streams[stream].steps.append(
                lambda begin=begin, count=count: ctypes.memmove(to + begin, source + begin, count) or True
            )

    def run(self) -> None:
        """Takes steps until none is left, of late streams last. It fails if streams wait for one another for ever."""
        lateness: dict[Stream, float] = {}
        while waiting := [stream for stream in self.streams if stream.steps]:
            if not lateness or self._choices.random() < 0.01:
                lateness = {stream: self._choices.random() for stream in self.streams}
            for stream in sorted(waiting, key=lateness.__getitem__):
                if stream.steps[0]():
                    stream.steps.pop(0)
                    break
            else:
                raise AssertionError("the streams wait for one another")


class Add:
    """Stands in for the launch of sum_of_parts: the sum of what its parts hold when the stream comes to it."""

    def __init__(self, machine: Machine, dtype: torch.dtype, arguments: Arguments) -> None:
        self._machine, self._dtype, self._arguments = machine, dtype, arguments

    def enqueue(self, stream: int) -> None:
        given = self._arguments
        like = torch.empty(given.numel, dtype=self._dtype, device="meta")
        parts = [bytes_at(given.peer_input[rank], like) for rank in range(self._machine.world_size)]
        output, factor = bytes_at(given.output, like), given.epilogue.scalar[0]
        self._machine.streams[stream].steps.append(lambda: output.copy_(scaled(parts, factor)) is output)


def scaled(parts: list[torch.Tensor], factor: float) -> torch.Tensor:
    total = reference.allreduce(parts)
    return torch.where(total.isnan(), total, total * factor)  # torch's vectors and scalars make different NaNs


def work_of(op: str, counts) -> Sum | Parts | Exchange:
    if op == "alltoall":
        return Exchange(0, (1,), (tuple(counts),) * len(counts), (tuple(counts),) * len(counts))
    return Sum(sum(counts)) if op == "allreduce" else Parts(op, tuple(counts))


def wrong_elements(op: str, world_size: int, seed: int, monkeypatch, symmetric: float = 0) -> int:
    """How many elements are wrong after three calls of any sizes, all of which are enqueued before the first runs.

    ``symmetric`` is the share of calls with symmetric outputs.
    """
    choices, machine = random.Random(seed), Machine(world_size, seed, monkeypatch)
    is_on_two_streams = seed % 3 == 0
    dtype, factor = choices.choice([torch.bfloat16, torch.float32]), choices.choice([1.0, 0.5])
    found, expected, kept = [], [], []
    for call in range(3):
        if is_on_two_streams:
            machine.use_other_streams()
        counts = [choices.choice([0, 1, 7, choices.randrange(1, 5 * UNIT)]) for _ in range(world_size)]
        counts[choices.randrange(world_size)] += UNIT  # one is not empty
        counts = [max(counts)] * world_size if op == "alltoall" else counts
        total = sum(counts)
        sizes = counts if op == "allgather" else [total] * world_size
        xs = [bit_patterns(100 * call + rank, size, dtype) for rank, size in enumerate(sizes)]
        outs = [torch.full((count if op == "reducescatter" else total,), 7.0).to(dtype) for count in counts]
        expected += {
            "allreduce": lambda xs=xs: [scaled(xs, factor)] * world_size,
            "allgather": lambda xs=xs: [torch.cat(xs)] * world_size,
            "alltoall": lambda xs=xs: reference.alltoall(xs),
            "reducescatter": lambda xs=xs, counts=counts: scaled(xs, factor).split(counts),
        }[op]()
        direct = choices.random() < symmetric
        if direct:
            machine.symmetric.update({out.data_ptr(): [one.data_ptr() for one in outs] for out in outs})
        work = Call.of(work_of(op, counts), xs[0], blocks=choices.choice([None, None, 1]))
        config = Config(COPYING[op], 1, 32, direct=direct)
        ranks = [Operands((x,), (out,), (factor,)) for x, out in zip(xs, outs, strict=True)]
        by_copies.ByCopies(machine, work, config).run(ranks)
        for main, out in zip(machine.mains, outs, strict=True):
            result = torch.empty_like(out)
            found.append(result)
            main.steps.append(lambda result=result, out=out: result.copy_(out) is result)
        kept += [*xs, *outs]
    machine.run()
    return sum(same_bits(one, right) for one, right in zip(found, expected, strict=True))


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@every_op
def test_results_are_the_specifications_whatever_is_late(op, world_size, monkeypatch):
    for seed in range(8):
        assert wrong_elements(op, world_size, seed, monkeypatch) == 0, seed


@pytest.mark.parametrize("symmetric", [1, 0.5])
@pytest.mark.parametrize("op", [op for op in OPS if COPYING[op].row.direct])
def test_peers_may_copy_into_symmetric_outputs(op, symmetric, monkeypatch):
    for seed in range(16):
        assert wrong_elements(op, 3, seed, monkeypatch, symmetric) == 0, seed


def test_a_call_beside_other_work_is_one_chunk_if_that_fits_a_place(monkeypatch):
    machine, config = Machine(2, 0, monkeypatch), Config(COPYING["allreduce"], 1, 32)
    place = COPYING["allreduce"].row.scratch(2).capacity * 16

    def chunks(nbytes, blocks):
        call = Call.of(Sum(nbytes // 4), torch.empty(1, dtype=torch.float32), blocks=blocks)
        return len(by_copies.ByCopies(machine, call, config)._slices)

    assert (chunks(2 * place, 1), chunks(2 * place + 32, 1)) == (1, 2)
    assert chunks(2 * place, None) > 2


def test_the_driver_is_given_addresses_sizes_and_attributes_as_it_takes_them(monkeypatch):
    """A library of Python functions with the driver's prototypes copies in place of it."""
    source, out, made = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8), []
    number, pointer, size = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t

    def copy_one(to, begin, nbytes, stream) -> int:
        ctypes.memmove(to, begin, nbytes)
        made.append(stream)
        return 0

    def copy_batch(to, begin, nbytes, count, attributes, first, kinds, stream) -> int:
        columns = [(ctypes.c_uint64 * count).from_address(one) for one in (to, begin, nbytes)]
        for move in zip(*columns, strict=True):
            ctypes.memmove(*move)
        order, *_, flags = (ctypes.c_int * 6).from_address(attributes)
        made.append((order, flags, ctypes.c_size_t.from_address(first).value, kinds, stream))
        return 0

    one = ctypes.CFUNCTYPE(ctypes.c_int, number, number, size, pointer)(copy_one)
    batch = ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 3, size, *[pointer] * 2, size, pointer)(copy_batch)
    library = SimpleNamespace(cuMemcpyAsync=one, cuMemcpyBatchAsync_v2=batch)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(by_copies, "_functions", by_copies._functions.__wrapped__)
    moves = [(out.data_ptr() + at, source.data_ptr() + at, nbytes) for at, nbytes in ((0, 10), (10, 0), (10, 54))]
    stream = 0x7F00_1234_5678

    by_copies.enqueue(moves, stream, batched=True)
    assert torch.equal(out, source)
    by_copies.enqueue(moves, stream, batched=False)
    by_copies.enqueue(moves[:1], stream, batched=True)

    assert made == [(1, 1, 0, 1, stream), stream, stream, stream]


def is_noticed(op: str, monkeypatch, symmetric: float = 0) -> bool:
    return any(wrong_elements(op, 3, seed, monkeypatch, symmetric) for seed in range(30))


def always(value) -> property:
    return property(lambda self: value, lambda self, other: None)


@every_op
def test_a_chunk_that_travels_into_a_place_before_it_is_free_is_noticed(op, monkeypatch):
    monkeypatch.setattr(by_copies, "COPY_PLACES", 2)
    assert is_noticed(op, monkeypatch)


@every_op
def test_a_meeting_that_does_not_come_after_the_copies_is_noticed(op, monkeypatch):
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    assert is_noticed(op, monkeypatch)


@pytest.mark.parametrize(
    ("op", "symmetric"), [("reducescatter", 0), ("allgather", 0), ("alltoall", 0), ("allreduce", 0.5)]
)
def test_a_call_without_its_first_meeting_is_noticed(op, symmetric, monkeypatch):
    """The places of parts of an all-reduce with a symmetric output hold another call's sums, which are still kept."""
    monkeypatch.setattr(by_copies.ByCopies, "_meets_first", always(False), raising=False)
    assert is_noticed(op, monkeypatch, symmetric)


@every_op
def test_copies_that_do_not_follow_the_calls_on_other_streams_are_noticed(op, monkeypatch):
    monkeypatch.setattr(Machine, "_member", lambda machine, rank: SimpleNamespace(**FREE, rank=rank, device=rank))
    assert is_noticed(op, monkeypatch)


def test_sums_that_are_kept_before_they_are_here_are_noticed(monkeypatch):
    monkeypatch.setattr(by_copies.ByCopies, "_ends_left", always(4), raising=False)
    assert is_noticed("allreduce", monkeypatch)


@pytest.mark.parametrize("op", ["allreduce", "allgather"])  # who waits for a later copy of one stream waits for both
def test_an_event_that_is_recorded_again_before_it_is_waited_for_is_noticed(op, monkeypatch):
    monkeypatch.setattr(by_copies, "_EVENTS", 2)
    assert is_noticed(op, monkeypatch)
