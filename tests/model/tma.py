"""Programs of the channels of two_shot_tma: chunks that pass through the scatter, reduce, push and gather warps.

A chunk is a word for each owner. Each role is a thread, reduce's two warps are one. The stages in shared memory, the
mbarriers' parity and copies that read and write late are modelled; the loads into the stages are done at once, and the
proxies that (5) of device/ptx/tma.cuh joins by fences are left out.
"""

from collections.abc import Iterator, Sequence

from tests.model import programs as do

ROLES = ("scatter", "reduce", "push", "gather")


class Channel:
    """One call of one rank's channel: TwoShotTma in two_shot_tma.cu.

    Attributes:
        rank: this one.
        peers: the others.
        call: which one.
        chunks: in this call.
        base: chunks of earlier calls.
        depth: chunks that have a place in the scratch.
        mutant: what is done wrong, if anything.
    """

    def __init__(self, ranks: int, rank: int, call: int, chunks: int, base: int, depth: int, mutant: str) -> None:
        self.rank, self.call, self.chunks, self.base, self.depth, self.mutant = rank, call, chunks, base, depth, mutant
        self.peers = [(rank + hop) % ranks for hop in range(1, ranks)]

    def data(self, k: int, source: int, owner: int) -> str:
        return f"call {self.call} chunk {k} of rank {source} for {owner}"

    def sum(self, k: int, owner: int) -> str:
        return f"sum of call {self.call} chunk {k} piece {owner}"

    def slot(self, phase: str, on: int, k: int, source: int) -> do.Word:
        phase = "" if self.mutant == "both phases in one slot" else phase
        return (on, f"{phase} slot {k % self.depth} from rank {source}")

    def stage(self, what: int | str) -> do.Word:
        return (self.rank, f"stage for {what}")

    def mbarrier(self, what: str) -> do.Word:
        return (self.rank, f"mbarrier {what}, call {self.call}")

    def gathered(self, k: int) -> tuple[do.Word, int]:
        """The mbarrier whose phase ends when chunk k is gathered, and that phase."""
        if self.mutant == "one mbarrier for all gathering":
            return self.mbarrier("gathered"), k
        return self.mbarrier(f"gathered {k % self.depth}"), k // self.depth

    def signal(self, phase: str, k: int) -> do.Signal:
        phase = "" if self.mutant == "both phases in one row" else phase
        flags = tuple((peer, f"{phase} flag from rank {self.rank}") for peer in self.peers)
        return do.Signal(flags, self.base + k + 1, release=self.mutant != "flags are relaxed stores")

    def wait(self, phase: str, k: int) -> list[do.Wait]:
        phase = "" if self.mutant == "both phases in one row" else phase
        deadline = self.mutant != "waits without a deadline"
        return [
            do.Wait((self.rank, f"{phase} flag from rank {peer}"), self.base + k + 1, deadline) for peer in self.peers
        ]

    def wait_for_warp(self, mbarrier: do.Word, phase: int) -> do.WaitForPhase:
        return do.WaitForPhase(mbarrier, phase, self.mutant != "warps do not look whether a wait has expired")

    def load(self, k: int) -> list[do.Put]:
        return [do.Put(self.stage(peer), self.data(k, self.rank, peer)) for peer in self.peers if k < self.chunks]

    def scatter(self) -> Iterator:
        yield from self.load(0)
        for k in range(self.chunks):
            behind = self.depth + (self.mutant == "scatter waits for the chunk before")
            if k >= behind and self.mutant != "scatter does not wait":
                yield self.wait_for_warp(*self.gathered(k - behind))
            for peer in self.peers:
                yield do.Copy(
                    self.stage(peer), self.slot("scattered", peer, k, self.rank), self.data(k, self.rank, peer)
                )
            if self.mutant == "signals before its copies are done":
                yield self.signal("scattered", k)
            if self.mutant == "loads before its copies are done":
                yield from self.load(k + 1)
            yield do.WaitForCopies()
            if self.mutant != "loads before its copies are done":
                yield from self.load(k + 1)
            if self.mutant != "signals before its copies are done":
                yield self.signal("scattered", k)

    def reduce(self) -> Iterator:
        for k in range(self.chunks):
            yield from self.wait("scattered", k)
            if k > 0 and self.mutant != "reduce does not wait for push":
                yield self.wait_for_warp(self.mbarrier("pushed"), k - 1)
            for peer in self.peers:
                yield do.Read((self.slot("scattered", self.rank, k, peer),), (self.data(k, peer, self.rank),))
            yield do.Put(self.stage("the sum"), self.sum(k, self.rank))
            yield do.Arrive(self.mbarrier("summed"))

    def push(self) -> Iterator:
        for k in range(self.chunks):
            if self.mutant != "push does not wait for reduce":
                yield self.wait_for_warp(self.mbarrier("summed"), k)
            for peer in self.peers:
                yield do.Copy(self.stage("the sum"), self.slot("reduced", peer, k, self.rank), self.sum(k, self.rank))
            yield do.WaitForCopies()
            yield do.Arrive(self.mbarrier("pushed"))
            yield self.signal("reduced", k)

    def gather(self) -> Iterator:
        for k in range(self.chunks):
            yield from self.wait("scattered", k)
            yield from self.wait("reduced", k)
            arrive = do.Arrive(self.gathered(k)[0])
            if self.mutant == "gather arrives before it reads":
                yield arrive
            for peer in self.peers:
                yield do.Read((self.slot("reduced", self.rank, k, peer),), (self.sum(k, peer),))
            if self.mutant != "gather arrives before it reads":
                yield arrive


def channels(ranks: int, calls: Sequence[int], mutant: str = "", depth: int = 2) -> list[do.Thread]:
    """Threads of successive calls with so many chunks. Chunks use ``depth`` places of the scratch in turn."""

    def program(rank: int, role: str) -> Iterator:
        base = 0
        for call, chunks in enumerate(calls):
            yield do.Begin(call)
            if mutant != "sends after a wait has expired":
                yield do.LeaveIfAborted(f"rank {rank}", call)
            yield from getattr(Channel(ranks, rank, call, chunks, base, depth, mutant), role)()
            base += 0 if mutant == "chunks are not counted on" else chunks

    return [
        do.Thread(f"rank {rank} {role}", rank, tuple(program(rank, role))) for rank in range(ranks) for role in ROLES
    ]
