"""The binder of all-to-alls."""

from __future__ import annotations

from collections.abc import Sequence

from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.slices import Slice
from graphar.plan.work import Exchange
from graphar.ranks import agreement
from graphar.ranks.cpu import fallback
from graphar.runtime.arguments import ExchangeArguments
from graphar.runtime.bind.collective import bind_slice, bind_without_kernel, plan_of_slices
from graphar.runtime.bind.launches import runner_of
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Plan
from graphar.runtime.runner import Runner


def bind(engine: Engine, call: Call[Exchange], ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of an all-to-all. Collective."""
    work, x = call.work, ranks[0].inputs[0]
    config, reason = engine.select(call, x)
    if engine.world_size == 1:
        plan = Plan(fallback.alone(call), config)
    elif work.known and not any(work.parts):  # else every rank must take part, whatever it sends
        plan = Plan(engine.keeping_failure()(fallback.do_nothing), config)
    elif config.blocks:
        plan = _bind_kernel(engine, call, config)
    else:
        plan = bind_without_kernel(engine, call, x, config)
    return plan._replace(reason=reason)


def _bind_kernel(engine: Engine, call: Call[Exchange], config: Config) -> Plan:
    runner, whole = runner_of(engine), Slice(0)
    words = agreement.words_of_launch(call, config, whole)

    def put_of(arguments: ExchangeArguments, config: Config, part: Slice) -> None:
        at = arguments.rank - call.work.rank
        arguments.describe(call.work, at, call.dtype.itemsize)
        if not call.work.known:
            _put_words(runner, arguments, call.work, at, words)

    launches = bind_slice(runner, call, config, whole, engine.deadline(call), put_of, ExchangeArguments, words)
    return plan_of_slices(runner, config, [whole], [launches])


def _put_words(runner: Runner, arguments: ExchangeArguments, work: Exchange, at: int, words: str) -> None:
    """Writes a fingerprint of the part between each pair of ranks, which both ranks compare."""

    def of(length: int, sender: int, receiver: int) -> int:
        return runner.fingerprint(f"{words}, {length} from rank {sender} to rank {receiver}", (), tells=False)

    me = arguments.rank
    for peer, (sent, received) in enumerate(zip(work.sends[at], work.receives[at], strict=True)):
        arguments.sent_words[peer], arguments.received_words[peer] = of(sent, me, peer), of(received, peer, me)
