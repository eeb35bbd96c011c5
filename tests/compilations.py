"""Which kernels tests compile for which architectures."""

from __future__ import annotations

import re
from collections import Counter

from graphar.runtime.catalogue import KernelSource, catalogue

ARCHS = ("sm_80", "sm_90a", "sm_100a")


def arguments(source: KernelSource) -> list[str]:
    """Of the kernel's template, those of its arguments' own templates too."""
    return re.split(r"[<>, ]+", source.name)[1:]


def words(source: KernelSource) -> set[tuple]:
    """What a kernel's code may depend on where architectures differ: its file, and its arguments that are no numbers.

    Numbers are sizes: each is compiled, but not for each architecture. An expression is the same code in every file.
    """
    placed = [(place, argument) for place, argument in enumerate(arguments(source)) if not argument.isdigit()]
    return {("" if source.generated else source.file, *one) for one in placed}


def features(source: KernelSource) -> set[str]:
    """Its file, and its arguments that are no numbers: dtypes, codecs, expressions, variants."""
    return {source.file, *(argument for argument in arguments(source) if not argument.isdigit())}


def effort(source: KernelSource) -> tuple[int, int]:
    """More for what takes longer to compile: long expressions, then loops over ranks and tiles, which are unrolled."""
    return len(source.generated), sum(int(argument) for argument in arguments(source) if argument.isdigit())


def some() -> list[tuple[KernelSource, str]]:
    """A few kernels that have all features, each feature in the kernel of least effort; architectures take turns."""
    turns, found, cases = Counter(), set(), []
    for source in sorted(catalogue(), key=effort):
        if not features(source) <= found:
            arch = min((arch for arch in ARCHS if source.runs_on(arch)), key=lambda arch: turns[arch])
            cases.append((source, arch))
            turns[arch] += 1
            found |= features(source)
    return cases


def taken() -> list[tuple[KernelSource, str]]:
    """The whole catalogue: every kernel for one architecture at least, and for each so many that it has all words.

    What goes wrong on one architecture only and with one size only, as when registers do not suffice, can go unnoticed;
    `python -m perf compile` compiles every kernel for every architecture.
    """
    turns, cases = Counter(), []
    for source in catalogue():
        archs = [arch for arch in ARCHS if source.runs_on(arch)]
        family = len(archs), "" if source.generated else source.file  # takes turns by itself: it is to be in all
        cases.append((source, archs[turns[family] % len(archs)]))
        turns[family] += 1
    for arch in ARCHS:
        found = set().union(*(words(source) for source, at in cases if at == arch))
        for source in catalogue():
            if source.runs_on(arch) and not words(source) <= found:
                cases.append((source, arch))
                found |= words(source)
    return cases
