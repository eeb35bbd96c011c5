"""Whether NVLink multicast may be used: only where the user asks for it, and nothing in the environment says no.

graphar makes no multicast object itself. torch's symmetric memory makes one as part of its rendezvous, so this is asked
before torch's symmetric memory is.
"""

from __future__ import annotations

from collections.abc import Mapping

OPT_IN = "GRAPHAR_MULTICAST"

# The variables by which torch, NCCL and NVSHMEM are told to leave multicast alone, each with the values that do not say
# so. Anything else counts as a no, whether or not its library would understand it.
FORBIDDING = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": ("", "0"),
    "NCCL_NVLS_ENABLE": ("", "1", "2"),  # on; where NCCL thinks it pays
    "NVSHMEM_DISABLE_NVLS": ("", "0"),
}


def why_not(environment: Mapping[str, str]) -> str:
    """What in ``environment`` forbids multicast, or nothing."""
    if environment.get(OPT_IN) != "1":
        return f"NVLink multicast needs the opt-in {OPT_IN}=1"
    for name, harmless in FORBIDDING.items():
        value = environment.get(name, "")
        if value not in harmless:
            return f"{name}={value} forbids NVLink multicast"
    return ""
