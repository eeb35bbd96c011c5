"""What every command has: a summary for the list of commands, a description, --json and --quiet."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from graphar.plan.sizes import parse_nbytes

EXIT_STATUS = "Exit status: 0 if all is well, 1 if it could not be done or something is wrong, 2 for bad arguments."


def add_command(
    commands, name: str, run: Callable[[argparse.Namespace], int], *, summary: str, description: str, quiet: str
) -> argparse.ArgumentParser:
    """A command of `python -m graphar`.

    Args:
        summary: a few words for the list of commands.
        quiet: what --quiet leaves out.
    """
    one = commands.add_parser(name, help=summary, description=description, epilog=EXIT_STATUS)
    one.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    one.add_argument("--quiet", action="store_true", help=quiet)
    one.set_defaults(run=run)
    return one


def size(text: str) -> int:
    """Bytes, of what a user wrote."""
    try:
        return parse_nbytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 2K, 16M, 1G or a number of bytes") from None
