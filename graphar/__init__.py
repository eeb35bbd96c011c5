"""NVLink collectives for PyTorch: exact to the bit, bounded in time, compiled at run time."""

from torch.fx import wrap as _traced_as_one_node

from graphar import ddp, reference
from graphar import epilogue_fused as epilogue_fused  # its ops are known from the start
from graphar import epilogue_fused_scatter as epilogue_fused_scatter  # likewise
from graphar import epilogue_ops as epilogue_ops  # likewise
from graphar import epilogue_scatter as epilogue_scatter  # likewise
from graphar import prefetch_ops as prefetch_ops  # likewise
from graphar import quantized as quantized  # likewise
from graphar import quantized_scatter as quantized_scatter  # likewise
from graphar.algorithms import Algorithm
from graphar.availability import Availability, is_available
from graphar.codecs import Codec
from graphar.communicator import Communicator
from graphar.epilogues.epilogue import Epilogue
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
from graphar.explanation import Explanation
from graphar.fused import fused_matmul_allreduce
from graphar.fused_norm import fused_matmul_allreduce_residual_rmsnorm
from graphar.fused_scatter import fused_matmul_reducescatter
from graphar.graph import compile_pass, disable, enable
from graphar.norm_ops import allreduce_residual_rmsnorm
from graphar.ops import allreduce, empty, explain
from graphar.profiler import profile
from graphar.scatter import allgather, reducescatter

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
