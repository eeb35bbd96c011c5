"""The driver is initialised before its first call, and failed calls are named. It is a stand-in, except on GPUs."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
from cuda.bindings import driver

from graphar.errors import DriverError
from graphar.runtime import driver as drivers
from graphar.runtime import launcher
from graphar.runtime.availability import missing_driver
from graphar.runtime.driver import call
from graphar.runtime.memory import virtual_memory
from graphar.runtime.memory.peer_memory import LocalMemory

ROOT = Path(__file__).parents[2]
OK, INVALID = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE
NOT_INITIALIZED = driver.CUresult.CUDA_ERROR_NOT_INITIALIZED


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The names of the calls made to a stand-in for the driver, which refuses calls before it is initialised."""
    made = []

    def stand_in(name, *results, begins=False):
        def answer(*arguments):
            made.append(name)
            return (OK if begins or "cuInit" in made else NOT_INITIALIZED, *results)

        answer.__name__ = name
        monkeypatch.setattr(driver, name, answer)

    stand_in("cuInit", begins=True)
    stand_in("cuDriverGetVersion", 13000, begins=True)
    for name in ("cuDeviceCanAccessPeer", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPopCurrent"):
        stand_in(name, 1)
    for name in ("cuCtxPushCurrent", "cuCtxEnablePeerAccess"):
        stand_in(name)
    monkeypatch.setattr(driver, "cuGetErrorName", lambda status: (OK, b"CUDA_ERROR_INVALID_VALUE"))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (OK, b"invalid argument"))
    cached = drivers._initialise.cache_clear, drivers.primary_context.cache_clear, vars(drivers.driver).clear
    for clear in cached:
        clear()
    yield made
    for clear in cached:
        clear()


def test_whichever_call_is_the_first_the_driver_is_initialised_before_it_and_only_once(calls):
    assert [call(driver.cuDeviceCanAccessPeer, 0, 1) for _ in range(2)] == [1, 1]

    assert calls == ["cuInit", "cuDeviceCanAccessPeer", "cuDeviceCanAccessPeer"]


def test_peer_access_can_be_what_a_process_begins_with(calls, monkeypatch):
    monkeypatch.setattr(virtual_memory, "why_not", lambda device: "it is a sandbox")

    LocalMemory([0, 1]).check()

    assert calls.count("cuCtxEnablePeerAccess") == 2


def test_a_driver_that_cannot_be_initialised_is_asked_again_and_told(monkeypatch):
    monkeypatch.setattr(driver, "cuInit", lambda flags: (INVALID,))

    for _ in range(2):
        with pytest.raises(DriverError, match=r"^cuInit: CUDA_ERROR_INVALID_VALUE: invalid argument$"):
            call(driver.cuDeviceGet, 0)


def test_asking_for_its_version_does_not_initialise_it(calls):
    assert missing_driver() is None

    assert calls == ["cuDriverGetVersion"]


IN_NEW_PROCESS = """
import multiprocessing, torch, graphar
from graphar.runtime.availability import missing_software

def use():
    communicator.prepare([torch.bfloat16], 1 << 10)
    ys = communicator.allreduce([torch.full((8,), 1.5, dtype=torch.bfloat16, device=f"cuda:{i}") for i in range(2)])
    communicator.synchronize()
    assert [y.tolist() for y in ys] == [[3.0] * 8] * 2, ys

communicator = graphar.Communicator(devices=[0, 1])
assert missing_software() is None
"""
FORK = """
child = multiprocessing.get_context("fork").Process(target=use)
child.start()
child.join()
assert child.exitcode == 0
"""


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["", FORK], ids=["alone", "after a child's"])
def test_a_process_can_begin_with_prepare(before):
    code = f"{IN_NEW_PROCESS}{before}use()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("returned", "result"), [((OK,), None), ((OK, 3), 3), ((OK, 3, 4), [3, 4])])
def test_a_call_gives_its_results_without_the_status(returned, result):
    assert call(lambda: returned) == result


def test_a_failed_call_is_named_with_the_drivers_words():
    def cuMemAlloc(nbytes):
        return INVALID, 0

    with pytest.raises(DriverError, match=r"^cuMemAlloc: CUDA_ERROR_INVALID_VALUE: invalid argument$"):
        call(cuMemAlloc, 8)


@pytest.mark.parametrize(("current", "bound"), [(0, ["cuCtxSetCurrent"]), (7, [])])
def test_a_thread_without_a_context_gets_the_one_of_the_device(calls, monkeypatch, current, bound):
    def set_current(context):
        calls.append("cuCtxSetCurrent")
        return (OK,)

    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (OK, current))
    monkeypatch.setattr(driver, "cuCtxSetCurrent", set_current)

    drivers.bind_context(0)

    assert [one for one in calls if one == "cuCtxSetCurrent"] == bound


@pytest.mark.parametrize("again", [0, 1])
def test_a_launch_without_a_context_is_repeated_with_one(monkeypatch, again):
    given, devices = [], []
    monkeypatch.setattr(launcher.torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(launcher, "bind_context", devices.append)
    monkeypatch.setattr(launcher, "launch_kernel", lambda: lambda *arguments: given.append(arguments) or again)

    with pytest.raises(DriverError) if again else contextlib.nullcontext():
        launcher.launch_again(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT.value, (1, 2))

    assert (given, devices) == ([(1, 2)], [5])


def test_a_launch_that_is_refused_for_another_reason_is_not_repeated(monkeypatch):
    monkeypatch.setattr(launcher, "launch_kernel", lambda: pytest.fail("launched again"))

    with pytest.raises(DriverError, match=r"^cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE: invalid argument$"):
        launcher.launch_again(INVALID.value, ())
