"""graphar.linear: a linear layer with the same bits for every number of ranks, rows and features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphar.numerics import leaf_tree
from graphar.numerics.fp8_products import checked_scales
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops import matmul_operands, options, parts
from graphar.ops.register import define, ops_by_name
from graphar.ops.replicated import copied
from graphar.plan.work import MATMUL_ALLREDUCE
from graphar.product import operands
from graphar.product.multiply import Leaves, Scaled
from graphar.product.operands import Step
from graphar.runtime.registry import Group, engine_name

NAME = "linear"


def linear(
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group = None,
    a_scale: torch.Tensor | None = None,
    w_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns ``a @ w.T + bias``, with bits that do not depend on the number of rows, features or ranks.

    An element depends on its row of ``a`` and its row of ``w`` alone. The product is accumulated in fp32 in the order
    of K, 16 columns at a time. The bias is added, and the result is rounded once. ``graphar.reference.linear`` with
    ``tp_invariant=True`` is the specification; within 16 columns a GPU rounds differently from a CPU.

    With a ``group`` it is a column-parallel layer: each rank has features of its own. The forward pass sends nothing.

    With scales the product is ``graphar.reference.scaled_linear``'s, and there are no gradients. Without, it is
    differentiable. The gradient of ``a`` is a sum over the features of the whole layer. They are cut into 8 leaves of
    equal length, which are added in fp32 as a binary tree and rounded once. With a ``group`` this is a
    :func:`graphar.fused_matmul_allreduce` with ``partition="tp_invariant"``, which assumes that all ranks have the same
    ``a``. The gradient of ``w`` is added in the order of rows, and the gradient of ``bias`` as a tree of 8 leaves.

    Args:
        a: [..., K], equal on all ranks: bf16, fp16 or, on a CPU, fp32. With scales torch.float8_e4m3fn.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. For a gradient of ``a``, the features of all ranks
            must be a multiple of 8, equally many on each.
        bias: this rank's [N], of the dtype of the result. None: no bias.
        group: the ranks that divide the features: a process group, 1-D DeviceMesh or Communicator. None: not divided.
        a_scale: fp32 scales of ``a``, with any strides: of rows [..., 1], or one number; of blocks of 128 columns
            [..., ceil(K / 128)]. None: no scales.
        w_scale: fp32 scales of ``w``, of the same format: of rows [N, 1], [1, N], or one number; of blocks of 128 x 128
            [ceil(N / 128), ceil(K / 128)].
        out_dtype: with scales, the dtype of the result, torch.bfloat16 or torch.float16. None: torch.bfloat16.

    Returns:
        A new tensor [..., N] with the dtype of ``a``, or with ``out_dtype``.

    Raises:
        TypeError, ValueError: an argument breaks a rule, or the group has 3, 5, 6 or 7 ranks.
        UnsupportedError: the tensors are on a GPU, without scales, and graphar's matmul kernel does not serve them.
    """
    ranks = 1 if group is None else parts.place(group)[1]
    leaf_tree.check_ranks(NAME, ranks)
    scaled = matmul_operands.check(NAME, a, w, bias, (a_scale, w_scale, out_dtype))
    if scaled:
        return torch.ops.graphar.linear(a, w, bias, 1, scaled["scaled_dtype"], "", *scaled["scales"])
    options.check_float(NAME, "a", a)
    if a.requires_grad and torch.is_grad_enabled():
        leaf_tree.check_columns(NAME, len(w), ranks, "features")
    communicator = "" if group is None else engine_name(group, NAME)
    return torch.ops.graphar.linear(a, w, bias, communicator=communicator)


def _linear(
    a, w, bias, leaves: int = 1, out_dtype: torch.dtype | None = None, communicator="", a_scale=None, w_scale=None
) -> torch.Tensor:
    rows, out = operands.flat(a), a.new_empty((*a.shape[:-1], len(w)), dtype=out_dtype)
    multiply, scales = Leaves(NAME, leaves), None
    if a_scale is not None and w_scale is not None:
        multiply, scales = Scaled(), checked_scales(NAME, rows, w, operands.flat_scale(a_scale), w_scale)
    multiply.make(Step(rows, w, operands.flat(out), scales, bias))
    return out


def of_input(partition: str, dy: torch.Tensor, w: torch.Tensor, leaves: int = 1) -> torch.Tensor:
    """Returns ``dy @ w``, the gradient of a layer's input; with "tp_invariant" a sum over features in ``leaves``."""
    if partition == TP_INVARIANT:
        return torch.ops.graphar.linear(dy, w.t(), None, leaves)
    return (operands.flat(dy) @ w).view(*dy.shape[:-1], w.shape[1])


def of_weight(partition: str, dy: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a weight: the sum over rows of their outer products, in the order of the rows."""
    dy, a = operands.flat(dy).t(), operands.flat(a)
    return torch.ops.graphar.linear(dy, a.t(), None) if partition == TP_INVARIANT else dy @ a


def of_bias(partition: str, dy: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a bias that was added to rows of this rank only."""
    return bias_partial(dy).to(dy.dtype) if partition == TP_INVARIANT else operands.flat(dy).sum(0)


def bias_partial(dy: torch.Tensor, ranks: int = 1) -> torch.Tensor:
    """Returns a rank's partial of a bias's gradient, in fp32: graphar.reference.linear_gradients.bias_partial."""
    dy = operands.flat(dy)
    leaf_tree.check_rows(NAME, len(dy), ranks)
    ones = dy.new_ones(1, len(dy))
    return torch.ops.graphar.linear(ones, dy.t(), None, leaf_tree.LEAVES // ranks, torch.float32).squeeze(0)


def where_needed(needs: Sequence[bool], gradient: Callable, partition: str, *lists: Sequence[torch.Tensor]) -> list:
    """Returns ``gradient(partition, *tensors)`` of each rank that needs it, whose tensors ``lists`` have; else None."""
    return [gradient(partition, *tensors) if need else None for need, *tensors in zip(needs, *lists, strict=False)]


def _keep(ctx, inputs, output) -> None:
    a, w, bias, _, _, ctx.communicator, *_ = inputs
    ctx.save_for_backward(a, w)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx, dy):
    (a, w), (needs_a, needs_w, needs_bias, *_) = ctx.saved_tensors, ctx.needs_input_grad
    dy, of_a = dy.to(a.dtype), None
    a = copied(a, ctx.communicator) if ctx.communicator else a
    if needs_a and ctx.communicator:
        call = {"communicator": ctx.communicator, "partition": TP_INVARIANT}
        of_a = ops_by_name[MATMUL_ALLREDUCE].dispatched(a=dy, w=w.t(), **call)
    elif needs_a:
        of_a = of_input(TP_INVARIANT, dy, w, leaf_tree.LEAVES)
    of_w = of_weight(TP_INVARIANT, dy, a) if needs_w else None
    return of_a, of_w, bias_partial(dy).to(ctx.bias_dtype) if needs_bias else None, *[None] * 5


# ``leaves`` divide K, as in product/multiply.py. The rows of ``w`` are divided between the ranks of
# ``communicator``; an empty string: they are not divided. The scales are of operands in e4m3.
define(
    "linear(Tensor a, Tensor w, Tensor? bias, int leaves=1, ScalarType? out_dtype=None, str communicator='', "
    "Tensor? a_scale=None, Tensor? w_scale=None) -> Tensor",
    _linear,
    lambda a, w, bias, leaves=1, out_dtype=None, *_, **__: a.new_empty((*a.shape[:-1], len(w)), dtype=out_dtype),
    _backward,
    _keep,
)
