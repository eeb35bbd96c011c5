"""The source file and the template arguments of each kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.dtypes import BYTE, TYPE_NAMES
from graphar.numerics.epilogues.code import Generated
from graphar.numerics.fp8_products import FP8
from graphar.plan.algorithms import MATMUL_ARCH, Algorithm, kernels_that
from graphar.plan.config import Kernel
from graphar.plan.tiles import MatmulTile, SkinnyTile
from graphar.plan.work import FACTORS, FORMATS

SCALE_FORMATS = tuple([FACTORS[name].template for name in FORMATS])  # of e4m3 operands


@dataclass(frozen=True)
class KernelSource:
    """The input of the compiler for one kernel."""

    file: str  # the kernel's file, relative to cuda_src; or its absolute path
    name: str  # the C++ name expression, with template arguments
    minimum_arch: int = 80  # the oldest architecture that has the kernel's instructions; 90 is sm_90
    # The single architecture that has the kernel's instructions; None if later ones have them too.
    only_arch: str | None = None
    # C++ code of an epilogue that is appended to the file, if ``name`` uses one; else an empty string.
    generated: str = ""
    # Of a file from outside cuda_src, the hash of it and of the files that it includes, when it was loaded.
    digest: str = ""

    def runs_on(self, arch: str) -> bool:
        """Whether ``arch``, as in "sm_90a", has the kernel's instructions."""
        if self.only_arch:
            return arch == self.only_arch
        return int(re.sub(r"\D", "", arch)) >= self.minimum_arch


def file_of(algorithm: Algorithm) -> str:
    """Returns the file of an algorithm's kernel, relative to cuda_src; or its absolute path."""
    return f"{algorithm.row.folder}/{algorithm.kernel_name}.cu"


def kernel_source(
    algorithm: Algorithm,
    dtype: torch.dtype,
    world_size: int,
    variant: str | None = None,
    generated: Generated | None = None,
    order: str | None = None,
) -> KernelSource:
    """Returns the kernel of one of KERNELS or NORM_KERNELS for tensors of ``dtype``; BYTE: it only moves data.

    ``variant`` is one of the algorithm's variants, the ``type_name`` of a codec, or the template arguments of a norm's
    work; None: the first variant. ``order`` is the sum's order and its result's type, as in "TreeOrder, bf16".
    """
    can = algorithm.row
    variant = variant or can.variants[0]
    element = "byte" if dtype == BYTE else TYPE_NAMES[dtype]
    arguments = [element, str(world_size), *([variant] if variant else [])]
    if generated or order:
        expression = generated.name if generated else "Identity"
        arguments += ["false", expression] if can.direct and not variant else [expression]
    arguments += [order] if order else []
    on_clusters = algorithm in NORM_KERNELS and not (variant or "").startswith("1,")
    minimum_arch = 90 if variant == "Hardware" or on_clusters else can.minimum_arch
    name = f"{algorithm.kernel_name}<{', '.join(arguments)}>"
    code = generated.text if generated else ""
    return KernelSource(file_of(algorithm), name, minimum_arch, generated=code, digest=can.digest)


def source_of(kernel: Kernel, world_size: int, variant: str | None = None) -> KernelSource | None:
    """Returns the source of a kernel that a plan names; None if copy engines alone do the work.

    ``variant`` counts if no codec or work determines it.
    """
    if kernel.algorithm.row.copies:
        if kernel.dtype == BYTE:
            return None
        return KernelSource("copies/sum_of_parts.cu", f"sum_of_parts<{TYPE_NAMES[kernel.dtype]}, {world_size}>")
    order = kernel.template if kernel.algorithm.row.adds_tree and kernel.algorithm not in NORM_KERNELS else None
    variant = kernel.codec.type_name if kernel.codec else (not order and kernel.template) or variant
    generated = kernel.epilogue.generated if kernel.epilogue else None
    return kernel_source(kernel.algorithm, kernel.dtype, world_size, variant, generated, order)


def local_codec_sources(dtype: torch.dtype, codec: Codec) -> tuple[KernelSource, KernelSource, KernelSource]:
    """Returns the kernels that encode a tensor, add encoded tensors, and encode their sum, on one GPU."""
    file, element = "quantized/local_codec.cu", TYPE_NAMES[dtype]
    plain = replace(codec, feedback=False).type_name  # sums have no rounding errors to keep
    encode = KernelSource(file, f"local_codec_encode<{element}, {codec.type_name}>")
    decode = KernelSource(file, f"local_codec_sum<{element}, {plain}, false>")
    return encode, decode, KernelSource(file, f"local_codec_sum<{element}, {plain}, true>")


def residual_norm_source(dtype: torch.dtype, total_dtype: torch.dtype | None = None) -> KernelSource:
    """Returns the kernel that adds a residual of ``dtype`` to a sum in ``dtype`` or fp32, and computes the RMSNorm."""
    wider = f", {TYPE_NAMES[total_dtype]}" if total_dtype not in (None, dtype) else ""
    return KernelSource("norm/residual_rmsnorm.cu", f"residual_rmsnorm<{TYPE_NAMES[dtype]}{wider}>")


def residual_norm_backward_sources(dtype: torch.dtype, packs: int, stages: int) -> tuple[KernelSource, KernelSource]:
    """Returns the kernels of the norm's gradients, of rows and of the weight.

    A thread has up to ``packs`` packs of a row, and ``stages`` rows are in shared memory.
    """
    file, name = "norm/residual_rmsnorm_backward.cu", TYPE_NAMES[dtype]
    rows = KernelSource(file, f"residual_rmsnorm_backward<{name}, {packs}, {stages}>")
    return rows, KernelSource(file, f"residual_rmsnorm_backward_weight<{name}>")


def softmax_partials_source(dtype: torch.dtype, also: str, scaled: bool, spread: bool) -> KernelSource:
    """Returns the kernel of each row's maximum and sum of exponentials.

    ``also`` is one of the names of Also in cuda_src/device/softmax.cuh, ``scaled`` says whether logits are multiplied,
    and ``spread`` whether clusters of blocks share rows.
    """
    flags = f"{str(scaled).lower()}, {str(spread).lower()}"
    name = f"softmax_partials<{TYPE_NAMES[dtype]}, {also}, {flags}>"
    return KernelSource("loss/softmax_partials.cu", name, minimum_arch=90 if spread else 80)


def softmax_results_source(also: str) -> KernelSource:
    return KernelSource("loss/softmax_results.cu", f"softmax_results<{also}>")


def softmax_total_source(threads: int) -> KernelSource:
    return KernelSource("loss/softmax_results.cu", f"softmax_results_total<{threads}>")


def softmax_backward_source(dtype: torch.dtype) -> KernelSource:
    return KernelSource("loss/softmax_backward.cu", f"softmax_backward<{TYPE_NAMES[dtype]}>")


def matmul_source(
    dtype: torch.dtype, tile: MatmulTile, layout: str, out_dtype: torch.dtype | None = None, format: str = ""
) -> KernelSource:
    """Returns the kernel of a matmul of one of MATMUL_TYPES, with a result in ``dtype`` or fp32; or of e4m3 operands.

    Those have ``format``, one of SCALE_FORMATS, a weight by rows and an ``out_dtype``.
    """
    operands = (TYPE_NAMES | {FP8: "e4m3"})[dtype]
    arguments = [operands, str(tile), layout, TYPE_NAMES[out_dtype or dtype], *filter(None, [format])]
    return KernelSource("matmul/matmul.cu", f"matmul<{', '.join(arguments)}>", only_arch=MATMUL_ARCH)


def fused_matmul_source(
    algorithm: Algorithm,
    dtype: torch.dtype,
    world_size: int,
    tile: MatmulTile | SkinnyTile,
    layout: str,
    generated: Generated | None = None,
    codec: Codec | None = None,
    format: str = "",
) -> KernelSource:
    """Returns the fused kernel of a matmul and the sum of its result, in ``dtype``, or the all-gather of its rows.

    ``tile`` is one of the algorithm's tiles, or of PARTIAL_TILES. SKINNY_KERNELS take no epilogue, and only
    SUMMED_TILE_KERNELS a codec. ``format`` is one of SCALE_FORMATS if operands are e4m3, with a weight by rows.
    """
    result, travel, follow = TYPE_NAMES[dtype], "", generated.name if generated else ""
    if codec or (format and algorithm.row.sends_tiles):
        travel = f"AsCodes<{result}, {codec.type_name}>" if codec else f"AsElements<{result}>"
    if isinstance(tile, MatmulTile) and tile.partials:
        travel = f"AsPartials<{result}>"
    if not algorithm.row.is_skinny and (travel or format):
        follow = follow or "Identity"
    arguments = [result, world_size, tile, layout, *filter(None, (follow, travel, format))]
    name = f"{algorithm.kernel_name}<{', '.join(map(str, arguments))}>"
    code = generated.text if generated else ""
    return KernelSource(file_of(algorithm), name, only_arch=MATMUL_ARCH, generated=code)


KERNELS = kernels_that(lambda row: row.folder in ("allreduce", "scatter_gather", "quantized"))
NORM_KERNELS = kernels_that(lambda row: row.folder == "norm")
SKINNY_KERNELS = kernels_that(lambda row: row.is_skinny)
SUMMED_TILE_KERNELS = kernels_that(lambda row: row.sends_tiles)
GATHERING_KERNELS = kernels_that(lambda row: bool(row.tiles) and not row.is_skinny and not row.sends_tiles)
