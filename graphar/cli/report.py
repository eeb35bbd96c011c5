"""`python -m graphar report`: summarises a folder of reports. Needs a checkout, which has the code that reads them."""

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
        description="Summarises the reports in a folder, and with --write rewrites its page and tables from their JSON"
        " files. Needs a checkout, as `nox -s perf` does, which makes the reports.",
        quiet="print nothing; the exit status says whether a result is wrong or slower",
    )
    one.add_argument("folder", type=Path, metavar="FOLDER", help="folder of reports, such as reports/h200x4")
    one.add_argument("--write", action="store_true", help="rewrite index.html and the tables in FOLDER")
    one.add_argument("--compare", type=Path, metavar="EARLIER", help="fail where graphar is slower than in this folder")


def run(options: argparse.Namespace) -> int:
    if not (ROOT / "perf" / "page").is_dir():
        raise GrapharError("report: reports are made and read in a checkout of graphar; this is an installed copy")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # an editable install makes only the package importable
    try:
        command = import_module("perf.page.command")
    except ModuleNotFoundError as error:
        raise GrapharError(f'report: needs {error.name}; in the checkout: pip install --editable ".[dev]"') from error
    with contextlib.redirect_stdout(io.StringIO()) if options.quiet else contextlib.nullcontext():
        return command.run(options)
