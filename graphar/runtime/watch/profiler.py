"""graphar.profile: a trace of collectives, with their times, algorithms and waits, for Perfetto."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphar.plan.call import Call, Operands
from graphar.ranks.capture import is_capturing
from graphar.runtime.watch import hook


@contextmanager
def profile(path: str | os.PathLike[str]) -> Iterator[None]:
    """Writes a trace of the collectives called inside a ``with`` block, for Perfetto and chrome://tracing.

        with graphar.profile("trace.json"):
            step()

    Each rank is a process of the trace. A collective has a slice on the rank's "host" track: the duration of the call.
    On CUDA it also has a slice on its device's track: the time between two events on its stream, with the waits for
    later peers. Both slices have the ``algorithm``, ``dtype``, ``world_size``, the ``nbytes`` of this rank's tensor,
    the ``ranks`` that take part, and the number ``call`` of the call among these ranks, counted from 0.

    If all these ranks are in one file, a slice also says how long the rank waited for the last rank to begin,
    ``waited_us``, and which rank that was, ``for_rank``. `python -m graphar trace` joins the files of several
    processes, and prints which rank was late.

    All processes of a host use one clock; device times are aligned to it within about 10 us. Each call is also an NVTX
    range. Calls during graph capture have only a host slice, and replays have none. Not collective. It waits for the
    devices before the first call and at the end.

    Args:
        path: the file, which is written at the end of the block, also after an error. A process whose rank in the world
            is not 0 adds its rank before the suffix: trace.rank1.json.

    Raises:
        OSError: the file cannot be written, which is found before the block runs.
    """
    recorder, rank, file = _Recorder(), _rank_in_world(), Path(path)
    file = file.with_suffix(f".rank{rank}{file.suffix}") if rank else file
    with open(file, "ab"):  # fail now, and not after a block that may take hours
        pass
    try:
        with (
            nullcontext() if hook.nvtx_sink in hook.sinks else hook.watching(hook.nvtx_sink),
            hook.watching(recorder.sink),
        ):
            yield
    finally:
        recorder.write(file)


class _Recorder:
    def __init__(self) -> None:
        self._slices: list[dict] = []
        # Slices of devices, which lack their times, and the events before and after.
        self._timed: list[tuple[dict, int, torch.cuda.Event, torch.cuda.Event]] = []
        # By device, an event and its time, by time.perf_counter_ns.
        self._anchors: dict[int, tuple[torch.cuda.Event, int]] = {}
        self._numbers: dict[tuple[int, ...], Iterator[int]] = {}  # by ranks, the numbers of their next calls
        self._is_open = True
        self._thread = threading.local()  # is_inside: whether the thread is inside a recorded call

    @contextmanager
    def sink(self, engine: Any, call: Call, ranks: Sequence[Operands]) -> Iterator[None]:
        """Records a call unless it is part of another call."""
        if not self._is_open or getattr(self._thread, "is_inside", False):
            yield
            return
        xs = [operands.inputs[0] for operands in ranks]
        devices = [x.get_device() for x in xs if x.is_cuda]
        timed = bool(devices) and not any(map(is_capturing, devices))
        before = [self._record(device) for device in devices] if timed else []
        numbers = hook.ranks_of(engine)
        details = {"dtype": str(xs[0].dtype).removeprefix("torch."), "world_size": engine.world_size}
        details |= {"ranks": numbers, "call": next(self._numbers.setdefault(tuple(numbers), itertools.count()))}
        self._thread.is_inside = True
        begin_ns = time.perf_counter_ns()
        try:
            yield
        except Exception as error:
            details["error"] = type(error).__name__
            raise
        finally:
            end_ns = time.perf_counter_ns()
            self._thread.is_inside = False
            after = [self._record(device) for device in devices] if timed else []
            details |= {} if "error" in details else _taken(engine, call)
            for at, x in enumerate(xs):
                rank = at if engine.devices else _rank_in_world()
                in_bytes = call.work.unit == "bytes"  # of several tensors
                own_nbytes = call.work.parts[at if engine.devices else engine.rank] if in_bytes else x.nbytes
                of_rank = {"name": call.op, "cat": "graphar", "ph": "X", "pid": rank}
                of_rank["args"] = details | {"nbytes": own_nbytes}
                on_host = {"tid": threading.get_native_id(), "ts": begin_ns / 1e3, "dur": (end_ns - begin_ns) / 1e3}
                self._slices.append(of_rank | on_host)
                if timed:
                    self._timed.append((of_rank, x.get_device(), before[at], after[at]))

    def write(self, path: Path) -> None:
        self._is_open = False
        for device in self._anchors:
            torch.cuda.synchronize(device)
        slices, tracks = list(self._slices), {(event["pid"], event["tid"]): "host" for event in self._slices}
        for of_rank, device, begin, end in self._timed:
            (anchor, anchor_ns), track = self._anchors[device], _DEVICE_TRACKS + device
            begins = anchor_ns / 1e3 + anchor.elapsed_time(begin) * 1e3
            slices.append(of_rank | {"tid": track, "ts": begins, "dur": begin.elapsed_time(end) * 1e3})
            tracks[of_rank["pid"], track] = f"cuda:{device}"
        for rank in dict.fromkeys(rank for rank, _ in tracks):
            slices.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for (rank, track), name in tracks.items():
            slices.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}})
        tell_waits(slices)
        _write(path, slices)

    def _record(self, device: int) -> torch.cuda.Event:
        """Records an event on the device's current stream; before the first, the anchor of the device's clock."""
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


def _taken(engine: Any, call: Call) -> dict[str, Any]:
    work, plan = call.work, engine.plans.get(call)
    details = {"codec": work.codec, "epilogue": work.epilogue and work.epilogue.text}
    details["tensors"] = work.amount(call.dtype) if work.unit == "bytes" else ""
    algorithm = {"algorithm": plan.config.algorithm.value} if plan else {}
    return algorithm | {name: text for name, text in details.items() if text}


def _rank_in_world() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


_DEVICE_TRACKS = 1 << 24  # larger than any thread's id


def join(paths: Sequence[Path], out: Path | None) -> list[dict]:
    """Joins the traces of several processes of one host, adds the waits, and returns the slices.

    The joined trace is written to ``out``, unless that is None.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a file is no trace of graphar.profile.
    """
    events = [event for path in paths for event in _read(path)]
    tell_waits(events)
    if out is not None:
        _write(out, events)
    return [event for event in events if event["ph"] == "X"]


def _write(path: Path, events: Sequence[dict]) -> None:
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _read(path: Path) -> list[dict]:
    with suppress(ValueError, KeyError, TypeError):
        events = json.loads(path.read_text())["traceEvents"]
        if all(event["ph"] == "M" or "call" in event["args"] for event in events):
            return events
    raise ValueError(f"{path} is no trace of graphar.profile")


def tell_waits(events: Sequence[dict]) -> None:
    """Adds to the slices of each call, in place, how long each rank waited and for which rank.

    A rank waits from its own begin until the last rank begins, by device slices if the call has some. Calls without
    the slices of all ranks are left as they are.
    """
    calls: dict[tuple, dict[int, dict]] = {}
    for event in events:
        if event["ph"] == "X" and "call" in event["args"]:
            of_call = calls.setdefault((tuple(event["args"]["ranks"]), event["args"]["call"]), {})
            if event["tid"] >= _DEVICE_TRACKS or event["pid"] not in of_call:
                of_call[event["pid"]] = event
    for (ranks, _), by_rank in calls.items():
        if set(ranks) <= by_rank.keys() and len(ranks) > 1:
            last = max(by_rank.values(), key=lambda event: event["ts"])
            for event in by_rank.values():
                waited = last["ts"] - event["ts"]
                event["args"] = event["args"] | {"waited_us": waited} | ({"for_rank": last["pid"]} if waited else {})
