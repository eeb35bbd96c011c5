"""Memory: what a communicator holds on a GPU, the result of Communicator.memory()."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from graphar.plan.algorithms import Algorithm
from graphar.plan.sizes import MB
from graphar.runtime.memory.multicast import TorchBuffer
from graphar.runtime.memory.peer_memory import Buffer


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
        """Returns a table with a line for each algorithm, for symmetric tensors and for their sum, in MB of 2^20 B."""
        lines = {**self.scratch, "symmetric tensors": self.symmetric, "total": self.total}
        width = max(map(len, lines))
        rows = [f"{'':{width}}  {'reserved':>10}  {'resident':>10}"]
        for name, use in lines.items():
            rows.append(f"{name:{width}}  {use.reserved_nbytes / MB:7.1f} MB  {use.resident_nbytes / MB:7.1f} MB")
        return "\n".join(rows)


def memory_of(scratch: Mapping[Algorithm, Buffer | TorchBuffer], symmetric: Iterable[Buffer]) -> Memory:
    """Returns the memory of allocations, by algorithm and of symmetric tensors."""
    return Memory({algorithm.value: _use([allocation]) for algorithm, allocation in scratch.items()}, _use(symmetric))


def _use(allocations: Iterable[Buffer | TorchBuffer]) -> MemoryUse:
    each = [(allocation.nbytes, allocation.nbytes if allocation.resident else 0) for allocation in allocations]
    return MemoryUse(sum(reserved for reserved, _ in each), sum(resident for _, resident in each))
