"""Every rank is told what is missing at set-up and what to do about it, in bounded time."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cuda.bindings import driver

import graphar
from graphar.errors import CommunicatorError, DriverError, UnsupportedError
from graphar.plan.call import Call
from graphar.plan.policy import Chip
from graphar.plan.work import Sum
from graphar.ranks import capture
from graphar.ranks.rendezvous import StoreRendezvous
from graphar.runtime import availability, engine, launcher
from graphar.runtime.memory import peer_memory
from graphar.runtime.memory.peer_memory import LocalMemory, ProcessMemory
from tests.processes import on_ranks, run_code, run_ranks

ROOT = Path(__file__).parents[2]
OK = driver.CUresult.CUDA_SUCCESS

# Code after which a process cannot load something. torch may have imported parts of it before.
NO_CUDA_PYTHON = """
torchs = [name for name in sys.modules if name.startswith("cuda.")]
sys.modules.update(dict.fromkeys([*torchs, "cuda.bindings", "cuda.core"]))
"""
NO_NVRTC = """
import cuda.pathfinder
def refuse(name):
    raise cuda.pathfinder.DynamicLibNotFoundError(f"lib{name}.so cannot be found\\nwherever it is looked for")
cuda.pathfinder.load_nvidia_dynamic_lib = refuse
"""
NO_NVML = "sys.modules['pynvml'] = None"
NO_DRIVER = """
from cuda.bindings import driver
def refuse():
    raise RuntimeError("Failed to dlopen libcuda.so.1")
driver.cuDriverGetVersion = refuse
"""


def in_fork(damage, *lines):
    """What these lines print, without a warning, in a fork of a process that has imported graphar."""
    printed, warned = run_code("\n".join(["import sys", damage, *lines]), environment=dict(os.environ))
    assert warned == []
    return printed


def in_new_process(damages, *lines):
    """What these lines print in a new interpreter, damaged before it imports torch. Warnings are errors."""
    code = "\n".join(["import sys", *damages, "import torch", *lines])
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.promise("Missing set-up is named on every rank, with what to do, in bounded time.")
@pytest.mark.parametrize(
    ("damage", "begin", "advice"),
    [
        (
            NO_CUDA_PYTHON,
            "cuda-python cannot be imported (",
            "python -m pip install 'cuda-bindings>=13,<14' 'cuda-core>=1.2,<2'",
        ),
        (
            NO_NVRTC,
            "NVRTC cannot be loaded (libnvrtc.so cannot be found): ",
            "python -m pip install 'nvidia-cuda-nvrtc>=13,<14'",
        ),
        (
            NO_DRIVER,
            "the CUDA driver cannot be loaded (Failed to dlopen libcuda.so.1): ",
            "install NVIDIA driver 580 or newer",
        ),
    ],
    ids=["cuda-python", "NVRTC", "driver"],
)
def test_missing_software_is_named_with_what_to_do(damage, begin, advice):
    said = in_fork(damage, "from graphar.runtime.availability import missing_software", "print(missing_software())")

    assert said.startswith(begin)
    assert said.endswith(f": {advice}")


@pytest.mark.parametrize(("version", "is_enough"), [(12090, False), (13000, True), (14010, True)])
def test_a_driver_for_an_older_cuda_is_named(monkeypatch, version, is_enough):
    monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: (OK, version))

    said = availability.missing_driver()

    assert said == (
        None if is_enough else "the driver is for CUDA 12.9: install NVIDIA driver 580 or newer, for CUDA 13"
    )


@pytest.mark.promise("NVML, `/tmp`, a home directory and a writable cache are all optional.")
def test_on_the_cpu_nothing_of_it_is_missed():
    call = "print(graphar.allreduce([torch.ones(3)] * 2)[1].tolist())"
    damages = (NO_NVRTC, NO_CUDA_PYTHON, NO_NVML)  # in this order: the first needs what the second takes away

    assert in_new_process(damages, "import graphar", call) == "[2.0, 2.0, 2.0]"


@pytest.fixture
def communicator():
    """A communicator of two GPUs. It looks for software before it uses a GPU."""
    made = graphar.Communicator(devices=["cuda:0", "cuda:1"])
    yield made
    made.close()


def explained(communicator, algorithm):
    x = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda", 0))  # what choosing looks at
    return communicator.engine.explain(Call(Sum(8), x.dtype, 0, algorithm), x)


@pytest.mark.promise("What the kernels cannot serve takes an exact fallback, and `explain` says why.")
def test_calls_take_the_fallback_and_say_why(communicator, monkeypatch):
    monkeypatch.setattr("graphar.runtime.engine.missing_software", lambda: "NVRTC cannot be loaded: install it")

    said = explained(communicator, "auto")

    assert (said.algorithm, said.reason) == ("fallback", "NVRTC cannot be loaded: install it")
    with pytest.raises(UnsupportedError, match="one_shot cannot serve this call: NVRTC cannot be loaded: install it"):
        explained(communicator, "one_shot")


def set_up(rank, world_size, lacking, absent=()):
    """Sets up a rank that lacks ``lacking``: why it has no kernels, or what set-up raised, and the seconds it took."""
    store = dist.distributed_c10d._get_default_store()
    if rank in absent:
        store.wait([f"done/{other}" for other in range(world_size) if other not in absent])
        return None
    engine.missing_software = lambda: lacking.get(rank, "")
    communicator, begin = graphar.Communicator(timeout_s=1 if absent else 20), time.monotonic()
    try:
        communicator.engine.find_runner(torch.device("cuda", 0))
        said = communicator.engine.why_no_runner
    except CommunicatorError as error:
        said = str(error)
    store.set(f"done/{rank}", "")
    return said, time.monotonic() - begin


@pytest.mark.promise("Missing set-up is named on every rank, with what to do, in bounded time.")
def test_what_one_process_lacks_is_known_to_all():
    results = run_ranks(set_up, 3, {1: "NVRTC cannot be loaded: install it"})

    assert [said for said, _ in results] == ["rank 1: NVRTC cannot be loaded: install it"] * 3


@pytest.mark.promise("Missing set-up is named on every rank, with what to do, in bounded time.")
def test_a_rank_that_is_absent_at_set_up_is_named_within_the_deadline():
    first, absent, last = run_ranks(set_up, 3, {}, (1,))

    assert absent is None
    for rank, (said, took_s) in ((0, first), (2, last)):
        assert said.startswith(f"set-up: rank {rank} waited 1 s for rank(s) [1]; every rank of the group must make the")
        assert 1 <= took_s < 10


def set_up_in_a_capture(rank, world_size, capturing):
    """What a set-up says on a rank while the ranks ``capturing`` capture a graph; then, if all did, what one says."""
    engine.missing_software = lambda: "NVRTC cannot be loaded: install it"
    capture.is_capturing, device = (lambda *_: rank in capturing), torch.device("cuda", 0)
    communicator, begin, said = graphar.Communicator(timeout_s=2), time.monotonic(), []
    try:
        communicator.engine.find_runner(device)
    except CommunicatorError as error:
        said.append(str(error))
    took_s = time.monotonic() - begin
    capture.is_capturing = lambda *_: False
    if len(capturing) == world_size:
        communicator.engine.find_runner(device)
        said.append(communicator.engine.why_no_runner)
    dist.barrier()
    return said, took_s


IN_A_CAPTURE = (
    "this communicator has no plan yet and none can be made during graph capture; call Communicator.prepare(), or make "
    "one such call, before capturing"
)


def test_a_set_up_in_a_capture_is_refused_before_anything_is_done_and_works_afterwards():
    lacking = "rank 0: NVRTC cannot be loaded: install it"

    for said, took_s in run_ranks(set_up_in_a_capture, 2, (0, 1)):
        assert said == [IN_A_CAPTURE, lacking]
        assert took_s < 1


def test_where_one_rank_captures_its_first_call_the_others_name_it():
    ((refused,), took_s), ((waited,), _) = run_ranks(set_up_in_a_capture, 2, (0,))

    assert (refused, took_s < 1) == (IN_A_CAPTURE, True)
    assert waited.startswith("set-up: rank 1 waited 2 s for rank(s) [0]; every rank of the group must make the same")


@on_ranks(2)
def test_what_a_process_does_before_it_has_touched_its_gpu_decides_nothing(rank, world_size):
    """Why a call with a GPU's tensor has no kernel, after ``prepare`` had no GPU to prepare."""
    engine.missing_software = lambda: "NVRTC cannot be loaded: install it"
    with graphar.Communicator() as communicator:
        communicator.prepare()
        assert explained(communicator, "auto").reason == "rank 0: NVRTC cannot be loaded: install it"


def set_up_where_rank_1_has_no_memory(rank, world_size):
    from graphar.runtime import runner

    def make_member(rank, device):
        if rank == 1:
            raise DriverError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory")

    memory = SimpleNamespace(check=lambda: None, close=lambda: closed.append(rank))
    closed, runner.Member, runner.ProcessMemory = [], make_member, lambda *_: memory
    torch.cuda.get_device_name = lambda device: "no GPU"
    launcher.chip = lambda device: Chip(132, "sm_90a")
    engine = graphar.Communicator(timeout_s=20).engine
    begin = time.monotonic()
    with pytest.raises((DriverError, CommunicatorError)) as raised:
        runner.set_up(engine, torch.device("cuda", 0), lossless=True, stand_in=True)
    return str(raised.value), time.monotonic() - begin, closed


def test_a_gpu_that_cannot_be_prepared_is_told_on_all_ranks_at_once_and_their_sockets_are_closed():
    (others, took_s, *first), (own, _, *second) = run_ranks(set_up_where_rank_1_has_no_memory, 2)

    assert own == "cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory"
    assert others == f"preparing the GPUs failed on another rank\nrank 1: DriverError: {own}"
    assert took_s < 10
    assert first + second == [[0], [1]]


def set_up_with(rank, world_size, setting, values, lossless=None):
    """What two set-ups say on a rank with its value of an environment variable, and with its argument ``lossless``."""
    from graphar.runtime import runner

    os.environ[setting] = values[rank]
    engine.missing_software = lambda: ""
    launcher.sm_count, launcher.architecture = (lambda device: 132), (lambda device: "sm_90a")
    torch.cuda.get_device_name = lambda device: "no GPU"
    runner.ProcessMemory = lambda *_: SimpleNamespace(check=lambda: None, close=lambda: None)
    communicator, said = graphar.Communicator(timeout_s=20, lossless=lossless and lossless[rank]), []
    for _ in range(2):
        with pytest.raises((CommunicatorError, ValueError)) as raised:
            communicator.engine.find_runner(torch.device("cuda", 0))
        said.append(str(raised.value))
    return said


LOSSLESS, DECLARED = "GRAPHAR_LOSSLESS", "GRAPHAR_CONCURRENT_COMMUNICATORS"
LOSSLESS_DIFFERS = (
    "lossless compression must be on or off on all ranks (Communicator(lossless=...), GRAPHAR_LOSSLESS), got\n"
    "rank 0: on\nrank 1: on\nrank 2: off"
)
DECLARED_DIFFERS = f"{DECLARED} must be the same on all ranks, got\nrank 0: 2\nrank 1: 3\nrank 2: 2"


@pytest.mark.promise("Missing set-up is named on every rank, with what to do, in bounded time.")
@pytest.mark.parametrize(
    ("setting", "values", "lossless", "said"),
    [
        (LOSSLESS, ["1", "", "0"], None, LOSSLESS_DIFFERS),
        (LOSSLESS, ["0", "1", ""], [True, None, False], LOSSLESS_DIFFERS),
        (DECLARED, ["", "3", "2"], None, DECLARED_DIFFERS),
    ],
    ids=["lossless by the environment", "lossless by the argument", "communicators"],
)
def test_ranks_that_differ_in_a_setting_are_named_on_all(setting, values, lossless, said):
    assert run_ranks(set_up_with, 3, setting, values, lossless) == [[said] * 2] * 3


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        *((value, f"must be an integer from 2 on, got {value!r}") for value in ("1", "0", "-3", "three", "2.5")),
        ("15", "is 15, but 132 SMs have room for the kernels of at most 14 communicators"),
    ],
)
def test_a_number_of_communicators_that_find_no_room_is_an_error_on_all_ranks(declared, said):
    for errors in run_ranks(set_up_with, 2, DECLARED, [declared] * 2):
        assert [error.endswith(f"{DECLARED} {said}") for error in errors] == [True, True]


class Driver:
    """Stands in for the driver of one process and records its calls. The call ``failing`` raises."""

    def __init__(self, failing) -> None:
        self.failing, self.done, self._made = failing, [], iter(range(1, 100))

    def call(self, function, *arguments):
        if function is self.failing:
            raise DriverError(f"{function.__name__}: CUDA_ERROR_INVALID_CONTEXT: invalid device context")
        self.done.append(function.__name__)
        return driver.CUipcMemHandle() if function is driver.cuIpcGetMemHandle else 0x1000 * next(self._made)


@pytest.fixture
def allocate_with(monkeypatch):
    """Allocates on two ranks, each with a driver call that fails: the error and the driver calls of each rank."""
    drivers = {}
    monkeypatch.setattr(peer_memory, "call", lambda *asked: drivers[threading.get_ident()].call(*asked))
    monkeypatch.setattr(peer_memory, "on_device", lambda index: contextlib.nullcontext())

    def allocate(*failing):
        store, met = dist.HashStore(), threading.Barrier(2)

        def on_rank(rank):
            mine = drivers[threading.get_ident()] = Driver(failing[rank])
            met.wait()
            memory = ProcessMemory(rank, StoreRendezvous(store, "t", rank, 2, timeout_s=5))
            memory.why_stays = "the driver forbids another way"
            with pytest.raises((DriverError, CommunicatorError)) as raised:
                memory.allocate(64)
            return str(raised.value), mine.done

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(on_rank, range(2)))

    return allocate


@pytest.mark.promise("Missing set-up is named on every rank, with what to do, in bounded time.")
def test_memory_that_a_rank_cannot_map_is_told_on_all_with_what_to_do(allocate_with):
    """The case of two containers: CUDA IPC gives a handle that the other process cannot open."""
    (first, _), (second, _) = allocate_with(driver.cuIpcOpenMemHandle, driver.cuIpcOpenMemHandle)

    assert first == (
        "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_CONTEXT: invalid device context, for the memory of rank 1; CUDA IPC "
        "needs one container for all ranks, or --ipc=host and --pid=host. File descriptors were not passed: the driver "
        "forbids another way"
    )
    assert "for the memory of rank 0" in second


@pytest.mark.parametrize(
    ("failing", "done", "done_by_failing"),
    [
        (driver.cuMemAlloc, ["cuMemFree"], None),
        (driver.cuIpcOpenMemHandle, ["cuIpcOpenMemHandle", "cuIpcCloseMemHandle", "cuMemFree"], ["cuMemFree"]),
    ],
    ids=["allocate", "map"],
)
def test_what_one_rank_cannot_allocate_or_map_none_keeps(allocate_with, failing, done, done_by_failing):
    (_, calls), (_, calls_of_failing) = allocate_with(None, failing)

    shared = ["cuMemAlloc", "cuIpcGetMemHandle"]
    assert calls == [*shared, *done]
    assert calls_of_failing == ([] if done_by_failing is None else [*shared, *done_by_failing])


def test_of_a_list_the_devices_before_the_one_without_memory_keep_nothing(monkeypatch):
    pointers, freed = iter([0x1000, 0x2000]), []

    def call(function, argument):
        if function is driver.cuMemFree:
            return freed.append(argument)
        if (pointer := next(pointers, None)) is None:
            raise DriverError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        return pointer

    monkeypatch.setattr(peer_memory, "call", call)
    monkeypatch.setattr(peer_memory, "on_device", lambda index: contextlib.nullcontext())

    memory = LocalMemory([0, 1, 2])
    memory.why_stays = "the driver forbids another way"

    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        memory.allocate(64)

    assert freed == [0x1000, 0x2000]
