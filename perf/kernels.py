"""The catalogue of kernels: what `python -m perf compile` and the tests of the compiler compile."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch

from graphar.numerics.codecs import NAMES, Codec, codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.code import Generated, generate
from graphar.numerics.fp8_products import FP8
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.norms import NORM_OUTPUTS
from graphar.plan.algorithms import MATMUL_TYPES, Algorithm
from graphar.plan.grids import CLUSTERS
from graphar.plan.matmuls import tiles_that_serve
from graphar.plan.scratch import WORLD_SIZES
from graphar.plan.tiles import (
    FP8_TILES,
    LAYOUTS,
    LEAF_COUNTS,
    LEAF_TILES,
    MATMUL_TILES,
    PARTIAL_TILES,
    narrow,
    skinny_tile,
)
from graphar.plan.work import FORMATS, Product, Sum, template_of
from graphar.runtime.bind.loss import FORMS, PLANES, SUM_THREADS
from graphar.runtime.catalogue import (
    GATHERING_KERNELS,
    KERNELS,
    NORM_KERNELS,
    SCALE_FORMATS,
    SKINNY_KERNELS,
    SUMMED_TILE_KERNELS,
    KernelSource,
    fused_matmul_source,
    kernel_source,
    local_codec_sources,
    matmul_source,
    residual_norm_backward_sources,
    residual_norm_source,
    softmax_backward_source,
    softmax_partials_source,
    softmax_results_source,
    softmax_total_source,
)

# Ranks between which sums are added as a tree, and the template arguments of such kernels for each result's dtype.
TREE_WORLD_SIZES = (2, 4, 8)
TREES = tuple(template_of(Sum(1, order="tree", out_dtype=dtype)) for dtype in TYPE_NAMES)
# Codecs that together use each template argument of each kernel at least once.
_SPARING = (*(codec(name) for name in NAMES), Codec(4, 128, "stochastic", feedback=True))
_ANY = (*_SPARING, Codec(8, 512, "stochastic", "minmax", torch.float32))
_EVERY_FUNCTION = (
    "gelu(v) + gelu_tanh(v) * silu(v) - sigmoid(v) / max(min(abs(v), pow(v, 2)), relu(clamp(v, -1, inf)))"
    " + sqrt(v) + floor(v) + ceil(v) + trunc(v) + rint(v) + isnan(v) + bf16(v) + fp16(v) + exp(v) + exp2(v) + expm1(v)"
    " + log(v) + log2(v) + log1p(v) + sin(v) + cos(v) + tanh(v) + erf(v) + rsqrt(v)"
    " + softplus(v) + elu(v) + mish(v) + hardswish(v) + where(v, v, 1)"
    " + (!(v < 1 && v <= 2 || v > 3 && v >= 4 || v == 5 && v != 6) ? row : col + index)"
)
_SOME_EPILOGUES = (
    ("v * scale + bias[col]", (torch.bfloat16,)),
    ("v * a[row] + b[col] - c[index] * d[0]", (torch.float16, torch.bfloat16, torch.float32, torch.float32)),
    (_EVERY_FUNCTION, ()),
)


def catalogue() -> Iterator[KernelSource]:
    """Yields every kernel that graphar can launch; of large families, enough to use each template argument once.

    Epilogues are unlimited in number, so each algorithm is compiled with a few.
    """
    epilogues = [generate(text, dtypes) for text, dtypes in _SOME_EPILOGUES]
    yield from _plain_kernels()
    yield from _epilogue_kernels(epilogues)
    yield from _tree_kernels(epilogues)
    yield from _norm_kernels()
    yield from map(residual_norm_source, TYPE_NAMES)
    yield from (residual_norm_source(dtype, torch.float32) for dtype in TYPE_NAMES if dtype != torch.float32)
    for at, (any_codec, dtype) in enumerate(_in_turn(_ANY, TYPE_NAMES)):
        yield local_codec_sources(dtype, any_codec)[(at + 2) % 3]  # of the codec with feedback the one that encodes
    for dtype in TYPE_NAMES:
        gradients = (residual_norm_backward_sources(dtype, *staging) for staging in ((1, 4), (2, 2), (4, 1)))
        yield from dict.fromkeys(itertools.chain(*gradients))  # the weight's kernel is the same for all
    for at, dtype in enumerate(TYPE_NAMES):
        *partials, backward = softmax_kernels(dtype)
        yield from (*partials[at :: len(TYPE_NAMES)], backward)
    yield from softmax_results_kernels()
    kinds = [(tile, layout) for tile in MATMUL_TILES for layout in tile.layouts]
    for (tile, layout), dtype in _in_turn(kinds, MATMUL_TYPES):
        yield matmul_source(dtype, tile, layout)
    yield from _partial_matmul_kernels()
    yield from _scaled_matmul_kernels()
    yield from _fused_matmul_kernels(epilogues)
    yield from _gathered_matmul_kernels(epilogues)


def _in_turn(kinds: Iterable, *others: Iterable) -> Iterator[tuple]:
    """Yields each of ``kinds`` with the next of ``others``, which repeat."""
    return zip(kinds, *map(itertools.cycle, others), strict=False)


def softmax_kernels(dtype: torch.dtype) -> Iterator[KernelSource]:
    """Yields the kernels of losses and log-probabilities that read logits of one dtype."""
    for (also, scaled), spread in itertools.product(FORMS, (False, True)):
        yield softmax_partials_source(dtype, also, scaled, spread)
    yield softmax_backward_source(dtype)


def softmax_results_kernels() -> Iterator[KernelSource]:
    """Yields the kernels of losses and log-probabilities that read no logits."""
    yield from map(softmax_results_source, PLANES)
    yield softmax_total_source(SUM_THREADS)


def _partial_matmul_kernels() -> Iterator[KernelSource]:
    """Yields the matmuls in leaves, which store partials in fp32. With all leaves of all ranks they also round them."""
    ways = itertools.cycle(itertools.product(MATMUL_TYPES, LAYOUTS))
    for tile in itertools.chain(*LEAF_TILES.values()):
        if tile.of_tail:
            continue  # has the kernels of two others
        for out_dtype in (torch.float32, None)[: 2 if tile.leaves == LEAF_COUNTS[-1] else 1]:
            dtype, layout = next(ways)
            yield matmul_source(dtype, tile, layout if layout in tile.layouts else tile.layouts[0], out_dtype)


def _scaled_matmul_kernels() -> Iterator[KernelSource]:
    for (tile, scales), dtype in _in_turn(itertools.product(FP8_TILES, SCALE_FORMATS), TYPE_NAMES):
        yield matmul_source(FP8, tile, "by_rows", dtype, scales)


def _plain_kernels() -> Iterator[KernelSource]:
    for algorithm in KERNELS:
        can = algorithm.row
        if can.takes_codec:
            variants = [codec.type_name for codec in (_SPARING if can.spares_a_word else _ANY)]
            every = _in_turn(variants, WORLD_SIZES, can.dtypes)
        else:
            whole = 0 if can.multimem else 1  # variants whose every dtype comes with every number of ranks
            of_whole = itertools.product(can.variants[:whole], WORLD_SIZES, can.dtypes)
            of_others = _in_turn(itertools.product(can.variants[whole:], WORLD_SIZES), can.dtypes)
            every = [*of_whole, *((*kind, dtype) for kind, dtype in of_others)]
        for variant, world_size, dtype in every:
            yield kernel_source(algorithm, dtype, world_size, variant)


def _epilogue_kernels(epilogues: list[Generated]) -> Iterator[KernelSource]:
    takers = [algorithm for algorithm in KERNELS if algorithm.row.takes_epilogue]
    kinds, types = itertools.product(epilogues, takers), [*TYPE_NAMES, torch.bfloat16]
    for (epilogue, algorithm), dtype, world_size in _in_turn(kinds, types, WORLD_SIZES):
        yield kernel_source(algorithm, dtype, world_size, generated=epilogue)
    for algorithm in takers:
        if algorithm.row.direct:
            yield kernel_source(algorithm, torch.bfloat16, 4, "direct", epilogues[0])


def _tree_kernels(epilogues: list[Generated]) -> Iterator[KernelSource]:
    world_sizes = itertools.cycle(TREE_WORLD_SIZES)
    for algorithm in [algorithm for algorithm in KERNELS if algorithm.row.adds_tree]:
        for variant, order in itertools.product(algorithm.row.variants, TREES):
            yield kernel_source(algorithm, torch.float32, next(world_sizes), variant, order=order)
        yield kernel_source(algorithm, torch.float32, 4, generated=epilogues[0], order=TREES[0])


def _norm_kernels() -> Iterator[KernelSource]:
    every = itertools.product(NORM_KERNELS, NORM_OUTPUTS, CLUSTERS)
    for (algorithm, output, cluster), dtype, world_size in _in_turn(every, TYPE_NAMES, WORLD_SIZES):
        yield kernel_source(algorithm, dtype, world_size, f"{cluster}, {output}")
    trees, world_sizes = itertools.cycle(TREES), itertools.cycle(TREE_WORLD_SIZES)
    for algorithm, cluster in itertools.product(NORM_KERNELS, (*CLUSTERS[:1] * len(TREES), *CLUSTERS[1:])):
        yield kernel_source(algorithm, torch.float32, next(world_sizes), f"{cluster}, like_input, {next(trees)}")


def _fused_matmul_kernels(epilogues: list[Generated]) -> Iterator[KernelSource]:
    ways = itertools.cycle(itertools.product(WORLD_SIZES, MATMUL_TYPES))
    for algorithm in (*SUMMED_TILE_KERNELS, *SKINNY_KERNELS):
        tiles = algorithm.row.tiles
        for tile, layout in itertools.product(tiles, LAYOUTS):
            world_size, dtype = next(ways)
            yield fused_matmul_source(algorithm, dtype, world_size, tile, layout)
        if algorithm in SKINNY_KERNELS:
            yield from _skinny_kernels_of_partials(algorithm)
            yield from _kernels_with_scales(algorithm, tiles)
            continue
        # Pair the longest epilogue with the smallest tile: with a large tile NVRTC takes four times as long.
        for epilogue, tile in zip((*epilogues[::-1], epilogues[0]), (tiles[0], *tiles[3:]), strict=False):
            yield fused_matmul_source(algorithm, torch.bfloat16, 4, tile, "by_rows", epilogue)
        yield from _kernels_of_partials(algorithm, epilogues[0])
        scaled = tiles_that_serve(algorithm, Product(algorithm.op, (), 1, format=FORMATS[0]), 2).tiles
        yield from _kernels_with_scales(algorithm, scaled)
        how = "by_rows", epilogues[0]
        yield fused_matmul_source(algorithm, torch.bfloat16, 4, scaled[0], *how, format=SCALE_FORMATS[0])
        for name, tile in _in_turn(NAMES[1:], narrow(tiles)):
            world_size, dtype = next(ways)
            yield fused_matmul_source(algorithm, dtype, world_size, tile, "by_rows", codec=codec(name))


def _skinny_kernels_of_partials(algorithm: Algorithm) -> Iterator[KernelSource]:
    kinds = itertools.product(PARTIAL_TILES, algorithm.row.tiles)
    for (leaves, tile), (dtype, layout) in _in_turn(kinds, itertools.product(MATMUL_TYPES, LAYOUTS)):
        yield fused_matmul_source(algorithm, dtype, LEAVES // leaves, skinny_tile(tile.rows, leaves), layout)


def _kernels_with_scales(algorithm: Algorithm, tiles: Sequence) -> Iterator[KernelSource]:
    kinds = itertools.product(tiles, SCALE_FORMATS)
    for (tile, scales), (world_size, dtype) in _in_turn(kinds, itertools.product(WORLD_SIZES, MATMUL_TYPES)):
        yield fused_matmul_source(algorithm, dtype, world_size, tile, "by_rows", format=scales)


def _kernels_of_partials(algorithm: Algorithm, epilogue: Generated) -> Iterator[KernelSource]:
    ways = itertools.cycle(itertools.product(MATMUL_TYPES, LAYOUTS))
    for leaves, tiles in PARTIAL_TILES.items():
        for tile in tiles:
            dtype, layout = next(ways)
            yield fused_matmul_source(algorithm, dtype, LEAVES // leaves, tile, layout)
        yield fused_matmul_source(algorithm, torch.bfloat16, LEAVES // leaves, tiles[0], "by_rows", epilogue)


def _gathered_matmul_kernels(epilogues: list[Generated]) -> Iterator[KernelSource]:
    for algorithm in GATHERING_KERNELS:
        tiles = algorithm.row.tiles
        kinds = [(tile, layout) for tile in tiles for layout in tile.layouts]
        for (tile, layout), world_size in _in_turn(kinds, WORLD_SIZES):
            yield fused_matmul_source(algorithm, MATMUL_TYPES[world_size % 2], world_size, tile, layout)
        placed = itertools.chain(epilogues[::-1], itertools.repeat(epilogues[0]))
        for epilogue, tile in zip(placed, tiles, strict=False):
            yield fused_matmul_source(algorithm, torch.bfloat16, 4, tile, "by_rows", epilogue)
        kinds = itertools.product(FP8_TILES, SCALE_FORMATS)
        for (tile, scales), dtype, world_size in _in_turn(kinds, MATMUL_TYPES, WORLD_SIZES):
            yield fused_matmul_source(algorithm, dtype, world_size, tile, "by_rows", format=scales)
        how = "by_rows", epilogues[0]
        yield fused_matmul_source(algorithm, torch.bfloat16, 4, FP8_TILES[2], *how, format=SCALE_FORMATS[0])
