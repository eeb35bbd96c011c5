"""Makes the calls of trials: an op on random tensors of all GPUs, and the comparison of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

import graphar
from graphar import reference
from graphar.communicator import Communicator
from graphar.errors import GrapharError
from graphar.numerics.partitions import split
from graphar.plan.trials import Workload

DTYPE = torch.bfloat16
WEIGHTS = 4  # weights of "prefetch", used in turn: together they do not fit into L2
_CLOSE = 0.01  # relative error of a sum of matmuls: kernels add the products in another order than torch
_CLOSE_WITH_CODEC = 0.05

Results = Sequence[Sequence[torch.Tensor]]  # by rank


class Prepared:
    """A workload with its tensors on the communicator's devices."""

    def __init__(self, workload: Workload, communicator: Communicator) -> None:
        self.workload, self._communicator = workload, communicator
        # Whether results must have the bits of `expected`.
        self.exact = workload.op not in ("matmul_allreduce", "allgather_matmul", "prefetch")
        # `run` makes the call with the given number, on the current streams, and returns each rank's results.
        # `expected` are the ranks' results of the first calls, on the first device; later calls repeat them.
        self.run, self.expected = _MAKERS[workload.op](workload, communicator)

    def check(self, at: int, results: Results) -> None:
        """Raises GrapharError if a rank's results of call ``at`` are not the expected ones."""
        close = _CLOSE_WITH_CODEC if self.workload.codec else _CLOSE
        expected = self.expected[at % len(self.expected)]
        for rank, (found, right) in enumerate(zip(results, expected, strict=True)):
            for one, other in zip(found, right, strict=True):
                one = one.to(other.device)
                if not (same_bits(one, other) if self.exact else _distance(one, other) <= close):
                    raise GrapharError(f"{self.workload}: rank {rank} has a wrong result")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors of one dtype are equal bit for bit."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the relative error of ``one`` in the Euclidean norm."""
    return ((one.float() - other).norm() / other.norm()).item()


def _random(communicator: Communicator, *shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> list[torch.Tensor]:
    """Returns a normal random tensor for each rank; other seeds and ranks give other numbers."""
    made = []
    for rank, device in enumerate(communicator.devices):
        generator = torch.Generator(device).manual_seed(1000 * seed + rank)
        made.append(torch.randn(*shape, dtype=dtype, device=device, generator=generator))
    return made


def _same_on_all(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [xs[0].to(x.device) for x in xs]


def _on_first(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.to(xs[0].device) for x in xs]


def _sums(call: Callable, specified: Callable, workload: Workload, communicator: Communicator) -> tuple:
    xs = _random(communicator, workload.rows, workload.columns, dtype=workload.dtype)
    codec = {"codec": workload.codec} if workload.codec else {}
    right = specified(_on_first(xs), **codec)
    return lambda at: [(x,) for x in call(xs, communicator, **codec)], [[(one,) for one in right]]


def _allreduce(xs: list[torch.Tensor], codec: str = "") -> list[torch.Tensor]:
    return [reference.quantized_allreduce(xs, codec) if codec else reference.allreduce(xs)] * len(xs)


def _allgather(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [reference.allgather(xs)] * len(xs)


def _norm(workload: Workload, communicator: Communicator) -> tuple:
    xs = _random(communicator, workload.rows, workload.columns)
    residuals = _same_on_all(_random(communicator, workload.rows, workload.columns, seed=1))
    weights = _same_on_all(_random(communicator, workload.columns, seed=2))
    right = reference.allreduce_residual_rmsnorm(_on_first(xs), residuals[0], weights[0])
    norm = partial(graphar.allreduce_residual_rmsnorm, xs, residuals, weights, group=communicator)
    return lambda at: list(zip(*norm(), strict=True)), [[right] * len(xs)]


def _matmul(workload: Workload, communicator: Communicator) -> tuple:
    a = _random(communicator, workload.rows, workload.k)
    w = _random(communicator, workload.columns, workload.k, seed=1)
    total = sum(x.float() for x in _on_first([x @ y.t() for x, y in zip(a, w, strict=True)]))
    how = {"group": communicator, "partition": workload.partition, "codec": workload.codec or None}
    call = partial(graphar.fused_matmul_allreduce, a, w, **how)
    return lambda at: [(x,) for x in call()], [[(total,)] * len(a)]


def _allgather_matmul(workload: Workload, communicator: Communicator) -> tuple:
    parts = split(workload.rows, len(communicator.devices))
    whole = _random(communicator, workload.rows, workload.k)[0]
    rows = zip(whole.split(parts), communicator.devices, strict=True)
    a, w = [part.to(device) for part, device in rows], _random(communicator, workload.columns, workload.k, seed=1)
    right = [(whole @ y.t(),) for y in _on_first(w)]
    call = partial(graphar.fused_allgather_matmul, a, w, group=communicator, partition=workload.partition)
    return lambda at: [(x,) for x in call()], [[(one.float(),) for (one,) in right]]


def _prefetch(workload: Workload, communicator: Communicator) -> tuple:
    """An all-reduce and the matmul that follows it, whose weight the all-reduce prefetches."""
    xs = _random(communicator, workload.rows, workload.columns)
    weights = [_random(communicator, workload.k, workload.columns, seed=1 + at) for at in range(WEIGHTS)]
    total = reference.allreduce(_on_first(xs)).float()

    def run(at: int) -> Results:
        of_ranks = weights[at % WEIGHTS]
        sums = graphar.allreduce(xs, communicator, prefetch=of_ranks)
        return [(torch.mm(x, w.t()),) for x, w in zip(sums, of_ranks, strict=True)]

    return run, [[(total @ w.float().t(),) for w in _on_first(of_ranks)] for of_ranks in weights]


_MAKERS = {
    "allreduce": partial(_sums, graphar.allreduce, _allreduce),
    "reducescatter": partial(_sums, graphar.reducescatter, reference.reducescatter),
    "allgather": partial(_sums, graphar.allgather, _allgather),
    "allreduce_residual_rmsnorm": _norm,
    "matmul_allreduce": _matmul,
    "allgather_matmul": _allgather_matmul,
    "prefetch": _prefetch,
}
