"""The binder of collectives of one tensor: all-reduces, reduce-scatters, all-gathers and all-to-alls."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace

import torch

from graphar.numerics.epilogues.code import Corner
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config, kernel_of
from graphar.plan.slices import Slice, slices
from graphar.plan.work import Exchange, Norm, Parts, Sum, TensorTuple
from graphar.ranks import agreement
from graphar.ranks.cpu import fallback
from graphar.runtime import launcher
from graphar.runtime.arguments import Arguments, ExchangeArguments, NormArguments, TupleArguments
from graphar.runtime.bind.by_copies import bind_copies
from graphar.runtime.bind.launches import bind_launch, of_members, put_agreed, runner_of
from graphar.runtime.engine import Engine
from graphar.runtime.launcher import Grid
from graphar.runtime.launcher import Launch as KernelLaunch
from graphar.runtime.plan import Launch, Plan, Tensors
from graphar.runtime.runner import Runner

_ARGUMENTS = {Norm: NormArguments, TensorTuple: TupleArguments, Exchange: ExchangeArguments}  # other works: Arguments

_log = logging.getLogger(__name__)


def bind(engine: Engine, call: Call[Sum | Parts | Exchange], ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of a sum, of parts or of an all-to-all. Collective."""
    x = ranks[0].inputs[0]
    if call.wire and call.wire.seed is None:
        codec = replace(call.wire, seed=secrets.randbits(64)).text
        call = call._replace(work=call.work._replace(codec=codec))
    config, reason = engine.select(call, x)
    plan = Plan(fallback.alone(call), config, reason) if engine.world_size == 1 else _bind(engine, call, x, config)
    plan = plan._replace(reason=reason)
    _log.debug("%s: %s", agreement.words(call), plan.explanation)
    return plan


def _bind(engine: Engine, call: Call, x: torch.Tensor, config: Config) -> Plan:
    is_known = not isinstance(call.work, Exchange) or call.work.known  # else every rank takes part, whatever it sends
    if is_known and not any(call.work.parts):
        return Plan(engine.keeping_failure()(fallback.do_nothing), config)
    if config.algorithm.row.copies:
        return Plan(bind_copies(engine, call, config), config)
    if config.blocks:
        return bind_kernel(engine, call, config)
    return bind_without_kernel(engine, call, x, config)


def bind_without_kernel(engine: Engine, call: Call, x: torch.Tensor, config: Config) -> Plan:
    """Returns the plan of a call that no kernel serves."""
    run = engine.keeping_failure()(engine.without_kernels.bind(call, x, config, engine.deadline(call)))
    if x.device.type != "cpu" or engine.runner:
        return Plan(run, config)

    def launch(inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], corner: Corner | None = None) -> None:
        run([Operands(inputs, outputs, numbers, corner)])

    return Plan(run, config, launch_like=lambda operands: launch)


def select_and_bind(engine: Engine, call: Call, x: torch.Tensor) -> Plan:
    """Returns the plan of a call with a first tensor like ``x`` that a kernel serves. Collective."""
    config, reason = engine.select(call, x)
    return bind_kernel(engine, call, config)._replace(reason=reason)


def bind_kernel(engine: Engine, call: Call, config: Config) -> Plan:
    """Returns the plan of a call that one kernel serves, in as many launches as its scratch needs. Collective."""
    work, runner, parts = call.work, runner_of(engine), [Slice(0)]  # the whole of an all-to-all
    if not isinstance(work, Exchange):
        of_columns = work if isinstance(work, Norm) else work.epilogue
        columns = of_columns.columns if of_columns else 1
        parts = slices(config.algorithm, engine.world_size, work.parts, call.dtype.itemsize, columns)
    bound = [bind_slice(runner, call, config, part, engine.deadline(call)) for part in parts]
    return plan_of_slices(runner, config, parts, bound, 2 if call.feeds_back else 1)


def plan_of_slices(
    runner: Runner, config: Config, parts: Sequence[Slice], bound: Sequence[Sequence[Launch]], sliced: int = 1
) -> Plan:
    """Returns the plan that launches once for each member and slice; slices cut the output and the first inputs."""
    runs = [of_members(runner, launches) for launches in bound]
    if len(runs) > 1:

        def run_slices(ranks: Sequence[Operands]) -> None:
            with runner.lock:
                for run, part in zip(runs, parts, strict=True):
                    run([_after(part.offset, operands, sliced) for operands in ranks])

        return Plan(run_slices, config)
    ((first, *others),) = bound
    return Plan(runs[0], config) if others else Plan(runs[0], config, launch_like=lambda operands: first)


def bind_slice(runner: Runner, call: Call, config: Config, part: Slice, timeout_s: float) -> list[Launch]:
    """Returns, for each member, the launch of a slice of a call. The first call for a kernel is collective."""
    functions = runner.kernels.prepare(kernel_of(config, call))
    words, wire, row = agreement.words_of_launch(call, config, part), call.wire, config.algorithm.row
    shared_nbytes = row.scratch(runner.world_size).shared_nbytes
    is_early = runner.chip.may_overlap(config.blocks, row.takes_half(config.threads))
    kind = _ARGUMENTS.get(type(call.work), Arguments)
    launches = []
    for member, function in zip(runner.members, functions, strict=True):
        arguments = runner.arguments(member, config.algorithm, part, timeout_s, words, kind)
        arguments.seed = wire.seed or 0 if wire else 0
        arguments.chunk = config.chunk
        overlaps = is_early and launcher.can_overlap(member.device)
        grid = Grid(config.blocks, config.threads, shared_nbytes, overlaps, config.cluster)
        launch = KernelLaunch(function, [arguments], grid)
        peers = runner.symmetric.put_peers(arguments, row.direct) if config.direct else None
        put = arguments.bind(call, part, lambda more: runner.fingerprint(f"{words}, {more}", (), tells=False))
        put = put_agreed(runner, arguments, words, call.work.epilogue, put, peers)
        launches.append(bind_launch(runner, member, launch, arguments, put))
    return launches


def _after(offset: int, whole: Operands, sliced: int) -> Operands:
    """Returns operands whose output and first ``sliced`` inputs lack their first ``offset`` elements."""
    if not offset:
        return whole
    inputs, outputs = ([x.view(-1)[offset:] for x in xs] for xs in (whole.inputs[:sliced], whole.outputs[:1]))
    return whole._replace(inputs=(*inputs, *whole.inputs[sliced:]), outputs=(*outputs, *whole.outputs[1:]))
