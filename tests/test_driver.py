"""How a failed driver call is told; the driver itself is stood in for."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from graphar.driver import call, check
from graphar.errors import DriverError

OK, INVALID = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE


@pytest.fixture(autouse=True)
def names(monkeypatch):
    monkeypatch.setattr(driver, "cuGetErrorName", lambda status: (OK, b"CUDA_ERROR_INVALID_VALUE"))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (OK, b"invalid argument"))


@pytest.mark.parametrize(("returned", "result"), [((OK,), None), ((OK, 3), 3), ((OK, 3, 4), [3, 4])])
def test_a_call_gives_its_results_without_the_status(returned, result):
    assert call(lambda: returned) == result


def test_a_failed_call_is_named_with_the_drivers_words():
    def cuMemAlloc(nbytes):
        return INVALID, 0

    with pytest.raises(DriverError, match=r"^cuMemAlloc: CUDA_ERROR_INVALID_VALUE: invalid argument$"):
        call(cuMemAlloc, 8)


def test_a_status_from_elsewhere_is_named_as_told():
    with pytest.raises(DriverError, match=r"^cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE: invalid argument$"):
        check("cuLaunchKernelEx", driver.CUresult(1))
    check("cuLaunchKernelEx", driver.CUresult(0))
