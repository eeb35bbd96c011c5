"""A matmul, the all-reduce of its result, residual and norm as one op: a row-parallel linear layer and its norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.matmul import operands, overlap, tiles
from graphar.numerics.norms import add_and_norm
from graphar.ops.fused import flat, fused_matmul_allreduce, members, result
from graphar.ops.ops import communicator_of, library
from graphar.plan import checks
from graphar.plan.choice import has_norm_kernel
from graphar.runtime.catalogue import TYPE_NAMES
from graphar.runtime.registry import communicator_name

OP = "fused_matmul_allreduce_residual_rmsnorm"
PARTITIONS = ("auto", "tiles", "none")
_CALL = "float eps, float weight_offset, str communicator, str partition, float? timeout_s"
CALL = f"Tensor w, Tensor residual, Tensor weight, {_CALL}"  # of one rank's op, after its first tensor
library.define(f"{OP}(Tensor a, {CALL}) -> (Tensor, Tensor)")
library.define(
    f"{OP}_list(Tensor[] a, Tensor[] w, Tensor[] residual, Tensor[] weight, {_CALL}) -> (Tensor[], Tensor[])"
)
ops = torch.ops.graphar


def fused_matmul_allreduce_residual_rmsnorm(
    a: torch.Tensor | Sequence[torch.Tensor],
    w: torch.Tensor | Sequence[torch.Tensor],
    residual: torch.Tensor | Sequence[torch.Tensor],
    weight: torch.Tensor | Sequence[torch.Tensor],
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    partition: str = "auto",
    group: dist.ProcessGroup | Communicator | None = None,
    timeout_s: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The sum over all ranks of ``a @ w.T``, plus the residual, and the root-mean-square norm of that.

    It gives the bits of :func:`allreduce_residual_rmsnorm` of each rank's product, which is added up and rounded as
    :func:`fused_matmul_allreduce` says; ``graphar.reference.fused_matmul_allreduce_residual_rmsnorm`` is the
    specification. Collective and in two forms as these. Differentiable; with gradients it is done in parts.

    Args:
        a: this rank's [..., K], or one a device of this process; equal on all ranks but for K. bf16, fp16 or fp32.
        w: this rank's [N, K], as torch.nn.Linear stores it, or the transpose of a [K, N] tensor, which is not copied.
        residual: [..., N], of the same dtype and the same on every rank; not changed.
        weight: [N], likewise.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that keep weights less one.
        partition: "none" multiplies, and has the rest done by one kernel. "tiles", where :func:`fused_matmul_allreduce`
            has it, multiplies and sums in one kernel, and norms in another. "auto" takes that where it was faster.
        group: a process group or Communicator; None is the default group, or a communicator of the list's devices.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``residual``; of lists, two lists.

    Raises:
        TypeError, ValueError: an argument breaks a rule; nothing was sent.
        CollectiveTimeout: an earlier call of this communicator waited past its deadline.
    """
    checks.check_call(OP, "auto", timeout_s)
    if partition not in PARTITIONS:
        raise ValueError(f"{OP}: partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    in_list = isinstance(a, (list, tuple))
    ranks = _check_lists(a, w, residual, weight) if in_list else [_check(a, w, residual, weight)]
    numbers = _finite("eps", eps), _finite("weight_offset", weight_offset)
    if torch.is_grad_enabled() and any(one.requires_grad for tensors in ranks for one in tensors):
        total = fused_matmul_allreduce(a, w, partition=partition, group=group, timeout_s=timeout_s)
        if not in_list:
            return add_and_norm(total, residual, weight, *numbers)
        return _by_result(add_and_norm(*one, *numbers) for one in zip(total, residual, weight, strict=True))
    op = ops.fused_matmul_allreduce_residual_rmsnorm_list if in_list else ops.fused_matmul_allreduce_residual_rmsnorm
    return op(a, w, residual, weight, *numbers, communicator_name(group), partition, timeout_s)


def _check_lists(a: Sequence, w: object, residual: object, weight: object) -> list[tuple]:
    operands.check_operand_lists(OP, a, w, None)
    for name, given in (("residual", residual), ("weight", weight)):
        if not isinstance(given, (list, tuple)) or len(given) != len(a):
            raise ValueError(f"{OP}: {name} must be a list of {len(a)} tensors, one for each of a")
    return [_check(*of_rank) for of_rank in zip(a, w, residual, weight, strict=True)]


def _check(a: torch.Tensor, w: object, residual: object, weight: object) -> tuple[torch.Tensor, ...]:
    """One rank's tensors, which may be multiplied, added and normed."""
    operands.check_operands(OP, a, w, None)
    if a.dtype not in TYPE_NAMES:
        raise ValueError(f"{OP}: a must be bfloat16, float16 or float32, got {a.dtype}")
    if not w.shape[0]:
        raise ValueError(f"{OP}: w must have rows, got the shape {list(w.shape)}")
    shape = (*a.shape[:-1], w.shape[0])
    for name, given, wanted in (("residual", residual, shape), ("weight", weight, shape[-1:])):
        checks.check_tensor(OP, name, given)
        if (tuple(given.shape), given.dtype, given.device) != (wanted, a.dtype, a.device):
            raise ValueError(
                f"{OP}: {name} must be {list(wanted)} {a.dtype} on {a.device}, got {list(given.shape)} {given.dtype} "
                f"on {given.device}"
            )
    return a, w, residual, weight


def _finite(name: str, number: object) -> float:
    # Compared, since a compiler does not know math.isfinite.
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not -math.inf < number < math.inf:
        raise ValueError(f"{OP}: {name} must be a finite number, got {number!r}")
    return float(number)


def _by_result(of_ranks) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    normed, summed = zip(*of_ranks, strict=True)
    return list(normed), list(summed)


# ---- implementations ------------------------------------------------------------------------------------------------


def _in_tiles(ranks: Communicator, a, w, residual, weight, numbers, partition: str, timeout_s) -> list[tuple] | None:
    """The results of this process's ranks, of sums in tiles that are normed then; None: not for this call."""
    rows, columns = a[0].shape[:-1].numel(), w[0].shape[0]
    counts, first = tiles.owned_rows(rows, ranks.world_size), overlap.Operands(flat(a[0]), w[0], None, None)
    taken = rows and tiles.takes(ranks, partition, "", [first], counts, columns)
    if not taken or not has_norm_kernel(columns * a[0].element_size()):
        return None
    from graphar.runtime import residual_norm

    for one in a:
        residual_norm.load(one.device.index, one.dtype)
    totals = [result(*pair) for pair in zip(a, w, strict=True)]
    tiles.allreduce(ranks, members(a, w, [], totals), counts, timeout_s)
    summed = [torch.empty_like(total) for total in totals]
    for total, *rest in zip(totals, residual, weight, summed, strict=True):
        residual_norm.norm(total, *(one.contiguous() for one in rest), *numbers)
    return list(zip(totals, summed, strict=True))


def _products(a: Sequence[torch.Tensor], w: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    outs = [result(*pair) for pair in zip(a, w, strict=True)]
    if not outs[0].numel():
        return outs
    members = [overlap.Operands(flat(x), weight, None, None) for x, weight in zip(a, w, strict=True)]
    return [product.view(out.shape) for product, out in zip(overlap.products(members), outs, strict=True)]


def run_process(a, w, residual, weight, eps, weight_offset, communicator, partition, timeout_s):
    ranks = communicator_of(a, communicator)
    if found := _in_tiles(ranks, [a], [w], [residual], [weight], (eps, weight_offset), partition, timeout_s):
        return found[0]
    (product,) = _products([a], [w])
    return ops.allreduce_residual_rmsnorm(product, residual, weight, eps, weight_offset, communicator, timeout_s)


def _run_list(a, w, residual, weight, eps, weight_offset, communicator, partition, timeout_s):
    ranks = communicator_of(a, communicator)
    if found := _in_tiles(ranks, a, w, residual, weight, (eps, weight_offset), partition, timeout_s):
        return _by_result(found)
    call = (eps, weight_offset, communicator, timeout_s)
    return ops.allreduce_residual_rmsnorm_list(_products(a, w), residual, weight, *call)


for _key in ("CPU", "CUDA"):
    library.impl(OP, run_process, _key)
    library.impl(f"{OP}_list", _run_list, _key)


@torch.library.register_fake(f"graphar::{OP}", lib=library)
def _(a, w, *call):
    return result(a, w), result(a, w)


@torch.library.register_fake(f"graphar::{OP}_list", lib=library)
def _(a, w, *call):
    return [result(*pair) for pair in zip(a, w, strict=True)], [result(*pair) for pair in zip(a, w, strict=True)]
