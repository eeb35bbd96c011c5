"""The rewrites of a single collective, and of its coalesced form: torch's op becomes graphar's, along axis 0.

all_reduce(x, 'sum', group) -> wait_tensor                          becomes graphar::allreduce
reduce_scatter_tensor(x, 'sum', world_size, group) -> wait_tensor   becomes graphar::reducescatter
all_gather_into_tensor(x, world_size, group) -> wait_tensor         becomes graphar::allgather
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from graphar.errors import Reason
from graphar.graph import collectives
from graphar.graph.collectives import Collective
from graphar.graph.places import Places
from graphar.ops import allgather, sums
from graphar.ops.register import Op


@dataclass(frozen=True)
class Single:
    """Replaces torch's collective ``name`` with ``op``."""

    name: str
    op: Op

    def find(self, graph: Graph) -> list[Collective]:
        return collectives.find(graph, self.name)

    def why_not(self, collective: Collective, places: Places) -> Reason | None:
        if self.op is allgather.OP and any(x.ndim == 0 for x in collective.tensors()):
            return "graphar joins tensors along an axis, and this one has none"
        why = collectives.why_not(collective, places)
        return why if why or self.op is allgather.OP else collectives.why_no_sum(collective)

    def replace(self, graph: Graph, collective: Collective, places: Places) -> None:
        collectives.replace(graph, collective, lambda x: self.call(graph, collective, x, places))

    def call(self, graph: Graph, collective: Collective, x: Node, places: Places, **more) -> Node:
        """Adds a call of the op with ``x`` and the arguments ``more`` to the graph."""
        arguments = {"x": x} | place(graph, collective, x, places) | more
        return graph.call_function(self.op.one, self.op.write(arguments))


def place(graph: Graph, collective: Collective, x: Node, places: Places) -> dict[str, object]:
    """Returns the arguments that tell graphar's op for ``x`` the group, and each rank's part along axis 0."""
    arguments: dict[str, object] = {"communicator": places.communicator_name(collective.group)}
    if collective.op != ALLREDUCE.name:
        group, size = places.resolve(collective.group), collectives.first_size(graph, x)
        part = collectives.divide(graph, size, group.size()) if collective.op == REDUCESCATTER.name else size
        arguments |= {"rank": group.rank(), "sizes": [part] * group.size()}
    return arguments


ALLREDUCE = Single("all_reduce", sums.SUM)
REDUCESCATTER = Single("reduce_scatter_tensor", sums.SCATTER)
ALLGATHER = Single("all_gather_into_tensor", allgather.OP)
