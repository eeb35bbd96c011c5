"""Sums whose rows lie in parts on the ranks, gathered, with residual and norm: cuda_src/allgather_rmsnorm.cu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from graphar import kernels, launcher
from graphar.algorithms import PACK_NBYTES, WARP, Algorithm, Slice, row_slices, scratch
from graphar.epilogues.epilogue import Operands
from graphar.launches import Launches
from graphar.matmul import sm_count

if TYPE_CHECKING:
    from graphar.runner import Member, Runner

_ALGORITHM = Algorithm.ALLGATHER_RMSNORM


class NormParts:
    """The norms of one communicator whose sums another kernel has left in parts.

    Args:
        runner: the communicator's.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launches = Launches()

    def run(
        self,
        sums: Sequence[torch.Tensor],
        residual: Sequence[torch.Tensor],
        weight: Sequence[torch.Tensor],
        normed: Sequence[torch.Tensor],
        summed: Sequence[torch.Tensor],
        counts: tuple[int, ...],
        numbers: tuple[float, float],
        timeout_s: float,
    ) -> None:
        """Launches on the members' current streams; lists have a tensor for each member. Collective at first.

        Args:
            sums: [counts[rank], columns], this rank's rows of the sum, without gaps, as are the others; of
                graphar.kernels.TYPE_NAMES, and columns that :func:`graphar.choice.has_norm_kernel` has a kernel for.
            residual: [M, columns], the same on every rank.
            weight: [columns], likewise.
            normed, summed: [M, columns], take the results.
            counts: the rows of each rank, M in all and not 0.
            numbers: eps and the weight's offset.
            timeout_s: the deadline of each wait on another rank.
        """
        columns, runner = weight[0].numel(), self._runner
        functions = self._prepare(sums[0].dtype)
        runner.raise_failure()  # before any of them launches
        step = scratch(_ALGORITHM, runner.world_size).capacity * PACK_NBYTES // (columns * sums[0].element_size())
        for one in row_slices(counts, step):
            for at, (member, function) in enumerate(zip(runner.members, functions, strict=True)):
                operands = Operands([residual[at], weight[at], summed[at]], list(numbers))
                launch = self._bind(member, function, one, normed[at], columns, timeout_s)
                launch(sums[at][one.offset :], normed[at], operands)

    def _prepare(self, dtype: torch.dtype) -> list:
        def load() -> list:
            source = kernels.kernel_source(_ALGORITHM.value, dtype, self._runner.world_size)
            shared_nbytes = scratch(_ALGORITHM, self._runner.world_size).shared_nbytes
            return [self._runner.load_for(one, _ALGORITHM, source, shared_nbytes) for one in self._runner.members]

        return self._runner.prepare_kernel((_ALGORITHM, dtype), _ALGORITHM, str(dtype), load)

    def _bind(
        self, member: Member, function, one: Slice, normed: torch.Tensor, columns: int, timeout_s: float
    ) -> Callable:
        key = member.rank, normed.dtype, normed.numel(), columns, one, timeout_s
        launch = self._launches.get(key)
        if launch is None:
            begin, count = (tuple(rows * columns for rows in of_ranks) for of_ranks in (one.begin, one.count))
            whole = replace(one, numel=normed.numel(), begin=begin, count=count)
            arguments = self._runner.arguments(member, _ALGORITHM, whole, timeout_s)
            arguments.epilogue.columns = columns
            packs = columns * normed.element_size() // PACK_NBYTES
            enqueue = launcher.make_launch(
                function,
                arguments,
                min(sm_count(member.device), max(one.count)),
                min(1024, max(WARP, 1 << (packs - 1).bit_length())),
                scratch(_ALGORITHM, self._runner.world_size).shared_nbytes,
                launcher.can_overlap(member.device),
            )
            launch = self._launches.keep(key, self._runner.bind_with_operands(member, enqueue, arguments.epilogue))
        return launch
