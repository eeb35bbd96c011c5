"""Traces as files: what Perfetto and chrome://tracing read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_DEVICE_TRACKS = 1 << 24  # past the number of any thread


@dataclass(frozen=True)
class Call:
    """One rank's share of a collective.

    Attributes:
        thread: that made it.
        begin_ns, end_ns: of the call on the host, by time.perf_counter_ns.
        details: what the trace says of it.
        device: of the rank's tensor.
        events: before and after it on the device's stream, if they were recorded.
    """

    name: str
    rank: int
    thread: int
    begin_ns: int
    end_ns: int
    details: dict[str, object]
    device: int
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None

    @property
    def device_track(self) -> int:
        return _DEVICE_TRACKS + self.device


Anchors = Mapping[int, tuple[torch.cuda.Event, int]]  # by device, an event and when it was, by time.perf_counter_ns


def write(path: Path, calls: Sequence[Call], anchors: Anchors) -> None:
    """Each rank is a process of the trace, each thread and each device a track. All events have happened."""
    events = [event for call in calls for event in _slices(call, anchors)]
    tracks = {(call.rank, call.thread): "host" for call in calls}
    tracks |= {(call.rank, call.device_track): f"cuda:{call.device}" for call in calls if call.events}
    for rank in dict.fromkeys(call.rank for call in calls):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
    for (rank, track), name in tracks.items():
        events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": track, "args": {"name": name}})
    _write(path, events)


def join(paths: Sequence[Path], out: Path) -> list[dict]:
    """Writes one trace of those of several processes of a host, and who waited for whom. Returns its slices.

    Raises:
        OSError, ValueError: one of them is no trace.
    """
    events = [event for path in paths for event in _read(path)]
    _write(out, events)
    return [event for event in events if event["ph"] == "X"]


def _write(path: Path, events: Sequence[dict]) -> None:
    tell_waits(events)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _read(path: Path) -> list[dict]:
    try:
        return json.loads(path.read_text())["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of graphar.profile") from error


def tell_waits(events: Sequence[dict]) -> None:
    """Adds to the slices of each call of which all ranks are there: how long each rank waited, and for which.

    A rank waits from its own begin to that of the last rank, on the devices' tracks where the call has such.
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


def _slices(call: Call, anchors: Anchors) -> Iterator[dict]:
    """On the host's track and the device's. The format counts microseconds."""
    one = {"name": call.name, "cat": "graphar", "ph": "X", "pid": call.rank, "args": call.details}
    yield one | {"tid": call.thread, "ts": call.begin_ns / 1e3, "dur": (call.end_ns - call.begin_ns) / 1e3}
    if call.events:
        begin, end = call.events
        anchor, anchor_ns = anchors[call.device]
        begins = anchor_ns / 1e3 + anchor.elapsed_time(begin) * 1e3
        yield one | {"tid": call.device_track, "ts": begins, "dur": begin.elapsed_time(end) * 1e3}
