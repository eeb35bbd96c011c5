"""The numbers of ranks on GPUs: 2, 3, 4, and all of the machine's GPUs up to 8."""

import pytest
import torch

_FOUND = torch.cuda.device_count()
GPU_COUNTS = tuple(sorted({n for n in (2, 3, 4, min(_FOUND, 8)) if 2 <= n <= _FOUND})) or (2,)  # (2,) makes tests skip
GPU_WORLD_SIZES = [pytest.param(n, marks=pytest.mark.gpu(n)) for n in GPU_COUNTS]
# Of tests whose ranks share a GPU where there is only one.
SHARED_WORLD_SIZES = [
    pytest.param(n, marks=pytest.mark.gpu(n, shared=True)) for n in (GPU_COUNTS if _FOUND > 1 else (2, 4))
]
