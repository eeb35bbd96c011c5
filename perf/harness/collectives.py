"""Times and verifies a bf16 reduce-scatter, all-gather or all-reduce with several methods, on one rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from graphar import reference
from graphar.plan.tune import COLUMNS
from perf.harness import verify
from perf.harness.cases import Case
from perf.harness.ranks import ProcessRanks, Ranks, timed_in_turn
from perf.harness.timing import Repeated

Call = Callable[[Tensor], Tensor]


def measure(
    op: str, nbytes: int, x: Tensor, calls: Mapping[str, Call], ranks: ProcessRanks
) -> tuple[dict[str, float], dict[str, int]]:
    """Returns by method the median time of a call in microseconds, and the number of wrong elements. Collective.

    Each repeat runs all methods in turn, and has the time of the slowest rank. Wrong elements are summed over ranks.

    Args:
        nbytes: the size of the whole tensor. It determines the number of calls in a repeat.
        x: this rank's input.
        calls: the methods. "nccl" rounds sums at every hop; the others promise the bits of graphar.reference.
    """
    case = Case(ranks.size, "process", "graph" if x.is_cuda else "cpu", "bfloat16", nbytes)
    trials = [(method, Trial(op, method, call, x, case.iterations)) for method, call in calls.items()]
    timed, _ = timed_in_turn(ranks, trials, case.repeats, case.mode, case.iterations)
    wrong = ranks.total([trial.count_wrong(launch, ranks) for trial, launch, _ in timed])
    medians = [statistics.median(times) for *_, times in timed]
    return dict(zip(calls, medians, strict=True)), dict(zip(calls, wrong, strict=True))


class Trial(Repeated):
    """Runs one method on one rank's data. No method may refuse."""

    refusals = ()

    def __init__(self, op: str, method: str, call: Call, x: Tensor, iterations: int) -> None:
        self._op, self._source, self._iterations = op, x, iterations
        self._exact = method != "nccl" or op == "allgather"
        self._in_place = method == "nccl" and op == "allreduce"
        self._x = x.clone() if self._in_place else x
        super().__init__(partial(call, self._x), iterations, x.is_cuda)

    def refill(self) -> None:
        """Restores the input after in-place calls."""
        if self._in_place:
            self._x.copy_(self._source)

    def count_wrong(self, launch: Callable[[], None], ranks: ProcessRanks) -> int:
        """Runs the timed launch once more, and returns how many elements of this rank's result are wrong. Collective.

        In-place calls add up their own results, so the error bound is loose. A single call is checked too.
        """
        wrong = self._count_wrong_after(launch, ranks, self._iterations if self._in_place else 1)
        if self._in_place:
            wrong = max(wrong, self._count_wrong_after(partial(self.run, 1), ranks, 1))
        return wrong

    def _count_wrong_after(self, launch: Callable[[], None], ranks: ProcessRanks, steps: int) -> int:
        self.result.view(torch.int16).fill_(-1)  # NaNs
        self.refill()
        launch()
        ranks.barrier()
        return count_wrong(self._op, self._source, self.result, ranks, self._exact, steps)


def count_wrong(op: str, x: Tensor, result: Tensor, ranks: Ranks, exact: bool, steps: int = 1) -> int:
    """Returns how many elements of this rank's result are wrong. Collective.

    An exact result must have the right bits. Other results may have rounding errors.

    Args:
        x: this rank's input.
        steps: the number of consecutive in-place all-reduces. Each reads the result of the previous one.
    """
    wrong = 0
    for output, expected, parts in windows_of(op, x, result, ranks):
        if exact:
            bad = verify.differs(output, expected)
        else:
            bad = verify.is_far(output, expected.float() * float(ranks.size) ** (steps - 1), parts, steps=steps)
        wrong += int(bad.sum())
    return wrong


def windows_of(op: str, x: Tensor, result: Tensor, ranks: Ranks) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
    """Yields this rank's result, the expected result, and all ranks' inputs, for each window. Collective."""
    for owner, part in enumerate(x.chunk(ranks.size) if op == "reducescatter" else [x]):
        for window in verify.windows(part.numel()):
            parts = ranks.gather(part.flatten(), window)
            if op == "allgather":
                yield result.view(ranks.size, -1)[:, window], torch.stack(parts), parts
            elif op == "allreduce" or owner == ranks.rank:
                yield result.flatten()[window], reference.allreduce(parts), parts


def call_backend(op: str, x: Tensor) -> Tensor:
    """Returns the result of torch.distributed's op. An all-reduce is in place."""
    if op == "allreduce":
        dist.all_reduce(x)
        return x
    if op == "reducescatter":
        out = x.new_empty(len(x) // dist.get_world_size(), *x.shape[1:])
        dist.reduce_scatter_tensor(out, x)
    else:
        out = x.new_empty(len(x) * dist.get_world_size(), *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
    return out


def input_of(op: str, nbytes: int, part: Tensor, world_size: int) -> Tensor:
    """Returns a rank's input [rows, COLUMNS]. It repeats ``part``. The whole tensor has at most ``nbytes``."""
    rows = nbytes // (part.itemsize * COLUMNS * world_size) * (1 if op == "allgather" else world_size)
    numel = rows * COLUMNS
    return part.repeat(-(-numel // len(part)))[:numel].view(rows, COLUMNS)
