"""Ordering mistakes that other libraries had, in kernels of tests/simulator/mistakes: the simulator finds each of them.

Each kernel has its mistake. A replacement of a line or two mends it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import graphar
from graphar import simulator
from graphar.plan.algorithms import Algorithm
from graphar.simulator import Mutation

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("nothing_stays_loaded")]

FOLDER = Path(__file__).parent / "mistakes"
NUMEL = (8, 1000)  # one pack; several packets of a block, the last of which is not whole
SLOT_NBYTES = 2048
WRONG_ELEMENT, DATA_RACE = r"element \d+ is .*, expected ", "ThreadSanitizer: data race"


@dataclass(frozen=True)
class Mistake:
    """A kernel with a mistake.

    Attributes:
        name: of the kernel.
        slots: of its scratch, by the number of ranks.
        mended: the lines that mend it, as they are and as they should be.
        sanitizer: finds it.
        says: a pattern of what the failure says.
        signal_pad: whether the scratch begins with one.
    """

    name: str
    slots: Callable[[int], int]
    mended: tuple[tuple[str, str], ...]
    sanitizer: str
    says: str
    signal_pad: bool = True

    def load(self) -> Algorithm:
        return graphar.load_algorithm(
            FOLDER / f"{self.name}.cu",
            op="allreduce",
            scratch=lambda ranks: graphar.Scratch.of_slots(self.slots(ranks), SLOT_NBYTES, signal_pad=self.signal_pad),
            max_nbytes=SLOT_NBYTES,
            threads=32,
            blocks=4,
        )

    def mend(self, *lines: tuple[str, str]) -> tuple[Mutation, ...]:
        return tuple(Mutation(f"{self.name}.cu", old, new) for old, new in lines)


def of_every_rank_twice(ranks):
    return 2 * ranks


START = Mistake(
    "relaxed_start",
    lambda _: 3,
    (("store_relaxed_sys(flag(", "store_release_sys(flag("), ("load_relaxed_sys(flag(", "load_acquire_sys(flag(")),
    "thread",
    DATA_RACE,
    signal_pad=False,
)
MISTAKES = (
    Mistake(
        "partial_packet",
        of_every_rank_twice,
        (("if (k + 1 < packets) __syncthreads();", "__syncthreads();"),),
        "thread",
        DATA_RACE,
    ),
    Mistake(
        "relaxed_flag",
        of_every_rank_twice,
        (("store_relaxed_sys(flag,", "store_release_sys(flag,"),),
        "plain",
        WRONG_ELEMENT,
    ),
    Mistake(
        "shared_counter",
        lambda ranks: 2 * ranks + 2,
        ((", row = blockIdx.x;", ", row = count;"),),
        "plain",
        WRONG_ELEMENT,
    ),
    START,
)
SEEDS = {"plain": range(10), "thread": range(3)}

every_mistake = pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.name)


def simulate(mistake: Mistake, sanitizer: str, mutations: tuple[Mutation, ...] = ()) -> simulator.Report:
    return simulator.run(
        mistake.load(),
        ranks=(2, 3),
        dtypes=(torch.bfloat16,),
        numel=NUMEL,
        sanitizers=(sanitizer,),
        seeds=SEEDS[sanitizer],
        mutations=mutations,
    )


@every_mistake
def test_a_mistake_is_found_at_2_and_at_3_ranks(mistake):
    report = simulate(mistake, mistake.sanitizer)

    assert [failure.case.world_size for failure in report.failures] == [2, 3]
    assert all(re.search(mistake.says, failure.what) for failure in report.failures)


@every_mistake
@pytest.mark.parametrize("sanitizer", SEEDS)
def test_the_mended_kernel_passes(mistake, sanitizer):
    report = simulate(mistake, sanitizer, mistake.mend(*mistake.mended))

    assert (len(report.passed), report.failures) == (2, ())


@pytest.mark.parametrize("line", START.mended, ids=("release", "acquire"))
def test_a_barrier_needs_both_the_release_and_the_acquire(line):
    report = simulate(START, "thread", START.mend(line))

    assert all(DATA_RACE in failure.what for failure in report.failures)
    assert len(report.failures) == 2
