"""The binder of products that are summed as a tree of leaves of K: the same bits on 1, 2, 4 and 8 ranks.

Each rank adds its leaves in fp32, and a sum of fp32 partials adds the ranks' as the rest of the tree. Bias, epilogue or
residual follow in fp32, and one rounding: graphar.numerics.leaf_tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.matmul import leaf_products
from graphar.matmul.operands import MatmulOperands, operands_of
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.numerics.leaf_tree import LEAVES
from graphar.plan.call import Call, Operands
from graphar.plan.config import FALLBACK
from graphar.plan.work import MATMUL_ALLREDUCE, Parts, Product, Sum
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Launch, Plan


def bind(engine: Engine, call: Call, ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of products that are summed as a tree. Collective."""
    work = call.work
    if engine.world_size == 1 and not work.epilogue:
        return _of_one_rank(work)
    if work.bias:
        bias = Pointwise("v + bias[col]", (call.dtype,), work.columns)
        work = work._replace(bias=False, epilogue=bias)
    return _Steps(engine, call._replace(work=work), operands_of(work, ranks[0])).plan(ranks)


def _of_one_rank(work: Product) -> Plan:
    """Returns the plan of a rank that has all leaves, and so the whole sum."""

    def run(ranks: Sequence[Operands]) -> None:
        for own in ranks:
            given = operands_of(work, own)
            given.out.copy_(leaf_products.product(work.op, given.a, given.w, LEAVES, bias=given.bias))

    return Plan(run, FALLBACK, f"a single rank multiplies in {LEAVES} leaves")


class _Steps:
    """A matmul into fp32 partials, and then their sum.

    Args:
        engine: the engine of the call.
        call: a call whose product has no bias: its epilogue adds it.
        one: the operands of one rank of this process.
    """

    def __init__(self, engine: Engine, call: Call, one: MatmulOperands) -> None:
        self._engine, self._call = engine, call
        self._leaves = LEAVES // engine.world_size
        work, self._prefetches = call.work, one.prefetch is not None and not call.work.epilogue
        how = {
            "epilogue": work.epilogue,
            "order": "tree",
            "out_dtype": call.dtype,
            "beside": f"after products of {one.a.shape[1]} columns",
        }
        if work.op == MATMUL_ALLREDUCE:
            summed = Sum(one.out.numel(), **how)
        else:
            summed = Parts("reducescatter", tuple([rows * work.columns for rows in work.parts]), **how)
        self._sum = Call(summed, torch.float32, call.device, timeout_s=call.timeout_s, prefetches=self._prefetches)

    def plan(self, ranks: Sequence[Operands]) -> Plan:
        work, engine = self._call.work, self._engine
        given = [operands_of(work, own) for own in ranks]
        plan = engine.plan(self._sum, [self._to_sum(one, self._room(one)) for one in given])

        def run(ranks: Sequence[Operands]) -> None:
            given = [operands_of(work, own) for own in ranks]
            plan.run([self._to_sum(one, self._partial(one)) for one in given])

        reason = f"multiplied in {self._leaves} leaves a rank, then summed: {plan.reason}"
        return Plan(run, plan.config, reason, self._launch_like)

    def _launch_like(self, own: Operands) -> Launch | None:
        given = operands_of(self._call.work, own)
        is_view = given.a.data_ptr() == own.inputs[0].data_ptr()
        if not given.a.is_cuda or not is_view:
            return None
        example = self._to_sum(given, self._room(given))
        launch = self._engine.plan(self._sum, [example]).launch_like(example)
        if launch is None:
            return None
        multiply = leaf_products.product_like(self._call.op, given.a, given.w, self._leaves, torch.float32)

        def multiply_and_sum(inputs, outputs, numbers, _=None) -> None:
            partial = multiply(inputs[0], inputs[1])
            launch((partial, *inputs[2:]), outputs, numbers, example.corner)

        return multiply_and_sum

    def _to_sum(self, one: MatmulOperands, partial: torch.Tensor) -> Operands:
        """Returns the operands of the sum of one rank's partial."""
        epilogue = self._call.work.epilogue
        more = (one.prefetch,) if self._prefetches else one.tensors
        return Operands((partial, *more), (one.out,), one.numbers, epilogue and (0, 0, epilogue.columns))

    def _room(self, one: MatmulOperands) -> torch.Tensor:
        return one.a.new_empty((len(one.a), len(one.w)), dtype=torch.float32)

    def _partial(self, one: MatmulOperands) -> torch.Tensor:
        return leaf_products.product(self._call.op, one.a, one.w, self._leaves, out_dtype=torch.float32)
