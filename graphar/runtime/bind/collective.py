"""The binders of collectives: of one tensor, of a tuple of tensors, and of sums with residual addition and RMSNorm."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.code import Corner
from graphar.numerics.norms import ALLREDUCE_NORM, specification
from graphar.plan import select
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config, kernel_of
from graphar.plan.slices import Slice, slices
from graphar.plan.work import MAX_TENSORS, Exchange, Norm, Parts, Sum, TensorTuple
from graphar.ranks import agreement
from graphar.ranks.cpu import fallback
from graphar.runtime import launcher
from graphar.runtime.arguments import Arguments, ExchangeArguments, NormArguments, TupleArguments
from graphar.runtime.bind import residual_norm
from graphar.runtime.bind.by_copies import ByCopies
from graphar.runtime.bind.launches import bind_launch, of_members, put_agreed
from graphar.runtime.engine import Engine, runner_of
from graphar.runtime.launcher import Grid
from graphar.runtime.launcher import Launch as KernelLaunch
from graphar.runtime.plan import Launch, Plan, Tensors
from graphar.runtime.runner import Runner

_ARGUMENTS = {Norm: NormArguments, TensorTuple: TupleArguments, Exchange: ExchangeArguments}  # other works: Arguments

_log = logging.getLogger(__name__)


def bind(engine: Engine, call: Call, ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of a sum, parts or an all-to-all, or of another work that one kernel serves. Collective."""
    x = ranks[0].inputs[0]
    if call.wire and call.wire.seed is None:
        codec = replace(call.wire, seed=secrets.randbits(64)).text
        call = call._replace(work=call.work._replace(codec=codec))
    config, reason = engine.select(call, x)
    is_known = not isinstance(call.work, Exchange) or call.work.known  # else every rank takes part, whatever it sends
    if engine.world_size == 1:
        plan = Plan(fallback.alone(call), config)
    elif is_known and not any(call.work.parts):
        plan = Plan(engine.keeping_failure()(lambda ranks: None), config)
    elif config.algorithm.row.copies:
        plan = Plan(ByCopies(engine, call, config).run, config)
    elif config.blocks:
        plan = bind_kernel(engine, call, config)
    else:
        plan = bind_without_kernel(engine, call, x, config)
    plan = plan._replace(reason=reason)
    _log.debug("%s: %s", agreement.words(call), plan.explain())
    return plan


def bind_without_kernel(engine: Engine, call: Call, x: torch.Tensor, config: Config) -> Plan:
    """Returns the plan of a call that no kernel serves."""
    run = engine.keeping_failure()(engine.without_kernels.bind(call, x, config, engine.deadline(call)))
    if x.device.type != "cpu" or engine.runner:
        return Plan(run, config)

    def launch(inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], corner: Corner | None = None) -> None:
        run([Operands(inputs, outputs, numbers, corner)])

    return Plan(run, config, launch_like=lambda operands: launch)


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
    functions = runner.prepare(kernel_of(config, call))
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
        peers = runner.symmetric.put_peers(arguments) if config.direct else None
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


def one_after_another(plans: Sequence[Plan], cuts: Sequence[Callable[[Operands], Operands]]) -> Plan:
    """Returns the plan that makes one call after another, each with what its cut takes of the operands."""
    if len(plans) == 1:  # its cut takes all of them
        return plans[0]

    def run(ranks: Sequence[Operands]) -> None:
        for plan, cut in zip(plans, cuts, strict=True):
            plan.run([cut(operands) for operands in ranks])

    return Plan(run, plans[0].config, plans[0].reason)


# All-gathers of several tensors: a launch for up to four, or without kernels one after another.
def bind_tuple(engine: Engine, call: Call[TensorTuple], ranks: Sequence[Operands]) -> Plan:
    work, first = call.work, ranks[0].inputs[0]
    if engine.why_no_kernel(work.op, first) or not any(work.sizes):
        return _gather_each(engine, call, ranks)
    windows = [slice(begin, begin + MAX_TENSORS) for begin in range(0, len(work.dtypes), MAX_TENSORS)]
    works = [work._replace(dtypes=work.dtypes[window], rows=work.rows[window]) for window in windows]
    plans = [bind(engine, call._replace(work=of_window), ranks) for of_window in works]
    return one_after_another(plans, [partial(_within, window) for window in windows])


def _within(window: slice, operands: Operands) -> Operands:
    return Operands(operands.inputs[window], operands.outputs[window])


def _gather_each(engine: Engine, call: Call[TensorTuple], ranks: Sequence[Operands]) -> Plan:
    """Returns the plan that gathers one tensor after another.

    A call says which tensors follow, so that ranks with unlike tuples differ in the first call.
    """
    work, plans = call.work, []
    cuts = [partial(_within, slice(at, at + 1)) for at in range(len(ranks[0].inputs))]
    for at, x in enumerate(ranks[0].inputs):
        rest = TensorTuple(work.dtypes[at + 1 :], work.rows[at + 1 :], work.sizes)
        follow = f"followed by {rest.op} of {rest.amount(BYTE)}" if rest.dtypes else ""
        in_a_row = torch.Size(x.shape[1:]).numel()
        beside = ", ".join(filter(None, (follow, work.beside)))
        parts = Parts(work.op, tuple([size * in_a_row for size in work.sizes]), beside=beside)
        plans.append(engine.plan(Call.of(parts, x, timeout_s=call.timeout_s), [*map(cuts[at], ranks)]))
    return one_after_another(plans, cuts)


def bind_norm(engine: Engine, call: Call[Norm], ranks: Sequence[Operands]) -> Plan:
    work, x = call.work, ranks[0].inputs[0]
    if not select.has_kernel_for_rows(work, call.dtype) or engine.why_no_kernel(work.op, x) or not any(work.parts):
        return _norm_in_steps(engine, call, ranks)
    if work.op != ALLREDUCE_NORM:
        return bind(engine, call, ranks)
    (numel,), columns = work.parts, work.columns
    step = columns * select.norm_rows(engine.world_size, columns * call.dtype.itemsize)  # the most of one kernel
    counts = [min(step, numel - start) for start in range(0, numel, step)]
    pieces = {count: call._replace(work=work._replace(parts=(count,))) for count in counts}
    plans = {count: bind(engine, piece, ranks) for count, piece in pieces.items()}
    cuts = [partial(_rows, at * step // columns, count // columns) for at, count in enumerate(counts)]
    return one_after_another([plans[count] for count in counts], cuts)


def _rows(first: int, count: int, operands: Operands) -> Operands:
    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, x.shape[-1])[first : first + count]

    x, residual, *rest = operands.inputs
    return operands._replace(inputs=(cut(x), cut(residual), *rest), outputs=tuple(map(cut, operands.outputs)))


def _norm_in_steps(engine: Engine, call: Call[Norm], ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of a norm without a kernel between ranks: a sum, and then each rank's norm of its rows."""
    work, dtype = call.work, call.dtype
    sums = Sum(work.parts[0]) if work.op == ALLREDUCE_NORM else Parts("reducescatter", work.parts)
    sums = sums._replace(order=work.order, beside=work.beside)
    plan = engine.plan(Call(sums, dtype, call.device, timeout_s=call.timeout_s), ranks)
    for operands in ranks:  # loading beside a kernel that waits for other ranks could hang
        residual = operands.inputs[1]
        if _is_served(work, residual, dtype):
            residual_norm.load(residual.device.index, residual.dtype, dtype)

    def run(ranks: Sequence[Operands]) -> None:
        if engine.world_size == 1:
            totals = [operands.inputs[0].view_as(operands.inputs[1]) for operands in ranks]
        else:
            totals = [torch.empty_like(operands.inputs[1], dtype=dtype) for operands in ranks]
            plan.run([Operands(operands.inputs[:1], (total,)) for operands, total in zip(ranks, totals, strict=True)])
        for operands, total in zip(ranks, totals, strict=True):
            _norm_own(work, operands, total)

    return Plan(run, plan.config, plan.reason)


def _is_served(work: Norm, residual: torch.Tensor, total_dtype: torch.dtype) -> bool:
    return work.output == "like_input" and residual_norm.serves(residual, total_dtype)


def _norm_own(work: Norm, operands: Operands, total: torch.Tensor) -> None:
    residual, weight, *scale = operands.inputs[1:]
    if _is_served(work, residual, total.dtype):
        normed, summed = operands.outputs
        residual_norm.norm(total, residual, weight, normed, summed, work.eps, work.weight_offset)
        return
    results = specification(total, residual, weight, work.eps, work.weight_offset, work.output, *scale)
    for out, result in zip(operands.outputs, results, strict=True):
        out.copy_(result)
