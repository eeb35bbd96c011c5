"""all_gather_into_tensor(x, world_size, group) -> wait_tensor becomes graphar::allgather along axis 0."""

from __future__ import annotations

from torch.fx import Graph, Node

from graphar.graph import collectives
from graphar.graph.collectives import Collective
from graphar.graph.places import Places
from graphar.ops.allgather import OP


def find(graph: Graph) -> list[Collective]:
    return collectives.find(graph, "all_gather_into_tensor")


def why_not(collective: Collective, places: Places) -> str:
    if any(x.ndim == 0 for x in collective.tensors()):
        return "graphar joins tensors along an axis, and this one has none"
    return collectives.why_not(collective, places)


def replace(graph: Graph, collective: Collective, places: Places) -> None:
    group = places.resolve(collective.group)
    name = places.communicator_name(collective.group)

    def make(x: Node) -> Node:
        sizes = [collectives.first_size(graph, x)] * group.size()
        given = {"x": x, "communicator": name, "rank": group.rank(), "sizes": sizes}
        return graph.call_function(OP.one, OP.write(given))

    collectives.replace(graph, collective, make)
