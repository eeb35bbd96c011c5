"""Programs of the simulator for tests: kernels with small constants, and programs that run parts of kernels alone."""

from __future__ import annotations

from pathlib import Path

from graphar.runtime.catalogue import KernelSource
from graphar.simulator import build as simulator
from graphar.simulator.build import Mutation

PROGRAMS = Path(__file__).parent / "programs"

# A block of 640 threads takes the sanitizers too long: two channels instead of four.
TMA_CHANNELS = 2
NORM_SLOTS = 64  # so that rows of few packs take several rounds
GROUP_LANES = 4  # so that few groups of rows are several for one lane
UNIT_PACKS = 64  # so that small rows are several units
EARLY_PLACES = 2  # so that of three stages one is loaded later
_SMALLER = (
    Mutation(
        "device/matmul/skinny.cuh",
        "constexpr u32 early_places = 5;",
        f"constexpr u32 early_places = {EARLY_PLACES};",
    ),
    Mutation(
        "device/matmul/gathered_rows.cuh",
        "constexpr u32 unit_packs = 1024;",
        f"constexpr u32 unit_packs = {UNIT_PACKS};",
    ),
    Mutation("allreduce/two_shot_tma.cu", "constexpr int channels = 4;", f"constexpr int channels = {TMA_CHANNELS};"),
    Mutation("device/rms_norm.cuh", "constexpr int norm_slots = 1024;", f"constexpr int norm_slots = {NORM_SLOTS};"),
    Mutation(
        "norm/residual_rmsnorm_backward.cu",
        "constexpr int group_lanes = 64;",
        f"constexpr int group_lanes = {GROUP_LANES};",
    ),
)


def build(sources: tuple[KernelSource, ...], sanitizer: str, *mutations: Mutation | None) -> Path:
    """The program that runs ``sources``, kernels of one file of cuda_src or of programs/, with small constants."""
    return simulator.build(sources, sanitizer, (*_SMALLER, *filter(None, mutations)), PROGRAMS)
