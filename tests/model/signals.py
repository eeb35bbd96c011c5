"""Programs of the kernels whose data flags announce (cuda_src/device/sync/signal_pad.cuh). A thread is a block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.model import programs as do


@dataclass(frozen=True)
class Call:
    """Chunks of each block, and the grid."""

    chunks: int
    blocks: int = 1


@dataclass(frozen=True)
class Pad:
    """One block's flags: Signals in device/sync/signal_pad.cuh.

    Attributes:
        ranks: how many.
        rank: this one.
        block: the row.
        base: steps counted before this call.
        mutant: what is done wrong, if anything.
    """

    ranks: int
    rank: int
    block: int
    base: int
    mutant: str = ""

    @property
    def peers(self) -> list[int]:
        return [(self.rank + hop) % self.ranks for hop in range(1, self.ranks)]

    def send(self, steps: int) -> do.Signal:
        flags = tuple((peer, f"flag {self.block} from rank {self.rank}") for peer in self.peers)
        return do.Signal(flags, self.base + steps, release=self.mutant != "flags are relaxed stores")

    def wait(self, steps: int) -> list[do.Wait]:
        value = self.base + steps - (self.mutant == "waits for the step before")
        deadline = self.mutant != "waits without a deadline"
        return [do.Wait((self.rank, f"flag {self.block} from rank {peer}"), value, deadline) for peer in self.peers]


def blocks_of(ranks: int, calls: Sequence[Call], program) -> list[do.Thread]:
    """A thread for each block: ``program(rank, block)``."""
    return [
        do.Thread(f"rank {rank} block {block}", rank, tuple(program(rank, block)))
        for rank in range(ranks)
        for block in range(max(call.blocks for call in calls))
    ]


def pipelined(ranks: int, calls: Sequence[Call], mutant: str = "", depths: tuple[int, int] = (3, 3)) -> list[do.Thread]:
    """two_shot_pipelined.

    Args:
        ranks: how many.
        calls: one after the other; a chunk is a word for each owner.
        mutant: what is done wrong, if anything.
        depths: places of a block's chunks in the scratch, for the scatter and the gather phase.
    """

    def slot(phase: int, on: int, call: Call, block: int, k: int, source: int) -> do.Word:
        region = phase * call.blocks + block if mutant == "slots depend on the grid" else 2 * block + phase
        return (on, f"slot {k % depths[phase]} of region {region} from rank {source}")

    def program(rank: int, block: int) -> Iterator:
        base = 0
        for c, call in enumerate(calls):
            yield do.Begin(c)
            if block >= call.blocks:
                continue
            if mutant != "sends after a wait has expired":
                yield do.LeaveIfAborted(f"rank {rank} block {block}", c)
            pad = Pad(ranks, rank, block, base, mutant)

            def chunk(k, c=c):
                return f"call {c} block {block} chunk {k}"

            def scatter(k, call=call, pad=pad, chunk=chunk):
                for owner in pad.peers:
                    yield do.Store(slot(0, owner, call, block, k, rank), f"{chunk(k)} of rank {rank} for {owner}")

            def reduce(k, call=call, pad=pad, chunk=chunk):
                for peer in pad.peers:
                    at = slot(0, rank, call, block, k, peer)
                    yield do.Read((at,), (f"{chunk(k)} of rank {peer} for {rank}",))
                for peer in pad.peers:
                    yield do.Store(slot(1, peer, call, block, k, rank), f"sum of {chunk(k)} of rank {rank}")

            def gather(k, call=call, pad=pad, chunk=chunk):
                for peer in pad.peers:
                    yield do.Read((slot(1, rank, call, block, k, peer),), (f"sum of {chunk(k)} of rank {peer}",))

            yield from steps(call, pad, scatter, reduce, gather, mutant)
            base += 0 if mutant == "steps are not counted on" else call.chunks + 2

    return blocks_of(ranks, calls, program)


def steps(call: Call, pad: Pad, scatter, reduce, gather, mutant: str) -> Iterator:
    """The loop of two_shot_pipelined."""
    for k in range(call.chunks + 2):
        if mutant == "signals before it writes":
            yield pad.send(k + 1)
        if k < call.chunks:
            yield from scatter(k)
        if mutant == "sums before it waits" and 1 <= k <= call.chunks:
            yield from reduce(k - 1)
        if not (mutant == "the last wait is left out" and k == call.chunks + 1):
            yield from pad.wait(k)
        if mutant != "sums before it waits" and 1 <= k <= call.chunks:
            yield from reduce(k - 1)
        if mutant != "signals before it writes":
            yield pad.send(k + 1)
        if k >= 2:
            yield from gather(k - 2)


def direct(ranks: int, calls: Sequence[Call], in_place: bool, mutant: str = "", depth: int = 3) -> list[do.Thread]:
    """two_shot_pipelined, direct: sums go straight into every rank's output, the same tensor in each call.

    Args:
        ranks: how many.
        calls: all with the same number of chunks, over all blocks.
        in_place: whether the output is the input, too; otherwise, a kernel before each call reads the output.
        mutant: what is done wrong, if anything.
        depth: places of a block's chunks in the scratch.
    """
    chunks = calls[0].chunks * calls[0].blocks

    def slot(on: int, block: int, k: int, source: int) -> do.Word:
        return (on, f"slot {block}.{k % depth} from rank {source}")

    def output(on: int, chunk: int, owner: int) -> do.Word:
        return (on, f"output chunk {chunk} piece {owner}")

    def read_output(rank: int, c: int, chunk: int, owner: int) -> do.Read:
        return do.Read((output(rank, chunk, owner),), (f"sum {c - 1} of chunk {chunk} piece {owner}",))

    def program(rank: int, block: int) -> Iterator:
        base = 0
        everything = [(chunk, owner) for chunk in range(chunks) for owner in range(ranks)]
        for c, call in enumerate(calls):
            if not in_place and c:
                yield do.Begin(f"{c}, the reader before it,")
                if not block:
                    yield from (read_output(rank, c, *one) for one in everything)
            yield do.Begin(c)
            if block >= call.blocks:
                continue
            pad = Pad(ranks, rank, block, base, mutant)

            def place(k, call=call):
                return block * call.chunks + k

            def scatter(k, c=c, pad=pad, place=place):
                for owner in pad.peers:
                    if in_place:
                        yield read_output(rank, c, place(k), owner)
                    yield do.Store(slot(owner, block, k, rank), f"call {c} chunk {place(k)} of {rank} for {owner}")

            def reduce(k, c=c, pad=pad, place=place):
                for peer in pad.peers:
                    data = f"call {c} chunk {place(k)} of {peer} for {rank}"
                    yield do.Read((slot(rank, block, k, peer),), (data,))
                if in_place:
                    yield read_output(rank, c, place(k), rank)
                for on in [*pad.peers, rank]:
                    yield do.Store(output(on, place(k), rank), f"sum {c} of chunk {place(k)} piece {rank}")

            yield from steps(call, pad, scatter, reduce, lambda k: (), mutant)
            base += 0 if mutant == "steps are not counted on" else call.chunks + 2
        yield do.Begin("that reads the results")
        if not block:
            yield from (read_output(rank, len(calls), *one) for one in everything)

    return blocks_of(ranks, calls, program)


def first_inputs(ranks: int, chunks: int) -> dict[do.Word, str]:
    """What the tensors of :func:`direct`, in place, hold before the first call."""
    pieces = [(on, chunk, piece) for on in range(ranks) for chunk in range(chunks) for piece in range(ranks)]
    return {
        (on, f"output chunk {chunk} piece {piece}"): f"sum -1 of chunk {chunk} piece {piece}"
        for on, chunk, piece in pieces
    }


def allgather(parts_of_calls: Sequence[Sequence[int]], mutant: str = "", depth: int = 4) -> list[do.Thread]:
    """allgather_push with one block. By call: the chunks of each rank's part, which use ``depth`` places in turn."""
    ranks = len(parts_of_calls[0])

    def program(rank: int, block: int) -> Iterator:
        base = 0
        for c, parts in enumerate(parts_of_calls):
            yield do.Begin(c)
            if mutant != "sends after a wait has expired":
                yield do.LeaveIfAborted(f"rank {rank} block {block}", c)
            pad = Pad(ranks, rank, block, base, mutant)
            first = 0 if mutant == "each call begins at the first slot" else base

            def slot(on: int, k: int, source: int, first=first) -> do.Word:
                return (on, f"slot {(first + k) % depth} from rank {source}")

            count = parts[rank] if mutant == "an empty part has no steps" else max(parts)
            for k in range(count + 1):
                if k < count:
                    if mutant == "signals before it writes":
                        yield pad.send(k + 1)
                    for peer in pad.peers if k < parts[rank] else ():
                        yield do.Store(slot(peer, k, rank), f"call {c} chunk {k} of rank {rank}")
                    if mutant != "signals before it writes":
                        yield pad.send(k + 1)
                if k == 0:
                    continue
                yield from pad.wait(k)
                for peer in pad.peers:
                    if k - 1 < parts[peer]:
                        yield do.Read((slot(rank, k - 1, peer),), (f"call {c} chunk {k - 1} of rank {peer}",))
            base += 0 if mutant == "steps are not counted on" else count

    return blocks_of(ranks, [Call(1)], program)


def pull(ranks: int, calls: Sequence[Call], mutant: str = "") -> list[do.Thread]:
    """one_shot: peers read what a rank has staged. A call's chunk is an element of each block.

    A staged word is modelled as one word for each peer, since all peers must have read it before it changes. A thread
    sees what it stages for itself at once.
    """

    def program(rank: int, block: int) -> Iterator:
        base = 0
        for c, call in enumerate(calls):
            yield do.Begin(c)
            if block >= call.blocks:
                continue
            if mutant != "sends after a wait has expired":
                yield do.LeaveIfAborted(f"rank {rank} block {block}", c)
            pad = Pad(ranks, rank, block, base, mutant)

            def stage(on: int, reader: int, i: int, c=c) -> do.Word:
                return (on, f"stage {0 if mutant == 'one stage' else c % 2} element {i} for rank {reader}")

            if mutant == "signals before it writes":
                yield pad.send(1)
            mine = range(block * call.chunks, (block + 1) * call.chunks)
            for i in mine:
                for peer in pad.peers:
                    yield do.Store(stage(rank, peer, i), f"call {c} element {i} of rank {rank}")
            if mutant != "signals before it writes":
                yield pad.send(1)
            yield from pad.wait(1)
            for i in mine:
                for peer in pad.peers:
                    yield do.Read((stage(peer, rank, i),), (f"call {c} element {i} of rank {peer}",))
            base += 0 if mutant == "steps are not counted on" else 1

    return blocks_of(ranks, calls, program)
