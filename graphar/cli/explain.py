"""`python -m graphar explain`: prints which algorithm an all-reduce takes, and its time, by the tuning tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from graphar.cli.options import DTYPES, add_call, add_command, add_load, ranks_here
from graphar.numerics.codecs import Codec
from graphar.plan import select
from graphar.plan.call import Call
from graphar.plan.config import Explanation
from graphar.plan.sizes import format_nbytes
from graphar.plan.tables import DEFAULT, Table
from graphar.plan.work import Sum
from graphar.runtime.availability import concurrent_communicators
from graphar.runtime.checks import call_checks
from graphar.runtime.engine import compresses
from graphar.runtime.user_tables import find_table

ELSEWHERE = "NVIDIA H200"  # the shipped table that answers on machines without a GPU
KNOWN_DTYPES = DTYPES | {"float64": torch.float64, "int32": torch.int32}


def add(commands) -> None:
    command = add_command(
        commands,
        "explain",
        run,
        summary="which algorithm an all-reduce takes, and its time, by measured tables; needs no GPU",
        description="Prints which algorithm and grid `auto` takes for an all-reduce, and the expected time in a CUDA"
        " graph; with a codec also whether it is faster.",
        quiet="leave out the heading",
    )
    add_call(command, KNOWN_DTYPES, count="+", what="one rank's tensor", ranks="this machine's GPUs")
    add_load(command)
    command.add_argument(
        "--device", metavar="NAME", help=f'name of the GPU, such as "NVIDIA H200" (default: this one, or {ELSEWHERE})'
    )


def run(options: argparse.Namespace) -> int:
    device, assumed = device_of(options.device)
    world_size, table, dtype = options.world_size or ranks_here(), find_table(device), KNOWN_DTYPES[options.dtype]
    x = torch.empty(0, dtype=dtype)
    wire = call_checks.check_quantized_call("allreduce", options.codec, "auto", x) if options.codec else None
    answers = list(explanations(table, world_size, options.sizes, dtype, wire))
    if table.name == DEFAULT:
        without = f"without a table of {device}, "
        answers = [replace(said, reason=without + said.reason) if said.blocks else said for said in answers]
    if options.json:
        call = {"device": device, "world_size": world_size, "dtype": options.dtype, "codec": options.codec}
        calls = [{"nbytes": nbytes, **asdict(answer)} for nbytes, answer in zip(options.sizes, answers, strict=True)]
        print(json.dumps(call | {"assumed": assumed, "calls": calls}, indent=1))
        return 0
    on_wire = f", {options.codec} on the wire" if options.codec else ""
    if not options.quiet:
        print(f"{world_size} ranks on {device}, {options.dtype}{on_wire}{f' ({assumed})' if assumed else ''}")
    for nbytes, answer in zip(options.sizes, answers, strict=True):
        print(f"  {format_nbytes(nbytes):>7}  {answer}")
    return 0


def device_of(asked: str | None) -> tuple[str, str]:
    """Returns the device whose table answers, and what was assumed about it; an empty string if nothing was."""
    if asked is None and torch.cuda.is_available():
        return torch.cuda.get_device_name(0), ""
    if asked is None:
        return ELSEWHERE, f"assumed {ELSEWHERE}: there is no GPU here"
    if find_table(asked).name != DEFAULT:
        return asked, ""
    whole = f"NVIDIA {asked}"
    if find_table(whole).name != DEFAULT:
        return whole, f"assumed {whole} for {asked}"
    return asked, f"assumed the default table: there is none of {asked}, and `python -m graphar tune` on it makes one"


def explanations(
    table: Table, world_size: int, sizes: list[int], dtype: torch.dtype, wire: Codec | None
) -> Iterator[Explanation]:
    """Yields what graphar.explain says for tensors of these sizes, in bytes, between GPUs of the table's kind."""
    problem = select.why_no_kernel(world_size, "cuda", dtype, "allreduce")
    chip = replace(table.chip, communicators=concurrent_communicators())
    facts = select.Facts(world_size, table, chip, problem, lossless=compresses(None))
    for nbytes in sizes:
        numel = -(-nbytes // dtype.itemsize)
        yield select.explain(Call(Sum(numel, wire.text if wire else ""), dtype, 0), facts)
