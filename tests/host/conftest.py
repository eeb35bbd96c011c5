"""Fixtures for tests of the kernels on the host."""

from __future__ import annotations

import pytest

from graphar.numerics import norms
from tests.host import build
from tests.host.build import NORM_SLOTS

# Of the programs that a run compiles: those of kernels as they are, those with several mistakes to choose from, and
# those of one mistake by itself. More are an error, so that the runs do not get longer unnoticed.
MOST_PROGRAMS = {"kernels": 350, "choices": 120, "mistakes": 40}
_built = {kind: set() for kind in MOST_PROGRAMS}


def pytest_configure(config):
    build.WHOLE = config.getoption("--whole")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Adds what a worker of xdist has built."""
    for kind, programs in getattr(node, "workeroutput", {}).get("programs", {}).items():
        _built[kind].update(programs)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fails the run if it has compiled more programs than MOST_PROGRAMS."""
    for kind, programs in build.BUILT.items():
        _built[kind].update(programs)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["programs"] = {kind: sorted(programs) for kind, programs in _built.items()}
    elif session.exitstatus == pytest.ExitCode.OK and any(len(_built[kind]) > n for kind, n in MOST_PROGRAMS.items()):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for kind, most in MOST_PROGRAMS.items():
        if len(_built[kind]) > most:
            terminalreporter.write_line(f"{len(_built[kind])} programs of {kind}, of at most {most}", red=True)


@pytest.fixture
def whole(request):
    """Whether all is to be run, and not a sample."""
    return request.config.getoption("--whole")


@pytest.fixture(scope="session", autouse=True)
def kernel_cache():
    """Keeps the programs in the user's kernel cache, unlike other tests: they take longer to compile than to run."""


@pytest.fixture
def few_slots(monkeypatch):
    """Has the specification of norms add in the order of the simulated kernels, which have few slots."""
    monkeypatch.setattr(norms, "SLOTS", NORM_SLOTS)
