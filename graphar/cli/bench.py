"""`python -m graphar bench`: times all-reduces on this machine, gives their bandwidth, and checks their bits."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

import graphar
from graphar import reference
from graphar.cli.explain import default_world_size
from graphar.cli.options import add_command, size
from graphar.cli.progress import progress
from graphar.cli.timing import Timer
from graphar.cli.workloads import DTYPE
from graphar.errors import GrapharError
from graphar.numerics.codecs import NAMES, Codec, codec
from graphar.plan.call import Call
from graphar.plan.scratch import WORLD_SIZES
from graphar.plan.select import Facts, select
from graphar.plan.sizes import GB, KB, MB, format_nbytes
from graphar.plan.times import expected_us
from graphar.runtime.availability import is_available
from graphar.runtime.launcher import chip
from graphar.runtime.user_tables import find_table

SIZES = (2 * KB, 64 * KB, MB, 16 * MB, 256 * MB)
CPU_SIZES = (2 * KB, 64 * KB, MB)
REPEATS = 5


@dataclass(frozen=True)
class Timed:
    """The result for one size."""

    nbytes: int  # the size of one rank's tensor, in bytes
    algorithm: str  # the name of the algorithm
    time_us: float  # the median time of one all-reduce, in microseconds; on GPUs in a CUDA graph
    # GB/s (1e9 bytes), as nccl-tests defines them: size / time, and algbw * 2(N-1)/N.
    algbw: float
    busbw: float
    expected_us: float | None  # the time in the tuning table, in microseconds; None if the table has none


def add(commands) -> None:
    one = add_command(
        commands,
        "bench",
        run,
        summary="time all-reduces of a few sizes here, and check their bits",
        description="Times graphar.allreduce of bf16 in this process: between all GPUs, or without them on the CPU. "
        "`nox -s perf` in a checkout sets it beside its peers.",
        quiet="show no progress",
    )
    one.add_argument("sizes", type=size, nargs="*", metavar="SIZE", help="of one rank's tensor, such as 2K 16M")
    one.add_argument("--world-size", type=int, choices=WORLD_SIZES, metavar="N", help="ranks (default: all GPUs, or 4)")
    one.add_argument("--codec", choices=NAMES, metavar="CODEC", help=f"on the wire: {', '.join(NAMES)}")


def run(options: argparse.Namespace) -> int:
    """Runs the command. Raises GrapharError if a result is wrong or there are too few GPUs."""
    available = is_available()
    sizes = options.sizes or (SIZES if available else CPU_SIZES)
    if not all(0 < nbytes <= 4 * GB for nbytes in sizes):
        raise ValueError("bench: sizes must be from 1 to 4G")
    world_size = options.world_size or default_world_size()
    if available and world_size > torch.cuda.device_count():
        raise GrapharError(f"bench: {world_size} ranks need as many GPUs, torch sees {torch.cuda.device_count()}")
    measure = on_gpus if available else on_cpu
    wire = codec(options.codec) if options.codec else None
    rows = []
    with progress("bench", len(sizes), options.quiet) as done:
        for row in measure(world_size, sizes, wire):
            rows.append(row)
            done(format_nbytes(row.nbytes))
    where = torch.cuda.get_device_name(0) if available else "CPU"
    if options.json:
        call = {"device": where, "world_size": world_size, "codec": options.codec}
        print(json.dumps(call | {"rows": [asdict(row) for row in rows]}, indent=1))
    else:
        why = "" if available else f" ({available.reason})"
        print(f"{world_size} ranks on {where}{why}, bfloat16; every result is right, bit for bit")
        show(rows)
    return 0


def show(rows: Sequence[Timed]) -> None:
    print(f"{'size':>8} {'time (us)':>11} {'expected':>11} {'algbw':>9} {'busbw (GB/s)':>13}  algorithm")
    for row in rows:
        expected = f"{row.expected_us:.2f}" if row.expected_us else "-"
        print(
            f"{format_nbytes(row.nbytes):>8} {row.time_us:>11.2f} {expected:>11} {row.algbw:>9.2f} {row.busbw:>13.2f}"
            f"  {row.algorithm}"
        )


def on_gpus(world_size: int, sizes: Sequence[int], wire: Codec | None) -> Iterator[Timed]:
    """Times the algorithm that `auto` takes. The timer compares every result with the specification."""
    table = find_table(torch.cuda.get_device_name(0))
    facts = Facts(world_size, table, chip(0))
    with Timer(world_size) as timer:
        for nbytes in sizes:
            numel = -(-nbytes // DTYPE.itemsize)
            shape = select(Call("allreduce", numel, DTYPE, 0, codec=wire.text if wire else ""), facts).shape
            (time_us,) = timer.measure(numel * DTYPE.itemsize, [shape])
            expected = None if wire else expected_us(table, world_size, nbytes)
            yield timed(nbytes, shape.algorithm.value, time_us, world_size, expected)


def on_cpu(world_size: int, sizes: Sequence[int], wire: Codec | None) -> Iterator[Timed]:
    """Times the fallback on the CPU, with one tensor a rank."""
    for nbytes in sizes:
        make = torch.Generator().manual_seed(0)
        numel = -(-nbytes // DTYPE.itemsize)
        xs = [torch.randn(numel, generator=make).to(DTYPE) for _ in range(world_size)]
        expected = reference.quantized_allreduce(xs, wire) if wire else reference.allreduce(xs)
        times = []
        for _ in range(1 + REPEATS):  # the first one warms up
            begin = time.perf_counter()
            outs = graphar.allreduce(xs, codec=wire)
            times.append((time.perf_counter() - begin) * 1e6)
        if not all(torch.equal(out.view(torch.int16), expected.view(torch.int16)) for out in outs):
            raise GrapharError(f"bench: {format_nbytes(nbytes)} on the CPU: the sums are wrong")
        yield timed(nbytes, graphar.Algorithm.FALLBACK.value, statistics.median(times[1:]), world_size, None)


def timed(nbytes: int, algorithm: str, time_us: float, world_size: int, expected: float | None) -> Timed:
    algbw = nbytes / time_us / 1e3
    return Timed(nbytes, algorithm, time_us, algbw, algbw * 2 * (world_size - 1) / world_size, expected)
