"""python -m graphar: what graphar can do from a shell."""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import graphar
from graphar.cli import bench, explain, report, trace
from graphar.cli.options import EXIT_STATUS, add_command, size
from graphar.cli.progress import progress
from graphar.errors import GrapharError
from graphar.numerics.codecs import NAMES, codec
from graphar.plan import tune
from graphar.plan.tables import FOLDER, Table, find_table, slug
from graphar.runtime import cache
from graphar.runtime.availability import is_available
from graphar.runtime.catalogue import MAX_RANKS


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 where a command could not do its work."""
    parser = argparse.ArgumentParser(
        prog="python -m graphar",
        description="NVLink collectives for PyTorch. Every command has --help, --json and --quiet.",
        epilog=f"{EXIT_STATUS} In a checkout, `nox -s perf` measures graphar beside its peers.",
    )
    parser.add_argument("--version", action="version", version=f"graphar {graphar.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    add_doctor(commands)
    bench.add(commands)
    explain.add(commands)
    add_tune(commands)
    report.add(commands)
    trace.add(commands)
    options = parser.parse_args(argv)
    if "run" not in options:
        parser.print_help()
        return 0
    try:
        return options.run(options)
    except (GrapharError, OSError, ValueError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def fail(reason: str) -> int:
    print(f"graphar: {reason}", file=sys.stderr)
    return 1


# ---- doctor ---------------------------------------------------------------------------------------------------------


def add_doctor(commands) -> None:
    add_command(
        commands,
        "doctor",
        run_doctor,
        summary="what this machine has, what is wrong with it, and what to do",
        description="Examines GPUs, links, versions and settings, and tests every algorithm against the specification.",
        quiet="print problems alone",
    )


def run_doctor(options: argparse.Namespace) -> int:
    from graphar.cli.doctor import command

    return command.run(options.json, options.quiet)


# ---- tune -----------------------------------------------------------------------------------------------------------


def add_tune(commands) -> None:
    tuning = add_command(
        commands,
        "tune",
        run_tune,
        summary="measure which algorithm is the fastest here, and choose by that from now on",
        description="Times every algorithm and grid that can be the fastest between this machine's GPUs, checks their"
        " bits, and keeps the choices in a table that calls go by from then on.",
        quiet="show no progress, and of what was found only where it went",
    )
    tuning.add_argument("--world-size", type=int, nargs="+", metavar="N", help="numbers of GPUs (default: 2 to all)")
    tuning.add_argument("--max-nbytes", type=size, metavar="SIZE", help="largest size, such as 64M (default: 1G)")
    tuning.add_argument(
        "--codecs", nargs="*", choices=NAMES, default=NAMES, metavar="NAME", help="to time as well (default: all)"
    )
    tuning.add_argument("--out", type=Path, metavar="FILE", help="where the table goes (default: the user's cache)")
    tuning.add_argument("--report", metavar="PATH", help="the report that the table is to name")
    tuning.set_defaults(max_nbytes=tune.SIZES[-1])


def run_tune(options: argparse.Namespace) -> int:
    available = is_available()
    if not available:
        return fail(f"tune: {available.reason}; it times kernels, and needs 2 GPUs or more")
    most = min(torch.cuda.device_count(), MAX_RANKS)
    world_sizes = options.world_size or range(2, most + 1)
    sizes = [nbytes for nbytes in tune.SIZES if nbytes <= options.max_nbytes]
    codecs = [codec(name) for name in options.codecs]
    codec_sizes = [nbytes for nbytes in tune.CODEC_SIZES if codecs and nbytes <= options.max_nbytes]
    if not sizes or not all(2 <= world_size <= most for world_size in world_sizes):
        return fail(f"--world-size must be from 2 to {most}, and --max-nbytes at least {tune.SIZES[0]}")
    device = torch.cuda.get_device_name(0)
    old = read(options.out) if options.out and options.out.exists() else find_table(device)
    with progress("tuning", len(world_sizes) * (len(sizes) + len(codec_sizes)), options.quiet) as done:
        measurements = {world_size: tune.measure(world_size, sizes, done) for world_size in world_sizes}
        codec_times = {n: tune.measure_codecs(n, codec_sizes, codecs, done) for n in world_sizes if codec_sizes}
    machine = f"{torch.cuda.device_count()}x {device}"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    new = tune.update(old, Table(slug(device), machine, date, options.report, rows={}), measurements, codec_times)
    path = write(new, options.out)
    changed, pays = tune.what_changed(old, new, measurements), tune.what_pays(new, codec_times)
    if options.json:
        print(json.dumps({"path": str(path), "changed": changed, "codecs": pays, "table": json.loads(new.to_json())}))
        return 0
    if not options.quiet:
        print("\n".join([*(changed or ["every choice stays as it was"]), *pays]))
    print(f"wrote {path}")
    return 0


def read(path: Path) -> Table:
    try:
        return Table.from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} holds no tuning table: {error}") from error


def write(table: Table, out: Path | None) -> Path:
    """Writes to ``out``, or else where graphar looks for the user's table; returns the path."""
    content = table.to_json().encode()
    if out is None:
        return cache.store_file(FOLDER, f"{table.name}.json", content)
    out.write_bytes(content)
    return out


if __name__ == "__main__":
    sys.exit(main())
