"""graphar.fused_matmul_reducescatter_residual_rmsnorm: a matmul, each rank's rows of the sum, and the norm of these."""

from __future__ import annotations

from functools import partial

from graphar.ops import matmul_gradients, matmul_norms
from graphar.ops.matmul_operands import UNSCALED
from graphar.ops.options import T
from graphar.ops.register import Op
from graphar.ops.repeats import repeated
from graphar.runtime.registry import Group

NAME = "fused_matmul_reducescatter_residual_rmsnorm"


def fused_matmul_reducescatter_residual_rmsnorm(
    a: T,
    w: T,
    residual: T,
    weight: T,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    partition: matmul_norms.NormPartition = "auto",
    group: Group = None,
    a_scale: T | None = None,
    w_scale: T | None = None,
    timeout_s: float | None = None,
) -> tuple[T, T]:
    """Returns the root-mean-square norm of this rank's rows of the sum of ``a @ w.T`` plus a residual, and that total.

    The rows are split as by :func:`fused_matmul_reducescatter`: lengths differ by at most one, and earlier ranks have
    the longer parts. Each rank's product is accumulated in fp32 and rounded to its dtype. The products are added in
    fp32 in rank order, and their sum is rounded. residual_out and normed are then computed as by
    :func:`reducescatter_residual_rmsnorm`.
    ``graphar.reference.fused_matmul_reducescatter_residual_rmsnorm`` is the specification, except for the order in
    which a product is accumulated, which depends on the device.

    Ranks are processes if ``a`` is a tensor, and the devices of this process if ``a`` is a list. Collective: every rank
    makes the same calls in the same order.

    Differentiable.

    Args:
        a: this rank's [M, ..., K], bf16, fp16 or fp32, or with scales torch.float8_e4m3fn, or a list with one for each
            device of this process. Shapes are equal on all ranks but for K.
        w: this rank's [N, K], as torch.nn.Linear stores its weight. The transpose of a [K, N] tensor is not copied.
        residual: [M_r, ..., N], this rank's rows, of the dtype of ``a``, or with scales bf16 or fp16; it is not
            changed. M_r is the length of this rank's part. For a list a list.
        weight: [N], of the dtype of ``residual``. For a list a list.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        partition: "none": multiply, then sum and norm in one kernel. "tiles": multiply and sum in one kernel, for
            16-bit results on sm_90 and N a multiple of 8, then norm in another. "auto": the choice of the tuning table.
            "batch_invariant": as "auto", but only with graphar's matmul, so that the bits of a row do not depend on the
            number of rows. "tp_invariant": leaves of K added in fp32 as a tree, and the residual to that sum, rounded
            once: the same bits, also of gradients, on 1, 2, 4 and 8 ranks, with equal K.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        a_scale: fp32 scales of ``a`` in torch.float8_e4m3fn, with any strides: of rows [..., 1], or one number; of
            blocks of 128 columns [..., ceil(K / 128)]. For a list a list. Products are those of
            ``graphar.reference.scaled_linear``, rounded to the dtype of ``residual``, which is bf16 or fp16; there are
            no gradients. None: no scales.
        w_scale: fp32 scales of ``w`` in torch.float8_e4m3fn, of the same format: of rows [N, 1], [1, N], or one number;
            of blocks of 128 x 128 [ceil(N / 128), ceil(K / 128)]. For a list a list.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``residual``. For lists, two lists.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        UnsupportedError: partition is "batch_invariant" or "tp_invariant", and graphar's matmul cannot serve it.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    scaled = UNSCALED
    if a_scale is not None or w_scale is not None:
        scaled = matmul_norms.scaled(NAME, a, a_scale, w_scale, residual)
    kinds = type(eps), type(weight_offset), type(timeout_s)
    asked = (a, w, *scaled.scales, residual, weight), (eps, weight_offset, partition, timeout_s, kinds), None
    if (found := repeated(NAME, group, *asked)) is not None:
        return found
    return matmul_norms.call(OP, asked, group, scaled, eps, weight_offset, partition, timeout_s)


def _backward(ctx, gradients):
    """Returns the gradients. Rounding is treated as the identity."""
    where = {name: ctx.given[name] for name in ("communicator", "rank", "sizes", "timeout_s")}
    saved, _ = OP.saved(ctx)
    of_rows, of_weights = matmul_gradients.of_norms(ctx, saved, gradients, own_rows=True)
    return *matmul_gradients.of_parts(ctx, of_rows, *saved[:2], where), of_rows, of_weights, {}


OP = Op(
    NAME,
    ["a", "w", "residual", "weight"],
    matmul_norms.ArgumentsOfParts,
    partial(matmul_norms.run, NAME),
    matmul_norms.fake,
    check=partial(matmul_norms.check_parts, NAME),
    backward=_backward,
    saved=matmul_norms.saved,
    saved_result=1,
    returns="Tensor[]",
)
