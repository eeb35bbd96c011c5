"""A progress bar for commands."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


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
