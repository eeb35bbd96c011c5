"""Ranks that share one GPU: kernels of several ranks run on a machine with a single GPU, as under compute-sanitizer.

Every rank has its own memory, counters and stream, as if it had its own GPU. On one stream, kernels that wait for each
other would wait for ever. Grids that are too large to be resident together would do so, too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.numerics.norms import ALLREDUCE_NORM
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops import norms
from graphar.ops.allgather import work_of
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.policy import Chip
from graphar.plan.select import Facts, by_policy
from graphar.plan.slices import slices
from graphar.plan.tables import by_entries, measured_config, shipped_table
from graphar.plan.tiles import MatmulTile, SkinnyTile
from graphar.plan.work import ALLGATHER_MATMUL, MATMUL_ALLREDUCE, Norm, Parts, Product, Sum, TensorTuple, Work
from graphar.product.fused import fused_launches
from graphar.product.operands import operands_of
from graphar.ranks.rendezvous import Alone
from graphar.runtime.bind import collective
from graphar.runtime.launcher import chip
from graphar.runtime.member import Member
from graphar.runtime.memory.peer_memory import LocalMemory
from graphar.runtime.runner import Runner
from tests.gpu import operands as of_ranks

TABLE = shipped_table("default")
MOST_BLOCKS = 4
_TIMEOUT_S = 60.0  # kernels under a sanitizer take a hundred times as long


class RanksOfOneGpu:
    """Up to 8 ranks on cuda:0, without a communicator. Multimem kernels run their stand-in.

    ``before_launch`` is called with the rank before each launch of a collective.
    """

    def __init__(self, world_size: int) -> None:
        self.before_launch: Callable[[int], None] = lambda rank: None
        self.world_size = world_size
        members = [Member(rank, 0) for rank in range(world_size)]
        memory = LocalMemory([0] * world_size)
        self._chip = replace(chip(0), sms=MOST_BLOCKS + 1)  # the grids of fused matmuls leave an SM free
        self._runner = Runner(members, world_size, self._chip, memory, Alone(), multicast_memory=None)
        self._streams = [torch.cuda.Stream(0) for _ in members]
        self._engine = SimpleNamespace(
            runner=self._runner,
            table=TABLE,
            world_size=world_size,
            devices=[0] * world_size,
            deadline=lambda call: _TIMEOUT_S,
        )

    def allreduce(self, parts: Sequence[torch.Tensor], algorithm: Algorithm, direct: bool = False) -> list:
        """What every rank receives. ``direct``: outputs are symmetric, and kernels write those of all ranks."""
        config = measured_config(TABLE, self.world_size, parts[0].nbytes, algorithm)
        xs, outs = [part.cuda(0) for part in parts], [_unwritten(part) for part in parts]
        if direct:
            outs = [place.fill_(7) for place in self._runner.symmetric.empty(parts[0])]
        self._launch(Sum(parts[0].numel()), replace(config, direct=direct), xs, outs)
        return outs

    def allreduces(self, calls: Sequence[Sequence[torch.Tensor]], algorithm: Algorithm) -> list[list]:
        """What every rank receives in several calls of one size, made without a wait between them."""
        first = calls[0][0]
        config = measured_config(TABLE, self.world_size, first.nbytes, algorithm)
        xs = [[part.cuda(0) for part in parts] for parts in calls]
        outs = [[_unwritten(part) for part in parts] for parts in calls]
        self._launch_in_turn(Sum(first.numel()), config, [of_ranks(*pair) for pair in zip(xs, outs, strict=True)])
        return outs

    def tree_sum(self, parts: Sequence[torch.Tensor], algorithm: Algorithm, out_dtype: torch.dtype) -> list:
        """What every rank receives of fp32 that is added as a tree, or its part of a tensor with one dimension."""
        tree = {"order": "tree", "out_dtype": out_dtype}
        if algorithm.op == "allreduce":
            config = measured_config(TABLE, self.world_size, parts[0].nbytes, algorithm)
            work, outs = Sum(parts[0].numel(), **tree), [_unwritten(part, out_dtype) for part in parts]
        else:
            outs = [_unwritten(part, out_dtype) for part in parts[0].tensor_split(self.world_size)]
            config = _by_table(algorithm, 4 * len(outs[0]))
            work = Parts(algorithm.op, tuple(map(len, outs)), **tree)
        self._launch(work, config, [part.cuda(0) for part in parts], outs)
        return outs

    def quantized_allreduce(self, parts: Sequence[torch.Tensor], algorithm: Algorithm, codec: Codec) -> list:
        """What every rank receives with ``codec`` on the wire."""
        work = Sum(parts[0].numel(), codec.text)
        xs, outs = [part.cuda(0) for part in parts], [_unwritten(part) for part in parts]
        self._launch(work, self._by_policy(algorithm, work, parts[0].dtype), xs, outs)
        return outs

    def reducescatter(self, parts: Sequence[torch.Tensor], algorithm: Algorithm, codec: Codec | None = None) -> list:
        """What each rank receives of tensors with one dimension."""
        outs = [_unwritten(part) for part in parts[0].tensor_split(self.world_size)]
        work = Parts("reducescatter", tuple(map(len, outs)), codec.text if codec else "")
        config = self._by_policy(algorithm, work, parts[0].dtype) if codec else _by_table(algorithm, outs[0].nbytes)
        self._launch(work, config, [part.cuda(0) for part in parts], outs)
        return outs

    def norm(
        self,
        algorithm: Algorithm,
        parts: Sequence[torch.Tensor],
        residuals: Sequence[torch.Tensor],
        weight: torch.Tensor,
        numbers: tuple[float, float],
        output: str = "like_input",
        **tree,
    ) -> list[tuple[torch.Tensor, ...]]:
        """What each rank receives of matrices, in one of the formats of NORM_OUTPUTS that need no scale."""
        counts = (parts[0].numel(),) if algorithm.op == ALLREDUCE_NORM else tuple(one.numel() for one in residuals)
        work = Norm(algorithm.op, counts, len(weight), output, *numbers, **tree)
        most = max(MOST_BLOCKS, self.world_size)  # a two-shot has a team for each rank at least
        config = self._by_policy(algorithm, work, parts[0].dtype, replace(self._chip, sms=most + 1))
        results = [norms.empty(work.output, residual.cuda(0)) for residual in residuals]
        for made in results:
            for one in made:
                one.view(torch.uint8).fill_(7)
        given = [(x.cuda(0), residual.cuda(0), weight.cuda(0)) for x, residual in zip(parts, residuals, strict=True)]
        self._launch_in_turn(work, config, [[Operands(*pair) for pair in zip(given, results, strict=True)]], most)
        return results

    def allgather(self, parts: Sequence[torch.Tensor], algorithm: Algorithm) -> list:
        """What every rank receives of tensors with one dimension, of any lengths."""
        counts = tuple(map(len, parts))
        outs = [part.new_full((sum(counts),), 7, device="cuda:0") for part in parts]
        config = _by_table(algorithm, max(part.nbytes for part in parts))
        self._launch(Parts("allgather", counts), config, [part.cuda(0) for part in parts], outs)
        return outs

    def allgather_tuple(self, parts: Sequence[Sequence[torch.Tensor]], algorithm: Algorithm) -> list[list]:
        """What every rank receives of its tensors, which may begin at any byte and have any number of rows."""
        sizes = [len(of_rank[0]) for of_rank in parts]
        work = work_of(parts[0], sizes)
        xs = [tuple(_unaligned(one) for one in of_rank) for of_rank in parts]
        outs = [[_unwritten(one.new_empty(sum(sizes), *one.shape[1:])) for one in of_rank] for of_rank in parts]
        ranks = [Operands(x, tuple(out)) for x, out in zip(xs, outs, strict=True)]
        self._launch_in_turn(work, _by_table(algorithm, max(work.parts)), [ranks])
        return outs

    def fused_sum(
        self,
        operands: Sequence[tuple[torch.Tensor, ...]],
        algorithm: Algorithm,
        dtype: torch.dtype,
        *,
        factors: str = "",
        tile: MatmulTile | SkinnyTile | None = None,
        bias: torch.Tensor | None = None,
        epilogue: str = "",
        constant_weight: bool = False,
        replays: int = 0,
        before: Callable[[int], None] = lambda rank: None,
        beside: AbstractContextManager | None = None,
    ) -> list:
        """What every rank receives of the sum of the ranks' ``a @ w.t()`` by a fused kernel; all are on the GPU.

        Args:
            operands: each rank's a and w; of e4m3 also a_scale and w_scale.
            algorithm: which kernel.
            dtype: of the results.
            factors: what scales are of, "rows" or "blocks"; "leaves" if partials are added as a tree.
            tile: of the kernel; None: the chosen one.
            bias: the same on all ranks.
            epilogue: an expression without tensors.
            constant_weight: whether weights are called constant.
            replays: each rank's launch is captured, and replayed so often; 0: it is launched.
            before: is called for each rank, on its stream, just before the kernel is launched there.
            beside: is entered once everything is ready, and left once all kernels have ended.
        """
        rows, columns, more = len(operands[0][0]), len(operands[0][1]), () if bias is None else (bias,)
        counts = (rows,) + (0,) * (self.world_size - 1)
        if not algorithm.row.is_skinny:
            counts = tuple(len(part) for part in torch.empty(rows).tensor_split(self.world_size))
        received = [rows] * self.world_size if algorithm.op == MATMUL_ALLREDUCE else counts
        outs = [torch.full((own, columns), 7, dtype=dtype, device="cuda:0") for own in received]
        ranks = [Operands((*own, *more), (out,)) for own, out in zip(operands, outs, strict=True)]
        how = {"partition": TP_INVARIANT} if factors == "leaves" else {"format": factors}
        form = Pointwise(epilogue, (), columns) if epilogue else None
        work = Product(algorithm.op, counts, columns, bool(more), epilogue=form, constant_weight=constant_weight, **how)
        self._launch_matmul(work, algorithm, ranks, tile, beside, before, replays)
        return outs

    def allgather_matmul(
        self,
        parts: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] | None = None,
        tile: MatmulTile | None = None,
        epilogue: str = "",
        inputs: Sequence[EpilogueInputs] = (),
        scales: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        out_dtype: torch.dtype | None = None,
    ) -> tuple[list, ...]:
        """Every rank's product of all ranks' rows with its weight, and the rows that it gathered, and their scales.

        ``inputs`` are each rank's tensors, on the GPU, and numbers for the expression ``epilogue``. ``scales`` are each
        rank's, on the GPU, of operands in e4m3.
        """
        counts, k = tuple(map(len, parts)), parts[0].shape[1]
        outs = [_unwritten(w.new_empty(sum(counts), len(w)), out_dtype) for w in weights]
        wholes = [_unwritten(part.new_empty(sum(counts), k)) for part in parts]
        form = (
            Pointwise(epilogue, tuple(x.dtype for x in inputs[0].tensors), len(weights[0]) or 1) if epilogue else None
        )
        more = [(bias.cuda(0),) for bias in biases] if biases else [tuple(own.tensors) for own in inputs]
        more, numbers = more or [()] * len(parts), [tuple(own.scalars) for own in inputs] or [()] * len(parts)
        more = [(*own, *rest) for own, rest in zip(scales, more, strict=True)] if scales else more
        of_rows = [(_unwritten(own.new_empty(sum(counts), own.shape[1])),) for own, _ in scales] or [()] * len(parts)
        ranks = [
            Operands((part.cuda(0), w.cuda(0), *rest), (out, whole, *of), own)
            for part, w, rest, out, whole, of, own in zip(
                parts, weights, more, outs, wholes, of_rows, numbers, strict=True
            )
        ]
        of = "" if not scales else "rows" if scales[0][0].shape[1] == 1 else "blocks"
        work = Product(ALLGATHER_MATMUL, counts, k, bool(biases), epilogue=form, gathered=True, format=of)
        self._launch_matmul(work, Algorithm.ALLGATHER_MATMUL, ranks, tile)
        return (outs, wholes, [of for (of,) in of_rows]) if scales else (outs, wholes)

    def _launch_matmul(
        self,
        work: Product,
        algorithm: Algorithm,
        ranks: Sequence[Operands],
        tile: MatmulTile | SkinnyTile | None,
        beside: AbstractContextManager | None = None,
        before: Callable[[int], None] = lambda rank: None,
        replays: int = 0,
    ) -> None:
        """Makes a call, and waits for it; results that kernels cannot write in place are copied there."""
        call = Call.of(work, ranks[0].outputs[0], timeout_s=_TIMEOUT_S)  # its dtype is that of the result
        made = fused_launches(self._engine, call, algorithm, tile)
        given = [operands_of(work, own) for own in ranks]
        placed = [made._place(own) for own in given]
        launches = [
            (stream, made._launch(member, own, one), made._tensors(member, own, one))
            for one in made._slices
            for member, own, stream in zip(self._runner.members, placed, self._streams, strict=True)
        ]
        torch.cuda.synchronize(0)  # operands were made on torch's stream
        if replays:
            launches = [(stream, _captured(stream, *one).replay, ()) for stream, *one in launches] * replays
        with beside or nullcontext():
            for at, (stream, launch, tensors) in enumerate(launches):
                with torch.cuda.stream(stream):
                    before(at % self.world_size)
                    launch(*tensors)
            for stream in self._streams:
                stream.synchronize()
        self._runner.synchronize()
        for own, there in zip(given, placed, strict=True):
            for result, written in ((own.out, there.out), (own.gathered, there.gathered)):
                if written is not result:
                    result.copy_(written[:, : result.shape[1]])

    def _by_policy(self, algorithm: Algorithm, work: Work, dtype: torch.dtype, chip: Chip = TABLE.chip) -> Config:
        return by_policy(algorithm, Call(work, dtype, 0), Facts(self.world_size, TABLE, chip))

    def _launch(self, work: Work, config: Config, xs, outs) -> None:
        self._launch_in_turn(work, config, [of_ranks(xs, outs)])

    def _launch_in_turn(
        self, work: Work, config: Config, calls: Sequence[Sequence[Operands]], most: int = MOST_BLOCKS
    ) -> None:
        """Makes calls with the operands of each rank, in at most so many blocks each, and waits for them."""
        config = replace(config, blocks=min(config.blocks, most))
        dtype = BYTE if isinstance(work, TensorTuple) else calls[0][0].inputs[0].dtype
        call, columns = Call(work, dtype, 0), work.columns if isinstance(work, Norm) else 1
        (only,) = slices(config.algorithm, self.world_size, work.parts, dtype.itemsize, columns)
        launches = collective.bind_slice(self._runner, call, config, only, _TIMEOUT_S)
        torch.cuda.synchronize(0)  # inputs were made on torch's stream
        for ranks in calls:
            for rank, (launch, stream, own) in enumerate(zip(launches, self._streams, ranks, strict=True)):
                self.before_launch(rank)
                with torch.cuda.stream(stream):
                    launch(*own)
        self._runner.synchronize()

    def close(self) -> None:
        self._runner.close()


def _captured(stream: torch.cuda.Stream, launch: Callable, tensors: Sequence) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch(*tensors)
    return graph


def _unwritten(like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Memory for a result, filled so that it holds no earlier result."""
    out = torch.empty_like(like, device="cuda:0", dtype=dtype)
    out.view(torch.uint8).fill_(7)
    return out


def _unaligned(like: torch.Tensor) -> torch.Tensor:
    """A copy on the GPU, one element off an aligned address."""
    room = like.new_empty(like.numel() + 1, device="cuda:0")
    return room[1:].view(like.shape).copy_(like)


def _by_table(algorithm: Algorithm, nbytes: int) -> Config:
    return by_entries(TABLE.parts[algorithm.op], 1, nbytes, algorithm)
