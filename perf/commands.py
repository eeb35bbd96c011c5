"""`python -m perf report` and `index`: pages and summaries of existing reports."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from perf import pages as build
from perf.compare import compare, times_of
from perf.machine import LOCAL, one_line
from perf.report import read_all


def add(commands) -> None:
    report = commands.add_parser(
        "report",
        help="print the results of the reports in a folder; with --write also rewrite its page and tables",
        description="Prints the results of the reports in a folder. The exit status is 1 if a result of graphar is"
        " wrong, if graphar is slower than in the earlier report, or if the folder has no report.",
    )
    report.add_argument("folder", type=Path, metavar="FOLDER", help="such as reports/h200x4")
    report.add_argument("--write", action="store_true", help="rewrite index.html and all tables from the JSON files")
    report.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    summary = "make the index of all report folders: index.html and README.md"
    index = commands.add_parser("index", help=summary, description=summary)
    index.add_argument("reports", type=Path, nargs="?", default=LOCAL, metavar="REPORTS", help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Runs `report` and returns the exit status."""
    try:
        results = read(options.folder, options.compare)
        page = write(options.folder) if options.write else None
    except (OSError, ValueError) as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1
    print(json.dumps(results, indent=1)) if options.json else show(results, page)
    slower = any(each["regressions"] or not each["compared"] for each in results["comparisons"])
    return int(slower or any(report["wrong"] for report in results["reports"]))


def write(folder: Path) -> Path:
    """Writes the folder's page and tables, and updates its parent's index if there is one. Returns the page's path."""
    page = build.write(folder)
    if (folder.parent / build.README).exists():
        build.write_index(folder.parent)
    return page


def run_index(options: argparse.Namespace) -> int:
    return made(lambda: build.write_index(options.reports))


def made(make: Callable[[], object]) -> int:
    """Calls ``make``, and prints the path of its page or the error. Returns the exit status."""
    try:
        print(f"page: {make()}")
    except (OSError, ValueError) as error:
        print(f"no page: {error}", file=sys.stderr)
        return 1
    return 0


def read(folder: Path, earlier: Path | None) -> dict[str, object]:
    """Returns the results of a folder's reports. With ``earlier`` they are also compared with that folder.

    Raises:
        OSError, ValueError: a folder has no reports or no common times, or the earlier folder is of another machine.
    """
    written = read_all(folder)
    reports, comparisons = [], []
    for stored in written:
        said = stored.report.summary().replace("**", "")
        wrong = {"wrong": bool(stored.report.wrong()), "wrong_peers": bool(stored.report.wrong_peers())}
        reports.append({"topic": stored.report.name, "title": stored.report.title, "verdict": said} | wrong)
        topic = type(stored.report)
        if earlier and topic.has_spread and (earlier / f"{topic.name}.json").exists():
            compared = compare(times_of(earlier, topic, stored.machine), stored.report.timed())
            comparisons.append({"topic": topic.name, "summary": str(compared), **asdict(compared)})
    if earlier and not comparisons:
        raise ValueError(f"{earlier} has no report to compare with those in {folder}")
    return {"folder": str(folder), "machine": written[0].machine, "reports": reports, "comparisons": comparisons}


def show(results: dict, page: Path | None) -> None:
    """Prints the results as text. Wrong results and regressions are red."""
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(f"# {one_line(results['machine'])}")
    for report in results["reports"]:
        console.print(f"\n{report['title']}", style="bold")
        console.print(report["verdict"], style="red" if report["wrong"] or report["wrong_peers"] else None)
    for comparison in results["comparisons"]:
        console.print(f"\n{comparison['topic']}, compared", style="bold")
        console.print(comparison["summary"], style="red" if comparison["regressions"] else None)
    if page:
        console.print(f"\npage: {page}")
