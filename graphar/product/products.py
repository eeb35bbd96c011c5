"""The binder of products: how a matmul with a sum, or with an all-gather of its rows, becomes kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch

from graphar import reference
from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.epilogue import EpilogueInputs
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.partitions import Panel
from graphar.plan.algorithms import GATHERING, MATMUL_ARCH
from graphar.plan.call import Call, Operands
from graphar.plan.config import FALLBACK, Config
from graphar.plan.matmuls import fused_algorithm, may_take_one_kernel, prefers_tiles, why_not_columns
from graphar.plan.select import has_norm_kernel
from graphar.plan.slices import gathered_rows_a_launch
from graphar.plan.work import ALLGATHER_MATMUL, Parts, Product, TensorTuple
from graphar.product.fused import fused_launches
from graphar.product.gathered_chunks import GatheredChunks
from graphar.product.multiply import choose, multiply
from graphar.product.operands import flat, operands_of
from graphar.product.then import Then, after
from graphar.runtime.bind import residual_norm
from graphar.runtime.engine import Engine, runner_of
from graphar.runtime.plan import Plan, Tensors


def bind(engine: Engine, call: Call[Product], ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of a product. Collective."""
    work = call.work
    if work.op == ALLGATHER_MATMUL:
        return _bind_gathered(engine, call, ranks)
    is_ordered = not work.as_tree
    if engine.world_size == 1 and not (is_ordered or work.epilogue or work.norm):
        return _of_one_rank(engine, work)
    summed = call._replace(work=work._replace(op=work.summing_op, norm=None))
    can_norm = is_ordered and sum(work.parts) and has_norm_kernel(work.columns * call.dtype.itemsize)
    if (can_norm or not work.norm) and takes_tiles(engine, summed, ranks[0].outputs[0]):
        if not work.norm:
            return _fused(engine, call)
        for operands in ranks:  # loading beside a kernel that waits for other ranks could hang
            residual_norm.load(operands.outputs[0].device.index, operands.outputs[0].dtype)
        return _then_normed(_fused(engine, summed), work.factors.inputs, *work.norm)
    call = call._replace(work=work.with_bias_in_epilogue(call.dtype))
    return Then(engine, call, ranks[0]).plan(ranks)


def takes_tiles(engine: Engine, call: Call[Product], out: torch.Tensor) -> bool:
    """Whether one fused kernel multiplies and sums; ``out`` is like the result. The first call is collective.

    The answer is equal on all ranks: it does not depend on K and the memory layout of the operands.
    """
    if not out.is_cuda or not may_take_one_kernel(call.work, out.dtype):
        return False
    with engine.keeping_failure():
        if engine.why_no_kernel(call.op, out):
            return False
    work, chip = call.work, runner_of(engine).chip
    if why_not_columns(work, chip, engine.world_size):
        return False
    return work.partition == "tiles" or prefers_tiles(work, engine.table.matmul, chip, engine.world_size)


def _fused(engine: Engine, call: Call[Product]) -> Plan:
    work, algorithm = call.work, fused_algorithm(engine.table, call.work, engine.world_size)
    as_tree = f" in {work.leaves(engine.world_size)} leaves a rank", " as a tree"
    leaves, order = as_tree if work.as_tree else ("", "")
    early = ", which loads its constant weight early" if work.constant_weight and algorithm.row.is_skinny else ""
    return fused_launches(engine, call, algorithm).plan(f"multiplied{leaves} and summed{order} in one kernel{early}")


def _then_normed(plan: Plan, count: int, eps: float, weight_offset: float) -> Plan:
    def norm(inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], made: Tensors) -> None:
        (*_, residual, weight), (total, summed) = inputs, outputs
        if total.numel():
            residual_norm.norm(total, residual.contiguous(), weight.contiguous(), total, summed, eps, weight_offset)

    return after(plan, lambda inputs, outputs: (inputs[:count], outputs[:1]), norm)


def _of_one_rank(engine: Engine, work: Product) -> Plan:
    def run(ranks: Sequence[Operands]) -> None:
        for operands in ranks:
            matmul = operands_of(work, operands)
            choose(engine, work, matmul).make(matmul.step)

    return Plan(run, FALLBACK, f"a single rank multiplies in {LEAVES} leaves")


def _bind_gathered(engine: Engine, call: Call[Product], ranks: Sequence[Operands]) -> Plan:
    method = gathering_method(engine, call, ranks[0].inputs[0])
    if method == "tiles":
        return fused_launches(engine, call, GATHERING).plan("gathered and multiplied in one kernel")
    if method == "chunks":
        return Plan(GatheredChunks(engine, call).run, Config(GATHERING, 0, 0), "gathered in chunks by copy engines")
    return _gathered_then_multiplied(engine, call, ranks)


def gathering_method(engine: Engine, call: Call[Product], a: torch.Tensor) -> str:
    """Returns how rows are gathered and multiplied: in "tiles", in "chunks", or, if it is "none", by two kernels.

    The first call is collective. The answer is equal on all ranks: it does not depend on memory layouts and weights.
    """
    work, is_plain = call.work, call.work.factors.is_plain
    like = a if a.dtype == call.dtype else a.new_empty(0, dtype=call.dtype)  # results have it
    if work.partition == "none" or not a.is_cuda or like.dtype not in GATHERING.row.dtypes:
        return "none"
    with engine.keeping_failure():
        if engine.why_no_kernel(work.op, like):
            return "none"
    k, rows, chip = work.columns, sum(work.parts), runner_of(engine).chip
    if not k or not gathered_rows_a_launch(engine.world_size, k, work.factors):
        return "none"
    by_table = engine.table.allgather_matmul.faster(engine.world_size, rows, chip, is_plain)
    method = by_table if work.partition == "auto" else work.partition
    if work.as_tree or (work.epilogue and work.partition == "auto"):
        method = "tiles"  # elsewhere an epilogue is some twenty kernels of torch
    if method == "chunks" and not is_plain:
        method = "tiles"  # torch multiplies plain chunks only
    served = chip.arch == MATMUL_ARCH if method == "tiles" else not work.epilogue
    return method if served else "none"


def _gathered_then_multiplied(engine: Engine, call: Call[Product], ranks: Sequence[Operands]) -> Plan:
    work = call.work
    of, is_plain = functools.partial(operands_of, work), work.factors.is_plain
    as_linear = is_plain and not (work.epilogue or work.as_tree)
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
        scales = matmul.scales and replace(matmul.scales, a=made[1])
        step = matmul.step._replace(a=made[0], scales=scales)
        if not work.epilogue:
            chosen.make(step)
            return
        product = torch.empty_like(matmul.out, dtype=torch.float32)
        chosen.make(step._replace(out=product, bias=None))
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
