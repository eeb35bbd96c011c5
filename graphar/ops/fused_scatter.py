"""A matmul and the reduce-scatter of its result as one op, as torch sees it; and the function users call.

An op takes the codec as in fused.py, and sizes and rank as in scatter.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.matmul import operands, overlap, tiles
from graphar.numerics import partitions
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.ops.fused import check_alone, keep_list, list_gradients, matmul_gradients, members
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.ops.ops import communicator_of, is_plain, library
from graphar.ops.quantized import text_of
from graphar.ops.scatter import check_place, check_sizes, place, split
from graphar.plan import checks
from graphar.runtime.registry import communicator_name

OP = "fused_matmul_reducescatter"
_CALL = "SymInt[] sizes, str partition, int? num_partitions, str codec, float? timeout_s"
CALL = f"Tensor w, Tensor? bias, str communicator, int rank, {_CALL}"  # of one rank's op, after its first tensor
library.define(f"{OP}(Tensor a, {CALL}) -> Tensor")
library.define(f"{OP}_list(Tensor[] a, Tensor[] w, Tensor[] bias, str communicator, {_CALL}) -> Tensor[]")
ops = torch.ops.graphar


def fused_matmul_reducescatter(
    a: torch.Tensor | Sequence[torch.Tensor],
    w: torch.Tensor | Sequence[torch.Tensor],
    *,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    partition: str = "auto",
    num_partitions: int | None = None,
    codec: Codec | str | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """This rank's part of what :func:`fused_matmul_allreduce` gives, along the first dimension of ``a``: its bits.

    The parts are those of torch.tensor_split. Differentiable: the gradients of all parts are gathered, and those of
    ``a`` and ``w`` are a matmul each; that of ``bias`` is of this rank's part alone, so where it is one parameter of
    all ranks, they are yet to be summed.

    Args:
        a: as there, with two dimensions or more.
        w, bias: as there.
        partition: as there, but "split_m" cuts each rank's part of the rows, so that all receive some of each.
        num_partitions, group, timeout_s: as there.
        codec: as for :func:`reducescatter`; each partition is then a call of its own.
        epilogue: as there, but of places in this rank's part, as for :func:`reducescatter`.

    Returns:
        A contiguous tensor, or for a list one a device.

    Raises:
        TypeError, ValueError: an argument breaks a rule; nothing was sent.
        CollectiveTimeout: an earlier call of this communicator waited past its deadline.
    """
    if timeout_s is not None:
        checks.check_timeout(OP, timeout_s)
    name, cut = communicator_name(group), (partition, num_partitions)
    if epilogue is not None:
        from graphar.ops import epilogue_fused_scatter

        check_alone(OP, codec)
        return epilogue_fused_scatter.reducescatter(a, w, bias, group, epilogue, (*cut, timeout_s))
    call = (*cut, text_of(OP, codec, None) if codec is not None else "", timeout_s)
    if isinstance(a, (list, tuple)):
        operands.check_operand_lists(OP, a, w, bias)
        operands.check_has_rows(OP, a[0])
        sizes = split(a[0].shape[0], len(a))
        lists = map(with_own_nodes, (a, w, [] if bias is None else bias))
        return ops.fused_matmul_reducescatter_list(*lists, name, sizes, *call)
    operands.check_operands(OP, a, w, bias)
    operands.check_has_rows(OP, a)
    rank, world_size = place(group, name)
    plain = is_plain(a) and is_plain(w) and (bias is None or is_plain(bias))
    op = run_process if plain else ops.fused_matmul_reducescatter
    return op(a, w, bias, name, rank, split(a.shape[0], world_size), *call)


# ---- implementations ------------------------------------------------------------------------------------------------


def run(a, w, bias, outs, communicator, sizes, partition, num_partitions, codec, timeout_s, epilogue=None) -> None:
    """Of this process's ranks, as lists."""
    if codec:
        checks.check_quantized_call(OP, codec, "auto", a[0])
    in_one, n = a[0].shape[1:-1].numel(), w[0].shape[0]
    rows = [size * in_one for size in sizes]
    panels = partitions.panels(OP, partition, num_partitions, rows, n)
    if not sum(rows) or not n:
        return
    mine = members(a, w, bias, outs)
    if tiles.takes(communicator, partition, codec, mine, rows, n, scattered=True):
        tiles.reducescatter(communicator, mine, rows, timeout_s, epilogue, codec)
    else:
        overlap.reducescatter(communicator, mine, panels, codec, timeout_s, epilogue=epilogue)


def result(a: torch.Tensor, w: torch.Tensor, size: int) -> torch.Tensor:
    return a.new_empty((size, *a.shape[1:-1], w.shape[0]))


def run_process(a, w, bias, communicator, rank, sizes, *call) -> torch.Tensor:
    ranks = communicator_of(a, communicator)
    check_sizes(OP, sizes, [a.shape[0]], [sum(sizes)])
    check_place(OP, ranks, rank, sizes)
    out = result(a, w, sizes[rank])
    run([a], [w], [] if bias is None else [bias], [out], ranks, sizes, *call)
    return out


def _run_list(a, w, bias, communicator, sizes, *call) -> list[torch.Tensor]:
    check_sizes(OP, sizes, [x.shape[0] for x in a], [sum(sizes)] * len(sizes))
    outs = results(a, w, sizes)
    run(a, w, bias, outs, communicator_of(a, communicator), sizes, *call)
    return outs


def results(a, w, sizes) -> list[torch.Tensor]:
    return [result(*one) for one in zip(a, w, sizes, strict=True)]


for _key in ("CPU", "CUDA"):
    library.impl(OP, run_process, _key)
    library.impl(f"{OP}_list", _run_list, _key)


@torch.library.register_fake(f"graphar::{OP}", lib=library)
def _(a, w, bias, communicator, rank, sizes, *call):
    return result(a, w, sizes[rank])


@torch.library.register_fake(f"graphar::{OP}_list", lib=library)
def _(a, w, bias, communicator, sizes, *call):
    return results(a, w, sizes)


# ---- autograd: with a codec, rounding counts as the identity --------------------------------------------------------


def _keep(ctx, inputs, output) -> None:
    a, w, _, *ctx.call = inputs
    ctx.save_for_backward(a, w)


def _backward(ctx, gradient):
    communicator, rank, sizes, *_, timeout_s = ctx.call
    needs_a, needs_w, needs_bias = ctx.needs_input_grad[:3]
    whole = ops.allgather(gradient, communicator, rank, 0, sizes, timeout_s) if needs_a or needs_w else gradient
    of_a, of_w, _ = matmul_gradients(whole, *ctx.saved_tensors, (needs_a, needs_w, False))
    *_, of_bias = matmul_gradients(gradient, *ctx.saved_tensors, (False, False, needs_bias))
    return of_a, of_w, of_bias, *[None] * len(ctx.call)


@in_stream_order
def _backward_list(ctx, gradients):
    communicator, *_, timeout_s = ctx.call
    return list_gradients(ctx, ops.allgather_list(gradients, communicator, 0, timeout_s), gradients)


torch.library.register_autograd(f"graphar::{OP}", _backward, setup_context=_keep, lib=library)
torch.library.register_autograd(f"graphar::{OP}_list", _backward_list, setup_context=keep_list, lib=library)
