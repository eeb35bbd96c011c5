"""Products and sums with the same bits on 1, 2, 4 and 8 ranks: 8 leaves, added as a binary tree.

The columns that a product sums over, K, are cut into 8 leaves of equal length. Rank r of N has 8 / N adjacent leaves.
Its partial is a node of the tree, in fp32. The partials of all ranks are added as the rest of the same tree:

    leaf      0    1    2    3    4    5    6    7
    8 ranks   0    1    2    3    4    5    6    7
    4 ranks   0 + 1     2 + 3     4 + 5     6 + 7
    2 ranks   (0 + 1) + (2 + 3)   (4 + 5) + (6 + 7)
    1 rank    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics.dtypes import TYPE_NAMES

LEAVES = 8
LEAF_UNIT = 64  # the columns that kernels load at a time: leaves of other lengths are copied, and padded with zeros
STEP = 16  # columns that a wgmma instruction multiplies


def product(a: torch.Tensor, w: torch.Tensor, step: int = STEP) -> torch.Tensor:
    """Returns ``a @ w.T`` in fp32, added in the order of K, ``step`` columns at a time: [M, N].

    An element begins as zero. The products of ``step`` columns, as one instruction takes, are added to each other, from
    zero and in order. Their sum is added to the element. Each product and each sum is rounded to nearest in fp32. So
    the bits of an element depend on its row of ``a`` [M, K] and its row of ``w`` [N, K] alone. torch's matmul on the
    CPU does not promise that: its order depends on the shape.

    Kernels executed on the host (tests/host) give the bits of this function. A tensor core does not: it adds the
    products of a step and the element in one operation, whose intermediate results have other roundings. So products
    have one set of bits on all CPUs, and another on all GPUs with the same tensor cores. What is added to equal
    products, such as partials and biases, has the same bits on both.
    """
    a, w = a.float().t().contiguous(), w.float().t().contiguous()
    total = a.new_zeros(a.shape[1], w.shape[1])
    for columns in zip(a.split(step), w.split(step), strict=True):
        added = torch.zeros_like(total)
        for of_a, of_w in zip(*columns, strict=True):
            added += of_a[:, None] * of_w  # not addcmul, which may round once
        total += added
    return total


def in_leaves(a: torch.Tensor, w: torch.Tensor, leaves: int) -> torch.Tensor:
    """Returns ``a @ w.T`` in fp32, with K in leaves as torch.tensor_split cuts it, each added by :func:`product`.

    With the columns of a rank of N, and 8 / N leaves, this is the rank's partial: :func:`tree_sum` adds them.
    """
    return tree_sum([product(*leaf) for leaf in zip(a.tensor_split(leaves, 1), w.tensor_split(leaves, 1), strict=True)])


def tree_sum(nodes: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of 1, 2, 4 or 8 adjacent nodes: neighbours are added, then their sums, until one is left."""
    while len(nodes) > 1:
        nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0]


def check_ranks(op: str, world_size: int) -> None:
    """Raises ValueError, which names ``op``, unless ranks of that number have whole leaves, and equally many."""
    if world_size not in (1, 2, 4, 8):
        raise ValueError(f"{op}: a tree of {LEAVES} leaves is for 1, 2, 4 or 8 ranks, got {world_size}")


def check_operands(op: str, operands: Sequence[torch.Tensor]) -> None:
    """Raises ValueError, which names ``op``, unless the ranks' columns of an operand [..., K] are whole leaves."""
    check_ranks(op, len(operands))
    columns = [operand.shape[-1] for operand in operands]
    if operands[0].dtype not in TYPE_NAMES:
        raise ValueError(f"{op}: leaves are of bfloat16, float16 or float32, got {operands[0].dtype}")
    if len(set(columns)) > 1:
        raise ValueError(f"{op}: a tree of {LEAVES} leaves needs equally many columns on all ranks, got {columns}")
    check_columns(op, columns[0], len(columns))


def check_columns(op: str, columns: int, world_size: int, what: str = "columns") -> None:
    """Raises ValueError, which names ``op``, unless each rank's ``columns`` are whole leaves; errors say ``what``."""
    if columns % (leaves := LEAVES // world_size):
        raise ValueError(
            f"{op}: the {what} of a rank must be {leaves} leaves of equal length with a group of {world_size}, got "
            f"{columns}"
        )


def check_rows(op: str, rows: int, world_size: int) -> None:
    """Raises ValueError, which names ``op``, unless ranks with equally many rows have whole leaves of rows."""
    check_ranks(op, world_size)
    leaves = LEAVES // world_size
    if world_size > 1 and rows % leaves:  # the leaves of a single rank may differ by a row, as torch.tensor_split cuts
        raise ValueError(f"{op}: the rows of each of {world_size} ranks must be a multiple of {leaves}, got {rows}")
