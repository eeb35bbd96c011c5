"""The gradients of linear layers with the same bits on 1, 2, 4 and 8 ranks, in torch.

A gradient that sums over features which ranks divide is a tree of 8 leaves, as in graphar.numerics.leaf_tree. In a
matmul of tensor parallelism every rank has all tokens: a weight's gradient sums over them in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics import leaf_tree
from graphar.numerics.dtypes import with_canonical_nan
from graphar.numerics.leaf_tree import LEAVES, in_leaves, tree_sum
from graphar.reference.products import linear


def row_parallel(
    dy: torch.Tensor, a: Sequence[torch.Tensor], w: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Returns the gradients of a layer whose products ``a[r] @ w[r].T`` are summed over ranks: (da, dw, dbias).

        da[r] = dy @ w[r]      [tokens, K / ranks], added in the order of N, which every rank has whole
        dw[r] = dy.T @ a[r]    [N, K / ranks], added in the order of tokens
        dbias                  [N], equal on all ranks: :func:`bias_partial` of a single rank

    Products are added as :func:`leaf_tree.product` adds them, and each result is rounded once. ``dy`` [tokens, N] is
    the gradient of the sum, of all tokens: after a reduce-scatter it is gathered first. All are bf16, fp16 or fp32.
    """
    of_a = [linear(dy, of_rank.t(), tp_invariant=True) for of_rank in w]
    return of_a, [_of_weight(dy, of_rank) for of_rank in a], _of_bias(dy)


def column_parallel(
    dy: Sequence[torch.Tensor], x: torch.Tensor, w: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Returns the gradients of a layer whose output features ``x @ w[r].T`` are divided between ranks: (dx, dw, dbias).

        dx    = the sum of dy[r] @ w[r] over ranks    [tokens, K], N is cut into 8 leaves, which are added as a tree
        dw[r] = dy[r].T @ x                           [N / ranks, K], added in the order of tokens
        dbias[r]                                      [N / ranks]: :func:`bias_partial` of a single rank

    Products are added as :func:`leaf_tree.product` adds them, and each result is rounded once. ``dy[r]`` is a rank's
    gradient [tokens, N / ranks], and ``x`` [tokens, K] the input of all tokens: after an all-gather it is the gathered
    input, and each rank gets its rows of ``dx``. All are bf16, fp16 or fp32.
    """
    leaf_tree.check_operands("column_parallel", dy)
    leaves = LEAVES // len(dy)
    of_x = tree_sum([in_leaves(of_rank, weight.t(), leaves) for of_rank, weight in zip(dy, w, strict=True)])
    of_w = [_of_weight(of_rank, x) for of_rank in dy]
    return with_canonical_nan(of_x.to(x.dtype)), of_w, [_of_bias(of_rank) for of_rank in dy]


def bias_partial(dy: torch.Tensor, world_size: int) -> torch.Tensor:
    """Returns one rank's partial of a bias's gradient, the sum of ``dy`` over the rank's tokens, in fp32.

    All tokens are cut into 8 leaves, each added as the gradient of a weight whose input is 1 in every token. The
    gradient is the sum of all ranks' partials as a tree, rounded once. Where every rank has all tokens, it is the
    partial of a single rank. ``dy`` is the rank's gradient [tokens / world_size, N], bf16, fp16 or fp32.
    """
    leaf_tree.check_rows("bias_partial", len(dy), world_size)
    return in_leaves(dy.new_ones(1, len(dy)), dy.t(), LEAVES // world_size).squeeze(0)


def _of_weight(dy: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    return linear(dy.t(), a.t(), tp_invariant=True)


def _of_bias(dy: torch.Tensor) -> torch.Tensor:
    return with_canonical_nan(bias_partial(dy, 1).to(dy.dtype))
