"""Gathers and reduce-scatters between ranks of this process that share its GPU, each with its memory and stream.

The ranks are as in `perf latency`: kernels of several processes would take turns on the GPU. A communicator launches
the kernels of its ranks one after another on the current stream. Here each rank launches on its own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import torch

from graphar import reference
from graphar.numerics.dtypes import BYTE
from graphar.plan.algorithms import COPYING, MEETING
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.grids import MEETING_THREADS
from graphar.plan.select import Facts, select
from graphar.plan.slices import slices
from graphar.plan.work import Parts
from graphar.runtime.bind import by_copies, collective
from graphar.runtime.launcher import chip
from graphar.runtime.member import Member
from perf.harness import shared_gpu
from perf.harness.verify import differs

SEED = 1000


class Sharing:
    """Ranks that share a GPU, with what topics ask of ProcessRanks."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size, self.device = size, torch.device("cuda", 0)
        self.whole = chip(0)
        self._made = shared_gpu.Ranks(size, self.whole)
        self.engine, self.runner, self.streams = self._made.engine, self._made.runner, self._made.streams

    def barrier(self) -> None:
        torch.cuda.synchronize()

    def slowest(self, times: list) -> list:
        return times

    def by_kernels(self, call: Call, config: Config, ranks: Sequence[Operands]) -> Callable[[], None]:
        """Returns a function that makes a call of all ranks, each on its stream."""
        bound = [
            (part.offset, collective.bind_slice(self.runner, call, config, part, shared_gpu.TIMEOUT_S))
            for part in slices(config.algorithm, self.size, call.work.parts, call.dtype.itemsize)
        ]

        def launch() -> None:
            for offset, launches in bound:
                for of_rank, operands, stream in zip(launches, ranks, self.streams, strict=True):
                    after = collective._after(offset, operands, 1)
                    with torch.cuda.stream(stream):
                        of_rank(after.inputs, after.outputs)

        return launch

    def by_copies(self, call: Call, config: Config, ranks: Sequence[Operands]) -> Callable[[], None]:
        """Returns the same by copy engines.

        A communicator's launches of several ranks in one process share the current stream, and its ranks have a GPU
        each. So two private parts are replaced: how ranks meet, and the stream of a rank.
        """
        bytes_of = [(torch.zeros(1, dtype=BYTE, device=self.device),) for _ in range(self.size)]
        meeting = [Operands(x, (torch.zeros(self.size, dtype=BYTE, device=self.device),)) for x in bytes_of]
        meet_call = Call.of(Parts("allgather", (1,) * self.size), bytes_of[0][0])
        meet = self.by_kernels(meet_call, Config(MEETING, 1, MEETING_THREADS), meeting)
        with mock.patch.object(by_copies, "meetings", return_value=lambda more="": meet()):
            made = by_copies.ByCopies(self.engine, call, config)
        rank_of = made._rank

        def on_own_stream(member: Member, operands: Operands):
            with torch.cuda.stream(self.streams[member.rank]):
                return rank_of(member, operands)

        made._rank = on_own_stream
        return lambda: made.run(ranks)


class SharedCalls:
    """The calls of one op and size between the ranks."""

    def __init__(self, op: str, nbytes: int, ranks: Sharing) -> None:
        count = nbytes // 2 // ranks.size
        like = torch.empty(count * ranks.size, dtype=torch.bfloat16, device="meta")
        wholes = ranks.runner.symmetric.empty(like)
        parts = [torch.empty(count, dtype=torch.bfloat16, device=ranks.device) for _ in wholes]
        self._xs, self._outs = (parts, wholes) if op == "allgather" else (wholes, parts)
        self._op, self._ranks = op, ranks
        self._call = Call.of(Parts(op, (count,) * ranks.size), parts[0])
        self._made: dict[bool, Callable[[], None]] = {}

    def by(self, copies: bool) -> Callable[[], None]:
        """Returns a function that makes the call, by copies or by kernels in 64 blocks; cached."""
        if copies not in self._made:
            self._made[copies] = self._make(copies)
        return self._made[copies]

    def _make(self, copies: bool) -> Callable[[], None]:
        how = {"algorithm": COPYING[self._op].value} if copies else {"blocks": 64 // self._ranks.size}
        how |= {"symmetric": ("output",)} if copies and self._op == "allgather" else {}
        call = self._call._replace(**how)
        facts = Facts(self._ranks.size, shared_gpu.TABLE, self._ranks.whole, lossless=False)
        config = select(call, facts).config
        ranks = [Operands((x,), (out,)) for x, out in zip(self._xs, self._outs, strict=True)]
        return (self._ranks.by_copies if copies else self._ranks.by_kernels)(call, config, ranks)

    def wrong(self, copies: bool) -> int:
        """Returns how many elements of all results differ from the specification's."""
        generator = torch.Generator(self._ranks.device).manual_seed(SEED)
        for x, out in zip(self._xs, self._outs, strict=True):
            x.copy_(torch.randn(len(x), generator=generator, device=x.device))
            out.fill_(7)
        torch.cuda.synchronize()
        self.by(copies)()
        torch.cuda.synchronize()
        if self._op == "allgather":
            expected = [torch.cat(self._xs)] * self._ranks.size
        else:
            expected = reference.allreduce(self._xs).chunk(self._ranks.size)
        return sum(int(differs(out, right).sum()) for out, right in zip(self._outs, expected, strict=True))
