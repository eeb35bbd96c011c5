"""Matmul and reduce-scatter with an epilogue, as torch sees it; users call graphar.fused_matmul_reducescatter.

An op takes the epilogue, its arguments and the bias as in epilogue_fused.py, and sizes and rank as in scatter.py.
Places and shapes are those of a rank's part.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.matmul import operands
from graphar.ops import fused_scatter
from graphar.ops.epilogue_fused import apply, gradients_of_matmuls, keep_call, saved, sum_like, with_bias
from graphar.ops.epilogue_ops import (
    arguments_of_list,
    arguments_of_tensor,
    gradients_of,
    gradients_of_ranks,
    no_gradients,
)
from graphar.ops.fused_scatter import OP, result, results
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.ops.ops import communicator_of, library
from graphar.ops.scatter import check_place, check_sizes, place, split
from graphar.runtime.registry import communicator_name

_EPILOGUE = "Tensor[] tensors, float[] scalars, str epilogue, str communicator"
_CALL = "SymInt[] sizes, str partition, int? num_partitions, float? timeout_s"
CALL = f"Tensor w, {_EPILOGUE}, int rank, {_CALL}"  # of one rank's op, after its first tensor
NAME = f"epilogue_{OP}"
library.define(f"{NAME}(Tensor a, {CALL}) -> Tensor")
library.define(f"{NAME}_list(Tensor[] a, Tensor[] w, {_EPILOGUE}, {_CALL}) -> Tensor[]")
ops = torch.ops.graphar


def reducescatter(
    a, w, bias, group: dist.ProcessGroup | Communicator | None, epilogue: object, call: tuple
) -> torch.Tensor | list[torch.Tensor]:
    """What :func:`graphar.fused_matmul_reducescatter` does with an epilogue."""
    name = communicator_name(group)
    if isinstance(a, (list, tuple)):
        operands.check_operand_lists(OP, a, w, bias)
        operands.check_has_rows(OP, a[0])
        sizes = split(a[0].shape[0], len(a))
        wanted, text = with_bias(epilogue, bias, sum_like(a[0].narrow(0, 0, sizes[0]), w[0]), 0)
        tensors, scalars = arguments_of_list(OP, wanted, len(a))
        lists = map(with_own_nodes, (a, w, tensors))
        return ops.epilogue_fused_matmul_reducescatter_list(*lists, scalars, text, name, sizes, *call)
    operands.check_operands(OP, a, w, bias)
    operands.check_has_rows(OP, a)
    rank, world_size = place(group, name)
    sizes = split(a.shape[0], world_size)
    wanted, text = with_bias(epilogue, bias, sum_like(a.narrow(0, 0, sizes[rank]), w), 0)
    tensors, scalars = arguments_of_tensor(OP, wanted)
    return ops.epilogue_fused_matmul_reducescatter(a, w, tensors, scalars, text, name, rank, sizes, *call)


# ---- implementations ------------------------------------------------------------------------------------------------


def _run(a, w, outs, tensors, scalars, text, communicator, sizes, partition, num_partitions, timeout_s) -> None:
    applied = apply(OP, text, outs, tensors, scalars)
    fused_scatter.run(a, w, [], outs, communicator, sizes, partition, num_partitions, "", timeout_s, applied)


def run_process(a, w, tensors, scalars, text, communicator, rank, sizes, *call) -> torch.Tensor:
    ranks = communicator_of(a, communicator)
    check_sizes(OP, sizes, [a.shape[0]], [sum(sizes)])
    check_place(OP, ranks, rank, sizes)
    out = result(a, w, sizes[rank])
    _run([a], [w], [out], tensors, scalars, text, ranks, sizes, *call)
    return out


def _run_list(a, w, tensors, scalars, text, communicator, sizes, *call) -> list[torch.Tensor]:
    check_sizes(OP, sizes, [x.shape[0] for x in a], [sum(sizes)] * len(sizes))
    outs = results(a, w, sizes)
    _run(a, w, outs, tensors, scalars, text, communicator_of(a, communicator), sizes, *call)
    return outs


for _key in ("CPU", "CUDA"):
    library.impl(NAME, run_process, _key)
    library.impl(f"{NAME}_list", _run_list, _key)


@torch.library.register_fake(f"graphar::{NAME}", lib=library)
def _(a, w, tensors, scalars, text, communicator, rank, sizes, *call):
    return result(a, w, sizes[rank])


@torch.library.register_fake(f"graphar::{NAME}_list", lib=library)
def _(a, w, tensors, scalars, text, communicator, sizes, *call):
    return results(a, w, sizes)


# ---- autograd: as in epilogue_fused.py, and the gradients of all parts are gathered ---------------------------------


def _backward(ctx, gradient):
    communicator, rank, sizes, *_, timeout_s = ctx.call
    where = communicator, rank, 0, sizes, timeout_s
    a, w, tensors, (product,) = saved(ctx)
    v = ops.reducescatter(product, *where)
    of_v, of_tensors = gradients_of(ctx, v, gradient, list(tensors), ctx.wanted)
    whole = ops.allgather(of_v.to(a[0].dtype), *where)
    (of_a,), (of_w,) = gradients_of_matmuls(ctx, [whole], a, w)
    return of_a, of_w, of_tensors, *no_gradients(ctx)


@in_stream_order
def _backward_list(ctx, gradients):
    communicator, sizes, *_, timeout_s = ctx.call
    a, w, tensors, products = saved(ctx)
    vs = ops.reducescatter_list(products, communicator, 0, sizes, timeout_s)
    of_vs, of_tensors = gradients_of_ranks(ctx, vs, gradients, tensors)
    whole = ops.allgather_list([of_v.to(a[0].dtype) for of_v in of_vs], communicator, 0, timeout_s)
    of_a, of_w = gradients_of_matmuls(ctx, whole, a, w)
    return of_a, of_w, of_tensors, *no_gradients(ctx)


for _op, _rule in ((NAME, _backward), (f"{NAME}_list", _backward_list)):
    torch.library.register_autograd(f"graphar::{_op}", _rule, setup_context=keep_call, lib=library)
