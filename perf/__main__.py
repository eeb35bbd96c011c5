"""Runs the benchmarks and writes reports: one topic, or without a command all topics that this machine can run."""

from __future__ import annotations

import argparse
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from graphar.cli.options import INTERRUPTED
from perf import commands as pages
from perf import machine
from perf import pages as build
from perf.compare import compare, times_of
from perf.report import Report, Timing, read, topics

PAGES = {"report": pages.run, "index": pages.run_index}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a result is wrong or slower than in the compared run, 130 after Ctrl-C."""
    try:
        return run_command(argv)
    except KeyboardInterrupt:
        print(
            "perf: interrupted. The report in progress has the rows measured so far, and says that it is partial.",
            file=sys.stderr,
        )
        return INTERRUPTED


def run_command(argv: Sequence[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    if options.command in PAGES:
        return PAGES[options.command](options)
    block = machine.describe()
    folder = folder_of(options, block)
    try:
        return run_all(options, block, folder) if options.command is None else run_one(argv, block, folder)
    finally:
        if any(folder.glob("*.json")):
            make_pages(folder)


def folder_of(options: argparse.Namespace, block: dict[str, object]) -> Path:
    """Makes and returns the folder for the reports. Ends the program if it cannot be written."""
    try:
        return machine.folder(options.out or machine.LOCAL, block)
    except OSError as error:
        sys.exit(f"--out: {error}")


def run_one(argv: Sequence[str], block: dict[str, object], folder: Path) -> int:
    """Measures one topic. Returns the exit status."""
    options = parse(argv)
    if options.quick:
        argv = quick(argv, block["gpu_count"])
        options = parse(argv)
    topic = topic_of(options.command)
    before = earlier(options, topic, block)
    status = topic().run(options, folder, block, reproduce(argv))
    return max(status, tell_regressions(before, folder, topic))


def topic_of(command: str) -> type[Report]:
    return next(topic for topic in topics() if topic.command == command)


def earlier(options: argparse.Namespace, topic: type[Report], block: dict[str, object]) -> list[Timing] | None:
    """Reads the times to compare with, before the run overwrites them. Returns None without --compare."""
    if options.compare is None:
        return None
    try:
        return times_of(options.compare, topic, block)
    except (OSError, ValueError) as error:
        sys.exit(f"--compare: {error}")


def tell_regressions(before: list[Timing] | None, folder: Path, topic: type[Report]) -> int:
    """Prints regressions. Returns the exit status: 1 if there are any, or if no times could be compared."""
    if before is None:
        return 0
    comparison = compare(before, read(folder, topic).report.timed())
    print(f"\n{comparison}")
    return int(bool(comparison.regressions) or not comparison.compared)


def make_pages(folder: Path) -> int:
    """Writes the folder's page, and the page of all folders beside it."""
    return pages.made(lambda: f"{build.write(folder)}\nindex: {build.write_index(folder.parent)}")


def run_all(options: argparse.Namespace, block: dict[str, object], folder: Path) -> int:
    """Runs all topics one after another. If one fails, the others still run.

    This takes less than 10 minutes on 4 GPUs and less than 3 minutes on a CPU with two cores. --quick takes less.
    """
    status = 0
    for name, arguments in parts(block["gpu_count"], options.quick).items():
        print(f"\n## {' '.join([name, *arguments])}", flush=True)
        try:
            status = max(status, run_one([name, *arguments], block, folder))
        except SystemExit as ended:
            if not isinstance(ended.code, str):
                raise
            print(f"# not measured: {name}: {ended}", file=sys.stderr, flush=True)  # the topic needs a missing package
        except Exception:
            traceback.print_exc()
            status = 1
    print()
    return max(status, pages.run(argparse.Namespace(folder=folder, compare=None, json=False, write=False)))


def parts(gpu_count: int, is_quick: bool) -> dict[str, list[str]]:
    """Returns the arguments of each command, in the order in which they run."""
    on_gpus = gpu_count >= 2
    included = [topic for topic in topics() if not topic.arguments.is_left_out(on_gpus)]
    return {topic.command: topic.arguments.of(on_gpus, is_quick) for topic in included}


def quick(argv: Sequence[str], gpu_count: int) -> list[str]:
    """Returns the command line of one topic with its quick arguments. Arguments in ``argv`` override them."""
    known = {topic.command: topic for topic in topics()}
    at = next(at for at, word in enumerate(argv) if word in known)
    before, after = ([word for word in words if word != "--quick"] for words in (argv[:at], argv[at + 1 :]))
    return [*before, argv[at], *known[argv[at]].arguments.of(gpu_count >= 2, True), *after]


def reproduce(argv: Sequence[str]) -> str:
    """Returns the command line without --out and --compare."""
    left_out = ("--out", "--compare")
    skipped = {at for at, word in enumerate(argv) if word in left_out or (at > 0 and argv[at - 1] in left_out)}
    return shlex.join(["python", "-m", "perf", *(word for at, word in enumerate(argv) if at not in skipped)])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    measuring, compared = [parser], []
    for topic in topics():
        command = commands.add_parser(topic.command, help=topic.help, description=topic.help)
        topic.add_options(command)
        measuring.append(command)
        if topic.has_spread:
            compared.append(command)
    pages.add(commands)
    for command in measuring:
        add(command, "--out", f"folder for reports (default: {machine.LOCAL})", type=Path, metavar="FOLDER")
        add(command, "--quick", "measure only a few sizes", action="store_true")
    for command in (*compared, commands.choices["report"]):
        earlier_help = "fail if graphar is slower than in this earlier report"
        add(command, "--compare", earlier_help, type=Path, metavar="FOLDER")
    parser.set_defaults(out=None, quick=False, compare=None)
    return parser.parse_args(argv)


def add(parser: argparse.ArgumentParser, name: str, what: str, **kind) -> None:
    """Adds an option that can be given before or after the command.

    The option has no default here. A default of the command's parser would override a value before the command.
    """
    parser.add_argument(name, default=argparse.SUPPRESS, help=what, **kind)


if __name__ == "__main__":
    sys.exit(main())
