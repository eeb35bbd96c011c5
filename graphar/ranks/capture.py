"""Whether a stream is being captured into a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.errors import CommunicatorError


def is_capturing(device: torch.device | int, stream: torch.cuda.Stream | None = None) -> bool:
    """Returns whether a stream of a CUDA device is being captured into a graph. None: torch's current stream."""
    if not torch.cuda.is_initialized():
        return False
    if stream is None and device == torch._C._cuda_getDevice():  # most calls; the contexts take microseconds
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device), torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def check_can_prepare(what: str, devices: Sequence[torch.device | int]) -> None:
    """Raises CommunicatorError, which names ``what`` has no plan, if a device's current stream is being captured."""
    if any(is_capturing(device) for device in devices):
        raise CommunicatorError(
            f"{what} has no plan yet and none can be made during graph capture; call Communicator.prepare(), or make "
            "one such call, before capturing"
        )


def check_not_capturing(op: str, devices: Sequence[torch.device | int]) -> None:
    """Raises CommunicatorError if the current stream of a CUDA device is being captured. A number is a CUDA device."""
    for device in devices:
        if (isinstance(device, int) or device.type == "cuda") and is_capturing(device):
            raise CommunicatorError(f"{op}: cannot be captured into a graph here; call it before or after the capture")
