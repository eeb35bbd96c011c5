"""What the doctor finds on simulated machines."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from graphar.cli.doctor import sections
from graphar.cli.doctor.findings import NOTE, OK, PROBLEM
from graphar.plan import tables
from graphar.runtime import cache, user_tables


def told(find):
    """What a section finds, by name."""
    return {finding.name: finding for finding in find()}


@pytest.fixture
def machine(monkeypatch):
    """Makes torch report GPUs and their properties."""

    def pretend(count, capability=(9, 0), peer_access=lambda i, j: True):
        found = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30, major=capability[0], minor=capability[1])
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: found.name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**vars(found), uuid=f"u{index}")
        )
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", peer_access)

    return pretend


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path / "cache"))
    cache._warn_once.cache_clear()
    return tmp_path / "cache"


@pytest.mark.parametrize(
    ("gpus", "name", "status", "words"),
    [
        ((2,), "cuda:0", OK, "NVIDIA H200, 140 GB, sm_90"),
        ((2,), "cuda:1", OK, "NVIDIA H200, 140 GB, sm_90"),
        ((2, (7, 5)), "cuda:1", PROBLEM, "sm_75"),
        ((1,), "ranks", NOTE, "2 or more"),
        ((9,), "ranks", NOTE, "at most 8"),
    ],
    ids=str,
)
def test_gpus_are_told_and_what_kernels_do_not_serve(machine, gpus, name, status, words):
    machine(*gpus)

    said = told(sections.gpus)[name]

    assert said.status == status
    assert words in said.found


@pytest.mark.parametrize(("kind", "status"), [("0x030200", PROBLEM), ("0x040300", NOTE)], ids=["a GPU", "its sound"])
def test_a_gpu_that_torch_does_not_see_is_a_problem(machine, monkeypatch, tmp_path, kind, status):
    machine(0)
    device = tmp_path / "0000:18:00.0"
    device.mkdir()
    (device / "class").write_text(f"{kind}\n")
    (device / "vendor").write_text("0x10de\n")
    monkeypatch.setattr(sections, "_PCI_DEVICES", tmp_path)

    assert [one.status for one in sections.gpus()] == [status]


def test_a_pair_without_peer_access_is_told_on_its_side(machine):
    machine(3, peer_access=lambda i, j: (i, j) != (2, 1))

    said = told(sections.peers)

    assert [said[f"cuda:{i}"].status for i in range(3)] == [OK, OK, PROBLEM]
    assert said["cuda:0"].found == "reaches cuda:1 cuda:2"
    assert said["cuda:2"].found == "reaches cuda:0; not cuda:1"


def nvml(monkeypatch, active, error=None):
    """An NVML that reports so many of 18 links active on each GPU, or that raises."""
    fake = ModuleType("pynvml")
    for name in ("NVMLError", "NVMLError_InvalidArgument", "NVMLError_NotSupported"):
        setattr(fake, name, type(name, (Exception,) if name == "NVMLError" else (fake.NVMLError,), {}))
    fake.NVML_NVLINK_MAX_LINKS, fake.NVML_FEATURE_ENABLED = 36, 1
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid.removeprefix("GPU-u"))

    def init():
        if error:
            raise fake.NVMLError(error)

    def state(handle, link):
        if link >= 18:
            raise fake.NVMLError_InvalidArgument
        return int(link < active[handle])

    fake.nvmlInit, fake.nvmlDeviceGetNvLinkState = init, state
    monkeypatch.setitem(sys.modules, "pynvml", fake)


@pytest.mark.promise("`doctor` finds what is wrong and says what to do.")
def test_a_link_that_is_down_on_one_gpu_is_a_problem(machine, monkeypatch):
    machine(2)
    nvml(monkeypatch, [18, 17])

    said = told(sections.links)

    assert (said["cuda:0"].status, said["cuda:1"].status) == (OK, PROBLEM)
    assert "links [17] carry nothing" in said["cuda:1"].advice
    assert "`nvidia-smi nvlink -s -i GPU-u1`" in said["cuda:1"].advice


@pytest.mark.parametrize(
    ("active", "error", "found"),
    [
        ([18, 18], None, [(OK, "18 active links of 18")] * 2),
        ([0, 0], None, [(NOTE, "no active NVLink: what there is to send goes over PCIe")] * 2),
        ([], None, [(NOTE, "there is no GPU")]),
        ([0, 0], "Driver Not Loaded", [(NOTE, "not known: Driver Not Loaded; graphar runs without it")]),
    ],
)
def test_links_are_counted_and_what_is_not_there_is_noted(machine, monkeypatch, active, error, found):
    machine(len(active))
    nvml(monkeypatch, active, error)

    assert [(one.status, one.found) for one in sections.links()] == found


def test_multicast_is_off_with_the_reason(monkeypatch):
    monkeypatch.setattr(os, "environ", {"GRAPHAR_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"})

    assert (
        told(sections.multicast_state)["NVLink multicast"].found == "off: NCCL_NVLS_ENABLE=0 forbids NVLink multicast"
    )


@pytest.mark.parametrize(("version", "status"), [("2.10.1", PROBLEM), ("2.11.0+cu130", OK)])
def test_a_version_that_is_too_old_is_a_problem_with_the_command_that_mends_it(monkeypatch, version, status):
    monkeypatch.setattr(sections.metadata, "version", lambda name: version if name == "torch" else "13.1")

    said = told(sections.versions)["torch"]

    assert said.status == status
    assert said.advice == ("python -m pip install 'torch>=2.11'" if status == PROBLEM else "")


@pytest.mark.parametrize(("name", "status"), [("cuda-core", PROBLEM), ("nvidia-ml-py", NOTE)])
def test_what_is_not_installed_is_told(monkeypatch, name, status):
    def version(asked):
        if asked == name:
            raise sections.metadata.PackageNotFoundError
        return "13.1"

    monkeypatch.setattr(sections.metadata, "version", version)

    assert told(sections.versions)[name].status == status


def test_a_driver_that_is_too_old_is_a_problem_where_there_are_gpus(machine, monkeypatch):
    machine(2)
    monkeypatch.setattr("graphar.runtime.availability.driver_cuda_version", lambda: (12, 8))

    said = told(sections.versions)["driver"]

    assert (said.status, said.found) == (PROBLEM, "the driver is for CUDA 12.8")
    assert said.advice == "install NVIDIA driver 580 or newer, for CUDA 13"


def test_variables_of_graphar_are_listed_and_one_that_it_does_not_read_is_a_problem(monkeypatch):
    environment = {"GRAPHAR_CACHEDIR": "/tmp/kernels", "GRAPHAR_MULTICAST": "0", "NCCL_NVLS_ENABLE": ""}
    monkeypatch.setattr(os, "environ", environment | {"NCCL_DEBUG": "INFO"})

    said = told(sections.environment)

    assert {name: (one.status, one.found) for name, one in said.items()} == {
        "GRAPHAR_CACHEDIR": (PROBLEM, "/tmp/kernels, which graphar does not read"),
        "GRAPHAR_MULTICAST": (OK, "0"),
        "NCCL_NVLS_ENABLE": (OK, '""'),
    }
    assert "GRAPHAR_CACHE_DIR" in said["GRAPHAR_CACHEDIR"].advice


def test_shared_memory_or_a_place_for_temporary_files_that_is_not_there_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(sections, "_SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(sections.tempfile, "tempdir", str(tmp_path / "nowhere"))

    said = told(sections.sharing)

    assert said[str(tmp_path / "shm")].status == PROBLEM
    assert said["temporary files"].advice.endswith("name a directory you may write in TMPDIR")


def test_ranks_share_memory_over_sockets_in_a_directory_that_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(tmp_path / "sockets"))

    said = told(sections.sharing)

    assert said["GPU memory of ranks"].status == OK
    assert said["GPU memory of ranks"].found.startswith(f"by file descriptors over sockets in {tmp_path / 'sockets'}, ")
    assert "CUDA IPC" not in said


def test_a_directory_of_sockets_that_others_may_enter_is_noted_with_what_follows(monkeypatch, tmp_path):
    (tmp_path / "sockets").mkdir(mode=0o755)
    monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(tmp_path / "sockets"))

    said = told(sections.sharing)["GPU memory of ranks"]

    assert said.status == NOTE
    assert said.found.startswith("by CUDA IPC, and `suspend` is refused, since ")
    assert "is not trusted" in said.found


def test_where_memory_must_stay_the_reason_and_namespaces_other_than_the_hosts_are_noted(monkeypatch):
    monkeypatch.setattr(sections, "gpu_count", lambda: 2)
    monkeypatch.setattr(sections.availability, "missing_software", lambda: "")
    monkeypatch.setattr(sections.virtual_memory, "why_not", lambda device: "it is a sandbox" if device else "")
    monkeypatch.setattr(sections, "_namespace", lambda kind: {"ipc": 0xEFFFFFFF, "pid": 4026532999}[kind])

    said = told(sections.sharing)

    assert said["GPU memory of ranks"].found.endswith("since it is a sandbox")
    assert said["CUDA IPC"].status == NOTE
    assert said["CUDA IPC"].found.startswith("own pid namespace")
    assert "`--pid=host`" in said["CUDA IPC"].found


def test_the_caches_entries_are_counted_and_damaged_ones_named(own_cache):
    for key in ("a" * 64, "b" * 64, "c" * 64):
        cache.store(key, b"content")
    (own_cache / ("b" * 64)).write_bytes(bytes(80))
    (own_cache / "unfinished-x").touch()

    said = told(sections.kernel_cache)

    assert said["entries"].found == "2 compiled kernels"
    assert said["damaged"].found == "1 entries"
    assert said["damaged"].advice.endswith(f"rm {'b' * 64}")
    assert said["unfinished"].status == NOTE


def test_a_cache_that_others_may_write_is_a_problem(own_cache):
    own_cache.mkdir()
    own_cache.chmod(0o777)

    (said,) = sections.kernel_cache()

    assert "group and world must not" in said.found
    assert "`chmod go-w` this one" in said.advice


def test_a_home_that_cannot_be_written_is_a_problem_with_advice_that_helps(monkeypatch):
    for name in ("GRAPHAR_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc")  # nobody can make a directory there

    (said,) = sections.kernel_cache()

    assert said.found.startswith("/proc/.cache/graphar cannot be made: ")
    assert said.advice.endswith("name a directory that you can write in GRAPHAR_CACHE_DIR")


def test_the_table_is_told_with_its_origin(machine, own_cache):
    machine(4)

    assert told(sections.tuning)["table"].found.startswith("nvidia_h200 from the package: 4x NVIDIA H200")

    mine = tables.shipped_table("nvidia_h200").to_json().encode()
    cache.store_file(user_tables.FOLDER, "nvidia_h200.json", mine)

    assert told(sections.tuning)["table"].found.startswith("nvidia_h200 from the cache, tuning/nvidia_h200.json")


def test_a_table_that_is_none_is_a_problem(machine, own_cache):
    machine(4)
    cache.store_file(user_tables.FOLDER, "nvidia_h200.json", b"{}")

    with pytest.warns(RuntimeWarning, match="is ignored"):
        said = told(sections.tuning)

    assert said["nvidia_h200.json"].status == PROBLEM
    assert "from the package" in said["table"].found


def test_ranks_that_were_not_measured_are_noted(machine, own_cache):
    machine(8)

    assert told(sections.tuning)["tune"].found.startswith("8 ranks were not measured")
