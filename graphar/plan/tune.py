"""Tuning: makes a table of the fastest algorithm and grid at each size from measured times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter

import torch

from graphar.numerics.dtypes import BYTE
from graphar.plan.algorithms import in_tables, is_from_outside
from graphar.plan.config import Config
from graphar.plan.entries import entry_of, expected_us, fitted, measured_config, serving
from graphar.plan.explanation import format_us
from graphar.plan.policy import Chip
from graphar.plan.scratch import PACK_NBYTES
from graphar.plan.sizes import GB, KB, MB, format_nbytes
from graphar.plan.tables import POLICIES, Table

SIZES = (
    *(2 * KB, 8 * KB, 32 * KB, 64 * KB, 128 * KB, 192 * KB, 256 * KB, 384 * KB, 512 * KB),
    *(MB << power for power in range(9)),
    GB,
)
PART_SIZES = (32 * KB, 128 * KB, 256 * KB, 512 * KB, 2 * MB, 8 * MB, 32 * MB)
CODEC_SIZES = (*(32 * KB << 2 * power for power in range(6)), 64 * MB, 128 * MB, 256 * MB)  # a kernel's limit is 64 MB
_FEW = 0.1  # of the packs of a round
TOLERANCE = 0.01  # least total gain of a new entry; candidates are timed in turns, so noise is smaller

Measured = Mapping[Config, float]  # microseconds of each candidate at one size
Measurements = Mapping[int, Measured]  # by bytes of one rank's tensor
CodecTimes = Mapping[str, Mapping[int, float]]  # microseconds by codec text and bytes of one rank's bf16 tensor


def candidates(op: str, world_sizes: Sequence[int], nbytes: int, chip: Chip) -> list[Config]:
    """Returns the configurations that may be the fastest at a size, of a tensor or of the largest part.

    They have a block on all SMs but one, or the most allowed. One entry serves all of ``world_sizes``, so each is
    possible with all of them.
    """
    configs = []
    for algorithm in in_tables(op):
        row = algorithm.row
        fits = nbytes >= row.smallest_nbytes and all(row.fits(world_size, nbytes) for world_size in world_sizes)
        # Tensors of bf16 are timed. Only an algorithm from outside may lack a kernel for them, or serve fewer ranks.
        serves = set(world_sizes).issubset(row.world_sizes) and not {BYTE, torch.bfloat16}.isdisjoint(row.dtypes)
        if fits and serves and chip.is_at_least(row.minimum_arch):
            for threads, chunk in row.candidates(world_sizes[0], nbytes) if row.candidates else ():
                blocks = min(chip.shared_blocks(row.takes_half(threads)), row.max_blocks)
                rounds = nbytes / PACK_NBYTES / (blocks * threads)
                # A few packs would have a second or third round to themselves, which takes as long as any.
                if not (row.in_groups and 1 < rounds < 3 and rounds % 1 < _FEW):
                    configs.append(Config(algorithm, blocks, threads, chunk))
    return configs


def pick(measurements: Measurements) -> dict[int, tuple[Config, float]]:
    """Returns by size the candidate to take, and its time in microseconds.

    A sequence of candidates, one a size, costs its slowdowns against the fastest at each size, and TOLERANCE for each
    change of the candidate. The cheapest sequence is taken, so noise at one size makes no entry.
    """
    sizes = sorted(measurements)
    cheapest: dict[Config, tuple[float, list[Config]]] = {}  # by last candidate, the cheapest sequence and its cost
    for nbytes in sizes:
        times = measurements[nbytes]
        fastest = min(times.values())
        cost, chosen = min(cheapest.values(), key=itemgetter(0), default=(-TOLERANCE, []))
        change = cost + TOLERANCE, chosen
        before = {candidate: min(cheapest.get(candidate, change), change, key=itemgetter(0)) for candidate in times}
        cheapest = {
            last: (cost + math.log(times[last] / fastest), [*those, last]) for last, (cost, those) in before.items()
        }
    _, chosen = min(cheapest.values(), key=itemgetter(0))
    return {nbytes: (config, measurements[nbytes][config]) for nbytes, config in zip(sizes, chosen, strict=True)}


def entries_from(measurements: Measurements, older: Sequence[dict]) -> list[dict]:
    """Returns the entries of a table for one world size, by the times of at least one size.

    The ``older`` entries serve larger sizes if the algorithm of the largest measured size has a limit, or is from
    outside the package: it may not be loaded.
    """
    runs = groupby(pick(measurements).items(), key=lambda picked: picked[1][0])  # of sizes with one candidate
    largest = [(candidate, max(nbytes for nbytes, _ in run)) for candidate, run in runs]
    entries, (last, _) = [entry_of(*pair) for pair in largest], largest[-1]
    if last.algorithm.row.limit(2) is None and not is_from_outside(last.algorithm):
        return [*entries[:-1], entry_of(last, None)]
    return entries + [item for item in older if item["max_nbytes"] is None or item["max_nbytes"] > max(measurements)]


def update(
    old: Table,
    new: Table,
    measurements: Mapping[int, Measurements],
    codec_times: Mapping[int, CodecTimes] | None = None,
) -> Table:
    """Returns ``new``, which has a name, machine, date, report and chip, with the measured entries and points.

    Sizes above the largest measured one have the entries and points of ``old``, or of the default table. World sizes
    and codecs that were not measured are taken from ``old`` if it has the same name. All other sections come from
    ``old``, the table in use until now: trials (graphar.plan.trials) begin from them.
    """
    before = (old.rows, old.measured, old.codecs) if old.name == new.name else ({}, {}, {})
    new = replace(new, parts=old.parts, **{name: getattr(old, name) for name in POLICIES if name != "chip"})
    entries, points, codecs = map(dict, before)
    for world_size, by_size in measurements.items():
        served = serving(old, world_size)
        entries[world_size] = entries_from(by_size, served.rows[world_size])
        above = [point for point in served.measured.get(world_size, []) if point[0] > max(by_size)]
        points[world_size] = _points({nbytes: us for nbytes, (_, us) in pick(by_size).items()}) + above
    for world_size, times in (codec_times or {}).items():
        entries.setdefault(world_size, serving(old, world_size).rows[world_size])  # a table has no codecs without rows
        codecs[world_size] = codecs.get(world_size, {}) | {text: _points(by_size) for text, by_size in times.items()}
    return replace(new, rows=entries, measured=points, codecs=codecs)


def _points(times: Mapping[int, float]) -> list[list]:
    return [[nbytes, round(us, 3)] for nbytes, us in sorted(times.items())]


def what_changed(old: Table, new: Table, measurements: Mapping[int, Measurements]) -> list[str]:
    """Returns a line for each measured size at which the tables choose differently, with both times if measured."""
    lines = []
    for world_size, by_size in measurements.items():
        for nbytes, times in by_size.items():
            before, after = (measured_config(table, world_size, nbytes)[0] for table in (old, new))
            if before != after:
                known = {fitted(config, world_size, nbytes): us for config, us in times.items()}
                both = " -> ".join(_describe(config, known.get(config)) for config in (before, after))
                lines.append(f"{world_size} ranks, {format_nbytes(nbytes)}: {both}")
    return lines


def faster_codecs(table: Table, codec_times: Mapping[int, CodecTimes]) -> list[str]:
    """Returns a line for each measured codec: at which sizes it is faster than the exact all-reduce by ``table``."""
    lines = []
    for world_size, times in codec_times.items():
        for text, by_size in times.items():
            pairs = [(nbytes, us, expected_us(table, world_size, nbytes)) for nbytes, us in by_size.items()]
            faster = [
                f"{format_nbytes(nbytes)} ({format_us(us)} us, exact {format_us(exact)} us)"
                for nbytes, us, exact in pairs
                if exact is not None and us < exact
            ]
            known = any(exact is not None for *_, exact in pairs)
            said = f"faster than exact at {', '.join(faster) or 'no size'}" if known else "exact was not measured"
            lines.append(f"{world_size} ranks, {text}: {said}")
    return lines


def _describe(config: Config, us: float | None) -> str:
    chunk = f", chunk {config.chunk}" if config.chunk else ""
    time = "not measured" if us is None else f"{format_us(us)} us"
    return f"{config.algorithm.value} ({config.blocks} blocks of {config.threads}{chunk}), {time}"
