"""all_reduce(x, 'sum', group) -> wait_tensor becomes graphar::allreduce."""

from __future__ import annotations

from torch.fx import Graph

from graphar.graph import collectives
from graphar.graph.collectives import Collective
from graphar.graph.places import Places
from graphar.ops.allreduce import OP


def find(graph: Graph) -> list[Collective]:
    return collectives.find(graph, "all_reduce")


def why_not(collective: Collective, places: Places) -> str:
    return collectives.why_not(collective, places) or collectives.why_no_sum(collective)


def replace(graph: Graph, collective: Collective, places: Places) -> None:
    name = places.communicator_name(collective.group)
    collectives.replace(
        graph, collective, lambda x: graph.call_function(OP.one, OP.write({"x": x, "communicator": name}))
    )
