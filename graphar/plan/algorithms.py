"""The algorithms, and a row for each that says what it needs and what it can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Literal

import torch

from graphar.numerics.codecs import TILE_NUMEL
from graphar.numerics.dtypes import BYTE
from graphar.numerics.norms import ALLREDUCE_NORM, NORM_OUTPUTS, REDUCESCATTER_NORM
from graphar.plan import grids
from graphar.plan import scratch as layouts
from graphar.plan.policy import Policies
from graphar.plan.row import MAX_THREADS, Grid, Row
from graphar.plan.scratch import PACK_NBYTES, Sizes, packs_a_part
from graphar.plan.sizes import KB, MB
from graphar.plan.tiles import GATHERED_TILES, SKINNY_TILES, SUMMED_TILES
from graphar.plan.work import ALLGATHER_MATMUL, MATMUL_ALLREDUCE, MATMUL_REDUCESCATTER, TensorTuple, template_of


class Algorithm(StrEnum):
    """The algorithms of all ops. All exact algorithms of one op give the same bits; the multimem ones are not exact.

    An algorithm with a codec on the wire gives the bits of the op with that codec. The hierarchical algorithm adds host
    by host: it gives the same bits on every rank, but other bits than the other all-reduces.

    :func:`graphar.load_algorithm` adds algorithms from outside the package. They have a value but no attribute of this
    class, and iteration leaves them out.
    """

    ONE_SHOT_PUSH = "one_shot_push"
    ONE_SHOT = "one_shot"
    TWO_SHOT_PUSH = "two_shot_push"
    TWO_SHOT_PIPELINED = "two_shot_pipelined"
    TWO_SHOT_TMA = "two_shot_tma"
    TWO_SHOT_LOSSLESS = "two_shot_lossless"
    TWO_SHOT_COPIES = "two_shot_copies"
    MULTIMEM_ONE_SHOT = "multimem_one_shot"
    MULTIMEM_TWO_SHOT = "multimem_two_shot"
    REDUCESCATTER_PUSH = "reducescatter_push"
    REDUCESCATTER_COPIES = "reducescatter_copies"
    ALLGATHER_FLAGGED = "allgather_flagged"
    ALLGATHER_PUSH = "allgather_push"
    ALLGATHER_LOSSLESS = "allgather_lossless"
    ALLGATHER_COPIES = "allgather_copies"
    ALLTOALL_FLAGGED = "alltoall_flagged"
    ALLTOALL_PUSH = "alltoall_push"
    ALLTOALL_COPIES = "alltoall_copies"
    QUANTIZED_TWO_SHOT_PUSH = "quantized_two_shot_push"
    QUANTIZED_TWO_SHOT_PIPELINED = "quantized_two_shot_pipelined"
    QUANTIZED_REDUCESCATTER = "quantized_reducescatter"
    MATMUL_REDUCESCATTER = "matmul_reducescatter"
    MATMUL_ALLREDUCE = "matmul_allreduce"
    MATMUL_ONE_SHOT = "matmul_one_shot"
    MATMUL_TWO_SHOT = "matmul_two_shot"
    ALLGATHER_MATMUL = "allgather_matmul"
    ALLREDUCE_RMSNORM_ONE_SHOT = "allreduce_rmsnorm_one_shot"
    ALLREDUCE_RMSNORM_TWO_SHOT = "allreduce_rmsnorm_two_shot"
    REDUCESCATTER_RMSNORM = "reducescatter_rmsnorm"
    FALLBACK = "fallback"
    HIERARCHICAL = "hierarchical"

    @classmethod
    def _missing_(cls, value: object) -> Algorithm | None:
        algorithm = next((loaded for loaded in ROWS if loaded == value), None)
        if algorithm is None and is_from_outside(value):
            raise ValueError(f"algorithm {value!r} is not loaded in this process; graphar.load_algorithm loads it")
        return algorithm

    def __reduce_ex__(self, protocol: object) -> tuple[type[Algorithm], tuple[str]]:
        return Algorithm, (self.value,)  # some releases of Python 3.11 pickle and copy a member as an attribute

    @property
    def number(self) -> int:
        """The number by which a kernel's time-out record names the algorithm. Processes may differ in it."""
        return list(ROWS).index(self)

    @property
    def kernel_name(self) -> str:
        """The name of its kernel's file, without the suffix, and of the function in it."""
        return self.value.partition(_BEFORE_DIGEST)[0]

    @property
    def row(self) -> Row:
        """The row that says what the algorithm needs and what it can do."""
        return ROWS[self]

    @property
    def op(self) -> str:
        """The op that it computes. The fallback computes every op, but only all-reduces take it by name."""
        return ROWS[self].op

    @property
    def exact(self) -> bool:
        """Whether it adds in rank order and rounds once, or moves bits unchanged."""
        return ROWS[self].exact


# What ``algorithm`` of each op takes, for type checkers: the names of the rows. :data:`NAMED` has them at run time.
AllReduceAlgorithm = (
    Algorithm
    | Literal["auto", "one_shot_push", "one_shot", "two_shot_push", "two_shot_pipelined"]
    | Literal["two_shot_tma", "two_shot_lossless", "two_shot_copies", "multimem_one_shot", "multimem_two_shot"]
    | Literal["fallback", "hierarchical"]
)
ReduceScatterAlgorithm = Algorithm | Literal["auto", "reducescatter_push", "reducescatter_copies"]
AllGatherAlgorithm = (
    Algorithm | Literal["auto", "allgather_flagged", "allgather_push", "allgather_lossless", "allgather_copies"]
)
AllToAllAlgorithm = Algorithm | Literal["auto", "alltoall_flagged", "alltoall_push", "alltoall_copies"]


_BEFORE_DIGEST = "@"  # in the value of an algorithm from outside the package, between kernel_name and a digest


def is_from_outside(name: object) -> bool:
    """Whether a name belongs to an algorithm from outside the package, loaded or not."""
    return isinstance(name, str) and _BEFORE_DIGEST in name


def is_loaded(name: object) -> bool:
    """Whether an algorithm, builtin or from outside the package, can be called in this process."""
    return name in ROWS


def of_number(number: int) -> Algorithm:
    """Returns the algorithm that a record of this process names by a number."""
    return list(ROWS)[number]


def add(kernel_name: str, digest: str, row: Row) -> Algorithm:
    """Returns the algorithm of a kernel from outside the package: the earlier algorithm of its name, or a new one.

    ``digest`` stands for the source and the row: ranks that loaded different kernels get different names. An earlier
    algorithm keeps its row, but for the folder in which its file lies now.
    """
    name, named = f"{kernel_name}{_BEFORE_DIGEST}{digest}", NAMED[row.op]
    if name not in named:
        named[name] = made = str.__new__(Algorithm, name)
        made._name_ = made._value_ = name
    ROWS[named[name]] = replace(ROWS.get(named[name], row), folder=row.folder)
    return named[name]


MATMUL_TYPES = (torch.bfloat16, torch.float16)
MATMUL_ARCH = "sm_90a"  # wgmma exists on Hopper only
TUPLE_VARIANT = template_of(TensorTuple((), (), ()))
_NORM_VARIANTS = tuple(f"{cluster}, {output}" for cluster in grids.CLUSTERS for output in NORM_OUTPUTS)
_NARROW_TO_WIDE = grids.each_of((128, 0), (256, 0), (512, 0))

_allreduce = partial(Row, "allreduce", "allreduce", half_sm_threads=MAX_THREADS)
_moved = partial(Row, folder="scatter_gather", dtypes=(BYTE,), half_sm_threads=MAX_THREADS)
_quantized_allreduce = partial(Row, "allreduce", "quantized", takes_codec=True, half_sm_threads=MAX_THREADS // 2)
_norm = partial(Row, folder="norm", variants=_NORM_VARIANTS, half_sm_threads=MAX_THREADS, adds_tree=True)


def rows(sizes: Sizes) -> dict[Algorithm, Row]:
    """Returns a row for every algorithm; ``sizes`` are the sizes of their scratch."""
    made = {
        **_one_shot_rows(sizes),
        **_two_shot_rows(sizes),
        **_scatter_gather_rows(sizes),
        **_copied_rows(sizes),
        **_quantized_rows(sizes),
        **_matmul_rows(sizes),
        **_norm_rows(sizes),
        Algorithm.FALLBACK: Row("allreduce"),
        Algorithm.HIERARCHICAL: Row("allreduce", across_hosts=True),
    }
    return {algorithm: made[algorithm] for algorithm in Algorithm}


def _up_to(nbytes: int) -> Callable[[int], int]:
    return lambda world_size: nbytes


def _pushed_limit(sizes: Sizes) -> Callable[[int], int]:
    return lambda world_size: sizes.pushed_nbytes_of_two if world_size == 2 else sizes.pushed_nbytes


def _a_shard(nbytes: int) -> Callable[[int], int]:
    return lambda world_size: packs_a_part(-(-nbytes // PACK_NBYTES), world_size) * PACK_NBYTES


def _one_shot_rows(sizes: Sizes) -> dict[Algorithm, Row]:
    packs, limit, pushed = sizes.one_shot_nbytes // PACK_NBYTES, _up_to(sizes.one_shot_nbytes), _pushed_limit(sizes)
    return {
        Algorithm.ONE_SHOT_PUSH: _allreduce(
            partial(layouts.rotating, pushed, 2),
            pushed,
            takes_epilogue=True,
            adds_tree=True,
            candidates=grids.in_filled_blocks,
            tells=True,
        ),
        Algorithm.ONE_SHOT: _allreduce(
            partial(layouts.signalled, packs, 2, packs_of_rank=layouts.ONE_SHOT_DEPTH * layouts.ONE_SHOT_THREADS),
            limit,
            max_threads=layouts.ONE_SHOT_THREADS,
            variants=(str(layouts.ONE_SHOT_DEPTH),),
            candidates=grids.each_of((128, 0), (256, 0)),
        ),
        # For tests, the stand-in replaces multimem instructions by ordinary accesses.
        Algorithm.MULTIMEM_ONE_SHOT: _allreduce(
            partial(layouts.signalled, packs, 2), limit, multimem=True, variants=("Hardware", "StandIn")
        ),
    }


def _two_shot_rows(sizes: Sizes) -> dict[Algorithm, Row]:
    limit, slots = _up_to(sizes.two_shot_nbytes), 2 * layouts.PIPELINE_DEPTH * sizes.pipeline_blocks  # for two phases
    pieces = partial(layouts.bulk_copied, sizes.tma_channels, sizes.tma_channel_nbytes)
    return {
        Algorithm.TWO_SHOT_PUSH: _allreduce(
            partial(layouts.rotating, _a_shard(sizes.two_shot_nbytes), 4),
            limit,
            takes_epilogue=True,
            adds_tree=True,
            candidates=grids.in_groups,
            smallest_nbytes=64 * KB,
            in_groups=True,
            tells=True,
        ),
        Algorithm.TWO_SHOT_PIPELINED: _allreduce(
            partial(layouts.pipelined, sizes.pipeline_chunk, slots),
            max_blocks=sizes.pipeline_blocks,
            direct=True,
            takes_epilogue=True,
            adds_tree=True,
            variants=(None, "direct"),
            candidates=grids.each_of((512, 1024), (512, 2048)),
            smallest_nbytes=16 * MB,
            default_grid=lambda world_size, nbytes: Grid(128, 256, 512),
        ),
        Algorithm.TWO_SHOT_TMA: _allreduce(
            pieces,
            minimum_arch=90,
            max_threads=layouts.TMA_THREADS,
            half_sm_threads=0,
            only_threads=layouts.TMA_THREADS,
            max_blocks=layouts.TMA_BLOCKS,
            candidates=lambda world_size, nbytes: [(layouts.TMA_THREADS, pieces(world_size).capacity)],
            smallest_nbytes=4 * MB,
            default_grid=lambda world_size, nbytes: Grid(16, layouts.TMA_THREADS, pieces(world_size).capacity),
            packs_a_block=lambda world_size, threads, chunk: sizes.tma_channels * chunk * world_size,
        ),
        Algorithm.TWO_SHOT_LOSSLESS: _lossless(sizes, "allreduce"),
        Algorithm.MULTIMEM_TWO_SHOT: _allreduce(
            partial(layouts.signalled, sizes.two_shot_nbytes // PACK_NBYTES, 1),
            limit,
            multimem=True,
            variants=("Hardware", "StandIn"),
            packs_a_block=lambda world_size, threads, chunk: threads * world_size,  # a thread has a pack of each shard
        ),
    }


def _lossless(sizes: Sizes, op: str) -> Row:
    """Returns the row of an algorithm that compresses."""
    slot = sizes.lossless_chunk * layouts.LOSSLESS_TILE_NBYTES // PACK_NBYTES
    packs = 2 * TILE_NUMEL // PACK_NBYTES  # of a tile
    is_sum = op == "allreduce"
    depth = 2 * layouts.PIPELINE_DEPTH if is_sum else layouts.PUSH_DEPTH
    return Row(
        op,
        "allreduce" if is_sum else "scatter_gather",
        partial(layouts.pipelined, slot, depth * sizes.pipeline_blocks),
        dtypes=(torch.bfloat16,),
        max_blocks=sizes.pipeline_blocks,
        compresses=True,
        default_grid=lambda world_size, nbytes: Grid(sizes.pipeline_blocks, 512, sizes.lossless_chunk),
        packs_a_block=lambda world_size, threads, chunk: chunk * packs * (world_size if is_sum else 1),
    )


def _scatter_gather_rows(sizes: Sizes) -> dict[Algorithm, Row]:
    def flagged(op: str) -> Row:
        return _moved(
            op,
            layout=partial(layouts.flagged, sizes.allgather_flagged_nbytes),
            limit=_up_to(sizes.allgather_flagged_nbytes),
            candidates=_NARROW_TO_WIDE,
            tells=True,
        )

    def pushed(op: str, more_packs: int = 0) -> Row:
        slot = sizes.allgather_chunk + more_packs
        return _moved(
            op,
            layout=partial(layouts.pipelined, slot, layouts.PUSH_DEPTH * sizes.allgather_blocks),
            max_blocks=sizes.allgather_blocks,
            candidates=grids.each_of((512, 512), (512, 1024), (512, 2048)),
            default_grid=lambda world_size, nbytes: Grid(128, 256, 512),
            packs_a_block=lambda world_size, threads, chunk: chunk,
        )

    return {
        Algorithm.REDUCESCATTER_PUSH: Row(
            "reducescatter",
            "scatter_gather",
            partial(layouts.rotating, _a_shard(sizes.reducescatter_nbytes), 2),
            fills_slots=True,
            half_sm_threads=MAX_THREADS,
            takes_epilogue=True,
            adds_tree=True,
            candidates=_NARROW_TO_WIDE,
            tells=True,
        ),
        Algorithm.ALLGATHER_LOSSLESS: _lossless(sizes, "allgather"),
        Algorithm.ALLGATHER_FLAGGED: replace(flagged("allgather"), variants=(None, TUPLE_VARIANT)),
        Algorithm.ALLGATHER_PUSH: replace(pushed("allgather"), variants=(None, TUPLE_VARIANT)),
        Algorithm.ALLTOALL_FLAGGED: flagged("alltoall"),
        Algorithm.ALLTOALL_PUSH: pushed("alltoall", layouts.PACKS_A_LINE),  # the first chunk has a header
    }


def _copied_rows(sizes: Sizes) -> dict[Algorithm, Row]:
    def copied(op: str, nbytes: int = sizes.copied_nbytes, areas: int = 1, **how) -> Row:
        layout = partial(layouts.copied, nbytes, areas)
        return Row(op, layout=layout, copies=True, half_sm_threads=MAX_THREADS, policy_grid=grids.of_copies, **how)

    return {
        Algorithm.TWO_SHOT_COPIES: copied("allreduce", sizes.copied_sum_nbytes, areas=2, direct=True),
        Algorithm.REDUCESCATTER_COPIES: copied("reducescatter"),
        Algorithm.ALLGATHER_COPIES: copied("allgather", dtypes=(BYTE,), direct=True),
        Algorithm.ALLTOALL_COPIES: copied("alltoall", dtypes=(BYTE,), direct=True),
    }


def _quantized_rows(sizes: Sizes) -> dict[Algorithm, Row]:
    slot = sizes.quantized_chunk_nbytes // PACK_NBYTES

    def codes_a_shard(world_size: int) -> int:
        tiles = -(-sizes.quantized_nbytes // (2 * TILE_NUMEL * world_size))  # 16-bit elements make the most tiles
        return tiles * layouts.TILE_LARGEST_SPARING_NBYTES

    return {
        Algorithm.QUANTIZED_TWO_SHOT_PUSH: _quantized_allreduce(
            partial(layouts.rotating, codes_a_shard, 4),
            _up_to(sizes.quantized_nbytes),
            spares_a_word=True,
            policy_grid=grids.warps_for_tiles,
        ),
        Algorithm.QUANTIZED_TWO_SHOT_PIPELINED: _quantized_allreduce(
            partial(layouts.pipelined, slot, 2 * layouts.PIPELINE_DEPTH * sizes.quantized_blocks),
            max_blocks=sizes.quantized_blocks,
            policy_grid=grids.chunks_of_tiles,
        ),
        Algorithm.QUANTIZED_REDUCESCATTER: Row(
            "reducescatter",
            "quantized",
            partial(layouts.pipelined, slot, layouts.PUSH_DEPTH * sizes.quantized_blocks),
            max_blocks=sizes.quantized_blocks,
            takes_codec=True,
            policy_grid=grids.steps_of_tiles,
        ),
    }


def _matmul_rows(sizes: Sizes) -> dict[Algorithm, Row]:
    limit = _up_to(sizes.skinny_nbytes)
    row = partial(Row, folder="matmul", dtypes=MATMUL_TYPES, only_arch=MATMUL_ARCH)
    tiled = partial(row, takes_epilogue=True)
    skinny = partial(row, MATMUL_ALLREDUCE, layout=partial(layouts.rotating, limit, 2), limit=limit, tiles=SKINNY_TILES)

    def in_one_shot(policies: Policies, world_size: int, nbytes: int) -> bool:
        policy = policies.matmul
        return nbytes <= policy.one_shot_nbytes.get(world_size, policy.one_shot_nbytes_beyond)

    return {
        Algorithm.MATMUL_REDUCESCATTER: tiled(
            MATMUL_REDUCESCATTER,
            layout=partial(layouts.matmul_boxes, 1),
            tiles=tuple(tile for tile in SUMMED_TILES if not tile.alternating),
        ),
        # The largest tiles leave too few registers to gather.
        Algorithm.MATMUL_ALLREDUCE: tiled(
            MATMUL_ALLREDUCE,
            layout=partial(layouts.matmul_boxes, 2),
            tiles=tuple(tile for tile in SUMMED_TILES if tile.rows == 64 or tile.columns < 256),
        ),
        Algorithm.MATMUL_ONE_SHOT: skinny(suits=in_one_shot),
        Algorithm.MATMUL_TWO_SHOT: skinny(),
        Algorithm.ALLGATHER_MATMUL: tiled(
            ALLGATHER_MATMUL, layout=partial(layouts.gathered_rows, layouts.GATHERED_NBYTES), tiles=GATHERED_TILES
        ),
    }


def _norm_rows(sizes: Sizes) -> dict[Algorithm, Row]:
    pushed, rotating = _pushed_limit(sizes), partial(layouts.rotating, shared_nbytes=layouts.NORM_SHARED_NBYTES)

    def a_shard_and_a_row(world_size: int) -> int:
        return (sizes.two_shot_nbytes // PACK_NBYTES // world_size + sizes.norm_row_packs) * PACK_NBYTES

    def in_one_shot(policies: Policies, world_size: int, nbytes: int) -> bool:
        return (world_size - 1) * nbytes <= policies.norm.one_shot_sent_nbytes

    return {
        Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT: _norm(
            ALLREDUCE_NORM,
            layout=partial(rotating, pushed, 2),
            limit=pushed,
            suits=in_one_shot,
            policy_grid=grids.teams_of_rows,
        ),
        Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT: _norm(
            ALLREDUCE_NORM,
            layout=partial(rotating, a_shard_and_a_row, 4),
            limit=_up_to(sizes.two_shot_nbytes),
            policy_grid=partial(grids.teams_of_rows, of_each_rank=True),
        ),
        Algorithm.REDUCESCATTER_RMSNORM: _norm(
            REDUCESCATTER_NORM,
            layout=partial(rotating, _a_shard(sizes.reducescatter_nbytes), 2),
            fills_slots=True,
            policy_grid=grids.teams_of_rows,
        ),
    }


ROWS = rows(Sizes())


def kernels_that(takes: Callable[[Row], bool]) -> tuple[Algorithm, ...]:
    """Returns the algorithms that have a kernel and whose row fulfils ``takes``."""
    return tuple(algorithm for algorithm, row in ROWS.items() if row.folder and takes(row))


def with_kernels(op: str, codec: bool = False) -> tuple[Algorithm, ...]:
    """Returns the algorithms that compute ``op`` in a kernel: with a codec on the wire if ``codec``, else without."""
    return kernels_that(lambda row: row.op == op and row.takes_codec == codec)


def in_tables(op: str) -> tuple[Algorithm, ...]:
    """Returns the algorithms of ``op`` that a tuning table may name."""
    return kernels_that(lambda row: row.op == op and row.candidates is not None)


# By op, the algorithms without a codec that a call may name, by name.
NAMED: dict[str, dict[str, Algorithm]] = {
    op: {algorithm.value: algorithm for algorithm, row in ROWS.items() if row.op == op and not row.takes_codec}
    for op in ("allreduce", "reducescatter", "allgather", "alltoall")
}
# By op, the algorithm that compresses bf16 without loss, and the one whose parts travel by copy engines.
COMPRESSING = {row.op: algorithm for algorithm, row in ROWS.items() if row.compresses}
COPYING = {row.op: algorithm for algorithm, row in ROWS.items() if row.copies}
MEETING = Algorithm.ALLGATHER_FLAGGED  # its kernel makes ranks meet before and after copies
GATHERING = Algorithm.ALLGATHER_MATMUL  # of every all-gather and matmul, whose rows its scratch takes in chunks, too
# By op, the algorithm for every call without a codec: of any size, with any option of the op, in few blocks or many.
GENERAL = {op: next(algorithm for algorithm in in_tables(op) if algorithm.row.limit(2) is None) for op in NAMED}
# By whether it adds host by host, the algorithm without a kernel of graphar.
WITHOUT_KERNEL = {row.across_hosts: algorithm for algorithm, row in ROWS.items() if not row.layout}
