"""The plugin of vLLM: sums and gathers of tensor-parallel groups by graphar, if the environment has GRAPHAR_VLLM=1.

vLLM asks its platform for the class of device communicators. The plugin's platform is a subclass of vLLM's own for this
machine, and names another class. That is a subclass of vLLM's communicator, with the collectives of TensorParallel.
"""

from __future__ import annotations

import logging
import os
from pkgutil import resolve_name
from typing import Any

import torch

from graphar.communicator import Communicator
from graphar.integrations.tensor_parallel import communicator_of, serves

SWITCH = "GRAPHAR_VLLM"

_log = logging.getLogger("vllm.graphar")  # vLLM prints what loggers below its own say


def platform() -> str | None:
    """Returns the name of the platform class, or None to leave vLLM as it is. This is the entry point."""
    if os.environ.get(SWITCH) != "1" or _name_of_own_platform() is None:
        return None
    return f"{__name__}.Platform"


_OfVllm: Any = object  # a class of communicators of vLLM, which is not imported here


class TensorParallel(_OfVllm):
    """A mixin for vLLM's communicators: graphar makes the collectives of tensor-parallel groups, and vLLM the others.

    vLLM may capture every call in a CUDA graph, because all kernels are loaded when the communicator is made.
    """

    graphar: Communicator | None = None  # None: vLLM makes all calls

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.graphar = communicator_of(self.unique_name, ("tp",), self.device_group, self.device)
        if self.graphar is not None:
            _log.info("graphar serves the sums and gathers of group %s", self.unique_name)

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

    def suspend(self) -> None:
        super().suspend()
        if self.graphar is not None:
            self.graphar.suspend()

    def resume(self) -> None:
        if self.graphar is not None:
            self.graphar.resume()
        super().resume()

    def checkpoint_prepare(self) -> None:
        super().checkpoint_prepare()
        if self.graphar is not None:
            self.graphar.suspend()

    def checkpoint_restore(self) -> None:
        if self.graphar is not None:
            self.graphar.resume()
        super().checkpoint_restore()

    def destroy(self) -> None:
        if self.graphar is not None:
            self.graphar.close()
            self.graphar = None
        super().destroy()


def __getattr__(name: str) -> type:
    """Makes the two classes that vLLM asks for by name. They derive from vLLM's, which is not imported before."""
    if name not in ("Platform", "DeviceCommunicator"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    platform_of_vllm: Any = resolve_name(_name_of_own_platform() or "")
    members: dict[str, Any] = {"__module__": __name__}
    if name == "Platform":
        bases = (platform_of_vllm,)
        members["get_device_communicator_cls"] = classmethod(lambda cls: f"{__name__}.DeviceCommunicator")
    else:
        bases = TensorParallel, resolve_name(platform_of_vllm.get_device_communicator_cls())
    made = globals()[name] = type(name, bases, members)
    return made


def _name_of_own_platform() -> str | None:
    """Returns the name of vLLM's platform class for CUDA or the CPU, whichever this machine has, or None."""
    from vllm import platforms

    return platforms.cuda_platform_plugin() or platforms.cpu_platform_plugin()
