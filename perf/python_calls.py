"""Counts the Python functions that an eager call runs until its kernels are launched."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType

from graphar.runtime import launcher


def launched(launch: Callable[..., int], *arguments: object) -> int:
    """Launches a kernel. :func:`count_calls_to_launch` recognises a launch by this function."""
    return launch(*arguments)


def observe_launches() -> None:
    """Makes the launches of plans that are bound from now on visible to :func:`count_calls_to_launch`.

    The launches then take longer, so host times of this process are no longer those of users. This is the only place
    that knows how graphar launches kernels: ``launcher.launch_kernel()`` returns the driver's function.
    """
    observed = functools.partial(launched, launcher.launch_kernel())
    launcher.launch_kernel = functools.cache(lambda: observed)
    launcher.launch_kernel()  # from now on the cache answers, which is no Python function


def count_calls_to_launch(call: Callable[[], object]) -> int | None:
    """Returns how many Python functions ``call`` runs until its last kernel is launched.

    The public op counts as one. A generator counts each time it goes on.

    Args:
        call: a warm call: a functools.partial of the op, since a function around it would count as well.

    Returns:
        The number; None if no launch was seen: :func:`observe_launches` has not been called, or only other kernels run.
    """
    return count_calls_until(call, launched.__code__)


def count_calls_until(call: Callable[[], object], last: CodeType) -> int | None:
    """Returns how many Python functions ``call`` runs until it runs ``last`` for the last time; None if it does not."""
    count, found = 0, None

    def watch(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count, found
        if event == "call" and frame.f_code is last:
            found = count
        elif event == "call":
            count += 1

    earlier = sys.getprofile()
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(earlier)
    return found
