"""What the links carry while a timed graph is replayed once more: the counters take too long to read while timing."""

from __future__ import annotations

from collections.abc import Callable

from graphar.plan.sizes import MB
from perf import link_ceiling, nvlink
from perf.cases import Case
from perf.methods import Method
from perf.ranks import ProcessRanks, Ranks, agreed
from perf.rows import LinkCeiling

METHODS = ("graphar", "nccl", "symm_two_shot")
MIN_NBYTES = 16 * MB  # below, the counters' KiBs and the ranks' own messages would show


def is_counted(method: Method, case: Case) -> bool:
    return case.mode == "graph" and case.nbytes >= MIN_NBYTES and method.name in METHODS


def count(
    launch: Callable[[], None], time_us: float, case: Case, ranks: Ranks, counters: nvlink.Counters
) -> dict[str, object]:
    """What this rank sends during one launch that takes time_us, as nvlink.Utilisation names it. Collective."""
    ranks.level()
    before = counters.read()
    ranks.level()  # nobody's launch is in another's first reading
    launch()
    ranks.level()
    counted = counters.read() - before
    must_send = nvlink.must_send(case.world_size, case.nbytes, case.iterations)
    return nvlink.utilisation(counted, must_send, counters.links, time_us, counters.raw_rates).to_dict()


def find_counters(ranks: ProcessRanks) -> tuple[nvlink.Counters | None, str]:
    """This rank's counters, if every rank has its own; otherwise why not. Collective."""

    def find() -> nvlink.Counters:
        found = nvlink.find(ranks.device)
        if isinstance(found, str):
            raise RuntimeError(found)
        return found

    return agreed(ranks, find)


def find_ceiling(ranks: ProcessRanks) -> LinkCeiling | str:
    """What the links carry at most, or why that is not known. Collective."""
    rate, reason = agreed(ranks, lambda: link_ceiling.measure(ranks), (RuntimeError,))
    return f"link ceiling, {ranks.size} ranks: {reason}" if reason else LinkCeiling(ranks.size, rate)
