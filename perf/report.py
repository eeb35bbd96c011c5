"""The base class of benchmark topics: it holds a run's results and writes their report.

A topic is one file of perf/topics/ with a subclass of :class:`Report`, which registers itself, and a Markdown file of
the same name with its title, its help text, and what columns and methods mean. The subclass is a dataclass. Its fields
are lists of rows, and the JSON file has the same fields. The subclass defines the measurement (``plan``, ``measure``),
the wrong rows (``wrong``), and the content of report and page (``sections``, ``glance``).

All comparisons use one ratio, ``of_best_peer``: time / best peer's time. Below 1 is faster.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, TypedDict

from rich.console import Console
from rich.progress import Progress

from perf import files
from perf.charts import Axis, Figure, Mark, Rows
from perf.machine import one_line
from perf.md import bullets, plural, text_beside
from perf.ratios import NOISE, extent

ENDED = "what would have come after the last row: the run was ended before it was done"
PARTIAL = "**Partial: the run was ended before it was done.**"
MAX_NAMED = 6  # the most wrong rows that a verdict names
MAX_LABEL = 28  # the most letters of a row's label in a chart


class Spread(TypedDict):
    """The time of one operation on the slowest rank in microseconds: percentiles over the repeats."""

    median: float
    p10: float
    p99: float


class Deciles(TypedDict):
    """:class:`Spread` with the 90th instead of the 99th percentile."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class Timing:
    """The base class of rows with a time.

    A subclass adds ``method``, ``world_size``, ``time_us`` and ``wrong``. ``time_us`` has percentiles of the time of
    one operation over the repeats. Each has the time of the slowest rank. ``wrong`` counts the elements that
    differ from what the method promises, summed over all ranks. ``what`` describes the case in words, without method
    and number of ranks.
    """

    @property
    def median(self) -> float:
        return self.time_us["median"]

    @property
    def is_own(self) -> bool:
        """Whether the method uses graphar."""
        return "graphar" in self.method

    @property
    def is_peer(self) -> bool:
        """Whether the method is one that graphar is compared with."""
        return not self.is_own


@dataclass(frozen=True)
class Result(Timing):
    """One of the times of a row that has several."""

    method: str
    world_size: int
    what: tuple[str, ...]
    time_us: Mapping[str, float]
    wrong: int

    @property
    def is_own(self) -> bool:
        return self.method != "nccl"


@dataclass(frozen=True)
class Choice:
    """The rows of "auto" and of the fastest variant in one case."""

    auto: Timing
    variant: Timing

    @property
    def loss(self) -> float:
        """The time of "auto" / the variant's time."""
        return self.auto.median / self.variant.median


@dataclass(frozen=True)
class Section:
    """One section of a report.

    Attributes:
        title: the heading. Empty for text above the first heading.
        body: paragraphs, lists and tables in Markdown.
        figures: figures. Only the HTML page has them.
    """

    title: str
    body: Sequence[str]
    figures: Sequence[Figure | None] = ()


@dataclass(frozen=True)
class Glance:
    """A topic in one line: a headline figure and a caption.

    Attributes:
        words: the caption. It says what graphar's times are divided by. Without ratios it is a summary.
        ratios: graphar's time / the time that it is compared with, by case.
        figure: the headline figure if there are no ratios.
    """

    words: str
    ratios: Mapping[str, float] = field(default_factory=dict)
    figure: str = ""

    @property
    def headline(self) -> str:
        if not self.ratios:
            return self.figure
        return extent(self.ratios)

    @property
    def shortfall(self) -> str:
        """The cases in which graphar was slower by more than NOISE; an empty string if there are none."""
        slower = {case: ratio for case, ratio in self.ratios.items() if ratio > NOISE}
        if not slower:
            return ""
        worst = max(slower, key=slower.__getitem__)
        return f"{len(slower)} of {len(self.ratios)} cases; the worst is {slower[worst]:.2f} ({worst})"


@dataclass(frozen=True)
class Arguments:
    """A topic's arguments when `python -m perf` runs all topics. None: the topic is skipped."""

    on_gpus: str | None = ""
    quick_on_gpus: str = ""
    on_cpu: str | None = ""
    quick_on_cpu: str = ""

    def of(self, on_gpus: bool, quick: bool) -> list[str]:
        on_device = (self.on_gpus, self.quick_on_gpus) if on_gpus else (self.on_cpu, self.quick_on_cpu)
        chosen = on_device[quick]
        return (chosen or "").split()

    def is_left_out(self, on_gpus: bool) -> bool:
        return (self.on_gpus if on_gpus else self.on_cpu) is None


@dataclass
class Report:
    """The results of one topic.

    Class attributes:
        name: the name of the topic's files: its module's.
        command: the topic's command of `python -m perf`: its name, if it does not say another.
        order: the topic's position on the page.
        title, help, notes: the topic's title, the help text of its command, and the explanation of columns and methods.
            They stand in the Markdown file beside its module.
        arguments: the topic's arguments in a run of all topics.
        has_spread: whether two runs on one machine can be compared.
        added_fields: fields that files of earlier versions do not have.

    Attributes:
        skipped: messages that say what was not measured, and why.
    """

    skipped: list[str] = field(default_factory=list, kw_only=True)

    name: ClassVar[str]
    command: ClassVar[str]
    title: ClassVar[str]
    order: ClassVar[int]
    help: ClassVar[str]
    notes: ClassVar[str] = ""
    arguments: ClassVar[Arguments] = Arguments()
    has_spread: ClassVar[bool] = False
    added_fields: ClassVar[tuple[str, ...]] = ("skipped",)

    def __init_subclass__(cls) -> None:
        if "order" in vars(cls):
            cls.name = cls.__module__.rpartition(".")[2]
            cls.command = vars(cls).get("command", cls.name)
            cls.title, cls.help, cls.notes = words_of(cls)
            _REGISTERED[cls.name] = cls

    # Measurement: a topic overrides these.
    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the topic's options to the command line."""

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> object:
        """Returns the plan of the measurement. Ends the program if the options are invalid."""
        raise NotImplementedError

    def measure(self, plan) -> Iterator[object]:
        """Yields rows as they are measured. A string says what was not measured, and why."""
        raise NotImplementedError

    @classmethod
    def count(cls, plan) -> int | None:
        """Returns how many messages ``measure`` will yield; None if unknown."""
        return None

    def line(self, row) -> str:
        """Returns the line that is printed for a row; an empty string prints no line."""
        if not isinstance(row, Timing):
            return ""
        where = f"{plural(row.world_size, 'rank'):>7} {', '.join(row.what):<40}"
        return f"{where} {row.method:>26} {row.median:>10.2f} us {row.wrong:>6} wrong"

    # Content of the report: a topic overrides these.
    def verified(self) -> Sequence[Timing]:
        """Returns the rows whose results were verified."""
        return self.rows

    def where(self, row) -> str:
        """Returns a description of a verified row."""
        return ", ".join(row.what)

    def wrong(self) -> list[str]:
        """Returns a message for each wrong result of graphar. A wrong result fails the run."""
        return [f"{row.method} at {self.where(row)}" for row in self.verified() if row.wrong and row.is_own]

    def wrong_peers(self) -> list[str]:
        """Returns a message for each wrong result of a peer. Such rows are shown but not compared."""
        return [f"{row.method} at {self.where(row)}" for row in self.verified() if row.wrong and not row.is_own]

    def checked(self) -> int:
        """Returns how many results were verified."""
        return len(self.verified())

    def findings(self) -> list[str]:
        """Returns the conclusions of the report, one sentence each."""
        return []

    def sections(self) -> list[Section]:
        raise NotImplementedError

    def glance(self) -> Glance:
        raise NotImplementedError

    def overview(self) -> Figure | None:
        """Returns the figure that a folder's page opens with, if this topic has it."""
        return None

    def ratio_chart(self) -> Rows:
        """Charts the ratios of the glance: a row for the first words of a case, and a dot for each case."""
        glance = self.glance()
        title, ratios = f"{glance.words[:1].upper()}{glance.words[1:]}", glance.ratios
        rows = {case: case.rpartition(": ")[2].partition(", ")[0][:MAX_LABEL] for case in ratios}
        marks = [Mark(rows[case], "graphar", value) for case, value in ratios.items()]
        return Rows(title, marks, Axis("ratio", form="{:.2f}".format), 1.0)

    def losses(self) -> list[tuple[str, Choice]]:
        """Returns the choices of "auto", each with its case in words. Empty without variants."""
        return []

    def timed(self) -> Sequence[Timing]:
        """Returns the times to compare with another run, if they have a spread."""
        return self.rows

    def loss_of_auto(self) -> str:
        """Returns the largest loss of "auto" and its case as text; an empty string without variants."""
        named = self.losses()
        if not named:
            return ""
        case, worst = max(named, key=lambda named_choice: named_choice[1].loss)
        return f"{worst.loss:.2f} ({worst.auto.method}, {case}: `{worst.variant.method}` is fastest)"

    def verdict(self) -> str:
        """Returns a sentence that says whether all results are correct."""
        wrong, peers, count = self.wrong(), self.wrong_peers(), self.checked()
        if not count:
            return "Nothing was measured."
        of_peers = f" **WRONG RESULTS OF PEERS: {named(peers, count)}**" if peers else ""
        if wrong:
            return f"**WRONG RESULTS: {named(wrong, count)}**{of_peers}"
        if peers:
            return f"{count} results were verified: none of graphar's is wrong.{of_peers}"
        return f"All {count} results were verified: none is wrong."

    @property
    def is_partial(self) -> bool:
        """Whether the run ended early."""
        return ENDED in self.skipped

    def status(self) -> str:
        """Returns the verdict, after a warning if the report is partial."""
        return f"{PARTIAL} {self.verdict()}" if self.is_partial else self.verdict()

    def summary(self) -> str:
        """Returns the status and the findings for the terminal."""
        return "\n".join([self.status(), *(f"- {line}" for line in self.findings())])

    def run(self, options: argparse.Namespace, folder: Path, machine: dict, command: str) -> int:
        """Measures and writes the report. Returns the exit status: 1 if a result of graphar is wrong.

        If the run fails, the rows measured so far are written. If there are none, an earlier report is not overwritten.
        """
        plan = self.plan(options, machine["gpu_count"])
        print(f"# {one_line(machine)}", flush=True)
        with self._written(folder, machine, command), progress_bar() as progress:
            bar = progress.add_task(self.title, total=self.count(plan))
            for message in self.measure(plan):
                progress.advance(bar)
                self.take(message)
        return int(bool(self.wrong()))

    def take(self, message: object) -> None:
        """Stores and prints a message that ``measure`` yielded."""
        if isinstance(message, str):
            self.skipped.append(message)
            print(f"# not measured: {message}", file=sys.stderr, flush=True)
            return
        self._list_of(type(message)).append(message)
        if line := self.line(message):
            print(line, flush=True)

    def _list_of(self, kind: type) -> list:
        hints = typing.get_type_hints(type(self))
        return next(getattr(self, item.name) for item in fields(self) if typing.get_args(hints[item.name]) == (kind,))

    @contextmanager
    def _written(self, folder: Path, machine: dict, command: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.skipped.append(ENDED)
            raise
        finally:
            if self._rows() or not (folder / f"{self.name}.json").exists() or not self.is_partial:
                path = self.write(folder, machine, command)
                print(f"\n{self.summary()}\nreport: {path}", flush=True)

    def write(self, folder: Path, machine: dict, command: str) -> Path:
        """Creates the folder and writes the report's files. Returns the path of the Markdown file."""
        folder.mkdir(parents=True, exist_ok=True)
        head = {"schema": files.VERSION, "topic": self.name, "machine": machine, "command": command}
        (folder / f"{self.name}.json").write_text(files.text_of(head | self._content()))
        path = folder / f"{self.name}.md"
        path.write_text(self.markdown(machine, command))
        return path

    def _rows(self) -> list[list]:
        """Returns the non-empty lists of rows."""
        lists = (getattr(self, item.name) for item in fields(self) if item.name != "skipped")
        return [rows for rows in lists if isinstance(rows, list) and rows]

    def _content(self) -> dict[str, object]:
        """Returns the fields for JSON."""
        names = [item.name for item in fields(self) if item.name != "skipped"] + ["skipped"]
        return {name: files.to_json(getattr(self, name)) for name in names}

    def markdown(self, machine: dict, command: str) -> str:
        """Returns the report as Markdown, without its figures."""
        return markdown_of(self.document(machine, command))

    def document(self, machine: dict, command: str) -> list[str | Figure | None]:
        """Returns the parts of the report: Markdown, and the figures that only its page has."""
        sections = self.sections()
        parts = [f"# {self.title}", f"{one_line(machine)}.", self.status(), bullets(self.findings())]
        parts += [] if any(section.figures for section in sections) else [self.ratio_chart()]
        for section in sections:
            parts += [f"## {section.title}" if section.title else "", *section.figures, *section.body]
        if self.skipped:
            parts += ["## Not measured", bullets(self.skipped)]
        if self.notes:
            parts += ["## Columns and methods", self.notes]
        return [*parts, "## How to reproduce", f"```\n{command}\n```"]


def markdown_of(parts: Iterable[str | Figure | None]) -> str:
    """Returns the text of a document without its figures."""
    return "\n\n".join(part for part in parts if part and isinstance(part, str)) + "\n"


def words_of(topic: type[Report]) -> tuple[str, str, str]:
    """Returns the title, the help text and the notes in the Markdown file beside a topic's module."""
    text = text_beside(*(base.__module__ for base in reversed(topic.__mro__)))
    title, what, *notes = text.split("\n\n", 2)
    return title.removeprefix("# "), what, "".join(notes)


def named(wrong: Sequence[str], count: int) -> str:
    """Returns a sentence that says how many of ``count`` results are wrong, and names the first ones."""
    names = list(dict.fromkeys(wrong))
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{len(wrong)} of {count} ({', '.join(names[:MAX_NAMED])}{more})."


_REGISTERED: dict[str, type[Report]] = {}


def topics() -> list[type[Report]]:
    """Returns all topics, in the order of the page."""
    package = importlib.import_module("perf.topics")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"perf.topics.{module.name}")
    return sorted(_REGISTERED.values(), key=lambda topic: topic.order)


@dataclass(frozen=True)
class StoredReport:
    """A report read from a folder."""

    report: Report
    machine: dict[str, object]
    command: str


def read(folder: Path, topic: type[Report]) -> StoredReport:
    """Reads a report that :meth:`Report.write` wrote.

    Raises:
        FileNotFoundError: there is no such report.
        ValueError: the file is not a report of that topic, or has an unknown version.
    """
    path = folder / f"{topic.name}.json"
    content = files.read(path)
    values = {name: value for name, value in content.items() if name not in ("schema", "topic", "machine", "command")}
    try:
        if content.get("topic") != topic.name:
            raise ValueError(f"its topic is {content.get('topic')!r}")
        if missing := sorted({item.name for item in fields(topic)} - values.keys() - set(topic.added_fields)):
            raise ValueError(f"{missing[0]} is missing")
        # the topic "compile" had no command in version 1
        command = content.get("command", f"python -m perf {topic.command}")
        return StoredReport(files.from_json(topic, values), content["machine"], command)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_all(folder: Path) -> list[StoredReport]:
    """Returns the folder's reports, in the order of the page.

    Raises:
        FileNotFoundError: the folder has no report.
        ValueError: a report cannot be read.
    """
    stored = [read(folder, topic) for topic in topics() if (folder / f"{topic.name}.json").exists()]
    if not stored:
        below = sorted({path.parent for topic in topics() for path in folder.glob(f"*/{topic.name}.json")})
        instead = f"; try {', '.join(map(str, below))}" if below else ""
        raise FileNotFoundError(f"{folder} holds no report of python -m perf{instead}")
    return stored


def progress_bar() -> Progress:
    """Returns a progress bar. It is shown only if stderr is a terminal, and disappears at the end."""
    console = Console(stderr=True)
    # If stdout is not a terminal, Rich would print its lines on stderr.
    redirect = sys.stdout.isatty()
    return Progress(console=console, transient=True, disable=not console.is_terminal, redirect_stdout=redirect)
