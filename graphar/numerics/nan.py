"""The bits of floating-point numbers, and the canonical NaN of each dtype."""

from __future__ import annotations

import torch

SAME_SIZE_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def with_canonical_nan(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` with every NaN replaced by the canonical NaN of its dtype: all bits set but the sign.

    This is the NaN that additions and roundings of a GPU give. Tensors of integers are returned as they are.
    """
    if not x.is_floating_point():
        return x
    bits = x.view(SAME_SIZE_INTEGER[x.element_size()])
    return torch.where(x.isnan(), torch.iinfo(bits.dtype).max, bits).view(x.dtype)
