"""A call of an op on the tensors of all ranks, with the results that the specification gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

import graphar
from graphar import reference
from graphar.communicator import Communicator
from graphar.plan.algorithms import Algorithm

DTYPE = torch.bfloat16

OfRanks = Sequence[torch.Tensor]  # a tensor for each rank
Results = Sequence[OfRanks]  # by rank, the tensors that it gets


_WITH_CODEC = {"allreduce": reference.quantized_allreduce, "reducescatter": reference.quantized_reducescatter}


class SpecifiedCall:
    """A call of an op on the tensors of all ranks.

    Args:
        op: the name of the op's function in graphar.
        operands: the tensors of all ranks, for each of the function's arguments.
        equal: further arguments, each equal on all ranks.
        options: of the function. The specification of a fused matmul ignores its codec. An algorithm from outside the
            package may have a specification of its own.
    """

    def __init__(self, op: str, operands: Sequence[OfRanks], equal: OfRanks = (), **options) -> None:
        self._op, self._operands, self._equal, self._options = op, operands, equal, options

    def over(self, ranks: Communicator) -> Callable[[], Results]:
        """Returns a function that makes the call. Its tensors are on the devices of ``ranks`` already."""
        operands = [*self._operands, *([one] * ranks.world_size for one in self._equal)]
        placed = [[x.to(device) for x, device in zip(xs, ranks.devices or (), strict=True)] for xs in operands]
        return lambda: _by_rank(getattr(graphar, self._op)(*placed, group=ranks, **self._options))

    def expected(self) -> Results:
        """Returns the specification's results, computed on the device of the first rank's tensor."""
        first = self._operands[0][0].device
        operands = [*([x.to(first) for x in xs] for xs in self._operands), *(one.to(first) for one in self._equal)]
        specification = own_specification(self._options.get("algorithm", "auto")) or getattr(reference, self._op)
        if self._options.get("codec") and self._op in _WITH_CODEC:
            specification = partial(_WITH_CODEC[self._op], codec=self._options["codec"])
        if self._op == "fused_allgather_matmul":  # specified for the weight of one rank
            a, weights = operands
            of_ranks = [specification(a, w) for w in weights]
        elif "reducescatter" in self._op or self._op == "alltoall":  # specified for each rank
            of_ranks = specification(*operands)
        else:  # every rank gets the same
            of_ranks = [specification(*operands)] * len(self._operands[0])
        return [one if isinstance(one, tuple) else (one,) for one in of_ranks]


def own_specification(algorithm: str) -> Callable | None:
    """Returns what an algorithm computes in place of the op's specification, or None."""
    return None if algorithm == "auto" else Algorithm(algorithm).row.specification


def _by_rank(found: list[torch.Tensor] | tuple[list[torch.Tensor], ...]) -> Results:
    return list(zip(*found, strict=True)) if isinstance(found, tuple) else [(one,) for one in found]


def random(
    devices: Sequence[torch.device | str], shape: int | tuple[int, ...], seed: int = 0, dtype: torch.dtype = DTYPE
) -> list[torch.Tensor]:
    """Returns a tensor of normal random values on each rank's device; other seeds and ranks give other values."""
    made = []
    for rank, device in enumerate(devices):
        generator = torch.Generator(device).manual_seed(1000 * seed + rank)
        made.append(torch.randn(shape, dtype=dtype, device=device, generator=generator))
    return made


def count_wrong(found: torch.Tensor, expected: torch.Tensor) -> int:
    """Returns how many elements of two tensors on one device differ in any bit."""
    kind = {2: torch.int16, 4: torch.int32}[found.itemsize]
    return int((found.view(kind) != expected.view(kind)).sum())
