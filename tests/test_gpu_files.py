"""Tests for GPUs, where there are none: their files can be imported, and marks say how many GPUs each needs."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import conftest, processes
from tests.processes import SHARE_SWITCH, run_code, run_on_gpus

TESTS = Path(__file__).parent
IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(sys.argv) - 1)
"""


def test_every_file_of_tests_for_gpus_can_be_imported():
    names = [".".join(path.relative_to(TESTS.parent).with_suffix("").parts) for path in TESTS.rglob("*_gpu.py")]

    printed, _ = run_code(IMPORT, *names, environment=dict(os.environ))

    assert printed == str(len(names))
    assert len(names) > 30


MODULE, TWO, ONE = pytest.mark.gpu, pytest.mark.gpu(2), pytest.mark.gpu(1)
SHARED = pytest.mark.gpu(4, shared=True)


@pytest.mark.parametrize(
    ("found", "marks", "needed"),
    [
        *((0, marks, needed) for marks, needed in (((MODULE,), 2), ((ONE,), 1), ((SHARED, MODULE), 1), ((), None))),
        *((1, marks, needed) for marks, needed in (((MODULE,), 2), ((ONE,), None), ((SHARED, MODULE), None))),
        *((2, marks, needed) for marks, needed in (((MODULE,), None), ((SHARED, MODULE), 4))),
    ],
)
def test_a_mark_says_how_many_gpus_a_test_needs_and_ranks_share_the_only_one(monkeypatch, found, marks, needed):
    added = []
    item = SimpleNamespace(iter_markers=lambda name: [one.mark for one in marks], add_marker=added.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)

    conftest.pytest_collection_modifyitems([item], SimpleNamespace(getoption=lambda name: True))

    reasons = [one.kwargs["reason"] for one in added]
    assert reasons == ([f"needs {needed} GPUs, torch sees {found}"] if needed else [])


@pytest.mark.parametrize(("gpus", "shares"), [(1, True), (2, False)])
def test_ranks_of_one_gpu_share_it_by_the_switch_and_gloo(monkeypatch, gpus, shares):
    asked = []
    monkeypatch.delenv(SHARE_SWITCH, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(processes, "_run_once", lambda *given: asked.append(given))

    run_on_gpus(len, 2)

    ((work, _, backend, *_),) = asked
    assert (SHARE_SWITCH in pickle.loads(work)[2], backend) == (
        shares,
        "cpu:gloo,cuda:gloo" if shares else "cpu:gloo,cuda:nccl",
    )
