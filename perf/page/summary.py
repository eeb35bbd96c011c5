"""A folder's first screen as Markdown, for where pages are not rendered."""

from __future__ import annotations

from collections.abc import Mapping

from perf.machine import one_line
from perf.page import front
from perf.page.topics import Topic
from perf.report import bullets
from perf.tables import table


def markdown(title: str, machine: dict[str, object], contents: Mapping[Topic, dict]) -> str:
    """report.md: what the page's first screen says, and where the rest is."""
    found, on_gpus = front.sweep_of(contents), front.is_on_gpus(contents)
    parts = [f"# {title}", one_line(machine) + ".", front.what_was_measured(found, on_gpus)]
    if found.rows:
        parts += [bullets([f"**{figure}** {words}" for figure, words in front.numbers(found)])]
        parts += ["## What falls short", bullets(front.shortfalls(found) or [front.NOTHING_SHORT])]
    lines = [
        [f"[{topic.title}]({topic.name}.md)", f"**{figure}** {words}".removeprefix("**** "), shortfall]
        for topic, figure, words, shortfall in front.glances(contents)
    ]
    parts += ["## At a glance", table(["report", "graphar", "where it was slower"], lines)]
    parts += ["`index.html` beside this file has the plots; it opens from disk."]
    if not_measured := front.not_run(found, on_gpus) + front.missing(contents):
        parts += ["## Not measured", bullets(not_measured)]
    return "\n\n".join(parts) + "\n"
