"""Chooses the algorithm and grid of a call, with the reason in words, from the call and facts about its ranks."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from graphar.errors import UnsupportedError
from graphar.numerics import norms
from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import BYTE, TYPE_NAMES
from graphar.numerics.epilogues.form import Form
from graphar.numerics.norms import RmsNorm
from graphar.plan.algorithms import (
    CLUSTERS,
    COMPRESSING,
    FALLBACK,
    HIERARCHICAL,
    Algorithm,
    Shape,
    kernels_that,
    with_kernels,
    without_compression,
)
from graphar.plan.call import Call
from graphar.plan.explanation import Explanation
from graphar.plan.policy import Chip
from graphar.plan.scratch import MAX_BLOCKS, MAX_RANKS, NORM_ROW_PACKS, PACK_NBYTES
from graphar.plan.shapes import for_norm, for_parts, for_quantized, for_quantized_parts, for_row, serving
from graphar.plan.tables import DEFAULT, Table
from graphar.plan.tensor_tuple import PREPARED_TUPLE, TensorTuple
from graphar.plan.times import expected_quantized_us, expected_us

_DIRECTLY = {"input": "straight from the symmetric inputs", "output": "straight into the symmetric output"}
_COMPRESSED, _NOT_COMPRESSED = "lossless compression, chosen", "; lossless compression is off"


def multicast_is_there() -> str:
    """Answers "why is there no multicast?" with an empty string."""
    return ""


def _refuse_hierarchy() -> str:
    raise UnsupportedError("allreduce: hierarchical cannot serve this call: no process group is known")


@dataclass(frozen=True)
class Facts:
    """The inputs of a choice besides the call."""

    world_size: int
    table: Table
    chip: Chip  # what the ranks' GPUs have in common; meaningless with a ``problem``
    problem: str = ""  # why no kernel can serve the call, or an empty string
    # Returns why multimem algorithms are not available, or an empty string. The first call is collective.
    why_no_multicast: Callable[[], str] = multicast_is_there
    # Makes the groups of the hierarchical algorithm, and returns their description. Collective.
    set_up_hierarchy: Callable[[], str] = _refuse_hierarchy
    stand_in: bool = False  # whether multimem algorithms run without multimem instructions, for tests
    lossless: bool = True  # whether "auto" may compress bf16 without loss


class Choice(NamedTuple):
    """The shape of a call's kernel, or FALLBACK or HIERARCHICAL, and the reason in words."""

    shape: Shape
    reason: str


class Kernel(NamedTuple):
    """The key that a kernel is compiled and loaded by."""

    algorithm: Algorithm
    dtype: torch.dtype  # the dtype of the elements; BYTE if the kernel only moves data
    direct: bool = False  # whether it is the direct variant, for symmetric tensors
    codec: Codec | None = None  # the codec on the wire
    epilogue: Form | None = None


def kernel_of(shape: Shape, dtype: torch.dtype) -> Kernel:
    """Returns the kernel of a shape for tensors of ``dtype``."""
    element = BYTE if BYTE in shape.algorithm.row.dtypes else dtype
    return Kernel(shape.algorithm, element, shape.direct, shape.codec, shape.epilogue)


def why_no_kernel(world_size: int, device: str, dtype: torch.dtype, op: str) -> str:
    """Returns why no kernel can compute ``op`` with these ranks, device type and dtype, or an empty string."""
    if world_size == 1:
        return "one rank has nothing to add"
    if device == "cpu":
        return "the tensor is on the CPU"
    if op != "allgather" and dtype not in TYPE_NAMES:
        return f"no kernel adds {dtype}"
    return f"kernels serve at most {MAX_RANKS} ranks, not {world_size}" if world_size > MAX_RANKS else ""


def select(call: Call, facts: Facts) -> Choice:
    """Returns the shape for a call, and the reason.

    Raises:
        UnsupportedError: the algorithm that the call names cannot serve it.
    """
    match call.op:
        case "allreduce" if call.codec:
            choice = _quantized_allreduce(call, facts)
        case "allreduce":
            choice = _allreduce(call, facts)
        case norms.ALLREDUCE_NORM | norms.REDUCESCATTER_NORM:
            shape = for_norm(facts.table.norm, facts.chip, facts.world_size, call)
            choice = Choice(shape, f"{call.epilogue.text}, by table {facts.table.name!r} for {facts.world_size} ranks")
        case _:
            choice = _parts(call, facts)
    # With a codec a block may take half an SM, and the shape leaves room for other kernels already.
    most = MAX_BLOCKS if call.codec else facts.chip.shared_blocks
    most = min(most, call.blocks or most)
    if choice.shape.blocks > most:
        return choice._replace(shape=replace(choice.shape, blocks=most))
    return choice


# ---- all-reduce -----------------------------------------------------------------------------------------------------


def _allreduce(call: Call, facts: Facts) -> Choice:
    asked = None if call.algorithm == "auto" else Algorithm(call.algorithm)
    if asked is Algorithm.FALLBACK:
        return _fallback(call, "asked for")
    if asked is Algorithm.HIERARCHICAL and not call.epilogue:
        return _hierarchical(facts)
    if call.epilogue and asked and not asked.row.takes_epilogue:
        takers = ", ".join(one.value for one in with_epilogue())
        raise UnsupportedError(f"allreduce: {asked.value} has no kernel with an epilogue; {takers} have")
    if problem := facts.problem or (asked and _why_not(asked, call, facts)):
        return _without_kernel(call, problem)
    beside = facts.table.beside
    if call.blocks and call.nbytes >= beside.pipelined_from_nbytes:
        asked = asked or Algorithm.TWO_SHOT_PIPELINED
    suits = asked is None and _suits_compression(call, facts)
    compressing = COMPRESSING[call.op] if suits and facts.lossless else None
    shape, table = measured_shape(facts.table, facts.world_size, call.nbytes, asked or compressing)
    why = "asked for, shaped" if asked else "a guess" if table == DEFAULT else "the fastest"
    why = _COMPRESSED if compressing else why
    reason = f"{why} by table {table!r} for {facts.world_size} ranks and {call.nbytes} bytes"
    if suits and not compressing:
        reason = f"{reason}{_NOT_COMPRESSED}"
    if call.epilogue and not shape.algorithm.row.takes_epilogue:  # by a table
        reason = f"{shape.algorithm.value}, {reason}, has no kernel with an epilogue"
        shape, _ = measured_shape(facts.table, facts.world_size, call.nbytes, Algorithm.TWO_SHOT_PIPELINED)
    return _with_options(Choice(shape, reason), call, facts)


def _suits_compression(call: Call, facts: Facts) -> bool:
    """Whether lossless compression is faster for a call, by the table, and can serve it."""
    least = facts.table.lossless.least(call.op, facts.world_size)
    # With few blocks the arithmetic would limit it.
    plain = not call.epilogue and not call.blocks
    return plain and call.dtype in COMPRESSING[call.op].row.dtypes and least is not None and call.nbytes >= least


def _with_options(choice: Choice, call: Call, facts: Facts) -> Choice:
    """Returns the choice with the call's options added: symmetric tensors, an epilogue, memory to prefetch."""
    shape, reason = choice
    can = shape.algorithm.row
    if can.direct and can.direct in call.symmetric:
        shape, reason = replace(shape, direct=True), f"{reason}, {_DIRECTLY[can.direct]}"
    if call.epilogue:
        shape, reason = replace(shape, epilogue=call.epilogue), f"{reason}; with the epilogue {call.epilogue.text}"
    if call.prefetches and _prefetches(shape, call, facts):
        # The additional blocks only prefetch.
        shape = replace(shape, blocks=max(shape.blocks, facts.chip.shared_blocks), prefetches=True)
    return Choice(shape, reason)


def _prefetches(shape: Shape, call: Call, facts: Facts) -> bool:
    small = call.nbytes <= facts.table.prefetch.largest_nbytes
    return shape.algorithm.row.prefetches and not call.epilogue and small and facts.chip.can_prefetch


def _quantized_allreduce(call: Call, facts: Facts) -> Choice:
    if call.algorithm == Algorithm.FALLBACK.value:
        return Choice(FALLBACK, "asked for")
    codec = call.wire
    if call.algorithm == Algorithm.HIERARCHICAL.value:
        return _hierarchical(facts, codec)
    asked = None if call.algorithm == "auto" else Algorithm(call.algorithm)
    if problem := facts.problem or (asked and why_not_quantized(asked, codec, facts.world_size, call.nbytes)):
        return _without_kernel(call, problem)
    if not call.counts:
        return Choice(FALLBACK, "an empty tensor has no tile")
    saved = 8 * call.dtype.itemsize / codec.bits_per_element
    wire = f"{codec.bits_per_element:g} bits an element on the wire, {saved:.2g} times fewer than {call.dtype}"
    shape = for_quantized(
        facts.table.quantized, facts.chip.sms, codec, facts.world_size, call.counts, call.dtype.itemsize, asked
    )
    return Choice(shape, f"{wire}, by table {facts.table.name!r} for {facts.world_size} ranks and {call.nbytes} bytes")


def _hierarchical(facts: Facts, codec: Codec | None = None) -> Choice:
    if facts.world_size == 1:
        return Choice(FALLBACK, "one rank has nothing to add")
    if codec and (codec.feedback or codec.rounding == "stochastic"):
        kind = "a residual" if codec.feedback else "stochastic rounding"
        raise UnsupportedError(f"allreduce: hierarchical cannot serve this call: it rounds sums, without {kind}")
    reason = facts.set_up_hierarchy()
    across = f"{reason}; across hosts {codec.bits_per_element:g} bits an element" if codec else reason
    return Choice(HIERARCHICAL, across)


def _why_not(asked: Algorithm, call: Call, facts: Facts) -> str:
    """Returns why the algorithm ``asked`` cannot serve a call without a codec, or an empty string."""
    if call.dtype not in asked.row.dtypes:
        return f"it has no kernel for {call.dtype}"
    if problem := why_too_large(asked, facts.world_size, call.nbytes):
        return problem
    return "" if asked.exact else facts.why_no_multicast()


def why_not_quantized(algorithm: Algorithm, codec: Codec, world_size: int, nbytes: int) -> str:
    """Returns why ``algorithm`` cannot sum a tensor of ``nbytes`` with ``codec`` on the wire, or an empty string."""
    if algorithm.row.spares_a_word and not codec.spares_a_word:
        return f"the scheme {codec.scheme} leaves no word to say 'not yet'"
    return why_too_large(algorithm, world_size, nbytes)


def why_too_large(algorithm: Algorithm, world_size: int, nbytes: int) -> str:
    """Returns why the scratch of ``algorithm`` is too small for a tensor of ``nbytes``, or an empty string."""
    largest = algorithm.row.limit(world_size)
    if largest is None or nbytes <= largest:
        return ""
    return f"its scratch takes {largest} bytes between {world_size} ranks, not {nbytes}"


def _without_kernel(call: Call, problem: str) -> Choice:
    if call.algorithm != "auto":
        raise UnsupportedError(f"allreduce: {call.algorithm} cannot serve this call: {problem}")
    return _fallback(call, problem)


def _fallback(call: Call, reason: str) -> Choice:
    return Choice(FALLBACK, f"{reason}; with the epilogue {call.epilogue.text}" if call.epilogue else reason)


def measured_shape(table: Table, world_size: int, nbytes: int, algorithm: Algorithm | None = None) -> tuple[Shape, str]:
    """Returns the measured shape of an exact all-reduce of ``nbytes`` a rank, and the name of the table that has it.

    With ``algorithm`` it is the measured shape of this algorithm nearest to ``nbytes``, which it can serve. Without
    rows for ``world_size`` in the table, the default table is used.
    """
    table = serving(table, world_size)
    return for_row(table, world_size, nbytes, algorithm), table.name


# ---- parts ----------------------------------------------------------------------------------------------------------


def _parts(call: Call, facts: Facts) -> Choice:
    if facts.problem:
        return Choice(FALLBACK, facts.problem)
    reason = f"by table {facts.table.name!r} for {facts.world_size} ranks and a largest part of {call.nbytes} bytes"
    if not call.codec and _suits_compression(call, facts):
        if facts.lossless:
            shape = for_parts(facts.table.parts[call.op], call.nbytes, COMPRESSING[call.op])
            return Choice(shape, f"{_COMPRESSED} {reason}")
        reason = f"{reason}{_NOT_COMPRESSED}"
    if call.codec:
        if not any(call.counts):
            return Choice(FALLBACK, "an empty tensor has no tile")
        return Choice(for_quantized_parts(facts.chip.sms, call.wire, facts.world_size, max(call.counts)), reason)
    shape = for_parts(facts.table.parts[call.op], call.nbytes)
    return Choice(replace(shape, epilogue=call.epilogue), reason)


def has_norm_kernel(row_nbytes: int) -> bool:
    """Returns whether kernels can normalise rows of ``row_nbytes``."""
    return row_nbytes % PACK_NBYTES == 0 and row_nbytes <= NORM_ROW_PACKS * PACK_NBYTES


def norm_rows(world_size: int, row_nbytes: int) -> int:
    """Returns the most rows of one launch of an all-reduce with RMSNorm; 0 if no kernel can normalise them."""
    if not has_norm_kernel(row_nbytes):
        return 0
    return Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT.row.limit(world_size) // row_nbytes


# ---- what calls may need --------------------------------------------------------------------------------------------


def needed_kernels(
    facts: Facts,
    ops: Sequence[str],
    dtypes: Sequence[torch.dtype],
    max_nbytes: int | None,
    codecs: Sequence[Codec] = (),
    forms: Sequence[Form] = (),
    symmetric: bool = False,
) -> Iterator[Kernel]:
    """Yields every kernel that calls of ``ops`` may need, with tensors of at most ``max_nbytes`` (None: any size).

    Calls may have one of ``codecs`` or of ``forms``, which are epilogues, or neither; with ``symmetric`` also symmetric
    tensors.
    """
    for op in ops:
        if op == PREPARED_TUPLE:
            for algorithm in without_compression("allgather"):
                yield Kernel(algorithm, BYTE, epilogue=TensorTuple((), (), ()))
            continue
        if op in norms.PREPARED:
            yield from _needed_norms(facts, dtypes, *norms.PREPARED[op])
            continue
        plain = _up_to(facts, max_nbytes, op)
        yield from _variants(plain, dtypes, symmetric)
        if _may_compress(facts, max_nbytes, op):
            yield from _variants([COMPRESSING[op]], dtypes, symmetric)
        for codec in codecs:
            for dtype, algorithm in itertools.product(dtypes, algorithms_of(codec, op)):
                yield Kernel(algorithm, dtype, codec=codec)
        if op == "allgather":
            continue
        fitting = dict.fromkeys(one if one.row.takes_epilogue else Algorithm.TWO_SHOT_PIPELINED for one in plain)
        for form in forms:
            yield from _variants(list(fitting), dtypes, symmetric, form)


def _needed_norms(facts: Facts, dtypes: Sequence[torch.dtype], op: str, output: str) -> Iterator[Kernel]:
    clusters = CLUSTERS if facts.chip.has_clusters else (1,)
    for algorithm, dtype, cluster in itertools.product(with_kernels(op), dtypes, clusters):
        yield Kernel(algorithm, dtype, epilogue=RmsNorm(1, cluster, output))


def _variants(
    algorithms: Sequence[Algorithm], dtypes: Sequence[torch.dtype], symmetric: bool, form: Form | None = None
) -> Iterator[Kernel]:
    for algorithm in algorithms:
        can = algorithm.row
        for direct in (False, True) if symmetric and can.direct else (False,):
            for dtype in [BYTE] if BYTE in can.dtypes else [one for one in dtypes if one in can.dtypes]:
                yield Kernel(algorithm, dtype, direct, epilogue=form)


def _may_compress(facts: Facts, max_nbytes: int | None, op: str) -> bool:
    """Whether "auto" compresses some bf16 tensors of up to ``max_nbytes`` without loss."""
    least = facts.table.lossless.least(op, facts.world_size)
    return facts.lossless and least is not None and (max_nbytes is None or max_nbytes >= least)


def _up_to(facts: Facts, max_nbytes: int | None, op: str) -> list[Algorithm]:
    """Returns the algorithms that "auto" takes up to ``max_nbytes``, also with few blocks beside other work."""
    if op != "allreduce":
        return without_compression(op)
    rows = serving(facts.table, facts.world_size).rows[facts.world_size]
    limits = [math.inf if row["max_nbytes"] is None else row["max_nbytes"] for row in rows]
    last = bisect_left(limits, math.inf if max_nbytes is None else max_nbytes)
    found = [Algorithm(row["algorithm"]) for row in rows[: last + 1]]
    pipelines = max_nbytes is None or max_nbytes >= facts.table.beside.pipelined_from_nbytes
    return list(dict.fromkeys([*found, Algorithm.TWO_SHOT_PIPELINED] if pipelines else found))


def algorithms_of(codec: Codec, op: str) -> list[Algorithm]:
    """Returns the algorithms that "auto" takes for ``op`` with ``codec``; none if the op takes no codec."""
    return [one for one in with_kernels(op, codec=True) if not why_not_quantized(one, codec, 2, 0)]


def with_epilogue(op: str = "allreduce") -> tuple[Algorithm, ...]:
    """Returns the algorithms of ``op`` that have kernels with an epilogue."""
    return kernels_that(lambda row: row.op == op and row.takes_epilogue)


# ---- in words -------------------------------------------------------------------------------------------------------


def explain(call: Call, facts: Facts) -> Explanation:
    """Returns the explanation that graphar.explain gives for a call."""
    shape, reason = select(call, facts)
    algorithm = shape.algorithm
    stand_in = "stand-in for " if facts.stand_in and not algorithm.exact else ""
    expected = exact = None
    was_measured = algorithm is not Algorithm.FALLBACK and not algorithm.row.compresses
    if call.algorithm == "auto" and was_measured and not shape.direct and not call.epilogue:
        expected = expected_us(facts.table, facts.world_size, call.nbytes)
        if call.codec:
            exact = expected
            expected = expected_quantized_us(facts.table, call.wire, facts.world_size, call.counts)
    return Explanation(stand_in + algorithm.value, shape.blocks, shape.threads, reason, expected, exact)
