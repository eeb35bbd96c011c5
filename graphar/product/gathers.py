"""How an all-gather and the matmul of the gathered rows become kernels: in one kernel, in chunks, or one by one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from graphar import reference
from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.epilogue import EpilogueInputs
from graphar.numerics.partitions import Panel
from graphar.plan.algorithms import MATMUL_ARCH
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.matmuls import fused_algorithm
from graphar.plan.slices import gathered_rows_a_launch
from graphar.plan.work import Parts, Product, TensorTuple
from graphar.product.fused import fused_matmul
from graphar.product.gathered_chunks import GatheredChunks
from graphar.product.multiply import choose, multiply
from graphar.product.operands import flat, operands_of
from graphar.product.then import after
from graphar.runtime.bind.launches import runner_of
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Plan, Tensors


def bind(engine: Engine, call: Call[Product], ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of a product of gathered rows. Collective."""
    method = gathering_method(engine, call, ranks[0].inputs[0])
    algorithm = fused_algorithm(engine.table, call.work, engine.world_size)
    if method == "tiles":
        launches = fused_matmul(engine, call, algorithm)
        return launches.plan("gathered and multiplied in one kernel")
    if method == "chunks":
        run = GatheredChunks(engine, call, algorithm).run
        return Plan(run, Config(algorithm, 0, 0), "gathered in chunks by copy engines")
    return _gathered_then_multiplied(engine, call, ranks)


def gathering_method(engine: Engine, call: Call[Product], a: torch.Tensor) -> str:
    """Returns how rows are gathered and multiplied: in "tiles", in "chunks", or, if it is "none", by two kernels.

    The first call is collective. The answer does not depend on memory layouts and weights, which may differ between
    ranks.
    """
    work, algorithm = call.work, fused_algorithm(engine.table, call.work, engine.world_size)
    like = a if a.dtype == call.dtype else a.new_empty(0, dtype=call.dtype)  # results have it
    if work.partition == "none" or not a.is_cuda or like.dtype not in algorithm.row.dtypes:
        return "none"
    with engine.keeping_failure():
        if engine.why_no_kernel(work.op, like):
            return "none"
    k, rows, has_tiles = work.columns, sum(work.parts), runner_of(engine).chip.arch == MATMUL_ARCH
    if not k or not gathered_rows_a_launch(algorithm, engine.world_size, k, work.factors):
        return "none"
    by_table = engine.table.allgather_matmul.faster(engine.world_size, rows, runner_of(engine).chip)
    method = by_table if work.partition == "auto" else work.partition
    if work.factors.as_tree or (work.epilogue and work.partition == "auto"):
        method = "tiles"  # elsewhere an epilogue is some twenty kernels of torch
    if method == "chunks" and not work.factors.is_plain:
        method = "tiles"  # torch multiplies plain chunks only
    served = has_tiles if method == "tiles" else not work.epilogue
    return method if served else "none"


def _gathered_then_multiplied(engine: Engine, call: Call[Product], ranks: Sequence[Operands]) -> Plan:
    work = call.work
    of, is_plain = functools.partial(operands_of, work), work.factors.is_plain
    as_linear = is_plain and not (work.epilogue or work.factors.as_tree)
    shape = sum(work.parts), work.columns
    chosen = choose(engine, work, of(ranks[0]))

    def rows_of(inputs: Tensors, outputs: Tensors) -> tuple[Tensors, Tensors]:
        rows = outputs[1].view(shape) if work.gathered else inputs[0].new_empty(shape)
        if is_plain:  # most calls; each call of Python counts
            return (inputs[0].flatten(0, -2).contiguous(),), (rows,)
        matmul = of(Operands(inputs, outputs))
        return matmul.rows, matmul.room_for_rows(rows)

    def multiply_rows(inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], made: Tensors) -> None:
        if as_linear:  # most calls, too
            multiply(made[0], inputs[1], flat(outputs[0]), *inputs[2:])
            return
        matmul = of(Operands(inputs, outputs, numbers))
        step = matmul.with_rows(*made)
        if not work.epilogue:
            chosen.multiply.make(step)
            return
        product = torch.empty_like(matmul.out, dtype=torch.float32)
        chosen.multiply.make(step._replace(out=product, bias=None))
        form = replace(work.epilogue, columns=max(1, len(matmul.w)))
        inputs_of_form = EpilogueInputs([*matmul.tensors], [*numbers])
        matmul.out.copy_(reference.rounded_after(form, inputs_of_form, product, matmul.out.dtype))

    def explained(operands: Operands) -> str:
        matmul = of(operands)
        return chosen.explained(matmul, [Panel((slice(0, len(matmul.a)),), slice(0, len(matmul.w)))])

    gathers = [Operands(*rows_of(operands.inputs, operands.outputs)) for operands in ranks]
    plan = engine.plan(_gather(call, gathers[0].inputs), gathers)
    return after(plan, rows_of, multiply_rows)._replace(matmul=explained)


def _gather(call: Call[Product], parts: Tensors) -> Call:
    """Returns the call that gathers each rank's rows, and what goes with them."""
    work = call.work
    follow = f"followed by epilogue {work.epilogue.words}" if work.epilogue else ""
    words = ", ".join(filter(None, (work.beside, follow)))
    if len(parts) > 1:
        gathered = TensorTuple(tuple([x.dtype for x in parts]), tuple([x.shape[1:] for x in parts]), work.parts, words)
        return Call(gathered, BYTE, call.device, timeout_s=call.timeout_s)
    gathered = Parts("allgather", tuple([rows * work.columns for rows in work.parts]), beside=words)
    return Call(gathered, call.dtype, call.device, timeout_s=call.timeout_s)
