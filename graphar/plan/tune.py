"""Tuning: what is timed, and the table of the fastest algorithms, grids and thresholds that the times make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from graphar.numerics.dtypes import BYTE
from graphar.plan.algorithms import COMPRESSING, COPYING, MATMUL_ARCH, in_tables, is_from_outside
from graphar.plan.config import Config, format_us
from graphar.plan.matmuls import fills_wave
from graphar.plan.policy import Chip, MatmulPolicy
from graphar.plan.scratch import PACK_NBYTES
from graphar.plan.sizes import GB, KB, MB, format_nbytes
from graphar.plan.tables import Table, entry_of, expected_us, fitted, measured_config, serving
from graphar.plan.tiles import NAMED_TILES

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

    They have a block on all SMs but one, or the most allowed. Each serves all ``world_sizes``, as an entry must.
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
    """Returns ``new`` with the measured entries and points. It is ``old`` but for name, machine, date, report and chip.

    Sizes above the largest measured one have the entries and points of ``old``, or of the default table. World sizes
    and codecs that were not measured stay if ``old`` has the same name.
    """
    before = (old.rows, old.measured, old.codecs) if old.name == new.name else ({}, {}, {})
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
            before, after = (measured_config(table, world_size, nbytes) for table in (old, new))
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


GAIN = 0.01  # a new value must make its calls 1 % faster in total: a smaller gain is noise
COLUMNS = 4096
WEIGHTS = (  # N, K of layers on 1 to 8 GPUs
    *((8192, 2048), (8192, 7168), (5120, 8192), (4096, 14336)),
    *((6144, 4096), (2560, 8192), (7168, 2048), (1024, 8192)),
)
ROWS_BELOW_WAVE = (64, 128, 256, 512, 768, 1024, 1536, 2048)


@dataclass(frozen=True)
class Workload:
    """A call of one op on tensors of random values."""

    # One of "allreduce", "reducescatter", "allgather", "alltoall", "allreduce_residual_rmsnorm",
    # "matmul_allreduce", "matmul", "allgather_matmul". "matmul" is the matmul before a sum, alone.
    op: str
    rows: int  # rows of each rank's tensor; of a matmul, of the result
    columns: int = COLUMNS  # columns of each rank's tensor; of a matmul, of the result
    k: int = 4096  # columns of a matmul's operands on each rank
    codec: str = ""  # the codec's text, or an empty string
    partition: str = "auto"  # the partition of a fused matmul
    dtype: torch.dtype = torch.bfloat16
    algorithm: str = "auto"  # of "allreduce", "reducescatter", "allgather" and "alltoall"

    def __str__(self) -> str:
        codec = f" with {self.codec}" if self.codec else ""
        return f"{self.op} of {str(self.dtype).removeprefix('torch.')} [{self.rows}, {self.columns}]{codec}"


@dataclass(frozen=True)
class Trial:
    """A number of a table, the values to try, and the calls whose times depend on it."""

    path: tuple[str | int, ...]  # where the number is: the section, its field, and the field or key inside that, if any
    values: Sequence  # the values to try besides the present one; None: a table without the key
    workloads: Sequence[Workload]

    @property
    def by_world_size(self) -> bool:
        """Whether the number belongs to one world size."""
        return isinstance(self.path[-1], int)

    @property
    def name(self) -> str:
        """The number's name, such as "matmul.tiles_from_numel.2"."""
        return ".".join(map(str, self.path))


def value_at(holder: object, path: Sequence[str | int]):
    """Returns the value at a path of fields and keys; None if the key is missing."""
    for name in path:
        holder = holder.get(name) if isinstance(holder, dict) else getattr(holder, str(name))
    return holder


def with_value(holder: Any, path: Sequence[str | int], value: object) -> Any:
    """Returns ``holder``, a dataclass or a dict, with another value at a path; None removes the key."""
    name, *rest = path
    if isinstance(holder, dict):
        return {key: old for key, old in holder.items() if key != name} | ({} if value is None else {name: value})
    field = str(name)
    return replace(holder, **{field: with_value(getattr(holder, field), rest, value) if rest else value})


def choose(times: Sequence[Sequence[float]], present: int) -> int:
    """Returns the index of the value to take: the fastest, or the ``present`` one unless the gain exceeds GAIN.

    ``times`` are, for each value, the microseconds of each workload.
    """
    costs = [sum(map(math.log, of_value)) / len(of_value) for of_value in times]
    fastest = min(range(len(costs)), key=costs.__getitem__)
    return fastest if costs[fastest] < costs[present] - math.log1p(GAIN) else present


def trials(world_size: int, table: Table) -> Iterator[Trial]:
    """Yields the trials of all policies between ``world_size`` GPUs, in the order in which they build on each other.

    ``table`` has the present values. Some numbers have no trial: ``beside_from_nbytes`` and ``training`` come from
    training, ``one_shot_nbytes_beyond`` is for world sizes that were not measured, and kernels have a single
    ``alternating_tile``. The shapes of ``against_torch`` are timed one by one: :func:`against_torch` yields them.
    """
    yield from _quantized()
    yield from _lossless(world_size)
    yield from _copies(world_size)
    few = (8, 16, 32, 48, 64, 96, 128)
    sent = [(world_size - 1) * 2 * COLUMNS * rows for rows in few]
    normed = [Workload("allreduce_residual_rmsnorm", rows) for rows in few]
    yield Trial(("norm", "one_shot_sent_nbytes"), sent, normed)
    panels = [Workload("matmul_allreduce", rows, partition="split_m") for rows in (512, 1024, 2048, 4096)]
    yield Trial(("beside", "blocks"), (8, 16, 24, 32, 48), panels[2:])
    yield Trial(("beside", "pipelined_from_nbytes"), (256 * KB, MB, 4 * MB, 16 * MB), panels)
    yield from _skinny(world_size)
    yield from _tiles(world_size, table.matmul)
    many = (256, 512, 1024, 2048, 4096, 8192)
    gathered = [Workload("allgather_matmul", rows, columns, k=8192) for rows in many for columns in (2560, 14336)]
    for partition in ("chunks", "tiles"):
        yield Trial(("allgather_matmul", f"{partition}_from_rows", world_size), (*many, None), gathered)


def _quantized() -> Iterator[Trial]:
    def codecs(*sizes: int) -> list[Workload]:
        rows = [nbytes // (2 * COLUMNS) for nbytes in sizes]
        return [Workload("allreduce", count, codec=codec) for count in rows for codec in ("fp8_e4m3", "int4")]

    yield Trial(("quantized", "half_sm_tiles"), (1, 2, 4), codecs(1 * MB, 4 * MB, 8 * MB))
    yield Trial(("quantized", "pipelined_tiles"), (4, 8, 16), codecs(128 * MB, 256 * MB))
    yield Trial(("quantized", "many_tiles"), (2048, 8192, 32768), codecs(64 * MB, 128 * MB, 256 * MB))


def _lossless(world_size: int) -> Iterator[Trial]:
    """Yields the trial of lossless compression, with normal values, in whole tensors of 128 and 256 MB.

    Arbitrary bits are never faster compressed, and in smaller tensors they can take many percent longer.
    """
    for op in COMPRESSING:
        ranks = 1 if op == "allreduce" else world_size  # the number of ranks that share the whole tensor
        rows = [nbytes // (2 * COLUMNS * ranks) for nbytes in (128 * MB, 256 * MB)]  # of a part
        calls = [Workload(op, count) for count in rows]
        least = [2 * COLUMNS * count for count in rows]
        yield Trial(("lossless", f"{op}_from_nbytes", world_size), (*least, None), calls)


def _copies(world_size: int) -> Iterator[Trial]:
    """Yields the trials of copy engines, with fp32, which is not compressed. Whole tensors have up to 512 MB."""
    large = []
    for op, algorithm in COPYING.items():
        rows = [nbytes // (4 * COLUMNS * world_size) for nbytes in (64 * MB, 128 * MB, 256 * MB, 512 * MB)]  # of a part
        sizes = [count if op == "allgather" else world_size * count for count in rows]  # of a rank's tensor
        calls = [Workload(op, size, dtype=torch.float32) for size in sizes]
        least = [4 * COLUMNS * size for size in (sizes if op == "allreduce" else rows)]
        if op != "alltoall":  # it needs symmetric outputs, which these calls lack
            yield Trial(("copies", f"{op}_from_nbytes", world_size), (*least, None), calls)
        large += [replace(call, algorithm=algorithm.value) for call in calls[1:]]
    yield Trial(("copies", "sum_blocks"), (16, 32, 64), large)
    yield Trial(("copies", "chunk_nbytes"), (2 * MB, 4 * MB, 8 * MB), large)
    yield Trial(("copies", "chunks"), (4, 8, 16), large)


def _skinny(world_size: int) -> Iterator[Trial]:
    def calls(partition: str, columns: Sequence[int], rows: Sequence[int] = (1, 16, 64)) -> list[Workload]:
        return [Workload("matmul_allreduce", m, n, 2048, partition=partition) for n in columns for m in rows]

    columns = (1024, 2048, 4096, 6144, 8192)
    yield Trial(("matmul", "skinny_from_columns", world_size), [*columns, None], calls("auto", columns))
    yield Trial(("matmul", "skinny_least_busy"), (0.4, 0.6, 0.75, 0.9), calls("auto", [9216, 12288, 18432]))
    results = (1, 4, 8, 16, 32, 64)
    sizes = [2 * 8192 * rows for rows in results]
    yield Trial(("matmul", "one_shot_nbytes", world_size), sizes, calls("tiles", [8192], results))


def _tiles(world_size: int, policy: MatmulPolicy) -> Iterator[Trial]:
    def calls(rows: Sequence[int], partition: str = "tiles", ks: Sequence[int] = (2048, 4096), codec: str = ""):
        return [Workload("matmul_allreduce", m, k=k, partition=partition, codec=codec) for m in rows for k in ks]

    small, large, all_rows = (128, 256, 512), (1024, 2048, 4096), (256, 512, 1024, 2048, 4096, 8192)
    yield Trial(("matmul", "own_from_rows"), (32, 64, 128), calls((32, 64), "split_n", [2048]))
    # The estimate chooses the tiles of small fused kernels, and of graphar's matmul by itself.
    alone = [Workload("matmul", m, n, k) for m in (512, *large) for n, k in ((8192, 2048), (5120, 8192))]
    for name, present in asdict(policy.cost).items():
        near = (1.0, 1.1, 1.2) if name == "clustered" else (present / 2, 2 * present)
        yield Trial(("matmul", "cost", name), near, [*calls(small), *alone])
    shared = [tile for tile in NAMED_TILES if not tile.alternating]
    yield Trial(("matmul", "small_tile"), shared, calls((1024,), ks=[4096, 8192]))
    yield Trial(("matmul", "large_tile"), shared, calls((2048, 4096), ks=[4096, 8192]))
    yield Trial(("matmul", "estimated_below_numel"), (MB, 2 * MB, 4 * MB, 8 * MB), calls((256, 512, 1024, 2048)))
    yield Trial(("matmul", "large_from_numel"), (4 * MB, 8 * MB, 16 * MB), calls(large, ks=[4096, 8192]))
    yield Trial(("matmul", "alternating_below_k"), (2048, 4096, 8192), calls(large, ks=[1024, 2048, 4096, 7168]))
    numels = [rows * COLUMNS for rows in all_rows]
    yield Trial(("matmul", "tiles_from_numel", world_size), [*numels, None], calls(all_rows, "auto"))
    in_codes = calls((2048, 4096, 8192), "auto", codec="int8")
    yield Trial(("matmul", "codec_tiles_from_numel", world_size), [8 * MB, 16 * MB, 32 * MB, None], in_codes)


def against_torch(policy: MatmulPolicy, chip: Chip) -> Iterator[tuple[Workload, MatmulPolicy, MatmulPolicy]]:
    """Yields each shape at which torch's matmul may be faster, a policy for graphar's matmul, and one for torch's."""
    shapes = [(m, n, k) for n, k in WEIGHTS for m in ROWS_BELOW_WAVE if not fills_wave(m, n, chip.sms)]
    for m, n, k in shapes if chip.arch == MATMUL_ARCH else ():
        ours, of_torch = (replace(policy, against_torch=(), own_from_rows=rows) for rows in (m, m + 1))
        yield Workload("matmul", m, n, k), ours, of_torch
