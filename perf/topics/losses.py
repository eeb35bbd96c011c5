"""`python -m perf losses`: times cross-entropy losses over a large vocabulary on one GPU, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from graphar.numerics import softmax
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.softmax import Terms
from graphar.plan.call import Operands
from graphar.plan.work import Loss
from graphar.runtime.bind import loss
from perf import passes
from perf.harness.verify import count_differing, count_far
from perf.passes import BOTH, COMPILED, ITEMSIZE, OWN, TORCH, PassesPlan, Shape, compiled
from perf.report import Arguments

# rows, the columns of all ranks, ranks
SHAPES: tuple[Shape, ...] = (
    (1, 128256, 1),
    (16, 32064, 1),
    (1024, 32064, 1),
    (4096, 32064, 1),
    (4096, 128256, 1),
    (4096, 128256, 8),
    (16384, 32064, 1),
)
CPU_SHAPES: tuple[Shape, ...] = ((4, 1024, 1), (16, 4096, 2))
LIGER = "liger"
METHODS = (OWN, TORCH, COMPILED, LIGER)
FORWARD, _ = PASSES = ("forward", BOTH)
FEW_CALLS_NBYTES = 1 << 30  # of logits, from which on a graph has few calls
VERIFIED_ROWS = 64
ROUNDINGS = 8  # to bf16, of a peer: half a machine epsilon each


@dataclass(frozen=True)
class LossRow(passes.PassRow):
    """One method: see :class:`PassRow`. The logits are read once for each pass, and their gradient is written.

    Attributes:
        rows, columns: the shape of the bf16 logits of all ranks.
        ranks: the number of ranks that divide the columns. One of them is measured.
    """

    rows: int
    columns: int
    ranks: int

    @property
    def words(self) -> tuple[str]:
        return (words_of((self.rows, self.columns, self.ranks)),)


def words_of(shape: Shape) -> str:
    rows, columns, ranks = shape
    return f"{rows} x {columns}" + (f" / {ranks}" if ranks > 1 else "")


def least_nbytes(passes: str, shape: Shape) -> int:
    rows, columns, ranks = shape
    return rows * columns // ranks * ITEMSIZE * (1 if passes == FORWARD else 3)


class Own:
    """graphar's kernels on the first of several ranks. The other ranks are assumed to have the same partials."""

    def __init__(self, x: Tensor, target: Tensor, shape: Shape, result: str = "mean") -> None:
        rows, columns, self.ranks = shape
        self.work = Loss("cross_entropy", rows, x.shape[1], Terms(columns, result, ignore_index=-100))
        self.compute, self.x, self.target = loss.of_rank(x, self.work, 0, self.ranks), x, target
        self.upstream = torch.ones((), device=x.device)
        new = partial(x.new_empty, dtype=torch.float32)
        self.results = new(() if result == "mean" else rows), new(2 * rows + 1)
        self.operands, self.partials = Operands((x, target), self.results), new((rows, self.work.terms.width))
        self.compute(self.operands, self.partials, None)
        self.gathered = self.partials.expand(self.ranks, -1, -1).contiguous() if self.ranks > 1 else None

    def __call__(self, passes: str) -> tuple[Tensor, ...]:
        if self.gathered is not None:
            self.compute(self.operands, self.partials, None)
        self.compute(self.operands, None, self.gathered)
        if passes == FORWARD:
            return (self.results[0],)
        gradient = torch.empty_like(self.x)
        loss.backward(self.work, 0, self.x, self.target, self.results[1], self.upstream, gradient)
        return self.results[0], gradient


class Peer:
    """A function of logits and target, by autograd."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], x: Tensor, target: Tensor) -> None:
        self.function, self.x, self.target = function, x, target

    def __call__(self, passes: str) -> tuple[Tensor, ...]:
        if passes == FORWARD:
            return (self.function(self.x, self.target),)
        x = self.x.detach().requires_grad_()
        mean = self.function(x, self.target)
        return mean.detach(), *torch.autograd.grad(mean, x)


class Liger:
    """Liger's loss. It overwrites its logits with their gradient, so it gets a copy, and a new one to be verified."""

    def __init__(self, x: Tensor, target: Tensor) -> None:
        from liger_kernel.transformers.functional import liger_cross_entropy

        self.function, self.target = liger_cross_entropy, target
        self.x = x.clone()

    def __call__(self, passes: str) -> tuple[Tensor, ...]:
        if passes == FORWARD:
            raise NotImplementedError("it computes the gradient in the forward pass")
        mean = self.function(self.x.requires_grad_(), self.target)
        return mean.detach(), self.x.detach()


def in_fp32(x: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(x.float(), target)


def make_method(name: str, x: Tensor, target: Tensor, shape: Shape) -> Callable[[str], tuple[Tensor, ...]]:
    if name == OWN:
        return Own(x, target, shape)
    if name == LIGER:
        return Liger(x, target)
    return Peer(compiled(in_fp32) if name == COMPILED else functional.cross_entropy, x, target)


def some_rows(rows: int, device: str) -> Tensor:
    count = min(rows, VERIFIED_ROWS)
    return torch.arange(count, device=device) * rows // count


@torch.no_grad()
def wrong_of_own(method: Own, results: tuple[Tensor, ...]) -> int:
    """Counts the numbers of VERIFIED_ROWS that differ from the specification, and the mean of all rows."""
    rows, (loss_of_all, *gradient) = some_rows(len(method.x), method.x.device.type), results
    terms = method.work.terms._replace(result="none")
    x, target = method.x[rows], method.target[rows]
    part = softmax.partial(x, target, 0, LEAVES // method.ranks, terms)
    losses, state = softmax.finish(part.expand(method.ranks, -1, -1), target, x.shape[1], terms)
    of_rows = Own(method.x, method.target, (len(method.x), method.work.terms.vocab_size, method.ranks), "none")
    (each,) = of_rows(FORWARD)
    mean = softmax.tree_sum(each) / torch.tensor(float(len(method.x)), device=each.device)
    wrong = count_differing((each[rows], loss_of_all.view(1)), (losses, mean.view(1)))
    if gradient:
        wanted, count = torch.empty_like(x), method.results[1][-1:]
        upstream = method.upstream
        terms = terms._replace(result="mean")
        softmax.gradient(x, target, torch.cat([state[:-1], count]), upstream, 0, terms, wanted)
        wrong += count_differing((gradient[0][rows],), (wanted,))
    return wrong


@torch.no_grad()
def wrong_of_peer(x: Tensor, target: Tensor, results: tuple[Tensor, ...]) -> int:
    """Counts the gradients of VERIFIED_ROWS, and the loss of all, whose error is above ROUNDINGS to bf16.

    torch rounds log-probabilities to bf16, so their share of a gradient's error is as large as they are.
    """
    half, step = torch.finfo(torch.bfloat16).eps / 2, max(1, (1 << 26) // x.shape[1])
    losses = [
        functional.cross_entropy(rows.double(), of_rows, reduction="sum")
        for rows, of_rows in zip(x.split(step), target.split(step), strict=True)
    ]
    mean = torch.stack(losses).sum() / len(x)
    wrong = count_far(results[:1], (mean,), [ROUNDINGS * half * mean])
    if len(results) > 1:
        chosen = some_rows(len(x), x.device.type)
        log_probs = functional.log_softmax(x[chosen].double(), -1)
        gradient = log_probs.exp()
        limit = gradient * -log_probs
        gradient[torch.arange(len(chosen), device=x.device), target[chosen]] -= 1
        limit += gradient.abs() + torch.finfo(torch.bfloat16).tiny
        wrong += count_far((results[1][chosen],), (gradient / len(x),), [ROUNDINGS * half * limit / len(x)])
    return wrong


class Trial(passes.Trial):
    def __init__(self, name: str, of_passes: str, shape: Shape, x: Tensor, target: Tensor) -> None:
        calls = 1 if not x.is_cuda else 4 if x.nbytes >= FEW_CALLS_NBYTES else 20
        super().__init__(name, of_passes, calls, least_nbytes(of_passes, shape), x.is_cuda)
        self.method, self.x, self.target = make_method(name, x, target, shape), x, target

    def call(self) -> tuple[Tensor, ...]:
        return self.method(self.passes)

    def make_launch(self) -> Callable[[], None]:
        return super().make_launch(in_graph=self.name != LIGER)  # which waits for the GPU

    def count_wrong(self, launch: Callable[[], None]) -> int:
        if self.name != LIGER:
            return super().count_wrong(launch)
        self.method.x = self.x.clone()
        return super().count_wrong(partial(self.run, 1))

    def wrong(self, results: tuple[Tensor, ...]) -> int:
        if self.name == OWN:
            return wrong_of_own(self.method, results)
        return wrong_of_peer(self.x, self.target, results)


def rows_of(plan: PassesPlan, shape: Shape) -> Iterator[LossRow | str]:
    rows, columns, ranks = shape
    generator = torch.Generator(plan.device).manual_seed(0)
    x = 3 * torch.randn(rows, columns // ranks, dtype=torch.bfloat16, device=plan.device, generator=generator)
    target = torch.randint(columns // ranks, (rows,), device=plan.device, generator=generator)
    trials = (
        (", ".join((name, of_passes, words_of(shape))), partial(Trial, name, of_passes, shape, x, target))
        for name in plan.methods
        for of_passes in passes_of(name)
    )
    yield from passes.measure(plan.device, trials, lambda *measured: LossRow(*measured, *shape))


def passes_of(method: str) -> Sequence[str]:
    return PASSES[method == LIGER :]


@dataclass
class Losses(passes.Passes):
    rows: list[LossRow] = field(default_factory=list)

    order: ClassVar[int] = 24
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--shapes 16x32064x1 1024x128256x1 4096x32064x1 4096x128256x8",
        quick_on_gpus="--shapes 4096x32064x1",
        quick_on_cpu="--shapes 4x1024x1",
    )
    passes: ClassVar = PASSES
    compared: ClassVar = BOTH
    methods: ClassVar = METHODS
    shapes: ClassVar = (SHAPES, CPU_SHAPES)
    numbers: ClassVar = (
        "rows, columns of all ranks, and ranks, such as 4096x128256x8 (default: seven, from 1 to 16384 rows)"
    )
    metavar: ClassVar = "MxVxN"
    header: ClassVar = ("rows x columns / ranks",)
    rows_of: ClassVar = staticmethod(rows_of)
    words_of: ClassVar = staticmethod(words_of)

    @classmethod
    def count(cls, plan: PassesPlan) -> int:
        return len(plan.shapes) * sum(len(passes_of(name)) for name in plan.methods)
