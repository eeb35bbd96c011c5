"""The order of a rank's streams. Needs no GPU."""

from types import SimpleNamespace

import pytest
import torch

from graphar.runtime import member as members
from graphar.runtime.member import Member


@pytest.fixture
def streams(monkeypatch):
    """Streams as numbers: the current one, those being captured, those that are not torch's, and the waits.

    A wait is a pair: the stream that waits, and the stream that it waits for.
    """
    state = SimpleNamespace(current=0, captured=set(), external=set(), waits=[])

    class Event:
        def record(self, stream):
            self.stream = state.current if stream is now else stream

    class Current:
        stream_id = property(lambda self: state.current if state.current in state.external else 1)

        def wait_event(self, event):
            state.waits.append((state.current, event.stream))

    now = Current()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, device: stream or "a new one")  # as torch's own
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now)
    captured = state.captured
    monkeypatch.setattr(
        members, "is_capturing", lambda device, stream=None: (state.current if stream is None else stream) in captured
    )
    return state


@pytest.fixture
def member():
    made = Member.__new__(Member)
    made.rank, made.device, made.stream, made._last, made._left = 0, 0, None, {}, None
    return made


def call_on(member, streams, *order):
    """Makes calls on these streams as a launch does: it waits if the stream changes. Returns the waits."""
    streams.waits.clear()
    for stream in order:
        streams.current = stream
        if stream != member.stream:
            member.follow(stream)
            member.leave()
    return list(streams.waits)


def test_a_call_on_another_stream_waits_for_the_one_before(member, streams):
    assert call_on(member, streams, 5, 5, 6, 5, 0, 0, 6) == [(6, 5), (5, 6), (0, 5), (6, 0)]


def test_a_call_waits_for_the_call_on_an_earlier_stream_with_the_same_handle(member, streams):
    streams.external |= {9}

    assert call_on(member, streams, 5, 9, 9, 5, 5) == [(9, 5), (9, 9), (5, 9)]


def test_captured_calls_wait_for_no_eager_one_on_a_stream_that_is_not_torchs(member, streams):
    streams.external |= {9}
    call_on(member, streams, 9)
    streams.captured |= {7}

    assert call_on(member, streams, 7) == []
    streams.captured.clear()
    assert call_on(member, streams, 6) == [(6, 9)]


@pytest.mark.parametrize("calls", [(7, 8, 8, 7), (5, 8, 5)])  # 5: the stream of the eager calls
def test_captured_calls_wait_for_each_other_and_for_nothing_outside(member, streams, calls):
    call_on(member, streams, 5)
    streams.captured |= set(calls)

    assert call_on(member, streams, *calls) == [(8, calls[0]), (calls[0], 8)]


def test_eager_calls_do_not_wait_for_captured_ones(member, streams):
    call_on(member, streams, 5)
    streams.captured |= {7}
    call_on(member, streams, 7)
    streams.captured.clear()

    assert call_on(member, streams, 6, 7) == [(6, 5), (7, 6)]
