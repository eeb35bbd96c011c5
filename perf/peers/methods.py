"""What the harness needs to know of a method, and how methods of one package are set up together."""

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
        call: enqueues one all-reduce and returns where its result is; what it returns is fit to be called with.
        algorithm: names what a call takes; None for a peer.
        exact: it promises the specification's bits; the others round at every hop.
        quantised: it sends fewer bits than it is given, and promises no more than those can hold.
        codec: the one whose bits it then promises.
        in_place: the result replaces the input.
        buffer: symmetric memory that inputs must lie in.
        min_nbytes, max_nbytes: the sizes it is measured at.
        refusals: what it raises where it cannot serve a call; anything else ends the run.
        keeps: what a call uses that nothing else holds, such as memory known to it by its address.
    """

    name: str
    call: Callable[[Data], Data]
    algorithm: Callable[[Data], str] | None = None
    exact: bool = False
    quantised: bool = False
    codec: Codec | None = None
    in_place: bool = False
    buffer: Tensor | None = None
    min_nbytes: int = 0
    max_nbytes: int | None = None
    refusals: tuple[type[Exception], ...] = (Exception,)  # the code of others may raise anything
    keeps: object = None

    def serves(self, nbytes: int) -> bool:
        return self.min_nbytes <= nbytes and (self.max_nbytes is None or nbytes <= self.max_nbytes)


@dataclass(frozen=True)
class Family:
    """Methods that come from one package or share memory.

    Attributes:
        names: of the methods.
        make: allocates, and returns the methods. Collective.
        load: imports the package and compiles what it needs. The first rank does so before the others.
        world_sizes: the numbers of ranks that its kernels serve.
    """

    names: tuple[str, ...]
    make: Callable[[Plan, Ranks], list[Method]]
    load: Callable[[Plan], None] = lambda plan: None
    world_sizes: tuple[int, ...] = tuple(range(2, 9))


class Pair:
    """Two tensors of one size: what is read lies in one, the result goes to the other, and a chain goes to and fro."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second
        self._views: dict[tuple[int, int], Tensor] = {}

    def opposite(self, x: Tensor) -> Tensor:
        """As much of the other tensor, x being the beginning of one."""
        key = (x.data_ptr(), x.numel())
        view = self._views.get(key)
        if view is None:  # slicing again would cost each eager call a microsecond
            other = self.second if x.data_ptr() == self.first.data_ptr() else self.first
            view = self._views[key] = other[: x.numel()]
        return view


def symmetric(nbytes: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, symmetric_memory._SymmetricMemory]:
    """Memory of torch's that every rank can reach, and its handle. Collective, and always of the whole world: a
    rendezvous of a part can hang a later one of all."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = symmetric_memory.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
    return tensor, symmetric_memory.rendezvous(tensor, dist.group.WORLD.group_name)


def up_to(plan: Plan, limit: int) -> int:
    """The largest size to allocate for: the method's limit, or the plan's if that is smaller."""
    return min(plan.max_nbytes, limit)
