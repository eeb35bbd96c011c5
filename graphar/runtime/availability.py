"""Whether graphar's kernels can run on this machine, and if not, why."""

from __future__ import annotations

import functools
import importlib
import itertools
import operator
import os
import re
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from graphar.errors import Reason
from graphar.runtime.compiler import nvrtc_version
from graphar.runtime.driver import check

DRIVER_CUDA, DRIVER = 13, 580  # the oldest driver that serves: its CUDA version, and its own version
COMMUNICATORS = "GRAPHAR_CONCURRENT_COMMUNICATORS"
PROJECT = "graphar-nvlink"


@dataclass(frozen=True)
class Availability:
    """The answer of :func:`graphar.is_available`: a truth value with a reason.

    Attributes:
        available: whether the kernels can run.
        reason: what is missing; or what was found, if nothing is.
    """

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available


def is_available() -> Availability:
    """Returns whether graphar's kernels can run on this machine, and why not.

    They need two or more GPUs of sm_80 or newer with peer access between all pairs, a driver, cuda-python and NVRTC.
    Without these, every op still works, on the CPU or over torch.distributed. Use the result as a truth value, or print
    its ``reason``. The call initialises CUDA if torch sees two devices or more.
    """
    if not torch.cuda.is_available():
        return Availability(False, "torch sees no CUDA device")
    count = torch.cuda.device_count()
    if count < 2:
        return Availability(False, f"kernels need at least 2 GPUs, torch sees {count}")
    old = [i for i in range(count) if torch.cuda.get_device_capability(i) < (8, 0)]
    if old:
        return Availability(False, f"kernels need sm_80 or newer, cuda:{old[0]} is older")
    if missing := missing_software():
        return Availability(False, missing)
    for pair in itertools.permutations(range(count), 2):
        if not torch.cuda.can_device_access_peer(*pair):
            return Availability(False, no_peer_access(*pair))
    return Availability(True, f"{count} GPUs with peer access between all pairs")


def concurrent_communicators() -> int:
    """Returns how many communicators may have kernels on a GPU at a time, by the environment; ValueError below 2."""
    number = os.environ.get(COMMUNICATORS) or "2"
    if not (number.isascii() and number.isdecimal()) or int(number) < 2:
        raise ValueError(f"{COMMUNICATORS} must be an integer from 2 on, got {number!r}")
    return int(number)


def may_share_gpu() -> bool:
    """Whether ranks in processes may use one GPU, which runs their kernels in turn: for tests, which are slow then."""
    return os.environ.get("GRAPHAR_TEST_SHARE_GPU") == "1"


def no_peer_access(device: int, peer: int) -> str:
    return f"cuda:{device} has no peer access to cuda:{peer} (`nvidia-smi topo -p2p r` says why)"


def missing_software() -> Reason | None:
    """Returns which software is missing to compile and launch kernels, and how to install it."""
    return missing_cuda_python() or missing_nvrtc() or missing_driver()


def missing_cuda_python() -> Reason | None:
    try:
        for name in ("cuda.bindings.driver", "cuda.core"):
            importlib.import_module(name)
    except ImportError as error:
        return f"cuda-python cannot be imported ({error}): {install('cuda-bindings', 'cuda-core')}"
    return None


def missing_nvrtc() -> Reason | None:
    try:
        nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"NVRTC cannot be loaded ({_first_line(error)}): {install('nvidia-cuda-nvrtc')}"
    return None


def missing_driver() -> Reason | None:
    try:
        version = driver_cuda_version()
    except RuntimeError as error:
        return f"the CUDA driver cannot be loaded ({_first_line(error)}): install NVIDIA driver {DRIVER} or newer"
    if version[0] < DRIVER_CUDA:
        cuda = ".".join(map(str, version))
        return f"the driver is for CUDA {cuda}: install NVIDIA driver {DRIVER} or newer, for CUDA {DRIVER_CUDA}"
    return None


def driver_cuda_version() -> tuple[int, int]:
    """Returns the newest CUDA version that the driver serves: major and minor. RuntimeError if there is no driver."""
    # This does not initialise the driver: calls with CPU tensors ask for it, too.
    status, version = importlib.import_module("cuda.bindings.driver").cuDriverGetVersion()
    check("cuDriverGetVersion", status)
    return version // 1000, version % 1000 // 10


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# Required distributions, from pyproject.toml or the installed metadata.
@functools.cache
def requirements() -> dict[str, str]:
    """Returns the version specifier of each required distribution and of "python": ">=13,<14"; "" allows any."""
    checkout = Path(__file__).parents[2] / "pyproject.toml"
    if checkout.is_file():
        project = tomllib.loads(checkout.read_text())["project"]
        python, needed = project["requires-python"], project["dependencies"]
    else:
        python, needed = metadata.metadata(PROJECT)["Requires-Python"], metadata.requires(PROJECT) or []
    split = [re.findall(r"^([\w.-]+)\s*(.*)", line)[0] for line in needed if "extra ==" not in line]
    return {"python": python} | dict(split)


def meets(version: str, specifier: str) -> bool:
    """Whether ``specifier`` allows a version. Raises ValueError for rules other than >= and <."""
    rules = [re.fullmatch(r"(>=|<)(\d.*)", rule) for rule in filter(None, specifier.replace(" ", "").split(","))]
    if not all(rules):
        raise ValueError(f"{specifier} has a rule other than >= and <")
    allows = {">=": operator.ge, "<": operator.lt}
    return all(allows[rule[1]](_numbers(version), _numbers(rule[2])) for rule in rules if rule)


def install(*names: str) -> str:
    """Returns the pip command that installs the distributions ``names`` in the versions that graphar requires."""
    return "python -m pip install " + " ".join(f"'{name}{requirements()[name]}'" for name in names)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version without trailing zeros, for comparison: "2.13.0+cpu" is (2, 13)."""
    numbers = [int(part) for part in re.findall(r"^\d+(?:\.\d+)*", version)[0].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
