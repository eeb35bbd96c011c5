"""Which kernels tests compile for which architectures."""

from __future__ import annotations

import re
from collections import Counter

from graphar.runtime.catalogue import KernelSource, catalogue

ARCHS = ("sm_80", "sm_90a", "sm_100a")


def words(source: KernelSource) -> set[tuple]:
    """What a kernel's code may depend on where architectures differ: its file, and its arguments that are no numbers.

    Numbers are sizes: each is compiled, but not for each architecture. An expression is the same code in every file.
    """
    arguments = list(enumerate(re.split(r"[<>, ]+", source.name)[1:]))
    return {("" if source.generated else source.file, *placed) for placed in arguments if not placed[1].isdigit()}


def some() -> list[tuple[KernelSource, str]]:
    """Few that any change of a source affects: every word, architectures taking turns, and every file for each one."""
    turns, found, cases = Counter(), set(), []
    for source in catalogue():
        if not words(source) <= found:
            archs = [arch for arch in ARCHS if source.runs_on(arch)]
            cases.append((source, archs[turns[source.file] % len(archs)]))
            turns[source.file] += 1
            found |= words(source)
    for arch in ARCHS:
        files = {source.file for source, at in cases if at == arch}
        for source in catalogue():
            if source.runs_on(arch) and source.file not in files:
                cases.append((source, arch))
                files.add(source.file)
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
