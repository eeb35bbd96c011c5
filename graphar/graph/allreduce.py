"""all_reduce(x, 'sum', group) -> wait_tensor becomes graphar::allreduce."""

from __future__ import annotations

import torch
from torch.fx import Graph

from graphar.graph import collectives
from graphar.graph.collectives import Collective
from graphar.graph.places import Places


def find(graph: Graph) -> list[Collective]:
    return collectives.find(graph, "all_reduce")


def why_not(collective: Collective, places: Places) -> str:
    return collectives.why_not(collective, places) or collectives.why_no_sum(collective)


def replace(graph: Graph, collective: Collective, places: Places) -> None:
    call = (places.communicator_name(collective.group), "auto", None)
    op = torch.ops.graphar.allreduce.default
    collectives.replace(graph, collective, lambda x: graph.call_function(op, (x, *call)))
