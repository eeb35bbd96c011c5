"""A small mistake in a kernel, which the runs on the host must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphar.plan.algorithms import Algorithm
from graphar.runtime.catalogue import file_of
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


Mistakes = dict[str, Mutation | tuple[str, ...]]


def mutants_of(mistakes: dict[str | tuple, Mistakes]) -> tuple[Mutant, ...]:
    """Returns mutants by algorithm, or by algorithm, sanitizer and world size.

    A mistake is a text of a file and what takes its place. Without a file it is in the algorithm's own.
    """
    made = []
    for key, of_algorithm in mistakes.items():
        name, *more = (key,) if isinstance(key, str) else key
        algorithm = Algorithm(name)
        for what, mistake in of_algorithm.items():
            if not isinstance(mistake, Mutation):
                mistake = Mutation(*mistake) if len(mistake) == 3 else Mutation(file_of(algorithm), *mistake)
            made.append(Mutant(what, mistake, algorithm, *more))
    return tuple(made)


def notices(run: Callable[[], object]) -> bool:
    """Whether a run of kernels that have a mistake finds something wrong, or fails."""
    try:
        return bool(run())
    except KernelFailure:
        return True
