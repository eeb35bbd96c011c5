"""Works through a plan, by its ranks, and yields what they measured."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from perf import traffic, world
from perf.cases import Plan
from perf.catalogue import make_methods
from perf.harness import measure
from perf.ranks import InProcessRanks, Ranks
from perf.rows import LinkCeiling, Row


def run(plan: Plan) -> Iterator[Row | LinkCeiling | str]:
    """The plan's rows and links as they are measured; a string says what was not measured, and why."""
    yield from world.run(plan.world_size if plan.form == "process" else 1, partial(run_rank, plan))


def run_rank(plan: Plan, rank: int, port: int) -> Iterator[Row | LinkCeiling | str]:
    """What one of the plan's ranks finds."""
    in_process = plan.form == "list"
    ranks = InProcessRanks(plan.world_size) if in_process else world.join(rank, plan.world_size, plan.device, port)
    yield from work_through(plan, ranks)
    ranks.level()


def work_through(plan: Plan, ranks: Ranks) -> Iterator[Row | LinkCeiling | str]:
    """What one rank finds: the same kinds of messages in the same order on all. Collective."""
    methods, skipped = make_methods(plan, ranks)
    yield from skipped
    ranks.warm_up()  # after the compiling, which leaves a GPU idle
    counters = None
    if plan.device == "cuda":
        yield traffic.find_ceiling(ranks)
        counters, reason = traffic.find_counters(ranks)
        if reason:
            yield f"NVLink's counters, {plan.world_size} ranks: {reason}"
    for case in plan.cases():
        taking_part = [method for method in methods if plan.takes_part(method.name, case)]
        rows, refusals = measure(case, taking_part, ranks, counters)
        if plan.device == "cuda":
            torch.cuda.empty_cache()  # a graph's memory went back to torch's pool, where the next size cannot use it
        yield from (*rows, *refusals)
