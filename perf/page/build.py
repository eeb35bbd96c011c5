"""Builds pages from the JSON files of reports."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from graphar.plan.sizes import format_nbytes
from perf import charts
from perf.compare import Pair, machines_of, pairs_of
from perf.machine import one_line
from perf.md import NOT_SERVED, bullets, number, table
from perf.ratios import NOISE, by_method, geometric_mean, group, of_best_peer, times_of_peer
from perf.report import StoredReport, read_all, topics
from perf.topics.allreduce import FAMILIES, MODES, AllReduce, Row, main_first, members, ratios_by_world

FOLDER = Path(__file__).parent
INDEX, NOTES, SUMMARY = "index.html", "notes.md", "report.md"
README = "README.md"  # of all folders: the index as Markdown
MAX_LISTED = 6  # more findings than this are folded
MAX_SIZES = 4  # of more slower sizes than this, only the worst is named

WHAT = (
    "graphar sums PyTorch tensors over the GPUs of one host. The result has the same bits on every rank, at every size."
)
ON_CPU = (
    "This machine has fewer than two GPUs, so graphar's implementation for CPUs ran. It defines what the GPU kernels"
    " compute, but its times say nothing about theirs."
)
ON_ONE_GPU = (
    "This machine has one GPU, so collectives ran graphar's implementation for CPUs. Topics that need no second GPU ran"
    " on this one."
)
NOTHING_SLOWER = "At no size by more than 3 %. Smaller differences are noise."


@dataclass(frozen=True)
class Fold:
    """A collapsible part of a section."""

    title: str
    body: Markup
    charts: Sequence[Markup] = ()
    is_open: bool = False


@dataclass(frozen=True)
class Part:
    """A section of a page.

    Attributes:
        files: the report's files. They have the same rows.
    """

    anchor: str
    title: str
    head: Markup
    folds: Sequence[Fold] = ()
    files: Sequence[str] = ()


@dataclass(frozen=True)
class Entry:
    """A link on the first screen, with a summary in one line."""

    link: str
    title: str
    figure: str = ""
    words: str = ""
    shortfall: str = ""

    @property
    def is_wrong(self) -> bool:
        return self.figure == "wrong"


@dataclass(frozen=True)
class Page:
    """The content of the template.

    Attributes:
        cards: key figures with captions. The figure and the shortfalls are shown beside them.
        others: files of the folder that do not belong to a report.
    """

    title: str
    subtitle: str
    intro: Markup
    sections: Sequence[Part]
    cards: Sequence[tuple[str, str]] = ()
    figure: Markup = field(default_factory=Markup)
    shortfalls: Markup = field(default_factory=Markup)
    entries: Sequence[Entry] = ()
    folds: Sequence[Fold] = ()
    others: Sequence[str] = ()

    def html(self) -> str:
        settings = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
        template = Environment(loader=FileSystemLoader(FOLDER), **settings).get_template("page.html")
        return template.render(page=self) + "\n"


def html(markdown: str) -> Markup:
    """Returns Markdown as HTML. Wide tables scroll. Each table row is one line of the file."""
    text = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    text = re.sub(r'\n(?=</?t[dhr]>|<t[dh] )|(?<=<tr>)\n| style="text-align:right"', "", text)
    text = text.replace("<tr>", "\n<tr>")
    return Markup(
        text.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    )


def with_plots(text: Markup, figures: Iterable[charts.Figure | None]) -> Markup:
    plots = "".join(drawn(figures))
    return text + Markup(f'<div class="plots">{plots}</div>' if plots else "")


def drawn(figures: Iterable[charts.Figure | None]) -> list[Markup]:
    return [Markup(one) for one in map(charts.render, figures) if one]


# ---- a folder -------------------------------------------------------------------------------------------------------


def write(folder: Path) -> Path:
    """Writes the files of :func:`texts` into the folder. Returns the path of index.html."""
    return _write(folder, texts(folder))


def _write(folder: Path, made: Mapping[str, str]) -> Path:
    for name, text in made.items():
        (folder / name).write_text(text)
    return folder / INDEX


def texts(folder: Path) -> dict[str, str]:
    """Returns the text of a folder's page and tables, by file name.

    The files are index.html, report.md (the text of its first screen), and a .md and a .csv file for each report. They
    are made from the folder's JSON files and from notes.md, if there is one.

    Raises:
        FileNotFoundError: the folder holds no report.
        ValueError: a report cannot be read.
    """
    found = read_all(folder)
    tables = {name: text for one in found for name, text in one.report.tables(one.machine, one.command).items()}
    sweep = sweep_of(found)
    has_notes = (folder / NOTES).exists()
    notes = [Part("notes", "Notes", html((folder / NOTES).read_text()))] if has_notes else []
    not_measured = missing(found)
    entries = [Entry(f"#{one.report.name}", one.report.title, *glance(one)) for one in found] + [
        Entry("#notes", "Notes") for _ in notes
    ]
    plot = ratios_by_world(sweep.rows)
    page = Page(
        title_of(found),
        one_line(found[0].machine),
        html(intro(found)),
        [_part(one, found[0].machine) for one in found] + notes,
        cards(sweep),
        Markup(charts.render(plot)),
        html(bullets(shortfalls(sweep) or [NOTHING_SLOWER])),
        entries,
        [Fold("Not measured", html(bullets(not_measured)))] if not_measured else [],
        _others(folder),
    )
    return {INDEX: page.html(), SUMMARY: summary(found), **tables}


def sweep_of(found: Sequence[StoredReport]) -> AllReduce:
    """Returns the report of the all-reduce sweep; an empty report if there is none."""
    return next((one.report for one in found if one.report.name == "allreduce"), AllReduce())


def is_on_gpus(found: Sequence[StoredReport]) -> bool:
    return any(one.machine["gpu_count"] >= 2 for one in found)


def title_of(found: Sequence[StoredReport]) -> str:
    machine = found[0].machine
    where = f"{machine['gpu_count']}x {machine['gpu']}" if machine["gpu"] else f"CPU ({machine['cpu']})"
    return f"graphar on {where}"


def intro(found: Sequence[StoredReport]) -> str:
    """Returns a few sentences on what was measured."""
    where = "" if is_on_gpus(found) else ON_ONE_GPU if found[0].machine["gpu_count"] else ON_CPU
    what = f"{WHAT} {where}".strip()
    rows = sweep_of(found).rows
    if not rows:
        return what
    peers = {row.method for row in rows if not row.is_own}
    families = [words for name, words in FAMILIES.items() if any(peer.startswith(name) for peer in peers)]
    peers_of = f" They are compared with the all-reduces of {_all_of(families)}." if families else ""
    return f"{what} All-reduces of {_swept(rows)} were timed.{peers_of} {sweep_of(found).status()}"


def _swept(rows: Sequence[Row]) -> str:
    """Returns the sizes and numbers of ranks. Numbers of ranks with one or two sizes are told apart from the others."""
    sizes = {ranks: {row.nbytes for row in mine} for ranks, mine in group(rows, lambda row: row.world_size).items()}
    full = {ranks: mine for ranks, mine in sizes.items() if len(mine) > 2} or sizes
    ends = [end(set().union(*full.values())) for end in (min, max)]
    told = f"{' to '.join(map(format_nbytes, dict.fromkeys(ends)))} between {_ranks(full)} ranks"
    apart = [
        f"{_all_of([format_nbytes(size) for size in sorted(mine)])} between {ranks}"
        for ranks, mine in sizes.items()
        if ranks not in full
    ]
    return ", and of ".join([told, *apart])


def _ranks(sizes: Iterable[int]) -> str:
    return _all_of([str(ranks) for ranks in sorted(sizes, reverse=True)])


def _all_of(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def glance(one: StoredReport) -> tuple[str, str, str]:
    """Returns a report's headline figure, caption and shortfall.

    With wrong results the figure is "wrong". The caption says so if the report is partial.
    """
    if one.report.wrong():
        return "wrong", one.report.status().replace("**", ""), ""
    found = one.report.glance()
    words = found.words
    if one.report.is_partial:
        words += " (partial: the run was ended before it was done)"
    if peers := one.report.wrong_peers():
        words += f" (wrong results of peers, which are not compared: {len(peers)})"
    return found.headline, words, found.shortfall


def _part(one: StoredReport, of_page: Mapping[str, object]) -> Part:
    """Returns a report's section of the page. Its first table is open, and the others are collapsed."""
    report = one.report
    findings, folds = report.findings(), []
    if len(findings) > MAX_LISTED:
        folds.append(Fold("Findings", html(bullets(findings))))
        findings = []
    sections = report.sections()
    top = [section for section in sections if not section.title]
    for at, section in enumerate(section for section in sections if section.title):
        folds.append(Fold(section.title, html("\n\n".join(section.body)), drawn(section.figures), at == 0))
    if report.skipped:
        folds.append(Fold("Not measured", html(bullets(report.skipped))))
    if report.notes:
        folds.append(Fold("Columns and methods", html(report.notes)))
    folds.append(Fold("How to reproduce", html(f"```\n{one.command}\n```")))
    text = "\n\n".join([_when(one.machine, of_page), report.status(), bullets(findings)])
    drawn_above = [figure for section in top for figure in section.figures]
    if not any(section.figures for section in sections):
        drawn_above = [report.ratio_chart()]
    head = with_plots(html(text), drawn_above)
    files = [f"{report.name}{suffix}" for suffix in (".md", ".csv", ".json")]
    return Part(report.name, report.title, head, folds, files)


def _when(machine: Mapping[str, object], of_page: Mapping[str, object]) -> str:
    """Returns a sentence on when and where a report was measured. It is empty if that is the same for the page."""
    if machine == of_page:
        return ""
    another_time = {"commit": None, "date": None}
    if {**machine, **another_time} == {**of_page, **another_time}:
        return f"Measured at commit {machine['commit'] or 'unknown'}, {machine['date']}."
    return f"{one_line(machine)}."


def _others(folder: Path) -> list[str]:
    made = {INDEX, NOTES, SUMMARY} | {f"{one.name}{suffix}" for one in topics() for suffix in (".json", ".csv", ".md")}
    return sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in made)


def missing(found: Sequence[StoredReport]) -> list[str]:
    """Returns what was not measured: topics without a report, with their commands, and what this machine cannot run."""
    measured, sweep = {one.report.name for one in found}, sweep_of(found)
    lines = [f"{one.title}: `python -m perf {one.command}`" for one in topics() if one.name not in measured]
    if not is_on_gpus(found):
        kernels = "The kernels of collectives" if found[0].machine["gpu_count"] else "graphar's kernels"
        lines.append(f"{kernels}, and NVLink traffic: at least 2 GPUs are needed.")
    elif sweep.rows and not any("multimem" in str(row.algorithm) for row in sweep.rows):
        lines.append("The multimem algorithms: NVLink multicast is off unless the user turns it on.")
    return lines


def summary(found: Sequence[StoredReport]) -> str:
    """Returns report.md: the text of the page's first screen, and links to the rest."""
    sweep = sweep_of(found)
    parts = [f"# {title_of(found)}", f"{one_line(found[0].machine)}.", intro(found)]
    if sweep.rows:
        parts += [bullets([f"**{figure}**: {words}" for figure, words in cards(sweep)])]
        parts += ["## Where graphar is slower", bullets(shortfalls(sweep) or [NOTHING_SLOWER])]
    lines = []
    for one in found:
        figure, words, shortfall = glance(one)
        loss = one.report.loss_of_auto() or NOT_SERVED
        lines.append([f"[{one.report.title}]({one.report.name}.md)", figure or NOT_SERVED, words, shortfall, loss])
    header = ["report", "result", "meaning", "where graphar is slower", "largest of_best_variant"]
    parts += ["## All reports", table(header, lines)]
    parts += ["`python -m perf report FOLDER --write` writes a page with the plots, and the rows as CSV."]
    if not_measured := missing(found):
        parts += ["## Not measured", bullets(not_measured)]
    return "\n\n".join(parts) + "\n"


def cards(found: AllReduce) -> list[tuple[str, str]]:
    """Returns three key figures of the sweep's first table, with their captions."""
    if not found.rows:
        return []
    key = main_first(found.rows)[0]
    rows = members(found.rows, key)
    own = [row for row in rows if row.method == "graphar" and not row.wrong]
    if not own:
        return [("wrong", "No result of graphar was right.")]
    small, large = min(own, key=_nbytes), max(own, key=lambda row: row.busbw)
    time = f"{number(small.median)} us" if small.median < 1e3 else f"{number(small.median / 1e3)} ms"
    figures = [(time, f"all-reduce of {format_nbytes(small.nbytes)} between {key.world_size} ranks")]
    if ratios := of_best_peer(by_method(rows, _nbytes)):
        mean = geometric_mean(ratios.values())
        words = f"graphar's time / the best peer's time, geometric mean over {len(ratios)} sizes"
        figures.append((f"{mean:.2f}", words))
    ceiling = (found.link_ceiling or {}).get(key.world_size)
    of_link = f", {large.busbw / ceiling:.0%} of the links' measured rate" if ceiling else ""
    if large.algorithm == "two_shot_lossless":
        of_link += ": compressed without loss, it sends fewer bytes"
    return [*figures, (f"{number(large.busbw)} GB/s", f"bus bandwidth at {format_nbytes(large.nbytes)}{of_link}")]


def shortfalls(found: AllReduce) -> list[str]:
    """Returns sentences that say where graphar is slower than the best peer by more than noise.

    There is a sentence for each mode of the largest number of ranks, and one for each smaller number of ranks.
    """
    lines, narrower = [], {}
    for key in main_first(found.rows):
        cases = by_method(members(found.rows, key), _nbytes)
        ratios = of_best_peer(cases)
        slower = [
            (one, f"{format_nbytes(nbytes)} ({times_of_peer(one, cases[nbytes])})")
            for nbytes, one in ratios.items()
            if one > NOISE
        ]
        mode = MODES[key.mode] + ("" if key.form == "process" else ", one process")
        if key.world_size == main_first(found.rows)[0].world_size:
            where = [text for _, text in slower]
            if len(slower) > MAX_SIZES:
                where = [f"{len(slower)} of {len(ratios)} sizes, at worst {max(slower)[1]}"]
            lines += [f"{key.world_size} ranks, {mode}: slower at {', '.join(where)}."] if slower else []
        else:
            told = narrower.setdefault(key.world_size, ([], []))
            told[0].extend((one, f"{text}, {mode}") for one, text in slower)
            told[1].extend(ratios)
    for ranks, (slower, every) in sorted(narrower.items(), reverse=True):
        if slower:
            worst = max(slower)[1]
            lines.append(f"{ranks} ranks: slower in {len(slower)} of {len(every)} sizes and modes, at worst {worst}.")
    return lines


def _nbytes(row) -> int:
    return row.nbytes


# ---- all folders, and two -------------------------------------------------------------------------------------------


def folders_of(reports: Path) -> list[Path]:
    """Returns the folders that hold a report."""
    return sorted({path.parent for topic in topics() for path in reports.glob(f"*/{topic.name}.json")})


def write_index(reports: Path) -> Path:
    """Writes the files of :func:`index_texts` beside the folders. Returns the path of index.html."""
    return _write(reports, index_texts(reports))


def index_texts(reports: Path) -> dict[str, str]:
    """Returns the index of all report folders, with a table of topics by machine: as a page, and as README.md.

    Machines with GPUs come first. The page links to pages, and README.md to the Markdown that git has.

    Raises:
        FileNotFoundError: there is no folder with a report.
    """
    folders = folders_of(reports)
    if not folders:
        raise FileNotFoundError(f"{reports} holds no folder of reports")
    read = {folder: {one.report.name: one for one in read_all(folder)} for folder in folders}
    found = dict(sorted(read.items(), key=lambda one: not _has_gpus(one[1].values())))
    entries = []
    for folder, mine in found.items():
        written = list(mine.values())
        dates = sorted({str(one.machine["date"]) for one in written})
        words = f"{len(written)} reports, {' to '.join(dict.fromkeys([dates[0], dates[-1]]))}"
        entries.append(Entry(f"{folder.name}/{INDEX}", title_of(written), words=words))
    title = "Reports of graphar"
    note = (
        "A number without a unit is graphar's time / the time that the report compares it with, usually the best"
        " peer's. Below 1 graphar is faster. Other results are explained in the reports."
    )
    by_machine = {name: f"{note}\n\n{_by_machine(found, name)}" for name in (INDEX, SUMMARY)}
    page = Page(title, "", html(WHAT), [Part("topics", "All reports", html(by_machine[INDEX]))], entries=entries)
    listed = bullets(f"[{one.title}]({one.link.replace(INDEX, SUMMARY)}): {one.words}" for one in entries)
    return {INDEX: page.html(), README: "\n\n".join([f"# {title}", WHAT, listed, by_machine[SUMMARY]]) + "\n"}


def _has_gpus(found: Iterable[StoredReport]) -> bool:
    return any(one.machine["gpu_count"] for one in found)


def _by_machine(found: Mapping[Path, Mapping[str, StoredReport]], name: str) -> str:
    """Returns the table of topics by machine. ``name`` is the file of a folder to which it links."""
    lines = []
    for topic in topics():
        link = f"{INDEX}#{topic.name}" if name == INDEX else f"{topic.name}.md"
        cells = [_index_cell(f"{folder.name}/{link}", mine.get(topic.name)) for folder, mine in found.items()]
        lines.append([topic.title, *cells])
    return table(["topic", *(f"[{folder.name}]({folder.name}/{name})" for folder in found)], lines)


def _index_cell(link: str, one: StoredReport | None) -> str:
    if one is None:
        return NOT_SERVED
    figure = glance(one)[0]
    marks = (" **WRONG**" if figure == "wrong" else "") + (" (partial)" if one.report.is_partial else "")
    return f"[{figure or 'report'}]({link}){marks}"


def write_comparison(first: Path, second: Path, path: Path) -> Path:
    """Writes a page that compares two folders. They may belong to different machines. Returns its path.

    Raises:
        OSError, ValueError: a folder cannot be read, or the folders have no topic in common.
    """
    pairs = pairs_of(first, second)
    machines = machines_of(pairs)
    folders = {str(folder): Path(os.path.relpath(folder, path.parent)).as_posix() for folder in (first, second)}
    named = [
        f"- {which}: [{name}]({link}/{INDEX}), {machine}"
        for which, (name, link), machine in zip(("first", "second"), folders.items(), machines, strict=True)
    ]
    ratios = "Ratios are the second folder's time / the first folder's; below 1.00 the second is faster."
    text = "\n".join([*named, "", ratios])
    sections = [_compared(pair) for pair in pairs]
    entries = [Entry(f"#{part.anchor}", part.title) for part in sections]
    title = f"{second.name} compared with {first.name}"
    path.write_text(Page(title, "", html(text), sections, entries=entries).html())
    return path


def _compared(pair: Pair) -> Part:
    section = pair.section()
    summary, *rows = section.body
    folds = [Fold("All rows", html("\n\n".join(rows)))] if rows else []
    return Part(pair.first.report.name, section.title, with_plots(html(summary), section.figures), folds)
