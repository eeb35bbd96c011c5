"""graphar.fused_matmul_allreduce: a matmul and the all-reduce of its result, a row-parallel linear layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch

from graphar.matmul import fused, operands, overlap
from graphar.numerics import partitions
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.ops import options
from graphar.ops.epilogue_gradients import of_sums_before_epilogue
from graphar.ops.register import Op, for_ranks, is_plain
from graphar.plan import call_checks, tensor_checks
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
    """Returns the sum over all ranks of ``a @ w.T``, plus ``bias``, on every rank: a row-parallel linear layer.

    Each rank's product is accumulated in fp32 (fp64 for fp64) and rounded to its dtype. The products and ``bias`` are
    then added in fp32 in rank order and rounded once. ``graphar.reference.fused_matmul_allreduce`` is the
    specification, except for the order in which a product is accumulated, which depends on the device.

    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in the same order.

    Differentiable. If ``a`` is a tensor, the backward pass assumes that all ranks compute the same loss, as in tensor
    parallelism, and does not communicate. :func:`allreduce` sums the ranks' gradients, so a matmul and an all-reduce
    give such a loss's gradient times the number of ranks. If ``a`` is a list, the ranks' gradients are summed.

    Args:
        a: this rank's [..., K], bf16, fp16, fp32 or fp64, or a list with one for each device of this process. Shapes
            are equal on all ranks but for K.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. The transpose of a [K, N] tensor is not copied.
        bias: [N], equal on all ranks; for lists a list, one per device. It is added to the sum once, not by each rank.
        partition: "none": multiply, then sum. "tiles": one kernel does both, for bf16 and fp16 on sm_90 and N a
            multiple of 8; other calls run as "none". "split_m", "split_n": the rows of ``a`` or of ``w`` are split;
            while one partition is summed, the next is multiplied. "auto": "tiles" or "none", by the tuning table.
            "batch_invariant": as "auto", but only with graphar's matmul, so that the bits of a row do not depend on M.
        num_partitions: the number of partitions of "split_m" and "split_n". None: 4, if there are as many rows.
        codec: the format on the wire, a :class:`graphar.Codec` or the name of one, such as "int8". Each rank's product
            is rounded once, and the sum once more, as by ``graphar.reference.quantized_allreduce``. Each partition is
            encoded separately, so partitions change bits. For bf16, fp16 and fp32; not with "batch_invariant".
        epilogue: elementwise work on the fp32 sum and ``bias`` before they are rounded: a :class:`graphar.Epilogue`, or
            an expression or a function without arguments, such as "gelu(v)". row, col and index are positions in the
            result. With a bias, an epilogue has at most three tensors. Not with a codec, and not for fp64.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        out: a tensor for the result, which shares no memory with the operands. Not differentiable.
        prefetch: memory that is read next, such as the weight of the next matmul: a tensor on the device of ``a``, for
            a list one per device. The last all-reduce may bring up to 4 MB of it into L2. It changes no result. Ignored
            with ``partition="tiles"``, with a codec, and with an epilogue.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        A contiguous tensor [..., N], for a list one per device; or ``out``.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        UnsupportedError: partition is "batch_invariant", and the call is not one that "tiles" serves.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    return _fused(a, w, bias, (partition, num_partitions), codec, epilogue, group, out, prefetch, timeout_s)


def _fused(a, w, bias, cut: tuple, codec, epilogue, group: Group, out, prefetch, timeout_s: float | None):
    name, in_list, biases = check_fused(NAME, a, w, bias, cut[0], codec, epilogue, group, timeout_s)
    # An epilogue adds the bias itself.
    added, like = None, a[0] if in_list else a
    if epilogue is not None:
        added, like = bias, sum_like(like, w[0] if in_list else w)
    followed = options.epilogue_option(NAME, epilogue, like, len(a) if in_list else None, bias=added)
    text, following = options.codec_option(NAME, codec), options.prefetch_option(NAME, a, prefetch, "a")
    arguments = (biases, name, *cut, timeout_s, text, *followed, following, [])
    plain = not in_list and is_plain_fused(a, w, biases, followed) and options.is_memory(prefetch)
    if out is None:
        return OP(a, w, *arguments, plain=plain)
    operands.check_results(NAME, a, w, bias, out)
    OP.into(a, w, out, *arguments, plain=plain and is_plain(out))
    return list(out) if in_list else out


def check_fused(
    op: str, a, w, bias, partition, codec, epilogue, group: Group, timeout_s: float | None
) -> tuple[str, bool, list[torch.Tensor]]:
    """Checks a fused matmul. Returns the communicator's name, whether it has lists, and the biases.

    There are no biases if an epilogue adds them.
    """
    if timeout_s is not None:
        call_checks.check_timeout(op, timeout_s)
    name, in_list = engine_name(group, NAME), isinstance(a, (list, tuple))
    options.check_together(op, codec, epilogue)
    if partition == partitions.BATCH_INVARIANT and codec is not None:
        raise ValueError(f"{op}: takes a codec or partition={partition!r}, not both")
    operands.check_given(op, a, w, bias)
    return name, in_list, [] if bias is None or epilogue is not None else list(bias) if in_list else [bias]


def is_plain_fused(a: torch.Tensor, w: torch.Tensor, biases: list, followed: options.EpilogueOption) -> bool:
    return is_plain(a) and is_plain(w) and all(map(is_plain, biases)) and not followed.needs_gradient


def sum_like(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Returns a meta tensor with the shape and dtype of the sum."""
    return torch.empty((*a.shape[:-1], w.shape[0]), dtype=a.dtype, device="meta")


def _fake(a, w, given) -> list[torch.Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for x, weight in zip(a, w, strict=True)]


def _run(engine: Engine, a, w, outs, given) -> None:
    """Writes the sum into every tensor of ``outs``, which are contiguous."""
    if given.codec:
        call_checks.check_quantized_call(NAME, given.codec, "auto", a[0])
    followed = options.applied(NAME, given, outs)
    m, n = outs[0].shape[:-1].numel(), outs[0].shape[-1]
    panels = partitions.panels(NAME, given.partition, given.num_partitions, [m], n)
    if not m or not n:
        return
    members, owned = operands.members(a, w, given.bias, outs, given.prefetch), owned_rows(m, engine.world_size)
    if fused.takes(engine, given.partition, given.codec, members, owned, n, scattered=followed is not None):
        fused.allreduce(engine, members, owned, given.timeout_s, followed, given.codec)
    else:
        only_own = given.partition == partitions.BATCH_INVARIANT
        overlap.allreduce(engine, members, panels, given.codec, given.timeout_s, epilogue=followed, only_own=only_own)


def _check_out(a, w, outs, given) -> None:
    tensor_checks.check_distinct(NAME, "out", outs)
    for rank, out in enumerate(outs):
        operands.check_result_memory(NAME, a[rank], w[rank], given.bias[rank] if given.bias else None, out)
    options.check_apart_from_epilogue(NAME, outs, given.tensors)


def gradients_of_products(ctx, of_products, a, w) -> tuple[list, list]:
    """Returns the gradients of each rank's ``a`` and ``w`` from the gradient of its product; None if not needed."""
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


def gradients_of_sums(
    ctx, summing: str, call: dict, gradients, a, w, tensors
) -> tuple[list[torch.Tensor], dict[str, list]]:
    """Returns the gradients of each rank's sum before an epilogue, and of biases and the epilogue's tensors by name."""
    of_biases = [
        operands.flat(gradient).sum(0) if wanted else None
        for gradient, wanted in zip(gradients, ctx.needs_input_grad[2], strict=False)
    ]
    linear = torch.nn.functional.linear
    products = [linear(*pair) for pair in zip(a, w, strict=True)] if ctx.given["epilogue"] else []
    of_sums, rest = of_sums_before_epilogue(ctx, summing, call, gradients, products, tensors)
    return of_sums, {"bias": of_biases} | rest


def _backward(ctx, gradients):
    call = {name: ctx.given[name] for name in ("communicator", "timeout_s")}
    (a, w), tensors = OP.saved(ctx)
    of_sums, rest = gradients_of_sums(ctx, "allreduce", call, gradients, a, w, tensors)
    if ctx.in_list:
        of_sums = for_ranks(ctx, "allreduce", of_sums, **call)
    return *gradients_of_products(ctx, of_sums, a, w), rest


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
