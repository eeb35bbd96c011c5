"""`python -m perf slow_links`: times all-reduces and training steps between hosts with slow links."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist

import graphar
from graphar import reference
from graphar.cli.options import size
from graphar.numerics.codecs import Codec
from graphar.plan.sizes import MB, format_nbytes
from perf import training_steps
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks
from perf.harness.slow_network import join, slow_network, why_not
from perf.harness.timing import spread, time_in_turn
from perf.harness.verify import differs
from perf.md import columns, ratio_cell, table
from perf.models.tasks import residual_network
from perf.models.workloads import Decoder, Workload
from perf.ratios import group, ratio
from perf.report import Arguments, Glance, Report, Section, Spread, Timing
from perf.topics.throughput import Reduction, trainer_with

GLOO, EXACT = "gloo", "exact"
CODECS = ("int8", "int6", "int5", "int4", "int2")
BITS, BUCKET_SIZE = (8, 6, 5, 4, 2), 512
RATES, SIZES = ("1gbit", "100mbit"), (1 * MB, 8 * MB, 32 * MB, 64 * MB)
MOST_SECONDS = 4.0  # of an all-reduce of gloo at a rate; larger sizes are left out
REPEATS, STEPS = 3, 3
MODELS = {
    one.name: one
    for one in (
        Workload("resnet", "", partial(residual_network, (192, 384)), (1, 8, 8), 10, 4),
        Workload("transformer", "", partial(Decoder, 4096, 64, layers=3), (64,), 4096, 1),
    )
}


@dataclass(frozen=True)
class SlowRow(Timing):
    """An all-reduce, or a training step of a model.

    Attributes:
        rate: the rate of the links, in the words of tc(8).
        case: the bytes of the all-reduce, or the model, in words.
        samples: the samples of a step on all ranks; 0 for an all-reduce.
        loss: the loss after the last step; None for an all-reduce.
    """

    method: str
    world_size: int
    rate: str
    case: str
    samples: int
    time_us: Spread
    wrong: int
    loss: float | None

    @property
    def what(self) -> tuple[str, ...]:
        return self.rate, self.case

    @property
    def is_own(self) -> bool:
        return self.method != GLOO


@dataclass(frozen=True)
class SlowPlan:
    world_sizes: tuple[int, ...]
    rates: tuple[str, ...]
    sizes: tuple[int, ...]
    models: tuple[str, ...]
    repeats: int


def run_rank(plan: SlowPlan, rate: str, hosts: list[int], rank: int, port: int) -> Iterator[SlowRow]:
    ranks = join(rank, hosts, port)
    for nbytes in plan.sizes:
        if nbytes * 8 <= MOST_SECONDS * bits_a_second(rate):
            yield from sums(nbytes, rate, plan.repeats, ranks)
    for name in plan.models:
        yield from steps(MODELS[name], rate, plan.repeats, ranks)


def sums(nbytes: int, rate: str, repeats: int, ranks: ProcessRanks) -> Iterator[SlowRow]:
    inputs = [torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks.size)]
    x = torch.empty_like(inputs[0])
    methods: dict[str, Callable[[], object]] = {
        GLOO: partial(dist.all_reduce, x),
        EXACT: partial(graphar.allreduce, x, out=x),
    }
    methods |= {name: partial(graphar.allreduce, x, codec=name, out=x) for name in CODECS}
    refill, wrong = partial(x.copy_, inputs[ranks.rank]), {}
    for name, call in methods.items():
        refill()
        call()
        if ranks.rank == 0 and name != GLOO:
            expected = reference.allreduce(inputs) if name == EXACT else reference.quantized_allreduce(inputs, name)
            wrong[name] = int(differs(x, expected).sum())
    yield from rows(methods, [refill] * len(methods), wrong, rate, format_nbytes(nbytes), repeats, ranks)


def steps(model: Workload, rate: str, repeats: int, ranks: ProcessRanks) -> Iterator[SlowRow]:
    torch.manual_seed(0)
    made, batch = model.make(), model.batch(model.batch_size, ranks.device, seed=ranks.rank)
    reductions = [Reduction(GLOO), Reduction("graphar")]
    reductions += [Reduction("graphar", Codec(bits, BUCKET_SIZE).text) for bits in BITS]
    trainers = {str(reduction): trainer_with(reduction, made) for reduction in reductions}
    for trainer in trainers.values():
        trainer.make_steps(batch, training_steps.WARM_UP_STEPS, seed=0)
    calls = {name: partial(trainer.make_steps, batch, 1, seed=1) for name, trainer in trainers.items()}
    parameters = sum(parameter.numel() for parameter in made.parameters())
    case = f"{model.name}, {parameters / 1e6:.1f} M parameters"
    timed = list(rows(calls, [], {}, rate, case, repeats, ranks))
    for row, trainer in zip(timed, trainers.values(), strict=True):
        wrong = int(not training_steps.same_on_all_ranks(trainer.model))
        yield replace(row, samples=model.batch_size * ranks.size, wrong=wrong, loss=trainer.mean_loss())


def rows(
    calls: dict[str, Callable[[], object]],
    refills: Sequence[Callable[[], object]],
    wrong: dict[str, int],
    rate: str,
    case: str,
    repeats: int,
    ranks: ProcessRanks,
) -> Iterator[SlowRow]:
    """Yields a row for each call. Collective."""
    mine = time_in_turn(list(calls.values()), repeats, partial(ranks.time_us, mode="cpu"), refills)
    for name, times in zip(calls, ranks.slowest(mine), strict=True):
        yield SlowRow(name, ranks.size, rate, case, 0, spread(times), wrong.get(name, 0), None)


def bits_a_second(rate: str) -> float:
    units = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
    found = next((unit for unit in units if rate.endswith(unit) and rate.removesuffix(unit).isdecimal()), None)
    return int(rate.removesuffix(found)) * units[found] if found else sys.exit(f"--rates: not a rate: {rate}")


@dataclass
class SlowLinks(Report):
    rows: list[SlowRow] = field(default_factory=list)

    order: ClassVar[int] = 21
    # A run of all topics skips this one: it takes ten minutes, and needs root.
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus=None, on_cpu=None, quick_on_gpus="--sizes 1M --models", quick_on_cpu="--sizes 1M --models"
    )
    has_spread: ClassVar[bool] = True

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--world-size", type=int, nargs="+", metavar="N", default=[2, 4], help="ranks (default: 2 4)"
        )
        parser.add_argument("--rates", nargs="+", default=RATES, metavar="RATE", help="rates of links, such as 10gbit")
        parser.add_argument("--sizes", type=size, nargs="*", default=SIZES, metavar="SIZE", help="bytes of fp32 sums")
        parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS), help="models to train")
        parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help="timed calls and steps of each")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> SlowPlan:
        for rate in options.rates:
            bits_a_second(rate)
        if min(options.world_size) < 2 or options.repeats < 1:
            sys.exit("--world-size must be at least 2, and --repeats at least 1")
        chosen = (options.world_size, options.rates, options.sizes, options.models)
        return SlowPlan(*map(tuple, chosen), options.repeats)

    def measure(self, plan: SlowPlan) -> Iterator[SlowRow | str]:
        if reason := why_not():
            yield f"slow links: {reason}"
            return
        for world_size in plan.world_sizes:
            for rate in plan.rates:
                with slow_network(world_size, rate) as hosts:
                    yield from ranks_of.run(world_size, partial(run_rank, plan, rate, hosts))

    def sections(self) -> list[Section]:
        found = []
        for (world_size, rate), mine in group(self.rows, lambda row: (row.world_size, row.rate)).items():
            where = f"{world_size} ranks, {rate}/s"
            if all_reduces := [row for row in mine if not row.samples]:
                found.append(Section(f"All-reduces, {where}", [sum_table(all_reduces)]))
            for case, rows in group([row for row in mine if row.samples], lambda row: row.case).items():
                found.append(Section(f"Training steps of {case}, {where}", [step_table(rows)]))
        return found

    def glance(self) -> Glance:
        last = [row for row in self.rows if not row.samples]
        ratios = {}
        for (world_size, rate), mine in group(last, lambda row: (row.world_size, row.rate)).items():
            rows = {row.method: row for row in mine if row.case == mine[-1].case}
            if one := ratio(rows.get("int4"), rows.get(GLOO)):
                ratios[f"{mine[-1].case}, {world_size} ranks, {rate}/s"] = one
        return Glance("time of the largest all-reduce with int4 / with gloo", ratios, "not timed")


def sum_table(rows: Sequence[SlowRow]) -> str:
    """Returns a table of milliseconds, each with its ratio to gloo's: a row for each size."""
    cases = {case: {row.method: row for row in mine} for case, mine in group(rows, lambda row: row.case).items()}
    lines = []
    for case, found in cases.items():
        cells = [f"{ms(row)} ({ratio_cell(ratio(row, found.get(GLOO)))})" for row in found.values()]
        lines.append([case, *cells])
    methods = next(iter(cases.values()))
    return table(["size", *(f"{name} (ms, of_gloo)" for name in methods)], lines)


def step_table(rows: Sequence[SlowRow]) -> str:
    """Returns the table of one model's steps, in the columns of QNCCL's tables."""
    gloo = next((row for row in rows if row.method == GLOO), None)
    cells = {
        "gradients": lambda row: row.method,
        "step (ms)": ms,
        "samples/s": lambda row: f"{row.samples / row.median * 1e6:.2f}",
        "speed-up": lambda row: ratio_cell(gloo and ratio(gloo, row)),
        "of_gloo": lambda row: ratio_cell(ratio(row, gloo)),
        "loss (nats)": lambda row: f"{row.loss:.3f}",
    }
    return columns(rows, cells)


def ms(row: SlowRow) -> str:
    return f"{row.median / 1e3:.0f}" + (" **(WRONG)**" if row.wrong else "")
