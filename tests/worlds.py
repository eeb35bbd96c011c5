"""How many GPUs the tests on GPUs take: 2, 3, 4 and, where there are more, as many as there are, up to 8."""

from __future__ import annotations

import pytest
import torch

GPU_COUNTS = tuple(sorted({2, 3, 4, min(max(torch.cuda.device_count(), 4), 8)}))
GPU_WORLD_SIZES = [pytest.param(n, marks=pytest.mark.gpu(n)) for n in GPU_COUNTS]
