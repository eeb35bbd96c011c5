"""A trace of collectives: which were called when, what they took, and how long the devices were at them."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from graphar import trace
from graphar.communicator import Communicator
from graphar.numerics.codecs import codec as codec_of_text
from graphar.plan import choice
from graphar.plan.checks import is_capturing
from graphar.runtime.registry import open_communicators


@contextmanager
def profile(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes a trace of the collectives called inside, which Perfetto and chrome://tracing show.

        with graphar.profile("trace.json"):
            step()

    Each rank is a process of the trace. A collective has a slice on its "host" track, as long as the call took, and on
    CUDA one on its device's track, between two events on its stream: how long it kept the stream, waits for peers that
    came later included. Both say ``algorithm``, ``dtype``, ``world_size``, ``nbytes`` of this rank's tensor, the
    ``ranks`` that take part, and which ``call`` of theirs it is, counted from 0. Where all those ranks are in one file,
    it also says how long each waited for the last one to begin, ``waited_us``, and which that was, ``for_rank``;
    `python -m graphar trace` joins the files of several processes, and says who was late.

    Times are of one clock in all processes of a host; a device's are tied to it to some 10 us. Calls are also NVTX
    ranges. Those made while a graph is captured appear on the host alone, and replays not at all. Not collective; waits
    for the devices before the first call and at the end.

    Args:
        path: of the file, written at the end, after an error inside as well. A process whose rank in the world is not 0
            puts that before the suffix: trace.rank1.json.
    """
    recorder = _Recorder()
    undo = [_wrap(recorder, owner, name) for owner in _owners() for name in _CALLS]
    try:
        yield
    finally:
        for restore in undo:
            restore()
        recorder.write(Path(path))


class _Recorder:
    """Notes calls until it has written them."""

    def __init__(self) -> None:
        self._calls: list[trace.Call] = []
        self._anchors: dict[int, tuple[torch.cuda.Event, int]] = {}
        self._numbers: dict[tuple[int, ...], Iterator[int]] = {}  # of the next call of those ranks
        self._is_open = True
        self._thread = threading.local()  # of each, whether it is inside a call that is noted

    def run(self, call: Callable[[], None], method: str, communicator: Communicator, args: tuple, more: dict) -> None:
        """Makes the call, and notes it, unless it is part of another one."""
        if not self._is_open or getattr(self._thread, "is_inside", False):
            return call()
        name, xs, find_algorithm = _CALLS[method](communicator, *args, **more)
        devices = [x.get_device() for x in xs if x.is_cuda]
        timed = bool(devices) and not any(map(is_capturing, devices))
        before = [self._record(device) for device in devices] if timed else []
        ranks = _ranks_of(communicator)
        details = {"dtype": str(xs[0].dtype).removeprefix("torch."), "world_size": communicator.world_size}
        details |= {"ranks": ranks, "call": next(self._numbers.setdefault(tuple(ranks), itertools.count()))}
        self._thread.is_inside = True
        begin_ns = time.perf_counter_ns()
        try:
            with torch.cuda.nvtx.range(f"graphar.{name}") if devices else nullcontext():
                call()
        except Exception as error:
            details["error"] = type(error).__name__
            raise
        finally:
            end_ns = time.perf_counter_ns()
            self._thread.is_inside = False
            after = [self._record(device) for device in devices] if timed else []
            details |= {} if "error" in details else find_algorithm()
            for at, x in enumerate(xs):
                rank = at if communicator.devices else _rank_in_world()
                mine = details | {"nbytes": x.numel() * x.element_size()}
                events = (before[at], after[at]) if timed else None
                host = threading.get_native_id(), begin_ns, end_ns
                self._calls.append(trace.Call(name, rank, *host, mine, x.get_device(), events))

    def write(self, path: Path) -> None:
        self._is_open = False
        if rank := _rank_in_world():
            path = path.with_suffix(f".rank{rank}{path.suffix}")
        for device in self._anchors:
            torch.cuda.synchronize(device)
        trace.write(path, self._calls, self._anchors)

    def _record(self, device: int) -> torch.cuda.Event:
        """An event on the device's current stream; before its first one, what ties its clock to the host's."""
        with torch.cuda.device(device):
            if device not in self._anchors:
                torch.cuda.synchronize()
                anchor = torch.cuda.Event(enable_timing=True)
                anchor.record()
                anchor.synchronize()
                self._anchors[device] = anchor, time.perf_counter_ns()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return event


def _ranks_of(communicator: Communicator) -> list[int]:
    """In the world, or of this process."""
    return dist.get_process_group_ranks(communicator.group) if communicator.group else [*range(communicator.world_size)]


def _rank_in_world() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


# ---- what a call is: its name, this process's tensors, and what says which algorithm it took ------------------------


def _allreduce(communicator: Communicator, x, out, algorithm: str, timeout_s, codec: str = "", blocks=None, *_):
    def find() -> dict[str, object]:
        first = _as_list(x)[0]
        if codec:
            shape, _ = choice.choose_quantized_allreduce(communicator, first, algorithm, codec_of_text(codec))
            return {"algorithm": shape.algorithm.value, "codec": codec}
        return {"algorithm": choice.choose_allreduce(communicator, first, algorithm, None, blocks)[0].algorithm.value}

    return "allreduce", _as_list(x), find


def _parts(communicator: Communicator, op: str, x, out, counts, timeout_s, axis=0, codec: str = "", blocks=None):
    def find() -> dict[str, object]:
        first = _as_list(x)[0]
        if codec:
            shape = choice.choose_quantized_parts(communicator, first, counts, codec_of_text(codec))
            return {"algorithm": shape.algorithm.value, "codec": codec}
        return {"algorithm": choice.choose_parts(communicator, op, first, counts).algorithm.value}

    return op, _as_list(x), find


def _with_epilogue(
    communicator: Communicator, op: str, x, out, counts, form, operands, algorithm: str, timeout_s, axis=0, blocks=None
):
    def find() -> dict[str, object]:
        way = form, None
        shape, _ = choice.choose_call(communicator, f"epilogue_{op}", counts, _as_list(x)[0], algorithm, way, blocks)
        return {"algorithm": shape.algorithm.value, "epilogue": form.text}

    return op, _as_list(x), find


def _matmul(communicator: Communicator, op: str, a, w, bias, out, counts, timeout_s=None, epilogue=None, codec=""):
    follows = {"epilogue": epilogue.form.text} if epilogue else {"codec": codec} if codec else {}
    return op, _as_list(a), lambda: {"algorithm": op} | follows


_CALLS = {
    "run_allreduce": _allreduce,
    "run_parts": _parts,
    "run_with_epilogue": _with_epilogue,
    "run_matmul": _matmul,
}


def _as_list(x) -> list[torch.Tensor]:
    return list(x) if isinstance(x, (list, tuple)) else [x]


# ---- being told of calls --------------------------------------------------------------------------------------------


def _owners() -> list:
    """What calls go through: the class, and the communicators in debug mode, whose methods are their own."""
    return [Communicator, *(one for one in open_communicators.values() if "run_allreduce" in vars(one))]


def _wrap(recorder: _Recorder, owner, name: str) -> Callable[[], None]:
    """Has a method tell of its calls. Returns what undoes it."""
    original = vars(owner)[name]

    def of_class(self, *args, **more) -> None:
        recorder.run(partial(original, self, *args, **more), name, self, args, more)

    def of_one(*args, **more) -> None:
        recorder.run(partial(original, *args, **more), name, owner, args, more)

    setattr(owner, name, of_class if owner is Communicator else of_one)
    return partial(setattr, owner, name, original)
