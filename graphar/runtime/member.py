"""Member: a rank of this process on its GPU, with the record of its kernels' failures and the order of its streams."""

from __future__ import annotations

import ctypes

import torch

from graphar.ranks.capture import is_capturing
from graphar.runtime.arguments import Record
from graphar.runtime.driver import call, driver, on_device

_ABORT_NBYTES = 256


class Member:
    """A rank of this process: its device, the record in which its kernels report failures, and its last stream."""

    def __init__(self, rank: int, device: int) -> None:
        self.rank, self.device = rank, device
        size = ctypes.sizeof(Record)
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        with on_device(device):
            self.abort = int(call(driver.cuMemAlloc, _ABORT_NBYTES))
            call(driver.cuMemsetD8, self.abort, 0, _ABORT_NBYTES)
            self.record_pointer = int(call(driver.cuMemHostAlloc, size, flags))
        ctypes.memset(self.record_pointer, 0, size)
        self.record = Record.from_address(self.record_pointer)
        self.stream: int | None = None  # calls on this stream need no follow() and leave(); None: all calls do
        self._last: dict[bool, int | None] = {}  # the stream of the last follow(), by whether it was captured
        self._left: torch.cuda.Event | None = None  # the end of the last eager call, if it was on a stream of others

    def follow(self, stream: int) -> None:
        """Makes ``stream``, torch's current stream, wait for the call before, which may be on another stream.

        A captured call waits for captured calls only, and an eager call for eager calls only. Work inside a graph
        cannot wait for work outside it; whoever replays a graph orders it as a whole.

        Torch never destroys its own streams. Another stream may be destroyed, and its handle then name a new stream,
        so after each eager call on such a stream leave() records an event.
        """
        capturing = is_capturing(self.device)
        if self._left is not None and not capturing:
            torch.cuda.current_stream(self.device).wait_event(self._left)
            self._left = None
        # A first captured call on the eager calls' stream skips follow(), so wait for that stream too.
        for previous in {self._last.get(capturing), self._last.get(False)} - {None, stream}:
            # Handle 0 is the default stream, for which ExternalStream would make a new one.
            before = (
                torch.cuda.ExternalStream(previous, self.device) if previous else torch.cuda.default_stream(self.device)
            )
            if (previous != 0 and is_capturing(self.device, before)) == capturing:  # the default stream cannot capture
                event = torch.cuda.Event()
                event.record(before)
                torch.cuda.current_stream(self.device).wait_event(event)
        # The id of a stream that is not torch's own is its handle.
        external = not capturing and stream != 0 and torch.cuda.current_stream(self.device).stream_id == stream
        self._last[capturing] = None if external else stream
        self.stream = None if capturing or external else stream

    def leave(self) -> None:
        """Notes the end of a call that called :meth:`follow`, for the next call to wait for."""
        if self.stream is None and not is_capturing(self.device):
            self._left = torch.cuda.Event()
            self._left.record(torch.cuda.current_stream(self.device))

    def clear_record(self) -> bool:
        """Makes kernels wait and send again. Returns whether a kernel had given up. No kernel of the device may run."""
        had_given_up = bool(self.record.kind)
        ctypes.memset(self.record_pointer, 0, ctypes.sizeof(Record))
        with on_device(self.device):
            call(driver.cuMemsetD8, self.abort, 0, _ABORT_NBYTES)
            call(driver.cuCtxSynchronize)
        return had_given_up

    def free(self) -> None:
        with on_device(self.device):
            call(driver.cuMemFree, self.abort)
            call(driver.cuMemFreeHost, self.record_pointer)
        self.record = Record()
