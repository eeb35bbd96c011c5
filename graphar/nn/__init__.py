"""Tensor-parallel layers that sum with graphar.allreduce; ``import graphar.nn``.

As in torch's tensor parallelism, every rank computes the same loss from the same replicated activations. The gradient
of a replicated tensor is therefore equal on all ranks, and is not summed again.

    x, on all ranks --+-- ColumnParallelLinear --> this rank's features -- RowParallelLinear --+--> y, on all ranks
          gradients: summed                                                     outputs: summed
"""

from graphar.nn.fp8 import Fp8Linear, quantize_rows
from graphar.nn.invariant import Layers, make_tp_invariant
from graphar.nn.layers import ColumnParallelLinear, RowParallelLinear, RowwiseParallel
from graphar.nn.losses import loss_parallel

__all__ = [
    "ColumnParallelLinear",
    "Fp8Linear",
    "Layers",
    "RowParallelLinear",
    "RowwiseParallel",
    "loss_parallel",
    "make_tp_invariant",
    "quantize_rows",
]
