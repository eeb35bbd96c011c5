"""NVLink collectives for PyTorch, with results that are exact to the bit and waits that end at a deadline.

allreduce, reducescatter, allgather, alltoall, allreduce_residual_rmsnorm,
reducescatter_residual_rmsnorm                                             collectives
fused_matmul_allreduce, fused_matmul_reducescatter,
fused_matmul_allreduce_residual_rmsnorm,
fused_matmul_reducescatter_residual_rmsnorm, fused_allgather_matmul        matmuls with a collective
cross_entropy, log_probs                                                   losses over a divided vocabulary
Communicator, empty, suspend, resume, explain, profile, is_available       set-up, memory and diagnosis
enable, disable, compile_pass                                              torch.compile
nn, ddp, fsdp                                                              layers; hooks for DDP; fully_shard (FSDP2)
reference                                                                  the specification of every op
simulator                                                                  kernels on the CPU, without a GPU
"""

import types as _types
import typing as _typing

from torch.fx import wrap as _traced_as_one_node

from graphar import ddp, fsdp, reference
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
from graphar.integrations import backend as _backend
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.ops.allgather import allgather
from graphar.ops.allgather_matmul import fused_allgather_matmul
from graphar.ops.alltoall import alltoall
from graphar.ops.empty import empty
from graphar.ops.explain import explain
from graphar.ops.linear import linear
from graphar.ops.losses import LogProbs, cross_entropy, log_probs
from graphar.ops.matmul_sums import fused_matmul_allreduce, fused_matmul_reducescatter
from graphar.ops.norms import (
    allreduce_residual_rmsnorm,
    fused_matmul_allreduce_residual_rmsnorm,
    fused_matmul_reducescatter_residual_rmsnorm,
    reducescatter_residual_rmsnorm,
)
from graphar.ops.sums import allreduce, reducescatter
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Explanation
from graphar.plan.outside import load_algorithm
from graphar.plan.scratch import Scratch
from graphar.runtime.availability import Availability, is_available
from graphar.runtime.registry import resume, stats, suspend
from graphar.runtime.watch import hook as _hook
from graphar.runtime.watch import logs as _logs
from graphar.runtime.watch.profiler import profile
from graphar.runtime.watch.stats import CallStats, Memory, MemoryUse, Stats

if _typing.TYPE_CHECKING:
    from graphar import nn as nn
    from graphar import simulator as simulator

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Availability",
    "CallStats",
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
    "LogProbs",
    "Memory",
    "MemoryUse",
    "Scratch",
    "Stats",
    "TimeoutRecord",
    "UnsupportedError",
    "allgather",
    "allreduce",
    "allreduce_residual_rmsnorm",
    "alltoall",
    "compile_pass",
    "cross_entropy",
    "ddp",
    "disable",
    "empty",
    "enable",
    "explain",
    "fsdp",
    "fused_allgather_matmul",
    "fused_matmul_allreduce",
    "fused_matmul_allreduce_residual_rmsnorm",
    "fused_matmul_reducescatter",
    "fused_matmul_reducescatter_residual_rmsnorm",
    "is_available",
    "linear",
    "load_algorithm",
    "log_probs",
    "nn",
    "profile",
    "reducescatter",
    "reducescatter_residual_rmsnorm",
    "reference",
    "resume",
    "simulator",
    "stats",
    "suspend",
]

for _name in {*__all__} - {"empty", "explain"}:
    _op = globals().get(_name)
    if isinstance(_op, _types.FunctionType) and _op.__module__.startswith("graphar.ops."):
        _traced_as_one_node(_name)  # torch.fx.symbolic_trace then records each call as one node

_backend.register()  # torch.distributed's backend "graphar"
_logs.start()
_hook.start_nvtx()


if not _typing.TYPE_CHECKING:  # else every name would pass a type checker

    def __getattr__(name):
        # Imported at first use: graphar.nn imports torch's tensor parallelism, which takes half a second, and few
        # programs need the simulator.
        if name in ("nn", "simulator"):
            from importlib import import_module

            return import_module(f"graphar.{name}")
        # torch.distributed's spelling: all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_gather_single
        meant = name.removesuffix("_single").removesuffix("_tensor").removesuffix("_into").replace("_", "")
        hint = f"; graphar.{meant} is meant" if meant != name and meant in __all__ else ""
        raise AttributeError(f"module 'graphar' has no attribute {name!r}{hint}")
