"""reduce_scatter_tensor(x, 'sum', world_size, group) -> wait_tensor becomes graphar::reducescatter along axis 0."""

from __future__ import annotations

from torch.fx import Graph, Node

from graphar.graph import collectives
from graphar.graph.collectives import Collective
from graphar.graph.places import Places
from graphar.ops.reducescatter import OP


def find(graph: Graph) -> list[Collective]:
    return collectives.find(graph, "reduce_scatter_tensor")


def why_not(collective: Collective, places: Places) -> str:
    return collectives.why_not(collective, places) or collectives.why_no_sum(collective)


def replace(graph: Graph, collective: Collective, places: Places) -> None:
    def make(x: Node) -> Node:
        return graph.call_function(OP.one, OP.write({"x": x} | call(graph, collective, x, places)))

    collectives.replace(graph, collective, make)


def call(graph: Graph, collective: Collective, x: Node, places: Places) -> dict[str, object]:
    """Returns the op's arguments besides ``x``: the communicator, this rank, and the length of each rank's part."""
    group = places.resolve(collective.group)
    part = collectives.divide(graph, collectives.first_size(graph, x), group.size())
    name = places.communicator_name(collective.group)
    return {"communicator": name, "rank": group.rank(), "sizes": [part] * group.size()}
