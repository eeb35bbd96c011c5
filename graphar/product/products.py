"""The binder of products: how a matmul with a sum, or with an all-gather, becomes kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics.leaf_tree import LEAVES
from graphar.plan.call import Call, Operands
from graphar.plan.config import FALLBACK
from graphar.plan.matmuls import fused_algorithm, may_take_one_kernel, takes_one_kernel
from graphar.plan.select import has_norm_kernel
from graphar.plan.work import ALLGATHER_MATMUL, Product
from graphar.product import gathers
from graphar.product.fused import fused_matmul
from graphar.product.multiply import choose
from graphar.product.operands import operands_of
from graphar.product.then import Then, after
from graphar.runtime.bind import residual_norm
from graphar.runtime.bind.launches import runner_of
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Plan, Tensors


def bind(engine: Engine, call: Call[Product], ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of a product. Collective."""
    work = call.work
    if work.op == ALLGATHER_MATMUL:
        return gathers.bind(engine, call, ranks)
    is_ordered = not work.factors.as_tree
    if engine.world_size == 1 and not (is_ordered or work.epilogue or work.norm):
        return _of_one_rank(engine, work)
    row_nbytes, summed = work.columns * call.dtype.itemsize, call._replace(work=work.without_norm)
    can_norm = is_ordered and sum(work.parts) and has_norm_kernel(row_nbytes)
    if (can_norm or not work.norm) and takes_tiles(engine, summed, ranks[0].outputs[0]):
        if not work.norm:
            return _fused(engine, call)
        for operands in ranks:  # loading beside a kernel that waits for other ranks could hang
            residual_norm.load(operands.outputs[0].device.index, operands.outputs[0].dtype)
        return _then_normed(_fused(engine, summed), work.factors.inputs, *work.norm)
    call = call._replace(work=work.with_bias_in_epilogue(call.dtype))
    return Then(engine, call, ranks[0]).plan(ranks)


def takes_tiles(engine: Engine, call: Call[Product], out: torch.Tensor) -> bool:
    """Whether one fused kernel multiplies and sums. The first call is collective; the answer is equal on all ranks.

    ``out`` is a tensor with the device and the dtype of the result. The answer does not depend on K and the memory
    layout of the operands, which may differ between ranks.
    """
    if not out.is_cuda or not may_take_one_kernel(call.work, out.dtype):
        return False
    with engine.keeping_failure():
        if engine.why_no_kernel(call.op, out):
            return False
    return takes_one_kernel(call.work, engine.table.matmul, runner_of(engine).chip, engine.world_size)


def _fused(engine: Engine, call: Call[Product]) -> Plan:
    """Returns the plan of a product that is multiplied and summed in one kernel."""
    work, algorithm = call.work, fused_algorithm(engine.table, call.work, engine.world_size)
    launches = fused_matmul(engine, call, algorithm)
    as_tree = f" in {work.leaves(engine.world_size)} leaves a rank", " as a tree"
    leaves, order = as_tree if work.factors.as_tree else ("", "")
    early = ", which loads its constant weight early" if work.constant_weight and algorithm.row.is_skinny else ""
    return launches.plan(f"multiplied{leaves} and summed{order} in one kernel{early}")


def _then_normed(plan: Plan, count: int, eps: float, weight_offset: float) -> Plan:
    """Returns a plan that sums products of ``count`` tensors by ``plan``, and then norms in a kernel of its own."""

    def of_sum(inputs: Tensors, outputs: Tensors) -> tuple[Tensors, Tensors]:
        return inputs[:count], outputs[:1]

    def norm(inputs: Tensors, outputs: Tensors, numbers: tuple[float, ...], made: Tensors) -> None:
        (*_, residual, weight), (total, summed) = inputs, outputs
        if total.numel():
            residual_norm.norm(total, residual.contiguous(), weight.contiguous(), total, summed, eps, weight_offset)

    return after(plan, of_sum, norm)


def _of_one_rank(engine: Engine, work: Product) -> Plan:
    """Returns the plan of a rank that has all leaves, and so the whole sum."""

    def run(ranks: Sequence[Operands]) -> None:
        for operands in ranks:
            matmul = operands_of(work, operands)
            choose(engine, work, matmul).multiply.make(matmul.step)

    return Plan(run, FALLBACK, f"a single rank multiplies in {LEAVES} leaves")
