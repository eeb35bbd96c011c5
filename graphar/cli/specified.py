"""Calls of ops on the tensors of all ranks, with the results that the specification gives, and calls of trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

import graphar
from graphar import reference
from graphar.communicator import Communicator
from graphar.errors import GrapharError
from graphar.numerics.dtypes import SAME_SIZE_INTEGER
from graphar.numerics.partitions import split
from graphar.plan.algorithms import Algorithm
from graphar.plan.tune import Workload
from graphar.plan.work import MATMUL_ALLREDUCE, Product
from graphar.product.multiply import choose
from graphar.product.operands import MatmulOperands
from graphar.runtime.engine import Engine

DTYPE = torch.bfloat16

OfRanks = Sequence[torch.Tensor]  # a tensor for each rank
Results = Sequence[OfRanks]  # by rank, the tensors that it gets

_CYCLED_NBYTES = 128 << 20  # the least bytes of the weights of "matmul", used in turn: together they do not fit into L2
_CLOSE = 0.01  # relative error of a sum of matmuls: kernels add the products in another order than torch
_CLOSE_WITH_CODEC = 0.05
_WINDOW = 1 << 24  # elements of a sum that are computed at a time, for its fp32 needs much memory; whole buckets
_WITH_CODEC = {"allreduce": reference.quantized_allreduce, "reducescatter": reference.quantized_reducescatter}


class SpecifiedCall:
    """A call of the function ``op`` of graphar on the tensors of all ranks.

    ``operands`` has the tensors of all ranks for each of the function's arguments, and ``equal`` further arguments,
    each equal on all ranks. The specification of a fused matmul ignores its codec.
    """

    def __init__(self, op: str, operands: Sequence[OfRanks], equal: OfRanks = (), **options) -> None:
        self._op, self._operands, self._equal, self._options = op, operands, equal, options

    def over(self, ranks: Communicator) -> Callable[[], Results]:
        """Returns a function that makes the call. Its tensors are on the devices of ``ranks`` already."""
        operands = [*self._operands, *([tensor] * ranks.world_size for tensor in self._equal)]
        placed = [[x.to(device) for x, device in zip(xs, ranks.devices or (), strict=True)] for xs in operands]

        def call() -> Results:
            results = getattr(graphar, self._op)(*placed, group=ranks, **self._options)
            return list(zip(*(results if isinstance(results, tuple) else (results,)), strict=True))

        return call

    def expected(self) -> Results:
        """Returns the specification's results, computed on the device of the first rank's tensor."""
        first = self._operands[0][0].device
        algorithm = self._options.get("algorithm", "auto")
        own: Any = None if algorithm == "auto" else Algorithm(algorithm).row.specification  # in place of the op's
        specification = own or getattr(reference, self._op)
        if self._options.get("codec") and self._op in _WITH_CODEC:
            specification = partial(_WITH_CODEC[self._op], codec=self._options["codec"])
        if self._op == "allreduce" and not own:
            (xs,), total = self._operands, torch.empty_like(self._operands[0][0])
            for begin in range(0, total.numel(), _WINDOW):
                window = slice(begin, begin + _WINDOW)
                total.view(-1)[window] = specification([x.view(-1)[window].to(first) for x in xs])
            return [(total,)] * len(xs)
        copies = ([x.to(first, copy=bool(own)) for x in xs] for xs in self._operands)  # `own` may write to them
        operands = [*copies, *(tensor.to(first) for tensor in self._equal)]
        if self._op == "fused_allgather_matmul":  # specified for the weight of one rank
            a, weights = operands
            of_ranks = [specification(a, w) for w in weights]
        elif "reducescatter" in self._op or self._op == "alltoall":  # specified for each rank
            of_ranks = specification(*operands)
        else:  # every rank gets the same
            of_ranks = [specification(*operands)] * len(self._operands[0])
        return [results if isinstance(results, tuple) else (results,) for results in of_ranks]


def random(
    devices: Sequence[torch.device | str], shape: int | tuple[int, ...], seed: int = 0, dtype: torch.dtype = DTYPE
) -> list[torch.Tensor]:
    """Returns a tensor of normal random values on each rank's device; other seeds and ranks give other values."""
    made = []
    for rank, device in enumerate(devices):
        generator = torch.Generator(device).manual_seed(1000 * seed + rank)
        made.append(torch.randn(shape, dtype=dtype, device=device, generator=generator))
    return made


def count_wrong(result: torch.Tensor, expected: torch.Tensor) -> int:
    """Returns how many elements of two tensors on one device differ in any bit."""
    kind = SAME_SIZE_INTEGER[result.itemsize]
    return int((result.view(kind) != expected.view(kind)).sum())


class Prepared:
    """A workload with its tensors on the communicator's devices."""

    def __init__(self, workload: Workload, communicator: Communicator) -> None:
        self.workload = workload
        # Whether results must have the bits of `expected`.
        self.exact = workload.op not in ("matmul", "matmul_allreduce", "allgather_matmul")
        # `run` makes the call with the given number, on the current streams, and returns each rank's results.
        # `expected` are the ranks' results of the first calls, on the first device; later calls repeat them.
        self.run: Callable[[int], Results]
        self.expected: Sequence[Results]
        devices = communicator.devices or ()
        if workload.op == "matmul":
            self.run, self.expected = _matmul(workload, devices, communicator.engine)
        else:
            call = _call(workload, devices)
            make, self.expected = call.over(communicator), [call.expected()]
            self.run = lambda at: make()

    def check(self, at: int, results: Results) -> None:
        """Raises GrapharError if a rank's results of call ``at`` are not the expected ones."""
        expected = self.expected[at % len(self.expected)]
        for rank, pair in enumerate(zip(results, expected, strict=True)):
            for result, right in zip(*pair, strict=True):
                result = result.to(right.device)
                if self.exact:
                    is_right = count_wrong(result, right) == 0
                else:
                    distance = (result.float() - right.float()).norm() / right.float().norm()
                    is_right = distance.item() <= (_CLOSE_WITH_CODEC if self.workload.codec else _CLOSE)
                if not is_right:
                    raise GrapharError(f"{self.workload}: rank {rank} has a wrong result")


def _call(workload: Workload, devices: Sequence[torch.device]) -> SpecifiedCall:
    op, rows, columns, k = workload.op, workload.rows, workload.columns, workload.k
    codec: dict[str, Any] = {"codec": workload.codec} if workload.codec else {}
    named = {"algorithm": workload.algorithm} if workload.algorithm != "auto" else {}
    if op == "allgather_matmul":
        whole = random(devices[:1], (rows, k))[0]
        operands = [whole.split(split(rows, len(devices))), random(devices, (columns, k), seed=1)]
        return SpecifiedCall("fused_allgather_matmul", operands, partition=workload.partition)
    if op == "matmul_allreduce":
        operands = [random(devices, (rows, k)), random(devices, (columns, k), seed=1)]
        return SpecifiedCall("fused_matmul_allreduce", operands, partition=workload.partition, **codec)
    xs, equal = random(devices, (rows, columns), dtype=workload.dtype), []
    if op == "allreduce_residual_rmsnorm":
        equal = [*random(devices[:1], (rows, columns), seed=1), *random(devices[:1], columns, seed=2)]
    return SpecifiedCall(op, [xs], equal, **codec, **named)


def _matmul(
    workload: Workload, devices: Sequence[torch.device], engine: Engine
) -> tuple[Callable[[int], Results], Sequence[Results]]:
    """A matmul on each rank, by the one that the communicator's table takes before a sum."""
    m, n, k = workload.rows, workload.columns, workload.k
    work = Product(MATMUL_ALLREDUCE, (m,), n)
    count = next(count for count in (4, 6, 12) if count == 12 or count * 2 * n * k >= _CYCLED_NBYTES)
    xs = random(devices, (m, k))
    weights = [random(devices, (n, k), seed=1 + at) for at in range(count)]

    def run(at: int) -> Results:
        pairs = zip(xs, weights[at % count], strict=True)
        members = [MatmulOperands(x, w, None, out=x.new_empty(m, n)) for x, w in pairs]
        for operands in members:
            choose(engine, work, operands).make(operands.step)
        return [(operands.out,) for operands in members]

    first = [x.to(devices[0]) for x in xs]
    return run, [
        [(reference.linear(x, w.to(x.device)),) for x, w in zip(first, of_ranks, strict=True)] for of_ranks in weights
    ]
