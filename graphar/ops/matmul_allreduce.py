"""graphar.fused_matmul_allreduce: a matmul and the all-reduce of its result, a row-parallel linear layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch

from graphar.matmul import fused, operands, overlap
from graphar.numerics import partitions
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.ops import epilogue_gradients, options
from graphar.ops.register import Op, for_ranks, is_plain
from graphar.plan import checks
from graphar.plan.matmuls import owned_rows
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

NAME = "fused_matmul_allreduce"
CUT = "str partition, int? num_partitions"


@overload
def fused_matmul_allreduce(
    a: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    partition: str = "auto",
    num_partitions: int | None = None,
    codec: Codec | str | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: Group = None,
    out: torch.Tensor | None = None,
    prefetch: torch.Tensor | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor: ...
@overload
def fused_matmul_allreduce(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    partition: str = "auto",
    num_partitions: int | None = None,
    codec: Codec | str | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: Group = None,
    out: Sequence[torch.Tensor] | None = None,
    prefetch: Sequence[torch.Tensor] | None = None,
    timeout_s: float | None = None,
) -> list[torch.Tensor]: ...
def fused_matmul_allreduce(
    a,
    w,
    *,
    bias=None,
    partition="auto",
    num_partitions=None,
    codec=None,
    epilogue=None,
    group=None,
    out=None,
    prefetch=None,
    timeout_s=None,
):
    """The sum over all ranks of ``a @ w.T``, and ``bias``, on every rank: a row-parallel linear layer.

    Each rank's product is accumulated in fp32 (fp64 for fp64) and rounded to its dtype. The products are summed as by
    :func:`allreduce`; ``bias`` is added to the sum, once and not by each rank, before that is rounded.
    ``graphar.reference.fused_matmul_allreduce`` is the specification, except for the order in which a product is
    accumulated, which is the GPU's or the CPU's. Ranks are processes where ``a`` is a tensor, and the devices of this
    process where it is a list. Collective: every rank makes the same calls in the same order.

    Differentiable. Where ``a`` is a tensor, the gradient of the result is taken to be the same on all ranks, as in
    tensor parallelism, where all compute one loss from it: nothing is exchanged. Where ``a`` is a list, one process has
    all results, whose gradients may differ: they are summed by :func:`allreduce` first.

    Args:
        a: this rank's [..., K], or one a device of this process; equal on all ranks but for K. bf16, fp16, fp32, fp64.
        w: this rank's [N, K], as torch.nn.Linear stores it, or the transpose of a [K, N] tensor, which is not copied.
        bias: [N], alike on all ranks; for lists one a device.
        partition: "tiles" is one kernel, for bf16 and fp16 on sm_90 and a multiple of 8 columns. "split_m" cuts the
            rows of ``a``, "split_n" the rows of ``w``; while one partition is summed, the next is multiplied. "none"
            multiplies, then sums; so does "tiles" where it has no kernel. "auto" goes by the tuning table.
        num_partitions: of "split_m" and "split_n". None: 4, if there are as many rows or columns.
        codec: the format on the wire, a :class:`graphar.Codec` or the name of one, such as "int8", as for
            :func:`allreduce`. Each partition is a call of its own, so partitions change bits.
        epilogue: elementwise work on the fp32 sum and ``bias`` before they are rounded, as for :func:`allreduce`: of
            places in the result, and with a bias of at most three tensors. Not with a codec; not for fp64.
        group: a process group or Communicator; None is the default group, or a communicator of the list's devices.
        out: where to write the result, apart from the operands. Not differentiable.
        prefetch: memory that is read next, as for :func:`allreduce`, given to the last sum. Ignored with
            ``partition="tiles"``, with a codec, or with an epilogue.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the communicator's.

    Returns:
        A contiguous tensor [..., N] (for a list: one a device), or ``out``.

    Raises:
        TypeError, ValueError: an argument breaks a rule; nothing was sent.
        CollectiveTimeout: an earlier call of this communicator waited past its deadline.
    """
    if timeout_s is not None:
        checks.check_timeout(NAME, timeout_s)
    name = engine_name(group)
    options.check_together(NAME, codec, epilogue)
    cut = name, partition, num_partitions
    return _fused(a, w, bias, cut, codec, epilogue, out, prefetch, timeout_s)


def _fused(a, w, bias, cut: tuple, codec, epilogue, out, prefetch, timeout_s: float | None):
    in_list = isinstance(a, (list, tuple))
    operands.check_given(NAME, a, w, bias)
    first = (a[0], w[0]) if in_list else (a, w)
    # An epilogue adds the bias itself.
    biases = [] if bias is None or epilogue is not None else list(bias) if in_list else [bias]
    added = bias if epilogue is not None else None
    like = sum_like(*first) if epilogue is not None else first[0]
    followed = options.epilogue_option(NAME, epilogue, like, len(a) if in_list else None, bias=added)
    text, following = options.codec_option(NAME, codec), options.prefetch_option(NAME, a, prefetch)
    arguments = (biases, *cut, timeout_s, text, *followed, following, [])
    needs = [one for one in (a, w, *biases) if not in_list]
    plain = all(map(is_plain, needs)) and options.is_memory(prefetch) and not followed.needs_gradient
    if out is None:
        return OP(a, w, *arguments, plain=plain)
    operands.check_results(NAME, a, w, bias, out)
    OP.into(a, w, out, *arguments, plain=plain and is_plain(out))
    return list(out) if in_list else out


def sum_like(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A tensor without memory like the sum."""
    return torch.empty((*a.shape[:-1], w.shape[0]), dtype=a.dtype, device="meta")


# ---- the op ---------------------------------------------------------------------------------------------------------


def _fake(a, w, *arguments) -> list[torch.Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for x, weight in zip(a, w, strict=True)]


def _run(
    engine: Engine,
    a,
    w,
    outs,
    bias,
    communicator: str,
    partition: str,
    num_partitions: int | None,
    timeout_s: float | None,
    codec: str,
    epilogue: str,
    tensors,
    scalars,
    prefetch,
    after,
) -> None:
    """Writes the sums into ``outs``, which have no gaps."""
    if codec:
        checks.check_quantized_call(NAME, codec, "auto", a[0])
    followed = options.applied(NAME, epilogue, outs, tensors, scalars)
    m, n = outs[0].shape[:-1].numel(), outs[0].shape[-1]
    panels = partitions.panels(NAME, partition, num_partitions, [m], n)
    if not m or not n:
        return
    members, owned = operands.members(a, w, bias, outs, prefetch), owned_rows(m, engine.world_size)
    if fused.takes(engine, partition, codec, members, owned, n, scattered=followed is not None):
        fused.allreduce(engine, members, owned, timeout_s, followed, codec)
    else:
        overlap.allreduce(engine, members, panels, codec, timeout_s, epilogue=followed)


def _check_out(a, w, outs, bias, *arguments) -> None:
    checks.check_distinct(NAME, "out", outs)
    for rank, out in enumerate(outs):
        operands.check_result_memory(NAME, a[rank], w[rank], bias[rank] if bias else None, out)
    options.check_apart_from_epilogue(NAME, outs, OP.named((bias, *arguments))["tensors"])


def gradients_of_products(ctx, of_products, a, w) -> tuple[list, list]:
    """The gradients of each rank's ``a`` and ``w``, where they are needed, from the gradient of its product."""
    needed = [one if isinstance(one, (list, tuple)) else [one] for one in ctx.needs_input_grad[:2]]
    of_a = [
        (operands.flat(gradient) @ weight).view(x.shape) if wanted else None
        for gradient, x, weight, wanted in zip(of_products, a, w, needed[0], strict=True)
    ]
    of_w = [
        operands.flat(gradient).t() @ operands.flat(x) if wanted else None
        for gradient, x, wanted in zip(of_products, a, needed[1], strict=True)
    ]
    return of_a, of_w


def gradients_of_biases(ctx, of_results) -> list[torch.Tensor | None]:
    """The gradients of the ranks' biases, where they are needed, from the gradients of their results."""
    return [
        operands.flat(gradient).sum(0) if wanted else None
        for gradient, wanted in zip(of_results, ctx.needs_input_grad[2], strict=False)
    ]


def products_in_fp32(a, w) -> list[torch.Tensor]:
    """Each rank's product, rounded to its dtype, in fp32."""
    return [torch.nn.functional.linear(*pair).float() for pair in zip(a, w, strict=True)]


def _backward(ctx, gradients):
    given = ctx.given
    call = {name: given[name] for name in ("communicator", "timeout_s")}
    (a, w), tensors = OP.saved(ctx)
    rest, of_results = {"bias": gradients_of_biases(ctx, gradients)}, gradients
    if given["epilogue"]:
        vs = for_ranks(ctx, "allreduce", products_in_fp32(a, w), **call)
        of_vs, rest["tensors"] = epilogue_gradients.of_ranks(ctx, vs, gradients, tensors)
        of_results = [of_v.to(a[0].dtype) for of_v in of_vs]
    if ctx.in_list:
        of_results = for_ranks(ctx, "allreduce", of_results, **call)
    return *gradients_of_products(ctx, of_results, a, w), rest


OP = Op(
    NAME,
    ["a", "w"],
    f"Tensor[] bias, str communicator, {CUT}, float? timeout_s, "
    f"{options.CODEC}, {options.EPILOGUE}, {options.PREFETCH}, {options.AFTER}",
    _run,
    _fake,
    check_out=_check_out,
    backward=_backward,
)
