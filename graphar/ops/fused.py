"""A matmul and the all-reduce of its result as one op: schema, implementations, fake, autograd; and what users call.

An op takes the codec as text, or nothing, as in quantized.py.
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
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.ops.ops import communicator_of, deliver, is_plain, library, target_of
from graphar.ops.prefetch_ops import hint_of, hints_of_list, is_memory
from graphar.ops.quantized import text_of
from graphar.plan import checks
from graphar.runtime.registry import communicator_name

OP = "fused_matmul_allreduce"
_CALL = "str communicator, str partition, int? num_partitions, str codec, float? timeout_s"
CALL = f"Tensor w, Tensor? bias, {_CALL}, Tensor? prefetch=None"  # of one rank's op, after its first tensor
_LISTS = "Tensor[] a, Tensor[] w, Tensor[] bias"
library.define(f"{OP}(Tensor a, {CALL}) -> Tensor")
library.define(f"{OP}_out(Tensor a, Tensor w, Tensor? bias, Tensor(a!) out, {_CALL}, Tensor? prefetch=None) -> ()")
library.define(f"{OP}_list({_LISTS}, {_CALL}, Tensor[] prefetch) -> Tensor[]")
library.define(f"{OP}_list_out({_LISTS}, Tensor(a!)[] outs, {_CALL}, Tensor[] prefetch) -> ()")
ops = torch.ops.graphar


def fused_matmul_allreduce(
    a: torch.Tensor | Sequence[torch.Tensor],
    w: torch.Tensor | Sequence[torch.Tensor],
    *,
    bias: torch.Tensor | Sequence[torch.Tensor] | None = None,
    partition: str = "auto",
    num_partitions: int | None = None,
    codec: Codec | str | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    prefetch: torch.Tensor | Sequence[torch.Tensor] | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """The sum over all ranks of ``a @ w.T``, and ``bias``, on every rank: a row-parallel linear layer.

    Each rank's product is added up in fp32 (of fp64 in fp64) and rounded to its dtype; products are summed as by
    :func:`allreduce`, ``bias`` is added to the sum, once and not by each rank, and that is rounded.
    ``graphar.reference.fused_matmul_allreduce`` is the specification, but for the order in which a product is added up:
    that is the GPU's, or the CPU's. Collective and in two forms as :func:`allreduce`.

    Differentiable. Where ``a`` is a tensor, the gradient of the result is taken to be the same on all ranks, as in
    tensor parallelism, where all compute one loss from it: those of ``a`` and ``w`` are a matmul each, that of ``bias``
    is a sum of rows, and nothing is exchanged. Where it is a list, one process has all results, whose gradients may
    differ: they are summed by :func:`allreduce` first.

    Args:
        a: this rank's [..., K], or one a device of this process; equal on all ranks but for K. bf16, fp16, fp32, fp64.
        w: this rank's [N, K], as torch.nn.Linear stores it, or the transpose of a [K, N] tensor, which is not copied.
        bias: [N], alike on all ranks; for lists one a device. Unless in tiles, with one fp32 travels for 16 bits, too.
        partition: "split_m" cuts the rows of ``a``, "split_n" those of ``w``; while one partition is summed, the next
            is multiplied. "tiles" does all in one kernel, which sends each tile to the rank that sums it, or a small
            result to all: bf16, fp16, GPUs of sm_90, columns in eights; codecs to nearest, absmax, with rows of whole
            buckets of 32 or 64. "none", and "tiles" elsewhere, does one after the other. "auto": what was faster.
        num_partitions: of cuts, of one size but for the last; columns in eights. None: 4, if there are as many.
        codec: what goes over the links in place of the elements, as for :func:`allreduce`; each partition is a call of
            its own, so cuts change bits. Without one they do only where they change the matmul: below 64 rows and from
            2048 on "none" takes torch's, but "tiles", and from 64 rows on cuts, graphar's.
        epilogue: elementwise work on the fp32 sum and ``bias``, before it is rounded, as for :func:`allreduce`: of
            places in the result, and with a bias of at most three tensors. Not with a codec; for bf16, fp16 and fp32.
            The gradient then needs the sum, which another matmul and all-reduce make again.
        group: a process group or Communicator; None is the default group, or a communicator of the list's devices.
        out: where to write the result, apart from the operands. Not differentiable.
        prefetch: a hint, as for :func:`allreduce`, to the last sum; in tiles, with a codec or an epilogue ignored.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the communicator's.

    Returns:
        A contiguous tensor [..., N] (for a list: one a device), or ``out``.

    Raises:
        TypeError, ValueError: an argument breaks a rule; nothing was sent.
        CollectiveTimeout: an earlier call of this communicator waited past its deadline.
    """
    if timeout_s is not None:
        checks.check_timeout(OP, timeout_s)
    name, cut = communicator_name(group), (partition, num_partitions)
    if epilogue is not None:
        return _with_epilogue(a, w, bias, out, codec, epilogue, (name, *cut, timeout_s))
    call = (name, *cut, text_of(OP, codec, None) if codec is not None else "", timeout_s)
    return (_fused_list if isinstance(a, (list, tuple)) else _fused_tensor)(a, w, bias, out, call, prefetch)


def _with_epilogue(a, w, bias, out, codec, epilogue: object, call: tuple) -> torch.Tensor | list[torch.Tensor]:
    from graphar.ops import epilogue_fused

    check_alone(OP, codec)
    return epilogue_fused.allreduce(a, w, bias, out, epilogue, call)


def check_alone(op: str, codec: object) -> None:
    """Refuses a codec beside an epilogue."""
    if codec is not None:
        raise ValueError(f"{op}: takes a codec or an epilogue, not both")


def _fused_tensor(a, w, bias, out, call: tuple, prefetch) -> torch.Tensor:
    operands.check_operands(OP, a, w, bias)
    plain = is_plain(a) and is_plain(w) and (bias is None or is_plain(bias))
    if prefetch is not None:
        plain, prefetch = plain and is_memory(prefetch), hint_of(OP, a, prefetch)
    if out is None:
        return (run_process if plain else ops.fused_matmul_allreduce)(a, w, bias, *call, prefetch)
    operands.check_result(OP, a, w, bias, out)
    op = _run_process_out if plain and is_plain(out) else ops.fused_matmul_allreduce_out
    op(a, w, bias, out, *call, prefetch)
    return out


def _fused_list(a, w, bias, outs, call: tuple, prefetch) -> list[torch.Tensor]:
    operands.check_operand_lists(OP, a, w, bias)
    biases = [] if bias is None else bias
    following = [] if prefetch is None else hints_of_list(OP, a, prefetch)
    if outs is None:
        return ops.fused_matmul_allreduce_list(*map(with_own_nodes, (a, w, biases)), *call, following)
    operands.check_results(OP, a, w, bias, outs)
    ops.fused_matmul_allreduce_list_out(a, w, biases, outs, *call, following)
    return list(outs)


# ---- implementations ------------------------------------------------------------------------------------------------


def run(a, w, bias, outs, communicator, partition, num_partitions, codec, timeout_s, prefetch, epilogue=None) -> None:
    """Of this process's ranks, as lists; each of ``outs`` is contiguous."""
    if codec:
        checks.check_quantized_call(OP, codec, "auto", a[0])
    m, n = outs[0].shape[:-1].numel(), outs[0].shape[-1]
    panels = partitions.panels(OP, partition, num_partitions, [m], n)
    if not m or not n:
        return
    mine, owned = members(a, w, bias, outs, prefetch), tiles.owned_rows(m, communicator.world_size)
    if tiles.takes(communicator, partition, codec, mine, owned, n, scattered=epilogue is not None):
        tiles.allreduce(communicator, mine, owned, timeout_s, epilogue, codec)
    else:
        overlap.allreduce(communicator, mine, panels, codec, timeout_s, epilogue=epilogue)


def members(a, w, bias, outs, prefetch=()) -> list[overlap.Operands]:
    """This process's ranks, with the leading dimensions of ``a`` and its result as one."""
    return [
        overlap.Operands(flat(x), weight, bias[rank] if bias else None, flat(out), prefetch[rank] if prefetch else None)
        for rank, (x, weight, out) in enumerate(zip(a, w, outs, strict=True))
    ]


def flat(x: torch.Tensor) -> torch.Tensor:
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def result(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], w.shape[0]))


def run_process(a, w, bias, communicator, *call) -> torch.Tensor:
    out = result(a, w)
    _run_one(a, w, bias, out, communicator, *call)
    return out


def _run_one(a, w, bias, out, communicator, partition, num_partitions, codec, timeout_s, prefetch=None) -> None:
    biases, following = ([] if one is None else [one] for one in (bias, prefetch))
    call = partition, num_partitions, codec, timeout_s
    run([a], [w], biases, [out], communicator_of(a, communicator), *call, following)


def _run_process_out(a, w, bias, out, communicator, *call) -> None:
    operands.check_result_memory(OP, a, w, bias, out)
    target = target_of(out)
    _run_one(a, w, bias, target, communicator, *call)
    deliver(target, out)


def _run_list(a, w, bias, communicator, *call) -> list[torch.Tensor]:
    outs = [result(*pair) for pair in zip(a, w, strict=True)]
    run(a, w, bias, outs, communicator_of(a, communicator), *call)
    return outs


def _run_list_out(a, w, bias, outs, communicator, *call) -> None:
    checks.check_distinct(OP, "out", outs)
    for rank, out in enumerate(outs):
        operands.check_result_memory(OP, a[rank], w[rank], bias[rank] if bias else None, out)
    targets = [target_of(out) for out in outs]
    run(a, w, bias, targets, communicator_of(a, communicator), *call)
    for target, out in zip(targets, outs, strict=True):
        deliver(target, out)


_IMPLEMENTATIONS = {OP: run_process, f"{OP}_out": _run_process_out, f"{OP}_list": _run_list}
_IMPLEMENTATIONS[f"{OP}_list_out"] = _run_list_out
for _op, _implementation in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_op, _implementation, _key)


@torch.library.register_fake(f"graphar::{OP}", lib=library)
def _(a, w, bias, *call):
    return result(a, w)


@torch.library.register_fake(f"graphar::{OP}_list", lib=library)
def _(a, w, bias, *call):
    return [result(*pair) for pair in zip(a, w, strict=True)]


@torch.library.register_fake(f"graphar::{OP}_out", lib=library)
@torch.library.register_fake(f"graphar::{OP}_list_out", lib=library)
def _(a, w, bias, outs, *call):
    return None


# ---- autograd -------------------------------------------------------------------------------------------------------


def _keep(ctx, inputs, output) -> None:
    a, w, _, *ctx.call, _ = inputs
    ctx.save_for_backward(a, w)


def _backward(ctx, gradient):
    of_operands = matmul_gradients(gradient, *ctx.saved_tensors, ctx.needs_input_grad)
    return *of_operands, *[None] * len(ctx.call), None


def matmul_gradients(gradient, a, w, needed):
    """Those of ``a``, ``w`` and ``bias``, where ``needed``, of ``a @ w.T + bias``."""
    rows = flat(gradient)
    of_a = (rows @ w).view(a.shape) if needed[0] else None
    of_w = rows.t() @ flat(a) if needed[1] else None
    return of_a, of_w, rows.sum(0) if needed[2] else None


def keep_list(ctx, inputs, output) -> None:
    a, w, ctx.bias, *ctx.call = inputs
    ctx.save_for_backward(*a, *w)


def list_gradients(ctx, of_products, of_biases):
    """As :func:`matmul_gradients`, for lists; what the products get is not what the biases do."""
    a, w, bias = ctx.needs_input_grad[:3]
    size = len(of_products)
    saved = ctx.saved_tensors
    found = [
        matmul_gradients(gradient, saved[rank], saved[size + rank], (a[rank], w[rank], False))
        for rank, gradient in enumerate(of_products)
    ]
    of_bias = [flat(gradient).sum(0) if needed else None for gradient, needed in zip(of_biases, bias, strict=False)]
    return [one[0] for one in found], [one[1] for one in found], of_bias, *[None] * len(ctx.call)


def _keep_list(ctx, inputs, output) -> None:
    *inputs, prefetch = inputs
    keep_list(ctx, inputs, output)
    ctx.hints = len(prefetch)


@in_stream_order
def _backward_list(ctx, gradients):
    communicator, *_, timeout_s = ctx.call
    summed = torch.ops.graphar.allreduce_list(gradients, communicator, "auto", timeout_s)
    return *list_gradients(ctx, summed, gradients), [None] * ctx.hints


torch.library.register_autograd(f"graphar::{OP}", _backward, setup_context=_keep, lib=library)
torch.library.register_autograd(f"graphar::{OP}_list", _backward_list, setup_context=_keep_list, lib=library)
