"""Every op over torch.distributed: any backend, dtype and number of hosts; and in one process, as on the CPU.

In an all-reduce every rank receives its shard of all inputs, sums it as graphar.reference does, and sends the sum to
all: the traffic of a two-shot, and the same bits as every other algorithm; the other ops are its halves. Only bytes
travel, so a backend need not know the dtype. Whole tensors are contiguous, and ``counts`` has the elements of each
rank's part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from graphar import reference
from graphar.errors import UnsupportedError
from graphar.numerics.codec_reference import SUM, Noise, encode
from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.epilogues.epilogue import Form, Operands

if TYPE_CHECKING:
    from graphar.ranks.hierarchical import Hierarchy

_CHUNK_NBYTES = 64 << 20
_CHUNK_NUMEL = 256 << 10  # where elements are encoded, at some hundred bytes each


SumOf = Callable[[Sequence[torch.Tensor], int], torch.Tensor]  # of parts whose first element has that index


class GroupFailed(Exception):
    """A rank of the process group failed, or did not take part in time; the message is torch's."""


def _plain_sum(parts: Sequence[torch.Tensor], first: int) -> torch.Tensor:
    return reference.allreduce(parts)


def allreduce_process(
    x: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    timeout_s: float,
    sum_of: SumOf = _plain_sum,
) -> None:
    """Writes the sum of every rank's ``x`` into ``out``; both contiguous, one rank a process.

    Args:
        sum_of: makes the sum of parts.

    Raises:
        UnsupportedError: the group has no backend for the device of ``x``.
        GroupFailed: on the CPU, when a rank failed, or the group was not done in ``timeout_s`` seconds.
    """
    _check_backend(x, group)
    source, target = x.view(-1), out.view(-1)
    step = max(1, _CHUNK_NBYTES // source.element_size())
    for start in range(0, source.numel(), step):
        total = _chunk(source[start : start + step], group, timeout_s, partial(_shifted, sum_of, start))
        target[start : start + step].copy_(total)


def epilogue_process(
    x: torch.Tensor, out: torch.Tensor, operands: Operands, group: dist.ProcessGroup, timeout_s: float, form: Form
) -> None:
    """As :func:`allreduce_process`, with an epilogue: the owner of a shard applies it."""
    allreduce_process(x, out, group, timeout_s, _sum_with(form, operands, x.numel()))


def _sum_with(form: Form, operands: Operands, numel: int) -> SumOf:
    return lambda parts, first: reference.sum_with_epilogue(parts, form, operands, first, numel)


def _shifted(sum_of: Callable, start: int, parts: Sequence[torch.Tensor], first: int) -> torch.Tensor:
    return sum_of(parts, start + first)


def reducescatter_process(
    x: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    timeout_s: float,
    counts: Sequence[int],
    sum_of: SumOf = _plain_sum,
) -> None:
    """Writes this rank's part of the sum of every rank's ``x`` into ``out``; raises as :func:`allreduce_process`."""
    _check_backend(x, group)
    parts, target, own = x.view(-1).split(counts), out.view(-1), counts[group.rank()]
    step = max(1, _CHUNK_NBYTES // (len(counts) * x.element_size()))
    for start in range(0, max(counts), step):
        window = slice(start, start + step)
        padded = _rows([part[window] for part in parts])
        received = torch.empty_like(padded)
        _exchange(x, timeout_s, received, padded, group)
        target[window].copy_(sum_of(received[:, : max(0, own - start)].unbind(), start))


def epilogue_reducescatter_process(
    x: torch.Tensor,
    out: torch.Tensor,
    operands: Operands,
    group: dist.ProcessGroup,
    timeout_s: float,
    counts: Sequence[int],
    form: Form,
) -> None:
    """As :func:`reducescatter_process`, with an epilogue."""
    reducescatter_process(x, out, group, timeout_s, counts, _sum_with(form, operands, out.numel()))


def allgather_process(
    x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, timeout_s: float, counts: Sequence[int]
) -> None:
    """Writes every rank's ``x``, one after another, into ``out``; raises as :func:`allreduce_process`."""
    _check_backend(x, group)
    source, itemsize = _bytes(x.view(-1)), x.element_size()
    targets = _bytes(out.view(-1)).split([count * itemsize for count in counts])
    longest = max(counts) * itemsize
    for start in range(0, longest, _CHUNK_NBYTES):
        window = slice(start, min(start + _CHUNK_NBYTES, longest))
        mine = source.new_zeros(window.stop - start)
        mine[: source[window].numel()].copy_(source[window])
        received = list(mine.new_empty(len(counts), mine.numel()).unbind())
        _collect(x, timeout_s, received, mine, group)
        for row, target in zip(received, targets, strict=True):
            target[window].copy_(row[: target[window].numel()])


def quantized_process(
    x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, timeout_s: float, codec: Codec, calls: Iterator[int]
) -> None:
    """As :func:`allreduce_process`, with a codec on the wire: the same bits as every kernel.

    Every rank sends all it has encoded to all others: for small tensors, and where there is no other way.

    Args:
        codec: the same on every rank, but for its seed, which each has.
        calls: counts the calls, as all ranks do.
    """
    _check_backend(x, group)
    source, target, call = x.view(-1), out.view(-1), next(calls)
    seed = torch.tensor(list((codec.seed or 0).to_bytes(8, "little")), dtype=torch.uint8, device=x.device)
    for start in range(0, source.numel(), _CHUNK_NUMEL):
        part = source[start : start + _CHUNK_NUMEL]
        wire = _encode(part, codec, Noise(codec.seed or 0, call, group.rank(), start))
        sent = torch.cat([seed, wire])
        received = list(sent.new_empty(group.size(), sent.numel()).unbind())
        _collect(x, timeout_s, received, sent, group)
        first_seed = int.from_bytes(bytes(received[0][:8].tolist()), "little")  # any, as long as all have the same one
        wires = [one[8:].clone() for one in received]
        total = reference.sum_of_wires(wires, codec, Noise(first_seed, call, SUM, start), part)
        target[start : start + _CHUNK_NUMEL].copy_(total)


def hierarchical_process(
    x: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    timeout_s: float,
    hierarchy: Hierarchy,
    codec: Codec | None = None,
) -> None:
    """As :func:`allreduce_process`, by ``hierarchy``, which has groups of its own."""
    _check_backend(x, group)
    hierarchy.allreduce(x, out, timeout_s, codec)


def quantized_reducescatter_process(
    x: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    timeout_s: float,
    counts: Sequence[int],
    codec: Codec,
    calls: Iterator[int],
) -> None:
    """As :func:`reducescatter_process`, with a codec on the wire: the same bits as every kernel."""
    _check_backend(x, group)
    parts, target, seed, call = x.view(-1).split(counts), out.view(-1), codec.seed or 0, next(calls)
    rank, firsts = group.rank(), reference.first_elements(counts)
    step = max(1, _CHUNK_NUMEL // (len(counts) * TILE_NUMEL)) * TILE_NUMEL
    for start in range(0, max(counts), step):
        window = slice(start, start + step)
        noises = [Noise(seed, call, rank, first + start) for first in firsts]
        wires = [_encode(part[window], codec, noise) for part, noise in zip(parts, noises, strict=True)]
        padded = _rows(wires)
        received = torch.empty_like(padded)
        _exchange(x, timeout_s, received, padded, group)
        mine = received[:, : wires[rank].numel()].contiguous()
        target[window].copy_(reference.part_of_wires(mine.unbind(), codec, target[window]))


def _encode(part: torch.Tensor, codec: Codec, noise: Noise) -> torch.Tensor:
    """The part's wire; where the codec feeds back, what that takes from the part is left in its place."""
    wire = encode(part, codec, noise)
    if codec.feedback:
        part.copy_(reference.error_of_wire(part, wire, codec))
    return wire


def _check_backend(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    try:
        group._get_backend(x.device)
    except RuntimeError as error:
        raise UnsupportedError(f"the group has no backend for {x.device.type} tensors: {error}") from None


def _rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The parts as rows of one tensor, filled up with zeros to the longest."""
    rows = parts[0].new_zeros(len(parts), max(part.numel() for part in parts))
    for row, part in zip(rows, parts, strict=True):
        row[: part.numel()].copy_(part)
    return rows


def _chunk(x: torch.Tensor, group: dist.ProcessGroup, timeout_s: float, sum_of: Callable) -> torch.Tensor:
    world_size = group.size()
    shard = -(-x.numel() // world_size)
    padded = torch.nn.functional.pad(x, (0, world_size * shard - x.numel()))
    parts = torch.empty_like(padded)
    _exchange(x, timeout_s, parts, padded, group)
    total = sum_of(parts.view(world_size, shard).unbind(), group.rank() * shard)
    gathered = torch.empty_like(padded)
    _collect(x, timeout_s, list(_bytes(gathered).chunk(world_size)), _bytes(total), group)
    return gathered[: x.numel()]


def _exchange(x: torch.Tensor, timeout_s: float, received: torch.Tensor, sent: torch.Tensor, group) -> None:
    """All-to-all: block r of ``sent`` goes to rank r, block r of ``received`` comes from it."""
    options = _options(dist.distributed_c10d.AllToAllOptions(), x, timeout_s)
    _wait(x, timeout_s, lambda: group.alltoall_base(_bytes(received), _bytes(sent), [], [], options))


def _collect(x: torch.Tensor, timeout_s: float, received: list[torch.Tensor], sent: torch.Tensor, group) -> None:
    """All-gather: ``sent`` goes to all ranks, ``received[r]`` comes from rank r."""
    options = _options(dist.distributed_c10d.AllgatherOptions(), x, timeout_s)
    _wait(x, timeout_s, lambda: group.allgather([received], [sent], options))


def _options(options, x: torch.Tensor, timeout_s: float):
    options.asyncOp = True
    if x.device.type == "cpu":  # else gloo's threads wait on for the group's own time-out, also when the process ends
        options.timeout = timedelta(seconds=timeout_s)
    return options


def _bytes(x: torch.Tensor) -> torch.Tensor:
    # A contiguous tensor of at most one element may have any stride, but not where it is to be one of another dtype.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _wait(x: torch.Tensor, timeout_s: float, start: Callable[[], dist.Work]) -> None:
    if x.device.type != "cpu":
        start().wait()  # only orders the stream; the group's own timeout holds
        return
    try:
        start().wait(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise GroupFailed(str(error)) from error


def allreduce_local(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    """Writes the sum of all inputs into every output; one process holds all ranks, on the CPU or on several devices."""
    totals = {
        device: reference.allreduce([part.to(device) for part in inputs]) for device in {out.device for out in outputs}
    }
    for out in outputs:
        out.copy_(totals[out.device])


def epilogue_local(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], operands: Sequence[Operands], form: Form
) -> None:
    """As :func:`allreduce_local`, with an epilogue: every rank applies its own."""
    totals = []  # all before the first is written, which may be where an input is
    for out, own in zip(outputs, operands, strict=True):
        parts = [part.to(out.device).view(-1) for part in inputs]
        totals.append(reference.sum_with_epilogue(parts, form, own, 0, out.numel()))
    for out, total in zip(outputs, totals, strict=True):
        out.view(-1).copy_(total)


def quantized_local(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], codec: Codec, calls: Iterator[int]
) -> None:
    """As :func:`allreduce_local`, with a codec on the wire."""
    call, seed = next(calls), codec.seed or 0
    target = outputs[0].view(-1)
    for start in range(0, target.numel(), _CHUNK_NUMEL):
        window = slice(start, start + _CHUNK_NUMEL)
        noises = [Noise(seed, call, rank, start) for rank in range(len(inputs))]
        wires = [_encode(x.view(-1)[window], codec, noise) for x, noise in zip(inputs, noises, strict=True)]
        wires = [wire.to(target.device) for wire in wires]
        total = reference.sum_of_wires(wires, codec, Noise(seed, call, SUM, start), target[window])
        for out in outputs:
            out.view(-1)[window].copy_(total)


def quantized_reducescatter_local(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    counts: Sequence[int],
    codec: Codec,
    calls: Iterator[int],
) -> None:
    """As :func:`reducescatter_local`, with a codec on the wire."""
    call, seed = next(calls), codec.seed or 0
    columns = zip(*(x.view(-1).split(counts) for x in inputs), strict=True)
    for out, parts, first in zip(outputs, columns, reference.first_elements(counts), strict=True):
        target = out.view(-1)
        for start in range(0, target.numel(), _CHUNK_NUMEL):
            window = slice(start, start + _CHUNK_NUMEL)
            noises = [Noise(seed, call, rank, first + start) for rank in range(len(parts))]
            wires = [_encode(part[window], codec, noise) for part, noise in zip(parts, noises, strict=True)]
            wires = [wire.to(out.device) for wire in wires]
            target[window].copy_(reference.part_of_wires(wires, codec, target[window]))


def reducescatter_local(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    """Writes each rank's part of the sum of all inputs into its output; one process holds all ranks."""
    columns = zip(*(x.view(-1).split(counts) for x in inputs), strict=True)
    for out, parts in zip(outputs, columns, strict=True):
        out.view(-1).copy_(reference.allreduce([part.to(out.device) for part in parts]))


def epilogue_reducescatter_local(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    operands: Sequence[Operands],
    counts: Sequence[int],
    form: Form,
) -> None:
    """As :func:`reducescatter_local`, with an epilogue."""
    columns = zip(*(x.view(-1).split(counts) for x in inputs), strict=True)
    for out, parts, own in zip(outputs, columns, operands, strict=True):
        parts = [part.to(out.device) for part in parts]
        out.view(-1).copy_(reference.sum_with_epilogue(parts, form, own, 0, out.numel()))


def allgather_local(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    """Writes all inputs, one after another, into every output; one process holds all ranks."""
    for out in outputs:
        for x, target in zip(inputs, out.view(-1).split(counts), strict=True):
            _bytes(target).copy_(_bytes(x.view(-1)))


LOCAL = {
    "allreduce": allreduce_local,
    "epilogue_allreduce": epilogue_local,
    "quantized_allreduce": quantized_local,
    "reducescatter": reducescatter_local,
    "epilogue_reducescatter": epilogue_reducescatter_local,
    "quantized_reducescatter": quantized_reducescatter_local,
    "allgather": allgather_local,
}
PROCESS = {
    "allreduce": allreduce_process,
    "epilogue_allreduce": epilogue_process,
    "quantized_allreduce": quantized_process,
    "reducescatter": reducescatter_process,
    "epilogue_reducescatter": epilogue_reducescatter_process,
    "quantized_reducescatter": quantized_reducescatter_process,
    "allgather": allgather_process,
    "hierarchical_allreduce": hierarchical_process,
}


# ---- what moves nothing between ranks --------------------------------------------------------------------------------


def alone(way: object, in_lists: bool, form: Form | None = None, **_) -> Callable:
    """What a call of one rank does to its tensors, or to lists of one; ``way`` is its codec, if it has one."""
    if form:
        run = partial(epilogue_local, form=form)
        return run if in_lists else lambda *tensors: run(*([one] for one in tensors))
    run = move if isinstance(way, Codec) and way.feedback else copy
    return (lambda xs, outs: run(xs[0], outs[0])) if in_lists else run


def copy(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


def move(x: torch.Tensor, out: torch.Tensor) -> None:
    """As :func:`copy`, and of ``x`` nothing is left."""
    out.copy_(x)
    x.zero_()


def do_nothing(*tensors) -> None:
    pass
