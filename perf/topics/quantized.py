"""`python -m perf quantized`: measures the errors of codecs, and the times of all-reduces with them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from graphar import reference
from graphar.cli.options import size
from graphar.numerics.codecs import NAMES, Codec, codec
from graphar.plan.sizes import GB, KB, MB, format_nbytes
from perf.between_ranks import BetweenRanks
from perf.charts import SIZE, Axis, Line, Plot
from perf.harness import sweep
from perf.harness.cases import SIZES, LinkCeiling, Row, SizesPlan
from perf.md import columns, ratio_cell, table, time_table
from perf.peers.catalogue import CODEC_METHODS
from perf.ratios import best_peer, by_method, geometric_mean, group, ratio, words_for
from perf.report import Arguments, Glance, Section
from perf.topics.allreduce import add_sizes, named_sizes

MIN_NBYTES = 256 * KB
LARGE_NBYTES = 16 * MB  # from this size on, the time is limited by bandwidth and not by latency
CODEC_PREFIX = "graphar_"
PEER = "flashinfer_fp8"
DRAWN = ("graphar_int8", "graphar_int6", "graphar_int4", "graphar_int2", PEER)

DTYPE = torch.bfloat16
TOKENS, HIDDEN, HEADS, FFN = 256, 1024, 16, 2816  # the shapes of the data for the errors


def normal(world_size: int, device: torch.device) -> list[Tensor]:
    """Returns independent normal data of variance 1."""
    return [torch.randn(TOKENS, HIDDEN, generator=_generator(rank)).to(device, DTYPE) for rank in range(world_size)]


def heavy_tailed(world_size: int, device: torch.device) -> list[Tensor]:
    """Returns Student's t data with 3 degrees of freedom. One element in 1000 is beyond 7 standard deviations."""
    return [_student(rank).to(device, DTYPE) for rank in range(world_size)]


def activations(world_size: int, device: torch.device) -> list[Tensor]:
    """Returns the partial sums that the ranks of a tensor-parallel Llama block all-reduce after its down projection.

    The block has random weights: RMSNorm, causal attention, RMSNorm, SwiGLU. Its input is source text of the Python
    standard library, with random embeddings. The down projection is row-parallel.
    """
    text = Path(os.__file__).read_bytes()[:TOKENS]
    generator = _generator(0)

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    x = torch.randn(256, HIDDEN, generator=generator)[torch.tensor(list(text))]
    q, k, v = (
        (_norm(x) @ weight(HIDDEN, HIDDEN).T).view(TOKENS, HEADS, -1).transpose(0, 1).unsqueeze(0) for _ in "qkv"
    )
    attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)
    x = x + attended @ weight(HIDDEN, HIDDEN).T
    inner = nn.functional.silu(_norm(x) @ weight(FFN, HIDDEN).T) * (_norm(x) @ weight(FFN, HIDDEN).T)
    down = weight(HIDDEN, FFN)
    shares = zip(inner.tensor_split(world_size, 1), down.tensor_split(world_size, 1), strict=True)
    return [(part @ columns.T).to(device, DTYPE) for part, columns in shares]


KINDS: dict[str, Callable[[int, torch.device], list[Tensor]]] = {
    "normal": normal,
    "heavy-tailed": heavy_tailed,
    "activations": activations,
}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _student(seed: int) -> Tensor:
    generator = _generator(seed)
    chi_square = sum(torch.randn(TOKENS, HIDDEN, generator=generator).square() for _ in range(3))
    return torch.randn(TOKENS, HIDDEN, generator=generator) * (chi_square / 3).rsqrt()


def _norm(x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (HIDDEN,))


@dataclass(frozen=True)
class ErrorRow:
    """The error of one codec on one kind of data.

    Attributes:
        codec: the codec's text. "exact" is the all-reduce without a codec, which rounds the sum to bfloat16 once.
        bits: the bits of an element on the wire.
        relative_l2: the Euclidean norm of the error / the norm of the exact sum.
        relative_max: the largest error / the largest magnitude of the exact sum.
        cosine: the cosine of the angle between the result and the exact sum.
    """

    codec: str
    data: str
    world_size: int
    bits: float
    relative_l2: float
    relative_max: float
    cosine: float


def error_rows(codecs: Sequence[Codec], world_size: int, device: torch.device) -> Iterator[ErrorRow]:
    """Yields the errors of every codec and kind of data.

    ``graphar.reference`` computes the results, because the kernels give the same bits.
    """
    for name, make in KINDS.items():
        parts = make(world_size, device)
        exact = torch.stack(parts).double().sum(0)
        yield ErrorRow("exact", name, world_size, 8.0 * parts[0].itemsize, *errors(reference.allreduce(parts), exact))
        for coder in codecs:
            result = reference.quantized_allreduce(parts, coder)
            yield ErrorRow(coder.text, name, world_size, coder.bits_per_element, *errors(result, exact))


def errors(result: Tensor, exact: Tensor) -> tuple[float, float, float]:
    result = result.double()
    error, length = result - exact, exact.norm()
    return (
        (error.norm() / length).item(),
        (error.abs().max() / exact.abs().max()).item(),
        (result.flatten() @ exact.flatten() / (result.norm() * length)).item(),
    )


@dataclass
class Quantized(BetweenRanks):
    """The errors and times of codecs. ``times`` is empty on machines without GPUs."""

    errors: list[ErrorRow] = field(default_factory=list)
    times: list[Row] = field(default_factory=list)

    cpu_world_size: ClassVar[int] = 4
    order: ClassVar[int] = 2
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--max-nbytes 256M", quick_on_gpus="--max-nbytes 16M", quick_on_cpu="--world-size 2"
    )
    has_spread: ClassVar[bool] = True

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--max-nbytes", type=size, metavar="SIZE", help="the largest tensor (default: 1G)")
        add_sizes(parser)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[SizesPlan]:
        """Returns one plan for each world size. Times are measured on GPUs, or where sizes are named."""
        device, plain = ("cuda", ("nccl", "graphar", PEER)) if gpu_count >= 2 else ("cpu", ("gloo", "graphar"))
        named, largest = named_sizes(options, DTYPE.itemsize), options.max_nbytes or GB
        sizes = named or tuple(nbytes for nbytes in SIZES if MIN_NBYTES <= nbytes <= largest)
        methods = (*plain, *CODEC_METHODS) if named or device == "cuda" else ()
        what = "process", ("bfloat16",), methods, max(sizes, default=0)
        return [
            SizesPlan(device, world_size, *what, full=False, sizes=sizes)
            for world_size in cls.world_sizes(options, gpu_count)
        ]

    @classmethod
    def count(cls, plan: Sequence[SizesPlan]) -> int:
        return sum(len(KINDS) * (len(NAMES) + 1) + world_plan.row_count() for world_plan in plan)

    def measure(self, plan: Sequence[SizesPlan]) -> Iterator[ErrorRow | Row | str]:
        codecs = [codec(name) for name in NAMES]
        for world_plan in plan:
            yield from error_rows(codecs, world_plan.world_size, torch.device(world_plan.device))
            for message in sweep.run(world_plan) if world_plan.methods else ():
                if not isinstance(message, LinkCeiling):
                    yield message

    def verified(self) -> Sequence[Row]:
        return self.times

    def where(self, row: Row) -> str:
        return format_nbytes(row.nbytes)

    def verdict(self) -> str:
        if self.times or not self.errors:
            return super().verdict()
        return f"{len(self.errors)} errors were measured; times need GPUs."

    def sections(self) -> list[Section]:
        sections = [Section("", [], [error_plot(self)])] if self.errors else []
        for world_size, mine in group(self.times, lambda row: row.world_size).items():
            cases = by_method(mine, lambda row: row.nbytes)
            named = {format_nbytes(nbytes): rows for nbytes, rows in cases.items()}
            body = [time_table("size", named), "Time / the best peer's time (of_best_peer):", ratio_table(named)]
            sections.append(Section(f"Times, {world_size} ranks", body))
        for world_size, mine in group(self.errors, lambda row: row.world_size).items():
            sections.append(Section(f"Errors, {world_size} ranks", [error_table(mine)]))
        return sections

    def glance(self) -> Glance:
        """Returns a summary. It has the geometric mean of each codec's ratios at large sizes."""
        errors = {row.codec: row.relative_l2 for row in self.errors if row.data == "normal"}
        told = ", ".join(f"{name} {errors[name]:.2g}" for name in ("int8", "int4") if name in errors)
        of_errors = f"relative errors of normal data: {told}" if told else ""
        world_size = max((row.world_size for row in self.times), default=0)
        ratios = mean_ratios(self.times, world_size)
        ratios.pop("exact", None)
        if not ratios:
            return Glance(f"{of_errors or 'no errors'}; times need GPUs", figure="errors only")
        over = words_for([row.method for row in self.times if row.is_peer])
        words = f"time with a codec / the time of {over}, from 16 MB up, by codec, {world_size} ranks; {of_errors}"
        return Glance(words.removesuffix("; "), ratios)

    def timed(self) -> Sequence[Row]:
        return self.times

    def figure_of_errors(self) -> Plot:
        """Plots error against bits."""
        return error_plot(replace(self, times=[]))

    def figure_of_times(self) -> Plot:
        """Plots the time with each codec / the time of the exact all-reduce."""
        cases, lines = by_method(self.times, lambda row: row.nbytes), []
        for name in DRAWN:
            ratios = {nbytes: ratio(rows.get(name), rows.get("graphar")) for nbytes, rows in cases.items()}
            points = [(nbytes, value) for nbytes, value in ratios.items() if value]
            lines.append(Line(name.removeprefix(CODEC_PREFIX), points))
        axis = Axis("time / exact time", form="{:.2f}".format)
        return Plot("Time / exact all-reduce's time, by codec", lines, SIZE, axis, 1.0)


def ratio_table(cases: Mapping[str, Mapping[str, Row]]) -> str:
    """Returns a table of time / best peer's time. It has a row for each size and a column for each method."""

    def cell(case: str, name: str) -> str:
        return ratio_cell(ratio(cases[case].get(name), best_peer(cases[case].values())))

    methods = dict.fromkeys(name for rows in cases.values() for name in rows if name not in ("nccl", "gloo"))
    return columns(cases, {"size": str, **{name: partial(cell, name=name) for name in methods}})


def error_table(rows: Sequence[ErrorRow]) -> str:
    kinds = list(dict.fromkeys(row.data for row in rows))
    header = ["codec", "bits"]
    header += [f"{kind}: {what}" for kind in kinds for what in ("relative L2", "relative max", "1 - cosine")]
    lines = []
    for name in dict.fromkeys(row.codec for row in rows):
        mine = {row.data: row for row in rows if row.codec == name}
        cells = [name, f"{next(iter(mine.values())).bits:g}"]
        for kind in kinds:
            row = mine[kind]
            cells += [f"{row.relative_l2:.2e}", f"{row.relative_max:.2e}", f"{1 - row.cosine:.1e}"]
        lines.append(cells)
    return table(header, lines)


def mean_ratios(times: Sequence[Row], world_size: int) -> dict[str, float]:
    """Returns for each codec the geometric mean of time / best peer's time over large sizes."""
    mine = [row for row in times if row.world_size == world_size and row.nbytes >= LARGE_NBYTES]
    cases = by_method(mine, lambda row: row.nbytes).values()
    means = {}
    for method in dict.fromkeys(row.method for row in mine if row.is_own):
        ratios = [value for rows in cases if (value := ratio(rows.get(method), best_peer(rows.values())))]
        if ratios:
            means["exact" if method == "graphar" else method.removeprefix(CODEC_PREFIX)] = geometric_mean(ratios)
    return means


def error_plot(report: Quantized) -> Plot:
    """Plots error against time, with a line for each kind of data. Without times it plots error against bits."""
    world_size = max(row.world_size for row in report.errors)
    ratios = mean_ratios(report.times, world_size)
    x_of = {row.codec: ratios.get(row.codec) if ratios else row.bits for row in report.errors}
    lines = []
    for data in dict.fromkeys(row.data for row in report.errors):
        mine = [row for row in report.errors if (row.world_size, row.data) == (world_size, data) and x_of[row.codec]]
        mine.sort(key=lambda row: x_of[row.codec])
        points = [(x_of[row.codec], row.relative_l2) for row in mine]
        lines.append(Line(data, points))
    label = "time / best peer's, from 16 MB up" if ratios else "bits of an element on the wire"
    return Plot(f"Errors of codecs, {world_size} ranks", lines, Axis(label), Axis("relative L2 error", 10))
