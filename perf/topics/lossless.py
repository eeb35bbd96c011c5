"""`python -m perf lossless`: times collectives with and without lossless bf16 compression, and NCCL's.

The times depend on the data, so several kinds of data are measured. The three methods take turns. All results are
verified on all ranks.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
from numpy import ndarray
from torch import Tensor

import graphar
from graphar import Communicator, UnsupportedError
from graphar.cli.options import size
from graphar.numerics.codecs import TILE_NUMEL
from graphar.numerics.lossless_reference import MOST_ODD, ROWS, odd_elements
from graphar.plan.algorithms import COMPRESSING
from graphar.plan.call import Call
from graphar.plan.policy import LargeCallsPolicy
from graphar.plan.sizes import MB, format_nbytes
from graphar.plan.work import Parts, Sum
from perf.between_ranks import BetweenRanks
from perf.charts import SIZE, Axis, Line, Plot
from perf.harness import collectives
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks
from perf.md import NOT_SERVED, ratio_cell, table, time_table
from perf.models.tasks import ByteTransformer, load_bytes
from perf.peers import catalogue
from perf.ratios import group, of_largest_world, ratio
from perf.report import Arguments, Glance, Result, Section
from perf.topics import quantized
from perf.training_steps import Trainer, loss_of

# Committed reports have compressed reduce-scatters, which are no longer measured.
TITLES = {"allreduce": "All-reduce", "reducescatter": "Reduce-scatter", "allgather": "All-gather"}
METHODS = ("plain", "lossless", "nccl")
SIZES = tuple(8 * MB << step for step in range(9))
STEPS, BATCH_SIZE, LEARNING_RATE = 40, 32, 2e-3  # for training the model whose weights are gathered
ROW_NUMEL = TILE_NUMEL // ROWS


def normal_with_zeros(world_size: int, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        x * (torch.rand(x.shape, generator=generator) < 0.5).to(device) for x in quantized.normal(world_size, device)
    ]


def any_bits(world_size: int, device: torch.device) -> list[Tensor]:
    return [catalogue.any_bits(torch.empty(1 << 18), rank).to(device) for rank in range(world_size)]


def gradients(world_size: int, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    model, (xs, ys) = ByteTransformer(), load_bytes().train
    of_ranks = []
    for x, y in zip(xs[: 8 * world_size].split(8), ys[: 8 * world_size].split(8), strict=True):
        model.zero_grad()
        loss_of(model(x), y).backward()
        of_ranks.append(torch.cat([p.grad.flatten() for p in model.parameters()]).to(device, torch.bfloat16))
    return of_ranks


def weights(world_size: int, device: torch.device) -> list[Tensor]:
    """Returns equal shards of a transformer's weights after some training steps."""
    torch.manual_seed(0)
    model, (xs, ys) = ByteTransformer(), load_bytes().train
    trainer = Trainer(model, LEARNING_RATE)
    count = STEPS * BATCH_SIZE
    for batch in zip(xs[:count].split(BATCH_SIZE), ys[:count].split(BATCH_SIZE), strict=True):
        trainer.step(*batch)
    every = torch.cat([p.detach().flatten() for p in model.parameters()]).to(device, torch.bfloat16)
    share = len(every) // (world_size * TILE_NUMEL) * TILE_NUMEL
    return list(every[: world_size * share].split(share))


KINDS: dict[str, Callable[[int, torch.device], list[Tensor]]] = quantized.KINDS | {
    "gradients": gradients,
    "weights": weights,
    "half zeros": normal_with_zeros,
    "any bits": any_bits,
}


def is_timed(op: str, kind: str) -> bool:
    """Whether an op is timed with this kind of data. Gradients are summed, and weights are gathered."""
    return kind != ("gradients" if op == "allgather" else "weights")


def bits_on_wire(x: Tensor) -> float:
    """Returns the mean bits of a bf16 element on the wire if compression is tried on every tile."""
    odd = odd_elements(whole_tiles(x))
    nbytes = torch.where(odd > MOST_ODD, 2 * TILE_NUMEL + 8, TILE_NUMEL * 3 // 2 + 8 + 4 * odd)
    return float(nbytes.double().mean()) * 8 / TILE_NUMEL


def entropy(x: Tensor) -> float:
    """Returns the entropy of a bf16 element: 8 bits for sign and mantissa, plus the entropy of its exponent.

    The entropy of the exponent is conditional on the largest exponent of its row.
    """
    exponents = (whole_tiles(x).view(torch.int16).long() >> 7 & 0xFF).view(-1, ROW_NUMEL)
    pairs = exponents.amax(1, keepdim=True) << 8 | exponents
    counts = torch.bincount(pairs.flatten(), minlength=1 << 16).view(1 << 8, 1 << 8).double()
    return 8 + entropy_of(counts) - entropy_of(counts.sum(1))


def entropy_of(counts: Tensor) -> float:
    return float(torch.special.entr(counts / counts.sum()).sum()) / math.log(2)


def whole_tiles(x: Tensor) -> Tensor:
    return x.flatten()[: x.numel() // TILE_NUMEL * TILE_NUMEL]


@dataclass(frozen=True)
class LosslessRow:
    """The results of all methods in one case.

    Attributes:
        nbytes: the bytes of the whole tensor: a rank's input of a reduction, or the result of an all-gather. 0 if the
            case was not timed.
        bits: the bits of an element on the wire.
        plain_us, lossless_us, nccl_us: the time of one operation; None if it was not measured.
        entropy: the bits of an element by :func:`entropy`; None in reports that do not have it.
        wrong: the number of wrong elements, summed over all ranks, by method. Methods without any are left out.
    """

    data: str
    world_size: int
    nbytes: int
    bits: float
    plain_us: float | None = None
    lossless_us: float | None = None
    op: str = "allreduce"
    entropy: float | None = None
    nccl_us: float | None = None
    wrong: dict[str, int] = field(default_factory=dict)

    @property
    def what(self) -> tuple[str, ...]:
        return TITLES[self.op].lower(), self.data, format_nbytes(self.nbytes)

    def results(self) -> dict[str, Result]:
        times = {method: getattr(self, f"{method}_us") for method in METHODS}
        return {
            method: Result(method, self.world_size, self.what, {"median": time_us}, self.wrong.get(method, 0))
            for method, time_us in times.items()
            if time_us is not None
        }

    def over(self, method: str) -> float | None:
        """Returns the time with compression / another method's time. None if one of them is missing or wrong."""
        results = self.results()
        return ratio(results.get("lossless"), results.get(method))


def row_of_data(kind: str, parts: Sequence[Tensor]) -> LosslessRow:
    """Returns a row without times. ``parts`` are the ranks' tensors."""
    return LosslessRow(kind, len(parts), 0, bits_on_wire(parts[0]), entropy=entropy(parts[0]))


def run_rank(
    plan: LosslessPlan, rows: Mapping[str, LosslessRow], data: Mapping[str, list[ndarray]], rank: int, port: int
) -> Iterator[LosslessRow | str]:
    """Yields a row for each case.

    Args:
        rows: a row without times for each kind of data.
        data: each rank's data, as bits, for each kind of data.
    """
    ranks = ranks_of.join(rank, plan.world_size, "cuda", port)
    try:
        calls = make_calls(ranks)
    except UnsupportedError as error:
        yield f"times, {plan.world_size} ranks: {error}"
        return
    ranks.warm_up()
    for op, kind, nbytes in plan.cases():
        part = torch.from_numpy(data[kind][rank]).view(torch.bfloat16).to(ranks.device)
        x = collectives.input_of(op, nbytes, part, ranks.size)
        times, wrong = collectives.measure(op, nbytes, x, calls[op], ranks)
        wrong = {method: count for method, count in wrong.items() if count}
        times_us = {f"{method}_us": time_us for method, time_us in times.items()}
        yield replace(rows[kind], op=op, nbytes=nbytes, wrong=wrong, **times_us)
        torch.cuda.empty_cache()  # a graph's memory stays in torch's pool, where the next size cannot use it
    ranks.barrier()


def make_calls(ranks: ProcessRanks) -> dict[str, dict[str, collectives.Call]]:
    """Returns the methods by op. Collective.

    Raises:
        UnsupportedError: graphar's kernels cannot compress here.
    """
    plain, compressing = Communicator(lossless=False), make_compressing(ranks)
    return {
        op: {
            "plain": partial(getattr(graphar, op), group=plain),
            "lossless": partial(getattr(graphar, op), group=compressing),
            "nccl": partial(collectives.call_backend, op),
        }
        for op in COMPRESSING
    }


def make_compressing(ranks: ProcessRanks) -> Communicator:
    """Returns a communicator that compresses bf16 tensors of any size. Collective."""
    made = Communicator(lossless=True)
    x = torch.ones(ranks.size, dtype=torch.bfloat16, device=ranks.device)
    made.explain(x)  # finds the tuning table
    any_size = {ranks.size: 1}
    made.engine.use_table(replace(made.engine.table, lossless=LargeCallsPolicy(any_size, any_size)))
    for op, algorithm in COMPRESSING.items():
        work = Sum(1) if op == "allreduce" else Parts(op, (1,) * ranks.size)
        said = made.engine.explain(Call.of(work, x), x)
        if said.algorithm != algorithm:
            raise UnsupportedError(f"{op}: {said.reason}")
    return made


@dataclass(frozen=True)
class LosslessPlan:
    """The cases to measure with one number of ranks.

    Attributes:
        sizes: the sizes to time; empty on machines without GPUs.
    """

    world_size: int
    sizes: Sequence[int]

    def cases(self) -> Iterator[tuple[str, str, int]]:
        """Yields op, kind of data and size."""
        for op in COMPRESSING:
            for kind in KINDS:
                for nbytes in self.sizes if is_timed(op, kind) else ():
                    yield op, kind, nbytes

    def count(self) -> int:
        return sum(1 for _ in self.cases()) if self.sizes else len(KINDS)

    def measure(self) -> Iterator[LosslessRow | str]:
        made = {kind: make(self.world_size, torch.device("cpu")) for kind, make in KINDS.items()}
        rows = {kind: row_of_data(kind, parts) for kind, parts in made.items()}
        if not self.sizes:
            yield from rows.values()
            return
        # NumPy arrays are pickled. Tensors would be sent in shared memory, which containers limit.
        data = {kind: [x.flatten().view(torch.int16).numpy() for x in parts] for kind, parts in made.items()}
        yield from ranks_of.run(self.world_size, partial(run_rank, self, rows, data))


@dataclass
class Lossless(BetweenRanks):
    rows: list[LosslessRow] = field(default_factory=list)

    cpu_world_size: ClassVar[int] = 4
    order: ClassVar[int] = 3
    arguments: ClassVar[Arguments] = Arguments(quick_on_gpus="--max-nbytes 64M", quick_on_cpu="--world-size 2")

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--max-nbytes", type=size, metavar="SIZE", help="the largest tensor (default: 2G)")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[LosslessPlan]:
        on_gpus = gpu_count >= 2
        world_sizes = cls.world_sizes(options, gpu_count)
        most = (options.max_nbytes or SIZES[-1]) if on_gpus else 0
        return [LosslessPlan(world_size, [nbytes for nbytes in SIZES if nbytes <= most]) for world_size in world_sizes]

    @classmethod
    def count(cls, plan: Sequence[LosslessPlan]) -> int:
        return sum(world_plan.count() for world_plan in plan)

    def measure(self, plan: Sequence[LosslessPlan]) -> Iterator[LosslessRow | str]:
        for world_plan in plan:
            yield from world_plan.measure()

    def verified(self) -> Sequence[Result]:
        return [result for row in self.rows for result in row.results().values()]

    def checked(self) -> int:
        """Returns the number of cases. In each, the results of all methods were verified."""
        return sum(row.nbytes > 0 for row in self.rows)

    def verdict(self) -> str:
        if self.checked() or not self.rows:
            return super().verdict()
        return f"{len(self.rows)} kinds of data; times need GPUs."

    def sections(self) -> list[Section]:
        sections = []
        for (world_size, op), mine in group(self.rows, lambda row: (row.world_size, row.op)).items():
            if not any(row.nbytes for row in mine):
                sections.append(Section(f"{world_size} ranks", [ratio_table(mine, "plain")]))
                continue
            body = ["Bits of an element, and time / plain time (of_plain):", ratio_table(mine, "plain")]
            if any(row.nccl_us for row in mine):
                body += ["Time / NCCL's time (of_nccl):", ratio_table(mine, "nccl")]
            named = {f"{row.data}, {format_nbytes(row.nbytes)}": row.results() for row in mine}
            body += ["Times:", time_table("data, size", named)]
            sections.append(Section(f"{TITLES[op]}, {world_size} ranks", body, [ratio_plot(mine)]))
        return sections

    def glance(self) -> Glance:
        ratios = {
            f"{', '.join(row.what)}, {row.world_size} ranks": over
            for row in self.rows
            if (over := row.over("plain")) is not None
        }
        if not ratios:
            bits = [row.bits for row in self.rows]
            figure = f"{min(bits):.3g} to {max(bits):.3g} bits" if bits else ""
            return Glance("per element, by kind of data; times need GPUs", figure=figure)
        return Glance("time with compression / time without it, by size and kind of data", ratios)

    def figure_of_ratios(self) -> Plot | None:
        """Plots all-reduces of the largest number of ranks."""
        return ratio_plot(of_largest_world([row for row in self.rows if row.op == "allreduce"]))


def ratio_table(rows: Sequence[LosslessRow], method: str) -> str:
    """Returns a table with a row for each kind of data: its bits, and lossless time / ``method``'s time by size."""
    sizes = sorted({row.nbytes for row in rows if row.nbytes})
    has_entropy = any(row.entropy is not None for row in rows)
    header = ["data", *(["entropy"] if has_entropy else []), "bits"]
    header += [f"{format_nbytes(nbytes)}: of_{method}" for nbytes in sizes]
    lines = []
    for kind, mine in group(rows, lambda row: row.data).items():
        first, by_size = mine[0], {row.nbytes: row for row in mine}
        entropies = [NOT_SERVED if first.entropy is None else f"{first.entropy:.2f}"] if has_entropy else []
        ratios = [by_size[nbytes].over(method) if nbytes in by_size else None for nbytes in sizes]
        lines.append([kind, *entropies, f"{first.bits:.2f}", *map(ratio_cell, ratios)])
    return table(header, lines)


def ratio_plot(rows: Sequence[LosslessRow]) -> Plot | None:
    """Plots lossless time / plain time. There is a line for each kind of data. ``rows`` belong to one op."""
    lines = []
    for kind, mine in group(rows, lambda row: row.data).items():
        points = [(row, over) for row in mine if (over := row.over("plain")) is not None]
        if points:
            lines.append(Line(kind, [(row.nbytes, over) for row, over in points]))
    axis = Axis("time / plain time", form="{:.2f}".format)
    return Plot("Time / plain time, by kind of data", lines, SIZE, axis, 1.0) if lines else None
