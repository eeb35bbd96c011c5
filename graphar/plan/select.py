"""Chooses the algorithm and grid of a call, with the reason in words, from the call and facts about its ranks."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from graphar.errors import Reason, UnsupportedError
from graphar.numerics import norms, softmax
from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.dtypes import BYTE, TYPE_NAMES
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.plan import tables
from graphar.plan.algorithms import (
    COMPRESSING,
    COPYING,
    GENERAL,
    MEETING,
    TUPLE_VARIANT,
    Algorithm,
    is_from_outside,
    is_loaded,
    kernels_that,
    with_kernels,
)
from graphar.plan.call import Call
from graphar.plan.config import FALLBACK, HIERARCHICAL, Config, Explanation, Kernel
from graphar.plan.grids import CLUSTERS
from graphar.plan.policy import Chip, LargeCallsPolicy
from graphar.plan.row import Row
from graphar.plan.scratch import MAX_BLOCKS, MAX_RANKS, NORM_ROW_PACKS, PACK_NBYTES
from graphar.plan.work import MOVING, Exchange, Norm, Parts, Sum, TensorTuple, template_of


@dataclass(frozen=True)
class Facts:
    """The inputs of a choice besides the call."""

    world_size: int
    table: tables.Table
    chip: Chip  # what the ranks' GPUs have in common; meaningless with a ``problem``
    problem: Reason | None = None  # why no kernel can serve the call
    # Returns why multimem algorithms are not available. The first call is collective.
    why_no_multicast: Callable[[], Reason | None] = lambda: None
    # Makes the groups of the hierarchical algorithm, and describes them. Collective. None: there is no process group.
    set_up_hierarchy: Callable[[], str] | None = None
    stand_in: bool = False  # whether multimem algorithms run without multimem instructions, for tests
    lossless: bool = True  # whether "auto" may compress bf16 without loss


class Choice(NamedTuple):
    """The configuration of a call, which may be FALLBACK or HIERARCHICAL, and the reason in words."""

    config: Config
    reason: str


def why_no_kernel(world_size: int, device: str, dtype: torch.dtype, op: str) -> Reason | None:
    """Returns why no kernel can compute ``op`` with these ranks, device type and dtype."""
    if world_size == 1:
        return "one rank has nothing to add"
    if device == "cpu":
        return "the tensor is on the CPU"
    if op not in MOVING and dtype not in TYPE_NAMES:
        return f"no kernel adds {dtype}"
    return f"kernels serve at most {MAX_RANKS} ranks, not {world_size}" if world_size > MAX_RANKS else None


def select(call: Call, facts: Facts) -> Choice:
    """Returns the configuration for a call, and the reason; plan/matmuls.py chooses for a Product.

    UnsupportedError if the algorithm that the call names cannot serve it.
    """
    choice = _norm(call, facts) if isinstance(call.work, Norm) else _elements(call, facts)
    config, row = choice.config, choice.config.algorithm.row
    # The grid of a policy leaves room for other kernels already.
    most = MAX_BLOCKS if row.policy_grid else facts.chip.shared_blocks(row.takes_half(config.threads))
    most = min(most, call.blocks or most)
    if config.blocks > most:
        return choice._replace(config=replace(config, blocks=most))
    return choice


def _elements(call: Call[Sum | Parts | TensorTuple | Exchange], facts: Facts) -> Choice:
    work, asked = call.work, None if call.algorithm == "auto" else Algorithm(call.algorithm)
    if asked is HIERARCHICAL.algorithm and not _lacks(HIERARCHICAL.algorithm.row, work):
        return _hierarchical(call, facts)
    problem = "asked for" if asked is FALLBACK.algorithm else _why_no_kernel(call, facts, asked)
    if problem:
        return Choice(FALLBACK, f"{problem}{_what_is_added(work)}")
    if isinstance(work, Exchange) and not work.known:
        return _of_any_sizes(call, facts, asked)
    return _encoded(call, facts, asked) if work.codec else _measured(call, facts, asked)


def _why_no_kernel(call: Call, facts: Facts, asked: Algorithm | None) -> Reason | None:
    """Returns why no kernel serves a call; UnsupportedError if it names an algorithm that cannot serve it.

    An algorithm from outside the package serves calls without a kernel, too.
    """
    if asked is None:
        return facts.problem
    if lacks := _lacks(asked.row, call.work):
        takers = ", ".join(taker.value for taker in with_kernels(call.op) if not _lacks(taker.row, call.work))
        raise UnsupportedError(f"{call.op}: {asked.value} {lacks}; {takers} have")
    problem = facts.problem or _why_not(asked, call, facts)
    if problem and not (facts.problem and is_from_outside(asked)):
        raise UnsupportedError(f"{call.op}: {asked.value} cannot serve this call: {problem}")
    return f"{problem}; by the specification of {asked.value}" if problem else None


def _lacks(row: Row, work: Sum | Parts | TensorTuple | Exchange) -> Reason | None:
    """Returns what a work needs and an algorithm's kernels do not have."""
    if work.epilogue and not row.takes_epilogue:
        return "has no kernel with an epilogue"
    if isinstance(work, TensorTuple) and TUPLE_VARIANT not in row.variants:
        return "has no kernel for several tensors"
    return "has no kernel that adds as a tree" if work.order == "tree" and not row.adds_tree else None


def _what_is_added(work: Sum | Parts | Norm | TensorTuple | Exchange) -> str:
    tree = "; added as a tree" if work.order == "tree" else ""
    return f"{tree}; with the epilogue {work.epilogue.text}" if work.epilogue else tree


def _hierarchical(call: Call[Sum | Parts | TensorTuple | Exchange], facts: Facts) -> Choice:
    codec = call.wire
    if facts.world_size == 1:
        return Choice(FALLBACK, "one rank has nothing to add")
    if codec and (codec.feedback or codec.rounding == "stochastic"):
        kind = "a residual" if codec.feedback else "stochastic rounding"
        raise UnsupportedError(f"{call.op}: hierarchical cannot serve this call: it rounds sums, without {kind}")
    if facts.set_up_hierarchy is None:
        raise UnsupportedError(f"{call.op}: hierarchical cannot serve this call: no process group is known")
    reason = facts.set_up_hierarchy()
    across = f"{reason}; across hosts {codec.bits_per_element:g} bits an element" if codec else reason
    return Choice(HIERARCHICAL, across)


def _encoded(call: Call[Sum | Parts | TensorTuple | Exchange], facts: Facts, asked: Algorithm | None) -> Choice:
    if not any(call.work.parts):
        return Choice(FALLBACK, "an empty tensor has no tile")
    bits = codec_of_text(call.work.codec).bits_per_element
    saved = 8 * call.dtype.itemsize / bits
    wire = f"{bits:g} bits an element on the wire, {saved:.2g} times fewer than {call.dtype}"
    config = by_policy(asked or _first_that_suits(call, facts), call, facts)
    return Choice(config, f"{wire}, {_by_table(facts.table, call, facts)}")


def _measured(call: Call[Sum | Parts | TensorTuple | Exchange], facts: Facts, asked: Algorithm | None) -> Choice:
    is_sum = isinstance(call.work, Sum)
    if is_sum and call.blocks and call.nbytes >= facts.table.beside.pipelined_from_nbytes:
        asked = asked or GENERAL[call.op]
    compresses = None if asked else _for_large(COMPRESSING, facts.table.lossless, call, facts)
    compressing = compresses if facts.lossless else None
    copying = None if asked or compressing else _for_large(COPYING, facts.table.copies, call, facts)
    if copying and isinstance(call.work, Exchange) and not call.symmetric:
        copying = None  # through scratch its copies take longer than its kernels
    table = tables.serving(facts.table, facts.world_size) if is_sum else facts.table
    entries = table.rows[facts.world_size] if is_sum else table.parts[call.op]
    taken = asked or compressing or copying
    if taken and taken.row.copies:
        config = by_policy(taken, call, facts)
    else:
        config = tables.by_entries(entries, facts.world_size, call.nbytes, taken)
    by_size = ("a guess " if table.name == tables.DEFAULT else "the fastest ") if is_sum else ""
    why = "lossless compression, chosen " if compressing else "asked for, shaped " if asked else by_size
    if config.algorithm.row.copies:
        adds = "" if call.op in MOVING else f" and {config.blocks} while a rank adds"
        why = f"by copy engines, 1 block while ranks meet{adds}, {why if asked else 'chosen '}"
    off = "; lossless compression is off" if compresses and not compressing else ""
    choice = Choice(config, f"{why}{_by_table(table, call, facts)}{off}")
    config, reason = choice if taken else _served(choice, entries, call, facts)
    if call.symmetric and config.algorithm.row.direct:
        config, reason = replace(config, direct=True), f"{reason}, straight into the symmetric output"
    return Choice(config, f"{reason}{_what_is_added(call.work)}")


def _by_table(table: tables.Table, call: Call, facts: Facts) -> str:
    size = f"{call.nbytes} bytes" if isinstance(call.work, Sum) else f"a largest part of {call.nbytes} bytes"
    return f"by table {table.name!r} for {facts.world_size} ranks and {size}"


def _served(choice: Choice, entries: Sequence[dict], call: Call, facts: Facts) -> Choice:
    """Returns what a table chose, or if that cannot serve the call, the algorithm that can serve every call."""
    config, reason = choice
    if not is_loaded(named := tables.named_by(entries, call.nbytes)):
        reason = f"{reason}; the table's {named} is not loaded in this process"
    if lacks := _lacks(config.algorithm.row, call.work) or _why_not(config.algorithm, call, facts):
        reason = f"{config.algorithm.value}, {reason}, {lacks}"
        config = tables.by_entries(entries, facts.world_size, call.nbytes, GENERAL[call.op])
    return Choice(config, reason)


def _of_any_sizes(call: Call, facts: Facts, asked: Algorithm | None) -> Choice:
    """Returns the choice for an all-to-all of parts whose lengths only some ranks know. It must not depend on them."""
    table, general = facts.table, GENERAL[call.op]
    if asked not in (None, general):
        raise UnsupportedError(
            f"{call.op}: {call.algorithm} cannot serve this call: no rank knows all sizes; {general.value} does"
        )
    # The grid suits the largest parts.
    config = tables.by_entries(table.parts[call.op], facts.world_size, sys.maxsize, general)
    return Choice(config, f"{'asked for, shaped ' if asked else ''}by table {table.name!r} for parts of any size")


def _norm(call: Call, facts: Facts) -> Choice:
    tree = _what_is_added(call.work)
    if facts.problem:
        return Choice(FALLBACK, f"{facts.problem}{tree}")
    what = "add_and_norm" if call.work.output == "like_input" else f"add_and_norm, {call.work.output}"
    config = by_policy(_first_that_suits(call, facts), call, facts)
    return Choice(config, f"{what}, by table {facts.table.name!r} for {facts.world_size} ranks{tree}")


def has_norm_kernel(row_nbytes: int) -> bool:
    """Returns whether kernels can normalise rows of ``row_nbytes``."""
    return row_nbytes % PACK_NBYTES == 0 and row_nbytes <= NORM_ROW_PACKS * PACK_NBYTES


def has_kernel_for_rows(work: Norm, dtype: torch.dtype) -> bool:
    """Returns whether kernels can add the rows of a norm, which are of ``dtype``, and normalise their sum."""
    return all(has_norm_kernel(work.columns * kind.itemsize) for kind in (dtype, work.out_dtype or dtype))


def norm_rows(world_size: int, row_nbytes: int) -> int:
    """Returns the most rows of one launch of an all-reduce with RMSNorm, whose rows kernels can normalise."""
    return max(algorithm.row.limit(world_size) or 0 for algorithm in with_kernels(norms.ALLREDUCE_NORM)) // row_nbytes


def by_policy(algorithm: Algorithm, call: Call, facts: Facts) -> Config:
    """Returns the configuration of an algorithm whose grid follows from a policy: with a codec, or of a norm."""
    row = algorithm.row
    assert row.policy_grid is not None
    return Config(algorithm, **row.policy_grid(row, call, facts.world_size, facts.table, facts.chip)._asdict())


def _first_that_suits(call: Call, facts: Facts) -> Algorithm:
    """Returns the first algorithm of the call's op that serves the call and suits it, or the last one."""
    takers = with_kernels(call.op, codec=bool(call.work.codec))
    for taker in takers:
        if not _why_not(taker, call, facts) and taker.row.suits(facts.table, facts.world_size, call.nbytes):
            return taker
    return takers[-1]


def _for_large(by_op: Mapping[str, Algorithm], policy: LargeCallsPolicy, call: Call, facts: Facts) -> Algorithm | None:
    """Returns the algorithm for large calls alone, if by the table it is faster for this one, and can serve it."""
    algorithm, least = by_op.get(call.op), policy.least(call.op, facts.world_size)
    if algorithm is None or least is None or call.nbytes < least or call.blocks:
        return None
    return None if _lacks(algorithm.row, call.work) or _why_not(algorithm, call, facts) else algorithm


def _why_not(algorithm: Algorithm, call: Call, facts: Facts) -> Reason | None:
    row = algorithm.row
    if not {call.dtype, BYTE} & {*row.dtypes}:
        return f"it has no kernel for {call.dtype}"
    if why := _why_not_here(algorithm, facts):
        return why
    if row.copies and isinstance(call.work, Exchange) and not call.work.is_in_order:
        return "it takes equal parts that follow one another in memory, as along dimension 0"
    if call.wire and not can_encode(algorithm, call.wire):
        return f"the scheme {call.wire.scheme} leaves no word to say 'not yet'"
    if not row.fits(facts.world_size, call.nbytes):
        largest = row.limit(facts.world_size)
        return f"its scratch takes {largest} bytes between {facts.world_size} ranks, not {call.nbytes}"
    return facts.why_no_multicast() if row.multimem else None


def _why_not_here(algorithm: Algorithm, facts: Facts) -> Reason | None:
    row = algorithm.row
    if facts.world_size not in row.world_sizes:
        return f"it serves {', '.join(map(str, row.world_sizes))} ranks, not {facts.world_size}"
    if not facts.chip.is_at_least(row.minimum_arch):
        return f"it needs sm_{row.minimum_arch} or newer, the GPUs have {facts.chip.arch}"
    return None


def can_encode(algorithm: Algorithm, codec: Codec) -> bool:
    """Returns whether an algorithm that takes codecs can take this one."""
    return codec.spares_a_word or not algorithm.row.spares_a_word


def algorithms_of(codec: Codec, op: str) -> list[Algorithm]:
    """Returns the algorithms that "auto" takes for ``op`` with ``codec``; none if the op takes no codec."""
    return [algorithm for algorithm in with_kernels(op, codec=True) if can_encode(algorithm, codec)]


PREPARED_TUPLE = "allgather_tuple"  # the name under which the kernels of all-gathers of several tensors are prepared
_OF_KERNELS = [algorithm.op for algorithm in kernels_that(lambda row: True)]
# The names under which kernels are prepared.
PREPARED = tuple(dict.fromkeys([*_OF_KERNELS, PREPARED_TUPLE, *norms.PREPARED, *softmax.PREPARED]))


def needed_kernels(
    facts: Facts,
    ops: Sequence[str],
    dtypes: Sequence[torch.dtype],
    max_nbytes: int | None,
    codecs: Sequence[Codec] = (),
    epilogues: Sequence[Pointwise] = (),
    symmetric: bool = False,
    trees: bool = False,
) -> Iterator[Kernel]:
    """Yields every kernel that calls of ``ops`` may need, apart from kernels of matmuls.

    ``ops`` are names in PREPARED, and algorithms from outside the package; UnsupportedError if such an algorithm has no
    kernel for these ranks. Tensors have at most ``max_nbytes`` (None: any size). Calls may have one of ``codecs`` or of
    ``epilogues``, or neither; with ``symmetric`` also symmetric tensors; with ``trees`` also sums as a tree, of results
    of ``dtypes``.
    """
    for op in ops:
        if is_from_outside(op):
            if why := _why_not_here(Algorithm(op), facts):
                raise UnsupportedError(f"prepare: {op} cannot be prepared: {why}")
            yield from _variants([Algorithm(op)], dtypes, symmetric)
            continue
        if any(algorithm.row.tiles for algorithm in with_kernels(op)):
            continue
        if op == PREPARED_TUPLE:
            for algorithm in _up_to(facts, None, "allgather"):
                if TUPLE_VARIANT in algorithm.row.variants:
                    yield Kernel(algorithm, BYTE, template=TUPLE_VARIANT)
            continue
        if op in norms.PREPARED:
            of, output = norms.PREPARED[op]
            orders = ("rank", "tree") if trees and output == "like_input" else ("rank",)
            clusters = CLUSTERS if facts.chip.has_clusters else CLUSTERS[:1]
            for order, algorithm, dtype, cluster in itertools.product(orders, with_kernels(of), dtypes, clusters):
                norm = Norm(of, (), 1, output, order=order, out_dtype=dtype)
                element = torch.float32 if order == "tree" else dtype
                yield Kernel(algorithm, element, template=template_of(norm, cluster))
            continue
        plain, general = _up_to(facts, max_nbytes, op), GENERAL[op]
        results = [(dtypes, "rank", None), *(((torch.float32,), "tree", dtype) for dtype in dtypes if trees)]
        for (elements, order, result), epilogue in itertools.product(results, (None, *epilogues)):
            work = Sum(0, epilogue=epilogue, order=order, out_dtype=result)
            takers = dict.fromkeys(general if _lacks(taker.row, work) else taker for taker in plain)
            if not _lacks(general.row, work):
                yield from _variants(list(takers), elements, symmetric, epilogue, template_of(work))
        least = facts.table.lossless.least(op, facts.world_size)
        if facts.lossless and least is not None and (max_nbytes is None or max_nbytes >= least):
            yield from _variants([COMPRESSING[op]], dtypes, symmetric)
        for codec, dtype in itertools.product(codecs, dtypes):
            yield from [Kernel(algorithm, dtype, codec=codec) for algorithm in algorithms_of(codec, op)]
        least = facts.table.copies.least(op, facts.world_size)
        if least and (max_nbytes is None or max_nbytes >= least):
            yield from _variants([MEETING, COPYING[op]], dtypes, symmetric=False)


def _variants(
    algorithms: Sequence[Algorithm],
    dtypes: Sequence[torch.dtype],
    symmetric: bool,
    epilogue: Pointwise | None = None,
    template: str | None = None,
) -> Iterator[Kernel]:
    for algorithm in algorithms:
        can = algorithm.row
        for direct in (False, True) if symmetric and can.direct else (False,):
            for dtype in [BYTE] if BYTE in can.dtypes else [dtype for dtype in dtypes if dtype in can.dtypes]:
                yield Kernel(algorithm, dtype, direct, epilogue=epilogue, template=template)


def _up_to(facts: Facts, max_nbytes: int | None, op: str) -> Sequence[Algorithm]:
    """Returns the algorithms that "auto" takes up to ``max_nbytes``, also with few blocks beside other work."""
    if op == "allreduce":
        entries = tables.loaded(tables.serving(facts.table, facts.world_size).rows[facts.world_size])
    else:  # the largest part may have any share of the bytes
        entries, max_nbytes = tables.loaded(facts.table.parts[op]), None
    smaller = [max_nbytes is None or (entry["max_nbytes"] or math.inf) < max_nbytes for entry in entries]
    algorithms = [Algorithm(entry["algorithm"]) for entry in entries[: sum(smaller) + 1]]
    beside = max_nbytes is None or max_nbytes >= facts.table.beside.pipelined_from_nbytes
    # The general algorithm serves the calls that an algorithm from outside does not.
    general = [GENERAL[op]] if beside or any(map(is_from_outside, algorithms)) else []
    return list(dict.fromkeys([taker for taker in (*algorithms, *general) if not _why_not_here(taker, facts)]))


def explain(call: Call, facts: Facts) -> Explanation:
    """Returns the explanation that graphar.explain gives for a call."""
    config, reason = select(call, facts)
    algorithm, work = config.algorithm, call.work
    stand_in = "stand-in for " if facts.stand_in and algorithm.row.multimem else ""
    expected = exact = None
    if call.algorithm == "auto" and _was_measured(call, config, facts):
        expected = tables.expected_us(facts.table, facts.world_size, call.nbytes)
        if codec := call.wire:
            exact = expected
            expected = tables.expected_quantized_us(facts.table, codec, facts.world_size, work.numel)
    name, scratch_nbytes = stand_in + algorithm.value, algorithm.row.scratch_nbytes(facts.world_size)
    return Explanation(name, config.blocks, config.threads, reason, expected, exact, scratch_nbytes)


def _was_measured(call: Call, config: Config, facts: Facts) -> bool:
    """Whether a table's times are of calls like ``call``."""
    work, table = call.work, tables.serving(facts.table, facts.world_size)
    plain = isinstance(work, Sum) and work.order == "rank" and not work.epilogue and not config.direct
    if not (plain and config.blocks) or config.algorithm.row.compresses:
        return False
    return bool(work.codec) or config.algorithm == tables.named_by(table.rows[facts.world_size], call.nbytes)
