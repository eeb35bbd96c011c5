"""Trials: for each measured number of a table's policies, the values to try and the calls whose times decide."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from graphar.plan.algorithms import COMPRESSING, COPYING, MATMUL_ARCH
from graphar.plan.matmuls import fills_wave
from graphar.plan.policy import Chip, MatmulPolicy
from graphar.plan.sizes import KB, MB
from graphar.plan.tables import Table
from graphar.plan.tiles import NAMED_TILES

GAIN = 0.01  # a new value must make its calls 1 % faster in total: a smaller gain is noise
COLUMNS = 4096
WEIGHTS = (  # N, K of layers on 1 to 8 GPUs
    (8192, 2048),
    (8192, 7168),
    (5120, 8192),
    (4096, 14336),
    (6144, 4096),
    (2560, 8192),
    (7168, 2048),
    (1024, 8192),
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
    by_world_size: bool = False  # whether the number belongs to one world size

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
    yield from _norm(world_size)
    yield from _beside()
    yield from _skinny(world_size)
    yield from _tiles(world_size, table.matmul)
    yield from _allgather_matmul(world_size)


def _quantized() -> Iterator[Trial]:
    def codecs(*sizes: int) -> list[Workload]:
        rows = [nbytes // (2 * COLUMNS) for nbytes in sizes]
        return [Workload("allreduce", count, codec=codec) for count in rows for codec in ("fp8_e4m3", "int4")]

    yield Trial(("quantized", "half_sm_tiles"), (1, 2, 4), codecs(1 * MB, 4 * MB, 8 * MB))
    yield Trial(("quantized", "pipelined_tiles"), (4, 8, 16), codecs(128 * MB, 256 * MB))
    yield Trial(("quantized", "many_tiles"), (2048, 8192, 32768), codecs(64 * MB, 128 * MB, 256 * MB))


def _lossless(world_size: int) -> Iterator[Trial]:
    """Yields the trial of lossless compression, with normal values.

    Whole tensors have 128 and 256 MB. Arbitrary bits are never faster compressed, and in smaller tensors they can take
    many percent longer.
    """
    for op in COMPRESSING:
        ranks = 1 if op == "allreduce" else world_size  # the number of ranks that share the whole tensor
        rows = [nbytes // (2 * COLUMNS * ranks) for nbytes in (128 * MB, 256 * MB)]  # of a part
        calls = [Workload(op, ranks * count if op == "reducescatter" else count) for count in rows]
        least = [2 * COLUMNS * count for count in rows]
        yield Trial(("lossless", f"{op}_from_nbytes", world_size), (*least, None), calls, True)


def _copies(world_size: int) -> Iterator[Trial]:
    """Yields the trials of copy engines, with fp32, which is not compressed. Whole tensors have up to 512 MB."""
    large = []
    for op, algorithm in COPYING.items():
        rows = [nbytes // (4 * COLUMNS * world_size) for nbytes in (64 * MB, 128 * MB, 256 * MB, 512 * MB)]  # of a part
        sizes = [count if op == "allgather" else world_size * count for count in rows]  # of a rank's tensor
        calls = [Workload(op, size, dtype=torch.float32) for size in sizes]
        least = [4 * COLUMNS * size for size in (sizes if op == "allreduce" else rows)]
        if op != "alltoall":  # it needs symmetric outputs, which these calls lack
            yield Trial(("copies", f"{op}_from_nbytes", world_size), (*least, None), calls, True)
        large += [replace(call, algorithm=algorithm.value) for call in calls[1:]]
    yield Trial(("copies", "sum_blocks"), (16, 32, 64), large)
    yield Trial(("copies", "chunk_nbytes"), (2 * MB, 4 * MB, 8 * MB), large)
    yield Trial(("copies", "chunks"), (4, 8, 16), large)


def _norm(world_size: int) -> Iterator[Trial]:
    rows = (8, 16, 32, 48, 64, 96, 128)
    sent = [(world_size - 1) * 2 * COLUMNS * m for m in rows]
    yield Trial(("norm", "one_shot_sent_nbytes"), sent, [Workload("allreduce_residual_rmsnorm", m) for m in rows])


def _beside() -> Iterator[Trial]:
    calls = [Workload("matmul_allreduce", rows, partition="split_m") for rows in (512, 1024, 2048, 4096)]
    yield Trial(("beside", "blocks"), (8, 16, 24, 32, 48), calls[2:])
    yield Trial(("beside", "pipelined_from_nbytes"), (256 * KB, MB, 4 * MB, 16 * MB), calls)


def _skinny(world_size: int) -> Iterator[Trial]:
    def calls(partition: str, columns: Sequence[int], rows: Sequence[int] = (1, 16, 64)) -> list[Workload]:
        return [Workload("matmul_allreduce", m, n, 2048, partition=partition) for n in columns for m in rows]

    columns = (1024, 2048, 4096, 6144, 8192)
    yield Trial(("matmul", "skinny_from_columns", world_size), [*columns, None], calls("auto", columns), True)
    yield Trial(("matmul", "skinny_least_busy"), (0.4, 0.6, 0.75, 0.9), calls("auto", [9216, 12288, 18432]))
    results = (1, 4, 8, 16, 32, 64)
    sizes = [2 * 8192 * rows for rows in results]
    yield Trial(("matmul", "one_shot_nbytes", world_size), sizes, calls("tiles", [8192], results), True)


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
    yield Trial(("matmul", "tiles_from_numel", world_size), [*numels, None], calls(all_rows, "auto"), True)
    in_codes = calls((2048, 4096, 8192), "auto", codec="int8")
    yield Trial(("matmul", "codec_tiles_from_numel", world_size), [8 * MB, 16 * MB, 32 * MB, None], in_codes, True)


def _allgather_matmul(world_size: int) -> Iterator[Trial]:
    rows = (256, 512, 1024, 2048, 4096, 8192)
    calls = [Workload("allgather_matmul", count, columns, k=8192) for count in rows for columns in (2560, 14336)]
    for partition in ("chunks", "tiles"):
        yield Trial(("allgather_matmul", f"{partition}_from_rows", world_size), (*rows, None), calls, True)


def against_torch(policy: MatmulPolicy, chip: Chip) -> Iterator[tuple[Workload, MatmulPolicy, MatmulPolicy]]:
    """Yields each shape at which torch's matmul may be faster, a policy for graphar's matmul, and one for torch's."""
    shapes = [(m, n, k) for n, k in WEIGHTS for m in ROWS_BELOW_WAVE if not fills_wave(m, n, chip.sms)]
    for m, n, k in shapes if chip.arch == MATMUL_ARCH else ():
        ours, of_torch = (replace(policy, against_torch=(), own_from_rows=rows) for rows in (m, m + 1))
        yield Workload("matmul", m, n, k), ours, of_torch
