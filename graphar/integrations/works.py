"""What the backend's calls return: torch.distributed's Work, also for tensors of any strides."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame

from graphar.ranks.cpu.transport import deadline
from graphar.runtime.checks.tensor_checks import check_own_memory

T = TypeVar("T", bound="type | Callable")
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]  # outputs, and the tensors that hold their results


def untraced(kind: T) -> T:
    """A decorator of a function, or of a class for its methods: torch.compile runs it, and what it calls, as it is.

    torch.compiler.disable does the same, but imports the compiler, which takes seconds, and adds a call to each call.
    """
    compiler: Any = eval_frame
    skip = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
    for function in vars(kind).values() if isinstance(kind, type) else [kind]:
        if isinstance(function, FunctionType):
            compiler.set_code_exec_strategy(function.__code__, skip)
            function.__dict__["_torchdynamo_disable"] = True  # what calls it is traced up to here
    return kind


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

    is_success = is_completed

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if not self._stream:
            future = torch.futures.Future(devices=[x.device for x in self._outputs[:1] if x.is_cuda])
            future.set_result(self._outputs)
            return future
        future = torch.futures.Future(devices=[self._stream.device])
        with torch.cuda.stream(self._stream):  # whose work the future's waiters wait for
            future.set_result(self._outputs)
        return future


@untraced
class CombinedWork(dist.Work):
    """Several calls as one, which write ``outputs``. Once they are complete, results are copied into their outputs."""

    def __init__(self, works: list[dist.Work], outputs: Sequence[torch.Tensor] = (), copies: Copies = ()) -> None:
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
    return works[0] if len(works) == 1 else CombinedWork(works)


# Calls of torch's own group with tensors of any strides: gloo reads and writes memory as it lies.
class Arguments:
    """The arguments of a call, with contiguous tensors in place of others; ValueError for outputs that share memory."""

    def __init__(self, name: str, rank: int, args: tuple, kwargs: dict) -> None:
        self._name = name
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # each output, and what is in its place
        self.outputs: list[torch.Tensor] = []  # which the call writes
        first, *others = values = [*args, *kwargs.values()]
        dense = [_mapped(first, self._output if _writes(name, rank, values) else _dense)]
        dense += [_mapped(value, _dense) for value in others]
        self.args, self.kwargs = dense[: len(args)], dict(zip(kwargs, dense[len(args) :], strict=True))

    def _output(self, x: torch.Tensor) -> torch.Tensor:
        check_own_memory(self._name, x, "a tensor that is written")
        self.outputs.append(x)
        dense = _dense(x)
        if dense is not x:
            self._copies.append((x.detach(), dense))
        return dense

    def finish(self, work: dist.Work | None) -> dist.Work | None:
        """Returns the call's work, which also copies results into outputs with gaps."""
        if work is not None:
            return CombinedWork([work], self.outputs, self._copies) if self._copies else work
        for output, result in self._copies:  # the call is complete, or ordered on the current stream
            output.copy_(result)
        return None


def _writes(name: str, rank: int, values: Sequence[Any]) -> bool:
    """Whether a call writes the first of its arguments."""
    if name not in ("broadcast", "reduce"):
        return name != "send"
    roots = [getattr(value, "rootRank", value) for value in values[1:]]
    root = next((value for value in roots if type(value) is int), 0)
    return (rank == root) is (name == "reduce")


def _mapped(value: object, function: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Returns an argument, which may be a list of lists, with the results of ``function`` for its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return [_mapped(element, function) for element in value] if isinstance(value, (list, tuple)) else value


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` if it is contiguous and holds its values as they are, or a copy that is."""
    if x.layout is not torch.strided or (x.is_contiguous() and not x.is_neg() and not x.is_conj()):
        return x
    return x.detach().resolve_conj().resolve_neg().contiguous()
