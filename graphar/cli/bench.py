"""`python -m graphar bench`: times a collective on this machine, gives its bandwidth, and checks its bits.

In one process it has all ranks. Under torchrun each rank is a process: bench_ranks.py.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from graphar.cli import bench_ranks
from graphar.cli.bench_ranks import BACKENDS, bandwidths
from graphar.cli.options import add_call, add_command, add_load, algorithm_named, by_name, count, load, ranks_here, size
from graphar.cli.progress import progress
from graphar.cli.timing import Timer
from graphar.cli.workloads import Prepared
from graphar.communicator import Communicator
from graphar.errors import GrapharError
from graphar.numerics.codecs import codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import FALLBACK
from graphar.plan.entries import by_entries
from graphar.plan.select import Facts, explain, select
from graphar.plan.sizes import GB, KB, MB, format_nbytes
from graphar.plan.trials import Workload
from graphar.plan.work import Sum
from graphar.runtime.availability import is_available
from graphar.runtime.engine import compresses
from graphar.runtime.launcher import chip
from graphar.runtime.user_tables import find_table

SIZES = (2 * KB, 64 * KB, MB, 16 * MB, 256 * MB)
CPU_SIZES = (2 * KB, 64 * KB, MB)
MAX_NBYTES = {"allreduce": 4 * GB, "reducescatter": 256 * MB, "allgather": 256 * MB}  # by op; some hold many results
DTYPES = by_name(TYPE_NAMES)
REPEATS = 5


@dataclass(frozen=True)
class Timed:
    """The result for one size."""

    nbytes: int  # the size of one rank's input, in bytes
    algorithm: str  # the name of the algorithm
    time_us: float  # the median time of one call, in microseconds; of an all-reduce on GPUs in a CUDA graph
    # GB/s (1e9 bytes), as nccl-tests defines them: of an all-gather the size is the result's.
    algbw: float
    busbw: float
    expected_us: float | None  # the time in the tuning table, in microseconds; None if the table has none


# Flags of nccl-tests that are refused.
NOT_TAKEN = ("-t --nthreads", "-i --stepbytes", "-m --agg_iters", "-N --run_cycles", "-p --parallel_init", "-r --root")
NOT_TAKEN += ("-z --blocking", "-y --stream_null", "-T --timeout", "-G --cudagraph", "-C --report_cputime")
NOT_TAKEN += ("-a --average", "-R --local_register", "-x --cta_policy", "-J --output_file")


class _NotTaken(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        parser.error(f"{option_string} of nccl-tests is not taken: `{parser.prog} --help` lists what is")


def add(commands) -> None:
    one = add_command(
        commands,
        "bench",
        run,
        summary="time a collective at a few sizes here, and check its bits",
        description="Times a collective in this process: between all GPUs, or without them on the CPU. Under torchrun, "
        "between its processes, with the flags and columns of nccl-tests, and other backends beside graphar. "
        "`nox -s perf` in a checkout sets it beside its peers.",
        quiet="show no progress",
    )
    add_call(one, DTYPES, count="*", what="one rank's input", ranks="all GPUs")
    one.add_argument(
        "--op",
        choices=list(MAX_NBYTES),
        default="allreduce",
        metavar="OP",
        help=f"{', '.join(MAX_NBYTES)} (default: allreduce)",
    )
    one.add_argument("--algorithm", default="auto", metavar="NAME", help="the algorithm to time (default: auto)")
    add_load(one)
    one.add_argument("-b", "--minbytes", type=size, metavar="SIZE", help="in place of sizes: the smallest of several")
    one.add_argument("-e", "--maxbytes", type=size, metavar="SIZE", help="the largest (default: the smallest)")
    one.add_argument("-f", "--stepfactor", type=int, default=2, metavar="N", help="from size to size (default: 2)")
    ranks = one.add_argument_group(
        "under torchrun, as in `torchrun --nproc-per-node=2 -m graphar bench`",
        "The size of an all-gather is that of its result, as in nccl-tests.",
    )
    ranks.add_argument("-n", "--iters", type=count, default=20, metavar="N", help="timed calls (default: 20)")
    ranks.add_argument("-w", "--warmup_iters", type=count, default=5, metavar="N", help="calls before (default: 5)")
    ranks.add_argument("-c", "--check", type=int, choices=(0, 1), default=1, help="compare with the exact result")
    ranks.add_argument("-g", "--ngpus", choices=("1",), metavar="1", help="GPUs of a process; torchrun starts several")
    ranks.add_argument("-o", choices=("sum",), metavar="sum", help="what a reduction computes")
    for flags in NOT_TAKEN:
        ranks.add_argument(*flags.split(), nargs="?", action=_NotTaken, help=argparse.SUPPRESS)
    ranks.add_argument(
        "--backend",
        type=backends,
        metavar="NAMES",
        help=f"{', '.join(BACKENDS)}, separated by commas (default: graphar, and nccl or without GPUs gloo)",
    )


def backends(text: str) -> list[str]:
    """Returns the names of backends; an argparse type."""
    names = text.split(",")
    if unknown := set(names) - set(BACKENDS):
        raise argparse.ArgumentTypeError(f"no backend {min(unknown)!r}: {', '.join(BACKENDS)}")
    return names


def sizes_of(options: argparse.Namespace, defaults: Sequence[int]) -> list[int]:
    """Returns the sizes in bytes that the options give, or else those of ``defaults`` that the op allows.

    Raises:
        ValueError: a size is too large for the op, or the options contradict each other.
    """
    most = MAX_NBYTES[options.op]
    found = options.sizes or [nbytes for nbytes in defaults if nbytes <= most]
    if options.stepfactor < 2 or (options.sizes and options.minbytes is not None):
        raise ValueError("bench: give sizes or --minbytes, and a --stepfactor of 2 or more")
    if options.minbytes is not None:
        found, largest = [options.minbytes], options.maxbytes or options.minbytes
        while 0 < found[-1] * options.stepfactor <= largest:
            found.append(found[-1] * options.stepfactor)
    elif options.maxbytes is not None:
        raise ValueError("bench: --maxbytes needs --minbytes")
    if not all(0 < nbytes <= most for nbytes in found):
        raise ValueError(f"bench: sizes of {options.op} must be from 1 byte to {format_nbytes(most)}")
    return found


def run(options: argparse.Namespace) -> int:
    """Runs the command. Raises GrapharError if a result is wrong or there are too few GPUs."""
    load(options.load)
    options.algorithm = algorithm_named(options.op, options.algorithm)
    available, dtype = is_available(), DTYPES[options.dtype]
    sizes = sizes_of(options, SIZES if available else CPU_SIZES)
    if torch.distributed.is_torchelastic_launched():
        return bench_ranks.run(options, sizes)
    if options.backend:
        raise ValueError("bench: --backend needs processes: torchrun --nproc-per-node=2 -m graphar bench ...")
    if options.codec and options.op != "allreduce":
        raise ValueError(f"bench: --codec needs --op allreduce, got {options.op}")
    if options.codec and options.algorithm != "auto":
        raise ValueError("bench: give --codec or --algorithm")
    world_size = options.world_size or ranks_here()
    if available and world_size > torch.cuda.device_count():
        raise GrapharError(f"bench: {world_size} ranks need as many GPUs, torch sees {torch.cuda.device_count()}")
    text = codec(options.codec).text if options.codec else ""
    how = {"codec": text, "dtype": dtype, "algorithm": options.algorithm}
    workloads = [Workload(options.op, -(-nbytes // dtype.itemsize), 1, **how) for nbytes in sizes]
    rows = []
    with progress("bench", len(sizes), options.quiet) as done:
        for nbytes, row in zip(sizes, (on_gpus if available else on_cpu)(world_size, workloads), strict=True):
            rows.append(timed(nbytes, options.op, world_size, *row))
            done(format_nbytes(nbytes))
    where = torch.cuda.get_device_name(0) if available else "CPU"
    if options.json:
        call = {"device": where, "world_size": world_size, "op": options.op, "dtype": options.dtype}
        print(json.dumps(call | {"codec": options.codec, "rows": [asdict(row) for row in rows]}, indent=1))
    else:
        why = "" if available else f" ({available.reason})"
        print(f"{options.op}, {world_size} ranks on {where}{why}, {options.dtype}; every result is right, bit for bit")
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


Row = tuple[str, float, float | None]  # the algorithm, the time and the expected time, in microseconds


def on_gpus(world_size: int, workloads: Sequence[Workload]) -> Iterator[Row]:
    """Times the algorithm that calls take. The timer compares every result with the specification."""
    table = find_table(torch.cuda.get_device_name(0))
    with Timer(world_size) as timer:
        for one in workloads:
            nbytes = one.rows * one.dtype.itemsize
            if one.op == "allreduce":
                facts = Facts(world_size, table, chip(0), lossless=compresses(None))
                call = Call(Sum(one.rows, one.codec), one.dtype, 0, algorithm=one.algorithm)
                config = select(call, facts).config
                (time_us,) = timer.measure(call, [config])
                yield config.algorithm.value, time_us, None if one.codec else explain(call, facts).expected_us
            else:
                part = nbytes if one.op == "allgather" else -(-one.rows // world_size) * one.dtype.itemsize
                (time_us,) = timer.measure_under(one, [table])
                asked = None if one.algorithm == "auto" else Algorithm(one.algorithm)
                yield by_entries(table.parts[one.op], 1, part, asked).algorithm.value, time_us, None


def on_cpu(world_size: int, workloads: Sequence[Workload]) -> Iterator[Row]:
    """Times the fallback on the CPU, with one tensor per rank."""
    with Communicator(devices=["cpu"] * world_size) as communicator:
        for one in workloads:
            prepared, times = Prepared(one, communicator), []
            results = prepared.run(0)  # warms up
            for at in range(1, 1 + REPEATS):
                begin = time.perf_counter()
                results = prepared.run(at)
                times.append((time.perf_counter() - begin) * 1e6)
            prepared.check(REPEATS, results)
            yield FALLBACK.algorithm.value, statistics.median(times), None


def timed(nbytes: int, op: str, world_size: int, algorithm: str, time_us: float, expected: float | None) -> Timed:
    """Returns the row of a size, with its bandwidths."""
    whole = nbytes * (world_size if op == "allgather" else 1)
    return Timed(nbytes, algorithm, time_us, *bandwidths(op, whole, world_size, time_us), expected)
