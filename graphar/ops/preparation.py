"""Loads the kernels of later calls, and allocates their scratch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from graphar.numerics import leaf_tree, softmax
from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.numerics.fp8_products import FP8
from graphar.numerics.partitions import TP_INVARIANT
from graphar.plan import select
from graphar.plan.algorithms import MATMUL_ARCH, MATMUL_TYPES, Algorithm, with_kernels
from graphar.plan.matmuls import tiles_that_serve
from graphar.plan.work import FORMATS, Product, without_seeds
from graphar.product.fused import Tile, load_tile, sources_of_tile
from graphar.runtime import compiler, launcher
from graphar.runtime.bind import loss
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.engine import Engine, runner_of
from graphar.runtime.runner import threads_for_compiling


def prepare(
    engine: Engine,
    ops: Sequence[str],
    dtypes: Sequence[torch.dtype],
    max_nbytes: int | None,
    codecs: Sequence[Codec] = (),
    epilogues: Sequence[Pointwise] = (),
    tp_invariant: bool = False,
) -> None:
    """Does what graphar.Communicator.prepare does, whose arguments it takes, checked."""
    if tp_invariant:
        leaf_tree.check_ranks("prepare", engine.world_size)
    added = [dtype for dtype in dtypes if dtype in TYPE_NAMES]
    named = ", and e4m3 operands" if FP8 in dtypes else ""
    named += f", codecs {[codec.text for codec in codecs]}" if codecs else ""
    named += f", epilogues {[epilogue.text for epilogue in epilogues]}" if epilogues else ""
    named += ", tensor-parallel invariant" if tp_invariant else ""
    with engine.keeping_failure("prepare"):
        if engine.group and engine.world_size > 1:
            said = f"prepare of {ops} for {added}, max_nbytes {max_nbytes}{named}"
            engine.rendezvous().exchange(without_seeds(said), b"")
        of_losses: dict[int, list[KernelSource]] = {}  # by GPU of this process
        if {*ops} & {*softmax.PREPARED}:
            devices = [device.index for device in engine.devices or [engine.first_device()] if device.type == "cuda"]
            of_losses = {device: loss.sources(device, added) for device in devices if loss.runs_on(device)}
        ops = [*dict.fromkeys("allgather" if op in softmax.PREPARED else op for op in ops)]
        if not engine.find_runner(engine.first_device()):
            for device, sources in of_losses.items():
                compiler.compile_at_once(sources, launcher.architecture(device), threads_for_compiling(1))
        else:
            runner = runner_of(engine)
            facts = select.Facts(engine.world_size, engine.table, runner.chip, lossless=engine.lossless)
            wanted = ops, added, max_nbytes, codecs, epilogues, engine.symmetric is not None, tp_invariant
            kernels = list(select.needed_kernels(facts, *wanted))
            tiles = list(_needed_tiles(engine, ops, dtypes, codecs, epilogues, tp_invariant))
            of_tiles = [sources_of_tile(engine.world_size, *tile).values() for tile in tiles]
            of_kernels = filter(None, map(runner.source_of, kernels))
            runner.compile(itertools.chain(of_kernels, *of_tiles, *of_losses.values()))
            for kernel in kernels:
                runner.prepare(kernel)
            for tile in tiles:
                load_tile(runner, *tile)
        for device, sources in of_losses.items():
            for source in sources:
                loss.load(source, device)


def _needed_tiles(
    engine: Engine,
    ops: Sequence[str],
    dtypes: Sequence[torch.dtype],
    codecs: Sequence[Codec],
    epilogues: Sequence[Pointwise],
    tp_invariant: bool,
) -> Iterator[tuple[Algorithm, torch.dtype, Tile, Product]]:
    """Yields the fused kernels of every tile that calls of ``ops`` may take; their products have no shape."""
    if runner_of(engine).chip.arch != MATMUL_ARCH:
        return
    results = [dtype for dtype in dtypes if dtype in MATMUL_TYPES]
    algorithms = [algorithm for op in ops for algorithm in with_kernels(op) if algorithm.row.tiles]
    for algorithm, epilogue in itertools.product(algorithms, (None, *epilogues)):
        if epilogue and not algorithm.row.takes_epilogue:
            continue
        work, adds = Product(algorithm.op, (), 1, epilogue=epilogue), algorithm.row.sends_tiles
        works = [work, *[work._replace(codec=codec.text) for codec in codecs if adds and not epilogue]]
        if tp_invariant and adds and engine.table.matmul.tiles_from(engine.world_size, codec=False) < math.inf:
            works.append(work._replace(partition=TP_INVARIANT))
        wanted = [*itertools.product(works, results)]
        in_8_bits = [work._replace(format=scale_format) for scale_format in FORMATS] if FP8 in dtypes else []
        wanted += itertools.product(in_8_bits, results or [torch.bfloat16])
        for of_tile, dtype in wanted:
            for tile in tiles_that_serve(algorithm, of_tile, engine.world_size).tiles:
                yield algorithm, dtype, tile, of_tile
