"""NVLink collectives for PyTorch: exact to the bit, bounded in time, compiled at run time."""

from torch.fx import wrap as _traced_as_one_node

from graphar import ddp, reference
from graphar.communicator import Communicator
from graphar.errors import (
    CollectiveTimeout,
    CommunicatorError,
    CompileError,
    ConcurrentCallError,
    DriverError,
    GrapharError,
    TimeoutRecord,
    UnsupportedError,
)
from graphar.graph import compile_pass, disable, enable
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.ops import epilogue_fused as epilogue_fused
from graphar.ops import epilogue_fused_scatter as epilogue_fused_scatter
from graphar.ops import epilogue_ops as epilogue_ops
from graphar.ops import epilogue_scatter as epilogue_scatter
from graphar.ops import prefetch_ops as prefetch_ops
from graphar.ops import quantized as quantized
from graphar.ops import quantized_scatter as quantized_scatter
from graphar.ops.fused import fused_matmul_allreduce
from graphar.ops.fused_norm import fused_matmul_allreduce_residual_rmsnorm
from graphar.ops.fused_scatter import fused_matmul_reducescatter
from graphar.ops.norm_ops import allreduce_residual_rmsnorm
from graphar.ops.ops import allreduce, empty, explain
from graphar.ops.scatter import allgather, reducescatter
from graphar.plan.algorithms import Algorithm
from graphar.plan.explanation import Explanation
from graphar.profiler import profile
from graphar.runtime.availability import Availability, is_available

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Availability",
    "Codec",
    "CollectiveTimeout",
    "Communicator",
    "CommunicatorError",
    "CompileError",
    "ConcurrentCallError",
    "DriverError",
    "Epilogue",
    "Explanation",
    "GrapharError",
    "TimeoutRecord",
    "UnsupportedError",
    "allgather",
    "allreduce",
    "allreduce_residual_rmsnorm",
    "compile_pass",
    "ddp",
    "disable",
    "empty",
    "enable",
    "explain",
    "fused_matmul_allreduce",
    "fused_matmul_allreduce_residual_rmsnorm",
    "fused_matmul_reducescatter",
    "is_available",
    "profile",
    "reducescatter",
    "reference",
]

for _op in (
    "allgather",
    "allreduce",
    "allreduce_residual_rmsnorm",
    "fused_matmul_allreduce",
    "fused_matmul_allreduce_residual_rmsnorm",
    "fused_matmul_reducescatter",
    "reducescatter",
):
    _traced_as_one_node(_op)  # by torch.fx.symbolic_trace, of models that call graphar.allreduce and the like
