"""A CUDA stream beside the caller's, for calls that the caller does not wait for."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch


@functools.lru_cache(maxsize=256)
def stream_beside(device: torch.device, main: int, at: int = 0) -> torch.cuda.Stream:
    """Returns the side stream of number ``at`` of the caller's stream, whose handle is ``main``.

    Callers share no side stream: a stream under capture and another stream may not wait for each other.
    """
    return torch.cuda.Stream(device)


class SideStream:
    """A stream of ``device``. Switching to it takes a fourth of the host time of torch's context manager."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.stream = torch.cuda.Stream(device, priority=priority)
        self._device, self._event = device, torch.cuda.Event()
        self._lock = threading.Lock()  # another thread must not record the event before this thread's wait
        self._callers: dict[int, torch.cuda.Stream] = {}  # by CUDA's handle

    @contextlib.contextmanager
    def behind_the_caller(self) -> Iterator[None]:
        """Makes the stream current inside a ``with`` block, after the work that the caller's stream holds."""
        device = torch._C._cuda_getDevice()
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        caller = self._callers.get(handle)
        if caller is None:
            caller = self._callers[handle] = torch.cuda.current_stream(self._device)
        with self._lock:
            self._event.record(caller)
            self._event.wait(self.stream)
        torch.cuda.set_stream(self.stream)
        try:
            yield
        finally:
            torch.cuda.set_stream(caller)
            if device != self._device.index:  # setting a stream also makes its device current
                torch.cuda.set_device(device)
