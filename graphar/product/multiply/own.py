"""graphar's matmul kernel, by what it adds: operands of 16 bits, operands in e4m3, and K in leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from graphar.errors import Reason, UnsupportedError
from graphar.numerics import leaf_tree
from graphar.numerics.leaf_tree import LEAF_UNIT
from graphar.numerics.nan import with_canonical_nan
from graphar.plan.best_tile import Shape, Sms, alone, best_tile
from graphar.plan.policy import TileCost
from graphar.product import gemm
from graphar.product.multiply.by_torch import ByTorch
from graphar.product.multiply.step import Enqueue, Multiply, Step, StepOf, lacks_software
from graphar.product.tensor_maps import aligned_copy, matrix_of


@dataclass(frozen=True)
class Own(Multiply):
    """Makes steps of 16-bit operands, with the tiles of the engine's table. Elsewhere torch multiplies.

    Attributes:
        cost: the costs by which it chooses tiles.
        is_invariant: whether the bits of a row may not depend on the number of rows: torch never multiplies then.
    """

    cost: TileCost
    is_invariant: bool = False

    @property
    def beyond(self) -> str:
        return "" if self.is_invariant else "torch's matmul"

    def why_not(self, step: Step) -> Reason | None:
        return lacks_software() or gemm.why_not(step.a, step.w, step.out)

    def bind(self, step: Step, sms: int) -> Enqueue:
        (m, n), k, layout = step.out.shape, step.a.shape[1], gemm.weight_of(step.w)[0]
        tile = best_tile(alone(), Shape((m,), n, k, layout), self.cost, Sms(sms))
        return gemm.bind(step.a, step.w, step.out, sms=sms, tile=tile)

    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        if self.is_invariant and step.a.shape[1]:
            if not (reason := self.why_not(placed := _aligned(step))):
                return self.bind(placed, sms)
            raise UnsupportedError(f"matmul: no batch-invariant kernel: {reason}")
        return ByTorch().bind(step, sms)

    def repeating(self, example: Step, step_of: StepOf, sms: int) -> Callable[..., torch.Tensor]:
        multiply = ByTorch() if self.beyond and self.why_not(example) else super()
        return multiply.repeating(example, step_of, sms)


def _aligned(step: Step) -> Step:
    """Returns a step with copies of those operands that the kernel cannot load where they lie."""
    a = step.a if matrix_of(step.a) else aligned_copy(step.a)
    w = step.w if matrix_of(step.w) or matrix_of(step.w.t()) else aligned_copy(step.w)
    return step._replace(a=a, w=w)


class _OfWholeSums(Multiply):
    """Adds the bias before it rounds, and needs columns to multiply."""

    count: int  # the leaves of K

    def why_not(self, step: Step) -> Reason | None:
        if not step.a.shape[1]:
            return "K is 0"
        return lacks_software() or gemm.why_not(step.a, step.w, step.out, self.count)


@dataclass(frozen=True)
class Scaled(_OfWholeSums):
    """Makes steps of e4m3 operands.

    Elsewhere than on sm_90a, and for operands that it cannot load, the specification multiplies:
    graphar.numerics.fp8_products. An element depends on its row of A and its row of W alone, so cuts change no bit.

    Attributes:
        is_invariant: whether the bits of a row may not depend on the number of rows: torch's operations never compute
            the specification on a GPU then.
    """

    is_invariant: bool = False
    count = 1

    @property
    def beyond(self) -> str:
        return "torch's operations, as the specification of scaled products"

    def bind(self, step: Step, sms: int) -> Enqueue:
        return gemm.bind_step(step, sms, 1)

    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        if self.is_invariant and step.a.is_cuda and step.a.shape[1]:
            raise UnsupportedError(f"matmul: no batch-invariant kernel: {why_not}")
        return lambda stream: step.out.copy_(step.specified())


@dataclass(frozen=True)
class Leaves(_OfWholeSums):
    """Makes steps with bits that depend on nothing but a row of A and a row of W: K in leaves, as a binary tree.

    Operands are in bf16, fp16 or, on a CPU, fp32; results may be in fp32. On a GPU the kernel makes them, and on a CPU
    graphar.numerics.leaf_tree.

    Attributes:
        count: 1, 2, 4 or 8: the leaves of K, each added in the order of K. Their lengths differ by at most one column.
        op: the op that errors name.
    """

    count: int
    op: str

    def bind(self, step: Step, sms: int) -> Enqueue:
        return gemm.bind_step(step, None, self.count)  # it takes all SMs

    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        """Raises UnsupportedError for fp32 on a GPU, and for another GPU than sm_90."""
        a, w, out, _, bias = step
        if not a.is_cuda:
            total = leaf_tree.in_leaves(a, w, self.count)
            total = total if bias is None else total + bias.float()
            return lambda stream: out.copy_(with_canonical_nan(total.to(out.dtype)))
        if reason := lacks_software() or gemm.why_none_like(a):
            raise UnsupportedError(f"{self.op}: no kernel adds in this order: {reason}")
        rows, columns = in_whole_loads(a, self.count), in_whole_loads(w, self.count)
        if short := -len(w) % gemm.STORE_COLUMNS:
            columns, bias = pad(columns, (0, 0, 0, short)), None if bias is None else pad(bias, (0, short))
        placed = _aligned(step._replace(a=rows, w=columns))
        bias = None if bias is None else bias.contiguous()
        product = gemm.matmul(placed.a, placed.w, bias=bias, leaves=self.count, out_dtype=out.dtype)
        return lambda stream: out.copy_(product[:, : len(w)])


def in_whole_loads(x: torch.Tensor, leaves: int) -> torch.Tensor:
    """Returns a matrix whose leaves are whole loads of the kernel: the same one, or a copy with zeros after each leaf.

    A zero changes no sum that began as zero.
    """
    if leaves == 1 or x.shape[1] % (leaves * LEAF_UNIT) == 0:
        return x
    parts = x.tensor_split(leaves, 1)
    length = -(-parts[0].shape[1] // LEAF_UNIT) * LEAF_UNIT
    return torch.cat([pad(part, (0, length - part.shape[1])) for part in parts], 1)
