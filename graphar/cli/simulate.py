"""`python -m graphar simulate`: runs an algorithm's kernels on the CPU, under sanitizers, and says what is wrong."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

from graphar.cli.options import DTYPES, add_command, count, load, one_of, progress, python_file, several, world_size
from graphar.plan.algorithms import NAMED, is_from_outside
from graphar.plan.scratch import MAX_RANKS, WORLD_SIZES
from graphar.simulator import ALGORITHMS, SANITIZERS, Report
from graphar.simulator import run as simulate
from graphar.simulator.check import NUMELS


def add(commands) -> None:
    command = add_command(
        commands,
        "simulate",
        run,
        summary="run an algorithm's kernels on the CPU, and look for wrong results, races and hangs; needs no GPU",
        description="Compiles the kernels of an algorithm with g++ 12 or newer, and runs them on the CPU. A seeded"
        " scheduler picks the thread that goes on, and sanitizers look for races and accesses out of bounds. Every"
        " result must have the bits of the specification.",
        quiet="show no progress",
    )
    named = "a Python file, which is run and calls graphar.load_algorithm: all algorithms that it loads; or one of "
    command.add_argument("subject", type=_subject, metavar="FILE.py|ALGORITHM", help=named + ", ".join(ALGORITHMS))
    listed = f"numbers of ranks, such as 2,4 or 2-{MAX_RANKS} (default: 2-{MAX_RANKS})"
    command.add_argument("--ranks", type=_world_sizes, default=list(WORLD_SIZES), metavar="N[,N|-N]", help=listed)
    sanitizers = f"some of {','.join(SANITIZERS)} (default: all): plain runs use none, thread is ThreadSanitizer, and"
    sanitizers += " address is AddressSanitizer and UBSan"
    some_of = several(one_of(SANITIZERS))
    command.add_argument("--sanitizers", type=some_of, default=list(SANITIZERS), metavar="NAMES", help=sanitizers)
    command.add_argument("--seeds", type=count, default=3, metavar="N", help="seeds of each case (default: 3)")
    command.add_argument("--seed", type=int, metavar="SEED", help="this seed alone, which repeats a failure")
    sizes = f"elements of a tensor, or of the largest part (default: {','.join(map(str, NUMELS))})"
    command.add_argument("--numel", type=several(count), default=list(NUMELS), metavar="N,N", help=sizes)
    dtypes = f"some of {','.join(DTYPES)}, or short forms such as bf16 (default: bfloat16,float32)"
    default = ["bfloat16", "float32"]
    command.add_argument("--dtypes", type=several(one_of(DTYPES)), default=default, metavar="NAMES", help=dtypes)


def run(options: argparse.Namespace) -> int:
    algorithms, reports = _algorithms(options.subject), []
    total = len(algorithms) * len(options.ranks) * len(options.dtypes) * len(options.sanitizers)
    with progress("cases", total, options.quiet) as advance:
        for algorithm in algorithms:
            report = simulate(
                algorithm,
                ranks=options.ranks,
                dtypes=[DTYPES[name] for name in options.dtypes],
                numel=options.numel,
                sanitizers=options.sanitizers,
                seeds=options.seeds if options.seed is None else [options.seed],
                progress=advance,
            )
            reports.append(report)
    if options.json:
        documents = [_as_json(report) for report in reports]
        print(json.dumps(documents[0] if len(documents) == 1 else documents, indent=1))
    else:
        print("\n\n".join(text for report in reports for text in _texts(report, options.subject, options.numel)))
    return 0 if all(report.ok for report in reports) else 1


def _algorithms(subject: str) -> list[str]:
    """Returns the algorithms that a Python file loads; or the one that is named."""
    if not subject.endswith(".py"):
        return [subject]
    before = set(_loaded())
    load([subject])
    loaded = [name for name in _loaded() if name not in before]
    if not loaded:
        raise ValueError(f"{subject} was run, and loads no algorithm: it has no call of graphar.load_algorithm")
    return loaded


def _loaded() -> list[str]:
    return [algorithm.value for named in NAMED.values() for algorithm in named.values() if is_from_outside(algorithm)]


def _texts(report: Report, subject: str, numels: list[int]) -> Iterator[str]:
    """Yields each failure with the command that repeats it, and the summary."""
    for failure in report.failures:
        case, dtype = failure.case, str(failure.case.dtype).removeprefix("torch.")
        how = f"--ranks {case.world_size} --dtypes {dtype} --sanitizers {case.sanitizer} --seed {failure.seed}"
        command = f"python -m graphar simulate {subject} {how} --numel {','.join(map(str, numels))}"
        yield f"{failure}\n\nto repeat it: {command}"
    yield report.summary


def _as_json(report: Report) -> dict[str, Any]:
    failures = []
    for failure in report.failures:
        case, dtype = failure.case, str(failure.case.dtype).removeprefix("torch.")
        told = {"world_size": case.world_size, "dtype": dtype, "sanitizer": case.sanitizer} | vars(failure)
        failures.append({name: field for name, field in told.items() if name != "case"})
    counts = {"passed": len(report.passed), "skipped": report.skipped, "time_s": report.time_s}
    return {"algorithm": report.algorithm.value, **counts, "failures": failures}


def _subject(text: str) -> str:
    if text.endswith(".py"):
        return python_file(text)
    if text not in ALGORITHMS:
        raise argparse.ArgumentTypeError(f"{text!r} is no Python file, and none of {', '.join(ALGORITHMS)}")
    return text


def _world_sizes(text: str) -> list[int]:
    """Returns numbers of ranks: "2", "2,4" or "2-8"; an argparse type."""
    first, dash, last = text.partition("-")
    return list(range(world_size(first), world_size(last) + 1)) if dash else several(world_size)(text)
