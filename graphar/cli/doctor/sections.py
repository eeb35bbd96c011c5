"""The doctor's sections: each yields what it finds on this machine."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

import graphar
from graphar.cli.doctor.findings import Finding, judged, note, problem
from graphar.plan import tables
from graphar.plan.scratch import MAX_RANKS
from graphar.plan.sizes import MB, format_nbytes
from graphar.ranks import descriptors
from graphar.runtime import availability, cache, user_tables
from graphar.runtime.availability import install, missing_cuda_python
from graphar.runtime.compiler import nvrtc_version
from graphar.runtime.driver import attribute
from graphar.runtime.memory import multicast, virtual_memory

_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # NVIDIA's PCI vendor, and the first digits of the PCI class of a GPU
_SHARED_MEMORY = Path("/dev/shm")
_LITTLE_NBYTES = 64 * MB  # the default of container engines
_HOST_NAMESPACES = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC}  # Linux's inode numbers of the host's namespaces
_LISTED = 5
_NVRTC = "nvidia-cuda-nvrtc"
_NVML = "nvidia-ml-py"
_READ = ("CACHE_DIR", "CONCURRENT_COMMUNICATORS", "LOG", "LOSSLESS", "MULTICAST", "NVTX", "SGLANG", "SOCKET_DIR")
_READ = tuple(f"GRAPHAR_{name}" for name in (*_READ, "TEST_SHARE_GPU", "VLLM"))


def gpus() -> Iterator[Finding]:
    """Yields every GPU that torch sees; if it sees none of the machine's GPUs, why."""
    count = gpu_count()
    if count == 0:
        yield _no_gpu()
        return
    for index in range(count):
        name, of_it = f"cuda:{index}", torch.cuda.get_device_properties(index)
        text = f"{of_it.name}, {format_nbytes(of_it.total_memory)}, sm_{of_it.major}{of_it.minor}"
        advice = "graphar's kernels need sm_80 or newer: leave it out by CUDA_VISIBLE_DEVICES"
        yield judged(name, text, advice if of_it.major < 8 else "")
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
        advice = f"install NVIDIA driver {availability.DRIVER} or newer; in a container, run it with `--gpus all`"
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
            advice = f"links {down} carry nothing: see Xid 74 in `dmesg`, and `nvidia-smi nvlink -s -i {_uuid(index)}`"
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
        advice = f"with {_list(missing)} it takes torch.distributed"
        advice = f"see why in `nvidia-smi topo -p2p r` (no NVLink, MIG, a virtual machine, IOMMU); {advice}"
        yield judged(f"cuda:{index}", f"{text}; not {_list(missing)}" if missing else text, advice if missing else "")


def _list(devices: list[int]) -> str:
    return " ".join(f"cuda:{index}" for index in devices) or "none"


def multicast_state() -> Iterator[Finding]:
    """Yields whether the environment allows NVLink multicast and the GPUs have it. Makes no multicast object."""
    shut = multicast.why_not(os.environ)
    yield Finding("NVLink multicast", f"off: {shut}" if shut else "on: multimem algorithms may have it")
    if gpu_count() == 0 or missing_cuda_python():
        return
    able = Counter(bool(attribute("MULTICAST_SUPPORTED", index)) for index in range(gpu_count()))
    text = f"{able[True]} of {able.total()} have the hardware for it"
    has_effect = shut or able[False] == 0
    yield judged("GPUs", text, "" if has_effect else f"{multicast.OPT_IN}=1 has no effect here: unset it")


def versions() -> Iterator[Finding]:
    """Yields the version of each required software, and whether graphar can use it."""
    yield Finding("graphar", f"{graphar.__version__} in {Path(graphar.__file__).parent}")
    for name, specifier in availability.requirements().items():
        if name == "python":
            yield _judge("Python", platform.python_version(), specifier, f"use Python {specifier}")
        elif name != _NVRTC:
            try:
                yield _judge(name, metadata.version(name), specifier, install(name))
            except metadata.PackageNotFoundError:
                optional = note(name, "not installed; only the doctor and perf need it")
                yield optional if name == _NVML else problem(name, "not installed", install(name))
    yield _nvrtc()
    yield _driver()


def _judge(name: str, version: str, specifier: str, advice: str) -> Finding:
    is_met = availability.meets(version, specifier)
    return judged(name, version if is_met else f"{version}, graphar needs {specifier}", "" if is_met else advice)


def _nvrtc() -> Finding:
    """Examines the NVRTC library itself, which may come from a CUDA toolkit and not from the distribution."""
    if missing := availability.missing_nvrtc():
        return _missing("NVRTC", missing)
    return _judge("NVRTC", ".".join(map(str, nvrtc_version())), availability.requirements()[_NVRTC], install(_NVRTC))


def _driver() -> Finding:
    if missing := missing_cuda_python():
        return _missing("driver", missing)
    missing = availability.missing_driver()
    if not missing:
        path = Path("/proc/driver/nvidia/version")
        match = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", path.read_text()) if path.exists() else None
        version = match[0] if match else "of unknown version"
        return Finding("driver", f"{version}, for CUDA {'.'.join(map(str, availability.driver_cuda_version()))}")
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
        value, is_read = os.environ[name] or '""', name in _READ or not name.startswith("GRAPHAR_")
        advice = "" if is_read else f"unset it; graphar reads {', '.join(_READ)}"
        yield judged(name, value if is_read else f"{value}, which graphar does not read", advice)
    if not names:
        yield Finding("none", "no variable of graphar is set")


def sharing() -> Iterator[Finding]:
    """Yields the state of shared memory, temporary files, and how ranks in processes share GPU memory."""
    yield _shared_memory()
    yield _temporary_files()
    usable, reason = 0 if availability.missing_software() else gpu_count(), ""
    try:
        descriptors.directory()
    except OSError as error:
        reason = str(error)
    if reason := reason or next(filter(None, map(virtual_memory.why_not, range(usable))), ""):
        yield note("GPU memory of ranks", f"by CUDA IPC, and `suspend` is refused, since {reason}")
        yield _namespaces()
    else:
        text = f"by file descriptors over sockets in {descriptors.directory()}, "
        text += f"where ranks in several containers need a common directory, named in {descriptors.DIRECTORY_SWITCH}"
        yield Finding("GPU memory of ranks", text)


def _namespaces() -> Finding:
    own = [kind for kind, host in _HOST_NAMESPACES.items() if _namespace(kind) not in (None, host)]
    if own:
        text = f"own {' and '.join(own)} namespace, as in a container: all ranks of a host must share it "
        return note("CUDA IPC", text + f"(`{' '.join(f'--{kind}=host' for kind in own)}` where each has a container)")
    return Finding("CUDA IPC", "the host's namespaces")


def _shared_memory() -> Finding:
    name = str(_SHARED_MEMORY)
    try:
        status = os.statvfs(_SHARED_MEMORY)
        with tempfile.TemporaryFile(dir=_SHARED_MEMORY):
            pass
    except OSError as error:
        advice = "graphar does without, NCCL and torch do not: mount a tmpfs there, or run the container with"
        return problem(name, f"cannot be used: {error.strerror}", f"{advice} --ipc=host")
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{format_nbytes(total)}, {format_nbytes(free)} free"
    if total <= _LITTLE_NBYTES:
        return note(name, f"{text}: little for NCCL and data loaders; --ipc=host or --shm-size=1g gives more")
    return Finding(name, text)


def _temporary_files() -> Finding:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"graphar")
        return Finding("temporary files", f"in {tempfile.gettempdir()}")
    except OSError as error:
        advice = "graphar does without, torch.compile does not: name a directory you may write in TMPDIR"
        return problem("temporary files", f"cannot be made: {error.strerror}", advice)


def _namespace(kind: str) -> int | None:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return None


def kernel_cache() -> Iterator[Finding]:
    """Yields the directory of the kernel cache, whether it can be written, and damaged entries."""
    directory, reason = cache.place()
    if directory is None or reason:
        advice = "every process recompiles its kernels: name a directory that you can write in GRAPHAR_CACHE_DIR"
        if reason and "not trusted" in reason:
            advice += ", or `chmod go-w` this one if it is yours"
        yield problem("directory", f"{directory or ''} {reason}".strip(), advice)
        return
    status = directory.stat()
    yield Finding("directory", f"{directory}, of user {status.st_uid}, mode {status.st_mode & 0o777:o}")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        advice = "kernels that are not there yet are compiled by every process: make it writable, or name another in "
        yield problem("writable", f"no: {error.strerror}", advice + "GRAPHAR_CACHE_DIR")
    found = cache.survey()
    yield Finding("entries", f"{len(found.keys)} compiled kernels")
    if found.damaged:
        listed = " ".join(found.damaged[:_LISTED]) + (" ..." if len(found.damaged) > _LISTED else "")
        advice = f"they are not used; if nobody else may have written them, delete them: cd {directory} && rm {listed}"
        yield problem("damaged", f"{len(found.damaged)} entries", advice)
    if found.unfinished:
        text = f"{len(found.unfinished)} files, being written now or left by killed processes: these can be deleted"
        yield note("unfinished", text)


def tuning() -> Iterator[Finding]:
    """Yields the tuning table of this machine's calls, and where it comes from."""
    if gpu_count() == 0:
        yield note("table", "none is needed without GPUs")
        return
    name = tables.slug(torch.cuda.get_device_name(0))
    table, origin = None, f"the cache, {user_tables.FOLDER}/{name}.json"
    try:
        table = user_tables.user_table(name)
    except (OSError, ValueError) as error:
        yield problem(f"{name}.json", f"ignored: {error}", "`python -m graphar tune` writes another; or delete it")
    if table is None:
        table, origin = user_tables.find_table(torch.cuda.get_device_name(0)), "the package"
    yield Finding("table", f"{table.name} from {origin}: {table.machine}, {table.date}")
    ranks = min(gpu_count(), MAX_RANKS)
    if table.name == tables.DEFAULT or (ranks > 1 and ranks not in table.rows):
        unmeasured = "this GPU was" if table.name == tables.DEFAULT else f"{ranks} ranks were"
        yield note("tune", f"{unmeasured} not measured yet: `python -m graphar tune` takes about a minute")
