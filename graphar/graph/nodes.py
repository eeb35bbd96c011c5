"""What nodes hold, typed: torch types operands as anything that a graph can have."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Node


def first(node: Node) -> Node:
    """Returns the first operand of an op that takes a tensor."""
    return cast(Node, node.args[0])


def operands(node: Node) -> list[Any]:
    """Returns the operands of an op without their names."""
    return list(node.args)


def sources(node: Node) -> list[Node]:
    """Returns the nodes of the first argument of an op: a tensor, or a list of them."""
    first: Any = next(iter([*node.args, *node.kwargs.values()]))
    return [first] if isinstance(first, Node) else list(first)


def value(node: object) -> torch.Tensor:
    """Returns the fake tensor of a node: it has shape and dtype, and no memory."""
    return cast(Node, node).meta["val"]


def arguments(node: Node) -> dict[str, Any]:
    """Returns the arguments that an op of torch's was called with, by the names in its schema."""
    schema = cast(torch._ops.OpOverload, node.target)._schema
    return dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | node.kwargs
