"""`python -m graphar trace`: joins the traces of a host's processes, and prints which ranks waited for which."""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from graphar.cli.options import add_command, fail
from graphar.plan.sizes import format_nbytes
from graphar.runtime.watch import profiler


@dataclass(frozen=True)
class Waited:
    """The calls of one collective with tensors of one size; only calls with the slices of all ranks count."""

    name: str  # the op
    nbytes: int  # the size of one rank's tensor, in bytes
    calls: int  # the number of calls
    time_us: float  # the median time of a call on a rank, in microseconds, with its wait
    waited_us: float  # the mean time that a rank waited for the last rank to begin, in microseconds
    longest_us: float  # the longest such wait, in microseconds
    last: dict[int, int]  # for each rank, how often it was the last to begin


def add(commands) -> None:
    command = add_command(
        commands,
        "trace",
        run,
        summary="join the traces of several processes, and say who waited for whom",
        description="Joins what graphar.profile wrote in the processes of one host, adds how long each rank waited for"
        " the last one, and says who was late. Exit status 1: ranks that take part in a call have no file; the waits of"
        " such calls are not known.",
        quiet="print nothing but errors",
    )
    named = "trace of one process, such as trace.json or trace.rank1.json"
    command.add_argument("files", type=Path, nargs="+", metavar="FILE", help=named)
    written = "where to write the joined trace, which Perfetto opens"
    command.add_argument("--out", type=Path, metavar="FILE", help=written)


def run(options: argparse.Namespace) -> int:
    slices = profiler.join(options.files, options.out)
    collectives, missing = summarise(slices), missing_ranks(slices)
    if options.json:
        document = {"path": str(options.out) if options.out else None, "collectives": list(map(asdict, collectives))}
        print(json.dumps(document | {"missing_ranks": missing}, indent=1))
    elif not options.quiet:
        print(f"{'collective':<14} {'size':>8} {'calls':>6} {'time (us)':>10} {'waited (us)':>12} {'longest':>9}  last")
        for waited in collectives:
            last = ", ".join(f"rank {rank}: {count}" for rank, count in waited.last.items())
            times = f"{waited.time_us:>10.1f} {waited.waited_us:>12.1f} {waited.longest_us:>9.1f}"
            print(f"{waited.name:<14} {format_nbytes(waited.nbytes):>8} {waited.calls:>6} {times}  {last}")
        print(f"wrote {options.out}" if options.out else "--out FILE writes the joined trace, which Perfetto opens")
    if missing:
        ranks = f"rank(s) {', '.join(map(str, missing))}"
        return fail(f"trace: the files hold nothing of {ranks}, which took part in calls; name their files, too")
    return 0


def missing_ranks(slices: Sequence[dict]) -> list[int]:
    """Returns the ranks that take part in a call and have no slice, in order."""
    taking_part = {rank for of_call in slices for rank in of_call["args"].get("ranks", ())}
    return sorted(taking_part - {of_call["pid"] for of_call in slices})


def summarise(slices: Sequence[dict]) -> list[Waited]:
    """Returns the waits of each collective and size, in the order of the trace."""
    groups: dict[tuple[str, int], list[dict]] = {}
    for of_call in slices:
        if "waited_us" in of_call["args"]:
            groups.setdefault((of_call["name"], of_call["args"]["nbytes"]), []).append(of_call)
    collectives = []
    for (name, nbytes), of_group in groups.items():
        arguments = [of_call["args"] for of_call in of_group]
        waits = [args["waited_us"] for args in arguments]
        last: dict[tuple, int | None] = {}  # by call; None if nobody waited
        for args in arguments:
            call = tuple(args["ranks"]), args["call"]
            last[call] = args.get("for_rank", last.get(call))
        by_rank = dict(sorted(Counter(rank for rank in last.values() if rank is not None).items()))
        time_us = statistics.median(of_call["dur"] for of_call in of_group)
        collectives.append(Waited(name, nbytes, len(last), time_us, statistics.fmean(waits), max(waits), by_rank))
    return collectives
