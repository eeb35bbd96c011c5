"""Describes all-reduce methods for the harness, and families of methods that share a package."""

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
    """An all-reduce method.

    Attributes:
        call: enqueues one all-reduce and returns its result. The result can be the input of the next call.
        algorithm: returns the name of the algorithm of a call; None for a peer.
        exact: whether it promises the bits of graphar.reference. Other methods round at every hop.
        quantised: whether it sends fewer bits than its input has, and is less precise.
        codec: the codec of an exact, quantised method. It promises the bits of the reference with that codec.
        in_place: whether the result replaces the input.
        data: makes the method's input from the case's input. None: the case's input itself.
        buffer: the symmetric memory that inputs must be in. None: any memory.
        min_nbytes, max_nbytes: the smallest and the largest size at which it is measured.
        refusals: the exceptions that it raises if it does not support a call. Any other exception ends the run.
        keeps: objects that must live as long as the method, because its calls use only their addresses.
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
        make: allocates memory and returns the methods. Collective.
        load: imports the package and compiles its kernels. The first rank does so before the others.
        world_sizes: the numbers of ranks that its kernels support.
    """

    names: tuple[str, ...]
    make: Callable[[Plan, Ranks], list[Method]]
    load: Callable[[Plan], None] = lambda plan: None
    world_sizes: tuple[int, ...] = tuple(range(2, 9))


class Pair:
    """Two tensors of one size. A call reads one and writes the other, so calls can be chained."""

    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second
        self._views: dict[tuple[int, int], Tensor] = {}

    def opposite(self, x: Tensor) -> Tensor:
        """Returns the beginning of the other tensor, as long as ``x``. ``x`` is the beginning of one of the two."""
        key = (x.data_ptr(), x.numel())
        view = self._views.get(key)
        if view is None:  # cached, because slicing takes a microsecond
            other = self.second if x.data_ptr() == self.first.data_ptr() else self.first
            view = self._views[key] = other[: x.numel()]
        return view


def symmetric(nbytes: int, dtype: torch.dtype = torch.uint8) -> tuple[Tensor, symmetric_memory._SymmetricMemory]:
    """Returns a tensor in torch's symmetric memory, and its handle. Collective over all ranks.

    A rendezvous of some ranks could hang a later rendezvous of all ranks.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    tensor = symmetric_memory.empty(nbytes // dtype.itemsize, dtype=dtype, device=device)
    return tensor, symmetric_memory.rendezvous(tensor, dist.group.WORLD.group_name)


def up_to(plan: Plan, limit: int) -> int:
    """Returns the size to allocate: the smaller of the method's and the plan's limit."""
    return min(plan.max_nbytes, limit)
