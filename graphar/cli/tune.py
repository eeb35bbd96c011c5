"""`python -m graphar tune`: measures the fastest algorithms of this machine, and writes them to a tuning table."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from graphar.cli.options import add_command, add_load, fail, progress, size
from graphar.cli.specified import DTYPE
from graphar.cli.timing import Timer
from graphar.numerics.codecs import NAMES, Codec, codec
from graphar.plan import tune as tuning
from graphar.plan.call import Call
from graphar.plan.matmuls import choose_matmul
from graphar.plan.policy import MeasuredMatmul
from graphar.plan.scratch import MAX_RANKS, WORLD_SIZES
from graphar.plan.select import Facts, select
from graphar.plan.sizes import format_nbytes
from graphar.plan.tables import POLICIES, Table, entry_of, fitted, slug
from graphar.plan.tune import COLUMNS, Trial, Workload, against_torch, choose, trials, value_at, with_value
from graphar.plan.work import Sum
from graphar.runtime import cache
from graphar.runtime.availability import is_available
from graphar.runtime.launcher import chip
from graphar.runtime.user_tables import FOLDER, find_table

SECTIONS = ("rows", "codecs", "parts", *(name for name in POLICIES if name not in ("chip", "training")))


def add(commands) -> None:
    command = add_command(
        commands,
        "tune",
        run,
        summary="measure which algorithm is the fastest here, and choose by that from now on",
        description="Times every algorithm, grid and threshold that can be the fastest between this machine's GPUs,"
        " checks the results, and writes the choices to a table, which later calls use.",
        quiet="show no progress, and print only where the table was written",
    )
    command.add_argument("--world-size", type=int, nargs="+", metavar="N", help="numbers of GPUs (default: 2 to all)")
    command.add_argument("--max-nbytes", type=size, metavar="SIZE", help="largest size, such as 64M (default: 1G)")
    codecs = "codecs to time (default: all)"
    command.add_argument("--codecs", nargs="*", choices=NAMES, default=NAMES, metavar="NAME", help=codecs)
    sections = f"sections of the table to measure: {', '.join(SECTIONS)} (default: all); others stay as they are"
    command.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION", help=sections)
    command.add_argument("--out", type=Path, metavar="FILE", help="where the table goes (default: the user's cache)")
    add_load(command)
    command.add_argument("--report", metavar="PATH", help="report that the table names as its source")
    command.set_defaults(max_nbytes=tuning.SIZES[-1])


def run(options: argparse.Namespace) -> int:
    available = is_available()
    if not available:
        return fail(f"tune: {available.reason}; it times kernels, and needs 2 GPUs or more")
    most = min(torch.cuda.device_count(), MAX_RANKS)
    world_sizes = options.world_size or range(2, most + 1)
    if options.max_nbytes < tuning.SIZES[0] or not all(2 <= world_size <= most for world_size in world_sizes):
        least = format_nbytes(tuning.SIZES[0])
        raise ValueError(f"--world-size must be from 2 to {most}, and --max-nbytes at least {least}")
    device = torch.cuda.get_device_name(0)
    old = read(options.out) if options.out and options.out.exists() else find_table(device)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    machine = f"{torch.cuda.device_count()}x {device}"
    blank = replace(old, name=slug(device), machine=machine, date=date, report=options.report, chip=chip(0))
    tempfile.TemporaryFile(dir=options.out.parent if options.out else cache.folder_of(FOLDER)).close()  # fail early
    new, changed, faster = measure_all(old, blank, world_sizes, options)
    if path := options.out:
        path.write_text(new.to_json())
    else:
        path = cache.store_file(FOLDER, f"{new.name}.json", new.to_json().encode())
    if options.json:
        print(json.dumps({"path": str(path), "changed": changed, "codecs": faster, "table": json.loads(new.to_json())}))
        return 0
    if not options.quiet:
        print("\n".join([*(changed or ["every choice stays as it was"]), *faster]))
    print(f"wrote {path}")
    return 0


def measure_all(
    old: Table, blank: Table, world_sizes: Sequence[int], options: argparse.Namespace
) -> tuple[Table, list[str], list[str]]:
    """Returns the new table, a line for each choice that differs from ``old``, and a line for each codec."""

    def up_to(sizes: Sequence[int], section: str) -> list[int]:
        return [nbytes for nbytes in sizes if nbytes <= options.max_nbytes] if section in options.only else []

    sizes, part_sizes = up_to(tuning.SIZES, "rows"), up_to(tuning.PART_SIZES, "parts")
    codecs = [codec(name) for name in options.codecs]
    codec_sizes = up_to(tuning.CODEC_SIZES, "codecs") if codecs else []
    largest = max(world_sizes)  # with which numbers for all world sizes are tried
    tried = {
        n: [made for made in trials(n, old) if made.path[0] in options.only and (n == largest or made.by_world_size)]
        for n in world_sizes
    }
    compared = len(list(against_torch(old.matmul, blank.chip))) if "matmul" in options.only else 0
    steps = len(world_sizes) * (len(sizes) + len(codec_sizes)) + len(old.parts) * len(part_sizes)
    steps += sum(map(len, tried.values())) + compared
    with progress("tuning", steps, options.quiet) as done:
        measurements = {n: measure(n, sizes, done) for n in world_sizes if sizes}
        codec_times = {n: measure_codecs(old, n, codec_sizes, codecs, done) for n in world_sizes if codec_sizes}
        new = tuning.update(old, blank, measurements, codec_times)
        changed = tuning.what_changed(old, new, measurements)
        for world_size in world_sizes:
            with Timer(world_size) as timer:
                for trial in tried[world_size]:
                    new, line = settle(timer, new, trial)
                    changed += [line] if line else []
                    done(f"{world_size} GPUs, {trial.name}")
                if part_sizes and world_size == largest:
                    new = replace(new, parts=measure_parts(timer, new, world_size, part_sizes, done))
                if compared and world_size == largest:
                    new, lines = measure_against_torch(timer, new, done)
                    changed += lines
    return new, changed, tuning.faster_codecs(new, codec_times)


def read(path: Path) -> Table:
    try:
        return Table.from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} holds no tuning table: {error}") from error


def measure(world_size: int, sizes: Sequence[int], done: Callable[[str], None]) -> tuning.Measurements:
    """Returns the time of every candidate at every size on the first ``world_size`` GPUs."""
    measurements = {}
    with Timer(world_size) as timer:
        for nbytes in sizes:
            tried = tuning.candidates("allreduce", [world_size], nbytes, chip(0))
            configs = [fitted(candidate, world_size, nbytes) for candidate in tried]
            call = Call(Sum(nbytes // DTYPE.itemsize), DTYPE, 0)
            measurements[nbytes] = dict(zip(tried, timer.measure(call, configs), strict=True))
            done(f"{world_size} GPUs, {format_nbytes(nbytes)}")
    return measurements


def measure_codecs(
    table: Table, world_size: int, sizes: Sequence[int], codecs: Sequence[Codec], done: Callable[[str], None]
) -> tuning.CodecTimes:
    """Returns the time of the chosen algorithm with each codec at every size on the first ``world_size`` GPUs."""
    times: dict[str, dict[int, float]] = {codec.text: {} for codec in codecs}
    facts = Facts(world_size, table, chip(0))
    with Timer(world_size) as timer:
        for nbytes in sizes:
            for codec in codecs:
                call = Call(Sum(nbytes // DTYPE.itemsize, codec.text), DTYPE, 0)
                (times[codec.text][nbytes],) = timer.measure(call, [select(call, facts).config])
            done(f"{world_size} GPUs, {format_nbytes(nbytes)}, codecs")
    return times


def settle(timer: Timer, table: Table, trial: Trial) -> tuple[Table, str]:
    """Returns the table with the fastest value of a trial, and a line that says what changed, or an empty string."""
    present = value_at(table, trial.path)
    values = [present, *(value for value in trial.values if value != present)]
    tables = [with_value(table, trial.path, value) for value in values]
    by_workload = [timer.measure_under(workload, tables) for workload in trial.workloads]
    times = list(zip(*by_workload, strict=True))
    at = choose(times, 0)
    if at == 0:
        return table, ""
    ratio = math.exp(statistics.fmean(math.log(new / old) for new, old in zip(times[at], times[0], strict=True)))
    return tables[at], f"{trial.name}: {present} -> {values[at]}, {ratio:.3f} of the time"


def measure_against_torch(timer: Timer, table: Table, done: Callable[[str], None]) -> tuple[Table, list[str]]:
    """Returns the table with graphar's matmul timed against torch's, and a line for each shape that takes another."""
    points, lines, policy, sms = [], [], table.matmul, table.chip.sms
    for workload, *both in against_torch(policy, table.chip):
        shape = workload.rows, workload.columns, workload.k
        own_us, torch_us = timer.measure_under(workload, [replace(table, matmul=matmul) for matmul in both])
        point = MeasuredMatmul(*shape, round(own_us / torch_us, 3))
        points.append(point)
        policies = policy, replace(policy, against_torch=(point,))
        before, after = (choose_matmul(matmul, *shape, sms) for matmul in policies)
        if before.own != after.own:
            lines.append(f"matmul.against_torch: {after.reason}")
        done("matmul of {} x {} x {}".format(*shape))
    return with_value(table, ("matmul", "against_torch"), tuple(points)), lines


def measure_parts(
    timer: Timer, table: Table, world_size: int, sizes: Sequence[int], done: Callable[[str], None]
) -> dict[str, list[dict]]:
    """Returns the fastest entries of reduce-scatters, all-gathers and all-to-alls, by the bytes of a part."""
    parts = {}
    for op, older in table.parts.items():
        measurements = {}
        for nbytes in sizes:
            tried = tuning.candidates(op, WORLD_SIZES, nbytes, chip(0))
            tables = [replace(table, parts=table.parts | {op: [entry_of(config, None)]}) for config in tried]
            rows = nbytes // (DTYPE.itemsize * COLUMNS) * (1 if op == "allgather" else world_size)
            measurements[nbytes] = dict(zip(tried, timer.measure_under(Workload(op, rows), tables), strict=True))
            done(f"{op}, parts of {format_nbytes(nbytes)}")
        parts[op] = tuning.entries_from(measurements, older)
    return parts
