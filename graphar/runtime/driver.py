"""CUDA driver calls: one way to make them, and the errors they give."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from cuda.bindings import driver

from graphar.errors import DriverError


def call(function, *args):
    """``function(*args)`` of cuda.bindings.driver: its result, without the status.

    The first one initialises the driver. A process forked after that cannot use CUDA: nothing asks without need.

    Raises:
        DriverError: naming the call, the driver's name for the error and its description.
    """
    _initialise()
    status, *results = function(*args)
    check(function.__name__, status)
    if not results:
        return None
    return results[0] if len(results) == 1 else results


@functools.cache
def _initialise() -> None:
    """Once: torch does it with its first tensor on a GPU, but there may be calls before that."""
    check("cuInit", *driver.cuInit(0))


def check(what: str, status: driver.CUresult) -> None:
    """Raises DriverError, as :func:`call` does, unless ``status`` of the call ``what`` is success."""
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        _, text = driver.cuGetErrorString(status)
        raise DriverError(f"{what}: {name.decode()}: {text.decode()}")


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """Inside, the primary context of device ``index``, which is torch's too, is current; then what was before."""
    call(driver.cuCtxPushCurrent, primary_context(index))
    try:
        yield
    finally:
        call(driver.cuCtxPopCurrent)


@functools.cache
def primary_context(index: int):
    """The context of device ``index`` that torch uses; created where there is none."""
    return call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, index))
