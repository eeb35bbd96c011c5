"""graphar.fused_matmul_allreduce_residual_rmsnorm: a row-parallel linear layer, and the norm that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from graphar.matmul import fused, operands, overlap
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.partitions import BATCH_INVARIANT
from graphar.ops import options
from graphar.ops.allreduce_rmsnorm import OP as NORM
from graphar.ops.allreduce_rmsnorm import added_and_normed, by_result, check_beside, check_number
from graphar.ops.matmul_allreduce import fused_matmul_allreduce
from graphar.ops.register import Op
from graphar.plan import checks
from graphar.plan.matmuls import owned_rows
from graphar.plan.select import has_norm_kernel
from graphar.runtime import residual_norm
from graphar.runtime.engine import Engine, as_taken
from graphar.runtime.registry import Group, engine_name

NAME = "fused_matmul_allreduce_residual_rmsnorm"
PARTITIONS = ("auto", "tiles", "none", BATCH_INVARIANT)


@overload
def fused_matmul_allreduce_residual_rmsnorm(
    a: torch.Tensor,
    w: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    partition: str = "auto",
    group: Group = None,
    timeout_s: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def fused_matmul_allreduce_residual_rmsnorm(
    a: Sequence[torch.Tensor],
    w: Sequence[torch.Tensor],
    residual: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    partition: str = "auto",
    group: Group = None,
    timeout_s: float | None = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...
def fused_matmul_allreduce_residual_rmsnorm(
    a, w, residual, weight, eps=1e-6, *, weight_offset=0.0, partition="auto", group=None, timeout_s=None
):
    """Returns the root-mean-square norm of the sum over all ranks of ``a @ w.T`` plus a residual, and that total.

    Each rank's product is accumulated in fp32 and rounded to its dtype. The products are added in fp32 in rank order,
    and their sum is rounded.
    residual_out = total + residual, rounded to the dtype, where total is the rounded sum;
    normed = (residual_out / sqrt(mean(residual_out**2) + eps)) * (weight + weight_offset), in fp32 and rounded once.
    The mean is over the last dimension (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019).
    ``graphar.reference.fused_matmul_allreduce_residual_rmsnorm`` is the specification, except for the order in which a
    product is accumulated, which depends on the device.

    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in the same order.

    Differentiable. A call that needs gradients takes several kernels.

    Args:
        a: this rank's [..., K], bf16, fp16 or fp32, or a list with one for each device of this process. Shapes are
            equal on all ranks but for K.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. The transpose of a [K, N] tensor is not copied.
        residual: [..., N], of the dtype of ``a``, equal on every rank; it is not changed. For a list a list.
        weight: [N], of the dtype of ``a``, equal on every rank. For a list a list.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        partition: "none": multiply, then sum and norm in one kernel. "tiles": multiply and sum in one kernel, for bf16
            and fp16 on sm_90 and N a multiple of 8, then norm in another. "auto": the choice of the tuning table.
            "batch_invariant": the same by graphar's matmul alone, so that the bits of a row do not depend on how many
            rows there are.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``residual``. For lists, two lists.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        UnsupportedError: partition is "batch_invariant", and the call is not one that "tiles" serves.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    checks.check_call(NAME, "auto", timeout_s)
    if partition not in PARTITIONS:
        raise ValueError(f"{NAME}: partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    in_list = isinstance(a, (list, tuple))
    ranks = _check_lists(a, w, residual, weight) if in_list else [_check(a, w, residual, weight)]
    numbers = check_number(NAME, "eps", eps), check_number(NAME, "weight_offset", weight_offset)
    if torch.is_grad_enabled() and any(one.requires_grad for tensors in ranks for one in tensors):
        total = fused_matmul_allreduce(a, w, partition=partition, group=group, timeout_s=timeout_s)
        return added_and_normed(total, residual, weight, numbers)
    found = OP(a, w, residual, weight, *numbers, engine_name(group, NAME), partition, timeout_s, [])
    return by_result(found, len(a) if in_list else None)


def _check_lists(a: Sequence, w: object, residual: object, weight: object) -> list[tuple]:
    operands.check_operand_lists(NAME, a, w, None)
    for name, given in (("residual", residual), ("weight", weight)):
        checks.check_one_each(NAME, name, given, a, "a")
    return [_check(*of_rank) for of_rank in zip(a, w, residual, weight, strict=True)]


def _check(a: torch.Tensor, w: object, residual: object, weight: object) -> tuple[torch.Tensor, ...]:
    """Checks and returns one rank's tensors."""
    operands.check_operands(NAME, a, w, None)
    if a.dtype not in TYPE_NAMES:
        raise ValueError(f"{NAME}: a must be bfloat16, float16 or float32, got {a.dtype}")
    if not w.shape[0]:
        raise ValueError(f"{NAME}: w must have rows, got the shape {list(w.shape)}")
    shape = (*a.shape[:-1], w.shape[0])
    for name, given, wanted in (("residual", residual, shape), ("weight", weight, shape[-1:])):
        check_beside(NAME, name, given, wanted, a)
    return a, w, residual, weight


def _fake(a, w, residual, weight, given) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(_result(*pair), _result(*pair)) for pair in zip(a, w, strict=True)]


def _result(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], w.shape[0]))


def _run(engine: Engine, a, w, residual, weight, given) -> list[tuple[torch.Tensor, ...]]:
    """Returns each rank's results: normed rows, and the new residual."""
    totals = [_result(*pair) for pair in zip(a, w, strict=True)]
    rows, columns = totals[0].shape[:-1].numel(), w[0].shape[0]
    members, counts = operands.members(a, w, [], totals), owned_rows(rows, engine.world_size)
    has_kernel = has_norm_kernel(columns * a[0].element_size())
    if rows and has_kernel and fused.takes(engine, given.partition, "", members, counts, columns):
        return _normed_tiles(engine, members, counts, totals, residual, weight, given)
    if totals[0].numel():
        products = overlap.products(engine, members, only_own=given.partition == BATCH_INVARIANT)
        totals = [product.view(out.shape) for product, out in zip(products, totals, strict=True)]
    lists = [as_taken(engine, ones) for ones in (totals, residual, weight)]
    shared = {name: getattr(given, name) for name in ("eps", "weight_offset", "communicator", "timeout_s")}
    flat = NORM(*lists, *NORM.arguments(**shared))
    return list(zip(flat[::2], flat[1::2], strict=True))


def _normed_tiles(engine: Engine, members, counts, totals, residual, weight, given) -> list[tuple[torch.Tensor, ...]]:
    """Computes matmul and sum with a fused kernel, and then the norm with another one."""
    for total in totals:
        # Load first: loading beside a kernel that waits for other ranks could hang.
        residual_norm.load(total.device.index, total.dtype)
    fused.allreduce(engine, members, counts, given.timeout_s)
    summed = [torch.empty_like(total) for total in totals]
    for total, *rest in zip(totals, residual, weight, summed, strict=True):
        residual_norm.norm(total, *(one.contiguous() for one in rest), given.eps, given.weight_offset)
    return list(zip(totals, summed, strict=True))


OP = Op(
    NAME,
    ["a", "w", "residual", "weight"],
    f"float eps, float weight_offset, str communicator, str partition, float? timeout_s, {options.AFTER}",
    _run,
    _fake,
    returns="Tensor[]",
)
