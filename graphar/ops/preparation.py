"""Loads the kernels of later calls, and allocates their scratch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from graphar.numerics import leaf_tree
from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.numerics.fp8_products import FP8
from graphar.numerics.partitions import TP_INVARIANT
from graphar.plan import select
from graphar.plan.algorithms import MATMUL_ARCH, MATMUL_TYPES, Algorithm, with_kernels
from graphar.plan.matmuls import scaled_tiles
from graphar.plan.tiles import PARTIAL_TILES, for_wire
from graphar.plan.work import SCALES, Product
from graphar.product.fused import load_tile, sources_of_tile
from graphar.product.tile_launches import Tile
from graphar.runtime.engine import Engine

NeededTile = tuple[Algorithm, torch.dtype, Tile, Product]  # the product has no shape


def prepare(
    engine: Engine,
    ops: Sequence[str],
    dtypes: Iterable[torch.dtype],
    max_nbytes: int | None,
    codecs: Sequence[Codec] = (),
    epilogues: Sequence[Pointwise] = (),
    tp_invariant: bool = False,
) -> None:
    """Compiles and loads the kernels of later calls of ``ops``, and allocates their scratch. Collective.

    It takes the arguments of graphar.Communicator.prepare, checked.
    """
    if tp_invariant:
        leaf_tree.check_ranks("prepare", engine.world_size)
    dtypes = list(dtypes)
    added = [dtype for dtype in dtypes if dtype in TYPE_NAMES]
    named = ", and e4m3 operands" if FP8 in dtypes else ""
    named += f", codecs {[codec.text for codec in codecs]}" if codecs else ""
    named += f", epilogues {[one.text for one in epilogues]}" if epilogues else ""
    named += ", tensor-parallel invariant" if tp_invariant else ""
    with engine.keeping_failure("prepare"):
        engine.compare("prepare", f"of {ops} for {added}, max_nbytes {max_nbytes}{named}")
        if not engine.find_runner(engine.first_device()):
            return
        facts = select.Facts(engine.world_size, engine.table, engine.runner.chip, lossless=engine.lossless)
        symmetric = engine.symmetric is not None
        kernels = list(select.needed_kernels(facts, ops, added, max_nbytes, codecs, epilogues, symmetric, tp_invariant))
        tiles = list(_needed_tiles(engine, ops, dtypes, codecs, epilogues, tp_invariant))
        of_tiles = [sources_of_tile(engine.world_size, *tile).values() for tile in tiles]
        loaded = engine.runner.kernels
        loaded.compile(itertools.chain(map(loaded.source_of, kernels), *of_tiles))
        for kernel in kernels:
            loaded.prepare(kernel)
        for tile in tiles:
            load_tile(engine.runner, *tile)


def _needed_tiles(
    engine: Engine,
    ops: Sequence[str],
    dtypes: Sequence[torch.dtype],
    codecs: Sequence[Codec],
    epilogues: Sequence[Pointwise],
    tp_invariant: bool,
) -> Iterator[NeededTile]:
    """Yields the fused kernels of every tile that calls of ``ops`` may take."""
    if engine.runner.chip.arch != MATMUL_ARCH:
        return
    results = [one for one in dtypes if one in MATMUL_TYPES]
    algorithms = [one for op in ops for one in with_kernels(op) if one.row.tiles]
    yield from _tiles(algorithms, results, codecs, epilogues)
    if tp_invariant:
        yield from _tree_tiles(engine, [one for one in algorithms if one.row.sends_tiles], results, epilogues)
    if FP8 in dtypes:
        yield from _scaled_tiles(algorithms, results or [torch.bfloat16], epilogues)


def _tiles(
    algorithms: Sequence[Algorithm], dtypes: Sequence[torch.dtype], codecs: Sequence[Codec], epilogues
) -> Iterator[NeededTile]:
    given = [(None, None), *((one, None) for one in codecs), *((None, one) for one in epilogues)]
    for algorithm, (codec, epilogue) in itertools.product(algorithms, given):
        row, text = algorithm.row, codec.text if codec else ""
        takes = row.sends_tiles if codec else row.takes_epilogue if epilogue else True
        for tile, dtype in itertools.product(for_wire(row.tiles, codec) if takes else (), dtypes):
            yield algorithm, dtype, tile, Product(row.op, (), 1, codec=text, epilogue=epilogue)


def _scaled_tiles(algorithms: Sequence[Algorithm], results: Sequence[torch.dtype], epilogues) -> Iterator[NeededTile]:
    """Yields the fused kernels of e4m3 operands with scales, of results with these dtypes."""
    for algorithm, epilogue, scales in itertools.product(algorithms, (None, *epilogues), SCALES):
        takes = epilogue is None or algorithm.row.takes_epilogue
        work = Product(algorithm.op, (), 1, epilogue=epilogue, scales=scales)
        for tile, dtype in itertools.product(scaled_tiles(algorithm) if takes else (), results):
            yield algorithm, dtype, tile, work


def _tree_tiles(
    engine: Engine, algorithms: Sequence[Algorithm], dtypes: Sequence[torch.dtype], epilogues
) -> Iterator[NeededTile]:
    """Yields the fused kernels that add as a tree, where calls take them."""
    if engine.table.matmul.tiles_from(engine.world_size, codec=False) == math.inf:
        return
    tiles = PARTIAL_TILES[leaf_tree.LEAVES // engine.world_size]
    for algorithm, epilogue, tile, dtype in itertools.product(algorithms, (None, *epilogues), tiles, dtypes):
        work = Product(algorithm.op, (), 1, epilogue=epilogue, partition=TP_INVARIANT)
        yield algorithm, dtype, tile, work
