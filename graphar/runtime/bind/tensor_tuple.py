"""The binder of all-gathers of several tensors: one launch for up to four, or without kernels one after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from graphar.numerics.dtypes import BYTE
from graphar.plan.call import Call, Operands
from graphar.plan.work import MAX_TENSORS, Parts, TensorTuple
from graphar.runtime.bind.collective import select_and_bind
from graphar.runtime.bind.launches import one_after_another
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Plan


def bind(engine: Engine, call: Call[TensorTuple], ranks: Sequence[Operands]) -> Plan:
    work, first = call.work, ranks[0].inputs[0]
    if engine.why_no_kernel(work.op, first) or not any(work.sizes):
        return _each(engine, call, ranks)
    if len(work.dtypes) <= MAX_TENSORS:
        return select_and_bind(engine, call, first)
    windows = [slice(begin, begin + MAX_TENSORS) for begin in range(0, len(work.dtypes), MAX_TENSORS)]
    works = [work._replace(dtypes=work.dtypes[window], rows=work.rows[window]) for window in windows]
    plans = [select_and_bind(engine, call._replace(work=of_window), first) for of_window in works]
    return one_after_another(plans, [partial(_within, window) for window in windows])


def _within(window: slice, operands: Operands) -> Operands:
    return Operands(operands.inputs[window], operands.outputs[window])


def _each(engine: Engine, call: Call[TensorTuple], ranks: Sequence[Operands]) -> Plan:
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
