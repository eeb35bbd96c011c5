"""Programs of the simulator for tests: kernels with small constants, and programs that run parts of kernels alone."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from graphar.errors import CompileError
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import source_directory
from graphar.simulator import build as simulator
from graphar.simulator.build import Mutation
from tests.changes import any_changed, included
from tests.host.schemata import NotSelectable, can_be_chosen, with_all

PROGRAMS = Path(__file__).parent / "programs"

# A block of 640 threads takes the sanitizers too long: two channels instead of four.
TMA_CHANNELS = 2
NORM_SLOTS = 64  # so that rows of few packs take several rounds
GROUP_LANES = 4  # so that few groups of rows are several for one lane
UNIT_PACKS = 64  # so that small rows are several units
SPINS_A_LOOK = 64  # so that waits without an end, which look at the clock twice, take few steps
EARLY_PLACES = 2  # so that of three stages one is loaded later
_SMALLER = (
    Mutation(
        "device/matmul/skinny.cuh", "constexpr u32 early_places = 5;", f"constexpr u32 early_places = {EARLY_PLACES};"
    ),
    Mutation(
        "device/matmul/gathered_rows.cuh",
        "constexpr u32 unit_packs = 1024;",
        f"constexpr u32 unit_packs = {UNIT_PACKS};",
    ),
    Mutation("allreduce/two_shot_tma.cu", "constexpr int channels = 4;", f"constexpr int channels = {TMA_CHANNELS};"),
    Mutation("device/sync/deadline.cuh", "spins_a_look = 1024;", f"spins_a_look = {SPINS_A_LOOK};"),
    Mutation("device/rms_norm.cuh", "constexpr int norm_slots = 1024;", f"constexpr int norm_slots = {NORM_SLOTS};"),
    Mutation(
        "norm/residual_rmsnorm_backward.cu",
        "constexpr int group_lanes = 64;",
        f"constexpr int group_lanes = {GROUP_LANES};",
    ),
)


WHOLE = True  # whether all is run, mistakes that no change has to do with among it
BUILT = {"kernels": set(), "choices": set(), "mistakes": set()}  # the names of programs, by what they run
Mistake = tuple[Mutation, ...]  # that together are one
_KNOWN: dict[Mistake, tuple[Mistake, ...]] = {}  # a mistake, and those that share its program


def seeds(count: int, share: int = 3) -> range:
    """So many seeds; without WHOLE a third of them."""
    return range(count if WHOLE else -(-count // share))


def known(mistakes: Iterable[Mutation | Mistake]) -> None:
    """Has these mistakes, those of a module of tests, share programs: one for the same kernels.

    One whose text does not stand in its file is left to its own test.
    """
    whole = dict.fromkeys((one,) if isinstance(one, Mutation) else one for one in mistakes)
    group = tuple(mistake for mistake in whole if all(map(_stands_once, mistake)))
    _KNOWN.update(dict.fromkeys(group, group))


def _stands_once(change: Mutation) -> bool:
    return (_text(change.file) or "").count(change.old) == change.times == 1


@functools.cache
def _text(file: str) -> str | None:
    """The text of a file of cuda_src with small constants; None if there is none."""
    path = source_directory() / file
    if not path.is_file():
        return None
    return functools.reduce(lambda text, one: one.apply(text) if one.file == file else text, _SMALLER, path.read_text())


def build(sources: tuple[KernelSource, ...], sanitizer: str, *mutations: Mutation | None) -> Path:
    """The program that runs ``sources``, kernels of one file of cuda_src or of programs/, with small constants.

    A mistake that has to be compiled by itself skips its test if nothing changed that it depends on, but for WHOLE.
    """
    made = tuple(filter(None, mutations))
    if made in _KNOWN:
        with contextlib.suppress(NotSelectable, CompileError):
            return _chosen(sources, sanitizer, made)
        files = {file for change in made for file in included(change.file)}
        if not WHOLE and not any_changed([*files, "tests/host/", "graphar/simulator/"]):
            pytest.skip("neither what the mistake is in nor what runs it changed")
    program = simulator.build(sources, sanitizer, (*_SMALLER, *made), PROGRAMS)
    BUILT["mistakes" if made else "kernels"].add(program.name)
    return program


def _chosen(sources: tuple[KernelSource, ...], sanitizer: str, mistake: Mistake) -> Path:
    """The program that has all mistakes of a group, by the name with which it makes this one (mistakes.hpp)."""
    if not _can_be_chosen(mistake):
        raise NotSelectable(mistake)
    program = simulator.build(sources, sanitizer, (*_SMALLER, *_with_group(_KNOWN[mistake])), PROGRAMS)
    BUILT["choices"].add(program.name)
    name = Path(_names().name, f"{program.name}-{_KNOWN[mistake].index(mistake) + 1}")
    with contextlib.suppress(FileExistsError):
        name.symlink_to(program)
    return name


def _can_be_chosen(mistake: Mistake) -> bool:
    return all(can_be_chosen(_text(change.file), change) for change in mistake)


@functools.cache
def _with_group(group: tuple[Mistake, ...]) -> tuple[Mutation, ...]:
    """Each file of a group with all of its mistakes that can be chosen."""
    of_files = {}
    for number, mistake in enumerate(group, 1):
        for change in mistake if _can_be_chosen(mistake) else ():
            of_files.setdefault(change.file, []).append((number, change))
    return tuple(Mutation(file, _text(file), with_all(_text(file), ones)) for file, ones in of_files.items())


@functools.cache
def _names() -> tempfile.TemporaryDirectory:
    """A folder of this process."""
    return tempfile.TemporaryDirectory(prefix="graphar-mistakes-", ignore_cleanup_errors=True)
