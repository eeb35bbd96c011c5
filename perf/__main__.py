"""python -m perf [command]: without one, all that this machine can measure, in minutes; and a page of it all."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from graphar.cli.options import size
from perf import (
    compile_report,
    everything,
    files,
    live,
    lossless,
    machine,
    norms,
    nvlink_report,
    prefetch,
    regressions,
    report,
    sweep,
)
from perf.cases import (
    BACKEND_WORLD_SIZES,
    CPU_MAX_NBYTES,
    GLOO_MAX_NBYTES,
    ITEMSIZES,
    PLAIN_METHODS,
    SIZES,
    BackendPlan,
    Plan,
)
from perf.catalogue import ALGORITHM_METHODS, CPU_METHODS, CUDA_METHODS, LIST_METHODS
from perf.fused import command as fused
from perf.machine import check_world_sizes
from perf.model import command as model
from perf.page import build as page
from perf.page import command as reports
from perf.quantized import command as quantized
from perf.throughput import command as throughput
from perf.training import command as training

CPU_WORLD_SIZES = (2, 4)
COMMANDS = {
    "nvlink": nvlink_report,
    "fused": fused,
    "quantized": quantized,
    "lossless": lossless,
    "norms": norms,
    "model": model,
    "prefetch": prefetch,
    "train": training,
    "throughput": throughput,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a result was wrong, or slower than what it is compared with."""
    argv = sys.argv[1:] if argv is None else list(argv)
    options = parse(argv)
    if options.command == "report":
        return reports.run(options)
    block = machine.describe()
    folder = machine.folder(options.out, block)
    if options.command is None:
        return everything.run(options, block, folder, main)
    if options.quick:
        argv = quick(argv, block["gpu_count"])
        options = parse(argv)
    before = earlier(options, block)
    try:
        status = run(options, folder, block, reproduce(argv))
        return max(status, compare(before, folder))
    finally:
        if any(folder.glob("*.json")):
            make_page(folder)


def run(options: argparse.Namespace, folder: Path, block: dict[str, object], command: str) -> int:
    """Measures, and writes the reports. Returns the exit status."""
    status = 0
    if options.command == "allreduce":
        status = run_allreduce(plans(options, block["gpu_count"]), folder, block, command)
    if options.command == "compile":
        run_compile(folder, block, options.every, command)
    if options.command in COMMANDS:
        status = COMMANDS[options.command].run(options, folder, block, command)
    return status


def earlier(options: argparse.Namespace, block: dict[str, object]) -> dict[str, list[dict]]:
    """The rows to compare with, by topic, before anything writes over them; nothing where none is asked for."""
    if options.compare is None:
        return {}
    topic = options.command
    if topic not in regressions.TOPICS:
        sys.exit(f"--compare: {topic} has no times to compare; {', '.join(regressions.TOPICS)} have")
    try:
        return {topic: regressions.read(options.compare, topic, block)}
    except (OSError, ValueError) as error:
        sys.exit(f"--compare: {error}")


def compare(before: dict[str, list[dict]], folder: Path) -> int:
    """Says what has become slower. Returns the exit status: 1 where something has, or nothing could be compared."""
    status = 0
    for topic, rows in before.items():
        found = regressions.compare(rows, files.read(folder, topic)[regressions.TOPICS[topic]])
        print(f"\n{found}")
        status = int(bool(found.regressions) or not found.compared)
    return status


def make_page(folder: Path) -> int:
    try:
        print(f"page: {page.write(folder)}")
    except (OSError, ValueError) as error:
        print(f"no page: {error}", file=sys.stderr)
        return 1
    return 0


def quick(argv: Sequence[str], gpu_count: int) -> list[str]:
    """The command line of one part with its quick arguments, which any that are given override."""
    known = everything.parts(gpu_count, quick=True) | {name: words.split() for name, words in everything.ALONE.items()}
    command = next(word for word in argv if word in known)
    at = argv.index(command)
    before, after = ([word for word in words if word != "--quick"] for words in (argv[:at], argv[at + 1 :]))
    return [*before, command, *known[command], *after]


def reproduce(argv: Sequence[str]) -> str:
    """The command line, less where the report went and what it was compared with."""
    elsewhere = ("--out", "--compare")
    places = {at for at, word in enumerate(argv) if word in elsewhere or (at > 0 and argv[at - 1] in elsewhere)}
    return shlex.join(["python", "-m", "perf", *(word for at, word in enumerate(argv) if at not in places)])


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perf", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    allreduce = commands.add_parser("allreduce", help="time all-reduce beside its peers")
    allreduce.add_argument(
        "--world-size", type=int, nargs="+", metavar="N", help="numbers of ranks (default: all GPUs)"
    )
    allreduce.add_argument(
        "--dtypes",
        nargs="+",
        choices=list(ITEMSIZES),
        help="element types: the first in full, the others beside it (default: bfloat16, and on GPUs all)",
    )
    allreduce.add_argument("--max-nbytes", type=size, metavar="SIZE", help="largest size, such as 64M")
    known = dict.fromkeys(CUDA_METHODS + CPU_METHODS + ALGORITHM_METHODS)
    allreduce.add_argument("--methods", nargs="+", choices=list(known), help="default: all but graphar:ALGORITHM")
    compiling = commands.add_parser("compile", help="compile every kernel and say what it took")
    compiling.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth (default: 1)")
    others = [module.add(commands) for module in COMMANDS.values()]
    reports.add(commands)
    measuring = (parser, allreduce, compiling, *others)
    compared = (parser, *(commands.choices[name] for name in (*regressions.TOPICS, "report")))
    for one in measuring:
        add(one, "--out", "where reports go (default: reports)", type=Path, metavar="FOLDER")
        add(one, "--quick", "a few sizes of each part", action="store_true")
    for one in compared:
        earlier_help = "fail where graphar is slower than in this earlier report"
        add(one, "--compare", earlier_help, type=Path, metavar="FOLDER")
    parser.set_defaults(out=Path("reports"), quick=False, compare=None)
    return parser.parse_args(argv)


def add(parser: argparse.ArgumentParser, name: str, what: str, **kind) -> None:
    """An option that may stand before the command and after it: a default after it would win over a value before."""
    parser.add_argument(name, default=argparse.SUPPRESS, help=what, **kind)


def plans(options: argparse.Namespace, gpu_count: int) -> list[Plan]:
    """One plan a world. On GPUs one process a rank; on the CPU both forms."""
    on_gpus = gpu_count >= 2
    world_sizes = options.world_size or ([gpu_count] if on_gpus else CPU_WORLD_SIZES)
    default = CUDA_METHODS if on_gpus else CPU_METHODS
    known = default + ALGORITHM_METHODS if on_gpus else default
    methods = tuple(options.methods or default)
    dtypes = tuple(dict.fromkeys(options.dtypes or (ITEMSIZES if on_gpus else ["bfloat16"])))
    max_nbytes = options.max_nbytes or (SIZES[-1] if on_gpus else CPU_MAX_NBYTES)
    device, forms = ("cuda", ("process",)) if on_gpus else ("cpu", ("process", "list"))
    if unknown := [name for name in methods if name not in known]:
        sys.exit(f"{', '.join(unknown)}: not on this machine, which has {', '.join(known)}")
    check_world_sizes(world_sizes, gpu_count)
    beside = []
    if not options.world_size:
        gloo_max_nbytes = options.max_nbytes or GLOO_MAX_NBYTES  # as far as it is asked to go
        limits = {"gloo": gloo_max_nbytes, device: max_nbytes}
        beside = backend_plans(device, world_sizes, gpu_count, methods, dtypes[0], limits)
    return [
        Plan(device, world_size, form, dtypes, served, max_nbytes, full=world_size == max(world_sizes))
        for form in forms
        if (served := tuple(name for name in methods if form == "process" or name in LIST_METHODS))
        for world_size in world_sizes
    ] + beside


def backend_plans(
    device: str, swept: Sequence[int], gpu_count: int, methods: Sequence[str], dtype: str, limits: dict[str, int]
) -> list[BackendPlan]:
    """What the table of backends needs besides the worlds that are swept: narrower ones, and gloo where GPUs are.

    Args:
        limits: the largest size of the device, and of gloo beside GPUs.
    """
    plans = []
    for world_size in BACKEND_WORLD_SIZES:
        if world_size > (gpu_count or world_size):
            continue
        served = tuple(name for name in methods if name in PLAIN_METHODS)
        if served and world_size not in swept:
            plans.append(BackendPlan(device, world_size, "process", (dtype,), served, limits[device]))
        if "nccl" in served:
            plans.append(BackendPlan("cpu", world_size, "process", (dtype,), ("gloo",), limits["gloo"]))
    return plans


def run_allreduce(todo: Sequence[Plan], folder: Path, block: dict[str, object], command: str) -> int:
    """Works through the plans. What was measured is written even where a later size fails."""
    found = report.Findings()
    print(f"# {machine.one_line(block)}\n{live.HEADER}", flush=True)
    total = sum(plan.row_count() for plan in todo)

    def write() -> tuple[Path, str]:
        return report.write(folder, block, found, command), report.summary(found.rows)

    with live.reported("all-reduce", total, found.skipped, write) as advance:
        for message in (message for plan in todo for message in sweep.run(plan)):
            advance()
            live.take(message, found)
    return int(any(row.wrong for row in found.rows))


def run_compile(folder: Path, block: dict[str, object], every: int, command: str) -> None:
    begin = time.perf_counter()
    compiled = []
    with live.make_progress() as progress:
        total = len(compile_report.cases(every))
        for one in progress.track(compile_report.compile_all(every), total=total, description="compile"):
            compiled.append(one)
    wall_s = time.perf_counter() - begin
    path = compile_report.write(folder, block, compiled, wall_s, command)
    print(f"\n{compile_report.verdict(len(compiled), wall_s)}\nreport: {path}")


if __name__ == "__main__":
    sys.exit(main())
