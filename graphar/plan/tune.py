"""Tuning: which algorithm and grid is the fastest at each size on this machine, as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from graphar.numerics.codecs import Codec
from graphar.plan.algorithms import PACK_NBYTES, PIPELINE_BLOCKS, WARP, Algorithm, Shape, largest_nbytes, most_threads
from graphar.plan.chooser import choose, choose_quantized, expected_us, serving, shape_of
from graphar.plan.explanation import format_us
from graphar.plan.sizes import GB, KB, MB, format_nbytes
from graphar.plan.tables import Table

SIZES = (
    *(2 * KB, 8 * KB, 32 * KB, 64 * KB, 128 * KB, 192 * KB, 256 * KB, 384 * KB, 512 * KB),
    *(MB << power for power in range(9)),
    GB,
)
CODEC_SIZES = (*(32 * KB << 2 * power for power in range(6)), 64 * MB, 128 * MB, 256 * MB)  # a kernel ends at 64 MB
TOLERANCE = 0.01  # what a new row must gain, in all: candidates take turns, so that more is no noise

Measured = Mapping[Shape, float]  # microseconds of candidates at one size
Measurements = Mapping[int, Measured]  # by bytes of one rank's tensor
CodecTimes = Mapping[str, Mapping[int, float]]  # by a codec's text and bytes of one rank's bf16 tensor


# ---- candidates -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """An algorithm that can be the fastest.

    Attributes:
        algorithm: which.
        smallest_nbytes: where it begins to be one.
        grids: for a world size and a size in bytes, threads of a block and packs of a chunk to try.
    """

    algorithm: Algorithm
    smallest_nbytes: int
    grids: Callable[[int, int], Iterable[tuple[int, int]]]


def _one_shot_push_grids(world_size: int, nbytes: int) -> Iterator[tuple[int, int]]:
    # Few full blocks leave most of the links' bandwidth unused, which counts once the size does.
    fewest_blocks = 16 if nbytes > 64 * KB else 1
    for threads in (64, 128, 256, 512, 1024):
        if nbytes >= fewest_blocks * threads * PACK_NBYTES and (threads > 64 or nbytes <= 32 * KB):
            yield threads, 0


def _two_shot_push_grids(world_size: int, nbytes: int) -> Iterator[tuple[int, int]]:
    most = most_threads(Algorithm.TWO_SHOT_PUSH) // world_size // WARP * WARP  # a group for every owner
    widths = {width for width in (32, 64, 128, 256, 512) if width <= most} | {most}
    return ((width * world_size, 0) for width in sorted(widths))


FAMILIES = (
    Family(Algorithm.ONE_SHOT_PUSH, 0, _one_shot_push_grids),
    Family(Algorithm.TWO_SHOT_PUSH, 64 * KB, _two_shot_push_grids),
    Family(Algorithm.TWO_SHOT_PIPELINED, 16 * MB, lambda world_size, nbytes: [(512, 1024), (512, 2048)]),
)


def candidates(world_size: int, nbytes: int) -> list[Shape]:
    """What may be the fastest at a size, each with the most blocks it may have."""
    found = []
    for family in FAMILIES:
        largest = largest_nbytes(family.algorithm, world_size)
        if family.smallest_nbytes <= nbytes and (largest is None or nbytes <= largest):
            grids = family.grids(world_size, nbytes)
            found += [Shape(family.algorithm, PIPELINE_BLOCKS, threads, chunk) for threads, chunk in grids]
    return found


def measure(world_size: int, sizes: Sequence[int], done: Callable[[str], None]) -> Measurements:
    """Times every candidate at every size on the first ``world_size`` GPUs; calls ``done`` after each size.

    Raises:
        GrapharError: a candidate's result is wrong, a kernel timed out, or the GPUs cannot reach each other.
    """
    from graphar.cli.timing import Timer

    measurements = {}
    with Timer(world_size) as timer:
        for nbytes in sizes:
            tried = candidates(world_size, nbytes)
            shapes = [shape_of(row_of(candidate, None), world_size, nbytes) for candidate in tried]
            measurements[nbytes] = dict(zip(tried, timer.measure(nbytes, shapes), strict=True))
            done(f"{world_size} GPUs, {format_nbytes(nbytes)}")
    return measurements


def measure_codecs(
    world_size: int, sizes: Sequence[int], codecs: Sequence[Codec], done: Callable[[str], None]
) -> CodecTimes:
    """As :func:`measure`, of what is chosen for each of ``codecs``, which round to nearest."""
    from graphar.cli.timing import DTYPE, Timer

    times: dict[str, dict[int, float]] = {codec.text: {} for codec in codecs}
    with Timer(world_size) as timer:
        for nbytes in sizes:
            for codec in codecs:
                shape = choose_quantized(codec, world_size, nbytes // DTYPE.itemsize, DTYPE.itemsize)
                (times[codec.text][nbytes],) = timer.measure(nbytes, [shape])
            done(f"{world_size} GPUs, {format_nbytes(nbytes)}, codecs")
    return times


# ---- tables ---------------------------------------------------------------------------------------------------------


def pick(measurements: Measurements) -> dict[int, tuple[Shape, float]]:
    """By size the candidate to take, and its time.

    The slowdowns against the fastest at each size add up, and so does TOLERANCE for each change from one size to the
    next: of all ways through the sizes, the cheapest, so that noise at one size makes no row.
    """
    sizes = sorted(measurements)
    ways: dict[Shape, tuple[float, list[Shape]]] = {}  # the cheapest that ends with a candidate: its cost, its choices
    for nbytes in sizes:
        times = measurements[nbytes]
        fastest = min(times.values())
        cost, chosen = min(ways.values(), key=itemgetter(0), default=(-TOLERANCE, []))
        change = cost + TOLERANCE, chosen
        before = {candidate: min(ways.get(candidate, change), change, key=itemgetter(0)) for candidate in times}
        ways = {one: (cost + math.log(times[one] / fastest), [*way, one]) for one, (cost, way) in before.items()}
    _, chosen = min(ways.values(), key=itemgetter(0))
    return {nbytes: (one, measurements[nbytes][one]) for nbytes, one in zip(sizes, chosen, strict=True)}


def rows_from(measurements: Measurements, older: Sequence[dict]) -> list[dict]:
    """The rows of a table for one world size.

    Args:
        measurements: of at least one size.
        older: rows for the sizes above those measured, should the last of these have an algorithm with a limit.
    """
    rows: list[dict] = []
    before = None
    for nbytes, (candidate, _) in pick(measurements).items():
        if candidate == before:
            rows.pop()
        rows.append(row_of(candidate, nbytes))
        before = candidate
    if largest_nbytes(before.algorithm, 2) is None:
        return [*rows[:-1], row_of(before, None)]
    return rows + [row for row in older if row["max_nbytes"] is None or row["max_nbytes"] > max(measurements)]


def row_of(candidate: Shape, max_nbytes: int | None) -> dict:
    """The row of a table that has calls of up to ``max_nbytes`` take ``candidate``."""
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
    """``new`` with rows and points from what was measured, by world size, and what else ``old`` has, if named alike.

    Above the largest measured size the rows and points that served before go on.
    """
    before = (old.rows, old.measured, old.codecs) if old.name == new.name else ({}, {}, {})
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
    """A line for each measured size at which the tables choose differently, with both times as far as measured."""
    lines = []
    for world_size, by_size in measurements.items():
        for nbytes, times in by_size.items():
            before, after = (choose(table, world_size, nbytes)[0] for table in (old, new))
            if before != after:
                known = {shape_of(row_of(one, None), world_size, nbytes): us for one, us in times.items()}
                ways = " -> ".join(_describe(shape, known.get(shape)) for shape in (before, after))
                lines.append(f"{world_size} ranks, {format_nbytes(nbytes)}: {ways}")
    return lines


def what_pays(table: Table, codec_times: Mapping[int, CodecTimes]) -> list[str]:
    """A line for each measured codec: at which sizes it is faster than ``table`` expects the exact all-reduce to be."""
    lines = []
    for world_size, times in codec_times.items():
        for text, by_size in times.items():
            exact = {nbytes: expected_us(table, world_size, nbytes) for nbytes in by_size}
            pays = [
                f"{format_nbytes(nbytes)} ({format_us(us)} us, exact {format_us(exact[nbytes])} us)"
                for nbytes, us in by_size.items()
                if us < exact[nbytes]
            ]
            lines.append(f"{world_size} ranks, {text}: faster than exact at {', '.join(pays) or 'no size'}")
    return lines


def _describe(shape: Shape, us: float | None) -> str:
    chunk = f", chunk {shape.chunk}" if shape.chunk else ""
    time = "not measured" if us is None else f"{format_us(us)} us"
    return f"{shape.algorithm.value} ({shape.blocks} blocks of {shape.threads}{chunk}), {time}"
