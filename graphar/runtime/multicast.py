"""Whether NVLink multicast may be used: the user must opt in, and neither a variable nor torch may forbid it.

graphar makes no multicast object itself. torch's symmetric memory makes one in its rendezvous, so the environment is
checked before torch's symmetric memory is used.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from graphar.errors import Reason

OPT_IN = "GRAPHAR_MULTICAST"

# Variables that switch multicast off in torch, NCCL and NVSHMEM, with the values that leave it on. Any other value
# forbids multicast, even one that the library would not recognise.
FORBIDDING = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": ("", "0"),
    "NCCL_NVLS_ENABLE": ("", "1", "2"),  # 1: on; 2: NCCL decides
    "NVSHMEM_DISABLE_NVLS": ("", "0"),
}


def why_not(environment: Mapping[str, str]) -> Reason | None:
    """Returns why ``environment`` or torch.use_deterministic_algorithms forbids multicast."""
    if environment.get(OPT_IN) != "1":
        return f"NVLink multicast needs the opt-in {OPT_IN}=1"
    for name, harmless in FORBIDDING.items():
        value = environment.get(name, "")
        if value not in harmless:
            return f"{name}={value} forbids NVLink multicast"
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms forbids NVLink multicast, which adds in no defined order"
    return None
