"""The binder of norms: an all-reduce or a reduce-scatter, with residual addition and RMSNorm, in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from graphar.numerics.norms import ALLREDUCE_NORM, specification
from graphar.plan import select
from graphar.plan.call import Call, Operands
from graphar.plan.work import Norm, Parts, Sum
from graphar.runtime.bind import residual_norm
from graphar.runtime.bind.collective import select_and_bind
from graphar.runtime.bind.launches import one_after_another
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Plan


def bind(engine: Engine, call: Call[Norm], ranks: Sequence[Operands]) -> Plan:
    work, x = call.work, ranks[0].inputs[0]
    if not select.has_kernel_for_rows(work, call.dtype) or engine.why_no_kernel(work.op, x) or not any(work.parts):
        return _in_steps(engine, call, ranks)
    if work.op != ALLREDUCE_NORM:
        return select_and_bind(engine, call, x)
    return _in_pieces(engine, call, x, select.norm_rows(engine.world_size, work.columns * call.dtype.itemsize))


def _in_pieces(engine: Engine, call: Call[Norm], x: torch.Tensor, step: int) -> Plan:
    """Returns the plan of an all-reduce with norm, whose kernel takes at most ``step`` rows."""
    (numel,), columns = call.work.parts, call.work.columns
    starts = range(0, numel, step * columns)
    if len(starts) == 1:
        return select_and_bind(engine, call, x)
    counts = [min(step * columns, numel - start) for start in starts]
    of_count = {count: call._replace(work=call.work._replace(parts=(count,))) for count in counts}
    plans = {count: select_and_bind(engine, piece, x) for count, piece in of_count.items()}
    rows = [(start // columns, count // columns) for start, count in zip(starts, counts, strict=True)]
    return one_after_another([plans[count] for count in counts], [partial(_rows, *of_piece) for of_piece in rows])


def _rows(first: int, count: int, operands: Operands) -> Operands:
    def cut(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, x.shape[-1])[first : first + count]

    x, residual, *rest = operands.inputs
    return operands._replace(inputs=(cut(x), cut(residual), *rest), outputs=tuple(map(cut, operands.outputs)))


def _in_steps(engine: Engine, call: Call[Norm], ranks: Sequence[Operands]) -> Plan:
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
