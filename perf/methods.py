"""The ways to all-reduce that are compared: graphar and its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

import graphar
from perf.cases import GB, MB, Plan
from perf.ranks import Data

CUDA_METHODS = ("graphar", "nccl", "symm_one_shot", "symm_two_shot")
CPU_METHODS = ("graphar", "gloo")
LIST_METHODS = ("graphar",)  # the peers have no list form

# Past this a one-shot sends so much more than a two-shot that nobody would use it.
SYMM_ONE_SHOT_MAX_NBYTES = 16 * MB
SYMM_TWO_SHOT_MAX_NBYTES = 1 * GB


@dataclass(frozen=True)
class Method:
    """One way to all-reduce.

    Attributes:
        call: enqueues one all-reduce and returns where its result is.
        algorithm: names what a call takes; None for a peer.
        exact: it promises the specification's bits; the others round at every hop.
        in_place: the result replaces the input.
        buffer: symmetric memory that inputs must lie in.
        max_nbytes: the largest size it is measured at.
    """

    name: str
    call: Callable[[Data], Data]
    algorithm: Callable[[Data], str] | None = None
    exact: bool = False
    in_place: bool = False
    buffer: Tensor | None = None
    max_nbytes: int | None = None

    def serves(self, nbytes: int) -> bool:
        return self.max_nbytes is None or nbytes <= self.max_nbytes


def make_methods(plan: Plan) -> list[Method]:
    """The plan's methods. Collective: symmetric memory is allocated here, once."""
    makers: dict[str, Callable[[], Method]] = {
        "graphar": make_graphar,
        "nccl": lambda: Method("nccl", torch_all_reduce, in_place=True),
        "gloo": lambda: Method("gloo", torch_all_reduce, in_place=True),
    }
    if any(name.startswith("symm_") for name in plan.methods):
        buffer = symmetric_buffer(plan)
        makers["symm_one_shot"] = lambda: make_symm_one_shot(buffer)
        makers["symm_two_shot"] = lambda: make_symm_two_shot(buffer)
    return [makers[name]() for name in plan.methods]


def make_graphar() -> Method:
    """graphar as a user calls it: an ordinary tensor in, a new one out, the algorithm its own choice."""
    return Method("graphar", graphar.allreduce, algorithm=explain, exact=True)


def explain(data: Data) -> str:
    return str(graphar.explain(data).algorithm)


def torch_all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def symmetric_buffer(plan: Plan) -> Tensor:
    """One allocation for the whole world: a rendezvous of part of it can hang a later one of all."""
    dtype = getattr(torch, plan.dtype)
    numel = min(plan.max_nbytes, SYMM_TWO_SHOT_MAX_NBYTES) // dtype.itemsize
    buffer = symmetric_memory.empty(numel, dtype=dtype, device=torch.device("cuda", torch.cuda.current_device()))
    symmetric_memory.rendezvous(buffer, dist.group.WORLD.group_name)
    return buffer


def make_symm_one_shot(buffer: Tensor) -> Method:
    group_name = dist.group.WORLD.group_name

    def call(x: Tensor) -> Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group_name)

    return Method("symm_one_shot", call, buffer=buffer, max_nbytes=SYMM_ONE_SHOT_MAX_NBYTES)


def make_symm_two_shot(buffer: Tensor) -> Method:
    group_name = dist.group.WORLD.group_name

    def call(x: Tensor) -> Tensor:
        return torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group_name)

    return Method("symm_two_shot", call, in_place=True, buffer=buffer, max_nbytes=SYMM_TWO_SHOT_MAX_NBYTES)
