"""Programs of the kernels whose data carry their own readiness (cuda_src/device/sync/sentinel.cuh, flagged.cuh)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from tests.model import programs as do


@dataclass(frozen=True)
class Call:
    """How many packs each rank sends each owner, ``packs[source][owner]``, and the grid.

    In turn: a thread sends one pack first, and the next one each time before it waits.
    """

    packs: tuple[tuple[int, ...], ...]
    blocks: int = 1
    in_turn: bool = False


def one_shot(ranks: int, packs: int, blocks: int = 1) -> Call:
    """Every rank sends all of its tensor to every rank: two ranks in turn, others first of all."""
    return Call(((packs,) * ranks,) * ranks, blocks, in_turn=ranks == 2)


def reducescatter(parts: Sequence[int], least: int = 1) -> Call:
    """Every rank sends each owner the owner's part, at least a pack."""
    return Call((tuple(max(part, least) for part in parts),) * len(parts))


def allgather(parts: Sequence[int], least: int = 1) -> Call:
    """Every rank sends its part to each peer, at least a pack."""
    ranks = range(len(parts))
    return Call(tuple(tuple(0 if owner == r else max(parts[r], least) for owner in ranks) for r in ranks))


def epochs(grids: Sequence[int], mutant: str) -> list[list[int]]:
    """The epoch that each block reads in each call (advance_epoch in device/sync/call.cuh)."""
    counters, found = [0] * max(grids), []
    for blocks in grids:
        found.append(list(counters))
        for i in range(blocks if mutant == "a block advances its own epoch alone" else len(counters)):
            counters[i] = found[-1][i % blocks] + (mutant != "epoch not advanced")
    return found


def one_hop(ranks: int, calls: Sequence[Call], words: int = 1, mutant: str = "") -> list[do.Thread]:
    """Threads of one_shot_push, reducescatter_push or allgather_flagged, by the calls' packs; a thread is a block.

    Args:
        ranks: how many, each with the blocks of the largest grid.
        calls: one after the other.
        words: of a pack, that arrive apart.
        mutant: what is done wrong, if anything.
    """
    epoch = epochs([call.blocks for call in calls], mutant)

    def slot(on: int, e: int, source: int, i: int) -> list[do.Word]:
        parity = 0 if mutant == "one slot" else e % 2
        return [(on, f"slot {parity} from rank {source}, pack {i}, word {w}") for w in range(words)]

    def data(c: int, source: int, i: int) -> list[str]:
        return [f"call {c}, rank {source}, pack {i}, word {w}" for w in range(words)]

    def sends(rank: int, block: int, c: int) -> Iterator[list[do.Store]]:
        """What a block stores, by place: one after the other, on all owners."""
        packs, owners = calls[c].packs[rank], [(rank + hop) % ranks for hop in range(1, ranks + 1)]
        for i in range(block, max(packs), calls[c].blocks):
            words = [(slot(owner, epoch[c][block], rank, i), data(c, rank, i)) for owner in owners if i < packs[owner]]
            yield [do.Store(word, value) for pair in words for word, value in zip(*pair, strict=True)]

    def program(rank: int, block: int) -> Iterator:
        late = []  # what a mutant arms too late
        for c, call in enumerate(calls):
            if not (mutant == "a kernel does not wait for the one before" and c):
                yield do.Begin(c)
            yield from late
            if block >= call.blocks:
                continue
            if mutant != "sends after a wait has expired":
                yield do.LeaveIfAborted(f"rank {rank} block {block}", c)
            e, late = epoch[c][block], []
            e += mutant == "takes from the other slot"
            to_send = sends(rank, block, c)
            for stores in islice(to_send, 1 if call.in_turn else None):
                yield from stores
            for i in range(block, max(sent[rank] for sent in call.packs), call.blocks):
                yield from next(to_send, ())
                sources = [r for r in range(ranks) if i < call.packs[r][rank]]
                places = [slot(rank, e, r, i) for r in sources]
                looked_at = [place[:1] if mutant == "looks at one word of a pack" else place for place in places]
                at, polled = tuple(chain(*places)), tuple(chain(*looked_at))
                found = tuple(chain(*(data(c, r, i) for r in sources)))
                yield do.Read(at, found, polled, mutant != "waits without a deadline")
                arm = [do.Store(word, do.NOT_YET) for word in at]
                if mutant == "armed in the next call":
                    late += arm
                elif mutant != "not armed again" and not (mutant == "arms its first pack alone" and i):
                    yield from arm

    return [
        do.Thread(f"rank {rank} block {block}", rank, tuple(program(rank, block)))
        for rank in range(ranks)
        for block in range(max(call.blocks for call in calls))
    ]


def two_shot(ranks: int, sizes: Sequence[int], mutant: str = "") -> list[do.Thread]:
    """Threads of two_shot_push with one block: a thread is one of its groups of warps.

    Args:
        ranks: how many.
        sizes: by call, the packs of the tensor: the first belongs to rank 0, the second to rank 1, ...
        mutant: what is done wrong, if anything.
    """

    def slot(phase: str, on: int, c: int, source: int) -> do.Word:
        parity = 0 if mutant in ("one slot", f"one slot in the {phase} phase") else c % 2
        return (on, f"{'' if mutant == 'both phases in one slot' else phase} slot {parity} from rank {source}")

    def group(rank: int, hop: int) -> Iterator:
        owner = (rank + hop) % ranks
        peers = [(rank + i) % ranks for i in range(1, ranks)]
        for c, size in enumerate(sizes):
            yield do.Begin(c)
            if mutant != "sends after a wait has expired":
                yield do.LeaveIfAborted(f"rank {rank}", c)
            if owner >= size:
                continue
            yield do.Store(slot("scatter", owner, c, rank), f"call {c}, rank {rank}")
            phase, sources, meaning = ("gather", [owner], "sum of ") if hop else ("scatter", range(ranks), "")
            places = tuple(slot(phase, rank, c, r) for r in sources)
            found = tuple(f"call {c}, {meaning}rank {r}" for r in sources)
            yield do.Read(places, found, places, mutant != "waits without a deadline")
            if mutant not in ("not armed again", f"{phase} slots not armed again"):
                for place in places:
                    yield do.Store(place, do.NOT_YET)
            if not hop:
                for peer in peers:
                    yield do.Store(slot("gather", peer, c, rank), f"call {c}, sum of rank {rank}")

    return [
        do.Thread(f"rank {rank} group {hop}", rank, tuple(group(rank, hop)))
        for rank in range(ranks)
        for hop in range(ranks)
    ]
