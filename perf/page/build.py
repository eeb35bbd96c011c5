"""Makes the page of a folder, and its summary in Markdown."""

from __future__ import annotations

from html import escape
from pathlib import Path

from perf import files
from perf.machine import one_line
from perf.page import bands, bars, dots, front, heat, summary
from perf.page.bands import Bands
from perf.page.bars import Bars
from perf.page.dots import Dots
from perf.page.heat import HeatMap
from perf.page.markdown import inline, render, render_list, sections
from perf.page.plot import Plot
from perf.page.svg import render as draw
from perf.page.topics import TOPICS, Figure, Topic

STYLE = Path(__file__).with_name("style.css")
NOTES, SUMMARY = "notes.md", "report.md"
MADE = (
    "index.html",
    NOTES,
    SUMMARY,
    *(f"{topic.name}{suffix}" for topic in TOPICS for suffix in (".json", ".md", ".svg")),
)
AT_ANOTHER_TIME = {"commit": None, "date": None}
MOST_LISTED = 6  # lines of a list above a section's first table

RENDER = {Plot: draw, HeatMap: heat.render, Bars: bars.render, Bands: bands.render, Dots: dots.render}

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def write(folder: Path) -> Path:
    """Writes index.html, and report.md, which is its first screen, from the folder's JSON files, and notes.md, if
    somebody has written that. Returns the former's path.

    Raises:
        FileNotFoundError: the folder holds no report.
        ValueError: a report there is none, or of another version of the schema.
    """
    contents = {topic: files.read(folder, topic.name) for topic in TOPICS if (folder / f"{topic.name}.json").exists()}
    if not contents:
        raise FileNotFoundError(f"{folder} holds no report of python -m perf")
    machine = next(iter(contents.values()))["machine"]
    title = f"graphar on {machine['gpu_count']}x {machine['gpu']}" if machine["gpu"] else f"graphar on {machine['cpu']}"
    body = [f"<header><h1>{escape(title)}</h1>", f'<p class="dim">{escape(one_line(machine))}</p>']
    body += _first_screen(contents, (folder / NOTES).exists())
    body += [_section(topic, content, machine) for topic, content in contents.items()]
    body += [_notes(folder), _others(folder)]
    (folder / SUMMARY).write_text(summary.markdown(title, machine, contents))
    path = folder / "index.html"
    path.write_text(PAGE.format(title=escape(title), style=STYLE.read_text(), body="\n".join(body)))
    return path


def _first_screen(contents: dict[Topic, dict], has_notes: bool) -> list[str]:
    found = front.sweep_of(contents)
    on_gpus = front.is_on_gpus(contents)
    head = f"<p>{inline(front.what_was_measured(found, on_gpus))}</p></header>"
    overview = front.overview(contents, [("notes", "Notes")] if has_notes else [])
    not_measured = front.not_run(found, on_gpus) + front.missing(contents)
    folded = _folded("Not measured", render_list("", not_measured)) if not_measured else ""
    return [head, front.answer(found) if found.rows else "", overview, folded]


def _section(topic: Topic, content: dict, machine: dict) -> str:
    """The first table open, the others folded. Says nothing of the machine where that is the page's."""
    plots = topic.figures(content)
    (_, head), *parts = sections(topic.markdown(content))
    folds = []
    first = topic.leads(content)
    for at, (heading, text) in enumerate(sorted(parts, key=lambda part: part[0].strip() != first)):
        folds.append(_folded(heading, _plots(plots.get(heading, [])) + render(text), is_open=at == 0))
    head = head.replace(f"{one_line(content['machine'])}.", _other_machine(content["machine"], machine))
    short, long = _without_long_lists(head)
    top = _plots(plots.get("", [])) + render(short)
    if long:
        folds.insert(0, _folded("In words", render(long)))
    return f'<section id="{topic.name}"><h2>{escape(topic.title)}</h2>\n{top}\n{"".join(folds)}</section>'


def _other_machine(machine: dict, of_page: dict) -> str:
    """What is not as the page says; of a machine that is the same, the commit and the date."""
    if machine == of_page:
        return ""
    if machine | AT_ANOTHER_TIME == of_page | AT_ANOTHER_TIME:
        return f"Measured at commit {machine['commit'] or 'unknown'}, {machine['date']}."
    return f"{one_line(machine)}."


def _without_long_lists(markdown: str) -> tuple[str, str]:
    """The text without its lists of more than a few lines, and those."""
    blocks = markdown.strip().split("\n\n")
    is_long = [block.startswith("- ") and block.count("\n- ") >= MOST_LISTED for block in blocks]
    return tuple(
        "\n\n".join(b for b, its in zip(blocks, is_long, strict=True) if its == want) for want in (False, True)
    )


def _folded(title: str, inside: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{inline(title)}</summary>\n{inside}\n</details>"


def _plots(plots: list[Figure]) -> str:
    drawn = "".join(RENDER[type(plot)](plot) for plot in plots)
    return f'<div class="plots">{drawn}</div>' if plots else ""


def _notes(folder: Path) -> str:
    """What somebody has written of these reports."""
    path = folder / NOTES
    return f'<section id="notes"><h2>Notes</h2>\n{render(path.read_text())}</section>' if path.exists() else ""


def _others(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in MADE)
    links = ", ".join(f'<a href="{escape(name)}">{escape(name)}</a>' for name in names)
    return f'<p class="dim">Also in this folder: {links}.</p>' if links else ""
