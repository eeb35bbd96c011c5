"""`python -m perf report`: what a folder of reports says, and its page anew."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from perf import files, regressions
from perf.machine import one_line
from perf.page import build
from perf.page.markdown import WRONG
from perf.page.topics import TOPICS


def add(commands) -> argparse.ArgumentParser:
    report = commands.add_parser(
        "report",
        help="say what the reports in a folder say, and make its index.html anew",
        description="Says what the reports in a folder say, and makes its index.html anew from their JSON files. Exit"
        " status 1: a result is wrong, graphar is slower than in the earlier report, or there is none to read.",
    )
    report.add_argument("folder", type=Path, metavar="FOLDER", help="such as reports/2026-11-21-h200x4")
    report.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return report


def run(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        page, found = build.write(options.folder), read(options.folder, options.compare)
    except (OSError, ValueError) as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1)) if options.json else show(found, page)
    slower = any(one["regressions"] or not one["compared"] for one in found["comparisons"])
    return int(slower or any(one["wrong"] for one in found["reports"]))


def read(folder: Path, earlier: Path | None) -> dict[str, object]:
    """What the folder's reports say, and how their times compare with those of an earlier folder, if there is one.

    Raises:
        OSError, ValueError: there is nothing to read or to compare, or the earlier folder is of another machine.
    """
    contents = {topic: files.read(folder, topic.name) for topic in TOPICS if (folder / f"{topic.name}.json").exists()}
    machine = next(iter(contents.values()))["machine"]
    reports = []
    for topic, content in contents.items():
        verdict = topic.verdict(content).replace("**", "")
        wrong = bool(WRONG.search(verdict))
        reports.append({"topic": topic.name, "title": topic.title, "verdict": verdict, "wrong": wrong})
    comparisons = []
    for topic, content in contents.items() if earlier else ():
        if topic.name in regressions.TOPICS and (earlier / f"{topic.name}.json").exists():
            before = regressions.read(earlier, topic.name, content["machine"])
            compared = regressions.compare(before, content[regressions.TOPICS[topic.name]])
            comparisons.append({"topic": topic.name, "summary": str(compared), **asdict(compared)})
    if earlier and not comparisons:
        raise ValueError(f"{earlier} has no report to compare with those in {folder}")
    return {"folder": str(folder), "machine": machine, "reports": reports, "comparisons": comparisons}


def show(found: dict, page: Path) -> None:
    """For people: what is wrong or slower is red."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"# {one_line(found['machine'])}")
    for one in found["reports"]:
        console.print(f"\n{one['title']}", style="bold")
        console.print(one["verdict"], style="red" if one["wrong"] else None)
    for one in found["comparisons"]:
        console.print(f"\n{one['topic']}, compared", style="bold")
        console.print(one["summary"], style="red" if one["regressions"] else None)
    console.print(f"\npage: {page}")
