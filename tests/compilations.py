"""Which kernels tests compile for which architectures."""

import hashlib
import heapq
import importlib.metadata
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path

import torch

from graphar.numerics.codecs import NAMES, codec
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.norms import NORM_OUTPUTS
from graphar.plan.algorithms import COMPRESSING, MATMUL_TYPES, Algorithm, kernels_that
from graphar.plan.grids import CLUSTERS
from graphar.plan.scratch import WORLD_SIZES
from graphar.plan.tables import Table, shipped_table
from graphar.plan.tiles import LAYOUTS, PARTIAL_TILES, skinny_tile
from graphar.plan.work import Norm, template_of
from graphar.runtime import compiler
from graphar.runtime.catalogue import (
    GATHERING_KERNELS,
    NORM_KERNELS,
    SCALE_FORMATS,
    SKINNY_KERNELS,
    SUMMED_TILE_KERNELS,
    KernelSource,
    fused_matmul_source,
    kernel_source,
)
from graphar.runtime.compiler import Cubin
from perf.kernels import TREE_WORLD_SIZES, TREES, catalogue
from tests.changes import any_changed, included

ARCHS = ("sm_80", "sm_90a", "sm_100a")
MOST_CHANGED = 60  # kernels of changed files that are sampled for that alone
KEPT = Path(__file__).parents[1] / "build" / "kernels"


def arguments(source: KernelSource) -> list[str]:
    """The template arguments in a kernel's name, those of nested templates included."""
    return re.split(r"[<>, ]+", source.name)[1:]


def words(source: KernelSource) -> set[tuple]:
    """The (file, place, argument) of a kernel that every architecture has to compile.

    Arguments that are numbers are left out: they are sizes, and one architecture for each size is enough. A generated
    expression is the same code in every file, so its file is empty.
    """
    placed = [(place, argument) for place, argument in enumerate(arguments(source)) if not argument.isdigit()]
    return {("" if source.generated else source.file, *one) for one in placed}


def features(source: KernelSource) -> set[str]:
    """A kernel's file and its arguments that are no numbers: dtypes, codecs, expressions, variants."""
    return {source.file, *(argument for argument in arguments(source) if not argument.isdigit())}


def effort(source: KernelSource) -> tuple[int, int]:
    """A sort key by compile time: the length of generated code, then the sizes of unrolled loops."""
    return len(source.generated), sum(int(argument) for argument in arguments(source) if argument.isdigit())


def some() -> list[tuple[KernelSource, str]]:
    """A few kernels that cover all features, cheap kernels first. Architectures take turns."""
    turns, found, cases = Counter(), set(), []
    for source in sorted(catalogue(), key=effort):
        if not features(source) <= found:
            arch = min((arch for arch in ARCHS if source.runs_on(arch)), key=lambda arch: turns[arch])
            cases.append((source, arch))
            turns[arch] += 1
            found |= features(source)
    return cases


def combinations(source: KernelSource) -> set[tuple]:
    """A kernel's file with each of its arguments: dtype, number of ranks, codec, numbers of a tile."""
    return {("" if source.generated else source.file, *one) for one in enumerate(arguments(source))}


def sample(budgeted: Sequence[KernelSource]) -> list[tuple[KernelSource, str]]:
    """Few kernels that cover all :func:`combinations`, and up to MOST_CHANGED whose files changed (tests.changes).

    ``budgeted`` are compiled for sm_90a in any case, and the cases of :func:`some` are among them. Next come kernels of
    few ranks that a tuning table names, then others that it names, for sm_90a. For the rest architectures take turns.
    """
    turns, ranks = Counter(), named()
    of_few_ranks = [source for source in ranks if ranks[source] <= FEW_RANKS]
    changed = [source for source in of_few_ranks if source not in budgeted and any_changed(included(source.file))]
    changed = changed[:: -(-len(changed) // MOST_CHANGED) or 1]
    made = dict.fromkeys((source, "sm_90a") for source in [*budgeted, *changed])
    made |= dict.fromkeys(some())  # `tests` compile them too, and keep them
    found = set().union(*(combinations(source) for source, _ in made))
    made |= dict.fromkeys((source, "sm_90a") for few in (of_few_ranks, ranks) for source in cover(few, found))
    for source in cover(catalogue(), found):
        arch = min((arch for arch in ARCHS if source.runs_on(arch)), key=lambda arch: turns[arch])
        made[source, arch] = None
        turns[arch] += 1
    return list(made)


def cases(budgeted: Sequence[KernelSource]) -> dict[str, list[tuple[KernelSource, str]]]:
    """What tests compile: always, before a change goes in, and before a release."""
    return {"some": some(), "sample": sample(budgeted), "all": taken()}


def cover(sources: Iterable[KernelSource], found: set[tuple]) -> Iterator[KernelSource]:
    """Few of the kernels, which have all their :func:`combinations`, but for those ``found``, to which these are added.

    The next one is always one with the most new ones, and of these the cheapest.
    """
    ordered = sorted(sources, key=effort)
    left = [(-len(combinations(source)), at) for at, source in enumerate(ordered)]
    heapq.heapify(left)
    while left:
        _, at = left[0]
        new = combinations(ordered[at]) - found
        if not new:
            heapq.heappop(left)
        elif (-len(new), at) == left[0]:
            found |= new
            yield ordered[at]
        else:
            heapq.heapreplace(left, (-len(new), at))


def keep_kernels(*nvrtc: str) -> None:
    """Has this process use a kernel cache that runs share: of these packages, or of those that are installed.

    Its path depends on the compiler's code and packages, unlike the cache's keys.
    """
    packages = [f"{name} {importlib.metadata.version(name)}" for name in ("cuda-core", "cuda-bindings")]
    found = [one for one in importlib.metadata.distributions() if "nvrtc" in (one.name or "")]
    packages += sorted(nvrtc or {f"{one.name} {one.version}" for one in found})
    text = "\n".join([Path(compiler.__file__).read_text(), *packages])
    path = KEPT / hashlib.sha256(text.encode()).hexdigest()[:16]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["GRAPHAR_CACHE_DIR"] = str(path)


def compile_kept(source: KernelSource, arch: str) -> Cubin:
    """The kernel. What the compiler says of it, it says again next time: a cubin from the cache has lost this text."""
    cubin = compiler.compile_kernel(source, arch)
    if cubin.said:
        Path(os.environ["GRAPHAR_CACHE_DIR"], compiler.cache_key(source, arch)).unlink()
    return cubin


def taken() -> list[tuple[KernelSource, str]]:
    """Every kernel of the catalogue for one architecture at least, and all :func:`words` for every architecture.

    An error that occurs on one architecture with one size only, such as a lack of registers, can go unnoticed.
    `python -m perf compile` compiles every kernel for every architecture.
    """
    turns, cases = Counter(), []
    for source in catalogue():
        archs = [arch for arch in ARCHS if source.runs_on(arch)]
        family = len(archs), "" if source.generated else source.file  # has turns of its own, to reach all
        cases.append((source, archs[turns[family] % len(archs)]))
        turns[family] += 1
    for arch in ARCHS:
        found = set().union(*(words(source) for source, at in cases if at == arch))
        for source in catalogue():
            if source.runs_on(arch) and not words(source) <= found:
                cases.append((source, arch))
                found |= words(source)
    return cases


FEW_RANKS = 4  # up to which kernels are compiled for all dtypes; at more ranks for the first one
_LIKELIEST = (*range(2, FEW_RANKS + 1), WORLD_SIZES[-1])  # the number of ranks of kernels that have registers to spare


def named() -> dict[KernelSource, int]:
    """The kernels without an epilogue that the shipped tuning tables name, and the number of ranks of each."""
    files = resources.files("graphar.plan").joinpath("tables").iterdir()
    found = {}
    for file in files:
        table = shipped_table(file.name.removesuffix(".json"))
        for world_size in WORLD_SIZES:
            for source in _named_at(table, world_size):
                found[source] = world_size
    return found


def _named_at(table: Table, world_size: int) -> Iterator[KernelSource]:
    for entry in itertools.chain(table.rows.get(world_size, []), *table.parts.values()):
        algorithm = Algorithm(entry["algorithm"])
        for dtype, variant in itertools.product(_dtypes(algorithm, world_size), algorithm.row.variants):
            yield kernel_source(algorithm, dtype, world_size, variant)
        if algorithm.row.adds_tree and world_size in TREE_WORLD_SIZES:
            for variant, order in itertools.product(algorithm.row.variants, TREES):
                yield kernel_source(algorithm, torch.float32, world_size, variant, order=order)
    for op, algorithm in COMPRESSING.items():
        if table.lossless.least(op, world_size):
            yield kernel_source(algorithm, algorithm.row.dtypes[0], world_size)
    if world_size in _LIKELIEST:
        for algorithm, name in itertools.product(kernels_that(lambda row: row.takes_codec), NAMES):
            yield kernel_source(algorithm, algorithm.row.dtypes[0], world_size, codec(name).type_name)
    yield from _norms_at(world_size)
    yield from _matmuls_at(table, world_size)


def _dtypes(algorithm: Algorithm, world_size: int) -> tuple:
    return algorithm.row.dtypes[: None if world_size <= FEW_RANKS else 1]


def _norms_at(world_size: int) -> Iterator[KernelSource]:
    for algorithm, cluster, output in itertools.product(NORM_KERNELS, CLUSTERS, NORM_OUTPUTS):
        dtypes = _dtypes(algorithm, world_size)
        if cluster > 2:  # a thread may have twice the registers, or more
            dtypes = dtypes[: world_size in _LIKELIEST]
        for dtype in dtypes:
            yield kernel_source(algorithm, dtype, world_size, f"{cluster}, {output}")
            if world_size in TREE_WORLD_SIZES and output == "like_input":
                tree = template_of(Norm(algorithm.op, (), 1, order="tree", out_dtype=dtype), cluster)
                yield kernel_source(algorithm, torch.float32, world_size, tree)


def _matmuls_at(table: Table, world_size: int) -> Iterator[KernelSource]:
    policy, dtype = table.matmul, MATMUL_TYPES[0]
    if world_size in policy.skinny_from_columns:
        for algorithm in SKINNY_KERNELS:
            for tile in algorithm.row.tiles:
                yield fused_matmul_source(algorithm, dtype, world_size, tile, LAYOUTS[0])
                for scales in SCALE_FORMATS if world_size in _LIKELIEST else ():
                    yield fused_matmul_source(algorithm, dtype, world_size, tile, LAYOUTS[0], format=scales)
                if world_size in TREE_WORLD_SIZES:
                    partial = skinny_tile(tile.rows, LEAVES // world_size)
                    yield fused_matmul_source(algorithm, dtype, world_size, partial, LAYOUTS[0])
    if world_size in table.allgather_matmul.tiles_from_rows:
        for algorithm in GATHERING_KERNELS:
            for tile in algorithm.row.tiles:
                yield fused_matmul_source(algorithm, dtype, world_size, tile, LAYOUTS[0])
    if world_size in policy.tiles_from_numel:
        for algorithm in SUMMED_TILE_KERNELS:
            for tile in (policy.small_tile, policy.large_tile, policy.alternating_tile):
                if tile in algorithm.row.tiles:
                    yield fused_matmul_source(algorithm, dtype, world_size, tile, LAYOUTS[0])
            if world_size in TREE_WORLD_SIZES:
                for tile in PARTIAL_TILES[LEAVES // world_size]:
                    yield fused_matmul_source(algorithm, dtype, world_size, tile, LAYOUTS[0])
