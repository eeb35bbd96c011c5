"""What is simulated: the row, the kernels and the specification of an algorithm. One look-up serves all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from graphar import reference
from graphar.numerics.dtypes import BYTE
from graphar.plan.algorithms import TUPLE_VARIANT, Algorithm, is_from_outside, kernels_that, rows
from graphar.plan.row import Row
from graphar.plan.scratch import PACK_NBYTES, Sizes
from graphar.runtime.catalogue import KernelSource, kernel_source

# A function from the ranks' tensors and the elements of each rank's part to the ranks' results.
Specification = Callable[[Sequence[torch.Tensor], Sequence[int]], Sequence[torch.Tensor]]

_SPECIFICATIONS: dict[str, Specification] = {
    "allreduce": lambda xs, counts: [reference.allreduce(xs)] * len(xs),
    "reducescatter": lambda xs, counts: reference.allreduce(xs).split(list(counts)),
    "allgather": lambda xs, counts: [reference.allgather(xs)] * len(xs),
    "alltoall": lambda xs, counts: reference.alltoall(xs, sizes=[counts] * len(xs)),
}
ALGORITHMS = kernels_that(lambda row: row.op in _SPECIFICATIONS and not row.takes_codec)


def small(part_nbytes: int, parts: int) -> Sizes:
    """Returns sizes of scratch that a tensor fills, so that slots are used again and chunks are many.

    The tensor has ``parts`` parts, of which the largest has ``part_nbytes``.
    """
    nbytes = -(-part_nbytes * parts // PACK_NBYTES) * PACK_NBYTES
    return Sizes(
        pushed_nbytes=nbytes,
        pushed_nbytes_of_two=nbytes,
        one_shot_nbytes=nbytes,
        two_shot_nbytes=nbytes,
        pipeline_chunk=8,
        pipeline_blocks=4,
        tma_channel_nbytes=4096,
        lossless_chunk=2,
        reducescatter_nbytes=nbytes,
        allgather_flagged_nbytes=part_nbytes,
        allgather_chunk=8,
        allgather_blocks=4,
    )


@dataclass(frozen=True)
class Subject:
    """An algorithm to be simulated."""

    algorithm: Algorithm  # which
    variants: tuple[str | None, ...]  # the variants of its kernel, the usual one first
    specification: Specification  # what every rank must get

    def row(self, numel: int, dtype: torch.dtype, world_size: int) -> Row:
        """Returns the row with scratch that a tensor of ``numel`` elements fills, or one whose largest part has them.

        An algorithm from outside keeps its own.
        """
        if self.is_from_outside:
            return self.algorithm.row
        parts = 1 if self.algorithm.op == "allreduce" else world_size
        return rows(small(numel * dtype.itemsize, parts))[self.algorithm]

    @property
    def is_from_outside(self) -> bool:
        return bool(self.algorithm.row.digest)

    def fitting(self, numels: Sequence[int], world_size: int, dtype: torch.dtype) -> list[int]:
        """Returns the elements of a tensor, or of the largest part, that the algorithm takes."""
        limit = self.algorithm.row.limit(world_size) if self.is_from_outside else None
        return [numel for numel in numels if limit is None or numel * dtype.itemsize <= limit]

    def takes(self, dtype: torch.dtype) -> bool:
        return self.moves_bytes or dtype in self.algorithm.row.dtypes

    @property
    def moves_bytes(self) -> bool:
        """Whether the kernel is the same for all dtypes."""
        return self.algorithm.row.dtypes == (BYTE,)

    def sources(self, world_size: int, dtype: torch.dtype) -> tuple[KernelSource, ...]:
        """Returns the kernels of all variants."""
        element = BYTE if self.moves_bytes else dtype
        return tuple(kernel_source(self.algorithm, element, world_size, variant) for variant in self.variants)


def find(name: str | Algorithm) -> Subject:
    """Returns the algorithm of a name. ValueError without one, or if the simulator has no cases for it."""
    if is_from_outside(name):
        algorithm = Algorithm(name)
        return Subject(algorithm, (None,), _of_row(algorithm.row))
    if name not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, or be loaded; got {str(name)!r}")
    algorithm = Algorithm(name)
    variants = tuple(variant for variant in algorithm.row.variants if variant != TUPLE_VARIANT)
    return Subject(algorithm, variants, _SPECIFICATIONS[algorithm.op])


def _of_row(row: Row) -> Specification:
    """Returns the specification of an algorithm from outside: its own, or that of its op."""
    specification = row.specification
    if specification is None:
        return _SPECIFICATIONS[row.op]

    def specify(xs: Sequence[torch.Tensor], counts: Sequence[int]) -> Sequence[torch.Tensor]:
        results = specification([x.clone() for x in xs])  # it may overwrite its arguments
        return [results] * len(xs) if isinstance(results, torch.Tensor) else results

    return specify
