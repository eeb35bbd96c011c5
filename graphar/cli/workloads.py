"""Makes the calls of trials: an op on random tensors of all ranks, and the comparison of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphar import reference
from graphar.cli.specified import Results, SpecifiedCall, count_wrong, random
from graphar.communicator import Communicator
from graphar.errors import GrapharError
from graphar.numerics.partitions import split
from graphar.plan.trials import Workload
from graphar.plan.work import MATMUL_ALLREDUCE, Product
from graphar.product.multiply import choose
from graphar.product.operands import MatmulOperands
from graphar.runtime.engine import Engine

_CYCLED_NBYTES = 128 << 20  # the least bytes of the weights of "matmul", used in turn: together they do not fit into L2
_CLOSE = 0.01  # relative error of a sum of matmuls: kernels add the products in another order than torch
_CLOSE_WITH_CODEC = 0.05


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
        for rank, (found, right) in enumerate(zip(results, expected, strict=True)):
            for one, other in zip(found, right, strict=True):
                one = one.to(other.device)
                if self.exact:
                    is_right = count_wrong(one, other) == 0
                else:
                    distance = (one.float() - other.float()).norm() / other.float().norm()
                    is_right = distance.item() <= (_CLOSE_WITH_CODEC if self.workload.codec else _CLOSE)
                if not is_right:
                    raise GrapharError(f"{self.workload}: rank {rank} has a wrong result")


def _call(workload: Workload, devices: Sequence[torch.device]) -> SpecifiedCall:
    """Returns the call of every workload but "matmul"."""
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
        for one in members:
            choose(engine, work, one).multiply.make(one.step)
        return [(one.out,) for one in members]

    first = [x.to(devices[0]) for x in xs]
    return run, [
        [(reference.matmul(x, w.to(x.device)),) for x, w in zip(first, of_ranks, strict=True)] for of_ranks in weights
    ]
