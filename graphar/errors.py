"""Graphar's own errors. An argument that breaks a rule raises ValueError or TypeError instead.

GrapharError
  CompileError           a kernel did not compile; holds file, line and the compiler's log
  DriverError            a CUDA driver call failed
  CommunicatorError      the ranks could not be brought together, or the communicator is closed
  UnsupportedError       the call is valid, but these arguments or this machine do not support it; says what is missing
  CollectiveTimeout      a rank waited for another rank past the deadline
  ConcurrentCallError    two collectives of one communicator ran at the same time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

# Why something cannot be done, in words. A function that is asked "why not?" returns `Reason | None`; None: it can.
Reason: TypeAlias = str


class GrapharError(RuntimeError):
    """The base class of graphar's own errors."""

    def again(self, before: str = "") -> GrapharError:
        """Returns a copy of this error without its traceback. Its message begins with ``before``.

        Raising the copy does not keep alive the frames, and their tensors, that the first error passed through.
        """
        message, *more = self.args
        copy = type(self)(before + message, *more)
        copy.__dict__.update(self.__dict__)
        return copy


class CompileError(GrapharError):
    """A kernel did not compile.

    Attributes:
        file: the source file of the first error.
        line: the line of the first error, counted from 1; 0 if the compiler named none.
        log: the compiler's whole output.
    """

    def __init__(self, file: str, line: int, log: str) -> None:
        super().__init__(file, line, log)  # pickle rebuilds an error from these
        self.file, self.line, self.log = file, line, log

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: does not compile\n{self.log}"


class DriverError(GrapharError):
    """A CUDA driver call failed."""


class CommunicatorError(GrapharError):
    """The ranks could not be brought together, or the communicator is closed."""


class UnsupportedError(GrapharError):
    """The call is valid, but these arguments or this machine do not support it. The message says what is missing."""


@dataclass(frozen=True)
class TimeoutRecord:
    """What is known about a wait that expired.

    Attributes:
        op: "allreduce", "reducescatter", "allgather", or another op of :class:`Algorithm`.
        algorithm: the name of the algorithm that waited.
        sequence: how many calls of that algorithm the communicator had made before. A reduce-scatter that takes several
            launches counts as one call per launch.
        rank: the rank that waited.
        peer: the rank that it waited for; None if the process group does not name it and every rank is in this call.
        last_calls: the last call of each rank when the error was raised, in words, in rank order. Where kernels count
            calls, it names the last call of each algorithm. Empty if unknown.
        block: the thread block that waited; None if no kernel waited.
        expected: the value that the kernel waited for; None if no kernel waited.
        seen: the last value that the kernel read; None if no kernel waited.
    """

    op: str
    algorithm: str
    sequence: int
    rank: int
    peer: int | None
    last_calls: tuple[str, ...] = ()
    block: int | None = None
    expected: int | None = None
    seen: int | None = None


class CollectiveTimeout(GrapharError):
    """A rank waited for another rank past the deadline, or for a rank whose process has ended.

    From then on every call of the communicator raises this error again: it is not made. The communicator can still be
    closed, and torch continues to work.

    Attributes:
        record: what is known about the wait, or None.
    """

    def __init__(self, message: str, record: TimeoutRecord | None = None) -> None:
        super().__init__(message, record)
        self.record = record

    def __str__(self) -> str:
        message, record = self.args
        lines = [f"  rank {rank}: {what}" for rank, what in enumerate(record.last_calls)] if record else []
        return "\n".join([message, *(["last calls:"] if lines else []), *lines])


class ConcurrentCallError(GrapharError):
    """Two collectives of one communicator ran at the same time, on two streams or in two graphs."""
