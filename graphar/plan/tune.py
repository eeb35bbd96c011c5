"""Tuning: makes a table of the fastest algorithm and grid at each size from measured times."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from graphar.plan.algorithms import Algorithm, Shape
from graphar.plan.explanation import format_us
from graphar.plan.policy import shared_blocks
from graphar.plan.scratch import PACK_NBYTES, WARP, WORLD_SIZES
from graphar.plan.select import measured_shape
from graphar.plan.shapes import serving, shape_of
from graphar.plan.sizes import GB, KB, MB, format_nbytes
from graphar.plan.tables import POLICIES, Table
from graphar.plan.times import expected_us

SIZES = (
    *(2 * KB, 8 * KB, 32 * KB, 64 * KB, 128 * KB, 192 * KB, 256 * KB, 384 * KB, 512 * KB),
    *(MB << power for power in range(9)),
    GB,
)
PART_SIZES = (32 * KB, 128 * KB, 256 * KB, 512 * KB, 2 * MB, 8 * MB, 32 * MB)
CODEC_SIZES = (*(32 * KB << 2 * power for power in range(6)), 64 * MB, 128 * MB, 256 * MB)  # a kernel's limit is 64 MB
TOLERANCE = 0.01  # least total gain of a new row; candidates are timed in turns, so noise is smaller

Measured = Mapping[Shape, float]  # microseconds of each candidate at one size
Measurements = Mapping[int, Measured]  # by bytes of one rank's tensor
CodecTimes = Mapping[str, Mapping[int, float]]  # microseconds by codec text and bytes of one rank's bf16 tensor


# ---- candidates -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """An algorithm that can be the fastest, and the grids to try."""

    algorithm: Algorithm
    smallest_nbytes: int  # the smallest tensor for which it can be the fastest
    # A function from world size and bytes to the pairs (threads of a block, packs of a chunk) to try.
    grids: Callable[[int, int], Iterable[tuple[int, int]]]


def _one_shot_push_grids(world_size: int, nbytes: int) -> Iterator[tuple[int, int]]:
    # At larger sizes a few full blocks would leave most of the links' bandwidth unused.
    fewest_blocks = 16 if nbytes > 64 * KB else 1
    for threads in (64, 128, 256, 512):
        if nbytes >= fewest_blocks * threads * PACK_NBYTES and (threads > 64 or nbytes <= 32 * KB):
            yield threads, 0


def _two_shot_push_grids(world_size: int, nbytes: int) -> Iterator[tuple[int, int]]:
    most = Algorithm.TWO_SHOT_PUSH.row.max_threads // world_size // WARP * WARP  # a group of warps for each owner
    widths = {width for width in (32, 64, 128, 256) if width <= most} | {most}
    return ((width * world_size, 0) for width in sorted(widths))


FAMILIES = (
    Family(Algorithm.ONE_SHOT_PUSH, 0, _one_shot_push_grids),
    Family(Algorithm.TWO_SHOT_PUSH, 64 * KB, _two_shot_push_grids),
    Family(Algorithm.TWO_SHOT_PIPELINED, 16 * MB, lambda world_size, nbytes: [(512, 1024), (512, 2048)]),
)


def candidates(world_size: int, nbytes: int, sms: int) -> list[Shape]:
    """Returns the shapes that may be the fastest at a size, with a block on all SMs but one, or the most allowed."""
    found = []
    for family in FAMILIES:
        largest = family.algorithm.row.limit(world_size)
        if family.smallest_nbytes <= nbytes and (largest is None or nbytes <= largest):
            grids = family.grids(world_size, nbytes)
            blocks = min(shared_blocks(sms), family.algorithm.row.max_blocks)
            found += [Shape(family.algorithm, blocks, threads, chunk) for threads, chunk in grids]
    return found


_PART_GRIDS = {
    Algorithm.REDUCESCATTER_PUSH: [(threads, 0) for threads in (128, 256, 512)],
    Algorithm.ALLGATHER_FLAGGED: [(threads, 0) for threads in (128, 256, 512)],
    Algorithm.ALLGATHER_PUSH: [(512, 512), (512, 1024), (512, 2048)],
}


def part_candidates(op: str, nbytes: int, sms: int) -> list[Shape]:
    """Returns the shapes that may be the fastest for a reduce-scatter or all-gather with parts of ``nbytes``.

    One row serves every world size, so each shape is possible with all of them.
    """
    found = []
    for algorithm, grids in _PART_GRIDS.items():
        limits = [algorithm.row.limit(world_size) for world_size in WORLD_SIZES]
        if algorithm.op == op and all(limit is None or nbytes <= limit for limit in limits):
            blocks = min(shared_blocks(sms), algorithm.row.max_blocks)
            found += [Shape(algorithm, blocks, threads, chunk) for threads, chunk in grids]
    return found


# ---- tables ---------------------------------------------------------------------------------------------------------


def pick(measurements: Measurements) -> dict[int, tuple[Shape, float]]:
    """Returns by size the candidate to take, and its time in microseconds.

    A sequence of candidates, one a size, costs its slowdowns against the fastest at each size, and TOLERANCE for each
    change of the candidate. The cheapest sequence is taken, so noise at one size makes no row.
    """
    sizes = sorted(measurements)
    cheapest: dict[Shape, tuple[float, list[Shape]]] = {}  # by last candidate, the cheapest sequence and its cost
    for nbytes in sizes:
        times = measurements[nbytes]
        fastest = min(times.values())
        cost, chosen = min(cheapest.values(), key=itemgetter(0), default=(-TOLERANCE, []))
        change = cost + TOLERANCE, chosen
        before = {candidate: min(cheapest.get(candidate, change), change, key=itemgetter(0)) for candidate in times}
        cheapest = {
            one: (cost + math.log(times[one] / fastest), [*those, one]) for one, (cost, those) in before.items()
        }
    _, chosen = min(cheapest.values(), key=itemgetter(0))
    return {nbytes: (one, measurements[nbytes][one]) for nbytes, one in zip(sizes, chosen, strict=True)}


def rows_from(measurements: Measurements, older: Sequence[dict]) -> list[dict]:
    """Returns the rows of a table for one world size, by the times of at least one size.

    The ``older`` rows serve larger sizes if the algorithm of the largest measured size has a limit.
    """
    rows: list[dict] = []
    before = None
    for nbytes, (candidate, _) in pick(measurements).items():
        if candidate == before:
            rows.pop()
        rows.append(row_of(candidate, nbytes))
        before = candidate
    if before.algorithm.row.limit(2) is None:
        return [*rows[:-1], row_of(before, None)]
    return rows + [row for row in older if row["max_nbytes"] is None or row["max_nbytes"] > max(measurements)]


def row_of(candidate: Shape, max_nbytes: int | None) -> dict:
    """Returns the row of a table by which calls of up to ``max_nbytes`` take ``candidate``; None: of any size."""
    row = {
        "max_nbytes": max_nbytes,
        "algorithm": candidate.algorithm.value,
        "blocks": candidate.blocks,
        "threads": candidate.threads,
    }
    return row | ({"chunk": candidate.chunk} if candidate.chunk else {})


def update(
    old: Table,
    new: Table,
    measurements: Mapping[int, Measurements],
    codec_times: Mapping[int, CodecTimes] | None = None,
) -> Table:
    """Returns ``new``, which has a name, machine, date, report and chip, with the measured rows and points.

    Sizes above the largest measured one have the rows and points of ``old``, or of the default table. World sizes and
    codecs that were not measured are taken from ``old`` if it has the same name. All other sections come from
    ``old``, the table in use until now: trials (graphar.plan.trials) begin from them.
    """
    before = (old.rows, old.measured, old.codecs) if old.name == new.name else ({}, {}, {})
    new = replace(new, parts=old.parts, **{name: getattr(old, name) for name in POLICIES if name != "chip"})
    rows, points, codecs = map(dict, before)
    for world_size, by_size in measurements.items():
        served = serving(old, world_size)
        rows[world_size] = rows_from(by_size, served.rows[world_size])
        above = [point for point in served.measured.get(world_size, []) if point[0] > max(by_size)]
        points[world_size] = _points({nbytes: us for nbytes, (_, us) in pick(by_size).items()}) + above
    for world_size, times in (codec_times or {}).items():
        codecs[world_size] = codecs.get(world_size, {}) | {text: _points(by_size) for text, by_size in times.items()}
    return replace(new, rows=rows, measured=points, codecs=codecs)


def _points(times: Mapping[int, float]) -> list[list]:
    return [[nbytes, round(us, 3)] for nbytes, us in sorted(times.items())]


def what_changed(old: Table, new: Table, measurements: Mapping[int, Measurements]) -> list[str]:
    """Returns a line for each measured size at which the tables choose differently, with both times if measured."""
    lines = []
    for world_size, by_size in measurements.items():
        for nbytes, times in by_size.items():
            before, after = (measured_shape(table, world_size, nbytes)[0] for table in (old, new))
            if before != after:
                known = {shape_of(row_of(one, None), world_size, nbytes): us for one, us in times.items()}
                shapes = " -> ".join(_describe(shape, known.get(shape)) for shape in (before, after))
                lines.append(f"{world_size} ranks, {format_nbytes(nbytes)}: {shapes}")
    return lines


def faster_codecs(table: Table, codec_times: Mapping[int, CodecTimes]) -> list[str]:
    """Returns a line for each measured codec: at which sizes it is faster than the exact all-reduce by ``table``."""
    lines = []
    for world_size, times in codec_times.items():
        for text, by_size in times.items():
            exact = {nbytes: expected_us(table, world_size, nbytes) for nbytes in by_size}
            faster = [
                f"{format_nbytes(nbytes)} ({format_us(us)} us, exact {format_us(exact[nbytes])} us)"
                for nbytes, us in by_size.items()
                if us < exact[nbytes]
            ]
            lines.append(f"{world_size} ranks, {text}: faster than exact at {', '.join(faster) or 'no size'}")
    return lines


def _describe(shape: Shape, us: float | None) -> str:
    chunk = f", chunk {shape.chunk}" if shape.chunk else ""
    time = "not measured" if us is None else f"{format_us(us)} us"
    return f"{shape.algorithm.value} ({shape.blocks} blocks of {shape.threads}{chunk}), {time}"
