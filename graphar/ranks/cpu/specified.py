"""Calls that name an algorithm with a specification of its own, without kernels: gathered inputs and the function.

:func:`over_group` and :func:`in_process` return a function of the operands of this process's ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.row import Specification
from graphar.ranks.cpu import fallback
from graphar.ranks.cpu.fallback import Run
from graphar.ranks.cpu.messages import Messages


def specification_of(call: Call) -> Specification | None:
    """Returns what a call computes by the algorithm that it names, if that is not what the op specifies."""
    return None if call.algorithm == "auto" else Algorithm(call.algorithm).row.specification


def over_group(call: Call, specification: Specification, group: dist.ProcessGroup | Messages, timeout_s: float) -> Run:
    """Returns the function of a call over a process group. It raises what fallback.allgather raises."""

    def run(ranks: Sequence[Operands]) -> None:
        (own,) = ranks
        x, joins = own.inputs[0], call.op == "allgather"
        counts, shape = (call.work.parts, (-1, *x.shape[1:])) if joins else ([x.numel()] * group.size(), x.shape)
        gathered = x.new_empty(sum(counts))
        fallback.allgather(x, gathered, group, timeout_s, counts)
        results = _results(call, specification, [part.view(shape) for part in gathered.split(counts)])
        _put(call, results[group.rank()], own.outputs[0])

    return run


def in_process(call: Call, specification: Specification) -> Run:
    """Returns the function of a call whose ranks are all in this process."""

    def run(ranks: Sequence[Operands]) -> None:
        outs = [own.outputs[0] for own in ranks]
        made = {  # computed before anything is written: an output may be an input
            device: _results(call, specification, [own.inputs[0].to(device, copy=True) for own in ranks])
            for device in dict.fromkeys(out.device for out in outs)
        }
        for rank, out in enumerate(outs):
            _put(call, made[out.device][rank], out)

    return run


def _results(call: Call, specification: Specification, xs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns each rank's result. ``xs`` are copies of the ranks' tensors, which the function may overwrite."""
    found = specification(xs)
    results = [found] * len(xs) if isinstance(found, torch.Tensor) else found
    if len(results) != len(xs):
        raise ValueError(f"{call.op}: {call.algorithm} has a specification that gives {len(results)} results")
    return results


def _put(call: Call, result: torch.Tensor, out: torch.Tensor) -> None:
    if (result.numel(), result.dtype) != (out.numel(), out.dtype):
        found, wanted = (f"{list(one.shape)} {one.dtype}" for one in (result, out))
        raise ValueError(f"{call.op}: {call.algorithm} has a specification that gives {found} in place of {wanted}")
    out.view(-1).copy_(result.reshape(-1))
