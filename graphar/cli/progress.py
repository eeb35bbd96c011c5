"""How far a command has come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(title: str, total: int, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Gives what is to be called after each of ``total`` steps: a bar on a terminal, where rich can be imported."""
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
