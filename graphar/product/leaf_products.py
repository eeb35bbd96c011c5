"""One rank's products with bits that depend on nothing but a row of A and a row of W: in the order of K, or in leaves.

On a GPU graphar's matmul kernel computes them, and on a CPU graphar.numerics.leaf_tree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from graphar.errors import UnsupportedError
from graphar.numerics import leaf_tree
from graphar.numerics.leaf_tree import LEAF_UNIT
from graphar.numerics.nan import with_canonical_nan
from graphar.product import gemm
from graphar.product.tensor_maps import aligned_copy, matrix_of
from graphar.runtime.availability import missing_software
from graphar.runtime.bounded_cache import BoundedCache


def product(
    op: str,
    a: torch.Tensor,
    w: torch.Tensor,
    leaves: int = 1,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns ``a @ w.T + bias``, rounded once: K in leaves that are added in fp32 as a binary tree.

    Args:
        op: the op that errors name.
        a: [M, K], bf16, fp16 or fp32.
        w: [N, K], of the same dtype and device.
        leaves: 1, 2, 4 or 8: the leaves of K, each added in the order of K. Their lengths differ by at most one column.
        bias: [N], of the same dtype. Only for results of that dtype.
        out_dtype: the dtype of the result; None: that of ``a``.

    Returns:
        A new tensor [M, N].

    Raises:
        UnsupportedError: the tensors are on a GPU, and the kernel does not serve them: fp32, or another GPU than sm_90.
    """
    out_dtype = out_dtype or a.dtype
    if not a.is_cuda:
        total = leaf_tree.in_leaves(a, w, leaves)
        return with_canonical_nan((total if bias is None else total + bias.float()).to(out_dtype))
    if reason := missing_software() or gemm.why_none_like(a):
        raise UnsupportedError(f"{op}: no kernel adds in this order: {reason}")
    rows, columns = in_whole_loads(a, leaves), in_whole_loads(w, leaves)
    short = -len(w) % gemm.STORE_COLUMNS
    if short:
        columns, bias = pad(columns, (0, 0, 0, short)), None if bias is None else pad(bias, (0, short))
    rows = rows if matrix_of(rows) else aligned_copy(rows)
    columns = columns if gemm.layout_of(columns) else aligned_copy(columns)
    bias = None if bias is None else bias.contiguous()
    found = gemm.matmul(rows, columns, bias=bias, leaves=leaves, out_dtype=out_dtype)
    return found[:, : len(w)].contiguous() if short else found


def in_whole_loads(x: torch.Tensor, leaves: int) -> torch.Tensor:
    """Returns a matrix whose leaves are whole loads of the kernel: the same one, or a copy with zeros after each leaf.

    A zero changes no sum that began as zero.
    """
    if leaves == 1 or x.shape[1] % (leaves * LEAF_UNIT) == 0:
        return x
    parts = x.tensor_split(leaves, 1)
    length = -(-parts[0].shape[1] // LEAF_UNIT) * LEAF_UNIT
    return torch.cat([pad(part, (0, length - part.shape[1])) for part in parts], 1)


def product_like(
    op: str, a: torch.Tensor, w: torch.Tensor, leaves: int, out_dtype: torch.dtype
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a function that returns :func:`product` of tensors that differ from the given ones in their addresses.

    It launches at once where the kernel takes the tensors as they lie. Their device must be current.
    """
    bound: BoundedCache[Callable[[int], None]] = BoundedCache()
    shape = len(a), len(w)

    def multiply(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = a.new_empty(shape, dtype=out_dtype)
        key = a.data_ptr(), w.data_ptr(), out.data_ptr()
        enqueue = bound.get(key)
        if enqueue is None:
            if gemm.why_not(a, w, out, leaves) or not (out.numel() and a.shape[1]):
                return product(op, a, w, leaves, out_dtype=out_dtype)
            enqueue = bound.keep(key, gemm.bind(a, w, out, leaves=leaves))
        enqueue(torch.cuda.current_stream().cuda_stream)
        return out

    return multiply
