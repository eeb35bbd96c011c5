"""A small mistake in a kernel, which the runs on the host must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphar.plan.algorithms import Algorithm
from graphar.simulator.build import Mutation
from graphar.simulator.simulation import KernelFailure


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the runs that notice it.

    Attributes:
        name: what is wrong, in words.
        mutation: how it is made.
        algorithm: whose kernel is run.
        sanitizer: "thread" if the mistake breaks only an order that the host's memory keeps anyway; else "plain".
        world_size: ranks.
    """

    name: str
    mutation: Mutation
    algorithm: Algorithm
    sanitizer: str = "plain"
    world_size: int = 3


def mutant(name: str, file: str, old: str, new: str, algorithm: str, sanitizer: str = "plain", world_size: int = 3):
    return Mutant(name, Mutation(file, old, new), Algorithm(algorithm), sanitizer, world_size)


def notices(run: Callable[[], object]) -> bool:
    """Whether a run of kernels that have a mistake finds something wrong, or fails."""
    try:
        return bool(run())
    except KernelFailure:
        return True
