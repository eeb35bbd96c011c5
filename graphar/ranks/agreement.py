"""What ranks must agree on, in words: the only place that puts a call into words.

The fingerprints that kernels compare, process groups, time-outs and logs take their words from here, so
that they cannot disagree about what a call is. A deadline and a codec's seed may differ between ranks.
"""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import Sequence

import torch

from graphar.numerics.codecs import codec as codec_of_text
from graphar.plan.algorithms import Algorithm, is_from_outside
from graphar.plan.call import Call
from graphar.plan.config import Config, Kernel
from graphar.plan.slices import Slice
from graphar.plan.work import Product
from graphar.ranks.rendezvous import StoreRendezvous

_POLL_S = 0.01
_KEPT_CALLS = 1024  # the calls that other ranks can look up in words; later ones take the place of the first


def words(call: Call) -> str:
    """Returns a call in words: op, size and options, such as "allreduce of 8 elements of torch.bfloat16"."""
    # An algorithm from outside the package may compute something else.
    outside = [f"algorithm {call.algorithm}"] if is_from_outside(call.algorithm) else []
    return ", ".join([f"{call.op} of {call.work.amount(call.dtype)}", *outside, *call.work.options])


def words_of_launch(call: Call, config: Config, part: Slice) -> str:
    """Returns in words what one launch of a call must have alike on all ranks."""
    grid = f" in {config.blocks} blocks of {config.threads} threads"
    columns = call.work.epilogue.columns if call.work.epilogue else 1
    wide = f", {columns} columns" if columns > 1 else ""
    direct = ", in symmetric memory" if config.direct else ""
    offset = f", from {call.work.unit[:-1]} {part.offset} of each part on" if part.offset else ""
    return f"{words(call)} by {config.algorithm.value}{grid}{wide}{direct}{offset}"


def words_of_kernel(kernel: Kernel) -> str:
    """Returns a kernel in words, which are equal on all ranks that load it."""
    more = [", direct"] if kernel.direct else []
    more += [f", {kernel.codec.type_name}"] if kernel.codec else []
    more += [f", epilogue {kernel.epilogue.words}"] if kernel.epilogue else []
    more += [f", {kernel.template}"] if kernel.template else []
    return f"{kernel.algorithm.value} for {kernel.dtype}{''.join(more)}"


def words_of_tile(algorithm: Algorithm, dtype: torch.dtype, tile: object, work: Product) -> str:
    """Returns the kernels of a fused matmul's tile in words, which are equal on all ranks that load them."""
    epilogue = f", epilogue {work.epilogue.words}" if work.epilogue else ""
    codec = f", {codec_of_text(work.codec).type_name}" if work.codec else ""
    factors = f", {work.factors}" if str(work.factors) else ""
    return f"{algorithm.value} for {dtype}, {tile}{epilogue}{codec}{factors}"


def words_of_matmul_launch(call: Call, algorithm: Algorithm, part: Slice, k: int | None = None) -> str:
    """Returns in words what one launch of a fused matmul must have alike on all ranks.

    ``k`` are the columns of each rank's operands; None if ranks may differ in them.
    """
    offset = f", from row {part.offset} of each part on" if part.offset else ""
    products = "" if k is None else f", products of {k} columns"
    return f"{words(call)} by {algorithm.value}{products}{offset}"


def words_with_numbers(words: str, numbers: Sequence[float]) -> str:
    """Returns the words of a launch with the numbers of its epilogue, if there are any, which kernels take in fp32."""
    said = ", ".join(f"{ctypes.c_float(number).value:.9g}" for number in numbers)
    return f"{words}, numbers {said}" if numbers else words


class Fingerprints:
    """Numbers that stand for words: kernels compare numbers, and errors look up the words of other ranks."""

    def __init__(self, rendezvous: StoreRendezvous) -> None:
        self._rendezvous = rendezvous
        self._words: dict[int, str] = {}  # that other ranks can look up
        self._untold: dict[int, str] = {}  # kept apart: they may change in each call, and touch no store

    def of(self, said: str, tells: bool = True) -> int:
        """Returns the number of words, which other ranks can look up: from now on, or once :meth:`tell` is called."""
        number = zlib.crc32(said.encode()) or 1  # 0 means no call
        kept = self._words if tells else self._untold
        if number in self._words or number in kept:
            return number
        if len(kept) >= _KEPT_CALLS:
            oldest = next(iter(kept))
            del kept[oldest]
            if tells:
                self._rendezvous.withdraw(_name(oldest))
        kept[number] = said
        if tells:
            self._rendezvous.publish(_name(number), said)
        return number

    def tell(self, number: int) -> None:
        """Lets other ranks look up the words of a number from now on."""
        if said := self._untold.pop(number, None):
            self.of(said)

    def words(self, number: int, rank: int, patience_s: float = 0.0) -> str:
        """Returns the words of a rank that have this number, which the rank may tell within so many seconds."""
        deadline = time.monotonic() + patience_s
        if said := self._words.get(number) or self._untold.get(number):
            return said
        while not (said := self._rendezvous.published(_name(number), rank)):
            if time.monotonic() >= deadline:
                return "another call"
            time.sleep(_POLL_S)
        return said


def _name(number: int) -> str:
    return f"call {number:08x}"
