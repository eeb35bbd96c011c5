"""Fuses a sum over ranks, the addition of a residual and an RMSNorm.

all_reduce(x, 'sum', group) -> add residual -> RMSNorm becomes graphar::allreduce_residual_rmsnorm, and
reduce_scatter_tensor(x, 'sum', world_size, group) -> add residual -> RMSNorm graphar::reducescatter_residual_rmsnorm.

all_reduce -- wait_tensor -- add residual -- to fp32 -+- square -- mean -- add eps -- rsqrt -+
                             |                        +----------------- mul ----------------+- mul weight -- to bf16
                             other uses

torch.nn.RMSNorm multiplies by the weight in fp32 and then rounds. Llama's norm rounds before and after the
multiplication. Gemma's norm adds one to the weight, in fp32. Graphs of fp32 tensors have no casts.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from graphar.graph import collectives, rows
from graphar.graph.collectives import ALLREDUCE, CASTS, REDUCESCATTER, Collective, arguments, call, first, value
from graphar.graph.places import Places
from graphar.graph.report import expect
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.ops import norms
from graphar.plan.select import has_norm_kernel

_aten = torch.ops.aten
_ADDS = (_aten.add.Tensor, _aten.add.Scalar)
_OPS = {ALLREDUCE: norms.NORM, REDUCESCATTER: norms.SCATTERED_NORM}


@dataclass(frozen=True)
class NormedSum(Collective):
    """An all-reduce or a reduce-scatter whose sum goes into a norm."""

    # The nodes from the collective to the addition of the residual, both included; between them are the wait and views.
    path: list[Node]
    start: tuple[Node, Node, Node]  # the squared node, the square, and the mean of the square

    def check(self, places: Places) -> None:
        x = self.path[-1].meta["val"]
        expect(x.dtype in TYPE_NAMES, f"no norm for {x.dtype}")
        self.check_served(places)
        _read(self)
        if self.op == REDUCESCATTER:
            self._check_rows()
        columns = x.shape[-1]
        has_kernel = isinstance(columns, int) and has_norm_kernel(columns * x.element_size())
        expect(has_kernel or not x.is_cuda, f"no kernel norms rows of {columns} columns")

    def replace(self, graph: Graph) -> None:
        (named, norm), (*path, add), (x,), op = _read(self), self.path, self.inputs, _OPS[self.op]
        with graph.inserting_before(add):
            if self.op == REDUCESCATTER:  # its first axis is divided between ranks, so its input stays as it is
                named["residual"] = rows.reshape(graph, named["residual"], self.node.meta["val"].shape[:-1])
            else:
                x = collectives.with_views(graph, path, x)
            pair = self.call(graph, op, x, **named)
            results = [call(graph, operator.getitem, (pair, i)) for i in range(2)]
            normed, summed = [rows.reshape(graph, result, add.meta["val"].shape[:-1]) for result in results]
        norm[-1].replace_all_uses_with(normed)
        add.replace_all_uses_with(summed)
        for node in reversed([*self.path, *norm]):
            graph.erase_node(node)

    def _check_rows(self) -> None:
        """Raises Refused unless the norm has the rows of the reduce-scatter."""
        (*_, total, _), scattered = self.path, self.node.meta["val"]
        shapes = scattered.shape[:-1], total.meta["val"].shape[:-1]
        expect(scattered.ndim >= 2, "the scattered tensor has no rows")
        # Its residual and results are reshaped.
        fits = collectives.are_same(*shapes) or all(map(rows.can_reshape, shapes))
        has_views = rows.origin(total).target in collectives.VIEWS
        expect(fits and not has_views, "the sum is seen in another shape")


def find(graph: Graph) -> list[NormedSum]:
    sums = [normed for total in collectives.sums_of_one(graph) if (normed := _normed(total))]
    return list({normed.path[-1]: normed for normed in sums}.values())  # if two sums are added, keep the later


def _normed(collective: Collective) -> NormedSum | None:
    """Returns the collective with the first nodes of a norm; None if no mean of squares follows."""
    path = collectives.path_behind(collective)
    for add in path[-1].users:
        if add.target is _aten.add.Tensor and (start := _mean_of_squares(add)):
            return NormedSum(**vars(collective), path=[*path, add], start=start)
    return None


def _mean_of_squares(add: Node) -> tuple[Node, Node, Node] | None:
    for wide in (add, *[user for user in add.users if _is_widened(user)]):
        squares = (_aten.pow.Tensor_Scalar, (wide, 2)), (_aten.mul.Tensor, (wide, wide))
        for square in [user for user in wide.users if (user.target, user.args) in squares]:
            for mean in [user for user in square.users if user.target is _aten.mean.dim]:
                return wide, square, mean
    return None


def _is_widened(node: Node) -> bool:
    """Whether a node is a cast to fp32 on the same device."""
    of = value(first(node)) if node.target in CASTS else None
    return of is not None and (value(node).dtype, value(node).device) == (torch.float32, of.device)


def _read(collective: NormedSum) -> tuple[dict[str, Any], list[Node]]:
    """Returns the arguments of the op, and the nodes from the square to the normed tensor."""
    (*_, total, add), (wide, square, mean) = collective.path, collective.start
    x = add.meta["val"]
    residual = _residual(total, add)
    expect(value(wide).dtype == torch.float32, "the norm is not in fp32")
    axes = arguments(mean)["dim"] or ()
    is_over_last = [axis % max(1, x.ndim) for axis in axes] == [x.ndim - 1] and mean.args[2:] == (True,)
    expect(is_over_last and not mean.kwargs, "the norm is not over the last dimension alone")
    shifted = _only_user(mean, *_ADDS)
    eps = _other_operand(shifted, mean)
    expect(isinstance(eps, (int, float)), "the norm's eps is not a number")
    _only_user(square, _aten.mean.dim)
    inverse = _only_user(shifted, _aten.rsqrt.default)
    normal = _only_user(inverse, _aten.mul.Tensor)
    is_normed = _other_operand(normal, inverse) is wide and (wide is add or wide.users.keys() == {square, normal})
    expect(is_normed, "what is squared is not what is normed, or has further uses")
    rest, scale = _scaled(normal, x.dtype)
    weight, weight_offset = _offset(scale, x.dtype)
    kind = weight.meta["val"]
    is_a_column = (kind.ndim, kind.dtype) == (1, x.dtype) and statically_known_true(kind.shape[0] == x.shape[-1])
    expect(is_a_column, f"the norm's weight is not one {x.dtype} a column")
    expect(not add < weight, "the norm's weight is made after the sum")
    cast = [] if wide is add else [wide]
    named = {"residual": residual, "weight": weight, "eps": float(eps), "weight_offset": weight_offset}
    return named, [*cast, square, mean, shifted, inverse, normal, *rest]


def _residual(total: Node, add: Node) -> Node:
    expect(len(total.users) == 1, "the sum has further uses")
    x, residual = add.meta["val"], _other_operand(add, total)
    expect(isinstance(residual, Node) and residual is not total, "no residual is added to the sum")
    for kind in map(value, (total, residual)):
        expect(kind.dtype == x.dtype and collectives.are_same(kind.shape, x.shape), "the residual is not like the sum")
    return residual


def _scaled(normal: Node, dtype: torch.dtype) -> tuple[list[Node], Node]:
    """Returns the nodes from ``normal`` to the normed tensor, and the factor that ``normal`` is multiplied by."""
    after = _only_user(normal, _aten.mul.Tensor, *CASTS)
    if after.target in CASTS:
        scaled = _only_user(after, _aten.mul.Tensor)
        nodes, scale = [after, scaled], _other_operand(scaled, after)
    else:
        nodes, scale = [after], _other_operand(after, normal)
        if dtype != torch.float32:
            nodes.append(_only_user(after, *CASTS))
    is_rounded = value(nodes[-1]).dtype == dtype and (dtype != torch.float32 or len(nodes) == 1)
    expect(is_rounded, "the norm gives another dtype than the sum")
    expect(isinstance(scale, Node), "the norm has no weight")
    return nodes, scale


def _offset(scale: Node, dtype: torch.dtype) -> tuple[Node, float]:
    """Returns the weight, and the number that is added to it in fp32."""
    offset, wide = 0.0, scale.meta["val"].dtype == torch.float32
    if wide and scale.target in _ADDS and isinstance(scale.args[1], (int, float)) and not scale.kwargs:
        scale, offset = first(scale), float(scale.args[1])
    if dtype != torch.float32 and _is_widened(scale):
        scale = first(scale)
    return scale, offset


def _only_user(node: Node, *targets) -> Node:
    expect(len(node.users) == 1, "what is between the sum and the norm has further uses")
    (user,) = node.users
    expect(user.target in targets, f"it is no RMSNorm: {user.target} follows {node.target}")
    return user


def _other_operand(node: Node, operand: Node) -> Any:
    """Returns the operand of an addition or multiplication that is not ``operand``."""
    expect(not node.kwargs, "something is added with a factor")
    first, second = node.args
    return second if first is operand else first
