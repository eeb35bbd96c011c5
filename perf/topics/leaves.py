"""`python -m perf leaves`: times the tensor-parallel invariant matmul of one rank, and torch.mm, on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from graphar.numerics.leaf_tree import LEAVES
from graphar.plan.tune import WEIGHTS
from graphar.product import gemm
from perf import products
from perf.harness import verify
from perf.report import Arguments

TORCH, PLAIN, TREE = METHODS = ("torch.mm", "graphar, in the order of K", f"graphar, {LEAVES} leaves")
LEAST_K = 4096
SHAPES: tuple[products.Shape, ...] = tuple(
    (m, n, k) for n, k in WEIGHTS if k >= LEAST_K for m in (*products.DECODE_ROWS, *products.MANY_ROWS[1:])
)
LEAVES_OF_TORCH = "leaves/torch"


def tree_of_leaves(operands: products.ProductOperands, call: int) -> Tensor:
    """Returns the product in leaves that are multiplied one by one, in the order of K, and added as a tree."""
    leaves = zip(operands.a.chunk(LEAVES, 1), operands.weight(call).chunk(LEAVES, 1), strict=True)
    nodes = [gemm.matmul(*leaf, out_dtype=torch.float32) for leaf in leaves]
    while len(nodes) > 1:
        nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0].to(operands.out.dtype)


@dataclass
class Leaves(products.Products):
    rows: list[products.ProductRow] = field(default_factory=list)

    order: ClassVar[int] = 7
    arguments: ClassVar[Arguments] = products.run_with(
        "1x8192x7168 512x5120x8192 4096x4096x14336", "64x8192x7168 4096x8192x7168"
    )
    shapes: ClassVar = SHAPES
    columns: ClassVar = {TORCH: "torch", PLAIN: "order of K", TREE: f"{LEAVES} leaves"}
    ratios: ClassVar[dict[str, Callable[[products.Case], products.Pair]]] = {
        "order of K/torch": products.pair(PLAIN, TORCH),
        LEAVES_OF_TORCH: products.pair(TREE, TORCH),
    }
    told: ClassVar = (LEAVES_OF_TORCH,)
    groups: ClassVar = {"decode": f"up to {max(products.DECODE_ROWS)} rows", "more rows": "more rows"}
    heading: ClassVar[str] = "Leaves, the order of K and torch"
    subject: ClassVar[str] = f"graphar's time of a matmul in {LEAVES} leaves / torch's"

    @classmethod
    def why_not(cls, operands: products.ProductOperands) -> str | None:
        return gemm.why_not(operands.a, operands.weight(0), operands.out, LEAVES)

    @classmethod
    def multiply(cls, method: str, operands: products.ProductOperands, call: int) -> None:
        a, weight, out = operands.a, operands.weight(call), operands.out
        if method == TORCH:
            torch.mm(a, weight.t(), out=out)
        else:
            gemm.matmul(a, weight, out, leaves=LEAVES if method == TREE else 1)

    @classmethod
    def judge(cls, operands: products.ProductOperands, call: int) -> products.IsWrong:
        value, magnitude = products.exact(operands.a, operands.weight(call))
        tree = tree_of_leaves(operands, call)

        def is_wrong(method: str) -> Tensor:
            limit = products.limit_of(operands.a.shape[1], value, magnitude, may_split=method == TORCH)
            bad = verify.exceeds(operands.out, value, limit)
            return bad | verify.differs(operands.out, tree) if method == TREE else bad

        return is_wrong

    @classmethod
    def group_of(cls, shape: products.Shape, case: products.Case) -> str:
        return "decode" if shape[0] <= max(products.DECODE_ROWS) else "more rows"
