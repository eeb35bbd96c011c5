"""What multiplies one rank's factors: four kinds of :class:`Multiply`, and which of them a call takes."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from graphar.errors import Reason, UnsupportedError
from graphar.numerics import leaf_tree
from graphar.numerics.fp8_products import rounded_product
from graphar.numerics.leaf_tree import LEAF_UNIT
from graphar.numerics.partitions import Panel
from graphar.plan.call import Operands
from graphar.plan.matmuls import Shape, Sms, alone, best_tile, choose_matmul
from graphar.plan.policy import TileCost
from graphar.plan.work import ALLGATHER_MATMUL, Product
from graphar.product import gemm
from graphar.product.operands import MatmulOperands, Step, operands_of
from graphar.product.tensor_maps import aligned_copy, matrix_of
from graphar.reference import products as reference
from graphar.runtime import launcher
from graphar.runtime.availability import missing_software
from graphar.runtime.engine import Engine
from graphar.runtime.plan import BoundedCache

Enqueue = Callable[[int], object]  # takes a stream's handle, for a caller that has made the device the current one
_address = torch.Tensor.data_ptr
lacks_software = functools.cache(missing_software)


class Multiply(ABC):
    """What makes steps: a kernel of graphar's, and something else where the kernel cannot make them."""

    leaves = 1  # into which the kernel cuts K
    beyond = ""  # what makes steps that the kernel cannot make, in words; an empty string if nothing does
    reason = ""  # why it multiplies, in words that begin with its name; no words if nothing else could

    def why_not(self, step: Step) -> Reason | None:
        """Returns why the kernel cannot make a step."""
        return lacks_software() or gemm.why_not(step.a, step.w, step.out, self.leaves)

    def bind(self, step: Step, sms: int) -> Enqueue:
        """Loads the kernel, and returns what launches it on this number of SMs; :meth:`why_not` has no reason."""
        return gemm.bind(step, sms, leaves=self.leaves)

    @abstractmethod
    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        """Returns what makes a step that the kernel cannot make, for the reason ``why_not``, or that is on the CPU.

        UnsupportedError if nothing else has the bits that were asked for.
        """

    def bind_all(self, panels: Sequence[Sequence[tuple[Step, int]]]) -> list[list[Enqueue]]:
        """Returns what makes each panel's steps on a GPU, each on its number of SMs: all by its kernel, or none."""
        steps = [step for panel in panels for step, _ in panel]
        if why_not := next(filter(None, map(self.why_not, steps)), None):
            return [[self.instead(step, sms, why_not) for step, sms in panel] for panel in panels]
        return [[self.bind(step, sms) for step, sms in panel] for panel in panels]

    def make(self, step: Step) -> None:
        """Makes one step, on the current stream of its device."""
        if not step.out.numel():
            return
        if not step.a.is_cuda:
            self.instead(step, 0, "on the CPU")(0)
            return
        ((enqueue,),) = self.bind_all([[(step, launcher.sm_count(step.a.device.index))]])
        with torch.cuda.device(step.a.device):
            enqueue(torch.cuda.current_stream().cuda_stream)

    def repeating(self, work: Product, example: Step) -> Callable[..., torch.Tensor]:
        """Returns a function of a call's inputs, like ``example`` but for addresses, that returns their product.

        The device must be current.
        """
        sms = launcher.sm_count(example.a.device.index)
        columns, dtype, bound = len(example.w), example.out.dtype, BoundedCache[Enqueue]()

        def multiply(*inputs: torch.Tensor) -> torch.Tensor:
            a = inputs[0]
            out = a.new_empty((*a.shape[:-1], columns), dtype=dtype)
            key = (*map(_address, inputs), out.data_ptr())
            enqueue = bound.get(key)
            if enqueue is None:
                step = operands_of(work, Operands(inputs, (out,))).step
                why_not = self.why_not(step)  # its addresses may not be aligned as the others are
                enqueue = self.instead(step, sms, why_not) if why_not else bound.keep(key, self.bind(step, sms))
            enqueue(torch.cuda.current_stream().cuda_stream)
            return out

        return multiply

    def explained(self, matmul: MatmulOperands, panels: Sequence[Panel]) -> str:
        """Returns what multiplies one rank's operands in words, and why; no words on the CPU."""
        if not matmul.a.is_cuda:
            return ""
        if self.beyond:
            products = [matmul.out.new_empty(panel.shape) for panel in panels]
            steps = [step for pair in zip(panels, products, strict=True) for step in matmul.step.in_panel(*pair)]
            if why_not := next(filter(None, map(self.why_not, steps)), None):
                return f"{self.beyond}: {why_not}"
        return self.reason


@dataclass(frozen=True)
class ByTorch(Multiply):
    """Makes every step by torch's matmul, on the CPU by the specification. Bits may depend on the shape of a step."""

    reason: str = ""

    def why_not(self, step: Step) -> Reason | None:
        return None

    def bind(self, step: Step, sms: int) -> Enqueue:
        return lambda stream: self.make(step)

    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        return self.bind(step, sms)

    def make(self, step: Step) -> None:  # needs no current device
        multiply(step.a, step.w, step.out, step.bias)

    def repeating(self, work: Product, example: Step) -> Callable[..., torch.Tensor]:
        return torch.nn.functional.linear  # has the bits of torch.mm, and takes one call where views take four


def multiply(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Writes ``a @ w.T + bias`` into ``out``, which may be in fp32: then it is not rounded, and there is no bias."""
    if not a.is_cuda:
        is_wide = out.dtype != a.dtype
        out.copy_(reference.unrounded_product(a, w) if is_wide else reference.linear(a, w, bias))
    elif out.dtype != a.dtype:
        with torch.autocast("cuda", enabled=False):  # it would multiply in another dtype
            out.copy_(torch.mm(a, w.t(), out_dtype=out.dtype))
    elif bias is None:
        torch.mm(a, w.t(), out=out)
    else:
        torch.addmm(bias, a, w.t(), out=out)


@dataclass(frozen=True)
class Own(Multiply):
    """Makes steps of 16-bit operands. Elsewhere torch multiplies."""

    cost: TileCost  # by which it chooses tiles: the engine's table has it
    is_invariant: bool = False  # whether the bits of a row may not depend on the number of rows: torch never multiplies
    reason: str = ""

    @property
    def beyond(self) -> str:
        return "" if self.is_invariant else "torch's matmul"

    def bind(self, step: Step, sms: int) -> Enqueue:
        (m, n), k, layout = step.out.shape, step.a.shape[1], gemm.layout_of(step.w)
        return gemm.bind(step, sms, best_tile(alone(), Shape((m,), n, k, layout), self.cost, Sms(sms)))

    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        if self.is_invariant and step.a.shape[1]:
            if not (reason := self.why_not(placed := _aligned(step))):
                return self.bind(placed, sms)
            raise UnsupportedError(f"matmul: no batch-invariant kernel: {reason}")
        return ByTorch().bind(step, sms)

    def repeating(self, work: Product, example: Step) -> Callable[..., torch.Tensor]:
        return (ByTorch() if self.beyond and self.why_not(example) else super()).repeating(work, example)


def _aligned(step: Step) -> Step:
    """Returns a step with copies of those operands that the kernel cannot load where they lie."""
    a = step.a if matrix_of(step.a) else aligned_copy(step.a)
    w = step.w if matrix_of(step.w) or matrix_of(step.w.t()) else aligned_copy(step.w)
    return step._replace(a=a, w=w)


@dataclass(frozen=True)
class Scaled(Multiply):
    """Makes steps of e4m3 operands.

    Elsewhere than on sm_90a, and for operands that it cannot load, the specification multiplies:
    graphar.numerics.fp8_products. An element depends on its row of A and its row of W alone, so cuts change no bit.
    """

    is_invariant: bool = False  # as in Own: torch's operations never compute the specification on a GPU then
    reason: str = ""
    beyond = "torch's operations, as the specification of scaled products"

    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        if self.is_invariant and step.a.is_cuda and step.a.shape[1]:
            raise UnsupportedError(f"matmul: no batch-invariant kernel: {why_not}")
        a, w, out, scales, bias = step
        assert scales
        return lambda stream: out.copy_(rounded_product(a, w, scales, out.dtype, bias))


@dataclass(frozen=True)
class Leaves(Multiply):
    """Makes steps with bits that depend on nothing but a row of A and a row of W: K in leaves, as a binary tree.

    Operands are in bf16, fp16 or, on a CPU, fp32; results may be in fp32. On a CPU numerics.leaf_tree multiplies.
    """

    op: str  # that errors name
    leaves: int = 1  # 1, 2, 4 or 8: each is added in the order of K. Their lengths differ by at most one column

    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        a, w, out, _, bias = step
        if not a.is_cuda:
            total = leaf_tree.in_leaves(a, w, self.leaves)
            return lambda stream: out.copy_(reference.with_bias(total, bias, out.dtype))
        if reason := lacks_software() or gemm.why_none_like(a):
            raise UnsupportedError(f"{self.op}: no kernel adds in this order: {reason}")
        rows, columns = in_whole_loads(a, self.leaves), in_whole_loads(w, self.leaves)
        if short := -len(w) % gemm.STORE_COLUMNS:
            columns, bias = pad(columns, (0, 0, 0, short)), None if bias is None else pad(bias, (0, short))
        placed = _aligned(step._replace(a=rows, w=columns))
        bias = None if bias is None else bias.contiguous()
        product = gemm.matmul(placed.a, placed.w, bias=bias, leaves=self.leaves, out_dtype=out.dtype)
        return lambda stream: out.copy_(product[:, : len(w)])


def in_whole_loads(x: torch.Tensor, leaves: int) -> torch.Tensor:
    """Returns a matrix whose leaves are whole loads of the kernel: the same, or a copy with zeros after each leaf."""
    if leaves == 1 or x.shape[1] % (leaves * LEAF_UNIT) == 0:
        return x
    parts = x.tensor_split(leaves, 1)
    length = -(-parts[0].shape[1] // LEAF_UNIT) * LEAF_UNIT
    # A zero changes no sum that began as zero.
    return torch.cat([pad(part, (0, length - part.shape[1])) for part in parts], 1)


def choose(engine: Engine, work: Product, matmul: MatmulOperands, panels: int = 1) -> Multiply:
    """Returns what multiplies one rank's operands, cut into this number of panels. Ranks may choose differently."""
    cost, factors = engine.table.matmul.cost, work.factors
    if work.as_tree:
        return Leaves(work.op, work.leaves(engine.world_size))
    if not factors.is_plain:
        reason = f"graphar's scaled matmul of e4m3 operands with scales of {factors.format}"
        return Scaled(work.is_invariant, reason)
    if work.is_invariant:
        return Own(cost, True, "graphar's matmul, which is batch invariant")
    if work.op == ALLGATHER_MATMUL or not matmul.a.is_cuda:
        return ByTorch()
    sms = launcher.sm_count(matmul.a.device.index)
    ours, reason = choose_matmul(engine.table.matmul, len(matmul.a), len(matmul.w), matmul.a.shape[1], sms, panels)
    return Own(cost, reason=reason) if ours else ByTorch(reason)
