"""The fallback algorithm: every op without graphar's kernels, over torch.distributed or in one process.

An all-reduce is a two-shot. Every rank receives its shard of all inputs, sums it as graphar.reference does, and sends
the sum to all ranks, so it gives the bits of every exact algorithm. Reduce-scatter and all-gather are its two halves.
Small tensors go whole to all ranks: one message in place of two. Only bytes travel, so a backend need not support the
dtype. Tensors are contiguous, and ``counts`` has the elements of each rank's part.

:func:`over_group` and :func:`in_process` return a function of the operands of this process's ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat

import torch
import torch.distributed as dist

from graphar import reference
from graphar.errors import UnsupportedError
from graphar.numerics.codec_reference import (
    SUM,
    Noise,
    encode,
    error_of_wire,
    first_elements,
    part_of_wires,
    sum_of_wires,
)
from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.epilogues.epilogue import EpilogueInputs
from graphar.plan.call import Call, Operands
from graphar.plan.work import Parts, Sum, Work
from graphar.ranks.cpu.messages import GroupFailed, Messages, deadline

_SMALL_NBYTES = 32 << 10  # of an all-reduce whose messages take no longer than empty ones
_CHUNK_NBYTES = 64 << 20
_CHUNK_NUMEL = 256 << 10  # with a codec, whose encoder takes some hundred bytes an element

Run = Callable[[Sequence[Operands]], None]  # takes the operands of this process's ranks
SumOf = Callable[[Sequence[torch.Tensor], int], torch.Tensor]  # the sum of parts, and the index of their first element


def over_group(call: Call, group: dist.ProcessGroup | Messages, timeout_s: float, calls: Iterator[int]) -> Run:
    """Returns the function of a call over a process group.

    The function raises UnsupportedError if the group has no backend for the tensors' device. On the CPU it raises
    GroupFailed if a rank failed, or if the group was not done within ``timeout_s`` seconds. ``calls`` counts the calls
    with a codec, equally on all ranks.
    """
    work, options = call.work, _options(call, calls)
    adds = _adds(work)
    compute = partial(_FUNCTIONS[work.op, bool(work.codec)][0], group=group, timeout_s=timeout_s, **options)

    def run(ranks: Sequence[Operands]) -> None:
        (own,) = ranks
        x, out = own.inputs[0], own.outputs[0]
        compute(x, out, **({"sum_of": sum_of(work, own)} if adds else {}))

    return run


def in_process(call: Call, calls: Iterator[int]) -> Run:
    """Returns the function of a call whose ranks are all in this process.

    ``calls`` counts the calls with a codec.
    """
    work = call.work
    adds = _adds(work)
    compute = partial(_FUNCTIONS[work.op, bool(work.codec)][1], **_options(call, calls))

    def run(ranks: Sequence[Operands]) -> None:
        lists = [one.inputs[0] for one in ranks], [one.outputs[0] for one in ranks]
        if not adds:
            compute(*lists)
        elif work.epilogue:
            compute(*lists, [sum_of(work, one) for one in ranks])
        else:
            compute(*lists, [sum_of(work, ranks[0])] * len(ranks))

    return run


def feeding_back(call: Call, run: Run) -> Run:
    """Returns ``run``, which leaves rounding errors in its inputs, for a call that adds those of earlier calls to them.

    They are replaced once ``run`` has ended: a call that fails leaves them as they were.
    """
    if not call.feeds_back:
        return run

    def run_with_errors(ranks: Sequence[Operands]) -> None:
        values = [own.inputs[0] + own.inputs[1] for own in ranks]
        run([own._replace(inputs=(one,)) for own, one in zip(ranks, values, strict=True)])
        for own, one in zip(ranks, values, strict=True):
            own.inputs[1].copy_(one)

    return run_with_errors


def _adds(work: Work) -> bool:
    """Whether a work adds elements as they are."""
    return not work.codec and work.op != "allgather"


def sum_of(work: Sum | Parts, own: Operands) -> SumOf:
    """Returns the function that adds the parts of one rank, whose operands are ``own``."""
    form, order, out_dtype = work.epilogue, work.order, work.out_dtype
    if not form:
        return lambda parts, first: reference.allreduce(parts, order=order, out_dtype=out_dtype)
    inputs, numel = EpilogueInputs(list(own.inputs[1:]), list(own.numbers), own.corner), own.outputs[0].numel()
    return lambda parts, first: reference.sum_with_epilogue(parts, form, inputs, first, numel, order, out_dtype)


def _options(call: Call, calls: Iterator[int]) -> dict[str, object]:
    """Returns the arguments that the function of a call takes besides its tensors."""
    counts = {} if call.op == "allreduce" else {"counts": call.work.parts}
    return counts | ({"codec": call.wire, "calls": calls} if call.wire else {})


# ---- over a process group, one rank a process -----------------------------------------------------------------------


def _plain_sum(parts: Sequence[torch.Tensor], first: int) -> torch.Tensor:
    return reference.allreduce(parts)


def allreduce(
    x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, timeout_s: float, sum_of: SumOf = _plain_sum
) -> None:
    """Writes the sum of every rank's ``x``, computed by ``sum_of``, into ``out``.

    Raises:
        UnsupportedError: the group has no backend for the tensors' device.
        GroupFailed: on the CPU, a rank failed or did not take part within ``timeout_s`` seconds.
    """
    check_backend(x, group)
    source, target, world_size = x.view(-1), out.view(-1), group.size()
    if x.nbytes <= _SMALL_NBYTES:
        received = source.new_empty(world_size, source.numel())
        _collect(x, timeout_s, list(_bytes(received).chunk(world_size)), _bytes(source), group)
        target.copy_(sum_of(received.unbind(), 0))
        return
    step = max(1, _CHUNK_NBYTES // source.element_size())
    for start in range(0, source.numel(), step):
        chunk = source[start : start + step]
        shard = -(-chunk.numel() // world_size)
        padded = torch.nn.functional.pad(chunk, (0, world_size * shard - chunk.numel()))
        received = torch.empty_like(padded)
        _exchange(x, timeout_s, received, padded, group)
        total = sum_of(received.view(world_size, shard).unbind(), start + group.rank() * shard)
        gathered = torch.empty_like(padded, dtype=out.dtype)
        _collect(x, timeout_s, list(_bytes(gathered).chunk(world_size)), _bytes(total), group)
        target[start : start + step].copy_(gathered[: chunk.numel()])


def reducescatter(
    x: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    timeout_s: float,
    counts: Sequence[int],
    sum_of: SumOf = _plain_sum,
) -> None:
    """Writes this rank's part of the sum of every rank's ``x`` into ``out``; raises what :func:`allreduce` raises."""
    check_backend(x, group)
    parts, target, own = x.view(-1).split(counts), out.view(-1), counts[group.rank()]
    step = max(1, _CHUNK_NBYTES // (len(counts) * x.element_size()))
    for start in range(0, max(counts), step):
        window = slice(start, start + step)
        padded = _rows([part[window] for part in parts])
        received = torch.empty_like(padded)
        _exchange(x, timeout_s, received, padded, group)
        target[window].copy_(sum_of(received[:, : max(0, own - start)].unbind(), start))


def allgather(
    x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, timeout_s: float, counts: Sequence[int]
) -> None:
    """Writes every rank's ``x``, concatenated in rank order, into ``out``; raises what :func:`allreduce` raises."""
    check_backend(x, group)
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


def _quantized_allreduce(
    x: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup, timeout_s: float, codec: Codec, calls: Iterator[int]
) -> None:
    """Writes the sum of every rank's ``x`` into ``out``, with a codec on the wire and the bits of the kernels.

    Every rank sends its whole encoded tensor to all others, which is simple but slow for large tensors.
    """
    check_backend(x, group)
    source, target, call = x.view(-1), out.view(-1), next(calls)
    seed = torch.tensor(list((codec.seed or 0).to_bytes(8, "little")), dtype=torch.uint8, device=x.device)
    for start in range(0, source.numel(), _CHUNK_NUMEL):
        part = source[start : start + _CHUNK_NUMEL]
        wire = _encode(part, codec, Noise(codec.seed or 0, call, group.rank(), start))
        sent = torch.cat([seed, wire])
        received = list(sent.new_empty(group.size(), sent.numel()).unbind())
        _collect(x, timeout_s, received, sent, group)
        first_seed = int.from_bytes(bytes(received[0][:8].tolist()), "little")  # all ranks take rank 0's seed
        wires = [one[8:].clone() for one in received]
        total = sum_of_wires(wires, codec, Noise(first_seed, call, SUM, start), part)
        target[start : start + _CHUNK_NUMEL].copy_(total)


def quantized_reducescatter(
    x: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    timeout_s: float,
    counts: Sequence[int],
    codec: Codec,
    calls: Iterator[int],
) -> None:
    """Writes this rank's part of the sum into ``out``, with a codec on the wire and the bits of the kernels."""
    check_backend(x, group)
    parts, target, seed, call = x.view(-1).split(counts), out.view(-1), codec.seed or 0, next(calls)
    rank, firsts = group.rank(), first_elements(counts)
    step = max(1, _CHUNK_NUMEL // (len(counts) * TILE_NUMEL)) * TILE_NUMEL
    for start in range(0, max(counts), step):
        window = slice(start, start + step)
        noises = [Noise(seed, call, rank, first + start) for first in firsts]
        wires = [_encode(part[window], codec, noise) for part, noise in zip(parts, noises, strict=True)]
        padded = _rows(wires)
        received = torch.empty_like(padded)
        _exchange(x, timeout_s, received, padded, group)
        mine = received[:, : wires[rank].numel()].contiguous()
        target[window].copy_(part_of_wires(mine.unbind(), codec, target[window]))


def _encode(part: torch.Tensor, codec: Codec, noise: Noise) -> torch.Tensor:
    """Returns the encoded part. A codec with feedback overwrites the part with its rounding errors."""
    wire = encode(part, codec, noise)
    if codec.feedback:
        part.copy_(error_of_wire(part, wire, codec))
    return wire


def check_backend(x: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Raises UnsupportedError if the group has no backend for the device of ``x``."""
    try:
        group._get_backend(x.device)
    except RuntimeError as error:
        raise UnsupportedError(f"the group has no backend for {x.device.type} tensors: {error}") from None


def _rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the parts as rows of one tensor, padded with zeros to the longest part."""
    rows = parts[0].new_zeros(len(parts), max(part.numel() for part in parts))
    for row, part in zip(rows, parts, strict=True):
        row[: part.numel()].copy_(part)
    return rows


def _exchange(x: torch.Tensor, timeout_s: float, received: torch.Tensor, sent: torch.Tensor, group) -> None:
    """All-to-all: sends block r of ``sent`` to rank r, and receives block r of ``received`` from it."""
    options = _with_deadline(dist.distributed_c10d.AllToAllOptions(), x, timeout_s)
    _wait(x, timeout_s, lambda: group.alltoall_base(_bytes(received), _bytes(sent), [], [], options))


def _collect(x: torch.Tensor, timeout_s: float, received: list[torch.Tensor], sent: torch.Tensor, group) -> None:
    """All-gather: sends ``sent`` to all ranks, and receives ``received[r]`` from rank r."""
    options = _with_deadline(dist.distributed_c10d.AllgatherOptions(), x, timeout_s)
    _wait(x, timeout_s, lambda: group.allgather([received], [sent], options))


def _with_deadline(options, x: torch.Tensor, timeout_s: float):
    options.asyncOp = True
    if x.device.type == "cpu":  # else gloo's threads outlive the deadline, and delay the process's exit
        options.timeout = deadline(timeout_s)
    return options


def _bytes(x: torch.Tensor) -> torch.Tensor:
    # A contiguous tensor of at most one element may have any stride, and view(dtype) rejects some.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def _wait(x: torch.Tensor, timeout_s: float, start: Callable[[], dist.Work]) -> None:
    if x.device.type != "cpu":
        start().wait()  # only orders the stream; the group's own time-out applies
        return
    wait(start(), timeout_s)  # an error of this rank alone is raised by start(), and ends no communicator


def wait(work: dist.Work, timeout_s: float) -> None:
    """Waits for a call on the CPU; GroupFailed if a rank failed, or did not take part within ``timeout_s`` seconds."""
    begin = time.monotonic()
    try:
        work.wait(deadline(timeout_s))
    except RuntimeError as error:
        raise GroupFailed(str(error), begin=begin) from error


# ---- all ranks in one process ---------------------------------------------------------------------------------------


def _allreduce_local(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], of_ranks: Sequence[SumOf]
) -> None:
    made = {(out.device, sum_of): None for out, sum_of in zip(outputs, of_ranks, strict=True)}
    for device, sum_of in made:  # compute all sums before writing: an output may be an input
        made[device, sum_of] = sum_of([part.to(device).view(-1) for part in inputs], 0)
    for out, sum_of in zip(outputs, of_ranks, strict=True):
        out.view(-1).copy_(made[out.device, sum_of])


def _reducescatter_local(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    of_ranks: Sequence[SumOf],
    *,
    counts: Sequence[int],
) -> None:
    columns = zip(*(x.view(-1).split(counts) for x in inputs), strict=True)
    for out, parts, sum_of in zip(outputs, columns, of_ranks, strict=True):
        out.view(-1).copy_(sum_of([part.to(out.device) for part in parts], 0))


def _allgather_local(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    for out in outputs:
        for x, target in zip(inputs, out.view(-1).split(counts), strict=True):
            _bytes(target).copy_(_bytes(x.view(-1)))


def _quantized_allreduce_local(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], codec: Codec, calls: Iterator[int]
) -> None:
    call, seed = next(calls), codec.seed or 0
    target = outputs[0].view(-1)
    for start in range(0, target.numel(), _CHUNK_NUMEL):
        window = slice(start, start + _CHUNK_NUMEL)
        wires = [
            _encode(x.view(-1)[window], codec, Noise(seed, call, rank, start)).to(target.device)
            for rank, x in enumerate(inputs)
        ]
        total = sum_of_wires(wires, codec, Noise(seed, call, SUM, start), target[window])
        for out in outputs:
            out.view(-1)[window].copy_(total)


def _quantized_reducescatter_local(
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    counts: Sequence[int],
    codec: Codec,
    calls: Iterator[int],
) -> None:
    call, seed = next(calls), codec.seed or 0
    columns = zip(*(x.view(-1).split(counts) for x in inputs), strict=True)
    for out, parts, first in zip(outputs, columns, first_elements(counts), strict=True):
        target = out.view(-1)
        for start in range(0, target.numel(), _CHUNK_NUMEL):
            window = slice(start, start + _CHUNK_NUMEL)
            wires = [
                _encode(part[window], codec, Noise(seed, call, rank, first + start)).to(out.device)
                for rank, part in enumerate(parts)
            ]
            target[window].copy_(part_of_wires(wires, codec, target[window]))


# By op and whether a codec is on the wire, the functions over a group and in one process.
_FUNCTIONS: dict[tuple[str, bool], tuple[Callable, Callable]] = {
    ("allreduce", False): (allreduce, _allreduce_local),
    ("allreduce", True): (_quantized_allreduce, _quantized_allreduce_local),
    ("reducescatter", False): (reducescatter, _reducescatter_local),
    ("reducescatter", True): (quantized_reducescatter, _quantized_reducescatter_local),
    ("allgather", False): (allgather, _allgather_local),
}


# ---- one rank -------------------------------------------------------------------------------------------------------


def alone(call: Call) -> Run:
    """Returns the function of a call between one rank."""
    if call.work.epilogue or call.work.out_dtype:
        return in_process(call, repeat(0))

    def copy(ranks: Sequence[Operands]) -> None:
        (own,) = ranks
        own.outputs[0].copy_(own.inputs[0])
        if call.feeds_back:
            own.inputs[0].zero_()  # a single rank has no rounding errors

    return feeding_back(call, copy)


def do_nothing(ranks: Sequence[Operands]) -> None:
    """The function of a call without elements."""
