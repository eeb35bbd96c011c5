"""The calls of torch.distributed that graphar serves: lists of tensors, averages, and tensors of any layout.

Each takes the communicator, the tensors as torch passes them, and the deadline of waits. Small tensors of a call are
copied into one, which takes one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from graphar.communicator import Communicator
from graphar.ops import options, sums
from graphar.plan.call import Call, Operands
from graphar.plan.work import Exchange, Parts
from graphar.runtime.engine import Engine

_PACK_NBYTES = 1 << 20  # to copy more takes longer than the launches that it saves

Tensors = list[torch.Tensor]


def allreduce(communicator: Communicator, average: bool, tensors: Tensors, timeout_s: float | None) -> None:
    for pack in _packs(tensors) if len(tensors) > 1 else [slice(1)]:
        xs = tensors[pack]
        if len(xs) == 1:
            _allreduce_one(communicator, average, xs[0], timeout_s)
            continue
        flat = torch.cat([x.detach().reshape(-1) for x in xs])
        _allreduce_one(communicator, average, flat, timeout_s)
        _unpack(flat.view(1, -1), xs)


def _allreduce_one(communicator: Communicator, average: bool, x: torch.Tensor, timeout_s: float | None) -> None:
    x = x.detach() if x.requires_grad else x
    if average:
        name, epilogue = communicator.engine.name, _division(communicator, x)
        given = sums.Arguments(communicator=name, timeout_s=timeout_s, epilogue=epilogue)
        sums.SUM.into(x, [], x, given=given, plain=True)
    else:
        sums.allreduce(x, communicator, out=x, timeout_s=timeout_s)


def reducescatter(
    communicator: Communicator, average: bool, outputs: Tensors, inputs: Tensors, timeout_s: float | None
) -> None:
    ranks = communicator.world_size
    _check_lengths("reduce_scatter", "input", inputs, "output", outputs, ranks)
    for pack in _packs(inputs):
        xs, outs = inputs[pack], outputs[pack]
        if len(xs) == 1:
            _reducescatter_one(communicator, average, outs[0], xs[0], (outs[0].numel(),) * ranks, timeout_s)
            continue
        rows = torch.cat([x.detach().reshape(ranks, out.numel()) for x, out in zip(xs, outs, strict=True)], dim=1)
        part = rows.new_empty(1, rows.shape[1])
        _reducescatter_one(communicator, average, part, rows, (part.numel(),) * ranks, timeout_s)
        _unpack(part, outs)


def reducescatter_lists(
    communicator: Communicator, average: bool, outputs: Tensors, inputs: list[Tensors], timeout_s: float | None
) -> None:
    for out, parts in zip(outputs, inputs, strict=True):
        counts = _counts(communicator, "reduce_scatter", parts, out)
        flat = torch.cat([one.detach().reshape(-1) for one in parts])
        _reducescatter_one(communicator, average, out, flat, counts, timeout_s)


def _reducescatter_one(
    communicator: Communicator,
    average: bool,
    out: torch.Tensor,
    x: torch.Tensor,
    counts: tuple[int, ...],
    timeout_s: float | None,
) -> None:
    engine = communicator.engine
    if average:
        place = {"communicator": engine.name, "rank": engine.rank, "sizes": counts}
        given = sums.ArgumentsOfParts(**place, timeout_s=timeout_s, epilogue=_division(communicator, x))
        _run_into(out, x, lambda x, out: sums.SCATTER.into(x, [], out, given=given, plain=True))
    else:
        _run_into(
            out, x, functools.partial(_run, engine, Call.of(Parts("reducescatter", counts), x, timeout_s=timeout_s))
        )


def allgather(communicator: Communicator, outputs: Tensors, inputs: Tensors, timeout_s: float | None) -> None:
    ranks = communicator.world_size
    _check_lengths("all_gather", "output", outputs, "input", inputs, ranks)
    for pack in _packs(outputs):
        xs, outs = inputs[pack], outputs[pack]
        if len(xs) == 1:
            _allgather_one(communicator, outs[0], xs[0], (xs[0].numel(),) * ranks, timeout_s)
            continue
        flat = torch.cat([x.detach().reshape(-1) for x in xs])
        rows = flat.new_empty(ranks, flat.numel())
        _allgather_one(communicator, rows, flat, (flat.numel(),) * ranks, timeout_s)
        _unpack(rows, outs)


def allgather_lists(
    communicator: Communicator, outputs: list[Tensors], inputs: Tensors, timeout_s: float | None
) -> None:
    for parts, x in zip(outputs, inputs, strict=True):
        counts = _counts(communicator, "all_gather", parts, x)
        flat = x.new_empty(sum(counts))
        _allgather_one(communicator, flat, x, counts, timeout_s)
        for part, found in zip(parts, flat.split(counts), strict=True):
            part.detach().copy_(found.view(part.shape))


def _allgather_one(
    communicator: Communicator, out: torch.Tensor, x: torch.Tensor, counts: tuple[int, ...], timeout_s: float | None
) -> None:
    run = functools.partial(_run, communicator.engine, Call.of(Parts("allgather", counts), x, timeout_s=timeout_s))
    own = out.data_ptr() + sum(counts[: communicator.rank]) * out.itemsize
    if x.data_ptr() == own and x.is_contiguous() and out.is_contiguous():
        run(x.detach().view(-1), out.detach().view(-1))  # kernels write this rank's part where they have read it
    else:
        _run_into(out, x, run)


def why_no_splits(
    out: torch.Tensor, x: torch.Tensor, receives: Sequence[int], sends: Sequence[int], ranks: int
) -> str | None:
    """Returns why the sizes of an all-to-all's parts do not fit its tensors: torch's own group says it."""
    if not out.ndim or not x.ndim:
        return "a tensor without dimensions has no parts"
    fit = all(
        len(sizes) == ranks and min(sizes) >= 0 and sum(sizes) == one.shape[0] if sizes else one.shape[0] % ranks == 0
        for one, sizes in ((out, receives), (x, sends))
    )
    return None if fit and out.shape[1:].numel() == x.shape[1:].numel() else "the sizes of parts do not fit the tensors"


def alltoall(
    communicator: Communicator,
    out: torch.Tensor,
    x: torch.Tensor,
    receives: Sequence[int],
    sends: Sequence[int],
    timeout_s: float | None,
) -> None:
    known = not receives and not sends
    ranks, in_a_row = communicator.world_size, x.shape[1:].numel()
    counts = [
        [rows * in_a_row for rows in sizes or [whole.shape[0] // ranks] * ranks]
        for whole, sizes in ((x, sends), (out, receives))
    ]
    _alltoall_one(communicator, out, x, *counts, known, timeout_s)


def alltoall_lists(communicator: Communicator, outputs: Tensors, inputs: Tensors, timeout_s: float | None) -> None:
    flat = torch.cat([x.detach().reshape(-1) for x in inputs])
    sends, receives = ([one.numel() for one in ones] for ones in (inputs, outputs))
    room = flat.new_empty(sum(receives))
    _alltoall_one(communicator, room, flat, sends, receives, False, timeout_s)
    for out, part in zip(outputs, room.split(receives), strict=True):
        out.detach().copy_(part.view(out.shape))


def _alltoall_one(communicator, out, x, sends: list[int], receives: list[int], known: bool, timeout_s) -> None:
    """Exchanges elements. Only if all ranks have equal parts does each of them know all sizes."""
    work = Exchange(communicator.rank or 0, (1,), (tuple(sends),), (tuple(receives),), known=known)
    _run_into(out, x, functools.partial(_run, communicator.engine, Call.of(work, x, timeout_s=timeout_s)))


def _run(engine: Engine, call: Call, x: torch.Tensor, out: torch.Tensor) -> None:
    engine.run(call, [Operands((x,), (out,))])


def _check_lengths(op: str, whole_name: str, wholes: Tensors, part_name: str, parts: Tensors, ranks: int) -> None:
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != part.numel() * ranks:
            raise ValueError(
                f"{op}: the {whole_name} must have {ranks} times the {part_name}'s {part.numel()} elements, got "
                f"{whole.numel()}"
            )


def _counts(communicator: Communicator, op: str, parts: Tensors, own: torch.Tensor) -> tuple[int, ...]:
    ranks, rank, counts = communicator.world_size, communicator.rank or 0, tuple([one.numel() for one in parts])
    if len(counts) != ranks or counts[rank] != own.numel():
        raise ValueError(
            f"{op}: needs a tensor for each of {ranks} ranks, and of {own.numel()} elements for rank {rank}, got "
            f"{list(counts)}"
        )
    return counts


def _division(communicator: Communicator, x: torch.Tensor) -> str:
    """Returns the epilogue of an average, which divides the fp32 sum before it is rounded."""
    return options.epilogue_option("average", f"v / {communicator.world_size}", x, None)["epilogue"]


def _run_into(out: torch.Tensor, x: torch.Tensor, run: Callable[[torch.Tensor, torch.Tensor], object]) -> None:
    """Runs ``run(x, out)`` with both flattened, contiguous and without shared memory. ``out`` has the result."""
    out, x = out.detach(), x.detach().contiguous()
    target = _contiguous(out)
    begin, end = x.data_ptr(), target.data_ptr()
    if begin < end + target.nbytes and end < begin + x.nbytes:
        x = x.clone()
    run(x.view(-1), target.view(-1))
    if target is not out:
        out.copy_(target)


def _contiguous(out: torch.Tensor) -> torch.Tensor:
    return out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)


def _packs(tensors: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Yields slices of a coalesced call's tensors that make one launch: as many as have ``_PACK_NBYTES`` together."""
    begin = nbytes = 0
    for end, x in enumerate(tensors):
        if end > begin and nbytes + x.nbytes > _PACK_NBYTES:
            yield slice(begin, end)
            begin, nbytes = end, 0
        nbytes += x.nbytes
    yield slice(begin, len(tensors))


def _unpack(rows: torch.Tensor, outputs: Sequence[torch.Tensor]) -> None:
    """Copies the columns of ``rows`` into the outputs, in one kernel."""
    outputs = [out.detach() for out in outputs]
    targets = [_contiguous(out) for out in outputs]
    columns = [out.numel() // len(rows) for out in outputs]
    views = [target.view(len(rows), count) for target, count in zip(targets, columns, strict=True)]
    torch.split_with_sizes_copy(rows, columns, dim=1, out=views)
    for out, target in zip(outputs, targets, strict=True):
        if target is not out:
            out.copy_(target)
