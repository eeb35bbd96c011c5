"""All-reduces between processes on the CPU, in messages over gloo, with the bits of every exact algorithm.

small    every rank -> every other rank    its tensor, behind the header; each rank sums all of them
large    every rank -> rank r              shard r of a chunk, in a message that only ranks with equal headers receive
         rank r -> every other rank        the sum of shard r, once all headers are known to be equal
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from graphar.numerics.dtypes import ACCUMULATION_DTYPES
from graphar.numerics.nan import with_canonical_nan
from graphar.plan.call import Call, Operands
from graphar.plan.work import Sum
from graphar.ranks.cpu.fallback import Run, sum_of
from graphar.ranks.cpu.messages import SMALL_NBYTES, Messages

_CHUNK_NBYTES = 8 << 20  # of which a communicator keeps memory for this rank's shard of each other rank
_PIECE = 1 << 17  # elements that are summed at a time, in fp32
_SHARD_UNIT = 64  # elements; shards begin where those of other dtypes and parts would, in lines of a cache


def bind(call: Call, messages: Messages, timeout_s: float) -> Run | None:
    """Returns the function of an all-reduce without a codec; None for other calls. It raises what the fallback does."""
    if call.op != "allreduce" or call.work.codec:
        return None
    work: Sum = call.work
    if call.nbytes > SMALL_NBYTES:
        return partial(_run_large, work, messages, timeout_s)
    everyones, nbytes = messages.behind_headers(call.dtype, call.work.numel), call.nbytes
    mine, is_plain = everyones[messages.rank()], _is_plain(work)

    def run(ranks: Sequence[Operands]) -> None:
        (own,) = ranks
        mine.copy_(own.inputs[0].view(-1))
        messages.agree(timeout_s, nbytes)
        target = own.outputs[0].view(-1)
        if is_plain:
            sum_into(target, everyones)
        else:
            target.copy_(sum_of(work, own)(everyones, 0))

    return run


def _is_plain(work: Sum) -> bool:
    """Whether :func:`sum_into` has the sum."""
    return work.epilogue is None and work.order == "rank"


def sum_into(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Writes the bits of reference.allreduce of at least two parts into ``target``, in fewer passes over memory.

    ``target`` may be one of the parts, and shares no memory with others.
    """
    wide = ACCUMULATION_DTYPES[target.dtype]
    if target.dtype is wide:
        _sum_as_they_are(target, parts)
    else:
        _sum_in_pieces(target, parts, wide)
    if wide.is_floating_point and target.sum().isnan():  # it is, if an element is; few tensors have one
        target.copy_(with_canonical_nan(target))


def _sum_as_they_are(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    first, second, *rest = parts
    in_place = target.data_ptr() not in [part.data_ptr() for part in rest]
    total = torch.add(first, second, out=target) if in_place else first + second
    for part in rest:
        total.add_(part)
    if not in_place:
        target.copy_(total)


def _sum_in_pieces(target: torch.Tensor, parts: Sequence[torch.Tensor], wide: torch.dtype) -> None:
    """Sums in memory that stays in the cache. torch's sums of two dtypes take up to ten times as long (2 M bf16)."""
    room = torch.empty((2, min(target.numel(), _PIECE)), dtype=wide, device=target.device)
    first, *rest = (part.split(_PIECE) for part in parts)
    for piece, begin, *others in zip(target.split(_PIECE), first, *rest, strict=True):
        total, one = (memory[: piece.numel()] for memory in room)
        total.copy_(begin)
        for other in others:
            total.add_(one.copy_(other))
        piece.copy_(total)


def _run_large(work: Sum, messages: Messages, timeout_s: float, ranks: Sequence[Operands]) -> None:
    (own,) = ranks
    messages.announce()
    source, target = own.inputs[0].view(-1), own.outputs[0].view(-1)
    numel, step = source.numel(), max(1, _CHUNK_NBYTES // source.element_size())
    is_plain, add = _is_plain(work), sum_of(work, own)

    def sum_shard(total: torch.Tensor, parts: Sequence[torch.Tensor], first: int) -> None:
        if is_plain:
            sum_into(total, parts)
        else:
            total.copy_(add(parts, first))

    for start in range(0, numel, step):
        window = slice(start, start + step)
        chunk = _Chunk(source[window], target[window], messages)
        if start == 0:
            messages.await_headers(timeout_s)
        chunk.sum(timeout_s, lambda total, parts, first, start=start: sum_shard(total, parts, start + first))


class _Chunk:
    """One chunk of a large all-reduce, whose summands are under way from the beginning.

    ``target`` may be ``source``: a rank's sum of a shard comes after that rank has all summands of the shard.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor, messages: Messages) -> None:
        self._messages, rank, peers = messages, messages.rank(), messages.peers
        self._parts, self._results = (_shards(x, messages.size()) for x in (source, target))
        self._summands = messages.scratch(self._parts[rank]) | {rank: self._parts[rank]}
        full = [peer for peer in peers if self._parts[peer].numel()]
        self._arriving = [messages.receive(self._summands[peer], peer) for peer in peers if self._parts[rank].numel()]
        self._sending = [messages.send(self._parts[peer], peer) for peer in full]

    def sum(self, timeout_s: float, sum_shard: Callable[[torch.Tensor, Sequence[torch.Tensor], int], None]) -> None:
        """Writes the sum into ``target``. ``sum_shard`` takes a total, its parts, and their first element's index.

        Each wait for other ranks may take ``timeout_s`` seconds.
        """
        messages, rank, peers = self._messages, self._messages.rank(), self._messages.peers
        results = self._results
        gathering = [messages.receive(results[peer], peer) for peer in peers if results[peer].numel()]
        messages.wait(self._arriving, timeout_s)
        if results[rank].numel():
            before = sum(part.numel() for part in self._parts[:rank])
            sum_shard(results[rank], [self._summands[one] for one in range(messages.size())], before)
            self._sending += [messages.send(results[rank], peer) for peer in peers]
        messages.wait(gathering, timeout_s)
        messages.wait(self._sending, timeout_s)


def _shards(x: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Returns each rank's shard: equal ones, and smaller ones or empty ones at the end."""
    shard = -(-x.numel() // (world_size * _SHARD_UNIT)) * _SHARD_UNIT
    return [x[rank * shard : (rank + 1) * shard] for rank in range(world_size)]
