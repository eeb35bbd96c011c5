"""Describes the machine of a report."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from graphar.runtime.compiler import nvrtc_version

ROOT = Path(__file__).resolve().parents[1]
LOCAL = Path("build", "reports")  # git ignores it, as it does all of build/


def describe() -> dict[str, object]:
    """Returns the description of this machine for reports. Missing items are None. Creates no CUDA context."""
    block: dict[str, object] = {
        "gpu": None,
        "gpu_count": gpu_count(),
        "driver": None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "nccl": None,
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "nvrtc": nvrtc(),
    }
    if block["gpu_count"]:
        gpu, driver = gpu_and_driver()
        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
        block |= {"gpu": gpu, "driver": driver, "nccl": nccl}
    return block


def gpu_count() -> int:
    """Returns how many GPUs torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def memory_rate() -> float | None:
    """Returns the rate of the current GPU's memory in GB/s (1e9 bytes), or None if torch does not have its clock.

    Memory of GPUs transfers twice in each clock cycle.
    """
    properties = torch.cuda.get_device_properties()
    clock_khz, width = (getattr(properties, f"memory_{name}", 0) for name in ("clock_rate", "bus_width"))
    return 2 * clock_khz * 1e3 * width / 8 / 1e9 or None


def check_world_sizes(world_sizes: Sequence[int], gpu_count: int) -> None:
    """Ends the program if this machine cannot run these numbers of ranks."""
    if min(world_sizes) < 2 or (gpu_count >= 2 and max(world_sizes) > gpu_count):
        most = f"from 2 to the number of GPUs, {gpu_count}" if gpu_count >= 2 else "2 or more"
        sys.exit(f"--world-size must be {most}")


def gpu_and_driver() -> tuple[str, str]:
    import pynvml

    pynvml.nvmlInit()
    try:
        return pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)), pynvml.nvmlSystemGetDriverVersion()
    finally:
        pynvml.nvmlShutdown()


def cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    match = re.search(r"^model name\s*: (.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return match[1] if match else platform.processor() or platform.machine()


def nvrtc() -> str | None:
    """Returns the version of the compiler of the kernels: of its package, else of the library. None without it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("nvidia-cuda-nvrtc")
    with contextlib.suppress(Exception):  # cuda.pathfinder raises one of its own
        return ".".join(map(str, nvrtc_version()))
    return None


def commit(root: Path = ROOT) -> str | None:
    """Returns a checkout's commit, with "-dirty" if files were changed. None outside a repository."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout.strip() or None


def slug(machine: dict[str, object]) -> str:
    """Returns a short name: "h200x4" for four GPUs "NVIDIA H200", "cpu" without a GPU."""
    if not machine["gpu"]:
        return "cpu"
    model = re.search(r"[A-Za-z]*\d\w*", str(machine["gpu"]))
    name = model[0] if model else re.sub(r"\W+", "", str(machine["gpu"]))
    return f"{name.lower()}x{machine['gpu_count']}"


def one_line(machine: dict[str, object]) -> str:
    parts = [f"{machine['cpu']} ({machine['cpu_count']} cores)"]
    if machine["gpu"]:
        parts = [f"{machine['gpu_count']}x {machine['gpu']}", f"driver {machine['driver']}", f"CUDA {machine['cuda']}"]
    parts.append(f"torch {machine['torch']}")
    if machine["nccl"]:
        parts.append(f"NCCL {machine['nccl']}")
    if machine.get("nvrtc"):  # earlier reports do not have it
        parts.append(f"NVRTC {machine['nvrtc']}")
    return ", ".join([*parts, f"commit {machine['commit'] or 'unknown'}", str(machine["date"])])


def folder(reports: Path, machine: dict[str, object]) -> Path:
    """Makes and returns the folder of this machine's reports. It has the newest report of each topic.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path = reports / slug(machine)
    path.mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise PermissionError(f"{path} cannot be written")
    return path
