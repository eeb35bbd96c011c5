"""torch's products of e4m3 operands with scales: how a graph has them, and how graphar's ops take them.

_scaled_mm(a, w.t(), scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
_scaled_mm_v2(a, w.t(), [scale_a], [recipe], [swizzle], [scale_b], [recipe], [swizzle], bias, out_dtype, ...)

    scales of    scale_a               scale_b               w_scale of graphar's ops
    rows         [M, 1], or a number   [1, N], or a number   scale_b
    blocks       [M, K / 128]          [K / 128, N / 128]    scale_b transposed; v2 pads it to a multiple of 4 rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import ScalingType

from graphar.errors import Reason
from graphar.graph import rows
from graphar.graph.collectives import are_same
from graphar.graph.nodes import arguments, value
from graphar.graph.weights import stored
from graphar.numerics.fp8_products import BLOCK, FP8
from graphar.ops.matmul_operands import RESULT_DTYPES

_aten = torch.ops.aten
_V2 = _aten._scaled_mm_v2.default
NO_TREE = "products with scales are not added as a tree"
TARGETS = (_aten._scaled_mm.default, _V2)
_RECIPES = [  # the recipes of scale_a and of scale_b that graphar has
    ([ScalingType.TensorWise.value], [ScalingType.TensorWise.value]),
    ([ScalingType.RowWise.value], [ScalingType.RowWise.value]),
    ([ScalingType.BlockWise1x128.value], [ScalingType.BlockWise128x128.value]),
]


@dataclass(frozen=True)
class ScaledProduct:
    """A scaled product of a graph."""

    a: Node  # [M, K]
    weight: Node  # [K, N]
    a_scale: Node
    w_scale: Node  # as torch takes it
    dtype: torch.dtype  # of the result
    bias: Node | None
    why_not: Reason | None  # why graphar has no such product

    def options(self, graph: Graph, moved: Callable[[Node], object]) -> dict[str, object]:
        """Returns the options of graphar's ops for the scales; adds views to the graph.

        ``moved`` returns the scales of ``a`` for the rows that an op takes.
        """
        of_w, blocks = self.w_scale, _blocks(self.weight.meta["val"].shape[0])
        if format_of(self) != "rows":
            if not statically_known_true(of_w.meta["val"].shape[0] == blocks):
                of_w = rows.called(graph, _aten.slice.Tensor, (of_w, 0, 0, blocks))
            of_w = stored(graph, of_w)
        return {"scales": [moved(self.a_scale), of_w], "scaled_dtype": self.dtype}


def read(node: Node) -> ScaledProduct | None:
    """Returns the scaled product that a node is; None if it is something else."""
    if node.target not in TARGETS:
        return None
    named = arguments(node)
    of_a, of_w, why = named["scale_a"], named["scale_b"], None
    if node.target is _V2:
        why, of_a, of_w = _why_no_recipe(named), of_a[0], of_w[0]
    elif named.get("scale_result") is not None:
        why = "the product is scaled again"
    operands = named["self"], named["mat2"], of_a, of_w
    product = ScaledProduct(*operands, node.meta["val"].dtype, named.get("bias"), why)
    return replace(product, why_not=why or _why_not(product))


def is_number(scale: Node) -> bool:
    """Whether a scale is one number, for all rows."""
    return statically_known_true(scale.meta["val"].numel() == 1)


def _why_no_recipe(named: dict[str, Any]) -> Reason | None:
    recipes = list(named["recipe_a"]), list(named["recipe_b"])
    if recipes not in _RECIPES or any([*named["swizzle_a"], *named["swizzle_b"], *named.get("contraction_dim", ())]):
        return "graphar has no such recipe of scales"
    return None


def _why_not(product: ScaledProduct) -> Reason | None:
    kinds = [operand.meta["val"].dtype for operand in (product.a, product.weight)]
    if kinds != [FP8, FP8]:
        return f"graphar multiplies {FP8} by {FP8}, not {kinds[0]} by {kinds[1]}"
    if product.dtype not in RESULT_DTYPES:
        return f"the product is rounded to {product.dtype}"
    if not format_of(product):
        return "the scales are neither of rows nor of blocks, in fp32"
    return None


def format_of(product: ScaledProduct) -> str:
    """Returns the format of the scales, "rows" or "blocks"; an empty string if they have another format."""
    of_a, of_w = product.a_scale.meta["val"], product.w_scale.meta["val"]
    (m, k), n = product.a.meta["val"].shape, product.weight.meta["val"].shape[1]
    if (of_a.dtype, of_w.dtype) != (torch.float32, torch.float32):
        return ""
    if _has_shape(product.a_scale, (m, 1)) and _has_shape(product.w_scale, (1, n)):
        return "rows"
    # _scaled_mm_v2 pads the first dimension.
    in_blocks = are_same(of_w.shape[1:], (_blocks(n),)) and statically_known_true(of_w.shape[0] >= _blocks(k))
    return "blocks" if in_blocks and are_same(of_a.shape, (m, _blocks(k))) else ""


def _has_shape(scale: Node, shape: tuple) -> bool:
    """Whether a scale has a shape, or is one number."""
    return is_number(scale) or are_same(value(scale).shape, shape)


def _blocks(length: int | torch.SymInt) -> int | torch.SymInt:
    return -(-length // BLOCK)
