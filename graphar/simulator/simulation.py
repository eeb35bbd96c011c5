"""Runs calls of a kernel on the CPU, at any number of ranks, and gives back what every rank got."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch

from graphar.errors import GrapharError, UnsupportedError
from graphar.numerics.epilogues.syntax import MAX_ARGUMENTS
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import MAX_RANKS, Scratch
from graphar.plan.sources import files_of
from graphar.runtime.arguments import Record
from graphar.runtime.catalogue import file_of
from graphar.runtime.compiler import source_directory
from graphar.simulator.sanitizer_report import in_words, shortened

ENOUGH_NS = 2_000_000_000  # of the simulated clock; far longer than ranks are apart
TIMEOUT_S = 300.0  # of ours
_BAD_CASE = 3  # the exit status with which sources/run.cpp says so
_MOST_TEXT = 6000  # of a failure
_ENVIRONMENT = {
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=66:history_size=4",
    "ASAN_OPTIONS": "detect_stack_use_after_return=0:exitcode=66:detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}


class KernelFailure(GrapharError):
    """A sanitizer reported an error, or the threads waited for one another for ever, at a step of the scheduler."""

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


@dataclass(frozen=True)
class Call:
    """One call of a kernel."""

    kernel: int  # which, counted from the simulation's first one
    shape: Config  # the grid, and the chunk
    inputs: Sequence[torch.Tensor]  # contiguous, a tensor a rank; their bytes are what the ranks are given
    counts: tuple[int, ...]  # elements of each rank's part, or of the whole tensor if the op has no parts
    output_nbytes: tuple[int, ...]  # of every rank
    offset: int = 0  # bytes by which inputs and outputs lie off a 128-byte boundary
    blocks: tuple[int, ...] = ()  # of each rank's grid; empty: the shape's
    in_place: bool = False  # whether the output is the input; of an all-gather, whether it holds it as the rank's part
    absent: tuple[int, ...] = ()  # ranks that do not take part; all ranks end this call before any begins the next one
    twice: tuple[int, ...] = ()  # ranks that also launch it on a second stream, too. There it has no predecessor.
    timeout_ns: int = ENOUGH_NS  # of the simulated clock
    late_ns: int = 0  # how much later than the others the last rank begins, on that clock
    seed: int = 0  # of stochastic rounding
    feeds_back: bool = False  # whether the final content of the input is a result, too. It follows the output's bytes.
    errors_at: int = 0  # the bytes in each input after which it has the rounding errors of earlier calls
    # The tensors of an epilogue, the same on every rank. None: the rank's input, which the kernel may overwrite. A
    # number: the part of the output that begins at so many bytes.
    operands: tuple[torch.Tensor | int | None, ...] = ()
    scalars: tuple[float, ...] = ()  # its numbers
    columns: int = 1  # of the tensor, if the call has an epilogue
    cluster: int = 1  # the blocks of each
    waits: bool = True  # whether the kernel waits for its predecessor, which still writes the input; False is a mistake
    skipped: int = 0  # elements of every rank's part before this call's, if it has an epilogue
    fingerprints: tuple[int, ...] = ()  # of what each rank calls; empty: alike
    places: int = 1  # of a GPU's room that a block takes
    next_blocks: int = 0  # of a kernel that is launched early behind it, waits for it, and takes as many places a block

    def result_nbytes(self, rank: int) -> int:
        return self.output_nbytes[rank] + (self.inputs[rank].nbytes if self.feeds_back else 0)


@dataclass(frozen=True)
class Outcome:
    """The results and errors of one rank."""

    results: list[torch.Tensor]  # the bytes of its output, by call
    record: Record  # why a kernel gave up; ``kind`` is 0 if none did
    seen: Record  # the record as the host found it when it first had a kind
    broken_guards: int  # how often a call wrote beside the tensors or the scratch, or to its input
    unmarked_polls: int  # how often a thread looked for a peer's data while its block was not marked as busy
    released_polls: int  # how often a thread looked for a peer's data after it had released the next kernel
    sent_nbytes: int  # bytes that the rank stored into the scratch of others, but for flags that release something
    scratch_hashes: tuple[int, ...]  # of the scratch after each call with an absent rank
    gave_up_at: int  # the number of the scheduler's step at which the record got a kind; 0 if it has none
    ended_at: tuple[int, ...]  # the same by call, for the end of this rank's kernel


@dataclass(frozen=True)
class Simulation:
    """Calls that follow one another on one communicator."""

    program: Path  # from build
    algorithm: Algorithm  # which
    world_size: int  # ranks
    scratch: Scratch  # of the algorithm
    first_kernel: int  # index in the program of the kernel that calls name 0
    seed: int  # decides what happens when
    epoch: int = 0  # calls made before
    busy: bool = False  # whether other calls already run when the first call begins
    aborted: bool = False  # whether a call of another algorithm has given up before
    suspended: bool = False  # whether the communicator is: counters are a guard's, and scratch is only read
    room: int = 1 << 20  # places for blocks on each GPU. Blocks that find none wait until others have ended.
    # Of the same ranks. Each makes the calls. A rank launches them in an order of its own, rotated by its
    # number. The outcomes are of the first one's ranks, then of the next one's.
    communicators: int = 1

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Returns the outcome of every rank; KernelFailure if a sanitizer found something, or kernels did not end."""
        done, raw, shown = self._execute(calls)
        if "unexpected memory mapping" in done.stderr:
            raise UnsupportedError(
                "ThreadSanitizer cannot run with so random addresses: `sysctl vm.mmap_rnd_bits=28`, or `setarch -R`"
            )
        if done.returncode == _BAD_CASE:
            raise RuntimeError(f"the case was not understood: {done.stderr}")
        if done.returncode:
            step, *addresses = shown or (0,)
            what = shortened(done.stderr, self._regions(addresses, calls))[:_MOST_TEXT]
            if done.returncode < 0 and not done.stderr:
                what = f"ended by {signal.Signals(-done.returncode).name}: a thread accessed memory that is no rank's"
            raise KernelFailure(what, step)
        return self._decode(raw, calls)

    def last_steps(self, calls: Sequence[Call], step: int) -> str:
        """Returns what the threads of each rank did last before a step of the scheduler, in words.

        The seed repeats the run up to there. Threads that wait, or that look for something again and again, come last.
        """
        done, _, (_, *addresses) = self._execute(calls, str(step))
        everywhere = {"every rank's scratch": (addresses[-1], self.scratch.nbytes)}
        return in_words(done.stderr, self.world_size, self._regions(addresses, calls) | everywhere)

    def _regions(self, addresses: Sequence[int], calls: Sequence[Call]) -> dict[str, tuple[int, int]]:
        """Returns the ranks' memory. ``addresses`` are what a run's third file shows of it."""
        whose = [f"rank {rank}'s {what}" for rank in range(self.world_size) for what in ("scratch", "input", "output")]
        sizes = [self.scratch.nbytes, *[_largest_nbytes(calls)] * 2] * self.world_size
        return dict(zip(whose, zip(addresses, sizes, strict=False), strict=False))

    def _execute(
        self, calls: Sequence[Call], *arguments: str
    ) -> tuple[subprocess.CompletedProcess[str], bytes, tuple[int, ...]]:
        """Runs the program. Returns how it ended, its results, and the numbers of its third file (run.cpp)."""
        with tempfile.TemporaryDirectory() as folder:
            case, results, shown = (Path(folder, name) for name in ("case", "results", "shown"))
            case.write_bytes(self._encode(calls))
            command = [str(self.program), str(case), str(results), str(shown), *arguments]
            try:
                environment = os.environ | _ENVIRONMENT
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment
                )
            except subprocess.TimeoutExpired:
                done = subprocess.CompletedProcess(command, -1, "", f"stuck: no end within {TIMEOUT_S:g} s\n")
            numbers = shown.read_bytes() if shown.exists() else b""
            numbers = struct.unpack(f"{len(numbers) // 8}Q", numbers)
            return done, results.read_bytes() if results.exists() else b"", numbers

    def _encode(self, calls: Sequence[Call]) -> bytes:
        sizes = {"scratch_nbytes": self.scratch.nbytes, "tensor_nbytes": _largest_nbytes(calls)}
        of_algorithm = {"fill": self.scratch.fill, "has_pad": has_pad(self.algorithm)}
        header = _Case(calls=len(calls), **_values(_Case, self), **of_algorithm, **sizes)
        inputs = [_raw(x) for call in calls for x in call.inputs]
        operands = [_padded(x) for call in calls for x in call.operands]
        return b"".join(map(bytes, [header, *map(self._encode_call, calls), *inputs, *operands]))

    def _encode_call(self, call: Call) -> _Call:
        ranks, nbytes = len(call.inputs), [len(_padded(x)) for x in call.operands]
        operands = zip(call.operands, accumulate(nbytes, initial=0), strict=False)
        parts = call.counts if len(call.counts) > 1 else ()
        begin = tuple(accumulate(parts, initial=0))[: len(parts)]
        is_part = call.in_place and self.algorithm.op == "allgather"
        skipped = [at * x.itemsize for at, x in zip(begin, call.inputs, strict=False)] if is_part else [0] * ranks
        derived = {
            "kernel": self.first_kernel + call.kernel,
            "absent": sum(1 << rank for rank in call.absent),
            "twice": sum(1 << rank for rank in call.twice),
            "blocks": call.blocks or (call.shape.blocks,) * ranks,
            "numel": sum(call.counts),
            "begin": begin,
            "count": parts,
            "input_nbytes": tuple(x.nbytes for x in call.inputs),
            "operand_nbytes": sum(nbytes),
            "operand_offset": tuple(at if isinstance(x, torch.Tensor) else _place(x) for x, at in operands),
            "scalar": call.scalars,
            "input_offset": tuple(call.offset + nbytes for nbytes in skipped),
            "output_offset": (call.offset,) * ranks,
            "fingerprint": call.fingerprints or (1,) * ranks,
        }
        return _Call(**_values(_Call, self.scratch) | _values(_Call, call.shape) | _values(_Call, call) | derived)

    def _decode(self, raw: bytes, calls: Sequence[Call]) -> list[Outcome]:
        file, failing = io.BytesIO(raw), sum(bool(call.absent) for call in calls)
        outcomes = []
        for rank in list(range(self.world_size)) * self.communicators:
            head = _Outcome.from_buffer_copy(file.read(ctypes.sizeof(_Outcome)))
            ended_at = struct.unpack(f"{len(calls)}Q", file.read(8 * len(calls)))
            hashes = struct.unpack(f"{failing}Q", file.read(8 * failing))
            results = [_tensor(file.read(call.result_nbytes(rank))) for call in calls]
            of_calls = {"results": results, "scratch_hashes": hashes, "ended_at": ended_at}
            outcomes.append(Outcome(**of_calls, **_values(_Outcome, head)))
        return outcomes


def _values(structure: type[ctypes.Structure], source: object) -> dict[str, Any]:
    """Returns what ``source`` has for the fields of a structure, by name."""
    return {name: getattr(source, name) for name, *_ in structure._fields_ if hasattr(source, name)}


def _largest_nbytes(calls: Sequence[Call]) -> int:
    """Returns the bytes of each rank's memory for inputs, and for outputs."""
    largest = max(max(x.nbytes for x in call.inputs) + call.offset for call in calls)
    return max([largest, *(n + call.offset for call in calls for n in call.output_nbytes)])


def _raw(x: torch.Tensor) -> bytes:
    return bytes(x.reshape(-1).view(torch.uint8).numpy())


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)


def _padded(x: torch.Tensor | int | None) -> bytes:
    raw = _raw(x) if isinstance(x, torch.Tensor) else b""
    return raw + bytes(-len(raw) % 16)


def _place(operand: int | None) -> int:
    return (1 << 64) - 1 if operand is None else 1 << 63 | operand


def has_pad(algorithm: Algorithm) -> bool:
    """Whether an algorithm's scratch begins with a signal pad."""
    root = source_directory().resolve()
    return str(root / "device/sync/signal_pad.cuh") in files_of(root / file_of(algorithm), root)


# The files of a case; Simulation, Call and Outcome say what the fields mean.
class _Case(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("world_size", "calls", "fill", "epoch", "has_pad")),
        *((name, ctypes.c_uint32) for name in ("busy", "aborted", "suspended", "room", "communicators")),
        *((name, ctypes.c_uint64) for name in ("seed", "scratch_nbytes", "tensor_nbytes")),
    ]


class _Outcome(ctypes.Structure):
    _fields_ = [
        *((name, Record) for name in ("record", "seen")),
        *((name, ctypes.c_uint32) for name in ("broken_guards", "unmarked_polls", "released_polls", "sent_nbytes")),
        ("gave_up_at", ctypes.c_uint64),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("kernel", "threads", "shared_nbytes", "capacity", "chunk")),
        *((name, ctypes.c_uint32) for name in ("cluster", "waits", "in_place", "absent", "twice")),
        *((name, ctypes.c_uint32) for name in ("feeds_back", "errors_at", "places", "next_blocks")),
        ("blocks", ctypes.c_uint32 * MAX_RANKS),
        *((name, ctypes.c_uint64) for name in ("numel", "timeout_ns", "seed", "late_ns")),
        *((name, ctypes.c_uint64 * MAX_RANKS) for name in ("begin", "count", "input_nbytes", "output_nbytes")),
        ("operand_nbytes", ctypes.c_uint64),
        ("operand_offset", ctypes.c_uint64 * MAX_ARGUMENTS),
        ("columns", ctypes.c_uint64),
        ("skipped", ctypes.c_uint64),
        ("scalar", ctypes.c_float * MAX_ARGUMENTS),
        *((name, ctypes.c_uint32 * MAX_RANKS) for name in ("input_offset", "output_offset", "fingerprint")),
    ]


_IN_CPP = {ctypes.c_uint32: "u32", ctypes.c_uint64: "u64", ctypes.c_float: "float", Record: "Record"}


def structures() -> str:
    """Returns the C++ text of Case, Call and Outcome: the file case.hpp."""
    text = ""
    for structure in (_Case, _Call, _Outcome):
        text += f"struct {structure.__name__.removeprefix('_')} {{\n"
        for name, kind in cast("Any", structure)._fields_:
            count = getattr(kind, "_length_", 0)
            text += f"  {_IN_CPP[kind._type_ if count else kind]} {name}{f'[{count}]' if count else ''}{{}};\n"
        text += "};\n"
    return f'#pragma once\n#include "device/arguments.cuh"\nnamespace simulator {{\n{text}}}\n'
