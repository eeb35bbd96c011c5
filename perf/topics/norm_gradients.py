"""`python -m perf norm_gradients`: times the backward pass of residual and RMSNorm on one GPU, and forward with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from graphar.errors import UnsupportedError
from graphar.numerics import norm_gradients
from graphar.numerics import norms as norm_numerics
from graphar.runtime.availability import missing_software
from graphar.runtime.bind import residual_norm
from perf import passes
from perf.harness.verify import count_differing, count_far
from perf.models.decoder import EPS, add_and_norm
from perf.passes import BOTH, COMPILED, ITEMSIZE, OWN, TORCH, PassesPlan, Shape, compiled
from perf.report import Arguments
from perf.topics.norms import OFFSET

# rows, columns
SHAPES: tuple[Shape, ...] = ((16, 8192), (128, 8192), (512, 2048), (2048, 5120), (2048, 16384), (4096, 8192))
SHAPES += ((8192, 4096), (16384, 1024), (16384, 4096))
CPU_SHAPES: tuple[Shape, ...] = ((16, 1024), (64, 264))
METHODS = (OWN, TORCH, COMPILED)
BACKWARD, _ = PASSES = ("backward", BOTH)
CALLS = {"cuda": 20, "cpu": 1}
# The most roundings to bf16 between a peer's inputs and a result, see :func:`exact`.
ROUNDINGS = 8
NO_KERNEL = "graphar has no kernel for these rows on this GPU"


@dataclass(frozen=True)
class NormGradientRow(passes.PassRow):
    """One method: see :class:`PassRow`. All operands and results are read or written once.

    Attributes:
        rows, columns: the shape of the bf16 tensors.
        summed: whether the sum of input and residual has a gradient of its own.
    """

    rows: int
    columns: int
    summed: bool

    @property
    def words(self) -> tuple[str, str]:
        return words_of((self.rows, self.columns)), with_sum(self.summed)

    @property
    def cells(self) -> tuple[str, str]:
        return self.words[0], "yes" if self.summed else "no"


def words_of(shape: Shape) -> str:
    return "{} x {}".format(*shape)


def with_sum(summed: bool) -> str:
    return f"{'with' if summed else 'without'} a gradient of the sum"


def least_nbytes(passes: str, shape: Shape, summed: bool) -> int:
    """Returns the bytes of all operands and results. The new residual counts twice if both passes are measured."""
    tensor, weight = shape[0] * shape[1] * ITEMSIZE, shape[1] * ITEMSIZE
    backward = (3 + summed) * tensor + 2 * weight
    return backward if passes == BACKWARD else backward + 4 * tensor + weight


class Operands(NamedTuple):
    """The bf16 tensors of a case. The first three are leaves of autograd."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    of_normed: Tensor
    of_summed: Tensor | None


Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # (x, residual, weight) -> (normed, summed)
# (normed, summed, operands, whether it runs again) -> the gradients of x, residual and weight
Backward = Callable[[Tensor, Tensor, Operands, bool], tuple[Tensor, ...]]
Method = tuple[Forward, Backward]


def make_operands(shape: Shape, summed: bool, device: str) -> Operands:
    """Returns random data whose gradients have no negligible term.

    The gradient of the normed rows correlates with the rows. With independent data the mean in a row's gradient would
    nearly vanish, and a method without it would seem right.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = (shape, shape, shape[1:], shape, shape)
    draw = partial(torch.randn, dtype=torch.bfloat16, device=device, generator=generator)
    x, residual, weight, noise, of_summed = (draw(size) for size in shapes)
    leaves = [tensor.requires_grad_() for tensor in (x, residual, 1 + weight / 4)]
    return Operands(*leaves, noise + x.detach(), of_summed if summed else None)


def make_method(name: str, summed: bool) -> Method:
    if name == OWN:
        return own_forward, own_backward
    function = add_and_norm if summed else add_and_norm_detached
    return compiled(function) if name == COMPILED else function, autograd


@torch.no_grad()
def own_forward(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if not x.is_cuda:
        return norm_numerics.specification(x, residual, weight, EPS, OFFSET)
    if not residual_norm.serves(x):
        raise UnsupportedError(missing_software() or NO_KERNEL)
    normed, summed = torch.empty_like(x), torch.empty_like(x)
    residual_norm.norm(x, residual, weight, normed, summed, EPS, OFFSET)
    return normed, summed


@torch.no_grad()
def own_backward(normed: Tensor, summed: Tensor, operands: Operands, retain: bool) -> tuple[Tensor, ...]:
    if summed.is_cuda and not residual_norm.serves_backward(summed):  # the op would take its specification
        raise UnsupportedError(missing_software() or NO_KERNEL)
    op = torch.ops.graphar.residual_rmsnorm_backward
    of_rows, of_weight = op(operands.of_normed, operands.of_summed, summed, operands.weight, EPS, OFFSET, True, 0)
    return of_rows, of_rows, of_weight


def add_and_norm_detached(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the results of ``add_and_norm``, the sum without gradient. Otherwise autograd would add zeros to it."""
    normed, summed = add_and_norm(x, residual, weight)
    return normed, summed.detach()


def autograd(normed: Tensor, summed: Tensor, operands: Operands, retain: bool) -> tuple[Tensor, ...]:
    outputs = [(normed, operands.of_normed), (summed, operands.of_summed)]
    used, gradients = zip(*[pair for pair in outputs if pair[1] is not None], strict=True)
    return torch.autograd.grad(used, operands[:3], gradients, retain_graph=retain)


@torch.no_grad()
def specified(operands: Operands) -> tuple[Tensor, ...]:
    """Returns the bits that graphar promises: normed rows, sums, the gradients of x and residual, and the weight's."""
    normed, summed = norm_numerics.specification(*operands[:3], EPS, OFFSET)
    gradients = operands.of_normed, operands.of_summed
    of_rows, of_weight = norm_gradients.specification(*gradients, summed, operands.weight, EPS, OFFSET)
    return normed, summed, of_rows, of_rows, of_weight


@torch.no_grad()
def exact(operands: Operands) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the results of :func:`specified` in fp64, and the errors that a peer may have.

    Let r be the rounded sum, s = 1 / its root mean square, u = r s, and g w the gradient times the weight. A row's
    gradient is s (g w) - s u mean(g w u) + of_summed.

    A rounding to bf16 changes a number by at most half a machine epsilon. A peer that does not round the sum, such as a
    compiled norm, differs by half an epsilon in each r, and so in each s. The second term has s once and u twice, and
    each u has an r and an s: 1 + 2 + 2 changes. Rounding g w, the result, and its sum with of_summed makes three more:
    ROUNDINGS. The other terms and results have fewer. So an error may be ROUNDINGS times half an epsilon of the sum of
    the terms' magnitudes. Sums in fp32 add much less, because the errors of s average out.
    """
    x, residual, weight, of_normed, more = operands
    r, w, g = (tensor.double() for tensor in (x + residual, weight + OFFSET, of_normed))
    s = (r.square().mean(-1, keepdim=True) + EPS).rsqrt()
    u, scaled = r * s, g * w
    second = s * u * (scaled * u).mean(-1, keepdim=True)
    of_rows, magnitude = s * scaled - second, s * (scaled.abs() + u.abs() * (scaled * u).abs().mean(-1, keepdim=True))
    if more is not None:
        of_rows, magnitude = of_rows + more, magnitude + more.abs()
    normed, terms = u * w, g * u
    values = normed, r, of_rows, of_rows, terms.sum(0)
    share = ROUNDINGS * torch.finfo(x.dtype).eps / 2
    limits = [share * size for size in (normed.abs(), r.abs(), magnitude, magnitude, terms.abs().sum(0))]
    return values, tuple(limits)


class Trial(passes.Trial):
    """Its results are gradients, for BOTH after normed rows and sums."""

    def __init__(self, name: str, of_passes: str, method: Method, operands: Operands) -> None:
        shape, summed = operands.x.shape, operands.of_summed is not None
        on_gpu = operands.x.is_cuda
        calls = CALLS["cuda" if on_gpu else "cpu"]
        super().__init__(name, of_passes, calls, least_nbytes(of_passes, shape, summed), on_gpu)
        self.operands, (self._forward, self._backward) = operands, method
        self._retained: tuple[Tensor, Tensor] | None = None

    def call(self) -> tuple[Tensor, ...]:
        if self.passes == BACKWARD:
            return self._backward(*self._retained, self.operands, True)
        outputs = self._forward(*self.operands[:3])
        return *outputs, *self._backward(*outputs, self.operands, False)

    def make_launch(self) -> Callable[[], None]:
        if self.passes == BACKWARD:
            self._retained = self._forward(*self.operands[:3])
        return super().make_launch()

    def wrong(self, results: tuple[Tensor, ...]) -> int:
        if self.name == OWN:
            return count_differing(results, specified(self.operands)[-len(results) :])
        values, limits = exact(self.operands)
        return count_far(results, values[-len(results) :], limits[-len(results) :])


def rows_of(plan: PassesPlan, shape: Shape) -> Iterator[NormGradientRow | str]:
    for summed in (True, False):
        trials, more = trials_of(plan, shape, summed), (*shape, summed)
        yield from passes.measure(plan.device, trials, lambda *measured, more=more: NormGradientRow(*measured, *more))


def trials_of(plan: PassesPlan, shape: Shape, summed: bool) -> Iterator[tuple[str, Callable[[], Trial]]]:
    operands = make_operands(shape, summed, plan.device)
    for name in plan.methods:
        method = make_method(name, summed)
        for of_passes in PASSES:
            words = ", ".join((name, of_passes, words_of(shape), with_sum(summed)))
            yield words, partial(Trial, name, of_passes, method, operands)


@dataclass
class NormGradients(passes.Passes):
    rows: list[NormGradientRow] = field(default_factory=list)

    order: ClassVar[int] = 5
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--shapes 16x8192 2048x5120 4096x8192",
        quick_on_gpus="--shapes 4096x8192",
        quick_on_cpu="--shapes 64x1024",
    )
    passes: ClassVar = PASSES
    compared: ClassVar = BACKWARD
    methods: ClassVar = METHODS
    shapes: ClassVar = (SHAPES, CPU_SHAPES)
    numbers: ClassVar = (
        "rows and columns, such as 4096x8192 (default: from 16x8192 to 16384x4096; small ones on the CPU)"
    )
    metavar: ClassVar = "MxN"
    header: ClassVar = ("rows x columns", "gradient of the sum")
    apart: ClassVar = True
    rows_of: ClassVar = staticmethod(rows_of)
    words_of: ClassVar = staticmethod(words_of)

    @classmethod
    def count(cls, plan: PassesPlan) -> int:
        return 2 * len(PASSES) * len(plan.shapes) * len(plan.methods)
