"""`python -m perf lossless`: two_shot_lossless beside the plain algorithm, with data that pack well and badly."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from graphar.plan.algorithms import Algorithm
from graphar.plan.select import measured_shape
from graphar.plan.sizes import GB, MB, format_nbytes
from graphar.runtime.user_tables import find_table
from perf import files, live, machine
from perf.machine import check_world_sizes
from perf.quantized import data
from perf.report import bullets
from perf.tables import table
from perf.training.tasks import ByteTransformer, load_bytes

SIZES = (16 * MB, 64 * MB, 256 * MB, GB)
CPU_WORLD_SIZE = 4
TILE_NUMEL, ROW_NUMEL = 1024, 256  # as in cuda_src/device/wire/wire.cuh and lossless.cuh
MOST_ODD, FURTHEST = 6, 14

COLUMNS = """- bits: of an element on the wire on the way to its owner, headers included: 12.06 where all exponents are
  near the largest of their row of 256, 16.06 where a tile of 1024 goes as it is.
- times: microseconds of one operation in a CUDA graph; each result was compared with `graphar.reference.allreduce`, bit
  for bit, on all ranks. plain: what `auto` takes. In brackets, lossless over plain.
- normal, heavy-tailed, activations: as in `quantized.md`. gradients: the first ones of `perf train`'s transformer, each
  rank's of other text. half zeros: normal, each element zero with probability one half. any bits: each
  pattern from 0 to 2 is as likely as any other."""


def normal_with_zeros(world_size: int, device: torch.device) -> list[Tensor]:
    keep = torch.Generator().manual_seed(1)
    return [x * (torch.rand(x.shape, generator=keep) < 0.5).to(device) for x in data.normal(world_size, device)]


def any_bits(world_size: int, device: torch.device) -> list[Tensor]:
    make = torch.Generator().manual_seed(1)
    bits = [torch.randint(1 << 15, (1 << 18,), dtype=torch.int16, generator=make) for _ in range(world_size)]
    return [(one & ~0x4000).view(torch.bfloat16).to(device) for one in bits]


def gradients(world_size: int, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    model, (xs, ys) = ByteTransformer(), load_bytes().train
    found = []
    for x, y in zip(xs[: 8 * world_size].split(8), ys[: 8 * world_size].split(8), strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).to(device, torch.bfloat16))
    return found


KINDS = data.KINDS | {"gradients": gradients, "half zeros": normal_with_zeros, "any bits": any_bits}


@dataclass(frozen=True)
class LosslessRow:
    """Attributes:
    data: one of KINDS.
    nbytes: of one rank's tensor; 0 where nothing was timed.
    bits: of an element on the wire.
    plain_us, lossless_us: of one all-reduce; None without GPUs.
    """

    data: str
    world_size: int
    nbytes: int
    bits: float
    plain_us: float | None = None
    lossless_us: float | None = None


@dataclass
class Findings:
    """What a run has found so far; ``skipped`` says what was not measured, and why."""

    rows: list[LosslessRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def add(commands) -> argparse.ArgumentParser:
    lossless = commands.add_parser("lossless", help="the all-reduce that packs bf16 without loss, by kinds of data")
    lossless.add_argument("--world-size", type=int, nargs="+", metavar="N", help="default: all GPUs; 4 on the CPU")
    return lossless


def run(options: argparse.Namespace, folder: Path, block: dict[str, object], command: str) -> int:
    """What was measured is written even where a later row fails."""
    on_gpus = block["gpu_count"] >= 2
    world_sizes = options.world_size or [block["gpu_count"] if on_gpus else CPU_WORLD_SIZE]
    check_world_sizes(world_sizes, block["gpu_count"])
    found, total = Findings(), len(world_sizes) * len(KINDS) * (len(SIZES) if on_gpus else 1)

    def report() -> tuple[Path, str]:
        return write(folder, block, found, command), verdict(found.rows)

    with live.reported("lossless", total, found.skipped, report) as advance:
        for row in rows_of(world_sizes, on_gpus):
            advance()
            found.rows.append(row)
    return 0


def rows_of(world_sizes: Sequence[int], on_gpus: bool) -> Iterator[LosslessRow]:
    for world_size in world_sizes:
        if on_gpus:
            yield from timed_rows(world_size)
        else:
            for kind, make in KINDS.items():
                yield LosslessRow(kind, world_size, 0, bits_on_wire(make(world_size, torch.device("cpu"))[0]))


def timed_rows(world_size: int) -> Iterator[LosslessRow]:
    from graphar.cli.timing import Timer

    own = find_table(torch.cuda.get_device_name(0))
    with Timer(world_size) as timer:
        for kind, make in KINDS.items():
            parts = [x.flatten().to(rank) for rank, x in enumerate(make(world_size, torch.device("cpu")))]
            bits = bits_on_wire(parts[0].cpu())
            for nbytes in SIZES:
                xs = [x.repeat(-(-nbytes // x.nbytes))[: nbytes // x.itemsize].contiguous() for x in parts]
                shapes = [
                    measured_shape(own, world_size, nbytes, asked)[0] for asked in (None, Algorithm.TWO_SHOT_LOSSLESS)
                ]
                yield LosslessRow(kind, world_size, nbytes, bits, *timer.measure(nbytes, shapes, xs))


def bits_on_wire(x: Tensor) -> float:
    """Of an element of a bf16 tensor; the rule is cuda_src/device/wire/lossless.cuh's."""
    whole = x.flatten()[: x.numel() // TILE_NUMEL * TILE_NUMEL]
    exponents = (whole.view(torch.int16).int() >> 7 & 0xFF).view(-1, TILE_NUMEL // ROW_NUMEL, ROW_NUMEL)
    far = exponents.amax(-1, keepdim=True) - exponents > FURTHEST
    odd = (far & (exponents > 0)).sum((1, 2))
    nbytes = torch.where(odd > MOST_ODD, 2 * TILE_NUMEL + 8, TILE_NUMEL * 3 // 2 + 8 + 4 * odd)
    return float(nbytes.double().mean()) * 8 / TILE_NUMEL


def write(folder: Path, block: dict[str, object], found: Findings, command: str) -> Path:
    """Both files. Returns the one for people."""
    rows = [asdict(row) for row in found.rows]
    content = {"machine": block, "command": command, "rows": rows, "skipped": found.skipped}
    return files.write(folder, "lossless", content, markdown(block, found, command))


def found_in(content: dict) -> Findings:
    """What :func:`write` was given, from its JSON."""
    return Findings([LosslessRow(**row) for row in content["rows"]], content["skipped"])


def markdown(block: dict[str, object], found: Findings, command: str) -> str:
    rows = found.rows
    parts = ["# All-reduce of bf16 packed without loss", machine.one_line(block) + "."]
    for world_size in dict.fromkeys(row.world_size for row in rows):
        mine = [row for row in rows if row.world_size == world_size]
        parts += [f"## {world_size} ranks", kind_table(mine)]
    if not any(row.nbytes for row in rows):
        parts += ["No times: they need GPUs."]
    if found.skipped:
        parts += ["## Not measured", bullets(found.skipped)]
    parts += ["## Columns", COLUMNS, "## How to reproduce", f"```\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def verdict(rows: Sequence[LosslessRow]) -> str:
    timed = sum(row.nbytes > 0 for row in rows)
    return f"{len(rows)} rows; {timed} timed, every one verified." if timed else f"{len(rows)} rows; no times."


def kind_table(rows: Sequence[LosslessRow]) -> str:
    sizes = [nbytes for nbytes in dict.fromkeys(row.nbytes for row in rows) if nbytes]
    header = ["data", "bits", *(f"{format_nbytes(n)}: {what}" for n in sizes for what in ("plain", "lossless"))]
    lines = []
    for kind in dict.fromkeys(row.data for row in rows):
        mine = {row.nbytes: row for row in rows if row.data == kind}
        cells = [kind, f"{next(iter(mine.values())).bits:.2f}"]
        for row in map(mine.get, sizes):  # None where the run had ended
            timed = row and [f"{row.plain_us:.1f}", f"{row.lossless_us:.1f} ({row.lossless_us / row.plain_us:.2f})"]
            cells += timed or ["-", "-"]
        lines.append(cells)
    return table(header, lines)
