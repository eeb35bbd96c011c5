"""The binder of all-to-alls."""

from __future__ import annotations

from collections.abc import Sequence

from graphar.plan.call import Call, Operands
from graphar.plan.slices import Slice
from graphar.plan.work import Exchange
from graphar.ranks.cpu import fallback
from graphar.runtime.bind.collective import bind_slice, bind_without_kernel, plan_of_slices
from graphar.runtime.bind.launches import runner_of
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Plan


def bind(engine: Engine, call: Call[Exchange], ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of an all-to-all. Collective."""
    work, x = call.work, ranks[0].inputs[0]
    config, reason = engine.select(call, x)
    if engine.world_size == 1:
        plan = Plan(fallback.alone(call), config)
    elif work.known and not any(work.parts):  # else every rank must take part, whatever it sends
        plan = Plan(engine.keeping_failure()(fallback.do_nothing), config)
    elif config.blocks:
        runner, whole = runner_of(engine), Slice(0)
        launches = bind_slice(runner, call, config, whole, engine.deadline(call))
        plan = plan_of_slices(runner, config, [whole], [launches])
    else:
        plan = bind_without_kernel(engine, call, x, config)
    return plan._replace(reason=reason)
