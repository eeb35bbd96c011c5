"""Times and verifies the decoder's steps by every way, by the ranks of one world."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from perf import world
from perf.graphs import capture
from perf.model.cases import SIZES, Case, Plan
from perf.model.decoder import Decoder, Inputs, Pieces, rotate, swiglu
from perf.model.shards import Share, make_decoder, make_head, make_inputs
from perf.model.ways import UNSHARDED, Way, make_ways
from perf.norms import add_and_norm, compiled
from perf.ranks import ProcessRanks, Ranks, agreed
from perf.rows import summarise
from perf.verify import differs

WARM_UP = 3
WINDOW = 1024  # tokens whose logits are compared at once
# What a token's logits may be off after one layer, as a share of their length: each product, sum and norm rounds its
# values to 2^-9, and a codec's 8 bits take about 1 % of what a sum is made of. Layers' errors add up like random ones.
TOLERANCE, QUANTISED_TOLERANCE = 2.0**-6, 2.0**-4


@dataclass(frozen=True)
class ModelRow:
    """One measured and verified figure.

    Attributes:
        size: of perf.model.cases.SIZES.
        layers: that were timed.
        phase, tokens, context: as of perf.model.cases.Case.
        time_us: median, p10 and p99 over the repeats, each the slowest rank's time of one step.
        error: how far any token's logits are from the unsharded model's, at most, as a share of their length; None for
            that model and for what leaves the sums out.
        wrong: tokens whose logits are too far from the unsharded model's, or not the bits of the first rank's where the
            method promises those, over all ranks.
    """

    method: str
    size: str
    world_size: int
    layers: int
    phase: str
    tokens: int
    context: int
    time_us: dict[str, float]
    error: float | None
    wrong: int

    @property
    def median(self) -> float:
        return self.time_us["median"]


def run(plan: Plan) -> Iterator[ModelRow | str]:
    """The plan's rows as they are measured; a string says what was not measured, and why."""
    yield from world.run(plan.world_size, partial(run_rank, plan))


def run_rank(plan: Plan, rank: int, port: int) -> Iterator[ModelRow | str]:
    ranks = world.join(rank, plan.world_size, plan.device, port)
    on_gpu, size = plan.device == "cuda", SIZES[plan.size]
    kept = compiled if on_gpu else lambda piece: piece
    ways, skipped = make_ways(plan, ranks, kept(add_and_norm))
    yield from skipped
    ranks.warm_up()
    bench = Bench(plan, ranks, Pieces(kept(rotate), kept(swiglu)), make_head(size, ranks.device))
    for case in plan.cases():
        yield from bench.measure(case, ways)
        if on_gpu:
            torch.cuda.empty_cache()  # a graph's memory went back to torch's pool, where the next case cannot use it
    ranks.level()


class Trial:
    """One way to do one case's step; ``result`` is what the last one returned."""

    def __init__(self, way: Way, decoder: Decoder, given: Inputs, pieces: Pieces) -> None:
        self.way = way
        self._step = partial(decoder.step, given, pieces, way.finish)
        self._iterations = given.case.iterations if given.x.is_cuda else 1
        self._in_graph = given.x.is_cuda
        self.result: Tensor | None = None

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self.result = self._step()

    def make_launch(self) -> Callable[[], None]:
        self.run(WARM_UP)
        run = partial(self.run, self._iterations)
        return capture(run) if self._in_graph else run

    def time_us(self, launch: Callable[[], None], ranks: Ranks) -> float:
        return ranks.time_us(launch, "graph" if self._in_graph else "cpu") / self._iterations


class Bench:
    """The model, whole and this rank's share of it, and all that its cases have in common."""

    def __init__(self, plan: Plan, ranks: ProcessRanks, pieces: Pieces, head: Tensor) -> None:
        self._plan, self._ranks, self._pieces, self._head = plan, ranks, pieces, head
        self._size = SIZES[plan.size]
        shares = {True: Share(ranks.rank, ranks.size, ranks.device), False: Share(0, 1, ranks.device)}
        self._models = {
            sharded: (share, make_decoder(self._size, plan.layers, share)) for sharded, share in shares.items()
        }

    def measure(self, case: Case, ways: list[Way]) -> Iterator[ModelRow | str]:
        """The rows of every way that can, and why others cannot. Collective."""
        plan, ranks = self._plan, self._ranks
        ready = []
        of_model = {
            sharded: (decoder, make_inputs(self._size, plan.layers, case, share))
            for sharded, (share, decoder) in self._models.items()
        }
        for way in ways:
            trial = Trial(way, *of_model[way.sharded], self._pieces)
            ranks.level()
            launch, reason = agreed(ranks, trial.make_launch)
            if reason:
                yield f"{way.name}, {case.phase} of {case.tokens} tokens: {reason}"
            else:
                ready.append((trial, launch))
        times_us = ranks.slowest(time_in_turn(ready, case, ranks)) if ready else []
        expected = next((result_of(*one, ranks) for one in ready if one[0].way.name == UNSHARDED), None)
        if expected is None:
            yield f"{case.phase} of {case.tokens} tokens: no result of the unsharded model to compare with"
            return
        for (trial, launch), times in zip(ready, times_us, strict=True):
            error, wrong = self._check(trial, launch, expected)
            where = (plan.size, plan.world_size, plan.layers, case.phase, case.tokens, case.context)
            yield ModelRow(trial.way.name, *where, summarise(times), error, wrong)

    def _check(self, trial: Trial, launch: Callable[[], None], expected: Tensor) -> tuple[float | None, int]:
        """A row's error and wrong tokens. Collective."""
        if not trial.way.summed or not trial.way.sharded:
            return None, 0
        found = result_of(trial, launch, self._ranks)
        errors, apart = compare_logits(found, expected, self._head)
        bad = wrong_tokens(errors, apart, trial.way, self._plan.layers)
        (error,) = self._ranks.slowest([errors.nan_to_num(nan=math.inf).max().item()])
        (wrong,) = self._ranks.total([int(bad.sum())])
        return error, wrong


def time_in_turn(ready: list[tuple[Trial, Callable[[], None]]], case: Case, ranks: Ranks) -> list[list[float]]:
    """Microseconds a step, by trial and repeat. The trials take turns, so that a drifting clock meets all."""
    times: list[list[float]] = [[] for _ in ready]
    for repeat in range(-1, case.repeats):  # the first turn warms up: it uploads the graphs
        for (trial, launch), of_trial in zip(ready, times, strict=True):
            time_us = trial.time_us(launch, ranks)
            if repeat >= 0:
                of_trial.append(time_us)
    return times


def result_of(trial: Trial, launch: Callable[[], None], ranks: Ranks) -> Tensor:
    """What the timed launch computes."""
    trial.result.fill_(torch.nan)
    launch()
    ranks.level()
    return trial.result.clone()


def wrong_tokens(errors: Tensor, apart: Tensor, way: Way, layers: int) -> Tensor:
    """Which tokens are, by what :func:`compare_logits` found. A NaN is within no bound."""
    tolerance = QUANTISED_TOLERANCE if way.quantised else TOLERANCE
    return ~(errors <= tolerance * layers**0.5) | (apart & way.same_bits)


def compare_logits(found: Tensor, expected: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """By token: how far its logits are from the expected ones, and whether they differ from rank 0's. Collective."""
    errors, apart = [], []
    for mine, theirs in zip(found.split(WINDOW), expected.split(WINDOW), strict=True):
        logits, right = mine @ head.t(), theirs @ head.t()
        errors.append((logits.float() - right.float()).norm(dim=-1) / right.float().norm(dim=-1))
        firsts = logits.clone()
        dist.broadcast(firsts.view(torch.uint8), 0)  # as bytes: not every backend sends every dtype
        apart.append(differs(logits, firsts).any(-1))
    return torch.cat(errors), torch.cat(apart)
