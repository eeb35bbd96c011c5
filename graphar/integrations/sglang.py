"""The plugin of SGLang: sums and gathers of tensor-parallel groups by graphar, if the environment has GRAPHAR_SGLANG=1.

SGLang's registry of hooks wraps methods of two of its classes in these functions. ``theirs`` is SGLang's method, and
``coordinator`` its ``self``, which has a communicator of graphar in ``coordinator.graphar``, or None.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from graphar.integrations.collectives import Calls
from graphar.integrations.tensor_parallel import communicator_of, serves
from graphar.runtime.registry import resume, suspend

SWITCH = "GRAPHAR_SGLANG"
COORDINATOR = "sglang.srt.distributed.parallel_state.GroupCoordinator"
WEIGHT_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
TENSOR_PARALLEL = ("tp", "pdmux_prefill_tp", "attention_tp", "shared_experts_tp", "moe_tp")


def register() -> None:
    """Registers the hooks, or leaves SGLang as it is. This is the entry point."""
    if os.environ.get(SWITCH) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for method, hook in HOOKS.items():
        HookRegistry.register(method, hook, HookType.AROUND)


def init(theirs: Callable, coordinator, *args, **kwargs) -> None:
    theirs(coordinator, *args, **kwargs)
    group = coordinator.device_group
    coordinator.graphar = communicator_of(coordinator.unique_name, TENSOR_PARALLEL, group, coordinator.device)


def all_reduce(theirs: Callable, coordinator, input_: torch.Tensor, *method: str) -> torch.Tensor:
    # A compiled call, which has no method yet, stays one op of SGLang's. That runs this with a method, or the next.
    stays = not method and torch.compiler.is_compiling()
    if not stays and serves(coordinator.graphar, input_):
        return coordinator.graphar.allreduce(input_)
    return theirs(coordinator, input_, *method)


def all_reduce_in_place(theirs: Callable, coordinator, input_: torch.Tensor) -> None:
    if serves(coordinator.graphar, input_):
        coordinator.graphar.allreduce(input_, out=input_)
    else:
        theirs(coordinator, input_)


def reduce_scatter_tensor(theirs: Callable, coordinator, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    if not serves(coordinator.graphar, input) or not _fit(coordinator, input, output):
        return theirs(coordinator, output, input)
    Calls(coordinator.graphar).reducescatter([output], [input])
    return output


def all_gather_into_tensor(theirs: Callable, coordinator, output: torch.Tensor, input: torch.Tensor) -> None:
    if serves(coordinator.graphar, input) and _fit(coordinator, output, input):
        Calls(coordinator.graphar).allgather([output], [input])
    else:
        theirs(coordinator, output, input)


def destroy(theirs: Callable, coordinator) -> None:
    if coordinator.graphar is not None:
        coordinator.graphar.close()
        coordinator.graphar = None
    theirs(coordinator)


def release_memory_occupation(theirs: Callable, manager, request) -> object:
    released = theirs(manager, request)
    suspend()  # after SGLang has seen that the server is idle, and saved what it keeps
    return released


def resume_memory_occupation(theirs: Callable, manager, request) -> object:
    resume()  # before new weights are summed or gathered; requests for further memory find it resumed
    return theirs(manager, request)


HOOKS = {
    f"{COORDINATOR}.__init__": init,
    f"{COORDINATOR}.all_reduce": all_reduce,
    f"{COORDINATOR}._all_reduce_out_place": all_reduce,
    f"{COORDINATOR}._all_reduce_in_place": all_reduce_in_place,
    f"{COORDINATOR}._reduce_scatter_tensor": reduce_scatter_tensor,
    f"{COORDINATOR}._all_gather_into_tensor": all_gather_into_tensor,
    f"{COORDINATOR}.destroy": destroy,
    f"{WEIGHT_UPDATER}.release_memory_occupation": release_memory_occupation,
    f"{WEIGHT_UPDATER}.resume_memory_occupation": resume_memory_occupation,
}


def _fit(coordinator, whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether ``part`` is one of the parts of ``whole``, one for each rank."""
    return part.dtype is whole.dtype and part.numel() * coordinator.world_size == whole.numel()
