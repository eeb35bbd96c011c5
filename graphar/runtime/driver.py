"""CUDA driver calls, whose errors become DriverError."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any

from graphar.errors import DriverError


class _Driver:
    """cuda.bindings.driver, imported at first use: on the CPU graphar works without it."""

    def __getattr__(self, name: str):
        value = getattr(importlib.import_module("cuda.bindings.driver"), name)
        setattr(self, name, value)
        return value


driver = _Driver()


def call(function, *args) -> Any:
    """Returns the result of ``function(*args)`` of cuda.bindings.driver, without the status, or raises DriverError.

    The first call initialises the driver. A process that is forked after that cannot use CUDA.
    """
    _initialise()
    status, *results = function(*args)
    check(function.__name__, status)
    if not results:
        return None
    return results[0] if len(results) == 1 else results


@functools.cache
def _initialise() -> None:
    """torch initialises the driver too, at its first CUDA tensor, which may come later."""
    check("cuInit", *driver.cuInit(0))


def check(what: str, status) -> None:
    """Raises DriverError unless ``status``, which the driver call ``what`` returned, is success."""
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        _, text = driver.cuGetErrorString(status)
        raise DriverError(f"{what}: {name.decode()}: {text.decode()}")


@functools.cache
def attribute(name: str, device: int) -> int:
    """Returns an attribute of device ``device``; ``name`` is the driver's, without CU_DEVICE_ATTRIBUTE_."""
    return call(driver.cuDeviceGetAttribute, getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)


@contextlib.contextmanager
def on_device(index: int) -> Iterator[None]:
    """Makes the primary context of device ``index``, which torch uses too, current inside a ``with`` block."""
    call(driver.cuCtxPushCurrent, primary_context(index))
    try:
        yield
    finally:
        call(driver.cuCtxPopCurrent)


@functools.cache
def primary_context(index: int):
    """Returns the primary context of device ``index``, which torch uses too; creates it if there is none."""
    return call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, index))


def bind_context(device: int) -> None:
    """Makes a device's primary context current in this thread if it has none, as autograd's threads at first."""
    if not int(call(driver.cuCtxGetCurrent)):
        call(driver.cuCtxSetCurrent, primary_context(device))
