"""graphar.fused_matmul_reducescatter: a matmul and the reduce-scatter of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

import torch

from graphar.matmul import fused, operands, overlap
from graphar.numerics import partitions
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.numerics.partitions import split
from graphar.ops import epilogue_gradients, options, parts
from graphar.ops.matmul_allreduce import CUT, gradients_of_biases, gradients_of_products, products_in_fp32, sum_like
from graphar.ops.register import Op, for_ranks, is_plain
from graphar.plan import checks
from graphar.plan.algorithms import Algorithm
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

NAME = "fused_matmul_reducescatter"


@overload
def fused_matmul_reducescatter(
    a: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    partition: str = "auto",
    num_partitions: int | None = None,
    codec: Codec | str | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: Group = None,
    timeout_s: float | None = None,
) -> torch.Tensor: ...
@overload
def fused_matmul_reducescatter(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    partition: str = "auto",
    num_partitions: int | None = None,
    codec: Codec | str | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: Group = None,
    timeout_s: float | None = None,
) -> list[torch.Tensor]: ...
def fused_matmul_reducescatter(
    a,
    w,
    *,
    bias=None,
    partition="auto",
    num_partitions=None,
    codec=None,
    epilogue=None,
    group=None,
    timeout_s=None,
):
    """This rank's part of what :func:`fused_matmul_allreduce` gives, along the first dimension of ``a``: its bits.

    The parts are as torch.tensor_split makes them: their lengths differ by at most one, and earlier ranks have the
    longer ones. Ranks are processes where ``a`` is a tensor, and the devices of this process where it is a list.
    Collective: every rank makes the same calls in the same order.

    Differentiable: the gradients of all parts are gathered, and the gradients of ``a`` and ``w`` are a matmul each. The
    gradient of ``bias`` covers this rank's part alone: where it is one parameter of all ranks, sum its gradients.

    Args:
        a: this rank's [M, ..., K], or one a device of this process; equal on all ranks but for K. bf16, fp16, fp32,
            fp64.
        w: this rank's [N, K], as torch.nn.Linear stores it, or the transpose of a [K, N] tensor, which is not copied.
        bias: [N], alike on all ranks; for lists one a device.
        partition: as for :func:`fused_matmul_allreduce`, but "split_m" cuts each rank's part of the rows, so that all
            ranks receive some rows of each partition.
        num_partitions: of "split_m" and "split_n". None: 4, if there are as many rows or columns.
        codec: the format on the wire, as for :func:`reducescatter`; each partition is a call of its own.
        epilogue: elementwise work on this rank's part of the fp32 sum and ``bias`` before they are rounded, as for
            :func:`reducescatter`: of places in that part, and with a bias of at most three tensors.
        group: a process group or Communicator; None is the default group, or a communicator of the list's devices.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the communicator's.

    Returns:
        A contiguous tensor [M_r, ..., N], or for a list one a device.

    Raises:
        TypeError, ValueError: an argument breaks a rule; nothing was sent.
        CollectiveTimeout: an earlier call of this communicator waited past its deadline.
    """
    if timeout_s is not None:
        checks.check_timeout(NAME, timeout_s)
    name = engine_name(group)
    options.check_together(NAME, codec, epilogue)
    in_list = isinstance(a, (list, tuple))
    operands.check_given(NAME, a, w, bias)
    first = a[0] if in_list else a
    operands.check_has_rows(NAME, first)
    rank, world_size = (-1, len(a)) if in_list else parts.place(group)
    sizes = split(first.shape[0], world_size)
    # An epilogue adds the bias itself.
    biases = [] if bias is None or epilogue is not None else list(bias) if in_list else [bias]
    followed = _epilogue_option(first, w, bias, epilogue, sizes, rank)
    cut = partition, num_partitions, timeout_s, options.codec_option(NAME, codec)
    needs = [one for one in (a, w, *biases) if not in_list]
    plain = all(map(is_plain, needs)) and not followed.needs_gradient
    return OP(a, w, biases, name, rank, sizes, *cut, *followed, [], plain=plain)


def _epilogue_option(first: torch.Tensor, w, bias, epilogue, sizes: Sequence[int], rank: int) -> options.EpilogueOption:
    """The epilogue for each rank's rows, with the bias."""
    if epilogue is None:
        return options.EpilogueOption()
    in_list = isinstance(w, (list, tuple))
    like = sum_like(first.narrow(0, 0, sizes[max(rank, 0)]), w[0] if in_list else w)
    return options.epilogue_option(NAME, epilogue, like, len(sizes) if in_list else None, 0, bias)


# ---- the op ---------------------------------------------------------------------------------------------------------


def _fake(a, w, bias, communicator, rank, sizes, *rest) -> list[torch.Tensor]:
    mine = sizes if rank < 0 else [sizes[rank]]
    return [x.new_empty((size, *x.shape[1:-1], weight.shape[0])) for x, weight, size in zip(a, w, mine, strict=True)]


def _run(
    engine: Engine,
    a,
    w,
    outs,
    bias,
    communicator: str,
    rank: int,
    sizes,
    partition: str,
    num_partitions: int | None,
    timeout_s: float | None,
    codec: str,
    epilogue: str,
    tensors,
    scalars,
    after,
) -> None:
    """Writes each rank's part of the sum into its ``outs``, which have no gaps."""
    if codec:
        checks.check_quantized_call(NAME, codec, "auto", a[0])
    followed = options.applied(NAME, epilogue, outs, tensors, scalars)
    in_one, n = a[0].shape[1:-1].numel(), w[0].shape[0]
    rows = [size * in_one for size in sizes]
    panels = partitions.panels(NAME, partition, num_partitions, rows, n)
    if not sum(rows) or not n:
        return
    members = operands.members(a, w, bias, outs)
    if fused.takes(engine, partition, codec, members, rows, n, scattered=True):
        fused.run(engine, Algorithm.MATMUL_REDUCESCATTER, members, rows, timeout_s, followed, codec)
    else:
        overlap.reducescatter(engine, members, panels, codec, timeout_s, epilogue=followed)


def _check(engine: Engine, a, w, bias, communicator, rank: int, sizes, *rest) -> None:
    parts.check_lengths(NAME, sizes, [x.shape[0] for x in a], [sum(sizes)] * len(a))
    parts.check_place(NAME, engine, rank, sizes)


def _backward(ctx, gradients):
    """With a codec, rounding counts as the identity."""
    given = ctx.given
    where = {name: given[name] for name in ("communicator", "rank", "sizes", "timeout_s")}
    (a, w), tensors = OP.saved(ctx)
    rest, of_parts = {"bias": gradients_of_biases(ctx, gradients)}, gradients
    if given["epilogue"]:
        vs = for_ranks(ctx, "reducescatter", products_in_fp32(a, w), **where)
        of_vs, rest["tensors"] = epilogue_gradients.of_ranks(ctx, vs, gradients, tensors)
        of_parts = [of_v.to(a[0].dtype) for of_v in of_vs]
    if ctx.in_list or any(ctx.needs_input_grad[:2]):
        of_parts = for_ranks(ctx, "allgather", of_parts, **where)
    return *gradients_of_products(ctx, of_parts, a, w), rest


OP = Op(
    NAME,
    ["a", "w"],
    f"Tensor[] bias, str communicator, int rank, SymInt[] sizes, {CUT}, float? timeout_s, "
    f"{options.CODEC}, {options.EPILOGUE}, {options.AFTER}",
    _run,
    _fake,
    check=_check,
    backward=_backward,
)
