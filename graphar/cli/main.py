"""The command line, as `graphar` and as `python -m graphar`: parses the arguments and runs a command."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path

import graphar
from graphar.cli import bench, explain, simulate, trace, tune
from graphar.cli.doctor import examination
from graphar.cli.options import BAD_ARGUMENTS, EXIT_STATUS, INTERRUPTED, fail, load
from graphar.errors import GrapharError, UnsupportedError
from graphar.runtime.availability import PROJECT

SHELLS = ("bash", "zsh")  # that shtab completes for


def main(argv: Sequence[str] | None = None, prog: str = "graphar") -> int:
    """Runs a command, and returns its exit status: 0 for success, 1 for a failure or a problem that was found, 2 for
    bad arguments, 130 after Ctrl-C. ``prog`` is the program's name in the usage."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="NVLink collectives for PyTorch. Every command has --help, --json and --quiet.",
        epilog=f"{EXIT_STATUS} In a checkout, `nox -s perf` measures graphar beside its peers.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and, where known, the commit")
    parser.add_argument("--completion", choices=SHELLS, help="print a completion script for the shell; needs shtab")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in (examination, bench, explain, tune, simulate, trace):
        command.add(commands)
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-") and argv[0] not in commands.choices:
        parser.error(f"there is no command {argv[0]!r}: {_hint(argv[0], list(commands.choices))}")
    options = parser.parse_args(argv)
    try:
        load(getattr(options, "load", ()))
        if "run" in options:
            return options.run(options)
        print(_version() if options.version else _completion(parser, options.completion), end="")
        return 0
    except (GrapharError, OSError, ValueError) as error:
        is_argument = isinstance(error, (ValueError, FileNotFoundError, IsADirectoryError, NotADirectoryError))
        return fail(_in_words(error), BAD_ARGUMENTS if is_argument else 1)
    except KeyboardInterrupt:
        print("graphar: interrupted", file=sys.stderr)
        return INTERRUPTED


def _hint(name: str, commands: Sequence[str]) -> str:
    if name == "report":
        return "a folder of reports is read in a checkout: python -m perf report FOLDER"
    near = get_close_matches(name, commands, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}"


def _in_words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"cannot open {error.filename}: {error.strerror.lower()}"
    return str(error)


def _version() -> str:
    """Returns the version, and the commit of a checkout, with "+" if it has changes, or the one that pip installed."""
    root = Path(graphar.__file__).parents[1]
    git = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        commit = subprocess.check_output(git, text=True).strip() if (root / ".git").exists() else _installed_commit()
    except (OSError, subprocess.CalledProcessError):
        commit = ""
    return f"graphar {graphar.__version__}{commit and f' ({commit})'}\n"


def _installed_commit() -> str:
    """Returns the commit that `pip install git+URL` recorded; "" if it installed a folder or a wheel."""
    try:
        recorded = metadata.distribution(PROJECT).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        recorded = None
    return json.loads(recorded or "{}").get("vcs_info", {}).get("commit_id", "")[:8]


def _completion(parser: argparse.ArgumentParser, shell: str | None) -> str:
    """Returns the completion script of a shell; of none, the help."""
    if shell is None:
        return parser.format_help()
    try:
        import shtab
    except ImportError:
        raise UnsupportedError("--completion needs shtab: python -m pip install shtab") from None
    parser.prog = "graphar"  # a shell completes one word, not `python -m graphar`
    return shtab.complete(parser, shell)
