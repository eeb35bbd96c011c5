"""`python -m graphar explain`: which way an all-reduce would take, and how long, by tables alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from graphar.cli.options import add_command, size
from graphar.numerics.codecs import NAMES, Codec, codec
from graphar.plan import choice
from graphar.plan.explanation import Explanation
from graphar.plan.sizes import format_nbytes
from graphar.plan.tables import Table, find_table
from graphar.runtime.catalogue import MAX_RANKS, TYPE_NAMES, WORLD_SIZES

ELSEWHERE = "NVIDIA H200"  # of the measured tables that ship: what is told where there is no GPU
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*TYPE_NAMES, torch.float64, torch.int32)}


@dataclass(frozen=True)
class Imagined:
    """A communicator as choices see it, with no memory and no ranks behind it."""

    world_size: int
    _table: Table
    devices: None = None
    _multimem_stand_in: bool = False

    def _why_no_kernel(self, x: torch.Tensor, op: str = "allreduce") -> str:
        return "" if x.dtype in TYPE_NAMES else f"no kernel adds {x.dtype}"


def add(commands) -> None:
    one = add_command(
        commands,
        "explain",
        run,
        summary="which way an all-reduce would take, and how long, by measured tables; needs no GPU",
        description="Which algorithm and grid `auto` takes for an all-reduce, and how long that takes in a CUDA graph.",
        quiet="leave out the heading",
    )
    one.add_argument("sizes", type=size, nargs="+", metavar="SIZE", help="of one rank's tensor, such as 2K 16M")
    one.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="bfloat16",
        metavar="DTYPE",
        help=f"of its elements: {', '.join(DTYPES)} (default: bfloat16)",
    )
    one.add_argument(
        "--world-size", type=int, choices=WORLD_SIZES, metavar="N", help="ranks (default: this machine's GPUs, or 4)"
    )
    one.add_argument(
        "--codec", choices=NAMES, metavar="CODEC", help=f"on the wire, and whether it pays: {', '.join(NAMES)}"
    )
    one.add_argument("--device", metavar="NAME", help=f'GPU, such as "NVIDIA H200" (default: this one, or {ELSEWHERE})')


def run(options: argparse.Namespace) -> int:
    device = options.device or (torch.cuda.get_device_name(0) if torch.cuda.is_available() else ELSEWHERE)
    world_size = options.world_size or default_world_size()
    table = find_table(device)
    wire = codec(options.codec) if options.codec else None
    found = list(explanations(table, world_size, options.sizes, DTYPES[options.dtype], wire))
    if options.json:
        call = {"device": device, "world_size": world_size, "dtype": options.dtype, "codec": options.codec}
        answers = [{"nbytes": nbytes, **asdict(one)} for nbytes, one in zip(options.sizes, found, strict=True)]
        print(json.dumps(call | {"calls": answers}, indent=1))
        return 0
    on_wire = f", {options.codec} on the wire" if options.codec else ""
    if not options.quiet:
        print(f"{world_size} ranks on {device}, {options.dtype}{on_wire}")
    for nbytes, one in zip(options.sizes, found, strict=True):
        print(f"  {format_nbytes(nbytes):>7}  {one}")
    return 0


def default_world_size() -> int:
    count = torch.cuda.device_count()
    return min(count, MAX_RANKS) if count >= 2 else 4


def explanations(
    table: Table, world_size: int, sizes: list[int], dtype: torch.dtype, wire: Codec | None
) -> Iterator[Explanation]:
    """What graphar.explain would say of tensors of these sizes, in bytes."""
    communicator = Imagined(world_size, table)
    for nbytes in sizes:
        x = torch.empty(-(-nbytes // dtype.itemsize), dtype=dtype, device="meta")
        yield choice.explain(communicator, x, "auto", None, wire)
