"""Pages of reports, of a folder and of all folders. A page is Markdown with charts, as HTML.

report.md of a folder and README.md of all folders are the parts of these pages that git has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from perf import charts
from perf.charts import Figure
from perf.machine import one_line
from perf.md import NOT_SERVED, bullets, columns, table
from perf.report import Report, StoredReport, markdown_of, read_all, topics

INDEX, NOTES, SUMMARY = "index.html", "notes.md", "report.md"
README = "README.md"  # of all folders: the index as Markdown
STYLE = """
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; font: 16px/1.5 system-ui, sans-serif; }
h1 { margin-top: 4rem; } h1:first-child { margin-top: 0; }
code, pre { font: .875em ui-monospace, monospace; white-space: pre-wrap; }
table { display: block; overflow-x: auto; border-collapse: collapse; font-size: .875rem; }
th, td { padding: .2rem .6rem; white-space: nowrap; border-bottom: 1px solid #d9dde3; }
td strong { color: #c81e1e; }
figure { display: inline-block; margin: 1rem 2rem 1rem 0; max-width: 100%; } figcaption { font-weight: 600; }
figure p { color: #5c6570; font-size: .875rem; max-width: 36rem; } svg { max-width: 100%; height: auto; }
"""

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

Document = Sequence[str | Figure | None]  # Markdown and charts


def page(title: str, documents: Mapping[str, Document]) -> str:
    """Returns documents by anchor as one page. Links to other reports' Markdown become links to their pages."""
    sections = "".join(f'<section id="{anchor}">\n{html(parts)}</section>\n' for anchor, parts in documents.items())
    head = f'<meta charset="utf-8">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{sections}</body>\n</html>\n'


def html(document: Document) -> str:
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    return "".join(
        markdown.render(to_pages(part)) if isinstance(part, str) else charts.render(part) for part in document
    )


def to_pages(markdown: str) -> str:
    """Returns the text with links to reports, which are Markdown in git, as links to their places on the pages."""
    names = {topic.name for topic in topics()}

    def to_page(link: re.Match) -> str:
        folder, name = link.groups()
        if name in names:
            return f"]({folder}{INDEX if folder else ''}#{name})"
        return f"]({folder}{INDEX})" if folder or f"{name}.md" in (SUMMARY, README) else link[0]

    return re.sub(r"\]\(((?:[\w.-]+/)*)(\w+)\.md\)", to_page, markdown)


def write(folder: Path) -> Path:
    """Writes the files of :func:`texts` into the folder. Returns the path of index.html."""
    return _write(folder, texts(folder))


def _write(folder: Path, made: Mapping[str, str]) -> Path:
    for name, text in made.items():
        (folder / name).write_text(text)
    return folder / INDEX


def texts(folder: Path) -> dict[str, str]:
    """Returns the text of a folder's page and tables, by file name.

    The files are index.html, report.md (its first part), and a .md file for each report. They are made from the
    folder's JSON files and from notes.md, if there is one.

    Raises:
        FileNotFoundError: the folder holds no report.
        ValueError: a report cannot be read.
    """
    reports = read_all(folder)
    first = summary(reports)
    documents = {stored.report.name: stored.report.document(stored.machine, stored.command) for stored in reports}
    notes = {"notes": [(folder / NOTES).read_text()]} if (folder / NOTES).exists() else {}
    above = [first, *(stored.report.overview() for stored in reports), *_others(folder)]
    made = page(title_of(reports), {"report": above, **documents, **notes})
    return {INDEX: made, SUMMARY: first} | {f"{name}.md": markdown_of(parts) for name, parts in documents.items()}


def _others(folder: Path) -> list[str]:
    """Returns a sentence that links to the files that are not of a report, if there are any."""
    made = {INDEX, SUMMARY, NOTES} | {f"{topic.name}{suffix}" for topic in topics() for suffix in (".json", ".md")}
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in made)
    return [f"Also in this folder: {', '.join(f'[{name}]({name})' for name in names)}."] if names else []


def sweep_of(reports: Sequence[StoredReport]) -> Report | None:
    """Returns the report of the all-reduce sweep; None if there is none, or it is empty."""
    return next((stored.report for stored in reports if stored.report.name == "allreduce" and stored.report.rows), None)


def is_on_gpus(reports: Sequence[StoredReport]) -> bool:
    return any(stored.machine["gpu_count"] >= 2 for stored in reports)


def title_of(reports: Sequence[StoredReport]) -> str:
    machine = reports[0].machine
    where = f"{machine['gpu_count']}x {machine['gpu']}" if machine["gpu"] else f"CPU ({machine['cpu']})"
    return f"graphar on {where}"


def glance(stored: StoredReport) -> tuple[str, str, str]:
    """Returns a report's headline figure, caption and shortfall.

    With wrong results the figure is "wrong". The caption says so if the report is partial.
    """
    if stored.report.wrong():
        return "wrong", stored.report.status().replace("**", ""), ""
    at_a_glance = stored.report.glance()
    words = at_a_glance.words
    if stored.report.is_partial:
        words += " (partial: the run was ended before it was done)"
    if peers := stored.report.wrong_peers():
        words += f" (wrong results of peers, which are not compared: {len(peers)})"
    return at_a_glance.headline, words, at_a_glance.shortfall


def missing(reports: Sequence[StoredReport]) -> list[str]:
    """Returns what was not measured: topics without a report, with their commands, and what this machine cannot run."""
    measured, sweep = {stored.report.name for stored in reports}, sweep_of(reports)
    lines = [f"{topic.title}: `python -m perf {topic.command}`" for topic in topics() if topic.name not in measured]
    if not is_on_gpus(reports):
        kernels = "The kernels of collectives" if reports[0].machine["gpu_count"] else "graphar's kernels"
        lines.append(f"{kernels}, and NVLink traffic: at least 2 GPUs are needed.")
    elif sweep and not any("multimem" in str(row.algorithm) for row in sweep.rows):
        lines.append("The multimem algorithms: NVLink multicast is off unless the user turns it on.")
    return lines


def summary(reports: Sequence[StoredReport]) -> str:
    """Returns report.md: the text of the page's first screen, and links to the rest."""
    sweep, where = sweep_of(reports), ON_ONE_GPU if reports[0].machine["gpu_count"] else ON_CPU
    what = WHAT if is_on_gpus(reports) else f"{WHAT} {where}"
    parts = [f"# {title_of(reports)}", f"{one_line(reports[0].machine)}.", what]
    if sweep:
        parts += [f"## {sweep.title}", sweep.status(), bullets(sweep.findings())]
    lines = []
    for stored in reports:
        figure, words, shortfall = glance(stored)
        loss = stored.report.loss_of_auto() or NOT_SERVED
        link = f"[{stored.report.title}]({stored.report.name}.md)"
        lines.append([link, figure or NOT_SERVED, words, shortfall, loss])
    header = ["report", "result", "meaning", "where graphar is slower", "largest of_best_variant"]
    parts += ["## All reports", table(header, lines)]
    parts += ["`python -m perf report FOLDER --write` writes a page with the plots."]
    if not_measured := missing(reports):
        parts += ["## Not measured", bullets(not_measured)]
    return markdown_of(parts)


def folders_of(reports: Path) -> list[Path]:
    return sorted({path.parent for topic in topics() for path in reports.glob(f"*/{topic.name}.json")})


def write_index(reports: Path) -> Path:
    """Writes the files of :func:`index_texts` beside the folders. Returns the path of index.html."""
    return _write(reports, index_texts(reports))


def index_texts(reports: Path) -> dict[str, str]:
    """Returns the index of all report folders, with a table of topics by machine: as a page, and as README.md.

    Machines with GPUs come first.

    Raises:
        FileNotFoundError: there is no folder with a report.
    """
    folders = folders_of(reports)
    if not folders:
        raise FileNotFoundError(f"{reports} holds no folder of reports")
    read = {folder.name: read_all(folder) for folder in folders}
    by_folder = dict(sorted(read.items(), key=lambda item: not any(stored.machine["gpu_count"] for stored in item[1])))
    listed = []
    for name, mine in by_folder.items():
        dates = sorted({str(stored.machine["date"]) for stored in mine})
        span = " to ".join(dict.fromkeys([dates[0], dates[-1]]))
        listed.append(f"[{title_of(mine)}]({name}/{SUMMARY}): {len(mine)} reports, {span}")
    note = (
        "A number without a unit is graphar's time / the time that the report compares it with, usually the best"
        " peer's. Below 1 graphar is faster. Other results are explained in the reports."
    )
    cells = {"topic": lambda topic: topic.title}
    cells |= {f"[{name}]({name}/{SUMMARY})": partial(_index_cell, name, mine) for name, mine in by_folder.items()}
    by_machine = columns(topics(), cells)
    title = "Reports of graphar"
    text = markdown_of([f"# {title}", WHAT, bullets(listed), note, by_machine])
    return {INDEX: page(title, {"reports": [text]}), README: text}


def _index_cell(folder: str, reports: Sequence[StoredReport], topic: type[Report]) -> str:
    stored = next((stored for stored in reports if stored.report.name == topic.name), None)
    if stored is None:
        return NOT_SERVED
    figure = glance(stored)[0]
    marks = (" **WRONG**" if figure == "wrong" else "") + (" (partial)" if stored.report.is_partial else "")
    return f"[{figure or 'report'}]({folder}/{topic.name}.md){marks}"
