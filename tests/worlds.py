"""The numbers of GPUs that tests run on: 2, 3, 4, and all of the machine's GPUs up to 8."""

from __future__ import annotations

import pytest
import torch

_FOUND = torch.cuda.device_count()
GPU_COUNTS = tuple(sorted({n for n in (2, 3, 4, min(_FOUND, 8)) if 2 <= n <= _FOUND})) or (2,)  # (2,) makes tests skip
GPU_WORLD_SIZES = [pytest.param(n, marks=pytest.mark.gpu(n)) for n in GPU_COUNTS]
