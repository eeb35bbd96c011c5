"""reduce_scatter_tensor(x, 'sum', world_size, group) -> wait_tensor becomes graphar::reducescatter along axis 0."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from graphar.graph import collectives
from graphar.graph.collectives import Collective
from graphar.graph.places import Places


def find(graph: Graph) -> list[Collective]:
    return collectives.find(graph, "reduce_scatter_tensor")


def why_not(collective: Collective, places: Places) -> str:
    return collectives.why_not(collective, places) or collectives.why_no_sum(collective)


def replace(graph: Graph, collective: Collective, places: Places) -> None:
    op = torch.ops.graphar.reducescatter.default
    collectives.replace(graph, collective, lambda x: graph.call_function(op, (x, *call(graph, collective, x, places))))


def call(graph: Graph, collective: Collective, x: Node, places: Places) -> tuple:
    """What graphar's op is told beside ``x``: the communicator, this rank, the axis, all lengths, and no deadline."""
    group = places.resolve(collective.group)
    part = collectives.divide(graph, collectives.first_size(graph, x), group.size())
    return places.communicator_name(collective.group), group.rank(), 0, [part] * group.size(), None
