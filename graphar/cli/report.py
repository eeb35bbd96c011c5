"""`python -m graphar report`: what a folder of reports says; in a checkout, where the code that reads them is."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from importlib import import_module
from pathlib import Path

from graphar.cli.options import add_command
from graphar.errors import GrapharError

ROOT = Path(__file__).resolve().parents[2]


def add(commands) -> None:
    one = add_command(
        commands,
        "report",
        run,
        summary="what a folder of `nox -s perf` says, and how it compares with an earlier one",
        description="Says what the reports in a folder say, and makes its page and report.md anew from their JSON"
        " files. Needs a checkout, as `nox -s perf` does, which makes them.",
        quiet="print nothing; the exit status says whether all is right, and nothing slower",
    )
    one.add_argument("folder", type=Path, metavar="FOLDER", help="such as reports/2026-11-21-h200x4")
    one.add_argument("--compare", type=Path, metavar="EARLIER", help="fail where graphar is slower than in this folder")


def run(options: argparse.Namespace) -> int:
    if not (ROOT / "perf" / "page").is_dir():
        raise GrapharError("report: reports are made and read in a checkout of graphar; this is an installed copy")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # where the package was installed from it, only that is found
    try:
        command = import_module("perf.page.command")
    except ModuleNotFoundError as error:
        raise GrapharError(f'report: needs {error.name}; in the checkout: pip install --editable ".[dev]"') from error
    with contextlib.redirect_stdout(io.StringIO()) if options.quiet else contextlib.nullcontext():
        return command.run(options)
