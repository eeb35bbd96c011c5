"""The plugin of vLLM: sums and gathers of tensor-parallel groups by graphar, if the environment has GRAPHAR_VLLM=1.

vLLM asks each platform for the class of its communicators. The plugin adds a platform: vLLM's own for this machine, with
another such class. That class is vLLM's too, but for the three collectives of :class:`TensorParallel`.
"""

from __future__ import annotations

import os
from importlib import import_module

import torch

from graphar.communicator import Communicator
from graphar.integrations.tensor_parallel import communicator_of, is_tensor_parallel, serves

SWITCH = "GRAPHAR_VLLM"


def platform() -> str | None:
    """Returns the name of the platform's class, or None to leave vLLM as it is: an entry point of vLLM."""
    if os.environ.get(SWITCH) != "1" or _name_of_own_platform() is None:
        return None
    return f"{__name__}.Platform"


class TensorParallel:
    """The collectives that are graphar's: a base before the class of vLLM's communicators, which makes all other calls.

    vLLM captures these calls in CUDA graphs. They need no context for that: every kernel is loaded here already.
    """

    graphar: Communicator | None = None  # None: vLLM's own collectives
    unique_name: str
    world_size: int

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if is_tensor_parallel(self.unique_name, ("tp",)) and self.world_size > 1:
            self.graphar = communicator_of(self.device_group, self.device)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if serves(self.graphar, input_):
            return self.graphar.allreduce(input_)
        return super().all_reduce(input_)

    def reduce_scatter(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if serves(self.graphar, input_) and input_.shape[dim] % self.world_size == 0:
            return self.graphar.reducescatter(input_, axis=dim)
        return super().reduce_scatter(input_, dim)

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        if serves(self.graphar, input_):
            return self.graphar.allgather(input_, axis=dim)
        return super().all_gather(input_, dim)

    def destroy(self) -> None:
        if self.graphar is not None:
            self.graphar.close()
            self.graphar = None
        super().destroy()


def __getattr__(name: str) -> type:
    """Makes the two classes that vLLM asks for by name, and that derive from vLLM's."""
    makers = {"Platform": _make_platform, "DeviceCommunicator": _make_device_communicator}
    if name not in makers:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = makers[name]()
    return made


def _make_platform() -> type:
    own = _class_named(_name_of_own_platform())

    class Platform(own):
        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return f"{__name__}.DeviceCommunicator"

    return Platform


def _make_device_communicator() -> type:
    own = _class_named(_class_named(_name_of_own_platform()).get_device_communicator_cls())
    return type("DeviceCommunicator", (TensorParallel, own), {"__module__": __name__})


def _name_of_own_platform() -> str | None:
    """Returns the name of vLLM's class for this machine, of those that graphar serves: CUDA, and the CPU."""
    from vllm import platforms

    return platforms.cuda_platform_plugin() or platforms.cpu_platform_plugin()


def _class_named(name: str) -> type:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)
