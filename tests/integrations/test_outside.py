"""torch.distributed's collectives go by a tuning table, which may name an algorithm from outside the package."""

from dataclasses import replace

import torch
import torch.distributed as dist

from graphar.plan.policy import Chip
from graphar.plan.select import Facts
from graphar.plan.tables import shipped_table
from graphar.runtime.bind import collective
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Plan
from tests.outside import load
from tests.processes import on_ranks


@on_ranks(2)
def test_the_backend_takes_what_a_table_names(rank, world_size):
    ring, gather = load(), load(op="allgather")
    table = shipped_table("nvidia_h200")
    entries = [
        [{"max_nbytes": 1024, "algorithm": one.value, "blocks": 4, "threads": 256}, *others]
        for one, others in ((ring, table.rows[2]), (gather, table.parts["allgather"]))
    ]
    named = replace(table, rows={2: entries[0]}, parts=table.parts | {"allgather": entries[1]})
    taken = []

    def bind_kernel(engine, call, config):
        taken.append(config.algorithm.kernel_name)
        return Plan(lambda ranks: None, config)

    Engine.facts = lambda engine, call, x: Facts(world_size, named, Chip(132, "sm_90a"))
    collective.bind_kernel = bind_kernel
    group = dist.new_group(backend="graphar")

    dist.all_reduce(torch.ones(64), group=group)
    dist.all_gather_into_tensor(torch.empty(128), torch.ones(64), group=group)

    assert taken == ["pushed_sum", "pushed_sum"]
