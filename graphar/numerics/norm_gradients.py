"""The gradients of residual addition and RMSNorm, in torch.

:func:`specification` specifies cuda_src/norm/residual_rmsnorm_backward.cu: every torch operation is rounded to
nearest. It also serves devices without kernels.
"""

from __future__ import annotations

import torch

from graphar.numerics import leaf_tree, norms
from graphar.numerics.dtypes import fp32, with_canonical_nan
from graphar.numerics.norms import PACK_NBYTES, inverse_rms, mean_in_slots

LANES = 64  # `group_lanes` in cuda_src/norm/residual_rmsnorm_backward.cu
_LEAST_GROUPS = 128
_ROWS_A_GROUP = 4  # fewer are not worth the bytes of another group


def threads_of(row_nbytes: int) -> int:
    """Returns the threads of a block of the kernel: as many as a row has packs, rounded up to a power of two."""
    packs = -(-row_nbytes // PACK_NBYTES)
    return min(norms.SLOTS, max(32, 1 << (packs - 1).bit_length()))


def row_groups(rows: int, row_nbytes: int) -> int:
    """Returns the number of groups of rows: row r is of group r % groups, which adds its rows in order.

    It depends on nothing but the shape and the dtype, so that a weight's gradient has the same bits on every GPU. With
    as many blocks a GPU of 132 SMs has about 1024 threads on each, apart from few rows (H100).
    """
    most = max(_LEAST_GROUPS, 64 * norms.SLOTS // threads_of(row_nbytes))
    return min(rows, most, max(_LEAST_GROUPS, -(-rows // _ROWS_A_GROUP)))


def specification(
    of_normed: torch.Tensor,
    of_summed: torch.Tensor | None,
    summed: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the exact bits that the kernel gives: the gradients of the rows that were normed, and of the weight.

    With r the rows that were normed, g the gradient of the normed rows, w = weight + weight_offset and
    s = 1 / sqrt(mean(r * r) + eps), the gradient of a row is s (g w) - r (mean((g w) r) s s s) + of_summed. That of the
    weight is the sum of g (r s) over rows, in the groups of :func:`row_groups`. Every operation is in fp32, and each
    result is rounded once. Every NaN is the canonical one.

    Args:
        of_normed: [..., columns], bf16, fp16 or fp32: the gradient of the normed rows.
        of_summed: like ``of_normed``: the gradient of ``summed``. None: zeros.
        summed: like ``of_normed``: the rows that were normed.
        weight: [columns], of the same dtype.
    """
    dtype, shape, columns = summed.dtype, summed.shape, summed.shape[-1]
    g, r = (rows.float().reshape(-1, columns) for rows in (of_normed, summed))
    # + 0.0, since ops take an offset of -0.0 for 0.0.
    scaled = g * (weight.float() + fp32(weight_offset + 0.0))
    s = inverse_rms(r, summed.element_size(), eps)
    common = mean_in_slots(scaled * r, summed.element_size()) * s * s * s
    more = torch.zeros_like(r) if of_summed is None else of_summed.float().reshape(-1, columns)
    of_rows = (s * scaled - r * common) + more
    of_weight = _sum_over_rows(g * (r * s), row_groups(len(r), columns * summed.element_size()))
    return with_canonical_nan(of_rows.to(dtype)).view(shape), with_canonical_nan(of_weight.to(dtype))


def weight_partial(of_normed: torch.Tensor, summed: torch.Tensor, eps: float, world_size: int) -> torch.Tensor:
    """Returns one rank's partial of the weight's gradient, the sum over the rank's rows, in fp32.

    All rows are cut into 8 leaves, and the rows of a leaf are added in groups. The sum of all ranks' partials as a
    tree has the same bits for 1, 2, 4 and 8 ranks. :func:`specification` has others, since its groups are of all rows.
    ``of_normed`` and ``summed`` are as in :func:`specification`, with the rank's rows: [rows / world_size, columns].
    """
    leaf_tree.check_rows("weight_partial", len(summed), world_size)
    r = summed.float()
    s = inverse_rms(r, summed.element_size(), eps)
    leaves = (of_normed.float() * (r * s)).tensor_split(leaf_tree.LEAVES // world_size)
    row_nbytes = r.shape[-1] * summed.element_size()
    return leaf_tree.tree_sum([_sum_over_rows(leaf, row_groups(len(leaf), row_nbytes)) for leaf in leaves])


def _sum_over_rows(rows: torch.Tensor, groups: int) -> torch.Tensor:
    """Returns the sum of ``rows`` over the first dimension, in the kernel's order: groups, lanes of groups, lanes."""
    columns = rows.shape[-1]
    for parts in (max(groups, 1), LANES, 1):
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % parts))
        rows = rows.new_zeros(parts, columns)
        for of_parts in padded.view(-1, parts, columns):
            rows = rows + of_parts
    return rows[0]


def differentiable(
    of_normed: torch.Tensor,
    of_summed: torch.Tensor,
    summed: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of :func:`specification` to within rounding, by operations that torch differentiates."""
    g, r, w = of_normed.float(), summed.float(), weight.float() + offset
    s = (r.square().mean(-1, keepdim=True) + eps).rsqrt()
    unit = r * s
    of_rows = s * (g * w - unit * (g * w * unit).mean(-1, keepdim=True)) + of_summed.float()
    return of_rows.to(summed.dtype), (g * unit).sum_to_size(weight.shape).to(weight.dtype)
