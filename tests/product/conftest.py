"""What matmuls would launch."""

from types import SimpleNamespace

import pytest

from graphar.product import gemm


@pytest.fixture
def launches(monkeypatch):
    """What would be launched, as a list of (kernel, parameters, grid). Clusters of 120 blocks run at once."""
    given = []
    monkeypatch.setattr(gemm, "_function", lambda device, *kernel: kernel)
    monkeypatch.setattr(gemm, "tensor_map", lambda matrix, box_rows: (matrix, box_rows))
    monkeypatch.setattr(gemm.launcher, "clusters_at_once", lambda function, grid: 120 // grid.cluster)
    gemm._clusters_at_once.cache_clear()

    def launch(function, parameters, grid):
        given.append((function, parameters, grid))
        return SimpleNamespace(enqueue=None)

    monkeypatch.setattr(gemm, "Launch", launch)
    gemm._bind.cache_clear()
    yield given
    gemm._bind.cache_clear()
    gemm._clusters_at_once.cache_clear()
