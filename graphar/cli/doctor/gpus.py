"""The doctor's sections about GPUs, NVLinks, peer access and multicast."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from graphar.cli.doctor.findings import Finding, note, problem
from graphar.plan.scratch import MAX_RANKS
from graphar.plan.sizes import GB
from graphar.runtime.availability import DRIVER, missing_cuda_python
from graphar.runtime.driver import call, driver
from graphar.runtime.memory import multicast

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # NVIDIA's PCI vendor, and the first digits of the PCI class of a GPU


def gpus() -> Iterator[Finding]:
    """Yields every GPU that torch sees; if it sees none of the machine's GPUs, why."""
    count = gpu_count()
    if count == 0:
        yield _no_gpu()
        return
    for index in range(count):
        name, of_it = f"cuda:{index}", torch.cuda.get_device_properties(index)
        text = f"{of_it.name}, {of_it.total_memory / GB:.1f} GB, sm_{of_it.major}{of_it.minor}"
        if of_it.major < 8:
            yield problem(name, text, "graphar's kernels need sm_80 or newer: leave it out by CUDA_VISIBLE_DEVICES")
        else:
            yield Finding(name, text)
    if count == 1:
        yield note("ranks", "kernels run between 2 or more GPUs; there is one")
    if count > MAX_RANKS:
        yield note("ranks", f"kernels serve groups of at most {MAX_RANKS}; larger ones take torch.distributed")


def _no_gpu() -> Finding:
    there = sum(_is_gpu(path) for path in _PCI_DEVICES.glob("*")) if _PCI_DEVICES.is_dir() else 0
    if there == 0:
        return note("none", "graphar computes on the CPU, or over torch.distributed")
    if torch.version.cuda is None:
        advice = "this torch is built for CPUs: install one for CUDA (https://pytorch.org/get-started)"
    elif not Path("/dev/nvidiactl").exists():
        advice = f"install NVIDIA driver {DRIVER} or newer; in a container, run it with `--gpus all`"
    else:
        advice = "see whether `nvidia-smi` works, whether CUDA_VISIBLE_DEVICES hides them, and, on a machine with "
        advice += "NVSwitches, whether nvidia-fabricmanager runs"
    return problem("none", f"torch sees no GPU, the PCI bus has {there} of NVIDIA's", advice)


def _is_gpu(device: Path) -> bool:
    with contextlib.suppress(OSError):
        is_display = (device / "class").read_text().startswith(_DISPLAY)
        return is_display and (device / "vendor").read_text().strip() == _NVIDIA
    return False


def gpu_count() -> int:
    """Returns how many GPUs torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def links() -> Iterator[Finding]:
    """Yields the state of each GPU's NVLinks, from NVML."""
    try:
        import pynvml
    except ImportError:
        yield note("NVML", "not known: pynvml (nvidia-ml-py) cannot be imported; only the doctor and perf read it")
        return
    try:
        pynvml.nvmlInit()
        states = [_link_states(pynvml, index) for index in range(gpu_count())]
    except pynvml.NVMLError as error:
        yield note("NVML", f"not known: {error}; graphar runs without it")
        return
    if not states:
        yield note("none", "there is no GPU")
    most = max((sum(state) for state in states), default=0)
    for index, state in enumerate(states):
        name, active = f"cuda:{index}", sum(state)
        if active < most:
            down = [link for link, is_active in enumerate(state) if not is_active]
            advice = f"links {down} carry nothing: look for Xid 74 in `dmesg`, and in `nvidia-smi nvlink -s -i "
            advice += f"{_uuid(index)}`"
            yield problem(name, f"{active} active links, while others have {most}", advice)
        elif active == 0:
            yield note(name, "no active NVLink: what there is to send goes over PCIe")
        else:
            yield Finding(name, f"{active} active links of {len(state)}")


def _link_states(pynvml, index: int) -> list[bool]:
    """Returns, for each NVLink of a GPU, whether it is active; ``index`` is torch's."""
    handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid(index))
    states = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            states.append(pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED)
        except (pynvml.NVMLError_InvalidArgument, pynvml.NVMLError_NotSupported):
            break  # past this GPU's last link
    return states


def _uuid(index: int) -> str:
    """Returns the UUID by which NVML finds a GPU: CUDA_VISIBLE_DEVICES changes torch's indexes, and not NVML's."""
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def peers() -> Iterator[Finding]:
    """Yields, for each GPU, to which others it has peer access."""
    everyone = range(gpu_count())
    if len(everyone) < 2:
        yield note("none", "there is no pair of GPUs")
        return
    for index in everyone:
        reached = [peer for peer in everyone if peer != index and torch.cuda.can_device_access_peer(index, peer)]
        missing = [peer for peer in everyone if peer != index and peer not in reached]
        text = f"reaches {_list(reached)}"
        if missing:
            advice = "see why in `nvidia-smi topo -p2p r` (no NVLink, MIG, a virtual machine, IOMMU); "
            advice += f"with {_list(missing)} it takes torch.distributed"
            yield problem(f"cuda:{index}", f"{text}; not {_list(missing)}", advice)
        else:
            yield Finding(f"cuda:{index}", text)


def _list(devices: list[int]) -> str:
    return " ".join(f"cuda:{index}" for index in devices) or "none"


def multicast_state() -> Iterator[Finding]:
    """Yields whether the environment allows NVLink multicast and the GPUs have it. Makes no multicast object."""
    shut = multicast.why_not(os.environ)
    yield Finding("NVLink multicast", f"off: {shut}" if shut else "on: multimem algorithms may have it")
    if gpu_count() == 0 or missing_cuda_python():
        return
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
    able = Counter(bool(call(driver.cuDeviceGetAttribute, attribute, index)) for index in range(gpu_count()))
    text = f"{able[True]} of {able.total()} have the hardware for it"
    if shut or able[False] == 0:
        yield Finding("GPUs", text)
    else:
        yield problem("GPUs", text, f"{multicast.OPT_IN}=1 has no effect here: unset it")
