"""The binder of products that are summed as a tree of leaves of K: the same bits on 1, 2, 4 and 8 ranks.

Each rank adds its leaves in fp32, and a sum of fp32 partials adds the ranks' as the rest of the tree. Bias, epilogue or
residual follow in fp32, then one rounding, and perhaps a norm: graphar.numerics.leaf_tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.plan.algorithms import MATMUL_TYPES
from graphar.plan.call import Call, Operands
from graphar.plan.config import FALLBACK
from graphar.plan.matmuls import COLUMNS, fused_algorithm, prefers_tiles, sent_itemsize
from graphar.plan.work import Norm, Parts, Product, Sum
from graphar.product import leaf_products
from graphar.product.fused import FusedMatmul, why_not_columns
from graphar.product.operands import MatmulOperands, flat, operands_of, with_bias_in_epilogue
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Launch, Plan


def bind(engine: Engine, call: Call, ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of products that are summed as a tree. Collective."""
    work = call.work
    if engine.world_size == 1 and not (work.epilogue or work.norm):
        return _of_one_rank(work)
    if takes_one_kernel(engine, call, ranks[0].inputs[0]):
        return _in_one_kernel(engine, call)
    return _Steps(engine, with_bias_in_epilogue(call), ranks[0]).plan(ranks)


def takes_one_kernel(engine: Engine, call: Call, a: torch.Tensor) -> bool:
    """Whether one kernel multiplies and sums. The first call is collective; equal on all ranks.

    It does where one in the order of ranks was measured to be faster: for few rows, and from a number of elements on.
    """
    work = call.work
    if work.norm or not a.is_cuda or a.dtype not in MATMUL_TYPES or work.columns % COLUMNS:
        return False
    with engine.keeping_failure():
        if engine.why_no_kernel(work.op, a) or why_not_columns(engine, work):
            return False
    shape, scattered = (sum(work.parts), work.columns), work.scattered or bool(work.epilogue)
    chosen_for = engine.table.matmul, engine.runner.chip, engine.world_size
    return prefers_tiles(*chosen_for, *shape, scattered, itemsize=sent_itemsize(work))


def _in_one_kernel(engine: Engine, call: Call) -> Plan:
    algorithm = fused_algorithm(engine.table, call.work, engine.world_size)
    launches = FusedMatmul(engine, call, algorithm, sum(call.work.parts))
    early = ", which loads its constant weight early" if call.work.constant_weight and algorithm.row.is_skinny else ""
    leaves = LEAVES // engine.world_size
    return launches.plan(f"multiplied in {leaves} leaves a rank and summed as a tree in one kernel{early}")


def _of_one_rank(work: Product) -> Plan:
    """Returns the plan of a rank that has all leaves, and so the whole sum."""

    def run(ranks: Sequence[Operands]) -> None:
        for own in ranks:
            given = operands_of(work, own)
            given.out.copy_(leaf_products.product(work.op, given.a, given.w, LEAVES, bias=given.bias))

    return Plan(run, FALLBACK, f"a single rank multiplies in {LEAVES} leaves")


def _summed(call: Call, numel: int, columns: int) -> Sum | Parts | Norm:
    """Returns what a call does with partials of ``numel`` elements, after products of so many ``columns``."""
    work = call.work
    how = {"order": "tree", "out_dtype": call.dtype, "beside": f"after products of {columns} columns"}
    counts = tuple([rows * work.columns for rows in work.parts]) if work.scattered else (numel,)
    if work.norm:
        op = REDUCESCATTER_NORM if work.scattered else ALLREDUCE_NORM
        return Norm(op, counts, work.columns, "like_input", *work.norm, **how)
    if work.scattered:
        return Parts("reducescatter", counts, epilogue=work.epilogue, **how)
    return Sum(numel, epilogue=work.epilogue, **how)


class _Steps:
    """A matmul into fp32 partials, and then their sum, or their sum and its norm.

    ``call`` is of a product without a bias: its epilogue adds it. ``own`` are the operands of one rank of this process.
    """

    def __init__(self, engine: Engine, call: Call, own: Operands) -> None:
        self._engine, self._call = engine, call
        self._leaves = LEAVES // engine.world_size
        one = self._given(own)
        self._prefetches = one.prefetch is not None and not call.work.epilogue
        summed = _summed(call, len(one.a) * len(one.w), one.a.shape[1])
        how = {"timeout_s": call.timeout_s, "prefetches": self._prefetches}
        self._sum = Call(summed, torch.float32, call.device, **how)

    def plan(self, ranks: Sequence[Operands]) -> Plan:
        plan = self._engine.plan(self._sum, [self._to_sum(own, self._room(self._given(own))) for own in ranks])

        def run(ranks: Sequence[Operands]) -> None:
            plan.run([self._to_sum(own, self._partial(self._given(own))) for own in ranks])

        reason = f"multiplied in {self._leaves} leaves a rank, then summed: {plan.reason}"
        return Plan(run, plan.config, reason, self._launch_like)

    def _launch_like(self, own: Operands) -> Launch | None:
        given = self._given(own)
        is_view = given.a.data_ptr() == own.inputs[0].data_ptr()
        if not given.a.is_cuda or not is_view or not all(one.is_contiguous() for one in own.inputs[2:]):
            return None
        example = self._to_sum(own, self._room(given))
        launch = self._engine.plan(self._sum, [example]).launch_like(example)
        if launch is None:
            return None
        multiply = leaf_products.product_like(self._call.op, given.a, given.w, self._leaves, torch.float32)

        def multiply_and_sum(inputs, outputs, numbers, _=None) -> None:
            partial = multiply(flat(inputs[0]), inputs[1])
            launch((partial, *inputs[2:]), outputs, numbers, example.corner)

        return multiply_and_sum

    def _given(self, own: Operands) -> MatmulOperands:
        """Returns the operands of one rank's product."""
        if self._call.work.norm:
            return MatmulOperands(flat(own.inputs[0]), own.inputs[1], None, flat(own.outputs[0]))
        return operands_of(self._call.work, own)

    def _to_sum(self, own: Operands, partial: torch.Tensor) -> Operands:
        """Returns the operands of what follows one rank's partial."""
        if self._call.work.norm:
            return Operands((partial, *[one.contiguous() for one in own.inputs[2:]]), own.outputs)
        one, epilogue = self._given(own), self._call.work.epilogue
        more = (one.prefetch,) if self._prefetches else one.tensors
        return Operands((partial, *more), (one.out,), one.numbers, epilogue and (0, 0, epilogue.columns))

    def _room(self, one: MatmulOperands) -> torch.Tensor:
        return one.a.new_empty((len(one.a), len(one.w)), dtype=torch.float32)

    def _partial(self, one: MatmulOperands) -> torch.Tensor:
        return leaf_products.product(self._call.op, one.a, one.w, self._leaves, out_dtype=torch.float32)
