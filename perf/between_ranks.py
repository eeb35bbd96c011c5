"""The base of topics that run between ranks, one process each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar

from perf.harness import ranks as ranks_of
from perf.machine import check_world_sizes
from perf.report import Report


class BetweenRanks(Report):
    """The base of the topics. A plan has a ``world_size``; a topic has one plan, or a list of plans.

    Class attributes:
        work: ``work(plan, rank, port)`` yields what one rank measures.
        cpu_world_size: the number of ranks with fewer than 2 GPUs. 0: the topic needs 2.
        takes_many: whether several numbers of ranks can be named.
    """

    work: ClassVar[Callable[..., Iterator]]
    cpu_world_size: ClassVar[int] = 2
    takes_many: ClassVar[bool] = True

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        on_cpu = f"; {cls.cpu_world_size} on the CPU" if cls.cpu_world_size else ""
        count = "+" if cls.takes_many else None
        ranks = f"ranks (default: all GPUs{on_cpu})"
        parser.add_argument("--world-size", type=int, nargs=count, metavar="N", help=ranks)

    @classmethod
    def world_sizes(cls, options: argparse.Namespace, gpu_count: int) -> list[int]:
        """Returns the numbers of ranks. Ends the program if this machine cannot run them."""
        chosen = options.world_size or (gpu_count if gpu_count >= 2 else cls.cpu_world_size)
        chosen = chosen if isinstance(chosen, list) else [chosen]
        check_world_sizes(chosen, gpu_count)
        return chosen

    def measure(self, plan) -> Iterator:
        for world_plan in plan if isinstance(plan, list) else [plan]:
            yield from ranks_of.run(world_plan.world_size, partial(type(self).work, world_plan))
