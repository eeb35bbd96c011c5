"""Whether graphar's kernels can run here, and if not, why."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch

from graphar.runtime.compiler import nvrtc_version
from graphar.runtime.requirements import install

DRIVER_CUDA, DRIVER = 13, 580  # the oldest driver: the CUDA version it must serve, and the driver's own


@dataclass(frozen=True)
class Availability:
    """True or false, and why.

    Attributes:
        available: whether the kernels can run.
        reason: what is missing, or what was found.
    """

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available


def is_available() -> Availability:
    """Whether this machine has what the kernels need: two GPUs of sm_80 or newer with peer access, a driver,
    cuda-python and NVRTC.

    Without them every op still works, on the CPU or over torch.distributed. Use it as a truth value, or print its
    ``reason``. Initialises CUDA where torch sees two devices or more.
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
    for i in range(count):
        for j in range(count):
            if i != j and not torch.cuda.can_device_access_peer(i, j):
                return Availability(False, no_peer_access(i, j))
    return Availability(True, f"{count} GPUs with peer access between all pairs")


def no_peer_access(device: int, peer: int) -> str:
    """How it is told that the driver gives ``device`` no way to the memory of ``peer``."""
    return f"cuda:{device} has no peer access to cuda:{peer} (`nvidia-smi topo -p2p r` says why)"


def missing_software() -> str:
    """What, besides GPUs, is missing to compile and launch kernels, and what to do about it; or nothing."""
    return missing_cuda_python() or missing_nvrtc() or missing_driver()


def missing_cuda_python() -> str:
    """Why cuda-python cannot be imported, or nothing."""
    try:
        for name in ("cuda.bindings.driver", "cuda.core"):
            importlib.import_module(name)
    except ImportError as error:
        return f"cuda-python cannot be imported ({error}): {install('cuda-bindings', 'cuda-core')}"
    return ""


def missing_nvrtc() -> str:
    """Why NVRTC cannot be loaded, or nothing."""
    try:
        nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"NVRTC cannot be loaded ({_first_line(error)}): {install('nvidia-cuda-nvrtc')}"
    return ""


def missing_driver() -> str:
    """Why the driver cannot be used, or nothing. Needs cuda-python."""
    try:
        version = driver_cuda_version()
    except RuntimeError as error:
        return f"the CUDA driver cannot be loaded ({_first_line(error)}): install NVIDIA driver {DRIVER} or newer"
    if version[0] < DRIVER_CUDA:
        found = ".".join(map(str, version))
        return f"the driver is for CUDA {found}: install NVIDIA driver {DRIVER} or newer, for CUDA {DRIVER_CUDA}"
    return ""


def driver_cuda_version() -> tuple[int, int]:
    """The newest CUDA that the driver serves, major and minor; RuntimeError where there is no driver.

    The one question that does not initialise the driver: it is asked for tensors on the CPU, too.
    """
    from cuda.bindings import driver

    from graphar.runtime.driver import check

    status, version = driver.cuDriverGetVersion()
    check("cuDriverGetVersion", status)
    return version // 1000, version % 1000 // 10


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
