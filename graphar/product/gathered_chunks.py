"""An all-gather by copy engines, whose rows torch's matmul multiplies a rank at a time.

    the caller's stream    meet | multiply own rows | meet | multiply rows of r-1 | meet | multiply rows of r-2
    side stream                 | own rows to r+1   | own rows to r+2 | ...

Copies take no SM, so the matmuls run as fast as alone. Where the ranks meet, each adds one element over all of them by
an all-reduce of graphar's. It ends only after all ranks have begun it, it has a deadline, and it compares their calls.

- Visibility. Before the meeting of step h the caller's stream waits for this rank's copy to r+h. So after it the copies
  of step h of all ranks have ended, and the rows of r-h lie in this rank's scratch.
- Reuse. Before the first copy all ranks have met. The caller's stream reads what was copied before, and so do the
  kernels in tiles, which use the same scratch and start only when the kernel before has ended. So each rank has read
  the rows of the call before. The kernels in tiles also wait until all ranks have entered before they overwrite rows.
- Progress. Nothing here waits but meetings, and a rank comes to each whatever the others do. All members of a process
  come to a meeting before any of them multiplies: to load a matmul can wait for kernels that run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.scratch import gathered_slot_offset
from graphar.plan.slices import Slice, gathered_rows_a_launch, row_slices
from graphar.plan.work import Product, Sum
from graphar.product.operands import MatmulOperands, operands_of
from graphar.product.overlap import streams_of
from graphar.ranks import agreement
from graphar.runtime.bind.collective import bind_slice, plan_of_slices
from graphar.runtime.bind.launches import runner_of
from graphar.runtime.bounded_cache import BoundedCache
from graphar.runtime.driver import call as driver_call
from graphar.runtime.driver import driver, on_device
from graphar.runtime.engine import Engine
from graphar.runtime.member import Member
from graphar.runtime.memory.symmetric_tensors import tensor_at


@dataclass(frozen=True)
class _Lane:
    """A rank of this process, its operands, and the streams of its matmuls and of its copies."""

    member: Member
    mine: MatmulOperands
    main: torch.cuda.Stream
    side: torch.cuda.Stream

    def multiply(self, rows: torch.Tensor, begin: int) -> None:
        """Multiplies ``rows``, which begin at row ``begin`` of all ranks' rows, on the caller's stream."""
        out = self.mine.out[begin : begin + len(rows)]
        if self.mine.bias is None:
            torch.mm(rows, self.mine.w.t(), out=out)
        else:
            torch.addmm(self.mine.bias, rows, self.mine.w.t(), out=out)

    def keep(self, rows: torch.Tensor, begin: int) -> None:
        """Copies rows that are here, by the caller's stream, to the gathered rows, if they are wanted."""
        if self.mine.gathered is not None:
            self.side.wait_stream(self.main)
            self.copy(self.mine.gathered[begin].data_ptr(), rows)

    def copy(self, to: int, rows: torch.Tensor) -> None:
        """Copies contiguous rows to an address of any rank, on the side stream."""
        with on_device(self.member.device):
            driver_call(driver.cuMemcpyAsync, to, rows.data_ptr(), rows.nbytes, self.side.cuda_stream)


class GatheredChunks:
    """One call of an all-gather and matmul, made in chunks."""

    def __init__(self, engine: Engine, call: Call[Product], algorithm: Algorithm) -> None:
        self._engine, self._runner, self._call, self._algorithm = engine, runner_of(engine), call, algorithm
        self._slots: BoundedCache[torch.Tensor] = BoundedCache()
        self._meet = self._meeting()

    def run(self, ranks: Sequence[Operands]) -> None:
        """Enqueues the call on the members' current streams, for the operands of each rank of this process."""
        members = [operands_of(self._call.work, own) for own in ranks]
        with self._runner.lock:
            self._runner.raise_failure()  # before any member enqueues anything
            lanes = [
                _Lane(member, mine, *streams_of(mine.a.device))
                for member, mine in zip(self._runner.members, members, strict=True)
            ]
            rows, work = [mine.a.contiguous() for mine in members], self._call.work
            step = gathered_rows_a_launch(self._algorithm, self._engine.world_size, work.columns)
            for one in row_slices(work.parts, step):
                self._run_slice(lanes, rows, one, self._meet)

    def _run_slice(
        self, lanes: Sequence[_Lane], rows: Sequence[torch.Tensor], one: Slice, meet: Callable[[], None]
    ) -> None:
        world_size = self._engine.world_size
        own = [x[one.offset : one.offset + one.count[lane.member.rank]] for lane, x in zip(lanes, rows, strict=True)]
        meet()
        try:
            sent = [self._send(lane, x) for lane, x in zip(lanes, own, strict=True)]
            for hop in range(world_size):
                if hop:
                    for lane, ends in zip(lanes, sent, strict=True):
                        lane.main.wait_event(ends[hop - 1])
                    meet()
                for lane, x in zip(lanes, own, strict=True):
                    self._take(lane, x, hop, one)
        finally:  # copies read the rows, also after an error
            for lane in lanes:
                lane.main.wait_stream(lane.side)

    def _take(self, lane: _Lane, own: torch.Tensor, hop: int, one: Slice) -> None:
        """Keeps and multiplies the rows of the rank ``hop`` places before, which are here; 0: own rows."""
        source = (lane.member.rank - hop) % self._engine.world_size
        if count := one.count[source]:
            here = self._slot(lane.member, hop, (count, own.shape[1]), own.dtype) if hop else own
            lane.keep(here, one.begin[source])
            lane.multiply(here, one.begin[source])

    def _send(self, lane: _Lane, own: torch.Tensor) -> list[torch.cuda.Event]:
        """Copies own rows to the peers, the next rank first; returns the end of each copy."""
        lane.side.wait_stream(lane.main)
        ends = []
        for hop in range(1, self._engine.world_size):
            if len(own):
                lane.copy(self._address((lane.member.rank + hop) % self._engine.world_size, hop), own)
            ends.append(lane.side.record_event())
        return ends

    def _address(self, rank: int, hop: int) -> int:
        """Returns the address of the slot on ``rank`` of the rank ``hop`` places before it."""
        world_size = self._engine.world_size
        capacity = self._algorithm.row.scratch(world_size).capacity
        return self._runner.kernels.scratch(self._algorithm)[rank] + gathered_slot_offset(
            world_size, capacity, world_size - hop
        )

    def _slot(self, member: Member, hop: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a member's slot of the rank ``hop`` places before it as a tensor; cached."""
        key = (member.rank, hop, shape, dtype)
        found = self._slots.get(key)
        if found is None:
            like = torch.empty(shape, dtype=dtype, device="meta")
            found = self._slots.keep(key, tensor_at(self._address(member.rank, hop), member.device, like))
        return found

    def _meeting(self) -> Callable[[], None]:
        """Returns a function that lets the current streams wait until all ranks have come. Collective."""
        engine, runner, call, scratch = self._engine, self._runner, self._call, self._algorithm
        runner.kernels.prepare_all((scratch, "chunks"), scratch, f"{scratch.value} for chunks", lambda member: None)
        xs = [torch.zeros(1, dtype=call.dtype, device=f"cuda:{member.device}") for member in runner.members]
        meeting = Call.of(Sum(1), xs[0], timeout_s=call.timeout_s)
        config, _ = engine.select(meeting, xs[0])
        words = f"{agreement.words(call)}, in chunks"
        bound = bind_slice(runner, meeting, config, Slice(1), engine.deadline(call), lambda *given: None, words=words)
        plan = plan_of_slices(runner, config, [Slice(1)], [bound])
        ranks = [Operands((x,), (torch.empty_like(x),)) for x in xs]
        return lambda: plan.run(ranks)
