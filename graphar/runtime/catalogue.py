"""The catalogue of kernels: their files and their template arguments."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from graphar.numerics.codecs import NAMES, Codec, codec
from graphar.numerics.epilogues.code import Generated, generate
from graphar.runtime.arguments import MAX_RANKS

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}  # what kernels add
BYTE = torch.uint8  # what kernels that only move count in, whatever the tensors' dtype
WORLD_SIZES = range(2, MAX_RANKS + 1)


@dataclass(frozen=True)
class KernelSource:
    """One kernel as the compiler wants it.

    Attributes:
        file: its file in cuda_src.
        name: the C++ name expression, template arguments included.
        minimum_arch: the oldest architecture that has the kernel's instructions; 90 is sm_90.
        only_arch: the one architecture that has them, where no later one does.
        generated: C++ that belongs to the file, where ``name`` names something in it.
    """

    file: str
    name: str
    minimum_arch: int = 80
    only_arch: str | None = None
    generated: str = ""

    def runs_on(self, arch: str) -> bool:
        """Whether ``arch``, as in "sm_90a", has the kernel's instructions."""
        if self.only_arch:
            return arch == self.only_arch
        return int(re.sub(r"\D", "", arch)) >= self.minimum_arch


def kernel_source(
    algorithm: str,
    dtype: torch.dtype,
    world_size: int,
    variant: str | None = None,
    epilogue: Generated | None = None,
) -> KernelSource:
    """The kernel of an algorithm, which is also its file's name and its function's.

    Args:
        algorithm: one of KERNELS.
        dtype: of the tensors; BYTE for kernels that only move.
        world_size: ranks, 2 to 8.
        variant: one of the algorithm's VARIANTS, or the ``type_name`` of a codec; None: the first of them, if any.
        epilogue: what is done to the sums, by one of EPILOGUE_KERNELS or reducescatter_push; None: nothing.
    """
    variant = variant or VARIANTS.get(algorithm, (None,))[0]
    element = "byte" if dtype == BYTE else TYPE_NAMES[dtype]
    arguments = [element, str(world_size), *([variant] if variant else [])]
    if epilogue:
        arguments += ["false", epilogue.name] if algorithm in DIRECT_OPERANDS and not variant else [epilogue.name]
    on_clusters = algorithm in NORM_KERNELS and not variant.startswith("1,")
    minimum_arch = 90 if algorithm == "two_shot_tma" or variant == "Hardware" or on_clusters else 80
    name = f"{algorithm}<{', '.join(arguments)}>"
    return KernelSource(f"{algorithm}.cu", name, minimum_arch, generated=epilogue.text if epilogue else "")


MULTIMEM_KERNELS = ("multimem_one_shot", "multimem_two_shot")
QUANTIZED_KERNELS = ("quantized_two_shot_push", "quantized_two_shot_pipelined", "quantized_reducescatter")
KERNELS = (
    "one_shot_push",
    "one_shot",
    "one_shot_unstaged",
    "two_shot_push",
    "two_shot_pipelined",
    "two_shot_tma",
    "two_shot_lossless",
    *MULTIMEM_KERNELS,
    "reducescatter_push",
    "allgather_flagged",
    "allgather_push",
    *QUANTIZED_KERNELS,
)
CLUSTERS = (1, 2, 4, 8)  # blocks that share a row; more than one from sm_90 on
NORM_KERNELS = ("allreduce_rmsnorm_one_shot", "allreduce_rmsnorm_two_shot")
NORM_OUTPUTS = ("like_input", "static_fp8", "dynamic_fp8")  # NormOutput in cuda_src/device/rms_norm.cuh
EPILOGUE_KERNELS = ("one_shot_push", "two_shot_push", "two_shot_pipelined")  # of an all-reduce
# Those with a direct variant, and which symmetric operand that reads or writes where it lies on every rank.
DIRECT_OPERANDS = {"one_shot_unstaged": "input", "two_shot_pipelined": "output"}
ONE_SHOT_DEPTH = 3  # packs of every rank that a thread of one_shot has in flight
# The last template argument, as C++ has it, where an algorithm comes in several ways; the first is the usual one. The
# stand-in has ordinary accesses in place of multimem instructions, for tests. Of codecs there are many more.
VARIANTS = {
    "one_shot": (str(ONE_SHOT_DEPTH),),
    **dict.fromkeys(DIRECT_OPERANDS, (None, "direct")),
    **dict.fromkeys(MULTIMEM_KERNELS, ("Hardware", "StandIn")),
    **dict.fromkeys(NORM_KERNELS, tuple(map(", ".join, itertools.product(map(str, CLUSTERS), NORM_OUTPUTS)))),
    **dict.fromkeys(QUANTIZED_KERNELS, tuple(codec(name).type_name for name in NAMES)),
}
_SPARING = (*VARIANTS["quantized_two_shot_push"], Codec(4, 128, "stochastic", feedback=True).type_name)
_ANY = (*_SPARING, Codec(8, 512, "stochastic", "minmax", torch.float32).type_name)
_SOME_CODECS = {
    "quantized_two_shot_push": _SPARING,
    "quantized_two_shot_pipelined": _ANY,
    "quantized_reducescatter": _ANY,
}


def element_types(algorithm: str) -> tuple[torch.dtype, ...]:
    """What ``algorithm`` has a kernel for."""
    if algorithm == "two_shot_lossless":
        return (torch.bfloat16,)
    return (BYTE,) if algorithm.startswith("allgather") else tuple(TYPE_NAMES)


_EVERY_FUNCTION = (
    "gelu(v) + gelu_tanh(v) * silu(v) - sigmoid(v) / max(min(abs(v), pow(v, 2)), relu(clamp(v, -1, inf)))"
    " + sqrt(v) + floor(v) + ceil(v) + trunc(v) + rint(v) + isnan(v) + bf16(v) + fp16(v) + exp(v) + exp2(v) + expm1(v)"
    " + log(v) + log2(v) + log1p(v) + sin(v) + cos(v) + tanh(v) + erf(v) + rsqrt(v)"
    " + (!(v < 1 && v <= 2 || v > 3 && v >= 4 || v == 5 && v != 6) ? row : col + index)"
)
_SOME_EPILOGUES = (
    ("v * scale + bias[col]", (torch.bfloat16,)),
    ("v * a[row] + b[col] - c[index] * d[0]", (torch.float16, torch.bfloat16, torch.float32, torch.float32)),
    (_EVERY_FUNCTION, ()),
)
MATMUL_ARCH = "sm_90a"  # wgmma is Hopper's alone
MATMUL_TYPES = (torch.bfloat16, torch.float16)
MATMUL_LAYOUTS = ("by_rows", "by_columns")  # Layout in cuda_src/device/tiles.cuh


@dataclass(frozen=True)
class MatmulTile:
    """What one block of matmul computes at a time: in cuda_src/device/tiles.cuh.

    Attributes:
        rows: of C; 64 for each consumer warpgroup, of which there are one or two.
        columns: of C; 64, 128, 192 or 256.
        stages: steps of 64 along K that shared memory holds.
        cluster: blocks, below each other in C, which load W together.
        whole: whether shared memory has room for all of a finished tile, which kernels need that send it to other
            ranks; else for two boxes of each warpgroup.
        alternating: whether two consumer warpgroups each have tiles of their own, of 64 rows; else they share each.
        recorded: whether its kernel tells what takes how long, as in cuda_src/device/timeline.cuh.
    """

    rows: int
    columns: int
    stages: int
    cluster: int = 1
    whole: bool = False
    alternating: bool = False
    recorded: bool = False

    @property
    def threads(self) -> int:
        """Of a block: a warpgroup that loads, and those that compute."""
        return 128 + 128 * self.consumers

    @property
    def consumers(self) -> int:
        """Warpgroups that compute."""
        return 2 if self.alternating else self.rows // 64

    @property
    def shared_nbytes(self) -> int:
        """Dynamic shared memory of a block: Ring in cuda_src/device/matmul_pipeline.cuh."""
        loaded = self.stages * (self.rows + self.columns) * 128
        staged = self.consumers * (self.columns // 64 if self.whole else min(self.columns // 64, 2)) * 8192
        return loaded + staged + self.stages * 16

    def __str__(self) -> str:
        flags = [str(flag).lower() for flag in (self.whole, self.alternating, self.recorded)]
        return f"MatmulTile<{', '.join(map(str, [self.rows, self.columns, self.stages, self.cluster, *flags]))}>"


MATMUL_TILES = (
    MatmulTile(64, 64, stages=12),
    MatmulTile(64, 128, stages=8),
    MatmulTile(64, 128, stages=8, cluster=2),
    MatmulTile(128, 128, stages=6),
    MatmulTile(128, 128, stages=6, cluster=2),
    MatmulTile(128, 192, stages=4),
    MatmulTile(128, 256, stages=4, cluster=2),
)

MATMUL_PARTS_KERNELS = ("matmul_reducescatter", "matmul_allreduce")  # whose ranks' parts are rows of the result
MATMUL_PARTS_TILES = (
    MatmulTile(64, 64, stages=12, whole=True),
    MatmulTile(64, 128, stages=8, whole=True),
    MatmulTile(64, 256, stages=4, whole=True),
    MatmulTile(64, 128, stages=7, cluster=2, whole=True, alternating=True),
    MatmulTile(128, 128, stages=6, whole=True),
    MatmulTile(128, 128, stages=6, cluster=2, whole=True),
    MatmulTile(128, 192, stages=4, whole=True),
    MatmulTile(128, 256, stages=3, whole=True),
    MatmulTile(128, 256, stages=3, cluster=2, whole=True),
)


def parts_tiles(algorithm: str, codec: Codec | None = None) -> tuple[MatmulTile, ...]:
    """Those of MATMUL_PARTS_TILES that ``algorithm`` comes with: others leave no registers to gather, or to code."""
    tiles = (tile for tile in MATMUL_PARTS_TILES if codec is None or tile.columns <= 128)
    if algorithm == "matmul_reducescatter":
        return tuple(tile for tile in tiles if not tile.alternating)
    return tuple(tile for tile in tiles if tile.rows == 64 or tile.columns < 256)


def travels_in_tiles(codec: Codec, columns: int) -> bool:
    """Whether MATMUL_PARTS_KERNELS have ``codec`` for results with so many columns: whose rows are whole buckets."""
    kind = codec.rounding, codec.scheme, codec.feedback
    return kind == ("nearest", "absmax", False) and codec.bucket_size <= 64 and columns % codec.bucket_size == 0


@dataclass(frozen=True)
class TokenTile:
    """What one block of MATMUL_TOKENS_KERNELS computes at a time: in cuda_src/device/matmul_tokens.cuh.

    Attributes:
        tokens: the most rows of the result there may be: 8, 16, 32 or 64.
        stages: steps of 64 along K that shared memory holds.
        cluster: blocks, beside each other in the result, which load the rows of A together.
        columns: of the result, of every tile.
    """

    columns: ClassVar[int] = 64

    tokens: int
    stages: int
    cluster: int = 1

    @property
    def threads(self) -> int:
        """Of a block: a warpgroup that computes, a warp that loads, and as many as there are packs to receive."""
        return max(160, 8 * self.tokens)

    @property
    def shared_nbytes(self) -> int:
        """Dynamic shared memory of a block: Ring in cuda_src/device/matmul_pipeline.cuh."""
        return self.stages * ((self.columns + self.tokens) * 128 + 16) + 8192

    def __str__(self) -> str:
        return f"TokenTile<{self.tokens}, {self.stages}, {self.cluster}>"


MATMUL_TOKENS_KERNELS = ("matmul_one_shot", "matmul_two_shot")
# Each takes most of an SM's shared memory: more weights on their way are worth more than room for a block of the next
# kernel. What a cluster loads together comes through L2 once: 32 tokens are half as many bytes as the weights.
TOKEN_TILES = (TokenTile(8, 22), TokenTile(16, 20), TokenTile(32, 16, cluster=2), TokenTile(64, 12, cluster=2))
MATMUL_KERNELS = (*MATMUL_PARTS_KERNELS, *MATMUL_TOKENS_KERNELS)  # that end in a sum over ranks


def residual_norm_source(dtype: torch.dtype) -> KernelSource:
    """The kernel that adds a residual to a sum and norms it, for one of TYPE_NAMES."""
    return KernelSource("residual_rmsnorm.cu", f"residual_rmsnorm<{TYPE_NAMES[dtype]}>")


def matmul_source(dtype: torch.dtype, tile: MatmulTile, layout: str) -> KernelSource:
    """The kernel of matmul for one of MATMUL_TYPES, a tile, and a weight that lies as in MATMUL_LAYOUTS."""
    name = f"matmul<{TYPE_NAMES[dtype]}, {tile}, {layout}>"
    return KernelSource("matmul.cu", name, only_arch=MATMUL_ARCH)


def matmul_sum_source(
    algorithm: str,
    dtype: torch.dtype,
    world_size: int,
    tile: MatmulTile | TokenTile,
    layout: str,
    epilogue: Generated | None = None,
    codec: Codec | None = None,
) -> KernelSource:
    """One of MATMUL_KERNELS for ``world_size`` ranks and a tile of its kind; an epilogue or codec for parts of rows."""
    arguments = [TYPE_NAMES[dtype], world_size, tile, layout, *([epilogue.name] if epilogue else [])]
    if codec:
        arguments += ["Identity", f"AsCodes<{TYPE_NAMES[dtype]}, {codec.type_name}>"]
    name = f"{algorithm}<{', '.join(map(str, arguments))}>"
    return KernelSource(f"{algorithm}.cu", name, only_arch=MATMUL_ARCH, generated=epilogue.text if epilogue else "")


def catalogue() -> Iterator[KernelSource]:
    """Every kernel graphar can launch; of those that are many, enough to have each argument once.

    Of those with an epilogue there are as many as expressions: each algorithm has some.
    """
    for algorithm in KERNELS:
        ways = element_types(algorithm), WORLD_SIZES, VARIANTS.get(algorithm, (None,))
        if algorithm in QUANTIZED_KERNELS:
            codecs = _SOME_CODECS[algorithm]
            every = zip(itertools.cycle(ways[0]), itertools.cycle(WORLD_SIZES), codecs, strict=False)
        else:
            every = itertools.product(*ways)
        for dtype, world_size, variant in every:
            yield kernel_source(algorithm, dtype, world_size, variant)
    epilogues = [generate(text, dtypes) for text, dtypes in _SOME_EPILOGUES]
    every = itertools.product(epilogues, (*EPILOGUE_KERNELS, "reducescatter_push"))
    for (epilogue, algorithm), dtype, world_size in zip(
        every, itertools.cycle([*TYPE_NAMES, torch.bfloat16]), itertools.cycle(WORLD_SIZES), strict=False
    ):
        yield kernel_source(algorithm, dtype, world_size, epilogue=epilogue)
    yield kernel_source("two_shot_pipelined", torch.bfloat16, 4, "direct", epilogues[0])
    every = itertools.product(NORM_KERNELS, NORM_OUTPUTS, CLUSTERS)
    for (algorithm, output, cluster), dtype, world_size in zip(
        every, itertools.cycle(TYPE_NAMES), itertools.cycle(WORLD_SIZES), strict=False
    ):
        yield kernel_source(algorithm, dtype, world_size, f"{cluster}, {output}")
    yield from map(residual_norm_source, TYPE_NAMES)
    for dtype, tile, layout in itertools.product(MATMUL_TYPES, MATMUL_TILES, MATMUL_LAYOUTS):
        yield matmul_source(dtype, tile, layout)
    ways = itertools.cycle(itertools.product(WORLD_SIZES, MATMUL_TYPES))
    for algorithm in MATMUL_KERNELS:
        tiles = TOKEN_TILES if algorithm in MATMUL_TOKENS_KERNELS else parts_tiles(algorithm)
        for tile, layout in itertools.product(tiles, MATMUL_LAYOUTS):
            world_size, dtype = next(ways)
            yield matmul_sum_source(algorithm, dtype, world_size, tile, layout)
        if algorithm in MATMUL_PARTS_KERNELS:
            # The longest with the smallest tile: with a large one NVRTC takes four times as long.
            for epilogue, tile in zip((*epilogues[::-1], epilogues[0]), (tiles[0], *tiles[3:]), strict=False):
                yield matmul_sum_source(algorithm, torch.bfloat16, 4, tile, "by_rows", epilogue)
            for name, tile in zip(NAMES[1:], itertools.cycle(parts_tiles(algorithm, codec(NAMES[1]))), strict=False):
                world_size, dtype = next(ways)
                yield matmul_sum_source(algorithm, dtype, world_size, tile, "by_rows", codec=codec(name))
