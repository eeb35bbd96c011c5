"""Ranks that share one GPU: kernels of several ranks run on a machine with a single GPU, as under compute-sanitizer.

Every rank has its own memory, counters and stream, as if it had its own GPU. On one stream, kernels that wait for each
other would wait for ever. Grids that are too large to be resident together would do so, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace

import torch

from graphar.matmul import allgather_matmul
from graphar.matmul.allgather_matmul import AllgatherMatmuls
from graphar.matmul.fused import FusedMatmuls, _place
from graphar.matmul.operands import Gathering, Operands
from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.numerics.norms import REDUCESCATTER_NORM, RmsNorm
from graphar.ops import norms
from graphar.ops.allgather_tuple import form_of
from graphar.plan.algorithms import Algorithm, Shape
from graphar.plan.call import Call
from graphar.plan.select import kernel_of, measured_shape
from graphar.plan.shapes import for_norm, for_parts, for_quantized, for_quantized_parts, shape_of
from graphar.plan.slices import row_slices, rows_a_launch, slices
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import MatmulTile
from graphar.ranks.rendezvous import Alone
from graphar.runtime.launcher import chip
from graphar.runtime.peer_memory import LocalMemory
from graphar.runtime.runner import Member, Runner

TABLE = shipped_table("default")
MOST_BLOCKS = 4
_TIMEOUT_S = 60.0  # kernels under a sanitizer take a hundred times as long


class RanksOfOneGpu:
    """Up to 8 ranks on cuda:0, without a communicator. Multimem kernels run their stand-in."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        members = [Member(rank, 0) for rank in range(world_size)]
        memory = LocalMemory([0] * world_size)
        small = replace(chip(0), sms=MOST_BLOCKS + 1)  # the grids of fused matmuls leave an SM free
        self._runner = Runner(members, world_size, small, memory, Alone(), multicast_memory=None)
        self._streams = [torch.cuda.Stream(0) for _ in members]

    def allreduce(self, parts: Sequence[torch.Tensor], algorithm: Algorithm, direct: bool = False) -> list:
        """What every rank receives. ``direct``: the input or output that kernels access on all ranks is symmetric."""
        shape, _ = measured_shape(TABLE, self.world_size, parts[0].nbytes, algorithm)
        xs, outs = [part.cuda(0) for part in parts], [_unwritten(part) for part in parts]
        if direct:
            symmetric = self._runner.symmetric.empty(parts[0])
            if algorithm.row.direct == "input":
                xs = [place.copy_(x) for place, x in zip(symmetric, xs, strict=True)]
            else:
                outs = [place.fill_(7) for place in symmetric]
        self._launch(replace(shape, direct=direct), xs, outs, [parts[0].numel()], parts[0].dtype)
        return outs

    def allreduces(self, calls: Sequence[Sequence[torch.Tensor]], algorithm: Algorithm) -> list[list]:
        """What every rank receives in several calls of one size, made without a wait between them."""
        first = calls[0][0]
        shape, _ = measured_shape(TABLE, self.world_size, first.nbytes, algorithm)
        xs = [[part.cuda(0) for part in parts] for parts in calls]
        outs = [[_unwritten(part) for part in parts] for parts in calls]
        self._launch_in_turn(shape, list(zip(xs, outs, strict=True)), [first.numel()], first.dtype)
        return outs

    def quantized_allreduce(self, parts: Sequence[torch.Tensor], algorithm: Algorithm, codec: Codec) -> list:
        """What every rank receives with ``codec`` on the wire."""
        numel, dtype = parts[0].numel(), parts[0].dtype
        sms = TABLE.chip.sms
        shape = for_quantized(TABLE.quantized, sms, codec, self.world_size, numel, dtype.itemsize, algorithm)
        xs, outs = [part.cuda(0) for part in parts], [_unwritten(part) for part in parts]
        self._launch(shape, xs, outs, [numel], dtype)
        return outs

    def reducescatter(self, parts: Sequence[torch.Tensor], algorithm: Algorithm, codec: Codec | None = None) -> list:
        """What each rank receives of tensors with one dimension."""
        outs = [_unwritten(part) for part in parts[0].tensor_split(self.world_size)]
        if codec:
            shape = for_quantized_parts(TABLE.chip.sms, codec, self.world_size, len(outs[0]))
        else:
            shape = _shape_for_parts(algorithm, outs[0].nbytes)
        xs = [part.cuda(0) for part in parts]
        self._launch(shape, xs, outs, [len(out) for out in outs], parts[0].dtype)
        return outs

    def reducescatter_norm(
        self,
        parts: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        weight: torch.Tensor,
        numbers: tuple[float, float],
        output: str,
    ) -> list[tuple[torch.Tensor, ...]]:
        """What each rank receives of matrices, in one of the formats of NORM_OUTPUTS that need no scale."""
        counts = tuple(one.numel() for one in residuals)
        call = Call.of(REDUCESCATTER_NORM, parts[0], counts, epilogue=RmsNorm(len(weight), output=output))
        shape = for_norm(TABLE.norm, replace(chip(0), sms=MOST_BLOCKS + 1), self.world_size, call)
        given = [(residual.cuda(0), weight.cuda(0)) for residual in residuals]
        results = [norms.empty(output, residual) for residual, _ in given]
        for made in results:
            for one in made:
                one.view(torch.uint8).fill_(7)
        inputs = [norms.inputs(*pair, numbers) for pair in zip(given, results, strict=True)]
        lists = [part.cuda(0) for part in parts], [normed for normed, *_ in results], inputs
        self._launch_in_turn(shape, [lists], counts, parts[0].dtype)
        return results

    def allgather(self, parts: Sequence[torch.Tensor], algorithm: Algorithm) -> list:
        """What every rank receives of tensors with one dimension, of any lengths."""
        counts = [len(part) for part in parts]
        xs = [part.cuda(0) for part in parts]
        outs = [part.new_full((sum(counts),), 7, device="cuda:0") for part in parts]
        shape = _shape_for_parts(algorithm, max(part.nbytes for part in parts))
        self._launch(shape, xs, outs, counts, parts[0].dtype)
        return outs

    def allgather_tuple(self, parts: Sequence[Sequence[torch.Tensor]], algorithm: Algorithm) -> list[list]:
        """What every rank receives of its tensors, which may begin at any byte and have any number of rows."""
        sizes = [len(of_rank[0]) for of_rank in parts]
        form = form_of(parts[0], sizes)
        xs = [[_unaligned(one) for one in of_rank] for of_rank in parts]
        outs = [[_unwritten(one.new_empty(sum(sizes), *one.shape[1:])) for one in of_rank] for of_rank in parts]
        shape = replace(_shape_for_parts(algorithm, max(form.part_nbytes)), epilogue=form)
        firsts = [[of_rank[0] for of_rank in tensors] for tensors in (xs, outs)]
        self._launch_in_turn(shape, [(*firsts, list(zip(xs, outs, strict=True)))], form.part_nbytes, BYTE)
        return outs

    def matmul_allreduce(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], tile: MatmulTile, beside: AbstractContextManager
    ) -> list:
        """What every rank receives of the sum of each rank's ``a @ w.t()``, by the fused kernel with ``tile``.

        Everything is ready when ``beside`` is entered, and all kernels have ended when it is left.
        """
        rows, columns = len(pairs[0][0]), len(pairs[0][1])
        counts = tuple(len(part) for part in torch.empty(rows).tensor_split(self.world_size))
        outs = [torch.full((rows, columns), 7, dtype=a.dtype, device="cuda:0") for a, _ in pairs]
        placed = [_place(Operands(a.cuda(0), w.cuda(0), None, out)) for (a, w), out in zip(pairs, outs, strict=True)]
        kernels = FusedMatmuls(SimpleNamespace(runner=self._runner, timeout_s=_TIMEOUT_S))
        call = Call.of(Algorithm.MATMUL_ALLREDUCE.op, placed[0].a, counts, timeout_s=_TIMEOUT_S)
        functions = kernels._prepare(call, Algorithm.MATMUL_ALLREDUCE, (tile,))
        launches = [
            (stream, kernels._launch(call, Algorithm.MATMUL_ALLREDUCE, member, mine, loaded, tile, one, None), mine)
            for one in row_slices(counts, rows_a_launch(self.world_size, columns))
            for member, mine, loaded, stream in zip(self._runner.members, placed, functions, self._streams, strict=True)
        ]
        torch.cuda.synchronize(0)  # operands were made on torch's stream
        with beside:
            for stream, launch, mine in launches:
                with torch.cuda.stream(stream):
                    launch(mine.a, mine.out)
            for stream in self._streams:
                stream.synchronize()
        self._runner.synchronize()
        return outs

    def allgather_matmul(
        self,
        parts: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] | None = None,
        tile: MatmulTile | None = None,
        epilogue: str = "",
        inputs: Sequence[EpilogueInputs] = (),
    ) -> tuple[list, list]:
        """Every rank's product of all ranks' rows with its weight, and the rows that it gathered.

        ``inputs`` are each rank's tensors, on the GPU, and numbers for the expression ``epilogue``.
        """
        rows, k = sum(map(len, parts)), parts[0].shape[1]
        outs = [torch.full((rows, len(w)), 7, dtype=w.dtype, device="cuda:0") for w in weights]
        wholes = [torch.full((rows, k), 7, dtype=part.dtype, device="cuda:0") for part in parts]
        biases = [bias.cuda(0) for bias in biases] if biases else [None] * len(parts)
        given = zip(parts, weights, biases, outs, wholes, strict=True)
        made = [Gathering(part.cuda(0), w.cuda(0), *rest) for part, w, *rest in given]
        if epilogue:
            forms = [
                Pointwise(epilogue, tuple(x.dtype for x in own.tensors), max(1, len(w)))
                for own, w in zip(inputs, weights, strict=True)
            ]
            made = [replace(one, form=form, inputs=own) for one, form, own in zip(made, forms, inputs, strict=True)]
        members = [allgather_matmul._place(one) for one in made]
        engine = SimpleNamespace(runner=self._runner, timeout_s=_TIMEOUT_S, table=TABLE, world_size=self.world_size)
        how = {"timeout_s": _TIMEOUT_S, "epilogue": members[0].form}
        call = Call.of(allgather_matmul.ALGORITHM.op, parts[0], tuple(map(len, parts)), **how)
        launches = AllgatherMatmuls(engine).launches(call, members, tile)
        torch.cuda.synchronize(0)  # operands were made on torch's stream
        for member, launch in launches:
            with torch.cuda.stream(self._streams[member.rank]):
                launch()
        self._runner.synchronize()
        return [one.out[:, : len(w)] for one, w in zip(members, weights, strict=True)], [
            one.gathered for one in members
        ]

    def _launch(self, shape: Shape, xs, outs, counts: Sequence[int], dtype: torch.dtype) -> None:
        self._launch_in_turn(shape, [(xs, outs)], counts, dtype)

    def _launch_in_turn(self, shape: Shape, calls, counts: Sequence[int], dtype: torch.dtype) -> None:
        """Makes calls, each with lists of the ranks' inputs, outputs and epilogue inputs if any, and waits for them."""
        shape = replace(shape, blocks=min(shape.blocks, MOST_BLOCKS))
        self._runner.prepare(kernel_of(shape, dtype))
        columns = shape.epilogue.columns if shape.epilogue else 1
        (only,) = slices(shape.algorithm, self.world_size, counts, dtype.itemsize, columns)
        launches = self._runner.bind_members(shape, only, dtype, _TIMEOUT_S)
        torch.cuda.synchronize(0)  # inputs were made on torch's stream
        for lists in calls:
            for launch, stream, *ones in zip(launches, self._streams, *lists, strict=True):
                with torch.cuda.stream(stream):
                    launch(*ones)
        self._runner.synchronize()

    def close(self) -> None:
        self._runner.close()


def _unwritten(like: torch.Tensor) -> torch.Tensor:
    """Memory for a result, filled so that it holds no earlier result."""
    out = torch.empty_like(like, device="cuda:0")
    out.view(torch.uint8).fill_(7)
    return out


def _unaligned(like: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU, one element off an aligned address."""
    room = like.new_empty(like.numel() + 1, device="cuda:0")
    return room[1:].view(like.shape).copy_(like)


def _shape_for_parts(algorithm: Algorithm, nbytes: int) -> Shape:
    if algorithm.row.compresses:
        return for_parts(TABLE.parts[algorithm.op], nbytes, algorithm)
    row = next(row for row in TABLE.parts[algorithm.op] if row["algorithm"] == algorithm)
    return shape_of(row, 1, nbytes)
