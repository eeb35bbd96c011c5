"""The matmuls of a graph: their operands and scales, and their weights as layers store them.

    mm(a, w.t())    addmm(bias, a, w.t())    linear(a, w, bias)
    _scaled_mm(a, w.t(), scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    _scaled_mm_v2(a, w.t(), [scale_a], [recipe], [swizzle], [scale_b], [recipe], [swizzle], bias, out_dtype, ...)

torch's scaled products multiply e4m3 operands:

    scales of    scale_a               scale_b               w_scale of graphar's ops
    rows         [M, 1], or a number   [1, N], or a number   scale_b
    blocks       [M, K / 128]          [K / 128, N / 128]    scale_b transposed; v2 pads it to a multiple of 4 rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.nn.functional import ScalingType

from graphar.graph.collectives import VIEWS, are_same, arguments, call, first, value
from graphar.graph.report import expect
from graphar.numerics.fp8_products import BLOCK, FP8
from graphar.ops.matmul_operands import RESULT_DTYPES

_aten = torch.ops.aten
_V2 = _aten._scaled_mm_v2.default
MATMULS = (_aten.mm.default, _aten.addmm.default, _aten.linear.default)
SCALED = (_aten._scaled_mm.default, _V2)
# By matmul, how torch names the rows, the weight and the bias.
_NAMES: dict[Any, tuple[str, str, str]] = {
    **dict.fromkeys(SCALED, ("self", "mat2", "bias")),
    _aten.mm.default: ("self", "mat2", "bias"),
    _aten.addmm.default: ("mat1", "mat2", "self"),
    _aten.linear.default: ("input", "weight", "bias"),
}
_RECIPES = [  # the recipes of scale_a and of scale_b that graphar has
    ([ScalingType.TensorWise.value], [ScalingType.TensorWise.value]),
    ([ScalingType.RowWise.value], [ScalingType.RowWise.value]),
    ([ScalingType.BlockWise1x128.value], [ScalingType.BlockWise128x128.value]),
]
TRANSPOSES = (_aten.t.default, _aten.transpose.int, _aten.permute.default)
_SAME = (_aten.view.default, *TRANSPOSES, _aten.detach.default, _aten.alias.default)  # other views of the same memory
_OF_TRAINING = ("primals", "tangents")  # how names of inputs begin in graphs with gradients


@dataclass(frozen=True)
class Product:
    """A matmul of a graph. Its operands are those that the graph has now: rewrites of others may replace them."""

    node: Node

    def _argument(self, at: int) -> Any:
        return arguments(self.node).get(_NAMES[self.node.target][at])

    @property
    def a(self) -> Node:
        """[..., K]"""
        return self._argument(0)

    @property
    def weight(self) -> Node:
        """[K, N], of linear [N, K]"""
        return self._argument(1)

    @property
    def bias(self) -> Node | None:
        return self._argument(2)

    @property
    def scales(self) -> tuple[Node, Node] | None:
        """The scales of ``a`` and of the weight as torch takes them, if the operands are in e4m3."""
        if self.node.target not in SCALED:
            return None
        named = arguments(self.node)
        of_a, of_w = named["scale_a"], named["scale_b"]
        return (of_a[0], of_w[0]) if self.node.target is _V2 else (of_a, of_w)

    @property
    def columns(self) -> int | torch.SymInt:
        return value(self.node).shape[-1]

    def stored_weight(self, graph: Graph) -> Node:
        """Returns the weight as torch.nn.Linear stores it; adds a transpose to the graph if there is none."""
        return self.weight if self.node.target is _aten.linear.default else stored(graph, self.weight)

    def check_bias(self) -> None:
        """Raises Refused if something else than a bias of its columns is added to the product."""
        bias, dtype, sizes = self.bias, value(self.node).dtype, (self.columns,)
        is_bias = bias is None or (value(bias).dtype == dtype and are_same(value(bias).shape, sizes))
        has_factors = self.node.kwargs and not self.scales  # as addmm has
        fits = is_bias and not has_factors and value(self.weight).ndim == 2
        expect(fits, "something else than a bias is added to the product")

    def check_scales(self) -> None:
        named, dtypes = arguments(self.node), [value(operand).dtype for operand in (self.a, self.weight)]
        if self.node.target is _V2:
            recipes = list(named["recipe_a"]), list(named["recipe_b"])
            rest = [*named["swizzle_a"], *named["swizzle_b"], *named.get("contraction_dim", ())]
            expect(recipes in _RECIPES and not any(rest), "graphar has no such recipe of scales")
        expect(named.get("scale_result") is None, "the product is scaled again")
        expect(dtypes == [FP8, FP8], f"graphar multiplies {FP8} by {FP8}, not {dtypes[0]} by {dtypes[1]}")
        expect(value(self.node).dtype in RESULT_DTYPES, f"the product is rounded to {value(self.node).dtype}")
        expect(self.format(), "the scales are neither of rows nor of blocks, in fp32")

    def format(self) -> str:
        """Returns the format of the scales, "rows" or "blocks"; an empty string if there are none or others."""
        if self.scales is None:
            return ""
        of_a, of_w = map(value, self.scales)
        (m, k), n = value(self.a).shape, value(self.weight).shape[1]
        if (of_a.dtype, of_w.dtype) != (torch.float32, torch.float32):
            return ""
        if _has_shape(of_a, (m, 1)) and _has_shape(of_w, (1, n)):
            return "rows"
        # _scaled_mm_v2 pads the first dimension.
        in_blocks = are_same(of_w.shape[1:], (_blocks(n),)) and statically_known_true(of_w.shape[0] >= _blocks(k))
        return "blocks" if in_blocks and are_same(of_a.shape, (m, _blocks(k))) else ""

    def scaling(self, graph: Graph, moved: Callable[[Node], object]) -> dict[str, object]:
        """Returns the arguments of graphar's ops for the scales, if there are any; adds views to the graph.

        ``moved`` returns the scales of ``a`` for the rows that an op takes.
        """
        if self.scales is None:
            return {}
        (of_a, of_w), blocks = self.scales, _blocks(value(self.weight).shape[0])
        if self.format() != "rows":
            if not statically_known_true(value(of_w).shape[0] == blocks):
                of_w = call(graph, _aten.slice.Tensor, (of_w, 0, 0, blocks))
            of_w = stored(graph, of_w)
        return {"scales": [moved(of_a), of_w], "scaled_dtype": value(self.node).dtype}


def read(node: Node) -> Product | None:
    """Returns the matmul that a node is; None if it is something else."""
    return Product(node) if node.target in _NAMES else None


def is_number(scale: Node) -> bool:
    return statically_known_true(value(scale).numel() == 1)


def _has_shape(scale: torch.Tensor, shape: tuple) -> bool:
    """Whether a scale has a shape, or is one number."""
    return statically_known_true(scale.numel() == 1) or are_same(scale.shape, shape)


def _blocks(length: int | torch.SymInt) -> int | torch.SymInt:
    return -(-length // BLOCK)


def stored(graph: Graph, weight: Node) -> Node:
    """Returns the weight as torch.nn.Linear stores it, [out, in]: the source of a transpose, or a new transpose."""
    permuted = weight.target is _aten.permute.default and list(arguments(weight)["dims"]) == [1, 0]
    if permuted or weight.target is _aten.t.default:
        return first(weight)
    return call(graph, _aten.permute.default, (weight, [1, 0]))


def is_constant(weight: Node) -> bool:
    """Whether ``weight`` is a tensor of a module, or a view of one, that nothing in a graph for inference writes.

    Other inputs may be results of the kernel before the graph, and in training an optimizer writes the weights.
    """
    while weight.target in _SAME:
        weight = first(weight)
    return (weight.op == "get_attr" or _is_static(weight)) and _is_only_read(weight)


def _is_static(node: Node) -> bool:
    """Whether an input has the same address in every call, as parameters, buffers and other tensors of modules have."""
    context = TracingContext.try_get()
    known = context.fw_metadata if context else None
    inputs = node.graph.find_nodes(op="placeholder")
    # With tokens, which order side effects, the metadata counts inputs differently.
    if known is None or known.tokens or any(str(placeholder.target).startswith(_OF_TRAINING) for placeholder in inputs):
        return False
    return node in inputs and inputs.index(node) in (known.static_input_indices or ())


def _is_only_read(node: Node) -> bool:
    for user in node.users:
        if user.target in (*_SAME, *VIEWS) and not _is_only_read(user):
            return False
        op = user.target
        if user.op != "output" and (not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable):
            return False
    return True
