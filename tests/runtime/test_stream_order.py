"""Work on two streams: which one waits for the other, and when. Stand-ins for streams record it."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from graphar.ops.register import Op
from graphar.ranks.hierarchical import Hierarchy
from graphar.runtime.side_stream import SideStream
from tests.fake_gpu import OnGpu


class Stream:
    def __init__(self, name, steps):
        self.name, self._steps = name, steps

    def wait_stream(self, other):
        self._steps.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self._steps.append(f"{self.name} waits for {event}")

    def record_event(self):
        self._steps.append(f"{self.name} records an event")
        return f"the event of {self.name}"


class Event:
    def __init__(self, steps):
        self._steps = steps

    def record(self, stream):
        self._stream = stream
        self._steps.append(f"{stream.name} records an event")

    def wait(self, stream):
        stream.wait_event(f"the event of {self._stream.name}")


@pytest.fixture
def streams(monkeypatch):
    """The current stream, the current device, and what streams did, in order."""
    steps = []
    state = SimpleNamespace(steps=steps, caller=Stream("caller", steps), side=Stream("side", steps), device=0)
    state.current, handles = state.caller, {}

    @contextlib.contextmanager
    def within(stream):
        before, state.current = state.current, stream
        yield
        state.current = before

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority=0: state.side)
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(steps))
    monkeypatch.setattr(torch.cuda, "stream", within)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.current)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: vars(state).update(current=stream, device=1))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: vars(state).update(device=device))
    raw = lambda device: handles.setdefault(state.current.name, len(handles))  # noqa: E731
    # A build for the CPU has neither.
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.device, raising=False)
    return state


@pytest.mark.parametrize("error", [None, ValueError])
@pytest.mark.parametrize("device", [0, 1])
def test_a_side_stream_is_behind_the_caller_that_becomes_current_again(streams, device, error):
    side, streams.device = SideStream(torch.device("cuda", 1)), device

    with contextlib.suppress(ValueError), side.behind_the_caller():
        streams.steps.append(f"work on {streams.current.name}")
        if error:
            raise error

    assert streams.steps == ["caller records an event", "side waits for the event of caller", "work on side"]
    assert (streams.current, streams.device) == (streams.caller, device)


def test_a_side_stream_is_behind_each_of_its_callers(streams):
    side, other = SideStream(torch.device("cuda", 1)), Stream("another", streams.steps)

    for caller in (streams.caller, other, streams.caller):
        streams.current = caller
        with side.behind_the_caller():
            pass

    assert streams.steps[1::2] == [f"side waits for the event of {one}" for one in ("caller", "another", "caller")]
    assert streams.current is streams.caller


def test_a_chunk_crosses_hosts_after_it_is_summed_and_is_gathered_after_it_has_crossed(streams, monkeypatch):
    part, hierarchy = torch.ones(4).as_subclass(OnGpu), Hierarchy.__new__(Hierarchy)
    hierarchy._beside = streams.side
    crossing = lambda *given: streams.steps.append(f"across hosts on {streams.current.name}")  # noqa: E731
    monkeypatch.setattr("graphar.ranks.hierarchical._run", crossing)

    arrived = hierarchy._start_across(SimpleNamespace(world_size=2), part, None)
    streams.steps.append("the next chunk")
    arrived()

    assert streams.steps == [
        "side waits for caller",
        "across hosts on side",
        "side records an event",
        "the next chunk",
        "caller waits for the event of side",
    ]


def test_a_backward_pass_of_a_list_follows_the_stream_that_torch_tracks_and_is_followed_by_it(monkeypatch):
    steps, by_device = [], {}
    of_device = lambda device: by_device.setdefault(device, Stream(f"stream {device}", steps))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", of_device)
    given = [torch.ones(1) for _ in range(3)]
    gradients = [torch.ones(1)] * 3
    devices = {id(one): at for at, one in enumerate(given)}
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda one: True))
    monkeypatch.setattr(torch.Tensor, "device", property(lambda one: devices[id(one)]))

    op = SimpleNamespace(_rule=lambda ctx, ones, in_list: steps.append("backward") or gradients)
    found = Op._rule_of_list(op, None, given)

    assert found is gradients
    assert steps == [
        "stream 1 waits for stream 0",
        "stream 2 waits for stream 0",
        "backward",
        "stream 0 waits for stream 1",
        "stream 0 waits for stream 2",
    ]
