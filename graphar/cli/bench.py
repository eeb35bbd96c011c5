"""`python -m graphar bench`: times a collective on this machine, gives its bandwidth, and checks its bits."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

import graphar
from graphar.cli.bench_ranks import BACKENDS, Measured, Ranks, Row
from graphar.cli.options import (
    DTYPES,
    add_call,
    add_command,
    add_load,
    algorithm_named,
    count,
    one_of,
    progress,
    ranks_here,
    several,
    size,
)
from graphar.errors import GrapharError
from graphar.plan.sizes import GB, KB, MB, format_nbytes
from graphar.runtime.availability import is_available

SIZES = (2 * KB, 64 * KB, MB, 16 * MB, 256 * MB)
CPU_SIZES = (2 * KB, 64 * KB, MB)
MAX_NBYTES = {"allreduce": 4 * GB, "reducescatter": 256 * MB, "allgather": 256 * MB}  # by op; some hold many results
_COLUMNS = "{:>12} {:>13} {:>9} {:>6} {:>8}  {:>9} {:>7} {:>7} {:>6}  {:>9} {:>7} {:>7} {:>6}"


def add(commands) -> None:
    command = add_command(
        commands,
        "bench",
        run,
        summary="time a collective at a few sizes here, and check its bits",
        description="Times a collective in this process: between all GPUs, or without them on the CPU. Under torchrun, "
        "between its processes, and other backends beside graphar. It has flags and columns of nccl-tests. The size of "
        "an all-gather is its result's. `nox -s perf` in a checkout sets graphar beside its peers.",
        quiet="show no progress",
    )
    add_call(command, DTYPES, count="*", what="one rank's input", ranks="all GPUs")
    ops = f"{', '.join(MAX_NBYTES)} (default: allreduce)"
    command.add_argument("--op", choices=list(MAX_NBYTES), default="allreduce", metavar="OP", help=ops)
    command.add_argument("--algorithm", default="auto", metavar="NAME", help="the algorithm to time (default: auto)")
    add_load(command)
    command.add_argument("-b", "--minbytes", type=size, metavar="SIZE", help="in place of sizes: the smallest one")
    command.add_argument("-e", "--maxbytes", type=size, metavar="SIZE", help="the largest (default: the smallest)")
    command.add_argument("-f", "--stepfactor", type=int, default=2, metavar="N", help="from size to size (default: 2)")
    command.add_argument("-n", "--iters", type=count, default=20, metavar="N", help="timed calls (default: 20)")
    command.add_argument("-w", "--warmup_iters", type=count, default=5, metavar="N", help="calls before (default: 5)")
    command.add_argument("-c", "--check", type=int, choices=(0, 1), default=1, help="compare with the exact result")
    command.add_argument("-g", "--ngpus", choices=("1",), metavar="1", help="GPUs of a process; torchrun starts more")
    command.add_argument("-o", choices=("sum",), metavar="sum", help="what a reduction computes")
    named = f"under torchrun: {', '.join(BACKENDS)}, separated by commas (default: graphar, and nccl or gloo)"
    command.add_argument("--backend", type=several(one_of(BACKENDS)), metavar="NAMES", help=named)


def sizes_of(options: argparse.Namespace, defaults: Sequence[int]) -> list[int]:
    """Returns the sizes in bytes that the options give, or else the ``defaults`` that the op allows."""
    most = MAX_NBYTES[options.op]
    sizes = options.sizes or [nbytes for nbytes in defaults if nbytes <= most]
    if options.stepfactor < 2 or (options.sizes and options.minbytes is not None):
        raise ValueError("bench: give sizes or --minbytes, and a --stepfactor of 2 or more")
    if options.minbytes is not None:
        sizes, largest = [options.minbytes], options.minbytes if options.maxbytes is None else options.maxbytes
        if largest < options.minbytes:
            raise ValueError("bench: --maxbytes must be at least --minbytes")
        while 0 < sizes[-1] * options.stepfactor <= largest:
            sizes.append(sizes[-1] * options.stepfactor)
    elif options.maxbytes is not None:
        raise ValueError("bench: --maxbytes needs --minbytes")
    if not all(0 < nbytes <= most for nbytes in sizes):
        raise ValueError(f"bench: sizes of {options.op} must be from 1 byte to {format_nbytes(most)}")
    return sizes


def run(options: argparse.Namespace) -> int:
    """Runs the command; of several processes, rank 0 prints. Returns the exit status: 1 if a result is wrong."""
    options.algorithm = algorithm_named(options.op, options.algorithm)
    available = is_available()
    sizes = sizes_of(options, SIZES if available else CPU_SIZES)
    if options.codec and options.op != "allreduce":
        raise ValueError(f"bench: --codec needs --op allreduce, got {options.op}")
    if options.codec and options.algorithm != "auto":
        raise ValueError("bench: give --codec or --algorithm")
    is_one_process = not torch.distributed.is_torchelastic_launched()
    world_size = options.world_size or ranks_here() if is_one_process else None
    if is_one_process and options.backend:
        raise ValueError("bench: --backend needs processes: torchrun --nproc-per-node=2 -m graphar bench ...")
    if not is_one_process and options.world_size:
        raise ValueError("bench: under torchrun --nproc-per-node is the number of ranks: leave out --world-size")
    if options.backend and "graphar" not in options.backend and (options.codec or options.algorithm != "auto"):
        raise ValueError(f"bench: {'--codec' if options.codec else '--algorithm'} is graphar's; add it to --backend")
    if "nccl" in (options.backend or ()) and not torch.cuda.is_available():
        raise ValueError("bench: --backend nccl needs GPUs, torch sees no CUDA device")
    if available and world_size and world_size > torch.cuda.device_count():
        raise GrapharError(f"bench: {world_size} ranks need as many GPUs, torch sees {torch.cuda.device_count()}")
    with Ranks(options, world_size) as ranks:
        on_gpu, is_first = ranks.devices[0].type == "cuda", 0 in ranks.numbers
        backends = options.backend or (["graphar"] if is_one_process else ["graphar", "nccl" if on_gpu else "gloo"])
        calls, rows = {backend: ranks.calls_of(backend) for backend in backends}, []
        with progress("bench", len(sizes), options.quiet or not is_first) as done:
            for nbytes in sizes:
                rows += [ranks.row(backend, of_backend, nbytes) for backend, of_backend in calls.items()]
                done(format_nbytes(nbytes))
    where = torch.cuda.get_device_name() if on_gpu else "CPU"
    if is_first and options.json:
        call = {"device": where, "world_size": ranks.world_size, "op": options.op, "codec": options.codec}
        print(json.dumps(call | {"rows": [asdict(row) for row in rows]}, indent=1))
    elif is_first:
        why = "" if on_gpu else f" ({available.reason})"
        print("\n".join(lines(options, rows, f"{ranks.world_size} ranks on {where}{why}")))
    return int(any(measured.wrong for row in rows for measured in row.measured()))


def lines(options: argparse.Namespace, rows: Sequence[Row], where: str) -> Iterator[str]:
    codec = f", {options.codec} on graphar's wire" if options.codec else ""
    yield (
        f"# {options.op}, {where}{codec}, graphar {graphar.__version__}, torch {torch.__version__}: {options.iters} "
        f"iterations after {options.warmup_iters}"
    )
    yield "#"
    yield f"#{'out-of-place':>77} {'in-place':>35}"
    times = ("time", "algbw", "busbw", "#wrong")
    yield "#" + _COLUMNS.format("size", "count", "type", "redop", "backend", *times, *times)
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    yield "#" + _COLUMNS.format("(B)", "(elements)", "", "", "", *units, *units).rstrip()
    for row in rows:
        cells = *_cells(row.out_of_place), *_cells(row.in_place)
        yield " " + _COLUMNS.format(row.nbytes, row.count, row.dtype, row.redop, row.backend, *cells)
    if options.check:
        wrong = sum(measured.wrong or 0 for row in rows for measured in row.measured())
        yield f"# Wrong elements: {wrong} {'OK' if not wrong else 'FAILED'}"
    for backend in dict.fromkeys(row.backend for row in rows):
        rates = [measured.busbw for row in rows if row.backend == backend for measured in row.measured()]
        yield f"# Average bus bandwidth, {backend}: {statistics.fmean(rates):.4g} GB/s"


def _cells(measured: Measured | None) -> tuple[str, ...]:
    if measured is None:
        return ("N/A",) * 4
    wrong = "N/A" if measured.wrong is None else str(measured.wrong)
    return f"{measured.time_us:.2f}", f"{measured.algbw:.3g}", f"{measured.busbw:.3g}", wrong
