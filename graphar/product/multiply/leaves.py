"""Products with bits that depend on nothing but a row of A and a row of W: K in leaves, added as a binary tree.

On a GPU graphar's matmul kernel makes them, and on a CPU graphar.numerics.leaf_tree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from graphar.errors import Reason, UnsupportedError
from graphar.numerics import leaf_tree
from graphar.numerics.leaf_tree import LEAF_UNIT
from graphar.numerics.nan import with_canonical_nan
from graphar.product import gemm
from graphar.product.multiply.step import Enqueue, Multiply, Step, lacks_software
from graphar.product.tensor_maps import aligned_copy, matrix_of


@dataclass(frozen=True)
class Leaves(Multiply):
    """Makes steps of operands in bf16, fp16 or, on a CPU, fp32; results may be in fp32.

    Attributes:
        count: 1, 2, 4 or 8: the leaves of K, each added in the order of K. Their lengths differ by at most one column.
        op: the op that errors name.
    """

    count: int
    op: str

    def why_not(self, step: Step) -> Reason | None:
        if not step.a.shape[1]:
            return "K is 0"
        return lacks_software() or gemm.why_not(step.a, step.w, step.out, self.count)

    def bind(self, step: Step, sms: int) -> Enqueue:
        bias = None if step.bias is None else step.bias.contiguous()
        return gemm.bind(step.a, step.w, step.out, bias, leaves=self.count)

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
        rows = rows if matrix_of(rows) else aligned_copy(rows)
        columns = columns if gemm.layout_of(columns) else aligned_copy(columns)
        bias = None if bias is None else bias.contiguous()
        found = gemm.matmul(rows, columns, bias=bias, leaves=self.count, out_dtype=out.dtype)
        return lambda stream: out.copy_(found[:, : len(w)])


def in_whole_loads(x: torch.Tensor, leaves: int) -> torch.Tensor:
    """Returns a matrix whose leaves are whole loads of the kernel: the same one, or a copy with zeros after each leaf.

    A zero changes no sum that began as zero.
    """
    if leaves == 1 or x.shape[1] % (leaves * LEAF_UNIT) == 0:
        return x
    parts = x.tensor_split(leaves, 1)
    length = -(-parts[0].shape[1] // LEAF_UNIT) * LEAF_UNIT
    return torch.cat([pad(part, (0, length - part.shape[1])) for part in parts], 1)
