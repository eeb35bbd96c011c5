"""Products of gathered rows in e4m3: the rows and their scales are gathered together, and then multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphar import reference
from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.epilogue import EpilogueInputs
from graphar.numerics.fp8_products import Scales
from graphar.plan.call import Call, Operands
from graphar.plan.work import Product, TensorTuple
from graphar.product import scaled_sums
from graphar.product.operands import MatmulOperands, operands_of
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Launch, Plan


def bind(engine: Engine, call: Call, ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of a product of gathered rows with scales. Collective."""
    work = call.work
    gathers = [_of_gather(operands_of(work, own)) for own in ranks]
    (rows, scales), _, *_ = gathers[0]
    kinds, of_row = (rows.dtype, scales.dtype), ((rows.shape[1],), (scales.shape[1],))
    follow = f"followed by epilogue {work.epilogue.words}" if work.epilogue else ""
    both = TensorTuple(kinds, of_row, work.parts, ", ".join(filter(None, (work.beside, follow))))
    plan = engine.plan(Call(both, BYTE, call.device, timeout_s=call.timeout_s), gathers)

    def run(ranks: Sequence[Operands]) -> None:
        members = [operands_of(work, own) for own in ranks]
        gathers = [_of_gather(one) for one in members]
        plan.run(gathers)
        for one, gather in zip(members, gathers, strict=True):
            _multiply(work, one, *gather.outputs)

    def launch_like(own: Operands) -> Launch | None:
        given = operands_of(work, own)
        launch = plan.launch_like(_of_gather(given)) if given.a.is_cuda else None
        if launch is None:
            return None

        def gather_and_multiply(inputs, outputs, numbers, corner=None) -> None:
            one = operands_of(work, Operands(inputs, outputs, numbers))
            gather = _of_gather(one)
            launch(gather.inputs, gather.outputs, ())
            _multiply(work, one, *gather.outputs)

        return gather_and_multiply

    def matmul(own: Operands) -> str:
        given = operands_of(work, own)
        return scaled_sums.choose(given).reason if given.a.is_cuda else ""

    return plan._replace(run=run, launch_like=launch_like, matmul=matmul)


def _of_gather(one: MatmulOperands) -> Operands:
    """Returns the operands of the all-gather of one rank's rows and of their scales."""
    rows, scales, count = one.gathered, one.gathered_scales, len(one.out)
    if rows is None:
        rows = one.a.new_empty(count, one.a.shape[1])
        scales = one.scales.a.new_empty(count, one.scales.a.shape[1])
    return Operands((one.a.contiguous(), one.scales.a.contiguous()), (rows, scales))


def _multiply(work: Product, one: MatmulOperands, rows: torch.Tensor, of_rows: torch.Tensor) -> None:
    """Writes the product of gathered rows, with their scales, into a result."""
    scales = Scales(one.scales.in_blocks, of_rows, one.scales.w)
    if not work.epilogue:
        scaled_sums.multiply(one.out, rows, one.w, scales, one.bias)
        return
    product = torch.empty_like(one.out, dtype=torch.float32)
    scaled_sums.multiply(product, rows, one.w, scales)
    form, inputs = replace(work.epilogue, columns=max(1, len(one.w))), EpilogueInputs([*one.tensors], [*one.numbers])
    one.out.copy_(reference.rounded_after(form, inputs, product, one.out.dtype))
