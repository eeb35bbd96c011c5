"""What the backend's calls return: torch.distributed's Work."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from graphar.integrations.untraced import untraced
from graphar.ranks.cpu.transport import deadline


@untraced
class GrapharWork(dist.Work):
    """A call that is complete on the CPU, or queued on a stream."""

    def __init__(self, outputs: list[torch.Tensor], stream: torch.cuda.Stream | None = None) -> None:
        super().__init__()
        self._outputs, self._stream = outputs, stream
        self._event = stream.record_event() if stream else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the current stream wait for the call; the host does not wait."""
        if self._stream and self._event:
            torch.cuda.current_stream(self._stream.device).wait_event(self._event)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._event is None or self._event.query()

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if not self._stream:
            future = torch.futures.Future(devices=[one.device for one in self._outputs[:1] if one.is_cuda])
            future.set_result(self._outputs)
            return future
        future = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):  # whose work the future's waiters wait for
            future.set_result(self._outputs)
        return future


@untraced
class CombinedWork(dist.Work):
    """Several calls as one, which write ``outputs``. Once they are complete, results are copied into their outputs.

    ``copies`` are pairs of an output and of the tensor that holds its result.
    """

    def __init__(
        self,
        works: list[dist.Work],
        outputs: Sequence[torch.Tensor] = (),
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    ) -> None:
        super().__init__()
        self._works, self._outputs, self._copies = works, outputs, copies
        self._copying, self._copied = threading.Lock(), False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits for all calls, together not longer than ``timeout``; 0 is torch's word for no limit."""
        if self._copied:  # gloo's receives wait for ever the second time
            return True
        end = time.monotonic() + timeout.total_seconds() if timeout else None
        for work in self._works:
            work.wait() if end is None else work.wait(deadline(end - time.monotonic()))
        self._copy()
        return True

    def _copy(self) -> None:
        with self._copying:
            if self._copies and not self._copied:
                for output, result in self._copies:
                    output.copy_(result)
                self._copied = True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        done = all(work.is_completed() for work in self._works)
        if done and self._copies and self.is_success():
            self._copy()
        return done

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def source_rank(self) -> int:
        return self._works[0]._source_rank()

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if len(self._works) > 1:
            return super().get_future()

        def copied(done: torch.futures.Future) -> list[torch.Tensor]:
            done.value()  # raises the call's error
            self._copy()
            return self.result()

        return self._works[0].get_future().then(copied)


def combined(works: list[dist.Work]) -> dist.Work:
    """Returns several calls' works as one."""
    return works[0] if len(works) == 1 else CombinedWork(works)
