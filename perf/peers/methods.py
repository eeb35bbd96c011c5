"""The description of a method for the harness, and the set-up of methods that share a package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from graphar.numerics.codecs import Codec
from perf.harness.cases import Plan
from perf.harness.ranks import Data, Ranks


@dataclass(frozen=True)
class Method:
    """One method to all-reduce.

    Attributes:
        call: enqueues one all-reduce and returns its result, which can be the input of the next call.
        algorithm: returns the name of the algorithm that a call takes; None for a peer.
        exact: whether it promises the specification's bits. Other methods round at every hop.
        quantised: whether it sends fewer bits than its input has, and is less precise.
        codec: the codec whose specified bits an exact, quantised method promises.
        in_place: whether the result replaces the input.
        data: makes its input from the case's; None: the case's input itself.
        buffer: the symmetric memory that inputs must lie in; None: any memory.
        min_nbytes, max_nbytes: the smallest and the largest size at which it is measured.
        refusals: the exceptions that it raises if it cannot serve a call. Any other exception ends the run.
        keeps: references to objects that a call uses without holding them, such as memory known by its address.
    """

    name: str
    call: Callable[[Data], Data]
    algorithm: Callable[[Data], str] | None = None
    exact: bool = False
    quantised: bool = False
    codec: Codec | None = None
    in_place: bool = False
    data: Callable[[Data], Data] | None = None
    buffer: Tensor | None = None
    min_nbytes: int = 0
    max_nbytes: int | None = None
    refusals: tuple[type[Exception], ...] = (Exception,)  # other packages may raise anything
    keeps: object = None

    def serves(self, nbytes: int) -> bool:
        return self.min_nbytes <= nbytes and (self.max_nbytes is None or nbytes <= self.max_nbytes)


@dataclass(frozen=True)
class Family:
    """Methods that come from one package or share memory.

    Attributes:
        names: the names of the methods.
        make: allocates, and returns the methods. Collective.
        load: imports the package and compiles what it needs. The first rank does so before the others.
        world_sizes: the numbers of ranks that its kernels serve.
    """

    names: tuple[str, ...]
    make: Callable[[Plan, Ranks], list[Method]]
    load: Callable[[Plan], None] = lambda plan: None
    world_sizes: tuple[int, ...] = tuple(range(2, 9))


class Pair:
    """Two tensors of one size. A call reads one and writes the other; in a chain of calls they take turns."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second
        self._views: dict[tuple[int, int], Tensor] = {}

    def opposite(self, x: Tensor) -> Tensor:
        """Returns the part of the other tensor that corresponds to ``x``, the beginning of one of the two."""
        key = (x.data_ptr(), x.numel())
        view = self._views.get(key)
        if view is None:  # cached: slicing would cost each eager call a microsecond
            other = self.second if x.data_ptr() == self.first.data_ptr() else self.first
            view = self._views[key] = other[: x.numel()]
        return view


def symmetric(nbytes: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, symmetric_memory._SymmetricMemory]:
    """Returns a tensor in torch's symmetric memory, and its handle. Collective over the whole world.

    A rendezvous of fewer ranks could hang a later rendezvous of all ranks.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = symmetric_memory.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
    return tensor, symmetric_memory.rendezvous(tensor, dist.group.WORLD.group_name)


def up_to(plan: Plan, limit: int) -> int:
    """Returns the largest size to allocate for: the smaller one of the method's and the plan's limit."""
    return min(plan.max_nbytes, limit)
