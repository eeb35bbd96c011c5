"""The metadata of a collective in traces of torch.profiler, by the names that Kineto uses for NCCL and gloo.

torch's own backends record it in C++, with an event of the name record_param_comms. The profiler reads that event's
metadata from the thread's debug info, which Python cannot set, and crashes where there is none. Keyword values of an
event reach the trace as well. So graphar's event has a name of its own, and the same keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from graphar.plan.call import Call, Operands
from graphar.ranks.rendezvous import Ranks
from graphar.runtime.plan import Plan


def ranks_of(engine: Ranks) -> list[int]:
    """Returns the ranks of a communicator as ranks in the world; without a group, as ranks of this process."""
    return dist.get_process_group_ranks(engine.group) if engine.group else [*range(engine.world_size)]


def recorded(engine: Ranks, call: Call, ranks: Sequence[Operands], plan: Plan) -> AbstractContextManager[object]:
    """Returns a range of torch's profiler around a call, such as "graphar:allreduce", with the call's metadata.

    The metadata is of the first of this process's ``ranks``. It is in the trace if the profiler records shapes.
    """
    x, out, group = ranks[0].inputs[0], ranks[0].outputs[0], engine.group
    metadata = {
        "Collective name": call.op,
        "In msg nelems": x.numel(),
        "Out msg nelems": out.numel(),
        "dtype": x.type().rpartition(".")[2].removesuffix("Tensor"),  # as Kineto writes it: BFloat16
        "Group size": engine.world_size,
        "Process Group Name": group.group_name if group else "",
        "Process Group Description": group.group_desc if group else "devices of one process",
        "Process Group Ranks": str(ranks_of(engine)),
        "Algorithm": plan.config.algorithm.value,
    }
    return torch._C._profiler._RecordFunctionFast(f"graphar:{call.op}", (), metadata)  # type: ignore[attr-defined]
