"""What one communicator has done and holds: Stats and Memory, the results of its methods stats() and memory()."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from graphar.plan.algorithms import Algorithm
from graphar.plan.sizes import format_nbytes
from graphar.runtime.memory.multicast import TorchBuffer
from graphar.runtime.memory.peer_memory import Buffer


@dataclass(frozen=True)
class CallStats:
    """The calls of one op by one algorithm, for one reason.

    Attributes:
        op: the op, such as "allreduce".
        algorithm: the algorithm's name.
        calls: the number of calls. A captured call counts once, and its replays do not. A call that raised an error
            counts if its plan was found.
        repeated: how many of them repeated an earlier call's launch, which takes the least host time.
        nbytes: the bytes of all these calls: of the whole tensor that is summed or scattered, or that a gather returns.
        fallback_reason: why no kernel of graphar ran; an empty string if one did.
    """

    op: str
    algorithm: str
    calls: int
    repeated: int
    nbytes: int
    fallback_reason: str = ""


@dataclass(frozen=True)
class Stats:
    """What a communicator has done in this process since it was made. ``print`` of it gives a table.

    Attributes:
        calls: the calls, by op, algorithm and reason, in the order of their first calls.
        plans: how many plans were made: each kind of call needs one, and is compiled, loaded and bound for it.
        launches: the launches that kernels have counted on the GPU of this process's first rank, by the name of the
            algorithm, modulo 2^32. Replays of graphs are among them. A large call takes several launches. Empty without
            kernels, and while a graph is captured.
        host_waited_s: how long the host met other ranks, in seconds: to set up, to make plans and
            to close. What calls themselves waited is in the trace of :func:`graphar.profile`.
        failure: the error that ended the communicator, such as a deadline that expired; an empty string without one.
    """

    calls: tuple[CallStats, ...]
    plans: int
    launches: dict[str, int]
    host_waited_s: float
    failure: str

    @property
    def fallbacks(self) -> tuple[CallStats, ...]:
        """The calls that no kernel of graphar served."""
        return tuple(call for call in self.calls if call.fallback_reason)

    def __str__(self) -> str:
        """Returns a table with a line for each kind of call, and a line with what else was counted."""
        kinds = [f"{call.op}, {call.algorithm}" for call in self.calls]
        width = max(map(len, ["", *kinds]))
        rows = [f"{'':{width}}  {'calls':>9}  {'repeated':>9}  {'size':>12}"]
        for kind, call in zip(kinds, self.calls, strict=True):
            row = f"{kind:{width}}  {call.calls:9}  {call.repeated:9}  {format_nbytes(call.nbytes):>12}"
            rows.append(f"{row}  {call.fallback_reason}".rstrip())
        rows.append(f"{self.plans} plans; the host waited {self.host_waited_s:.3f} s for other ranks")
        return "\n".join([*rows, *([f"failed: {self.failure}"] if self.failure else [])])


# What else counts calls with a process group, by the group's name: the backend of torch.distributed.
beside: list[Callable[[str], list[Stats]]] = []


def with_beside(ours: Stats, name: str) -> Stats:
    """Returns ``ours`` with what else was counted of the process group of this name added."""
    all_stats = [ours, *(stats for counter in beside for stats in counter(name))]
    return Stats(
        merged(call for stats in all_stats for call in stats.calls),
        sum(stats.plans for stats in all_stats),
        dict(sum((Counter(stats.launches) for stats in all_stats), Counter())),
        sum(stats.host_waited_s for stats in all_stats),
        next((stats.failure for stats in all_stats if stats.failure), ""),
    )


def merged(calls: Iterable[CallStats]) -> tuple[CallStats, ...]:
    totals: dict[tuple[str, str, str], CallStats] = {}
    for call in calls:
        kind = call.op, call.algorithm, call.fallback_reason
        sums = totals.get(kind, CallStats(call.op, call.algorithm, 0, 0, 0, call.fallback_reason))
        counts = sums.calls + call.calls, sums.repeated + call.repeated, sums.nbytes + call.nbytes
        totals[kind] = CallStats(call.op, call.algorithm, *counts, call.fallback_reason)
    return tuple(totals.values())


@dataclass(frozen=True)
class MemoryUse:
    """Memory of one kind.

    Attributes:
        reserved_nbytes: the bytes at whose addresses the memory lies, or lies again after ``resume``.
        resident_nbytes: the bytes that are on the GPU now.
    """

    reserved_nbytes: int
    resident_nbytes: int


@dataclass(frozen=True)
class Memory:
    """The GPU memory that a communicator shares between ranks, on the GPU of this process's first rank.

    Each allocation is rounded up to whole pages of 2 MB on the GPU, which is not counted here.

    ``print`` of it gives a table. Each GPU maps the memory of the others, too, which takes none of its own.

    Attributes:
        scratch: the scratch of the algorithms that were used or prepared, by the algorithm's name.
        symmetric: the symmetric tensors of :func:`graphar.empty`.
    """

    scratch: dict[str, MemoryUse]
    symmetric: MemoryUse

    @property
    def total(self) -> MemoryUse:
        """The sum of scratch and symmetric tensors."""
        uses = [*self.scratch.values(), self.symmetric]
        return MemoryUse(sum(use.reserved_nbytes for use in uses), sum(use.resident_nbytes for use in uses))

    def __str__(self) -> str:
        """Returns a table with a line for each algorithm, for symmetric tensors and for their sum."""
        lines = {**self.scratch, "symmetric tensors": self.symmetric, "total": self.total}
        width = max(map(len, lines))
        rows = [f"{'':{width}}  {'reserved':>10}  {'resident':>10}"]
        for name, use in lines.items():
            reserved, resident = format_nbytes(use.reserved_nbytes), format_nbytes(use.resident_nbytes)
            rows.append(f"{name:{width}}  {reserved:>10}  {resident:>10}")
        return "\n".join(rows)


def memory_of(scratch: Mapping[Algorithm, Buffer | TorchBuffer], symmetric: Iterable[Buffer]) -> Memory:
    """Returns the memory of allocations, by algorithm and of symmetric tensors."""
    return Memory({algorithm.value: _use([allocation]) for algorithm, allocation in scratch.items()}, _use(symmetric))


def _use(allocations: Iterable[Buffer | TorchBuffer]) -> MemoryUse:
    each = [(allocation.nbytes, allocation.nbytes if allocation.resident else 0) for allocation in allocations]
    return MemoryUse(sum(reserved for reserved, _ in each), sum(resident for _, resident in each))
