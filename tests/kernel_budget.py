"""The code of the kernels that `auto` takes between 2 and 4 ranks, and of losses, against a committed budget.

It needs no GPU. `python -m tests.kernel_budget` compares, and `--write` makes what it found the budget. Kernels are
compiled by each version of NVRTC that the budget names: the oldest one that users have, with torch for CUDA 13.0, and
the newest one. pip brings those that are not installed into build/nvrtc. Kernels whose sources are unchanged come from
build/kernels.
"""

import argparse
import contextlib
import ctypes
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from graphar.runtime.catalogue import NORM_KERNELS, KernelSource, file_of
from graphar.runtime.compiler import nvrtc_version
from perf.cubin import code, resources
from perf.kernels import softmax_kernels, softmax_results_kernels
from tests.compilations import FEW_RANKS, arguments, compile_kept, keep_kernels, named
from tests.processes import PROCESSES

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("kernel_budget.json")
ARCH = "sm_90a"
PACKAGE = "nvidia-cuda-nvrtc"
LIBRARIES = Path("nvidia", "cu13", "lib")  # in the package
SHARE = 0.01  # by how much a kernel may exceed its budget
COMMAND = "python -m tests.kernel_budget"


class Cost(NamedTuple):
    """What a kernel takes: bytes are those of a thread."""

    instructions: int
    registers: int
    spilled_nbytes: int
    stack_nbytes: int


Costs = Mapping[str, Cost]  # by the kernel's name


def kernels() -> list[KernelSource]:
    """The kernels of the budget. Those of fp16 are left out, which are those of bf16 with other conversions."""
    norms = {file_of(algorithm) for algorithm in NORM_KERNELS}
    few = [source for source, world_size in named().items() if world_size <= FEW_RANKS and _is_counted(source, norms)]
    return [*few, *softmax_kernels(torch.bfloat16), *softmax_results_kernels()]


def _is_counted(source: KernelSource, norms: set[str]) -> bool:
    given = arguments(source)
    of_fp32 = given[0] == "fp32" and "TreeOrder" not in given
    return "fp16" not in given and not (source.file in norms and of_fp32)


def of_most_ranks() -> list[KernelSource]:
    """The kernels between FEW_RANKS ranks of bf16 or bytes, which take a minute."""
    return [one for one in kernels() if arguments(one)[:2] in (["bf16", str(FEW_RANKS)], ["byte", str(FEW_RANKS)])]


def some() -> list[KernelSource]:
    """One of these of each file, for a test that takes seconds."""
    found: dict[str, KernelSource] = {}
    for source in of_most_ranks():
        found.setdefault(source.file, source)
    return list(found.values())


def read() -> dict[str, Costs]:
    """The budget, by version of NVRTC."""
    held = json.loads(FILE.read_text())
    rows = held["kernels"].items()
    return {version: {name: Cost(*of_each[at]) for name, of_each in rows} for at, version in enumerate(held["nvrtc"])}


def write(budget: Mapping[str, Costs]) -> None:
    """Writes a budget with a line for each kernel."""
    versions = list(budget)
    rows = {name: [list(budget[version][name]) for version in versions] for name in sorted(budget[versions[0]])}
    lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(of_each)}" for name, of_each in rows.items())
    head = f'  "nvrtc": {json.dumps(versions)},\n  "of_each": {json.dumps(Cost._fields)},\n'
    FILE.write_text(f'{{\n{head}  "kernels": {{\n{lines}\n  }}\n}}\n')


def libraries(version: str) -> Path:
    """The folder of NVRTC's libraries of a version: the installed ones, or those that pip brings once."""
    if importlib.metadata.version(PACKAGE) == version:
        return Path(importlib.metadata.distribution(PACKAGE).locate_file(LIBRARIES))
    folder = ROOT / "build" / "nvrtc" / version
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder.parent))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(made)]
        try:
            subprocess.run([*pip, f"{PACKAGE}=={version}"], check=True, capture_output=True)
            with contextlib.suppress(OSError):  # another process was faster
                made.replace(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder / LIBRARIES


def costs(version: str, sources: Sequence[KernelSource]) -> dict[str, Cost]:
    """What each kernel takes with a version of NVRTC.

    Raises:
        subprocess.CalledProcessError: pip does not bring that version.
    """
    with ProcessPoolExecutor(os.cpu_count(), PROCESSES, _use, (version, libraries(version))) as pool:
        return dict(zip([source.name for source in sources], pool.map(_cost, sources), strict=True))


def _use(version: str, folder: Path) -> None:
    """Loads NVRTC from a folder, before anything finds another, and compiles into a cache of its own."""
    for pattern in ("libnvrtc-builtins.so.*", "libnvrtc.so.*"):
        (library,) = folder.glob(pattern)
        ctypes.CDLL(str(library))
    if ".".join(map(str, nvrtc_version())) != version.rpartition(".")[0]:
        raise RuntimeError(f"{folder} holds NVRTC {nvrtc_version()}, not {version}")
    keep_kernels(f"{PACKAGE} {version}")


def _cost(source: KernelSource) -> Cost:
    cubin = compile_kept(source, ARCH)
    needs, of = resources(cubin.image, cubin.symbol), code(cubin.image)
    return Cost(of.instructions, needs.registers, of.spilled_nbytes, needs.stack_nbytes)


def exceeding(found: Costs, budget: Costs) -> list[str]:
    """A line for each kernel that takes more than its budget and SHARE of it, or that has none."""
    lines = []
    for name, cost in found.items():
        if name not in budget:
            lines.append(f"{name} has no budget")
        lines += [
            f"{name}: {what} {allowed} -> {value}"
            for what, value, allowed in zip(Cost._fields, cost, budget.get(name, cost), strict=True)
            if value > allowed * (1 + SHARE)
        ]
    return lines


def changes(found: Costs, budget: Costs) -> list[str]:
    """A line for each kernel that differs from its budget: what it took, and what it takes."""
    lines = []
    for name, cost in found.items():
        held = budget.get(name)
        if held and held != cost:
            pairs = zip(Cost._fields, held, cost, strict=True)
            lines.append(f"{name}: " + ", ".join(f"{what} {old} -> {new}" for what, old, new in pairs if old != new))
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="kernels whose names contain one")
    parser.add_argument("--nvrtc", nargs="+", metavar="VERSION", help="with other versions than those of the budget")
    parser.add_argument("--write", action="store_true", help="make what is found the budget")
    parser.add_argument("--list", action="store_true", help="say what each kernel takes")
    options = parser.parse_args()
    held, failed, budget = read(), False, {}
    sources = [source for source in kernels() if any(text in source.name for text in options.only)]
    for version in options.nvrtc or held:
        before, found = held.get(version, {}), costs(version, sources)
        over = [] if options.write else exceeding(found, before)
        failed |= bool(over)
        print(f"NVRTC {version}: {len(found)} kernels, {len(over)} lines over the budget")
        for line in [f"{name}: {cost}" for name, cost in found.items()] if options.list else changes(found, before):
            print(f"  {line}")
        for line in over:
            print(f"  OVER: {line}")
        budget[version] = found if options.only == [""] else {**before, **found}
    if options.write:
        write(budget)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
