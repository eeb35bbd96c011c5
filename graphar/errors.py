"""Everything graphar raises besides ValueError and TypeError, which mean that the caller's arguments break a rule.

GrapharError
  CompileError           a kernel did not compile; holds file, line and the compiler's log
  DriverError            a CUDA driver call failed
  CommunicatorError      ranks could not be brought together, or the communicator is closed
  UnsupportedError       what was asked for exists, but cannot be had here; says what is missing
  CollectiveTimeout      a rank waited longer than the deadline for another
  ConcurrentCallError    two collectives of one communicator ran at the same time
"""

from __future__ import annotations

from dataclasses import dataclass


class GrapharError(RuntimeError):
    """The root of graphar's own errors."""

    def again(self) -> GrapharError:
        """The same error, to be raised once more without the frames, and their tensors, that the first one has seen."""
        copy = type(self)(*self.args)
        copy.__dict__.update(self.__dict__)
        return copy


class CompileError(GrapharError):
    """A kernel did not compile.

    Attributes:
        file: the source file the first error stands in.
        line: its line, counted from 1; 0 where the compiler named none.
        log: everything the compiler said.
    """

    def __init__(self, file: str, line: int, log: str) -> None:
        super().__init__(file, line, log)  # all three, so that it can travel between processes
        self.file, self.line, self.log = file, line, log

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: does not compile\n{self.log}"


class DriverError(GrapharError):
    """A CUDA driver call failed."""


class CommunicatorError(GrapharError):
    """Ranks could not be brought together, or the communicator is closed."""


class UnsupportedError(GrapharError):
    """What was asked for cannot be had with these arguments or on this machine."""


@dataclass(frozen=True)
class TimeoutRecord:
    """What is known of a wait that was in vain.

    Attributes:
        op: "allreduce", "reducescatter", "allgather", or what else the algorithm does, as :class:`Algorithm` has it.
        algorithm: the one that waited.
        sequence: how many calls of that algorithm the communicator had made before; each slice of a reduce-scatter
            that takes several launches counts as one.
        rank: the rank that waited.
        peer: the rank it waited for; None where the process group does not say and every rank is in this call.
        last_calls: for each rank, in rank order, its last call when this was raised, in words: of each algorithm, where
            kernels count them. Empty where that is not known.
        block: the thread block that waited; None where it was no kernel that did, as the two that follow.
        expected: the value it waited for.
        seen: the value it saw last.
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
    """A rank waited longer than the deadline for another, or for one that has ended.

    The communicator refuses calls from then on with the same error. It can be closed, and torch goes on working.

    Attributes:
        record: what is known of the wait.
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
