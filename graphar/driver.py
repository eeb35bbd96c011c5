"""CUDA driver calls: one way to make them, and the errors they give."""

from __future__ import annotations

from cuda.bindings import driver

from graphar.errors import DriverError


def call(function, *args):
    """``function(*args)`` of cuda.bindings.driver: its result, without the status.

    Raises:
        DriverError: naming the call, the driver's name for the error and its description.
    """
    status, *results = function(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        _, name = driver.cuGetErrorName(status)
        _, text = driver.cuGetErrorString(status)
        raise DriverError(f"{function.__name__}: {name.decode()}: {text.decode()}")
    if not results:
        return None
    return results[0] if len(results) == 1 else results


def use_device(index: int) -> None:
    """Makes the primary context of device ``index`` current, as torch does; creates it where there is none."""
    call(driver.cuInit, 0)
    context = call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, index))
    call(driver.cuCtxSetCurrent, context)
