"""The catalogue of kernels: the source file and the template arguments of each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from graphar.numerics.codecs import NAMES, Codec, codec
from graphar.numerics.dtypes import BYTE, TYPE_NAMES
from graphar.numerics.epilogues.code import Generated, generate
from graphar.numerics.norms import NORM_OUTPUTS
from graphar.plan.algorithms import MATMUL_ARCH, MATMUL_TYPES, Algorithm, kernels_that
from graphar.plan.config import Kernel
from graphar.plan.grids import CLUSTERS
from graphar.plan.scratch import WORLD_SIZES
from graphar.plan.tiles import LAYOUTS, MATMUL_TILES, MatmulTile, SkinnyTile, for_wire


@dataclass(frozen=True)
class KernelSource:
    """The input of the compiler for one kernel."""

    file: str  # the kernel's file, relative to cuda_src
    name: str  # the C++ name expression, with template arguments
    minimum_arch: int = 80  # the oldest architecture that has the kernel's instructions; 90 is sm_90
    # The single architecture that has the kernel's instructions; None if later ones have them too.
    only_arch: str | None = None
    # C++ code of an epilogue that is appended to the file, if ``name`` uses one; else an empty string.
    generated: str = ""

    def runs_on(self, arch: str) -> bool:
        """Whether ``arch``, as in "sm_90a", has the kernel's instructions."""
        if self.only_arch:
            return arch == self.only_arch
        return int(re.sub(r"\D", "", arch)) >= self.minimum_arch


def file_of(algorithm: Algorithm) -> str:
    """Returns the file of an algorithm's kernel, relative to cuda_src."""
    return f"{algorithm.row.folder}/{algorithm.value}.cu"


def kernel_source(
    algorithm: Algorithm,
    dtype: torch.dtype,
    world_size: int,
    variant: str | None = None,
    generated: Generated | None = None,
) -> KernelSource:
    """Returns the kernel of an algorithm; the C++ function has the algorithm's name.

    Args:
        algorithm: one of KERNELS or NORM_KERNELS, whose kernels take a dtype and a world size.
        dtype: the dtype of the tensors; BYTE for kernels that only move data.
        variant: one of the algorithm's variants, or the ``type_name`` of a codec; None: the algorithm's first variant.
    """
    can = algorithm.row
    variant = variant or can.variants[0]
    element = "byte" if dtype == BYTE else TYPE_NAMES[dtype]
    arguments = [element, str(world_size), *([variant] if variant else [])]
    if generated:
        arguments += ["false", generated.name] if can.direct and not variant else [generated.name]
    on_clusters = algorithm in NORM_KERNELS and not variant.startswith("1,")
    minimum_arch = 90 if variant == "Hardware" or on_clusters else can.minimum_arch
    name = f"{algorithm.value}<{', '.join(arguments)}>"
    return KernelSource(file_of(algorithm), name, minimum_arch, generated=generated.text if generated else "")


def source_of(kernel: Kernel, world_size: int, variant: str | None = None) -> KernelSource:
    """Returns the source of a kernel that a plan names.

    A codec or the call's work determines the variant; otherwise ``variant`` does.
    """
    variant = kernel.codec.type_name if kernel.codec else kernel.template or variant
    generated = kernel.epilogue.generated if kernel.epilogue else None
    return kernel_source(kernel.algorithm, kernel.dtype, world_size, variant, generated)


def residual_norm_source(dtype: torch.dtype) -> KernelSource:
    """Returns the kernel that adds a residual to a sum and computes its RMSNorm, for one of TYPE_NAMES."""
    return KernelSource("norm/residual_rmsnorm.cu", f"residual_rmsnorm<{TYPE_NAMES[dtype]}>")


def matmul_source(dtype: torch.dtype, tile: MatmulTile, layout: str) -> KernelSource:
    """Returns the kernel of a plain matmul, for one of MATMUL_TYPES, a tile, and one of LAYOUTS for the weight."""
    name = f"matmul<{TYPE_NAMES[dtype]}, {tile}, {layout}>"
    return KernelSource("matmul/matmul.cu", name, only_arch=MATMUL_ARCH)


def fused_matmul_source(
    algorithm: Algorithm,
    dtype: torch.dtype,
    world_size: int,
    tile: MatmulTile | SkinnyTile,
    layout: str,
    generated: Generated | None = None,
    codec: Codec | None = None,
) -> KernelSource:
    """Returns the fused kernel of a matmul and the sum of its result, or the all-gather of its rows.

    Args:
        algorithm: one of SKINNY_KERNELS, SUMMED_TILE_KERNELS or GATHERING_KERNELS.
        tile: one of the algorithm's.
        layout: the layout of the weight, one of LAYOUTS.
        generated: the code of an epilogue; not for SKINNY_KERNELS.
        codec: a codec on the wire; for SUMMED_TILE_KERNELS.
    """
    arguments = [TYPE_NAMES[dtype], world_size, tile, layout, *([generated.name] if generated else [])]
    if codec:
        arguments += ["Identity", f"AsCodes<{TYPE_NAMES[dtype]}, {codec.type_name}>"]
    name = f"{algorithm.value}<{', '.join(map(str, arguments))}>"
    code = generated.text if generated else ""
    return KernelSource(file_of(algorithm), name, only_arch=MATMUL_ARCH, generated=code)


KERNELS = kernels_that(lambda row: row.folder in ("allreduce", "scatter_gather", "quantized"))
NORM_KERNELS = kernels_that(lambda row: row.folder == "norm")
SKINNY_KERNELS = kernels_that(lambda row: row.is_skinny)
SUMMED_TILE_KERNELS = kernels_that(lambda row: row.sends_tiles)
GATHERING_KERNELS = kernels_that(lambda row: row.tiles and not row.is_skinny and not row.sends_tiles)

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
    yield from _norm_kernels()
    yield from map(residual_norm_source, TYPE_NAMES)
    for dtype, tile, layout in itertools.product(MATMUL_TYPES, MATMUL_TILES, LAYOUTS):
        yield matmul_source(dtype, tile, layout)
    yield from _fused_matmul_kernels(epilogues)
    yield from _gathered_matmul_kernels(epilogues)


def _plain_kernels() -> Iterator[KernelSource]:
    for algorithm in KERNELS:
        can = algorithm.row
        if can.takes_codec:
            codecs = _SPARING if can.spares_a_word else _ANY
            variants = [one.type_name for one in codecs]
            every = zip(itertools.cycle(can.dtypes), itertools.cycle(WORLD_SIZES), variants, strict=False)
        else:
            every = itertools.product(can.dtypes, WORLD_SIZES, can.variants)
        for dtype, world_size, variant in every:
            yield kernel_source(algorithm, dtype, world_size, variant)


def _epilogue_kernels(epilogues: list[Generated]) -> Iterator[KernelSource]:
    takers = [one for one in KERNELS if one.row.takes_epilogue]
    types = itertools.cycle([*TYPE_NAMES, torch.bfloat16])
    for (epilogue, algorithm), dtype, world_size in zip(
        itertools.product(epilogues, takers), types, itertools.cycle(WORLD_SIZES), strict=False
    ):
        yield kernel_source(algorithm, dtype, world_size, generated=epilogue)
    for algorithm in takers:
        if algorithm.row.direct:
            yield kernel_source(algorithm, torch.bfloat16, 4, "direct", epilogues[0])


def _norm_kernels() -> Iterator[KernelSource]:
    every = itertools.product(NORM_KERNELS, NORM_OUTPUTS, CLUSTERS)
    types = itertools.cycle(TYPE_NAMES)
    for (algorithm, output, cluster), dtype, world_size in zip(
        every, types, itertools.cycle(WORLD_SIZES), strict=False
    ):
        yield kernel_source(algorithm, dtype, world_size, f"{cluster}, {output}")


def _fused_matmul_kernels(epilogues: list[Generated]) -> Iterator[KernelSource]:
    ways = itertools.cycle(itertools.product(WORLD_SIZES, MATMUL_TYPES))
    for algorithm in (*SUMMED_TILE_KERNELS, *SKINNY_KERNELS):
        tiles = algorithm.row.tiles
        for tile, layout in itertools.product(tiles, LAYOUTS):
            world_size, dtype = next(ways)
            yield fused_matmul_source(algorithm, dtype, world_size, tile, layout)
        if algorithm in SKINNY_KERNELS:
            continue
        # Pair the longest epilogue with the smallest tile: with a large tile NVRTC takes four times as long.
        for epilogue, tile in zip((*epilogues[::-1], epilogues[0]), (tiles[0], *tiles[3:]), strict=False):
            yield fused_matmul_source(algorithm, torch.bfloat16, 4, tile, "by_rows", epilogue)
        encoded = itertools.cycle(for_wire(tiles, codec(NAMES[1])))
        for name, tile in zip(NAMES[1:], encoded, strict=False):
            world_size, dtype = next(ways)
            yield fused_matmul_source(algorithm, dtype, world_size, tile, "by_rows", codec=codec(name))


def _gathered_matmul_kernels(epilogues: list[Generated]) -> Iterator[KernelSource]:
    for algorithm in GATHERING_KERNELS:
        tiles = algorithm.row.tiles
        kinds = itertools.product(tiles, LAYOUTS)
        for (tile, layout), world_size in zip(kinds, itertools.cycle(WORLD_SIZES), strict=False):
            yield fused_matmul_source(algorithm, MATMUL_TYPES[world_size % 2], world_size, tile, layout)
        for epilogue, tile in zip((*epilogues[::-1], epilogues[0]), tiles, strict=True):
            yield fused_matmul_source(algorithm, torch.bfloat16, 4, tile, "by_rows", epilogue)
