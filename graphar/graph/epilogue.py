"""Fuses the pointwise operations that follow a sum over ranks into its op, as an epilogue; off by default.

all_reduce -- wait_tensor -- views -- to fp32 -- mul 0.5 -- ... -- to bf16 -- other uses
                                        +----- erf -- add 1 --+

all_reduce becomes graphar::allreduce with an epilogue, and reduce_scatter_tensor becomes graphar::reducescatter with
one. The operations may use the sum and numbers. They may not use other tensors: an epilogue's tensors must be equal on
all ranks, and a graph does not say whether a tensor is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphar.graph import collectives
from graphar.graph.collectives import CASTS, Collective, path_behind, reached
from graphar.graph.places import Places
from graphar.graph.report import expect
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues import syntax
from graphar.numerics.epilogues.tracer import RULES, applied, as_stored


@dataclass(frozen=True)
class FollowedSum(Collective):
    """An all-reduce or a reduce-scatter whose sum goes into pointwise operations."""

    path: list[Node]  # the collective, its wait, and the views before the pointwise operations
    # The pointwise operations that become the epilogue, in order; the last one gives the op's result. Empty if none can
    # become one.
    nodes: list[Node]
    text: str  # the epilogue's expression; an empty string if there is none

    def check(self, places: Places) -> None:
        (x,) = self.tensors()
        expect(x.dtype in TYPE_NAMES, f"no epilogue for {x.dtype}")
        self.check_served(places)
        expect(self.nodes, "the sum, or what is computed of it, has further uses")

    def replace(self, graph: Graph) -> None:
        (x,) = self.inputs
        with graph.inserting_before(self.path[-1].next):
            result = self.call(graph, collectives.OPS[self.op], x, epilogue=self.text)
            result = collectives.with_views(graph, self.path, result)
        self.nodes[-1].replace_all_uses_with(result)
        for node in reversed([*self.path, *self.nodes]):
            graph.erase_node(node)


def find(graph: Graph) -> list[FollowedSum]:
    return [followed for total in collectives.sums_of_one(graph) if (followed := _followed(total))]


def _followed(collective: Collective) -> FollowedSum | None:
    """Returns the collective with the longest possible epilogue; None if no pointwise operation follows."""
    path = path_behind(collective)
    total = path[-1]
    trees = _trees(total)
    if all(node is total or node.target in CASTS for node in trees):
        return None
    for last in sorted(trees.keys() - {total}, reverse=True):
        # What computes `last` from `total`, with `last` and without `total`.
        nodes = sorted(reached([last], lambda node: [x for x in node.all_input_nodes if x is not total]))
        text = _text(trees[last], total.meta["val"].dtype)
        is_closed = all(set(node.users) <= {*nodes} for node in (total, *nodes[:-1]))
        if text and last.meta["val"].dtype == total.meta["val"].dtype and is_closed:
            return FollowedSum(**vars(collective), path=path, nodes=nodes, text=text)
    return FollowedSum(**vars(collective), path=path, nodes=[], text="")


def _trees(total: Node) -> dict[Node, syntax.Node]:
    """Returns, by node, the expression tree of each value computed from the sum and numbers by epilogue operations."""
    trees: dict[Node, syntax.Node] = {total: syntax.Name("v")}
    pending = [total]
    while pending:
        for user in pending.pop().users:
            known = user not in trees and user.op == "call_function" and trees.keys() >= set(user.all_input_nodes)
            if known and (tree := _tree(user, trees)):
                trees[user] = tree
                pending.append(user)
    return trees


def _tree(node: Node, trees: dict[Node, syntax.Node]) -> syntax.Node | None:
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor) or result.dtype not in (*TYPE_NAMES, torch.bool):
        return None
    if node.target in CASTS:
        (of,) = node.all_input_nodes
        if result.device != of.meta["val"].device or result.dtype == torch.bool:
            return None
        return as_stored(trees[of], result.dtype)
    name, _, overload = str(node.target).removeprefix("aten.").partition(".")
    rule = RULES.get(name)
    if rule is None or getattr(node.target, "namespace", "") != "aten" or overload == "out":
        return None
    tree = applied(rule, node.args, node.kwargs, trees.__getitem__)
    return as_stored(tree, torch.bool) if tree and result.dtype == torch.bool else tree  # rounding is left to the op


def _text(tree: syntax.Node, dtype: torch.dtype) -> str:
    """Returns the epilogue's expression; an empty string if it is too large or too deep for an epilogue.

    An outermost rounding to ``dtype`` is left out, since the op rounds its result to ``dtype``.
    """
    if isinstance(tree, syntax.Apply) and tree.operation == TYPE_NAMES.get(dtype):
        (tree,) = tree.of
    try:
        return syntax.written(tree)
    except ValueError:
        return ""
