"""Fixtures for all tests: a kernel cache that is not the user's, skips for missing GPUs, and a compile pass."""

import functools
import importlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.garbage import collect_seldom
from tests.interpreters import interpreters
from tests.worlds import GPU_COUNTS

THREADS = torch.get_num_threads()

# Tests that no mistake in an op or a kernel fails, and those of whole models and of torch's compilers, half as long as
# all others. They run only if they are named, as `nox -s apart` and `nox -s docs` do.
TESTS = Path(__file__).parent
APART = [TESTS / name for name in ("perf", "model", "site", "networks", "ops/test_conformance_compilers.py")]

# What a version of torch warns of in its own code: in its compiler, its profiler, opcheck, forward-mode derivatives.
_OF_THE_COMPILER_AND_PROFILER = (
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:Warning. Profiler clears events:UserWarning",
)
TORCHS_OWN_WARNINGS = dict.fromkeys(("2.11", "2.12", "2.13", "2.14"), _OF_THE_COMPILER_AND_PROFILER) | {
    "2.15": (
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning:torch._subclasses.meta_utils",
        "ignore:`torch.jit:FutureWarning",
        "ignore:Warning. Profiler clears events:UserWarning",
    ),
}


def pytest_configure(config):
    for line in TORCHS_OWN_WARNINGS.get(".".join(torch.__version__.split(".")[:2]), ()):
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def new_cache(tmp_path_factory):
    """A kernel cache that was empty when the run began; all its processes share it."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "kernels"


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(new_cache):
    """Sets the kernel cache of every test, unless the environment names one."""
    with pytest.MonkeyPatch.context() as patch:
        if "GRAPHAR_CACHE_DIR" not in os.environ:
            patch.setenv("GRAPHAR_CACHE_DIR", str(new_cache))
        yield


@pytest.fixture
def world_of_one():
    """The default process group, of which this process is the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def nothing_stays_loaded(monkeypatch):
    """Forgets, at the end of a test, the algorithms from outside the package that it loads."""
    from tests.outside import forget_loaded

    forget_loaded(monkeypatch)


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    """The folder of the user's tuning tables, which does not exist yet."""
    from graphar.runtime import user_tables

    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path / "cache"))
    user_tables._warn_once.cache_clear()
    return tmp_path / "cache" / "tuning"


@pytest.fixture(scope="session", autouse=True)
def no_multicast():
    """No opt-in: no test may reach a multicast object, whatever the environment allows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GRAPHAR_MULTICAST", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def inductor_cache(new_cache):
    """Has Inductor's cache begin empty: of a graph that an earlier run cached, no pass would see anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(new_cache.with_name("inductor")))
        yield


@pytest.fixture(scope="session", autouse=True)
def frugal_children():
    """Gives the programs that tests start one thread each where there are no GPUs, and none of Inductor's vector code.

    If there were more threads than cores, threads that wait by spinning would take the cores of those that work.
    Inductor would start a process for each core, and compile a program for each kind of vectors that the CPU may have.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("OMP_NUM_THREADS", "1")
            patch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
            patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
        yield


@pytest.fixture(scope="session")
def new_interpreter():
    """Runs code as a new interpreter that has imported torch alone would."""
    with interpreters() as run:
        yield run


@pytest.fixture
def group_of():
    """Makes this process a rank of a fake default group. No other rank of the group exists."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")

    def make(world_size, rank=0):
        dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=world_size)

    yield make
    dist.destroy_process_group()


@pytest.fixture
def make_pass(group_of, monkeypatch):
    """Makes a compile pass for ranks at made-up places (tests.graph.graphs.places_of)."""
    import graphar
    from graphar.graph import places
    from tests.graph.graphs import RANKS, Meeting, places_of

    def make(ranks=RANKS, on=(), off=(), batch_invariant=False, constant_weights=False, tp_invariant=False, **changes):
        group_of(ranks)
        monkeypatch.setattr(places, "meet", lambda group, timeout_s: Meeting(places_of(ranks, **changes)))
        how = {"batch_invariant": batch_invariant, "constant_weights": constant_weights, "tp_invariant": tp_invariant}
        return graphar.compile_pass(on=on, off=off, **how)

    return make


@pytest.fixture(scope="session", params=GPU_COUNTS, ids=lambda n: f"{n}gpus")
def gpu_count(request):
    """A number of GPUs: each of GPU_COUNTS."""
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, torch sees {torch.cuda.device_count()}")
    return request.param


@pytest.fixture(scope="session")
def as_many_as_trees(gpu_count):
    """Skips a test of sums as a tree for other numbers of GPUs."""
    if gpu_count not in (2, 4, 8):
        pytest.skip("a tree has 2, 4 or 8 ranks")


@pytest.fixture(scope="session")
def ranks(gpu_count):
    """A communicator of the first GPUs in this process, shared by the whole run."""
    from tests.gpu import Ranks

    return Ranks(gpu_count)


@pytest.fixture(scope="session")
def hopper():
    """Skips a test where graphar's own matmul does not run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of sm_90")


@pytest.fixture
def fresh_ranks(gpu_count):
    """A communicator of the same GPUs for one test alone, which may break it."""
    from tests.gpu import Ranks

    mine = Ranks(gpu_count)
    communicator = mine.communicator
    yield mine
    communicator.close()


@pytest.fixture
def no_gpus(monkeypatch):
    """Has torch, and thereby perf, see a machine without GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def forked_ranks(monkeypatch, no_gpus):
    """Has perf fork its ranks, on the CPU, from the server of tests/processes.py, which has imported torch."""
    import tests.processes  # noqa: F401

    start = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr("torch.multiprocessing.spawn", start)


@pytest.fixture
def on_gpus(tmp_path, monkeypatch):
    """Runs a function on 2 ranks with a GPU each. Inductor's cache begins empty: a cached graph is in no report."""
    from tests.processes import run_on_gpus

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return lambda function, *args: run_on_gpus(function, 2, *args, timeout_s=300)


def pytest_addoption(parser):
    parser.addoption("--seeds", metavar="N[-M]", help="of the kernels that run on the host (default: some of each)")
    parser.addoption("--whole", action="store_true", help="all kernels, mistakes and runs on the host, not a sample")
    parser.addoption("--site", metavar="FOLDER", help="the pages of docs/ as built (default: builds them)")


def pytest_ignore_collect(collection_path, config):
    """Leaves out what is in APART, and without GPUs the files that need them, unless the command line names them."""
    if collection_path in APART:
        named = [Path(config.invocation_params.dir, one.partition("::")[0]).resolve() for one in config.args]
        return True if not any(collection_path in (one, *one.parents) for one in named) else None
    if collection_path.name.endswith("_gpu.py") and not torch.cuda.is_available():
        return True if not any(collection_path.name in one for one in config.args) else None
    return None


def pytest_collection_modifyitems(items, config):
    """Skips tests marked ``gpu`` (2 GPUs) or ``gpu(n)`` if torch sees fewer GPUs, and those marked ``whole``.

    Ranks of a test marked ``gpu(n, shared=True)`` are processes, and share a GPU where there is only one. Such a test
    asks for bits: it needs no links between GPUs, no time of several devices, and no error of an access to a peer.
    """
    if not config.getoption("--whole"):
        left_out = [item for item in items if item.get_closest_marker("whole")]
        items[:] = [item for item in items if not item.get_closest_marker("whole")]
        config.hook.pytest_deselected(items=left_out)
    found = torch.cuda.device_count()
    for item in items:
        marks = list(item.iter_markers("gpu"))
        shares = found < 2 and any(mark.kwargs.get("shared") for mark in marks)
        needed = 1 if shares else max((mark.args[0] if mark.args else 2 for mark in marks), default=0)
        if found < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, torch sees {found}"))


def pytest_terminal_summary(terminalreporter, config):
    """Says how to run the tests that were left out for their mark, if the command line names folders or files."""
    if config.args == config.getini("testpaths"):
        return
    left_out = terminalreporter.stats.get("deselected", ())
    for mark in ("host", "catalogue"):
        if f"not {mark}" in config.getoption("-m") and any(item.get_closest_marker(mark) for item in left_out):
            terminalreporter.write_line(f"tests marked {mark!r} were left out: add `-m {mark}` to run them")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """One thread, as ranks on the CPU have: some matmuls have other bits with more. Tests of GPUs keep all."""
    torch.set_num_threads(THREADS if item.get_closest_marker("gpu") else 1)


def pytest_collection_finish(session):
    """Keeps each garbage collection from searching torch and thousands of collected tests."""
    collect_seldom()
