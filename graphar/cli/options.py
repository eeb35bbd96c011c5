"""The options that commands share, and their exit status."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Iterable

import torch

from graphar.numerics.codecs import NAMES
from graphar.plan.scratch import MAX_RANKS, WORLD_SIZES
from graphar.plan.sizes import parse_nbytes

INTERRUPTED = 128 + signal.SIGINT  # the exit status that shells use
EXIT_STATUS = (
    "Exit status: 0 if all is well, 1 if it could not be done or something is wrong, 2 for bad arguments, 130 after"
    " Ctrl-C."
)


def add_command(
    commands, name: str, run: Callable[[argparse.Namespace], int], *, summary: str, description: str, quiet: str
) -> argparse.ArgumentParser:
    """Adds a command to `python -m graphar`, and returns its parser.

    ``summary`` is its line in the list of commands, ``description`` the text above the options in its --help, and
    ``quiet`` the help of --quiet. ``run`` returns the exit status.
    """
    one = commands.add_parser(name, help=summary, description=description, epilog=EXIT_STATUS)
    one.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    one.add_argument("--quiet", action="store_true", help=quiet)
    one.set_defaults(run=run)
    return one


def size(text: str) -> int:
    """Returns the bytes of a size such as "16M"; an argparse type."""
    try:
        return parse_nbytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 2K, 1.5M, 1G or a number of bytes") from None


def by_name(dtypes: Iterable[torch.dtype]) -> dict[str, torch.dtype]:
    """Returns the dtypes by the names that --dtype takes."""
    return {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}


def add_call(command: argparse.ArgumentParser, dtypes: Iterable[str], *, count: str, what: str, ranks: str) -> None:
    """Adds the sizes, dtype, ranks and codec of calls.

    ``dtypes`` are names. ``count`` is argparse's number of sizes, which are those of ``what``. ``ranks`` says which
    ranks are the default, which :func:`default_world_size` counts.
    """
    command.add_argument("sizes", type=size, nargs=count, metavar="SIZE", help=f"size of {what}, such as 2K or 1.5M")
    command.add_argument(
        "--dtype",
        choices=list(dtypes),
        default="bfloat16",
        metavar="DTYPE",
        help=f"dtype of the elements: {', '.join(dtypes)} (default: bfloat16)",
    )
    default = f"ranks (default: {ranks}, or 4)"
    command.add_argument("--world-size", type=int, choices=WORLD_SIZES, metavar="N", help=default)
    listed = f"codec of an all-reduce: {', '.join(NAMES)}"
    command.add_argument("--codec", choices=NAMES, metavar="CODEC", help=listed)


def default_world_size() -> int:
    count = torch.cuda.device_count()
    return min(count, MAX_RANKS) if count >= 2 else 4


def fail(reason: str) -> int:
    """Prints why a command failed, and returns its exit status."""
    print(f"graphar: {reason}", file=sys.stderr)
    return 1
