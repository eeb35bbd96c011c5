"""`python -m perf lossless`: the all-reduce with lossless bf16 compression and the plain one, by kind of data."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from graphar.numerics.codecs import TILE_NUMEL
from graphar.numerics.lossless_reference import MOST_ODD, odd_elements
from graphar.plan.algorithms import Algorithm
from graphar.plan.select import measured_shape
from graphar.plan.sizes import GB, MB, format_nbytes
from graphar.runtime.user_tables import find_table
from perf.charts import Axis, Line, Plot
from perf.machine import check_world_sizes
from perf.models.tasks import ByteTransformer, load_bytes
from perf.peers import catalogue
from perf.report import NOT_SERVED, Arguments, Glance, Report, Section, Timed, Timing, number, ratio_cell, table
from perf.topics import quantized
from perf.topics.allreduce import SIZE

SIZES = (16 * MB, 64 * MB, 256 * MB, GB)
CPU_WORLD_SIZE = 4


# ---- data -----------------------------------------------------------------------------------------------------------


def normal_with_zeros(world_size: int, device: torch.device) -> list[Tensor]:
    keep = torch.Generator().manual_seed(1)
    return [x * (torch.rand(x.shape, generator=keep) < 0.5).to(device) for x in quantized.normal(world_size, device)]


def any_bits(world_size: int, device: torch.device) -> list[Tensor]:
    return [catalogue.any_bits(torch.empty(1 << 18), rank).to(device) for rank in range(world_size)]


def gradients(world_size: int, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    model, (xs, ys) = ByteTransformer(), load_bytes().train
    found = []
    for x, y in zip(xs[: 8 * world_size].split(8), ys[: 8 * world_size].split(8), strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).to(device, torch.bfloat16))
    return found


KINDS = quantized.KINDS | {"gradients": gradients, "half zeros": normal_with_zeros, "any bits": any_bits}


# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LosslessRow:
    """Attributes:
    data: the kind of data, one of KINDS.
    nbytes: the bytes of one rank's tensor; 0 if nothing was timed.
    bits: the bits of an element on the wire.
    plain_us, lossless_us: the time of one all-reduce; None without GPUs.
    """

    data: str
    world_size: int
    nbytes: int
    bits: float
    plain_us: float | None = None
    lossless_us: float | None = None

    @property
    def ratio(self) -> float:
        return self.lossless_us / self.plain_us


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
    """Returns the mean bits of a bf16 element on the wire if every tile is tried."""
    odd = odd_elements(x.flatten()[: x.numel() // TILE_NUMEL * TILE_NUMEL])
    nbytes = torch.where(odd > MOST_ODD, 2 * TILE_NUMEL + 8, TILE_NUMEL * 3 // 2 + 8 + 4 * odd)
    return float(nbytes.double().mean()) * 8 / TILE_NUMEL


# ---- the topic ------------------------------------------------------------------------------------------------------


@dataclass
class Lossless(Report):
    rows: list[LosslessRow] = field(default_factory=list)

    name: ClassVar[str] = "lossless"
    title: ClassVar[str] = "Lossless bf16 compression"
    place: ClassVar[int] = 3
    help: ClassVar[str] = "time lossless compressed all-reduce of bf16 for several kinds of data"
    arguments: ClassVar[Arguments] = Arguments(quick_on_cpu="--world-size 2")
    notes: ClassVar[str] = """\
- bits: the mean bits per element, headers included, that a rank sends to the rank that sums the element. It is 12.06 if
  all exponents are near the largest of their row of 256 elements, and 16.06 if all tiles of 1024 elements are sent
  uncompressed.
- times: microseconds of one operation in a CUDA graph. lossless: `two_shot_lossless`. plain: the algorithm that `auto`
  chooses with `Communicator(lossless=False)`. Each result was compared with `graphar.reference.allreduce`, bit for bit,
  on all ranks. A wrong result ends the run.
- of_plain: the lossless time / the plain time; below 1.00 compression is faster.

Data:

- normal, heavy-tailed, activations: as in `quantized.md`.
- gradients: the first gradients of the transformer of `python -m perf train`. Each rank has a different text.
- half zeros: normal data, with each element set to zero with probability 1/2.
- any bits: all bit patterns of the values from 0 to 2 are equally likely."""

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--world-size", type=int, nargs="+", metavar="N", help="ranks (default: all GPUs; 4 on the CPU)"
        )

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> tuple[Sequence[int], bool]:
        """Returns the world sizes, and whether their ranks are GPUs."""
        on_gpus = gpu_count >= 2
        world_sizes = options.world_size or [gpu_count if on_gpus else CPU_WORLD_SIZE]
        check_world_sizes(world_sizes, gpu_count)
        return world_sizes, on_gpus

    @classmethod
    def count(cls, plan: tuple[Sequence[int], bool]) -> int:
        world_sizes, on_gpus = plan
        return len(world_sizes) * len(KINDS) * (len(SIZES) if on_gpus else 1)

    def measure(self, plan: tuple[Sequence[int], bool]) -> Iterator[LosslessRow]:
        yield from rows_of(*plan)

    # ---- what is said ----

    def verified(self) -> Sequence[Timing]:
        """Returns no rows: a wrong result ends the run."""
        return []

    def checked(self) -> int:
        return sum(row.nbytes > 0 for row in self.rows)

    def verdict(self) -> str:
        if self.checked() or not self.rows:
            return super().verdict()
        return f"{len(self.rows)} kinds of data; times need GPUs."

    def sections(self) -> list[Section]:
        found = []
        for world_size in dict.fromkeys(row.world_size for row in self.rows):
            mine = [row for row in self.rows if row.world_size == world_size]
            found.append(Section(f"{world_size} ranks", [kind_table(mine)], [ratio_plot(mine)]))
        return found

    def glance(self) -> Glance:
        ratios = {
            f"{row.data}, {format_nbytes(row.nbytes)}, {row.world_size} ranks": row.ratio
            for row in self.rows
            if row.nbytes
        }
        if not ratios:
            bits = [row.bits for row in self.rows]
            figure = f"{min(bits):.3g} to {max(bits):.3g} bits" if bits else ""
            return Glance("per element, by kind of data; times need GPUs", figure=figure)
        return Glance("time with compression / time without it, by size and kind of data", ratios)

    def timed(self) -> list[Timed]:
        return [
            Timed((which, f"{row.world_size} ranks", row.data, format_nbytes(row.nbytes)), time_us, False, True)
            for row in self.rows
            if row.nbytes
            for which, time_us in (("plain", row.plain_us), ("lossless", row.lossless_us))
        ]


def kind_table(rows: Sequence[LosslessRow]) -> str:
    """Returns a table with a row a kind of data: for each size both times and their ratio."""
    sizes = [nbytes for nbytes in dict.fromkeys(row.nbytes for row in rows) if nbytes]
    whats = ("plain (us)", "lossless (us)", "of_plain")
    header = ["data", "bits", *(f"{format_nbytes(nbytes)}: {what}" for nbytes in sizes for what in whats)]
    lines = []
    for kind in dict.fromkeys(row.data for row in rows):
        mine = {row.nbytes: row for row in rows if row.data == kind}
        cells = [kind, f"{next(iter(mine.values())).bits:.2f}"]
        for row in map(mine.get, sizes):  # None if the run ended earlier
            cells += [number(row.plain_us), number(row.lossless_us), ratio_cell(row.ratio)] if row else [NOT_SERVED] * 3
        lines.append(cells)
    return table(header, lines)


def ratio_plot(rows: Sequence[LosslessRow]) -> Plot | None:
    """Plots a line for each kind of data."""
    lines = []
    for kind in dict.fromkeys(row.data for row in rows if row.nbytes):
        mine = [row for row in rows if row.data == kind]
        hints = [f"{row.bits:.2f} bits: {row.lossless_us:.1f} us, plain {row.plain_us:.1f} us" for row in mine]
        lines.append(Line(kind, [(row.nbytes, row.ratio) for row in mine], hints))
    axis = Axis("time / plain time", form="{:.2f}".format)
    return Plot("Time / plain time, by kind of data", lines, SIZE, axis, [(1.0, "plain")]) if lines else None
