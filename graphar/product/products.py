"""The binder of products: how a matmul with a sum, or with an all-gather, becomes kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from graphar import reference
from graphar.numerics import partitions
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.numerics.partitions import BATCH_INVARIANT
from graphar.plan.algorithms import MATMUL_ARCH, MATMUL_TYPES
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.matmuls import COLUMNS, fused_algorithm, prefers_tiles
from graphar.plan.select import Choice, has_norm_kernel
from graphar.plan.slices import gathered_rows_a_launch
from graphar.plan.tiles import travels_in_tiles
from graphar.plan.work import ALLGATHER_MATMUL, MATMUL_ALLREDUCE, MATMUL_REDUCESCATTER, Norm, Parts, Product, Sum
from graphar.product import leaf_products, overlap, scaled_gathers, scaled_sums, tree_sums
from graphar.product.fused import FusedMatmul, why_not_columns
from graphar.product.gathered_chunks import GatheredChunks
from graphar.product.operands import MatmulOperands, flat, operands_of, with_bias_in_epilogue
from graphar.product.overlap import Panels
from graphar.runtime.bind import residual_norm
from graphar.runtime.engine import Engine
from graphar.runtime.plan import Launch, Plan

# By the op that sums products, the op that also adds a residual and norms.
NORMED = {op: f"{op}_residual_rmsnorm" for op in (MATMUL_ALLREDUCE, MATMUL_REDUCESCATTER)}
_SUMMED = {normed: op for op, normed in NORMED.items()}
_NORMS = {MATMUL_ALLREDUCE: ALLREDUCE_NORM, MATMUL_REDUCESCATTER: REDUCESCATTER_NORM}


def bind(engine: Engine, call: Call, ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of a product. Collective."""
    if call.work.op == ALLGATHER_MATMUL:
        return _gathered(engine, call, ranks)
    if call.work.order == "tree":
        return tree_sums.bind(engine, call, ranks)
    if call.work.norm:
        return _with_norm(engine, call, ranks)
    return _summed(engine, call, ranks)


# ---- products that are summed ---------------------------------------------------------------------------------------


def _summed(engine: Engine, call: Call, ranks: Sequence[Operands]) -> Plan:
    if takes_tiles(engine, call, ranks[0].outputs[0]):
        return _fused(engine, call)
    call = with_bias_in_epilogue(call)
    work, cut = call.work, _panels(call)
    sum_up = cut.allreduce if work.op == MATMUL_ALLREDUCE else cut.reducescatter

    def run(ranks: Sequence[Operands]) -> None:
        sum_up(engine, [operands_of(work, own) for own in ranks])

    def matmul(own: Operands) -> str:
        given = operands_of(work, own)
        return overlap.choose(engine, given, cut.panels, cut.only_own).reason if given.a.is_cuda else ""

    one = _OnePanel(engine, call, cut)
    config, reason = one.choice_of_sum(operands_of(work, ranks[0]))
    return Plan(run, config, f"multiplied, then summed: {reason}", one.launch_like, matmul)


def takes_tiles(engine: Engine, call: Call, out: torch.Tensor) -> bool:
    """Whether one fused kernel multiplies and sums. The first call is collective; the answer is equal on all ranks.

    ``out`` is a tensor with the device and the dtype of the result. It depends only on facts that ranks share. K and
    the memory layout of the operands may differ between ranks.
    """
    work, world_size = call.work, engine.world_size
    if work.partition not in ("auto", "tiles", BATCH_INVARIANT) or not out.is_cuda or work.columns % COLUMNS:
        return False
    if work.codec and not travels_in_tiles(codec_of_text(work.codec), work.columns):
        return False
    if out.dtype not in MATMUL_TYPES:
        return False
    if work.scales and work.codec:
        return False
    with engine.keeping_failure():
        if engine.why_no_kernel(work.op, out) or why_not_columns(engine, work):
            return False
    if work.partition == "tiles":
        return True
    policy, chip, rows = engine.table.matmul, engine.runner.chip, sum(work.parts)
    scattered = work.op != MATMUL_ALLREDUCE or work.epilogue is not None
    return prefers_tiles(policy, chip, world_size, rows, work.columns, scattered, work.codec, scales=work.scales)


def _fused(engine: Engine, call: Call) -> Plan:
    algorithm = fused_algorithm(engine.table, call.work, engine.world_size)
    early = ", which loads its constant weight early" if call.work.constant_weight and algorithm.row.is_skinny else ""
    launches = FusedMatmul(engine, call, algorithm, sum(call.work.parts))
    return launches.plan(f"multiplied and summed in one kernel{early}")


def _panels(call: Call) -> Panels:
    """Returns how a product without a fused kernel is multiplied and summed."""
    work = call.work
    parts = [sum(work.parts)] if work.op == MATMUL_ALLREDUCE else work.parts
    panels = partitions.panels(work.op, work.partition, work.num_partitions, parts, work.columns)
    return Panels(work, panels, call.timeout_s, only_own=work.partition == BATCH_INVARIANT)


class _OnePanel:
    """The launches of calls whose product is one panel, and is multiplied and then summed."""

    def __init__(self, engine: Engine, call: Call, cut: Panels) -> None:
        self._engine, self._call, self._cut = engine, call, cut

    def launch_like(self, own: Operands) -> Launch | None:
        """Returns the launch of calls with tensors like these: see :class:`graphar.runtime.plan.Plan`."""
        given, work = operands_of(self._call.work, own), self._call.work
        is_view = given.a.data_ptr() == own.inputs[0].data_ptr()
        if len(self._cut.panels) > 1 or not given.a.is_cuda or not is_view or work.bias:
            return None
        call, ranks = self._sum(given)
        launch = self._engine.plan(call, ranks).launch_like(ranks[0])
        if launch is None:
            return None
        corner, count = ranks[0].corner, work.product_inputs
        multiply = _product_like(self._engine, self._call, given, self._cut.only_own)

        def multiply_and_sum(inputs, outputs, numbers, _=None) -> None:
            launch((multiply(*inputs[:count]), *inputs[count:]), outputs, numbers, corner)

        return multiply_and_sum

    def choice_of_sum(self, given: MatmulOperands) -> Choice:
        """Returns the configuration of the sum of the whole product, and the reason."""
        call, ((inputs, *_),) = self._sum(given)
        return self._engine.select(call, inputs[0])

    def _sum(self, given: MatmulOperands) -> tuple[Call, list[Operands]]:
        """Returns the call that sums the product, and operands like its own."""
        work = self._call.work
        product = reference.widened(given.out.new_empty(len(given.a), len(given.w)), given.bias)
        total = product if work.op == MATMUL_ALLREDUCE else reference.widened(torch.empty_like(given.out), given.bias)
        corner = work.epilogue and (0, 0, work.epilogue.columns)
        ranks = [Operands((product, *given.tensors), (total,), given.numbers, corner)]
        if work.op == MATMUL_ALLREDUCE:
            prefetches = given.prefetch is not None and not work.codec and not work.epilogue
            if prefetches:
                ranks = [ranks[0]._replace(inputs=(product, given.prefetch))]
            summed = Sum(product.numel(), work.codec, work.epilogue, beside=work.beside)
            return Call.of(summed, product, timeout_s=self._call.timeout_s, prefetches=prefetches), ranks
        counts = tuple([rows * len(given.w) for rows in work.parts])
        summed = Parts("reducescatter", counts, work.codec, work.epilogue, beside=work.beside)
        return Call.of(summed, product, timeout_s=self._call.timeout_s), ranks


def _product_like(engine: Engine, call: Call, given: MatmulOperands, only_own: bool) -> Callable[..., torch.Tensor]:
    """Returns a function of a product's inputs that returns it, for calls with tensors like one rank's."""
    if call.work.scales:
        return functools.partial(scaled_sums.product, call.op, dtype=call.dtype, only_own=only_own)
    return overlap.product_like(engine, given, only_own)


# ---- products that are summed and normed ----------------------------------------------------------------------------


def _with_norm(engine: Engine, call: Call, ranks: Sequence[Operands]) -> Plan:
    """Returns the plan of a product whose sum is added to a residual and normed."""
    work, out = call.work, ranks[0].outputs[0]
    op = _SUMMED[work.op]
    product = call._replace(work=work._replace(op=op, norm=None))
    if sum(work.parts) and has_norm_kernel(work.columns * call.dtype.itemsize) and takes_tiles(engine, product, out):
        for own in ranks:  # loading beside a kernel that waits for other ranks could hang
            residual_norm.load(own.inputs[0].device.index, call.dtype)
        return _then_normed(_fused(engine, product), work)
    return _summed_and_normed(engine, call, op, ranks)


def _then_normed(plan: Plan, work: Product) -> Plan:
    """Returns a plan that sums by ``plan``, and then norms in a kernel of its own."""
    count = work.product_inputs

    def norm(own: Operands) -> None:
        (*_, residual, weight), (total, summed) = own.inputs, own.outputs
        if total.numel():
            residual_norm.norm(total, residual.contiguous(), weight.contiguous(), total, summed, *work.norm)

    def run(ranks: Sequence[Operands]) -> None:
        plan.run([Operands(own.inputs[:count], own.outputs[:1]) for own in ranks])
        for own in ranks:
            norm(own)

    def launch_like(own: Operands) -> Launch | None:
        first = plan.launch_like(Operands(own.inputs[:count], own.outputs[:1]))
        if first is None:
            return None

        def launch(inputs, outputs, given, corner=None) -> None:
            first(inputs[:count], outputs[:1], given, corner)
            norm(Operands(inputs, outputs))

        return launch

    return plan._replace(run=run, launch_like=launch_like)


def _summed_and_normed(engine: Engine, call: Call, op: str, ranks: Sequence[Operands]) -> Plan:
    """Returns the plan that multiplies, and then sums and norms in one kernel."""
    work = call.work
    only_own = work.partition == BATCH_INVARIANT
    counts = tuple([rows * work.columns for rows in work.parts])
    counts = (sum(counts),) if op == MATMUL_ALLREDUCE else counts
    normed = Norm(_NORMS[op], counts, work.columns, "like_input", *work.norm, beside=work.beside)
    inner = Call(normed, call.dtype, call.device, timeout_s=call.timeout_s)
    plan = engine.plan(inner, [_of_norm(own, _empty_product(own)) for own in ranks])

    def run(ranks: Sequence[Operands]) -> None:
        products = [_empty_product(own) for own in ranks]
        if products[0].numel():
            made = overlap.products(engine, [_of_product(work, own) for own in ranks], only_own)
            products = [one.view(product.shape) for one, product in zip(made, products, strict=True)]
        plan.run([_of_norm(own, product) for own, product in zip(ranks, products, strict=True)])

    def launch_like(own: Operands) -> Launch | None:
        launch, count = plan.launch_like(_of_norm(own, _empty_product(own))), work.product_inputs
        if launch is None or not all(one.is_contiguous() for one in (own.inputs[0], *own.inputs[count:])):
            return None
        multiply = _product_like(engine, call, _of_product(work, own), only_own)

        def multiply_and_norm(inputs, outputs, numbers, corner=None) -> None:
            launch((multiply(*inputs[:count]), *inputs[count:]), outputs, numbers, corner)

        return multiply_and_norm

    def matmul(own: Operands) -> str:
        given = _of_product(work, own)
        return overlap.choose(engine, given, [overlap.single_panel(given)], only_own).reason if given.a.is_cuda else ""

    return plan._replace(run=run, launch_like=launch_like, matmul=matmul)


def _empty_product(own: Operands) -> torch.Tensor:
    a, w, residual = own.inputs[0], own.inputs[1], own.inputs[-2]
    return residual.new_empty((*a.shape[:-1], len(w)))


def _of_product(work: Product, own: Operands) -> MatmulOperands:
    """Returns the operands of the product of a call that norms it."""
    return operands_of(work, Operands(own.inputs[: work.product_inputs], own.outputs[:1]))


def _of_norm(own: Operands, product: torch.Tensor) -> Operands:
    """Returns the operands of the norm of a product: a norm takes contiguous tensors."""
    return Operands((product, *[one.contiguous() for one in own.inputs[-2:]]), own.outputs)


# ---- products of gathered rows --------------------------------------------------------------------------------------


def _gathered(engine: Engine, call: Call, ranks: Sequence[Operands]) -> Plan:
    method = gathering_method(engine, call, ranks[0].inputs[0])
    algorithm = fused_algorithm(engine.table, call.work, engine.world_size)
    if method == "tiles":
        launches = FusedMatmul(engine, call, algorithm, sum(call.work.parts))
        return launches.plan("gathered and multiplied in one kernel")
    if method == "chunks":
        run = GatheredChunks(engine, call, algorithm).run
        return Plan(run, Config(algorithm, 0, 0), "gathered in chunks by copy engines")
    two_steps = scaled_gathers.bind if call.work.scales else _gathered_then_multiplied
    return two_steps(engine, call, ranks)


def gathering_method(engine: Engine, call: Call, a: torch.Tensor) -> str:
    """Returns how rows are gathered and multiplied: in "tiles", in "chunks", or, if it is "none", by two kernels.

    The first call is collective. It depends only on facts that ranks share. Memory layouts and weights may differ
    between ranks.
    """
    work, algorithm = call.work, fused_algorithm(engine.table, call.work, engine.world_size)
    like = a.new_empty(0, dtype=call.dtype) if work.scales else a
    if work.partition == "none" or not a.is_cuda or like.dtype not in algorithm.row.dtypes:
        return "none"
    with engine.keeping_failure():
        if engine.why_no_kernel(work.op, like):
            return "none"
    k, rows, has_tiles = work.columns, sum(work.parts), engine.runner.chip.arch == MATMUL_ARCH
    if not k or not gathered_rows_a_launch(algorithm, engine.world_size, k, work.scales):
        return "none"
    by_table = engine.table.allgather_matmul.faster(engine.world_size, rows, engine.runner.chip)
    method = by_table if work.partition == "auto" else work.partition
    if work.order == "tree" or (work.epilogue and work.partition == "auto"):
        method = "tiles"  # elsewhere an epilogue is some twenty kernels of torch
    method = "tiles" if work.scales and method == "chunks" else method  # torch multiplies no chunks with scales
    served = has_tiles if method == "tiles" else not work.epilogue
    return method if served else "none"


def _gathered_then_multiplied(engine: Engine, call: Call, ranks: Sequence[Operands]) -> Plan:
    work = call.work
    counts = tuple([rows * work.columns for rows in work.parts])
    follow = f"followed by epilogue {work.epilogue.words}" if work.epilogue else ""
    inner = Call(Parts("allgather", counts, beside=follow), call.dtype, call.device, timeout_s=call.timeout_s)
    plan = engine.plan(inner, [_of_gather(operands_of(work, own)) for own in ranks])

    def run(ranks: Sequence[Operands]) -> None:
        members = [operands_of(work, own) for own in ranks]
        gathers = [_of_gather(one) for one in members]
        plan.run(gathers)
        for one, gather in zip(members, gathers, strict=True):
            _multiply(work, one, gather.outputs[0])

    def launch_like(own: Operands) -> Launch | None:
        given = operands_of(work, own)
        launch = plan.launch_like(_of_gather(given)) if given.a.is_contiguous() else None
        if launch is None or not given.a.is_cuda:
            return None

        shape, has_rows = (sum(work.parts), work.columns), work.gathered

        def gather_and_multiply(inputs, outputs, numbers, corner=None) -> None:
            rows = outputs[1].view(shape) if has_rows else inputs[0].new_empty(shape)
            launch(inputs[:1], (rows,))
            if work.epilogue or work.order == "tree":
                _multiply(work, operands_of(work, Operands(inputs, outputs, numbers)), rows)
            else:
                _multiply_by_torch(rows, inputs[1], inputs[2] if work.bias else None, flat(outputs[0]))

        return gather_and_multiply

    return plan._replace(run=run, launch_like=launch_like)


def _of_gather(one: MatmulOperands) -> Operands:
    """Returns the operands of the all-gather of one rank's rows."""
    rows = one.gathered
    if rows is None:
        rows = one.a.new_empty((len(one.out), one.a.shape[1]))
    return Operands((one.a.contiguous(),), (rows,))


def _multiply(work: Product, one: MatmulOperands, rows: torch.Tensor) -> None:
    """Writes the product of gathered rows into a result.

    On the CPU as the specification does, else by torch, or if it is one with an order by graphar's matmul.
    """
    if work.epilogue:
        one.out.copy_(_with_epilogue(work, replace(work.epilogue, columns=max(1, len(one.w))), one, rows))
    elif work.order == "tree":
        one.out.copy_(leaf_products.product(work.op, rows, one.w, bias=one.bias))
    elif not rows.is_cuda:
        one.out.copy_(reference.linear(rows, one.w, one.bias))
    else:
        _multiply_by_torch(rows, one.w, one.bias, one.out)


def _multiply_by_torch(rows: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(rows, w.t(), out=out)
    else:
        torch.addmm(bias, rows, w.t(), out=out)


def _with_epilogue(work: Product, epilogue: Pointwise, one: MatmulOperands, rows: torch.Tensor) -> torch.Tensor:
    inputs = EpilogueInputs(list(one.tensors), list(one.numbers))
    if work.order == "tree":
        product = leaf_products.product(work.op, rows, one.w, out_dtype=torch.float32)
        return reference.rounded_after(epilogue, inputs, product, rows.dtype)
    if not rows.is_cuda:
        return reference.linear_with_epilogue(rows, one.w, epilogue, inputs)
    unrounded = {} if rows.dtype == torch.float32 else {"out_dtype": torch.float32}
    with torch.autocast("cuda", enabled=False):  # it would multiply in another dtype
        product = torch.mm(rows, one.w.t(), **unrounded)
    return reference.rounded_after(epilogue, inputs, product, rows.dtype)
