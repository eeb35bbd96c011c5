"""What commands share: options, exit status and a progress bar."""

from __future__ import annotations

import argparse
import contextlib
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from graphar.numerics.codecs import NAMES
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import NAMED
from graphar.plan.scratch import MAX_RANKS, WORLD_SIZES
from graphar.plan.sizes import parse_nbytes

BAD_ARGUMENTS = 2  # as argparse has it
INTERRUPTED = 128 + signal.SIGINT  # the exit status that shells use
EXIT_STATUS = (
    "Exit status: 0 if all is well, 1 if it could not be done or something is wrong, 2 for bad arguments, 130 after"
    " Ctrl-C."
)


def add_command(
    commands, name: str, run: Callable[[argparse.Namespace], int], *, summary: str, description: str, quiet: str
) -> argparse.ArgumentParser:
    """Adds a command, which ``run`` runs, and returns its parser. ``quiet`` is the help of --quiet."""
    command = commands.add_parser(name, help=summary, description=description, epilog=EXIT_STATUS)
    command.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    command.add_argument("--quiet", action="store_true", help=quiet)
    command.set_defaults(run=run)
    return command


def size(text: str) -> int:
    """Returns the bytes of a size such as "16M"; an argparse type."""
    try:
        return parse_nbytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 2K, 1.5MB, 1GiB or a number of bytes") from None


def count(text: str) -> int:
    """Returns a positive number; an argparse type."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number")
    return int(text)


def python_file(text: str) -> str:
    """Returns the path of a Python file; an argparse type."""
    if not text.endswith(".py") or not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no Python file {text!r}")
    return text


def world_size(text: str) -> int:
    """Returns a number of ranks; an argparse type."""
    if not text.isdecimal() or int(text) not in WORLD_SIZES:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks: the kernels run on 2 to {MAX_RANKS} GPUs")
    return int(text)


SHORT_NAMES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
SHORT_NAMES |= {"f16": "float16", "f32": "float32", "fp64": "float64", "double": "float64"}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in TYPE_NAMES}


def dtype_name(text: str) -> str:
    """Returns torch's name of a dtype for a short form such as "bf16", and other text as it is; an argparse type."""
    return SHORT_NAMES.get(text.lower(), text.removeprefix("torch."))


def one_of(names: Iterable[str]) -> Callable[[str], str]:
    """Returns an argparse type for a name, of a dtype also in a short form."""

    def name(text: str) -> str:
        if (long := dtype_name(text)) not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return long

    return name


def several(of: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Returns an argparse type for several values of another type, with commas between them."""
    return lambda text: list(dict.fromkeys(map(of, text.split(","))))


def add_call(command: argparse.ArgumentParser, dtypes: Iterable[str], *, count: str, what: str, ranks: str) -> None:
    """Adds the sizes of ``what``, dtype, ranks and codec of calls. ``count`` is argparse's number of sizes."""
    command.add_argument("sizes", type=size, nargs=count, metavar="SIZE", help=f"size of {what}, such as 2K or 1.5M")
    listed = f"dtype of the elements: {', '.join(dtypes)}, or short forms such as bf16 (default: bfloat16)"
    one_of = {"type": dtype_name, "choices": list(dtypes), "default": "bfloat16"}
    command.add_argument("-d", "--dtype", "--datatype", metavar="DTYPE", help=listed, **one_of)
    default = f"ranks (default: {ranks}, or 4)"
    command.add_argument("--world-size", type=world_size, metavar="N", help=f"{default}, 2 to {MAX_RANKS}")
    codecs = f"codec of an all-reduce: {', '.join(NAMES)}"
    command.add_argument("--codec", choices=NAMES, metavar="CODEC", help=codecs)


def add_load(command: argparse.ArgumentParser) -> None:
    """Adds files of algorithms from outside the package, which :func:`load` runs before the command."""
    files = "Python files to run first, which call graphar.load_algorithm: algorithms of your own"
    command.add_argument("--load", type=python_file, nargs="+", default=(), metavar="FILE.py", help=files)


def load(files: Sequence[str]) -> None:
    """Runs Python files. ValueError with file and line if one raises an error."""
    for file in files:
        try:
            runpy.run_path(file)
        except Exception as error:
            path, frames = Path(file).absolute(), traceback.extract_tb(error.__traceback__)
            lines = [f", line {frame.lineno}" for frame in frames if Path(frame.filename).absolute() == path]
            where = "".join([file, *lines[-1:]])
            told = f"{where}: the file is run, and raises {type(error).__name__}: {error}"
            raise ValueError(str(error) if str(error).startswith(f"{path}:") else told) from error


def algorithm_named(op: str, name: str) -> str:
    """Returns the algorithm of ``op`` with a name, or with a kernel of that name; ValueError if it is not one."""
    named = [algorithm.value for algorithm in NAMED[op].values() if name in (algorithm.value, algorithm.kernel_name)]
    if name == "auto" or len(named) == 1:
        return named[0] if named else name
    raise ValueError(f"--algorithm of {op} must be one of {', '.join(('auto', *NAMED[op]))}, got {name!r}")


def ranks_here() -> int:
    count = torch.cuda.device_count()
    return min(count, MAX_RANKS) if count >= 2 else 4


def fail(reason: str, status: int = 1) -> int:
    """Prints why a command failed, and returns its exit status."""
    print(f"graphar: {reason}", file=sys.stderr)
    return status


@contextlib.contextmanager
def progress(title: str, total: int, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Yields a function to call after each of ``total`` steps. It moves a bar on a terminal, if rich is installed."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda step: None
        return
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda step: bar.update(task, advance=1, description=step)
