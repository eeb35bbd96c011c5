"""What a NaN is: each dtype has one."""

from __future__ import annotations

import torch

_SAME_SIZE_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def with_canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """``x`` with each NaN replaced by its dtype's canonical one: what a GPU's addition and rounding give."""
    if not x.is_floating_point():
        return x
    bits = x.view(_SAME_SIZE_INTEGER[x.element_size()])
    return torch.where(x.isnan(), torch.iinfo(bits.dtype).max, bits).view(x.dtype)
