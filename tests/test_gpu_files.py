"""Tests that need GPUs are not collected without them, so their files are imported here."""

from __future__ import annotations

import os
from pathlib import Path

from tests.processes import run_code

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
