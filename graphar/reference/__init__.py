"""The specification of every op in plain torch, which runs on the CPU too. Written to be read, not to be fast."""

from graphar.numerics.fp8_products import scaled_linear
from graphar.reference.losses import cross_entropy, log_probs
from graphar.reference.products import (
    fused_allgather_matmul,
    fused_matmul_allreduce,
    fused_matmul_allreduce_residual_rmsnorm,
    fused_matmul_reducescatter,
    fused_matmul_reducescatter_residual_rmsnorm,
    linear,
    rounded_after,
    widened,
    with_bias,
)
from graphar.reference.sums import (
    allgather,
    allreduce,
    allreduce_residual_rmsnorm,
    alltoall,
    hierarchical_allreduce,
    hierarchical_reducescatter,
    quantized_allreduce,
    quantized_reducescatter,
    reducescatter,
    reducescatter_residual_rmsnorm,
)

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_residual_rmsnorm",
    "alltoall",
    "cross_entropy",
    "fused_allgather_matmul",
    "fused_matmul_allreduce",
    "fused_matmul_allreduce_residual_rmsnorm",
    "fused_matmul_reducescatter",
    "fused_matmul_reducescatter_residual_rmsnorm",
    "hierarchical_allreduce",
    "hierarchical_reducescatter",
    "linear",
    "log_probs",
    "quantized_allreduce",
    "quantized_reducescatter",
    "reducescatter",
    "reducescatter_residual_rmsnorm",
    "rounded_after",
    "scaled_linear",
    "widened",
    "with_bias",
]
