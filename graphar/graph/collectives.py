"""What torch's functional collectives look like in a graph, and how graphar's ops replace them.

x -- all_reduce(x, 'sum', group) -- wait_tensor -- ...

x, y -- all_reduce_coalesced([x, y], 'sum', group) --+-- getitem 0 -- wait_tensor -- ...
                                                     +-- getitem 1 -- wait_tensor -- ...

all_reduce becomes graphar::allreduce, reduce_scatter_tensor graphar::reducescatter along axis 0, and
all_gather_into_tensor graphar::allgather along axis 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import eq, floordiv, getitem
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from graphar.graph.places import Places, resolve
from graphar.graph.report import expect
from graphar.numerics.dtypes import ACCUMULATION_DTYPES, TYPE_NAMES
from graphar.ops import allgather, sums
from graphar.ops.register import Op, op_of
from graphar.ranks.groups import process_group

_torch_ops = torch.ops._c10d_functional
_wait = _torch_ops.wait_tensor.default
ALLREDUCE, REDUCESCATTER, ALLGATHER = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"
OPS = {ALLREDUCE: sums.SUM, REDUCESCATTER: sums.SCATTER, ALLGATHER: allgather.OP}  # by the names of torch's
_NAMES: dict[Any, str] = {  # by torch's ops, without "_coalesced"
    getattr(_torch_ops, f"{name}{form}").default: name for name in OPS for form in ("", "_coalesced")
}
_aten = torch.ops.aten
CASTS = (torch.ops.prims.convert_element_type.default, _aten._to_copy.default)
VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


# With types: torch types operands as anything that a graph can have.
def first(node: Node) -> Node:
    """Returns the first operand of an op that takes a tensor."""
    return cast(Node, node.args[0])


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


@dataclass(frozen=True)
class Collective:
    """A collective of a graph, which graphar's op can replace. A subclass is replaced together with nodes around it."""

    node: Node  # the collective's node
    op: str  # the name of torch's op, without "_coalesced"
    group: Any  # the name of the process group
    reduction: str  # "sum" or another; an empty string for an all-gather

    def __str__(self) -> str:
        return f"{self.op}({self.reduction})" if self.reduction else self.op

    @property
    def inputs(self) -> list[Node]:
        """The nodes of the input tensors. A rewrite of an earlier collective may replace them."""
        return sources(self.node)

    @property
    def is_coalesced(self) -> bool:
        return isinstance(self.node.meta["val"], (list, tuple))

    def tensors(self) -> list[torch.Tensor]:
        """The fake tensors of the inputs: they have shape and dtype, and no memory."""
        return [x.meta["val"] for x in self.inputs]

    def check_served(self, places: Places) -> None:
        """Raises Refused if no op of graphar's can replace the collective."""
        expect(self.reduction in ("", "sum"), f"graphar has sums, not {self.reduction}")
        places.check(self.group, self.tensors()[0].device.type)

    def check_sum(self, places: Places) -> None:
        self.check_served(places)
        for x in self.tensors():
            expect(x.dtype in (TYPE_NAMES if x.is_cuda else ACCUMULATION_DTYPES), f"no kernel adds {x.dtype}")

    def check(self, places: Places) -> None:
        """Raises Refused, which says why, if the collective stays as it is."""
        if self.op == ALLGATHER:
            expect(all(x.ndim for x in self.tensors()), "graphar joins tensors along an axis, and this one has none")
            self.check_served(places)
        else:
            self.check_sum(places)

    def replace(self, graph: Graph) -> None:
        """Replaces the collective and its waits with a call of graphar's op for each input."""
        node = self.node
        for at, x in enumerate(self.inputs):
            with graph.inserting_before(node):
                new = self.call(graph, OPS[self.op], x)
            for old in [user for user in node.users if user.args[1] == at] if self.is_coalesced else [node]:
                _take_over(graph, old, new)
            if not new.users:
                # Inductor drops unused ops but not waits. If another rank used its result, it would wait for this rank.
                with graph.inserting_after(new):
                    call(graph, _wait, (new,))
        if self.is_coalesced:
            graph.erase_node(node)

    def call(self, graph: Graph, op: Op, x: Node, **more) -> Node:
        """Adds a call of graphar's ``op`` to the graph: of ``x``, in the group, with the arguments ``more``."""
        group = resolve(self.group)
        # "" names the default group, as in eager calls.
        more |= {"x": x, "communicator": "" if group is dist.group.WORLD else self.group}
        if self.op != ALLREDUCE:  # each rank has a part along axis 0
            part = first_size(graph, x)
            if self.op == REDUCESCATTER:
                part = part // group.size() if isinstance(part, int) else call(graph, floordiv, (part, group.size()))
            more |= {"rank": group.rank(), "sizes": [part] * group.size()}
        result = call(graph, op.one, op.write(more))
        result.stack_trace = self.node.stack_trace
        return result


def read(node: Node) -> Collective | None:
    """Returns the collective of torch's that a node is; None if it is something else."""
    if node.target not in _NAMES:
        return None
    named = arguments(node)
    return Collective(node, _NAMES[node.target], named["group_name"], named.get("reduce_op", "").lower())


def find(graph: Graph, op: str = "") -> list[Collective]:
    """Returns the collectives of a graph, of one of torch's ops if it is named, in the graph's order."""
    collectives = [collective for node in graph.nodes if (collective := read(node))]
    return [collective for collective in collectives if op in ("", collective.op)]


def sums_of_one(graph: Graph) -> list[Collective]:
    """Returns the all-reduces and reduce-scatters of a graph that are not coalesced, in the graph's order."""
    return [total for total in find(graph) if total.reduction and not total.is_coalesced]


def ours(node: Node, op: Op) -> dict[str, Any]:
    """Returns the fields of the collective that a node of graphar's ``op`` is."""
    group = op.read(node.args)["communicator"] or process_group(None).group_name
    return {"node": node, "op": op.name, "group": group, "reduction": ""}


def path_behind(collective: Collective) -> list[Node]:
    """Returns the collective's node, its wait, and the views behind it, as long as each has one user."""
    path = [collective.node]
    while len(path[-1].users) == 1 and (user := next(iter(path[-1].users))).target in (_wait, *VIEWS):
        path.append(user)
    return path


def simplify(graph: Graph) -> None:
    """Erases copies of results into inputs, which express in-place collectives, and views that change no shape.

    DTensor's graphs have such views between any two operations.
    """
    for node in graph.find_nodes(op="call_function", target=_aten.copy.default):
        place, result = node.args
        kinds = [(x.shape, x.stride(), x.dtype, x.device) for x in map(value, (place, result))]
        if result.target is _wait and kinds[0] == kinds[1]:
            node.replace_all_uses_with(result)
            graph.erase_node(node)
    for node in [node for target in VIEWS for node in graph.find_nodes(op="call_function", target=target)]:
        # A result of the graph stays a view: it tells which input's memory it shares.
        returned = any(user.op == "output" for user in node.users)
        if not returned and are_same(value(first(node)).shape, value(node).shape):
            node.replace_all_uses_with(first(node))
            graph.erase_node(node)


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Returns the nodes reached from ``starts``, these included; ``following`` gives the next nodes of a node."""
    nodes, pending = set(starts), list(starts)
    while pending:
        new = set(following(pending.pop())) - nodes
        nodes |= new
        pending += new
    return nodes


def are_same(sizes: Sequence, others: Sequence) -> bool:
    """Whether two shapes are known to be the same."""
    return len(sizes) == len(others) and all(map(statically_known_true, map(eq, sizes, others)))


def _take_over(graph: Graph, result: Node, new: Node) -> None:
    """Moves the users of a collective's result and of its waits to ``new``, and erases the result and the waits."""
    for wait in [user for user in result.users if user.target is _wait]:
        wait.replace_all_uses_with(new)
        graph.erase_node(wait)
    result.replace_all_uses_with(new)
    graph.erase_node(result)


def first_size(graph: Graph, x: Node) -> int | Node:
    """Returns the length of ``x`` along its first axis: an int, or a node if the length is symbolic."""
    size = value(x).shape[0]
    return size if isinstance(size, int) else call(graph, _aten.sym_size.int, (x, 0))


def call(graph: Graph, target: Any, arguments: tuple) -> Node:
    """Adds a call to the graph, and its fake result."""
    result = target(*map_arg(arguments, value))
    node = graph.call_function(target, arguments)
    node.meta["val"] = result
    return node


def with_views(graph: Graph, path: Sequence[Node], x: Node) -> Node:
    """Adds the views of a path to the graph again, for ``x``; returns the last one."""
    for view in path:
        if view.target in VIEWS:
            x = graph.call_function(view.target, (x, *view.args[1:]))
            x.meta["val"] = view.meta["val"]
    return x


def keep_order(graph: Graph) -> None:
    """Makes each of graphar's ops depend on the previous collective, through ``after`` if its inputs do not.

    The order of collectives must be the same on every rank. Inductor orders nodes by the data they need, and by sizes
    and timings, which may differ from rank to rank. It keeps the order of torch's collectives, but not of graphar's
    ops. An op that does not depend on the previous collective therefore takes that collective's result as ``after``,
    which it does not read. Limit: torch's collectives have no such argument, so one that follows an op of graphar's
    without depending on it may still be reordered. Call it after all other passes.
    """
    last = None
    for node in list(graph.nodes):
        if op := op_of(node.target):
            if last is not None and not _needs(node, last):
                with graph.inserting_before(node):
                    result = last if isinstance(value(last), torch.Tensor) else call(graph, getitem, (last, 0))
                    node.args = op.write(op.read(node.args) | {"after": [result]})
            # Inductor cuts lists to the lengths in the traced call: it would drop an ``after``.
            node.meta.pop("eager_input_vals", None)
            last = node
        elif node.target is _wait:
            last = node


def _needs(node: Node, earlier: Node) -> bool:
    """Whether ``node`` needs the result of ``earlier``, directly or not."""
    return earlier in reached([node], lambda other: [x for x in other.all_input_nodes if x is earlier or earlier < x])
