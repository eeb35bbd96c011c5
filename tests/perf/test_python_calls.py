"""How many Python functions run until a kernel is launched: nested calls, several launches, and graphar's launch."""

from __future__ import annotations

import functools
import sys

import pytest

from graphar.runtime import launcher
from graphar.runtime.arguments import Arguments
from graphar.runtime.launcher import Grid, Launch
from perf.python_calls import count_calls_to_launch, count_calls_until, observe_launches


def last():
    """The function that a count goes up to."""


def inner(most):
    if most:
        inner(most - 1)
    last()


def outer(most=0):
    inner(most)
    after()


def after():
    """Runs behind the last launch."""


def items():
    yield len([])
    yield sorted([])


def through_a_generator():
    for _ in items():
        pass
    last()


@pytest.mark.parametrize(
    ("call", "count"),
    [
        (last, 0),
        (outer, 2),
        (functools.partial(outer, 3), 5),
        (lambda: outer(1), 4),
        (through_a_generator, 4),
        (after, None),
    ],
    ids=["at once", "nested", "deeper, to the last one", "a function around it", "a generator goes on", "never"],
)
def test_python_functions_before_the_last_mark_are_counted(call, count):
    assert count_calls_until(call, last.__code__) == count


def test_the_profile_function_that_was_set_is_set_again():
    seen = []

    def profile(frame, event, argument):
        seen.append(event)

    sys.setprofile(profile)
    try:
        with pytest.raises(ZeroDivisionError):
            count_calls_until(lambda: 1 / 0, last.__code__)
        found = sys.getprofile()
    finally:
        sys.setprofile(None)

    assert found is profile


def test_a_launch_of_graphar_is_seen_and_still_made(monkeypatch):
    made = []
    monkeypatch.setattr(launcher, "launch_kernel", lambda: lambda *arguments: made.append(arguments) or 0)
    launch = Launch(1, [Arguments()], Grid(2, 32, 0, True))
    launch.on(5)
    call = functools.partial(launch.enqueue, 5)

    assert count_calls_to_launch(call) is None
    observe_launches()

    assert count_calls_to_launch(call) == 1
    assert made == [launch.arguments] * 2
