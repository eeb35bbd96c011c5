"""What a run shows while it runs: one line a row on stdout, in nccl-tests' columns, and a progress bar on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from perf.cases import ITEMSIZES
from perf.report import Findings
from perf.rows import LinkCeiling, Row

HEADER = (
    f"#{'size':>11} {'count':>11} {'type':>9} {'redop':>6} {'ranks':>8} {'mode':>6} {'method':>26}"
    f" {'time':>11} {'algbw':>8} {'busbw':>8} {'#wrong':>8}\n"
    f"#{'(B)':>11} {'(elements)':>11} {'':>9} {'':>6} {'':>8} {'':>6} {'':>26}"
    f" {'(us)':>11} {'(GB/s)':>8} {'(GB/s)':>8} {'':>8}"
)


def format_row(row: Row) -> str:
    """One line under HEADER."""
    count = row.nbytes // ITEMSIZES[row.dtype]
    ranks = f"{row.world_size}" if row.form == "process" else f"{row.world_size} {row.form}"
    return (
        f" {row.nbytes:>11} {count:>11} {row.dtype:>9} {'sum':>6} {ranks:>8} {row.mode:>6} {row.method:>26}"
        f" {row.time_us['median']:>11.2f} {row.algbw:>8.3f} {row.busbw:>8.3f} {row.wrong:>8}"
    )


def make_progress() -> Progress:
    """A bar that is gone when the work is done, and never there where stderr is not a terminal."""
    console = Console(stderr=True)
    # Rich would otherwise print a redirected stdout's lines on stderr's terminal.
    redirect = sys.stdout.isatty()
    return Progress(console=console, transient=True, disable=not console.is_terminal, redirect_stdout=redirect)


@contextmanager
def reported(
    title: str, total: int | None, skipped: list[str], write: Callable[[], tuple[Path, str]]
) -> Iterator[Callable[[], None]]:
    """A block of work under a progress bar, which ends with a report of what was measured, even where it fails.

    Args:
        total: how often the block will advance the bar, by the function it is given; None: that is not known.
        skipped: what was not measured, and why; a block that is ended by an error, or by the user, is noted there.
        write: writes the report; returns the path of the one for people, and what to print above it.
    """
    try:
        with make_progress() as progress:
            bar = progress.add_task(title, total=total)
            yield lambda: progress.advance(bar)
    except BaseException:
        skipped.append("what would have come after the last row: the run was ended before it was done")
        raise
    finally:
        path, verdict = write()
        print(f"\n{verdict}\nreport: {path}", flush=True)


def take(message: Row | LinkCeiling | str, found: Findings) -> None:
    """Keeps and shows what a plan has found."""
    match message:
        case Row():
            found.rows.append(message)
            print(format_row(message), flush=True)
        case LinkCeiling():
            found.link_ceiling[message.world_size] = message.busbw
            print(f"# link ceiling, {message.world_size} ranks: {message.busbw:.1f} GB/s", flush=True)
        case _:
            found.skipped.append(message)
            print(f"# not measured: {message}", file=sys.stderr, flush=True)
