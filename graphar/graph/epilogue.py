"""A sum over ranks and the pointwise operations that follow become one op, where that is asked for.

all_reduce -- wait_tensor -- views -- to fp32 -- mul 0.5 -- ... -- to bf16 -- other uses
                                        +----- erf -- add 1 --+

all_reduce becomes graphar::epilogue_allreduce, and reduce_scatter_tensor, of a rank's part, epilogue_reducescatter.
Operations of the sum alone and of numbers: of a tensor nobody knows whether it is alike on all ranks, as an epilogue's
must be. In the graph the sum is rounded before, and in the epilogue only after: bits differ, and are more precise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from graphar.graph import collectives, reducescatter
from graphar.graph.collectives import Collective
from graphar.graph.places import Places
from graphar.numerics.epilogues import syntax
from graphar.numerics.epilogues.code import ELEMENTS
from graphar.numerics.epilogues.tracer import IGNORED, RULES
from graphar.runtime.catalogue import TYPE_NAMES

_aten = torch.ops.aten
_CASTS = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)
_PASSED = (torch.ops._c10d_functional.wait_tensor.default, *_VIEWS)
_OPS = {
    "all_reduce": torch.ops.graphar.epilogue_allreduce.default,
    "reduce_scatter_tensor": torch.ops.graphar.epilogue_reducescatter.default,
}


@dataclass(frozen=True)
class FollowedSum(Collective):
    """An all-reduce or a reduce-scatter whose sum goes into pointwise operations.

    Attributes:
        path: from the collective to what these take: the wait, and views.
        nodes: the operations, in order, that become an epilogue; the last one's result is the op's. Or nothing.
        text: the epilogue.
    """

    path: list[Node]
    nodes: list[Node]
    text: str


def find(graph: Graph) -> list[FollowedSum]:
    found = [one for op in _OPS for one in collectives.find(graph, op)]
    return [followed for one in found if one.results == [[one.node]] and (followed := _followed(one))]


def why_not(collective: FollowedSum, places: Places) -> str:
    (x,) = collective.tensors()
    if x.dtype not in TYPE_NAMES:
        return f"no epilogue for {x.dtype}"
    if why := collectives.why_not(collective, places):
        return why
    return "" if collective.nodes else "the sum, or what is computed of it, has further uses"


def replace(graph: Graph, collective: FollowedSum, places: Places) -> None:
    (x,) = collective.inputs
    with graph.inserting_before(collective.path[-1].next):
        call = (places.communicator_name(collective.group), "auto", None)
        if collective.op == "reduce_scatter_tensor":
            call = reducescatter.call(graph, collective, x, places)
        result = graph.call_function(_OPS[collective.op], (x, [], [], collective.text, *call))
        result.meta["val"], result.stack_trace = collective.values()[0], collective.node.stack_trace
        for view in [node for node in collective.path if node.target in _VIEWS]:
            result = graph.call_function(view.target, (result, *view.args[1:]))
            result.meta["val"] = view.meta["val"]
    collective.nodes[-1].replace_all_uses_with(result)
    for node in reversed([*collective.path, *collective.nodes]):
        graph.erase_node(node)


def _followed(collective: Collective) -> FollowedSum | None:
    """The collective with the most that an epilogue can do, or nothing where nothing pointwise follows."""
    path = [collective.node]
    while len(path[-1].users) == 1 and (user := next(iter(path[-1].users))).target in _PASSED:
        path.append(user)
    total = path[-1]
    trees = _trees(total)
    if all(node is total or node.target in _CASTS for node in trees):
        return None
    for last in sorted(trees.keys() - {total}, reverse=True):
        nodes, text = _inner(last, total), _text(trees[last], total.meta["val"].dtype)
        if text and last.meta["val"].dtype == total.meta["val"].dtype and _is_closed([total, *nodes]):
            return FollowedSum(**vars(collective), path=path, nodes=nodes, text=text)
    return FollowedSum(**vars(collective), path=path, nodes=[], text="")


def _trees(total: Node) -> dict[Node, syntax.Node]:
    """All that is computed of the sum and numbers by operations that epilogues have, as trees."""
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
    if not isinstance(result, torch.Tensor) or result.dtype not in (*ELEMENTS, torch.bool):
        return None
    if node.target in _CASTS:
        (of,) = node.all_input_nodes
        if result.device != of.meta["val"].device or result.dtype == torch.bool:
            return None
        return _rounded(trees[of], result.dtype)
    name, _, overload = str(node.target).removeprefix("aten.").partition(".")
    rule = RULES.get(name)
    if rule is None or node.target.namespace != "aten" or overload == "out":
        return None
    try:
        keywords = {key: _argument(one, trees) for key, one in node.kwargs.items() if key not in IGNORED}
        return rule(*(_argument(one, trees) for one in node.args), **keywords)
    except (TypeError, KeyError):
        return None


def _argument(argument: object, trees: dict[Node, syntax.Node]) -> object:
    if isinstance(argument, Node):
        return trees[argument]
    return syntax.number(float(argument)) if isinstance(argument, (bool, int, float)) else argument


def _rounded(tree: syntax.Node, dtype: torch.dtype) -> syntax.Node:
    return tree if dtype == torch.float32 else syntax.Apply(ELEMENTS[dtype], (tree,))


def _inner(last: Node, total: Node) -> list[Node]:
    """What ``last`` is computed by of the sum, itself included and that left out, in order."""
    found, pending = {last}, [last]
    while pending:
        for one in pending.pop().all_input_nodes:
            if one is not total and one not in found:
                found.add(one)
                pending.append(one)
    return sorted(found)


def _is_closed(nodes: list[Node]) -> bool:
    """Whether all but the last are used by one another alone."""
    return all(set(node.users) <= set(nodes) for node in nodes[:-1])


def _text(tree: syntax.Node, dtype: torch.dtype) -> str:
    """The epilogue, whose result is rounded to ``dtype`` anyway; nothing where it would be too large or too deep."""
    if isinstance(tree, syntax.Apply) and tree.operation == ELEMENTS.get(dtype):
        (tree,) = tree.of
    try:
        return syntax.written(tree)
    except ValueError:
        return ""
