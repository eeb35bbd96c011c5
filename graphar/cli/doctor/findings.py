"""The doctor's findings, and their text."""

from __future__ import annotations

import shutil
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

OK, NOTE, PROBLEM = "ok", "note", "problem"
DRIVER_HANGS = "look for Xid errors in `dmesg`, and whether `nvidia-smi` answers; a GPU that hangs needs a reset"
REPORT = "report this, with all the text"
_MARKS = {OK: " ", NOTE: "-", PROBLEM: "!"}
_NAME_WIDTH = 20  # the least width of the column of names
_NARROWEST, _WIDEST = 60, 100  # columns of the text


@dataclass(frozen=True)
class Finding:
    name: str  # the name of the examined item
    found: str  # what was found
    status: str = OK  # OK; NOTE: good to know, needs no action; PROBLEM
    advice: str = ""  # what to do about a problem; an empty string otherwise


def problem(name: str, found: str, advice: str) -> Finding:
    return Finding(name, found, PROBLEM, advice)


def judged(name: str, found: str, advice: str) -> Finding:
    """Returns a problem if there is advice, or else what is well."""
    return Finding(name, found, PROBLEM if advice else OK, advice)


def note(name: str, found: str) -> Finding:
    return Finding(name, found, NOTE)


@dataclass(frozen=True)
class Section:
    title: str  # the heading
    findings: tuple[Finding, ...]  # the lines
    hung: bool = False  # whether it missed its deadline, so that a thread still waits
    interrupted: bool = False  # whether Ctrl-C ended it, so that a thread may still work


def examine(title: str, find: Callable[[], Iterable[Finding]], deadline_s: float) -> Section:
    """Returns what ``find`` finds. An exception, a warning, a missed deadline or an interrupt becomes a finding."""
    found: list[Finding] = []

    def collect() -> None:
        try:
            found.extend(find())
        except Exception as error:
            found.append(problem(title, f"not examined: {type(error).__name__}: {error}", REPORT))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        try:
            thread.join(deadline_s)
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
    hung = thread.is_alive() and not interrupted
    told = dict.fromkeys(str(warning.message).strip().splitlines()[0] for warning in caught)
    findings = [*found, *(note("warning", text) for text in told)]
    if hung:
        findings.append(problem(title, f"not done after {deadline_s:g} s", DRIVER_HANGS))
    if interrupted:
        findings.append(note(title, "not done: interrupted"))
    return Section(title, tuple(findings), hung, interrupted)


def text_of(section: Section) -> str:
    """Returns a section as text: "!" marks a problem, with advice below it, and "-" marks a note."""
    width = min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size((_WIDEST, 24)).columns))
    column = max([_NAME_WIDTH, *(len(finding.name) + 1 for finding in section.findings)])
    lines = [line for finding in section.findings for line in _lines(finding, column, width)]
    return "\n".join([section.title, *lines, ""])


def _lines(finding: Finding, column: int, width: int) -> Iterator[str]:
    indent = " " * (column + 3)
    begin = f"{_MARKS[finding.status]} {finding.name:<{column}} "
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    yield from wrap(finding.found, initial_indent=begin, subsequent_indent=indent) or [begin.rstrip()]
    if finding.advice:
        yield from wrap(f"-> {finding.advice}", initial_indent=indent, subsequent_indent=indent + "   ")
