"""The command line, as `graphar` and as `python -m graphar`: parses the arguments and runs a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import graphar
from graphar.cli import bench, explain, simulate, trace, tune
from graphar.cli.doctor import examination
from graphar.cli.options import EXIT_STATUS, INTERRUPTED, fail
from graphar.errors import GrapharError


def main(argv: Sequence[str] | None = None, prog: str = "graphar") -> int:
    """Runs a command, and returns its exit status: 0 for success, 1 for a failure or a problem that was found, 130
    after Ctrl-C. ``prog`` is the program's name in the usage."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="NVLink collectives for PyTorch. Every command has --help, --json and --quiet.",
        epilog=f"{EXIT_STATUS} In a checkout, `nox -s perf` measures graphar beside its peers.",
    )
    parser.add_argument("--version", action="version", version=f"graphar {graphar.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (examination, bench, explain, tune, simulate, trace):
        command.add(commands)
    if (sys.argv[1:] if argv is None else argv)[:1] == ["report"]:
        return fail("a folder of reports is read in a checkout: python -m perf report FOLDER")
    options = parser.parse_args(argv)
    if "run" not in options:
        parser.print_help()
        return 0
    try:
        return options.run(options)
    except (GrapharError, OSError, ValueError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print("graphar: interrupted", file=sys.stderr)
        return INTERRUPTED
