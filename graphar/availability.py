"""Whether graphar's kernels can run here, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Availability:
    """True or false, and why.

    Attributes:
        available: whether the kernels can run.
        reason: what is missing, or what was found.
    """

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available


def is_available() -> Availability:
    """Whether this machine has what the kernels need: two GPUs of sm_80 or newer with peer access, and a driver.

    Without them every op still works, on the CPU or over torch.distributed. Use it as a truth value, or print its
    ``reason``. Initialises CUDA where torch sees two devices or more.
    """
    if not torch.cuda.is_available():
        return Availability(False, "torch sees no CUDA device")
    count = torch.cuda.device_count()
    if count < 2:
        return Availability(False, f"kernels need at least 2 GPUs, torch sees {count}")
    old = [i for i in range(count) if torch.cuda.get_device_capability(i) < (8, 0)]
    if old:
        return Availability(False, f"kernels need sm_80 or newer, cuda:{old[0]} is older")
    for i in range(count):
        for j in range(count):
            if i != j and not torch.cuda.can_device_access_peer(i, j):
                return Availability(False, f"cuda:{i} has no peer access to cuda:{j}")
    return Availability(True, f"{count} GPUs with peer access between all pairs")
