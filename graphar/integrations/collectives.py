"""The calls of torch.distributed that graphar serves: lists of tensors, averages, and tensors of any layout.

Tensors are as torch passes them. Small tensors of a call are copied into one, which takes one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from graphar.communicator import Communicator
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.ops import sums
from graphar.plan.call import Call, Operands
from graphar.plan.work import Exchange, Parts

_PACK_NBYTES = 1 << 20  # to copy more takes longer than the launches that it saves

Tensors = list[torch.Tensor]
OfPair = Callable[[torch.Tensor, torch.Tensor], None]  # of an output and its input


class Calls(NamedTuple):
    communicator: Communicator
    timeout_s: float | None = None  # the deadline of waits
    average: bool = False  # whether a sum is divided by the number of ranks

    @property
    def ranks(self) -> int:
        return self.communicator.world_size

    def allreduce(self, tensors: Tensors) -> None:
        self._in_packs(self._allreduce_one, tensors, tensors)

    def _allreduce_one(self, _: torch.Tensor, x: torch.Tensor) -> None:
        x = x.detach() if x.requires_grad else x
        # An average divides the fp32 sum before it is rounded.
        epilogue = f"v / {self.ranks}" if self.average else None
        sums.allreduce(x, self.communicator, out=x, epilogue=epilogue, timeout_s=self.timeout_s)

    def reducescatter(self, outputs: Tensors, inputs: Tensors) -> None:
        self._check_lengths("reduce_scatter", "input", inputs, "output", outputs)
        self._in_packs(self._reducescatter_one, outputs, inputs, (1, self.ranks))

    def reducescatter_lists(self, outputs: Tensors, inputs: list[Tensors]) -> None:
        for out, parts in zip(outputs, inputs, strict=True):
            counts = self._counts("reduce_scatter", parts, out)
            self._reducescatter_one(out, _joined(parts), counts)

    def _reducescatter_one(self, out: torch.Tensor, x: torch.Tensor, counts: tuple[int, ...] = ()) -> None:
        counts = counts or (out.numel(),) * self.ranks
        division = Pointwise(f"v / {self.ranks}", (), max(1, *counts)) if self.average else None
        self._run(Parts("reducescatter", counts, epilogue=division), out, x)

    def allgather(self, outputs: Tensors, inputs: Tensors) -> None:
        self._check_lengths("all_gather", "output", outputs, "input", inputs)
        self._in_packs(self._allgather_one, outputs, inputs, (self.ranks, 1))

    def allgather_lists(self, outputs: list[Tensors], inputs: Tensors) -> None:
        for parts, x in zip(outputs, inputs, strict=True):
            counts = self._counts("all_gather", parts, x)
            gathered = x.new_empty(sum(counts))
            self._run(Parts("allgather", counts), gathered, x)
            _unpack(gathered[None], parts)

    def _allgather_one(self, out: torch.Tensor, x: torch.Tensor) -> None:
        place = out.data_ptr() + (self.communicator.rank or 0) * x.nbytes
        self._run(Parts("allgather", (x.numel(),) * self.ranks), out, x, place)

    def alltoall(self, out: torch.Tensor, x: torch.Tensor, receives: Sequence[int], sends: Sequence[int]) -> None:
        columns = x.shape[1:].numel()
        counts = [
            tuple([rows * columns for rows in sizes or [whole.shape[0] // self.ranks] * self.ranks])
            for whole, sizes in ((x, sends), (out, receives))
        ]
        # Only if all ranks have equal parts does each of them know all sizes.
        self._exchange(out, x, *counts, known=not receives and not sends)

    def alltoall_lists(self, outputs: Tensors, inputs: Tensors) -> None:
        x, (sends, receives) = _joined(inputs), (tuple([x.numel() for x in xs]) for xs in (inputs, outputs))
        received = x.new_empty(sum(receives))
        self._exchange(received, x, sends, receives, known=False)
        _unpack(received[None], outputs)

    def _exchange(self, out: torch.Tensor, x: torch.Tensor, sends: tuple, receives: tuple, known: bool) -> None:
        self._run(Exchange(self.communicator.rank or 0, (1,), (sends,), (receives,), known=known), out, x)

    def _run(self, work: Parts | Exchange, out: torch.Tensor, x: torch.Tensor, place: int | None = None) -> None:
        """Runs work with tensors flattened, contiguous and without shared memory. ``out`` has the result.

        ``x`` may be at the address ``place``, where kernels write this rank's part after they have read it.
        """
        out, x = out.detach(), x.detach().contiguous()
        target = _contiguous(out)
        begin, end = x.data_ptr(), target.data_ptr()
        if begin != place and begin < end + target.nbytes and end < begin + x.nbytes:
            x = x.clone()
        call = Call.of(work, x, timeout_s=self.timeout_s)
        self.communicator.engine.run(call, [Operands((x.view(-1),), (target.view(-1),))])
        if target is not out:
            out.copy_(target)

    def _in_packs(self, call: OfPair, outputs: Tensors, inputs: Tensors, rows: tuple[int, int] = (1, 1)) -> None:
        """Makes ``call(out, x)`` for each output and its input; small ones become the columns of one matrix.

        ``rows`` of the matrices of outputs and of inputs: one for each rank if ranks divide a tensor, or else 1.
        ``outputs`` are ``inputs`` if a call is in place.
        """
        if len(outputs) == 1:
            call(outputs[0], inputs[0])
            return
        rows_of_output, rows_of_input = rows
        for pack in _packs(inputs if rows_of_input > 1 else outputs):
            outs, xs = outputs[pack], inputs[pack]
            if len(xs) == 1:
                call(outs[0], xs[0])
                continue
            x = torch.cat([x.detach().reshape(rows_of_input, -1) for x in xs], dim=1)
            out = x if outputs is inputs else x.new_empty(rows_of_output, x.numel() // rows_of_input)
            call(out, x)
            _unpack(out, outs)

    def _check_lengths(self, op: str, whole_name: str, wholes: Tensors, part_name: str, parts: Tensors) -> None:
        for whole, part in zip(wholes, parts, strict=True):
            if whole.numel() != part.numel() * self.ranks:
                raise ValueError(
                    f"{op}: the {whole_name} must have {self.ranks} times the {part_name}'s {part.numel()} elements, "
                    f"got {whole.numel()}"
                )

    def _counts(self, op: str, parts: Tensors, of_rank: torch.Tensor) -> tuple[int, ...]:
        rank, numel, counts = self.communicator.rank or 0, of_rank.numel(), tuple([part.numel() for part in parts])
        if len(counts) != self.ranks or counts[rank] != numel:
            raise ValueError(
                f"{op}: needs a tensor for each of {self.ranks} ranks, and of {numel} elements for rank {rank}, "
                f"got {list(counts)}"
            )
        return counts


def why_no_splits(
    out: torch.Tensor, x: torch.Tensor, receives: Sequence[int], sends: Sequence[int], ranks: int
) -> str | None:
    """Returns why the sizes of an all-to-all's parts do not fit its tensors. torch's own group raises the error."""
    if not out.ndim or not x.ndim:
        return "a tensor without dimensions has no parts"
    fit = all(
        len(sizes) == ranks and min(sizes) >= 0 and sum(sizes) == len(rows) if sizes else len(rows) % ranks == 0
        for rows, sizes in ((out, receives), (x, sends))
    )
    return None if fit and out.shape[1:].numel() == x.shape[1:].numel() else "the sizes of parts do not fit the tensors"


def _contiguous(out: torch.Tensor) -> torch.Tensor:
    return out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)


def _joined(tensors: Tensors) -> torch.Tensor:
    return torch.cat([x.detach().reshape(-1) for x in tensors])


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
