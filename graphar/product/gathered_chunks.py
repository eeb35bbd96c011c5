"""An all-gather by copy engines, whose rows torch's matmul multiplies a rank at a time.

    the caller's stream    meet | multiply own rows | meet | multiply rows of r-1 | meet | multiply rows of r-2
    side stream                 | own rows to r+1   | own rows to r+2 | ...

Copies take no SM, so the matmuls run as fast as alone. runtime/bind/by_copies.py says what orders copies and
readers. Before the meeting of step h the caller's stream waits for this rank's copy to r+h, so
after it the rows of r-h lie in this rank's scratch. The kernels in tiles use the same scratch. They start only when the
kernel before has ended, and wait until all ranks have entered before they overwrite rows. All members of a process come
to a meeting before any of them multiplies: loading a matmul can wait for kernels that run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphar.plan.algorithms import GATHERING
from graphar.plan.call import Call, Operands
from graphar.plan.scratch import gathered_slot_offset
from graphar.plan.slices import Slice, gathered_rows_a_launch, row_slices
from graphar.plan.work import Product
from graphar.product.multiply import multiply
from graphar.product.operands import MatmulOperands, operands_of
from graphar.product.then import streams_of
from graphar.ranks import agreement
from graphar.runtime.bind.by_copies import Event, Lane, meetings
from graphar.runtime.engine import Engine, runner_of
from graphar.runtime.member import Member
from graphar.runtime.memory.symmetric_tensors import tensor_at
from graphar.runtime.plan import BoundedCache


@dataclass
class _Lane(Lane):
    mine: MatmulOperands


class GatheredChunks:
    """One call of an all-gather and matmul, made in chunks."""

    def __init__(self, engine: Engine, call: Call[Product]) -> None:
        self._engine, self._runner, self._call = engine, runner_of(engine), call
        self._slots: BoundedCache[torch.Tensor] = BoundedCache()
        self._runner.prepare_all((GATHERING, "chunks"), GATHERING, f"{GATHERING.value} for chunks", lambda member: None)
        # Lets the current streams wait until all ranks have come.
        self._meet: Callable[..., None] = meetings(engine, call, GATHERING, f"{agreement.words(call)}, in chunks")

    def run(self, ranks: Sequence[Operands]) -> None:
        """Enqueues the call on the members' current streams, for the operands of each rank of this process."""
        members = [operands_of(self._call.work, operands) for operands in ranks]
        with self._runner.lock:
            self._runner.raise_failure()  # before any member enqueues anything
            lanes = []
            for member, mine in zip(self._runner.members, members, strict=True):
                main, side = streams_of(mine.a.device)
                lanes.append(_Lane(member, main, [side], mine))
            rows, work = [mine.a.contiguous() for mine in members], self._call.work
            for piece in row_slices(work.parts, gathered_rows_a_launch(self._engine.world_size, work.columns)):
                self._run_slice(lanes, rows, piece)

    def _run_slice(self, lanes: Sequence[_Lane], rows: Sequence[torch.Tensor], piece: Slice) -> None:
        world_size = self._engine.world_size
        parts = [x[piece.offset :][: piece.count[lane.member.rank]] for lane, x in zip(lanes, rows, strict=True)]
        self._meet()
        try:
            sent = [self._send(lane, x) for lane, x in zip(lanes, parts, strict=True)]
            for hop in range(world_size):
                if hop:
                    for lane, ends in zip(lanes, sent, strict=True):
                        lane.wait(ends[hop - 1])
                    self._meet()
                for lane, x in zip(lanes, parts, strict=True):
                    self._take(lane, x, hop, piece)
        finally:  # copies read the rows, also after an error
            for lane in lanes:
                lane.join()
                lane.member.leave()

    def _take(self, lane: _Lane, rows: torch.Tensor, hop: int, piece: Slice) -> None:
        """Keeps and multiplies the rows of the rank ``hop`` places before, which are here; 0: own rows."""
        source = (lane.member.rank - hop) % self._engine.world_size
        if count := piece.count[source]:
            here = self._slot(lane.member, hop, (count, rows.shape[1]), rows.dtype) if hop else rows
            begin, mine = piece.begin[source], lane.mine
            if mine.gathered is not None:
                lane.copy([(mine.gathered[begin].data_ptr(), here.data_ptr(), here.nbytes)])
            multiply(here, mine.w, mine.out[begin : begin + count], mine.bias)

    def _send(self, lane: _Lane, rows: torch.Tensor) -> list[Event | None]:
        """Copies own rows to the peers, the next rank first; returns the end of each copy."""
        hops = range(1, self._engine.world_size)
        there = [self._address((lane.member.rank + hop) % self._engine.world_size, hop) for hop in hops]
        return [lane.copy([(to, rows.data_ptr(), rows.nbytes)]) for to in there]

    def _address(self, rank: int, hop: int) -> int:
        world_size = self._engine.world_size
        offset = gathered_slot_offset(world_size, GATHERING.row.scratch(world_size).capacity, world_size - hop)
        return self._runner.scratch(GATHERING)[rank] + offset

    def _slot(self, member: Member, hop: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        key = (member.rank, hop, shape, dtype)
        slot = self._slots.get(key)
        if slot is None:
            like = torch.empty(shape, dtype=dtype, device="meta")
            slot = self._slots.keep(key, tensor_at(self._address(member.rank, hop), member.device, like))
        return slot
