"""graphar.fused_allgather_matmul: the rows of all ranks, gathered and multiplied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, get_args, overload

import torch

from graphar.numerics import partitions
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops import linear, matmul_operands, options, parts
from graphar.ops.gradients import before_epilogue, in_backward
from graphar.ops.options import Arguments, T
from graphar.ops.register import Op, for_ranks
from graphar.ops.repeats import repeated, typed
from graphar.plan.call import Call
from graphar.plan.work import Product
from graphar.runtime.checks import call_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

NAME = "fused_allgather_matmul"
GatherPartition = Literal["auto", "tiles", "chunks", "none", "tp_invariant"]
PARTITIONS = get_args(GatherPartition)


@overload
def fused_allgather_matmul(
    a: T,
    w: T,
    *,
    bias: T | None = None,
    gathered: Literal[False] = False,
    sizes: Sequence[int] | None = None,
    partition: GatherPartition = "auto",
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: Group = None,
    a_scale: T | None = None,
    w_scale: T | None = None,
    out_dtype: torch.dtype | None = None,
    timeout_s: float | None = None,
) -> T: ...
@overload
def fused_allgather_matmul(
    a: T,
    w: T,
    *,
    bias: T | None = None,
    gathered: Literal[True],
    sizes: Sequence[int] | None = None,
    partition: GatherPartition = "auto",
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: Group = None,
    a_scale: T | None = None,
    w_scale: T | None = None,
    out_dtype: torch.dtype | None = None,
    timeout_s: float | None = None,
) -> tuple[T, ...]: ...
def fused_allgather_matmul(
    a,
    w,
    *,
    bias=None,
    gathered=False,
    sizes=None,
    partition="auto",
    epilogue=None,
    group=None,
    a_scale=None,
    w_scale=None,
    out_dtype=None,
    timeout_s=None,
):
    """Returns ``allgather(a) @ w.T + bias``: the product of the rows of all ranks with this rank's weight.

    It is a column-parallel layer whose input is divided between ranks by rows, as in sequence parallelism. A rank
    multiplies its own rows while the other ranks' rows arrive. ``graphar.reference.fused_allgather_matmul`` is the
    specification, except that the order in which a product is accumulated depends on the device.

    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in the same order. Differentiable: the gradient of ``a`` is a
    :func:`fused_matmul_reducescatter`. For the gradient of ``w`` the rows are gathered again.

    Args:
        a: this rank's rows [M_r, ..., K], bf16, fp16, fp32 or fp64, or with scales torch.float8_e4m3fn, or a list with
            one for each device of this process. Shapes are equal on all ranks but for M_r, which may be 0.
        w: this rank's [N, K], as torch.nn.Linear stores it; N may differ. A transposed [K, N] tensor is not copied.
        bias: this rank's [N], which is added before rounding; for lists a list, one a device.
        gathered: whether to return the gathered rows as well, for example to multiply them with further weights.
        sizes: M_r of every rank, in rank order. None: all have this rank's M_r. Not for a list.
        partition: equal on all ranks. "tiles": one kernel gathers and multiplies, for results of 16 bits on sm_90.
            "chunks": copy engines gather, and torch multiplies the rows of each rank when they have arrived; for bf16
            and fp16 without an epilogue. "none": gather, then multiply; other calls run so, too. "auto": one of these,
            by the tuning table, and with an epilogue "tiles". "tp_invariant": graphar's matmul adds in the order of K,
            and gradients have the same bits on 1, 2, 4 and 8 ranks: see :func:`graphar.linear`.
        epilogue: elementwise work on the fp32 product and ``bias`` before they are rounded: a
            :class:`graphar.Epilogue`, or an expression or a function without arguments, such as "gelu(v)". The
            expression must be equal on all ranks. row, col and index are positions in this rank's result, and
            tensors have its shape. Where N is 1 on some ranks only, give an expression, since tensors broadcast
            differently there. With a bias, an epilogue has at most three tensors. Not for fp64.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        a_scale: fp32 scales of ``a``, with any strides: of rows [M_r, ..., 1], or one number; of blocks of 128 columns
            [M_r, ..., ceil(K / 128)]. For a list a list. They are gathered with the rows. The product is that of
            ``graphar.reference.scaled_linear``, whatever the number of rows; there are no gradients. None: no scales.
        w_scale: fp32 scales of ``w`` in torch.float8_e4m3fn, of the same format: of rows [N, 1], [1, N], or one number;
            of blocks of 128 x 128 [ceil(N / 128), ceil(K / 128)]. For a list a list.
        out_dtype: with scales, the dtype of the result, torch.bfloat16 or torch.float16. None: torch.bfloat16.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        A contiguous tensor [sum of M_r, ..., N] with the dtype of ``a``, or with ``out_dtype``, for a list one a
        device. With ``gathered``, a pair of this and the gathered rows [sum of M_r, ..., K]. With ``gathered`` and
        scales, also the scales of these rows, [sum of M_r, ..., 1], or [sum of M_r, ..., ceil(K / 128)].

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    of_ranks = None if sizes is None else typed(sizes)
    how = bool(gathered), of_ranks, partition, bias is None, timeout_s, type(timeout_s), out_dtype
    scales = () if a_scale is None and w_scale is None else (a_scale, w_scale)
    asked = (a, w, *scales, *(() if bias is None else (bias,))), how, epilogue
    if (result := repeated(NAME, group, *asked)) is not None:
        return result
    call_checks.check_call(NAME, "auto", timeout_s)
    served = PARTITIONS[:-1] if scales else PARTITIONS
    if partition not in served:
        of = "with scales partition" if scales else "partition"
        raise ValueError(f"{NAME}: {of} must be one of {', '.join(served)}, got {partition!r}")
    in_list, alone = isinstance(a, (list, tuple)), partition == TP_INVARIANT
    name = engine_name(group, NAME, alone and not in_list)
    scaled = matmul_operands.check(NAME, a, w, bias, (a_scale, w_scale, out_dtype), rows_differ=True)
    first, weight = (a[0], w[0]) if in_list else (a, w)
    parts.check_has_rows(NAME, "a", first)
    if alone:
        xs, of = a if in_list else [a], f"with partition={TP_INVARIANT!r} "
        options.check_float(NAME, "a", xs[0], of)
        if gathered and torch.is_grad_enabled() and any(x.requires_grad for x in xs):
            raise ValueError(
                f"{NAME}: {of}and gathered=True it cannot be differentiated: the gradients of the "
                "gathered rows are rounded before they are summed; gather once for each weight"
            )
    where = parts.to_join(NAME, "a", a, 0, sizes, group, alone)
    shape = sum(where["sizes"]), *first.shape[1:-1], len(weight)
    added = matmul_operands.added(NAME, a, bias, epilogue, shape, scaled.get("scaled_dtype"))
    call = {"communicator": name, "timeout_s": timeout_s, "gathered": gathered, "partition": partition}
    results = OP(a, w, asked=asked, **call, **where, **added, **scaled)
    return results if gathered else results[0]


class _GatherMatmul(Op):
    tensors = ("a", "w")
    has_several = True

    def fake(self, a, w, arguments: Arguments) -> list[tuple[torch.Tensor, torch.Tensor]]:
        rows, results = sum(arguments.sizes), []
        for rank, (x, weight) in enumerate(zip(a, w, strict=True)):
            made = [x.new_empty((rows, *x.shape[1:-1], weight.shape[0]), dtype=arguments.scaled_dtype)]
            made.append(x.new_empty((rows, *x.shape[1:]) if arguments.gathered else (0,)))
            if arguments.scales:
                scale = arguments.scales[2 * rank]
                of_row = scale.shape[-1] if scale.ndim > 1 else 1
                shape = (rows, *x.shape[1:-1], of_row) if arguments.gathered else (0,)
                made.append(x.new_empty(shape, dtype=torch.float32))
            results.append(tuple(made))
        return results

    def run(self, engine: Engine, a, w, outs, arguments: Arguments):
        followed = options.applied(NAME, arguments, [product for product, *_ in outs])
        counts = matmul_operands.rows_of_ranks(self, engine, a, arguments)
        if not sum(counts):
            return None
        form = followed and replace(followed.form, columns=1)  # ranks may differ in columns
        how = {"gathered": arguments.gathered, **matmul_operands.multiplied(self, a, w, arguments)}
        work = Product(NAME, counts, a[0].shape[-1], bool(arguments.bias), epilogue=form, **how)
        wanted = outs if arguments.gathered else [results[:1] for results in outs]
        ranks = options.operands(matmul_operands.lists(a, w, arguments.scales, arguments.bias), wanted, followed)
        return engine.run(Call.of(work, outs[0][0], timeout_s=arguments.timeout_s), ranks), ranks

    def check(self, engine: Engine, a, w, arguments: Arguments) -> None:
        parts.check(NAME, engine, arguments, [len(x) for x in a])

    def backward(self, ctx, gradients, saved, tensors):
        """Returns the gradients: of ``a`` by a reduce-scatter, and of ``w`` from rows that are gathered again."""
        a, w, *_ = saved
        of_products, of_rows = list(gradients[::2]), list(gradients[1::2])
        needs_a, needs_w = any(ctx.needs["a"]), any(ctx.needs["w"])
        of_a, of_w, wholes, rest, partition = [None] * len(a), [None] * len(w), None, {}, ctx.arguments.partition
        if ctx.arguments.epilogue:
            again = {"gathered": needs_w, "partition": partition, "after": in_backward(of_products)}
            results = for_ranks(ctx, NAME, a, w, **again, **ctx.where)
            products, wholes = [product.float() for product in results[::2]], results[1::2]
            of_products, rest = before_epilogue(ctx, products, of_products, tensors, a[0].dtype)
        if needs_a:
            of_a = _of_rows(ctx, of_products, of_rows, w)
        if needs_w:
            wholes = wholes or for_ranks(ctx, "allgather", a, **ctx.where)
            of_w = linear.where_needed(ctx.needs["w"], linear.of_weight, partition, of_products, wholes)
        rest["bias"] = linear.where_needed(ctx.needs["bias"], linear.of_bias, partition, of_products)
        return of_a, of_w, rest


def _of_rows(ctx, of_products, of_rows, w) -> list[torch.Tensor]:
    if not ctx.arguments.gathered:
        cut = {"partition": partitions.in_backward(ctx.arguments.partition)}
        return for_ranks(ctx, "fused_matmul_reducescatter", of_products, [x.t() for x in w], **cut, **ctx.where)
    totals = [dy @ weight + of_row for dy, of_row, weight in zip(of_products, of_rows, w, strict=True)]
    return for_ranks(ctx, "reducescatter", totals, **ctx.where)


_OPTIONS = (*options.IN_PARTS, "partition", "scales", *options.FOLLOWED, "bias", "gathered", "scaled_dtype")
OP = _GatherMatmul(NAME, *_OPTIONS)
