"""The fallback algorithm: every op without graphar's kernels, over a transport between ranks.

An all-reduce is a two-shot. Every rank receives its shard of all inputs, sums it as graphar.reference does, and sends
the sum to all ranks, so it gives the bits of every exact algorithm. With a codec shards and sums travel encoded, and
the sum has the bits of the kernels. Reduce-scatter and all-gather are its two halves. Small tensors go whole to all
ranks. An all-to-all sends each rank its part.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import accumulate, product, repeat

import torch

from graphar.errors import CommunicatorError
from graphar.numerics.codec_reference import first_elements
from graphar.numerics.codecs import TILE_NUMEL
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.row import Specification
from graphar.plan.work import Exchange, Parts, Sum
from graphar.ranks.cpu.reduction import Coder, Reduction, Tensors, reduction_of
from graphar.ranks.cpu.transport import InProcess, Transport, bytes_of, pipelined

_CHUNK_NUMEL = 256 << 10  # of a shard with a codec, whose encoder takes some hundred bytes an element on GPUs
_SHARD_UNIT = 64  # elements: exact shards begin where shards of other dtypes would, in lines of a cache

OfRanks = Sequence[Operands]  # the operands of this process's ranks
Run = Callable[[OfRanks], None]
SumCall = Call[Sum | Parts]
Owned = tuple[torch.Tensor, Operands, int]  # where a rank's sum goes, its operands, and its first element in the result


def bind(call: Call, transport: Transport, calls: Iterator[int], coder: Coder | None = None) -> Run:
    """Returns the function of a call; UnsupportedError if the call has an option that only kernels know.

    ``calls`` counts the calls with a codec, equally on all ranks. ``coder`` encodes; None: torch does.
    """
    if call.algorithm != "auto" and (specification := Algorithm(call.algorithm).row.specification):
        return partial(_by_specification, call, specification, transport)
    if isinstance(call.work, Exchange):
        return partial(_alltoall, call, transport)
    tells_seed = len(transport.ranks) < transport.world_size
    run, begin = _RUNS[call.op], reduction_of(call, calls, tells_seed, coder)
    return feeding_back(call, lambda ranks: run(begin(), call, transport, ranks))


def alone(call: Call) -> Run:
    """Returns the function of a call between one rank."""
    if not (call.work if isinstance(call.work, Exchange) else call.work._replace(codec="")).is_plain:
        return bind(call, InProcess(1), repeat(0))

    def copy(ranks: OfRanks) -> None:
        (operands,) = ranks
        operands.outputs[0].copy_(operands.inputs[0])
        if call.feeds_back:
            operands.inputs[0].zero_()  # a single rank has no rounding errors

    return feeding_back(call, copy)


def feeding_back(call: SumCall, run: Run) -> Run:
    """Returns ``run``, which leaves rounding errors in its inputs, for a call that adds earlier calls' errors to them.

    They are replaced once ``run`` has ended: a call that fails leaves them as they were.
    """
    if not call.feeds_back:
        return run

    def run_with_errors(ranks: OfRanks) -> None:
        values = [operands.inputs[0] + operands.inputs[1] for operands in ranks]
        run([operands._replace(inputs=(value,)) for operands, value in zip(ranks, values, strict=True)])
        for operands, errors in zip(ranks, values, strict=True):
            operands.inputs[1].copy_(errors)

    return run_with_errors


def _allreduce(how: Reduction, call: SumCall, transport: Transport, ranks: OfRanks) -> None:
    xs, outs = [operands.inputs[0].view(-1) for operands in ranks], [operands.outputs[0].view(-1) for operands in ranks]
    numel, is_coded = xs[0].numel(), bool(call.work.codec)
    if call.nbytes > transport.small_nbytes:
        step = transport.two_shot_nbytes // call.dtype.itemsize
        step, unit = (transport.world_size * _CHUNK_NUMEL, TILE_NUMEL) if is_coded else (step, _SHARD_UNIT)
        (x,), (out,), (rank,) = xs, outs, transport.ranks

        def two_shot(start: int, window: slice) -> Iterator[None]:
            sources, targets = (shards(tensor[window], transport.world_size, unit) for tensor in (x, out))
            firsts = list(accumulate(map(len, sources), initial=start))[:-1]
            owned = [(targets[rank], ranks[0], firsts[rank])]
            totals = yield from _sum_shards(how, transport, [sources], firsts, owned)
            rooms = [how.room(target) for target in targets]
            arrived = transport.gather(totals, list(map(len, rooms)), [rooms])
            yield
            (sums,) = arrived()
            for peer, (target, of_peer) in enumerate(zip(targets, sums, strict=True)):
                if peer != rank:
                    how.arrived(target, of_peer)

        pipelined(two_shot(*at) for at in _windows(numel, step))
        return
    for start, window in _windows(numel, _CHUNK_NUMEL if is_coded else numel):
        sent = [how.encode(x[window], rank, start) for rank, x in zip(transport.ranks, xs, strict=True)]
        received = transport.gather(sent, [sent[0].numel()] * transport.world_size)()
        if len(ranks) == 1:
            how.into(outs[0][window], received[0], ranks[0], start)
            continue
        totals: dict[object, torch.Tensor] = {}  # all come before any is written: an output may be an input
        keys = [(out.device, rank if how.is_own else None) for rank, out in enumerate(outs)]
        for key, out, parts, operands in zip(keys, outs, received, ranks, strict=True):
            if key not in totals:
                totals[key] = torch.empty_like(out[window])
                how.into(totals[key], parts, operands, start)
        for key, out in zip(keys, outs, strict=True):
            out[window].copy_(totals[key])


def shards(x: torch.Tensor, ranks: int, unit: int) -> list[torch.Tensor]:
    """Returns each rank's shard: equal multiples of ``unit`` elements, and smaller ones or empty ones at the end."""
    shard = -(-x.numel() // (ranks * unit)) * unit
    return [x[rank * shard : (rank + 1) * shard] for rank in range(ranks)]


def _reducescatter(how: Reduction, call: SumCall, transport: Transport, ranks: OfRanks) -> None:
    counts: Sequence[int] = call.work.parts
    firsts, most = first_elements(counts), max(counts)
    step = transport.two_shot_nbytes // (len(counts) * call.dtype.itemsize)
    of_ranks = [operands.inputs[0].view(-1).split(counts) for operands in ranks]

    def one_shot(start: int, window: slice) -> Iterator[None]:
        sources, begin = [[part[window] for part in parts] for parts in of_ranks], [first + start for first in firsts]
        owned = [(operands.outputs[0].view(-1)[window], operands, start) for operands in ranks]
        yield from _sum_shards(how, transport, sources, begin, owned)

    pipelined(one_shot(*at) for at in _windows(most, _CHUNK_NUMEL if call.work.codec else step))


def _sum_shards(
    how: Reduction, transport: Transport, sources: Sequence[Tensors], firsts: Sequence[int], owned: Sequence[Owned]
) -> Generator[None, None, list[torch.Tensor]]:
    """Sends each owner its shard of every rank's tensor. The next step writes the sums, and gives them as they travel.

    ``sources`` are the shards of each rank of this process, and ``firsts`` the indices of their first elements in the
    whole tensor. ``owned`` is what each of these ranks sums.
    """
    sent = [
        [how.encode(shard, rank, first) for shard, first in zip(of_rank, firsts, strict=True)]
        for rank, of_rank in zip(transport.ranks, sources, strict=True)
    ]
    arrived = transport.exchange([list(map(bytes_of, parts)) for parts in sent])
    yield
    totals = []
    for rank, parts, received, (target, operands, first) in zip(transport.ranks, sent, arrived(), owned, strict=True):
        parts = [part.view(parts[rank].dtype) for part in received]
        totals.append(how.into(target, parts, operands, first) if target.numel() else how.room(target))
    return totals


def _allgather(how: Reduction, call: SumCall, transport: Transport, ranks: OfRanks) -> None:
    nbytes = [count * call.dtype.itemsize for count in call.work.parts]
    xs = [bytes_of(operands.inputs[0]) for operands in ranks]
    outs = [bytes_of(operands.outputs[0]).split(nbytes) for operands in ranks]
    for start, window in _windows(max(nbytes), transport.chunk_nbytes):
        lengths = [max(0, min(count, window.stop) - start) for count in nbytes]
        received = transport.gather([x[window] for x in xs], lengths)()
        for targets, parts in zip(outs, received, strict=True):
            for target, part in zip(targets, parts, strict=True):
                target[window].copy_(part)


def _alltoall(call: Call[Exchange], transport: Transport, ranks: OfRanks) -> None:
    work = call.work
    if not work.known:
        _compare_lengths(call, transport, ranks[0].inputs[0].device)
    sent, rooms, targets = [], [], []
    for operands, sends, receives in zip(ranks, work.sends, work.receives, strict=True):
        sent.append([bytes_of(part.contiguous()) for part in operands.inputs[0].split(sends, work.scatter_dim)])
        parts = operands.outputs[0].split(receives, work.gather_dim)
        rooms.append([bytes_of(part if part.is_contiguous() else part.new_empty(part.shape)) for part in parts])
        targets.append(parts)
    for parts, received in zip(targets, transport.exchange(sent, rooms)(), strict=True):
        for part, came in zip(parts, received, strict=True):
            if came.data_ptr() != part.data_ptr():
                part.copy_(came.view(part.dtype).view(part.shape))


def _compare_lengths(call: Call[Exchange], transport: Transport, device: torch.device) -> None:
    """Raises CommunicatorError on every rank unless each rank receives the lengths that others send it.

    On GPUs torch.distributed finds it, or waits: to compare would stop the host.
    """
    if device.type != "cpu":
        return
    work, ranks = call.work, range(transport.world_size)
    operands = torch.tensor([*work.sends[0], *work.receives[0]], dtype=torch.int64)
    (of_ranks,) = transport.gather([operands], [operands.numel()] * len(ranks))()
    lengths = [of_rank.tolist() for of_rank in of_ranks]
    for sender, receiver in product(ranks, repeat=2):
        sends, receives = lengths[sender][receiver], lengths[receiver][len(ranks) + sender]
        if sends != receives:
            raise CommunicatorError(
                f"{call.op}: ranks must send what others receive, got\nrank {sender}: {sends} to rank "
                f"{receiver}\nrank {receiver}: {receives} from rank {sender}"
            )


_RUNS = {"allreduce": _allreduce, "reducescatter": _reducescatter, "allgather": _allgather}


def _windows(numel: int, step: int) -> Iterator[tuple[int, slice]]:
    step = max(1, step)
    return ((start, slice(start, min(start + step, numel))) for start in range(0, numel, step))


def _by_specification(call: SumCall, specification: Specification, transport: Transport, ranks: OfRanks) -> None:
    x = ranks[0].inputs[0]
    joins, world_size = call.op == "allgather", transport.world_size
    counts = call.work.parts if joins else [x.numel()] * world_size
    shape = (-1, *x.shape[1:]) if joins else x.shape
    received = transport.gather([operands.inputs[0].reshape(-1) for operands in ranks], counts)()
    made: dict[torch.device, Sequence[torch.Tensor]] = {}  # before anything is written: an output may be an input
    outs = [operands.outputs[0] for operands in ranks]
    for out, parts in zip(outs, received, strict=True):
        if out.device not in made:
            result = specification([part.clone().view(shape) for part in parts])  # it may overwrite the copies
            results = [result] * world_size if isinstance(result, torch.Tensor) else result
            if len(results) != world_size:
                raise ValueError(f"{call.op}: {call.algorithm} has a specification that gives {len(results)} results")
            made[out.device] = results
    for rank, out in zip(transport.ranks, outs, strict=True):
        result = made[out.device][rank]
        if (result.numel(), result.dtype) != (out.numel(), out.dtype):
            gives, wanted = (f"{list(tensor.shape)} {tensor.dtype}" for tensor in (result, out))
            raise ValueError(f"{call.op}: {call.algorithm} has a specification that gives {gives} in place of {wanted}")
        out.view(-1).copy_(result.reshape(-1))
