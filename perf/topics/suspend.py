"""`python -m perf suspend`: suspends and resumes communicators between replays of a captured decoder step."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import graphar
from graphar.errors import UnsupportedError
from graphar.plan.sizes import MB, format_nbytes
from perf.between_ranks import BetweenRanks
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks, first_line, host_time_us
from perf.harness.timing import Repeated, deciles, spread, time_in_turn
from perf.harness.verify import differs
from perf.md import NOT_SERVED, columns, plural
from perf.models import decoder as decoding
from perf.ratios import group
from perf.report import Arguments, Deciles, Glance, Result, Section, Spread

SIZE, LAYERS, CYCLES = "llama-3-70b", 4, 11
REPLAYS = 3  # after each resumption. Scratch has two or more copies of its slots, which calls use in turn.
OVERWRITTEN = 7.0  # what the result holds before each replay
CALLS = ("suspend", "resume", "step after")  # what is timed
NEEDED = "suspend and resume: needs at least 2 GPUs"


class SuspendCase(NamedTuple):
    """A decoder step, and the size of the symmetric tensor that is kept over each suspension; 0: there is none."""

    step: decoding.Case
    kept_nbytes: int = 0

    @property
    def words(self) -> str:
        return words_of(self.step.phase, self.step.tokens, self.kept_nbytes)


CASES = (
    SuspendCase(decoding.Case(decoding.DECODE, 8, decoding.CONTEXT)),
    SuspendCase(decoding.Case(decoding.PREFILL, 8192, 8192)),
    SuspendCase(decoding.Case(decoding.PREFILL, 8192, 8192), 256 * MB),
)


@dataclass(frozen=True)
class SuspendRow:
    """What suspensions and resumptions of one case took, gave back and changed.

    Attributes:
        scratch: the bytes of scratch, by algorithm.
        symmetric_nbytes: the bytes of symmetric tensors, whose content was kept.
        freed_nbytes: a GPU's free memory while suspended minus that before; the least over all cycles and ranks.
        grown_nbytes: a GPU's free memory before a suspension minus that after the resumption; the most over them.
        suspend_us, resume_us: the time of a call on the slowest rank: median, p10 and p90 over the cycles.
        first_suspend_us, first_resume_us: the time in the first cycle.
        before_us, after_us: the time of a step before the first suspension, and after the last resumption: median, p10
            and p99 over the repeats. Each repeat has the time of the slowest rank.
        wrong: the elements of results, and the bytes of symmetric tensors, that differ from those before the first
            suspension, summed over all replays, cycles and ranks.
    """

    method: ClassVar[str] = "graphar"
    is_own: ClassVar[bool] = True
    world_size: int
    size: str
    layers: int
    phase: str
    tokens: int
    cycles: int
    scratch: dict[str, int]
    symmetric_nbytes: int
    freed_nbytes: int
    grown_nbytes: int
    suspend_us: Deciles
    first_suspend_us: float
    resume_us: Deciles
    first_resume_us: float
    before_us: Spread
    after_us: Spread
    wrong: int

    @property
    def words(self) -> str:
        return words_of(self.phase, self.tokens, self.symmetric_nbytes)

    @property
    def what(self) -> tuple[str, ...]:
        return f"{plural(self.layers, 'layer')} of {self.size}", self.words

    @property
    def scratch_nbytes(self) -> int:
        return sum(self.scratch.values())

    @property
    def held_nbytes(self) -> int:
        """The bytes that a suspension is to give back."""
        return self.scratch_nbytes + self.symmetric_nbytes

    @property
    def freed_share(self) -> float:
        return self.freed_nbytes / self.held_nbytes

    @property
    def slowdown(self) -> float:
        """The time of a step after the last resumption / its time before the first suspension."""
        return self.after_us["median"] / self.before_us["median"]


@dataclass(frozen=True)
class SuspendPlan:
    """The cases to measure with one number of ranks. ``size`` is a name in perf.models.decoder.SIZES."""

    world_size: int
    cycles: int
    size: str = SIZE
    layers: int = LAYERS
    cases: Sequence[SuspendCase] = CASES


def words_of(phase: str, tokens: int, kept_nbytes: int) -> str:
    kept = f", {format_nbytes(kept_nbytes)} kept" if kept_nbytes else ""
    return f"{phase} of {plural(tokens, 'token')}{kept}"


def run_rank(plan: SuspendPlan, rank: int, port: int) -> Iterator[SuspendRow | str]:
    ranks = ranks_of.join(rank, plan.world_size, "cuda", port)
    shard = decoding.Shard(ranks.rank, ranks.size, ranks.device)
    decoder = decoding.make_decoder(decoding.SIZES[plan.size], plan.layers, shard)
    for case in plan.cases:
        with graphar.Communicator() as communicator:  # so that all scratch is this case's
            try:
                yield row_of(plan, case, Step(decoder, case.step, shard, communicator), ranks)
            except UnsupportedError as error:  # on every rank
                yield f"{plural(ranks.size, 'rank')}, {case.words}: {first_line(error)}"
        torch.cuda.empty_cache()  # a graph's memory stays in torch's pool, where the next case cannot use it
    ranks.barrier()


class Step(Repeated):
    """A step of the decoder behind a vocabulary-parallel embedding. A launch replays one."""

    def __init__(
        self, decoder: decoding.Decoder, case: decoding.Case, shard: decoding.Shard, communicator: graphar.Communicator
    ) -> None:
        super().__init__(self._step, calls=1, on_gpu=True)
        self.case, self.communicator = case, communicator
        self._decoder = decoder
        self._inputs = decoding.make_inputs(decoder.size, len(decoder.layers), case, shard)
        self._embedded = partly_embedded(self._inputs.x, shard)
        fused = graphar.fused_matmul_allreduce_residual_rmsnorm
        self._row_parallel_and_norm = partial(fused, eps=decoding.EPS, group=communicator)

    def _step(self) -> Tensor:
        inputs = replace(self._inputs, x=graphar.allreduce(self._embedded, self.communicator))
        # cuDNN's attention of one query for each sequence gives other bits in every other replay.
        same_bits = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if inputs.x.is_cuda else contextlib.nullcontext()
        with same_bits:
            return self._decoder.step(inputs, decoding.PLAIN, self._row_parallel_and_norm)


def partly_embedded(x: Tensor, shard: decoding.Shard) -> Tensor:
    """Returns ``x`` with zeros for tokens that another rank embeds. The sum over all ranks is ``x``."""
    part, mine = torch.zeros_like(x), slice(shard.rank, None, shard.ranks)
    part[mine] = x[mine]
    return part


class Cycle(NamedTuple):
    """One suspension and resumption on this rank."""

    suspend_us: float
    resume_us: float
    freed_nbytes: int
    grown_nbytes: int
    wrong: int


def row_of(plan: SuspendPlan, case: SuspendCase, step: Step, ranks: ProcessRanks) -> SuspendRow:
    """Measures a case. Collective.

    Raises:
        UnsupportedError: on every rank, if there is no memory to give back, or it cannot be given back.
    """
    launch, kept = step.make_launch(), kept_tensor(case.kept_nbytes, step.communicator, ranks)
    memory = step.communicator.memory()
    if not memory.scratch:
        raise UnsupportedError("graphar's kernels do not reach all ranks, so there is no memory to give back")
    launch()
    expected = step.result.clone()
    step_us(launch, step.case, ranks)  # the first replays of a graph are up to 3 % faster
    before_us = step_us(launch, step.case, ranks)
    cycles = [cycle(step, launch, expected, kept, ranks) for _ in range(plan.cycles)]
    suspends, resumes, freed, grown, wrongs = zip(*cycles, strict=True)
    after_us = step_us(launch, step.case, ranks)
    suspend_us, resume_us = ranks.slowest([suspends, resumes])
    # ranks.slowest returns maxima, so the minimum is a negated maximum.
    least, most_grown = ranks.slowest([-min(freed), max(grown)])
    (wrong,) = ranks.total([sum(wrongs)])
    return SuspendRow(
        world_size=ranks.size,
        size=plan.size,
        layers=plan.layers,
        phase=step.case.phase,
        tokens=step.case.tokens,
        cycles=plan.cycles,
        scratch={name: use.reserved_nbytes for name, use in memory.scratch.items()},
        symmetric_nbytes=memory.symmetric.reserved_nbytes,
        freed_nbytes=-least,
        grown_nbytes=most_grown,
        suspend_us=deciles(suspend_us),
        first_suspend_us=suspend_us[0],
        resume_us=deciles(resume_us),
        first_resume_us=resume_us[0],
        before_us=before_us,
        after_us=after_us,
        wrong=wrong,
    )


def kept_tensor(nbytes: int, communicator: graphar.Communicator, ranks: ProcessRanks) -> tuple[Tensor, Tensor] | None:
    """Returns a symmetric tensor of random bytes and a copy of them. Collective."""
    if not nbytes:
        return None
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    content = torch.randint(256, (nbytes,), dtype=torch.uint8, device=ranks.device, generator=generator)
    return communicator.empty(nbytes, dtype=torch.uint8).copy_(content), content


def step_us(launch: Callable[[], None], case: decoding.Case, ranks: ProcessRanks) -> Spread:
    ranks.warm_up()
    (times,) = ranks.slowest(time_in_turn([launch], case.repeats, lambda replay: ranks.time_us(replay, "graph")))
    return spread(times)


def cycle(
    step: Step, launch: Callable[[], None], expected: Tensor, kept: tuple[Tensor, Tensor] | None, ranks: ProcessRanks
) -> Cycle:
    """Suspends and resumes, and replays the step. Collective.

    Args:
        expected: the result before the first suspension.
        kept: a symmetric tensor that is kept, and the content that it must have.
    """
    ranks.barrier()
    before = free_nbytes()
    suspend_us = host_time_us(partial(graphar.suspend, keep="symmetric" if kept else None))
    freed = free_nbytes() - before
    ranks.barrier()  # no rank takes memory back before all have seen it free
    resume_us = host_time_us(graphar.resume)
    grown = before - free_nbytes()
    wrong = int((kept[0] != kept[1]).sum()) if kept else 0
    for _ in range(REPLAYS):
        step.result.fill_(OVERWRITTEN)
        launch()
        wrong += int(differs(step.result, expected).sum())
    return Cycle(suspend_us, resume_us, freed, grown, wrong)


def free_nbytes() -> int:
    """Returns the free memory of the current GPU, as the driver reports it."""
    return torch.cuda.mem_get_info()[0]


@dataclass
class Suspend(BetweenRanks):
    rows: list[SuspendRow] = field(default_factory=list)

    order: ClassVar[int] = 17
    arguments: ClassVar[Arguments] = Arguments(quick_on_gpus="--cycles 3", quick_on_cpu="--cycles 3")
    has_spread: ClassVar[bool] = True
    work: ClassVar = staticmethod(run_rank)
    cpu_world_size: ClassVar[int] = 0  # it needs GPUs

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        cycles = "how often to suspend and resume in each case (default: %(default)s)"
        parser.add_argument("--cycles", type=int, default=CYCLES, metavar="N", help=cycles)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[SuspendPlan]:
        if gpu_count < 2:
            sys.exit(NEEDED)
        world_sizes = cls.world_sizes(options, gpu_count)
        for world_size in world_sizes:
            decoding.check_heads(decoding.SIZES[SIZE], world_size)
        if options.cycles < 1:
            sys.exit("--cycles must be at least 1")
        return [SuspendPlan(world_size, options.cycles) for world_size in world_sizes]

    @classmethod
    def count(cls, plan: Sequence[SuspendPlan]) -> int:
        return sum(len(world_plan.cases) for world_plan in plan)

    def line(self, row: SuspendRow) -> str:
        times = f"suspend {ms(row.suspend_us['median'])} ms, resume {ms(row.resume_us['median'])} ms"
        freed = f"{mb(row.freed_nbytes)} of {mb(row.held_nbytes)} MB freed"
        return f"{row.world_size:>2} ranks {row.words:<36} {times}, {freed} {row.wrong:>6} wrong"

    def sections(self) -> list[Section]:
        sections = []
        for (world_size, model), rows in group(self.rows, lambda row: (row.world_size, row.what[0])).items():
            title = f"{plural(world_size, 'rank')}, {model}"
            sections.append(Section(f"{title}: memory", [memory_table(rows)]))
            sections.append(Section(f"{title}: times", [time_table(rows)]))
        return sections

    def glance(self) -> Glance:
        rows = [row for row in self.rows if not row.wrong]
        if not rows:
            return Glance("nothing was measured here", figure=NOT_SERVED)
        row = max(rows, key=lambda row: (row.world_size, row.held_nbytes))
        suspend, resume = (f"{ms(time_us['median'])} ms" for time_us in (row.suspend_us, row.resume_us))
        held = f"{mb(row.held_nbytes)} MB between {plural(row.world_size, 'rank')}"
        words = f"to resume {held}; suspending took {suspend} and gave {row.freed_share:.0%} of that back"
        return Glance(words, figure=resume)

    def timed(self) -> list[Result]:
        return [
            Result(name, row.world_size, row.what, time_us, row.wrong)
            for row in self.rows
            for name, time_us in zip(CALLS, (row.suspend_us, row.resume_us, row.after_us), strict=True)
        ]


def ms(time_us: float) -> str:
    return f"{time_us / 1e3:.2f}"


def mb(nbytes: int) -> str:
    return f"{nbytes / MB:.1f}"


def memory_table(rows: Sequence[SuspendRow]) -> str:
    cells = {
        "step": lambda row: row.words,
        "scratch (MB)": lambda row: mb(row.scratch_nbytes),
        "symmetric (MB)": lambda row: mb(row.symmetric_nbytes),
        "freed (MB)": lambda row: mb(row.freed_nbytes),
        "freed / held": lambda row: f"{row.freed_share:.2f}",
        "grown (MB)": lambda row: mb(row.grown_nbytes),
        "scratch by algorithm (MB)": lambda row: ", ".join(f"{name} {mb(held)}" for name, held in row.scratch.items()),
    }
    return columns(rows, cells)


def time_table(rows: Sequence[SuspendRow]) -> str:
    cells = {
        "step": lambda row: row.words,
        "held (MB)": lambda row: mb(row.held_nbytes),
        "suspend (ms)": lambda row: with_deciles(row.suspend_us),
        "first suspend (ms)": lambda row: ms(row.first_suspend_us),
        "resume (ms)": lambda row: with_deciles(row.resume_us),
        "first resume (ms)": lambda row: ms(row.first_resume_us),
        "step before (us)": lambda row: f"{row.before_us['median']:.1f}",
        "step after (us)": lambda row: f"{row.after_us['median']:.1f}",
        "after / before": lambda row: f"{row.slowdown:.2f}",
        "wrong": lambda row: f"**{row.wrong} WRONG**" if row.wrong else "0",
    }
    return columns(rows, cells)


def with_deciles(time_us: Deciles) -> str:
    return f"{ms(time_us['median'])} ({ms(time_us['p10'])} to {ms(time_us['p90'])})"
