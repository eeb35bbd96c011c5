"""The structs that kernels read and write. They mirror cuda_src/device/arguments.cuh byte for byte."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from itertools import accumulate

import torch

from graphar.numerics.epilogues.code import Corner
from graphar.numerics.epilogues.syntax import MAX_ARGUMENTS
from graphar.plan.call import Call
from graphar.plan.scratch import MAX_BLOCKS, MAX_RANKS, PACK_NBYTES
from graphar.plan.slices import Slice
from graphar.plan.work import MAX_TENSORS, Exchange, Norm, TensorTuple

Tensors = tuple[torch.Tensor, ...]
Put = Callable[..., None]  # takes the parts of a rank's operands, and writes all but two addresses into the arguments

KEPT_CALLS = 16  # a rank keeps what it called in so many last calls
_U32, _U64, _F32 = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_float


def _of(kind: type, *names: str) -> list[tuple[str, type]]:
    return [(name, kind) for name in names]


class Record(ctypes.Structure):
    _fields_ = _of(_U32, "kind", "algorithm", "sequence", "rank", "peer", "block", "expected", "seen")


class EpochState(ctypes.Structure):
    _fields_ = _of(_U32, "epoch", "aborted")


class Counters(ctypes.Structure):
    _fields_ = [
        ("epoch_state", EpochState * MAX_BLOCKS),
        ("steps", _U32 * MAX_BLOCKS),
        ("busy", _U32 * MAX_BLOCKS),
        ("called", (_U64 * KEPT_CALLS) * MAX_RANKS),
    ]


class EpilogueArguments(ctypes.Structure):
    _fields_ = [
        ("tensor", _U64 * MAX_ARGUMENTS),
        ("scalar", _F32 * MAX_ARGUMENTS),
        *_of(_U64, "columns", "skipped", "first_row", "first_col", "pitch"),
    ]
    _corner: object = ()  # of the last call; an empty tuple before the first

    def put(self, inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], corner: Corner | None) -> None:
        """Writes what one rank's operands have for the epilogue. ``columns`` must be set already."""
        if len(inputs) > 1:
            addresses = self.tensor  # each look-up of a field makes an object
            for at, tensor in enumerate(inputs[1:]):
                addresses[at] = tensor.data_ptr()
        if numbers:
            scalars = self.scalar
            for at, number in enumerate(numbers):
                scalars[at] = number
        if corner != self._corner:
            self.first_row, self.first_col, self.pitch = corner or (0, 0, self.columns)
            self._corner = corner


class Arguments(ctypes.Structure):
    _fields_ = [
        *_of(_U64, "input", "output", "numel", "counters"),
        *_of(_U32, "capacity", "rank", "fingerprint", "algorithm"),
        *_of(_U64 * MAX_RANKS, "ring", "peer_counters"),
        *_of(_U64, "timeout_ns", "seed"),
        *_of(_U32, "chunk", "world_size"),
        ("scratch", _U64 * MAX_RANKS),
        ("multicast", _U64),
        *_of(_U64 * MAX_RANKS, "peer_input", "peer_output", "begin", "count"),
        *_of(_U64, "abort", "record", "errors"),
        ("epilogue", EpilogueArguments),
    ]

    def bind(self, call: Call, part: Slice, fingerprint: Callable[[str], int]) -> Put | None:
        """Writes what launches of a slice of a call have in common, and returns what writes the tensors of one.

        ``fingerprint`` returns the fingerprint of words on which ranks must agree.
        """
        if call.feeds_back:
            return self.put_errors
        if not call.work.epilogue:
            return None
        self.epilogue.columns, self.epilogue.skipped = call.work.epilogue.columns, part.offset
        return self.epilogue.put

    def put_errors(self, inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], corner: Corner | None) -> None:
        """Writes the address of the rounding errors, the second input of a call with error feedback."""
        self.errors = inputs[1].data_ptr()


class TupleArguments(Arguments):
    _fields_ = [
        *_of(_U64 * MAX_TENSORS, "inputs", "outputs", "row_nbytes"),
        *_of(_U64 * MAX_RANKS, "first_row", "rows"),
    ]

    def bind(self, call: Call[TensorTuple], part: Slice, fingerprint: Callable[[str], int]) -> Put:
        work = call.work
        self._addresses = self.inputs, self.outputs  # each look-up of a field makes an object
        self.row_nbytes[: len(work.row_nbytes)] = work.row_nbytes
        for rank, (first, rows) in enumerate(zip(accumulate(work.sizes, initial=0), work.sizes, strict=False)):
            self.first_row[rank], self.rows[rank] = first, rows
        return self.put

    def put(self, inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], corner: Corner | None) -> None:
        ins, outs = self._addresses
        for at, x in enumerate(inputs):  # zip(strict=True) takes longer than what is inside
            ins[at], outs[at] = x.data_ptr(), outputs[at].data_ptr()


class Runs(ctypes.Structure):
    _fields_ = [*_of(_U64, "begin", "nbytes", "run", "gap"), *_of(_U32, "whole", "run_packs")]


class ExchangeArguments(Arguments):
    _fields_ = [
        *_of(Runs * MAX_RANKS, "sends", "receives"),
        ("most", _U64),
        *_of(_U32 * MAX_RANKS, "sent_words", "received_words"),
    ]

    def bind(self, call: Call[Exchange], part: Slice, fingerprint: Callable[[str], int]) -> None:
        """Also writes a fingerprint of the part between each pair of ranks, if both must compare it."""
        work, me = call.work, self.rank
        self.describe(work, me - work.rank, call.dtype.itemsize)
        lengths = zip(work.sends[me - work.rank], work.receives[me - work.rank], strict=True)
        for peer, (sent, received) in enumerate(() if work.known else lengths):
            self.sent_words[peer] = fingerprint(f"{sent} from rank {me} to rank {peer}")
            self.received_words[peer] = fingerprint(f"{received} from rank {peer} to rank {me}")

    def describe(self, work: Exchange, at: int, itemsize: int) -> None:
        """Writes everything but the addresses and words, for rank ``at`` of this process."""
        sides = (self.sends, work.sends, work.scatter_dim), (self.receives, work.receives, work.gather_dim)
        for (parts, lengths, dim), shape in zip(sides, work.shapes(at), strict=True):
            runs, of_one = math.prod(shape[:dim]), math.prod(shape[dim + 1 :]) * itemsize
            for rank, (first, length) in enumerate(zip(accumulate(lengths[at], initial=0), lengths[at], strict=False)):
                begin, run = first * of_one, length * of_one
                nbytes = run * runs
                gap = shape[dim] * of_one - run if run < nbytes else 0
                whole = 0 if (begin | (gap and run) | gap) % PACK_NBYTES else nbytes // PACK_NBYTES
                parts[rank] = Runs(begin, nbytes, run, gap, whole, run // PACK_NBYTES)
        self.most = max(work.parts) * itemsize if work.known else 0


class NormArguments(Arguments):
    _fields_ = [
        *_of(_U64, "residual", "weight", "summed", "scale", "scales", "columns", "skipped"),
        *_of(_F32, "eps", "weight_offset"),
    ]

    def bind(self, call: Call[Norm], part: Slice, fingerprint: Callable[[str], int]) -> Put:
        self.columns, self.skipped = call.work.columns, part.offset
        self.eps, self.weight_offset = call.work.eps, call.work.weight_offset
        return self.put

    def put(self, inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], corner: Corner | None) -> None:
        """Writes the addresses of one rank's tensors: (x, residual, weight[, scale]) and (normed, summed[, scales]).

        The launch writes the addresses of x and normed, ``input`` and ``output``.
        """
        self.residual, self.weight, self.summed = inputs[1].data_ptr(), inputs[2].data_ptr(), outputs[1].data_ptr()
        self.scale = inputs[3].data_ptr() if len(inputs) > 3 else 0
        self.scales = outputs[2].data_ptr() if len(outputs) > 2 else 0


class NormGradientArguments(ctypes.Structure):
    _fields_ = [
        *_of(_U64, "of_normed", "of_summed", "summed", "weight", "of_rows", "groups", "of_weight"),
        *_of(_U64, "rows", "columns"),
        *_of(_U32, "row_groups", "with_weight"),
        *_of(_F32, "eps", "weight_offset"),
    ]


class LossArguments(ctypes.Structure):
    _fields_ = [
        *_of(_U64, "logits", "target", "partials", "gathered", "results", "state", "entropy", "top1", "total"),
        *_of(_U64, "upstream", "gradient"),
        ("ignore_index", ctypes.c_int64),
        *_of(ctypes.c_double, "label_smoothing", "lse_square_scale"),
        *_of(_F32, "inverse_temperature", "all_share", "target_share"),
        *_of(_U32, "rows", "columns", "first", "vocab_size", "real_columns", "leaf_columns"),
        *_of(_U32, "leaves_log2", "ranks", "cluster_log2", "slices", "width", "may_ignore"),
        *_of(_U32, "is_loss", "is_mean", "is_per_row", "with_entropy", "with_top1"),
    ]


class MatmulArguments(ctypes.Structure):
    _fields_ = [
        ("bias", _U64),
        *_of(_U32, "m", "n", "k", "group_rows"),
        ("unused", _U64),
        *_of(_U32, "constant_weight", "c_leading"),
        ("c", _U64),
        *_of(_U32, "first_tile", "end_tile"),
    ]


class ScaledMatmulArguments(MatmulArguments):
    _fields_ = [
        *_of(_U64, "a_scale", "w_scale", "a_scale_row", "a_scale_block", "w_scale_row", "w_scale_block"),
        ("gathered_scales", _U64),
    ]


def layout_check() -> str:
    """Returns C++ that compiles only if the structs above match the sources byte for byte."""
    lines = []
    parts = Record, EpochState, Counters, EpilogueArguments, Runs
    of_collectives = Arguments, TupleArguments, ExchangeArguments, NormArguments
    of_one_rank = NormGradientArguments, LossArguments, MatmulArguments, ScaledMatmulArguments
    for struct in (*parts, *of_collectives, *of_one_rank):
        name = struct.__name__
        lines += [f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});"]
        for field, *_ in struct._fields_:
            mine = getattr(struct, field)
            lines += [
                f"static_assert(sizeof({name}::{field}) == {mine.size});",
                f"static_assert(__INTADDR__(&(({name}*)0)->{field}) == {mine.offset});",  # NVRTC 13.0 lacks offsetof
            ]
    return "\n".join(lines)
