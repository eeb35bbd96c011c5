"""`python -m graphar tune`: measures the fastest algorithms of this machine, and writes them to a tuning table."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from graphar.cli.options import add_command, fail, size
from graphar.cli.progress import progress
from graphar.cli.timing import DTYPE, Timer
from graphar.numerics.codecs import NAMES, Codec, codec
from graphar.plan import tune as tuning
from graphar.plan.call import Call
from graphar.plan.scratch import MAX_RANKS
from graphar.plan.select import Facts, select
from graphar.plan.shapes import shape_of
from graphar.plan.sizes import format_nbytes
from graphar.plan.tables import Table, slug
from graphar.runtime import cache
from graphar.runtime.availability import is_available
from graphar.runtime.launcher import chip, sm_count
from graphar.runtime.user_tables import FOLDER, find_table


def add(commands) -> None:
    command = add_command(
        commands,
        "tune",
        run,
        summary="measure which algorithm is the fastest here, and choose by that from now on",
        description="Times every algorithm and grid that can be the fastest between this machine's GPUs, checks their"
        " bits, and writes the choices to a table that calls go by from then on.",
        quiet="show no progress, and print only where the table was written",
    )
    command.add_argument("--world-size", type=int, nargs="+", metavar="N", help="numbers of GPUs (default: 2 to all)")
    command.add_argument("--max-nbytes", type=size, metavar="SIZE", help="largest size, such as 64M (default: 1G)")
    command.add_argument(
        "--codecs", nargs="*", choices=NAMES, default=NAMES, metavar="NAME", help="to time as well (default: all)"
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="where the table goes (default: the user's cache)")
    command.add_argument("--report", metavar="PATH", help="the report that the table is to name")
    command.set_defaults(max_nbytes=tuning.SIZES[-1])


def run(options: argparse.Namespace) -> int:
    available = is_available()
    if not available:
        return fail(f"tune: {available.reason}; it times kernels, and needs 2 GPUs or more")
    most = min(torch.cuda.device_count(), MAX_RANKS)
    world_sizes = options.world_size or range(2, most + 1)
    sizes = [nbytes for nbytes in tuning.SIZES if nbytes <= options.max_nbytes]
    codecs = [codec(name) for name in options.codecs]
    codec_sizes = [nbytes for nbytes in tuning.CODEC_SIZES if codecs and nbytes <= options.max_nbytes]
    if not sizes or not all(2 <= world_size <= most for world_size in world_sizes):
        return fail(f"--world-size must be from 2 to {most}, and --max-nbytes at least {tuning.SIZES[0]}")
    device = torch.cuda.get_device_name(0)
    old = read(options.out) if options.out and options.out.exists() else find_table(device)
    with progress("tuning", len(world_sizes) * (len(sizes) + len(codec_sizes)), options.quiet) as done:
        measurements = {world_size: measure(world_size, sizes, done) for world_size in world_sizes}
        codec_times = {n: measure_codecs(old, n, codec_sizes, codecs, done) for n in world_sizes if codec_sizes}
    machine = f"{torch.cuda.device_count()}x {device}"
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    new = tuning.update(
        old, Table(slug(device), machine, date, options.report, rows={}, chip=chip(0)), measurements, codec_times
    )
    path = write(new, options.out)
    changed, pays = tuning.what_changed(old, new, measurements), tuning.what_pays(new, codec_times)
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
    """Writes a table to ``out`` and returns the path; None: to the user's cache, where graphar looks for it."""
    content = table.to_json().encode()
    if out is None:
        return cache.store_file(FOLDER, f"{table.name}.json", content)
    out.write_bytes(content)
    return out


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure(world_size: int, sizes: Sequence[int], done: Callable[[str], None]) -> tuning.Measurements:
    """Returns the time of every candidate at every size on the first ``world_size`` GPUs.

    It calls ``done`` after each size.

    Raises:
        GrapharError: a candidate's result is wrong, a kernel timed out, or the GPUs cannot reach each other.
    """
    measurements = {}
    with Timer(world_size) as timer:
        for nbytes in sizes:
            tried = tuning.candidates(world_size, nbytes, sm_count(0))
            shapes = [shape_of(tuning.row_of(candidate, None), world_size, nbytes) for candidate in tried]
            measurements[nbytes] = dict(zip(tried, timer.measure(nbytes, shapes), strict=True))
            done(f"{world_size} GPUs, {format_nbytes(nbytes)}")
    return measurements


def measure_codecs(
    table: Table, world_size: int, sizes: Sequence[int], codecs: Sequence[Codec], done: Callable[[str], None]
) -> tuning.CodecTimes:
    """Returns the time of the chosen algorithm with each codec at every size on the first ``world_size`` GPUs.

    It calls ``done`` after each size. The codecs round to nearest.

    Raises:
        GrapharError: a result is wrong, a kernel timed out, or the GPUs cannot reach each other.
    """
    times: dict[str, dict[int, float]] = {codec.text: {} for codec in codecs}
    facts = Facts(world_size, table, chip(0))
    with Timer(world_size) as timer:
        for nbytes in sizes:
            for codec in codecs:
                shape = select(Call("allreduce", nbytes // DTYPE.itemsize, DTYPE, 0, codec=codec.text), facts).shape
                (times[codec.text][nbytes],) = timer.measure(nbytes, [shape])
            done(f"{world_size} GPUs, {format_nbytes(nbytes)}, codecs")
    return times
