"""Which kernels tests compile for which architectures."""

from __future__ import annotations

import re
from collections import Counter

from graphar.runtime.catalogue import KernelSource
from perf.kernels import catalogue

ARCHS = ("sm_80", "sm_90a", "sm_100a")


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
