"""The doctor's sections about software versions and the environment."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import graphar
from graphar.cli.doctor.findings import Finding, note, problem
from graphar.cli.doctor.gpus import gpu_count
from graphar.runtime.availability import driver_cuda_version, missing_cuda_python, missing_driver, missing_nvrtc
from graphar.runtime.compiler import nvrtc_version
from graphar.runtime.memory import multicast
from graphar.runtime.requirements import install, meets, requirements

_NVRTC = "nvidia-cuda-nvrtc"
_NVML = "nvidia-ml-py"
_READ = ("CACHE_DIR", "CONCURRENT_COMMUNICATORS", "LOG", "LOSSLESS", "MULTICAST", "NVTX", "SGLANG", "SOCKET_DIR")
_READ = tuple(f"GRAPHAR_{name}" for name in (*_READ, "TEST_SHARE_GPU", "VLLM"))


def versions() -> Iterator[Finding]:
    """Yields the version of each required software, and whether graphar can use it."""
    yield Finding("graphar", f"{graphar.__version__} in {Path(graphar.__file__).parent}")
    for name, specifier in requirements().items():
        if name == "python":
            yield _judge("Python", platform.python_version(), specifier, f"use Python {specifier}")
        elif name != _NVRTC:
            yield _distribution(name, specifier)
    yield _nvrtc()
    yield _driver()


def _distribution(name: str, specifier: str) -> Finding:
    try:
        return _judge(name, metadata.version(name), specifier, install(name))
    except metadata.PackageNotFoundError:
        if name == _NVML:
            return note(name, "not installed; only the doctor and perf need it")
        return problem(name, "not installed", install(name))


def _judge(name: str, version: str, specifier: str, advice: str) -> Finding:
    if meets(version, specifier):
        return Finding(name, version)
    return problem(name, f"{version}, graphar needs {specifier}", advice)


def _nvrtc() -> Finding:
    """Examines the NVRTC library itself, which may come from a CUDA toolkit and not from the distribution."""
    if missing := missing_nvrtc():
        return _missing("NVRTC", missing)
    return _judge("NVRTC", ".".join(map(str, nvrtc_version())), requirements()[_NVRTC], install(_NVRTC))


def _driver() -> Finding:
    if missing := missing_cuda_python():
        return _missing("driver", missing)
    missing = missing_driver()
    if not missing:
        path = Path("/proc/driver/nvidia/version")
        match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", path.read_text()) if path.exists() else None
        version = match[0] if match else "of unknown version"
        return Finding("driver", f"{version}, for CUDA {'.'.join(map(str, driver_cuda_version()))}")
    if gpu_count() == 0:
        return note("driver", "none; the CPU needs none")
    return _missing("driver", missing)


def _missing(name: str, reason: str) -> Finding:
    """Returns a problem from a reason of graphar.runtime.availability: what was found, ": ", and what to do."""
    found, _, advice = reason.rpartition(": ")
    return problem(name, found, advice)


def environment() -> Iterator[Finding]:
    """Yields the environment variables that are set and that graphar reads."""
    names = [name for name in sorted(os.environ) if name.startswith("GRAPHAR_") or name in multicast.FORBIDDING]
    for name in [*names, *({"CUDA_VISIBLE_DEVICES"} & set(os.environ))]:
        value = os.environ[name] or '""'
        if name.startswith("GRAPHAR_") and name not in _READ:
            yield problem(name, f"{value}, which graphar does not read", f"unset it; graphar reads {', '.join(_READ)}")
        else:
            yield Finding(name, value)
    if not names:
        yield Finding("none", "no variable of graphar is set")
