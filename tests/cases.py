"""The data that tests share: sizes, dtypes, fills that differ by rank and position, and how results are compared."""

from __future__ import annotations

import torch

HALVES = (torch.bfloat16, torch.float16)
KERNEL_DTYPES = (*HALVES, torch.float32)  # what graphar's kernels add
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ALL_DTYPES = (*KERNEL_DTYPES, torch.float64, *INTEGERS)

# A pack is 8 or 4 elements: sizes below, at and above a pack, a block's share, and what the original's own tests used.
SMALL_NUMELS = (0, 1, 7, 8, 9, 64, 8192, 8193, 8199, 8200, 8216)
MEDIUM_NUMELS = (16384, 32768, 114688, 131072, 262144, 262149, 2097152)
LARGE_NUMELS = (16777216, 16777224, 16777240)
HUGE_NUMEL = 67108864
NUMELS = (*SMALL_NUMELS, *MEDIUM_NUMELS, *LARGE_NUMELS, HUGE_NUMEL)

ALL_16_BIT_PATTERNS = 1 << 17  # from this numel on, bit_patterns has each of them on every rank

_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_SPECIAL_VALUES = (0.0, -0.0, float("inf"), float("-inf"), float("nan"))
_SPECIAL_BITS = {  # subnormals, largest finite values, NaNs with payloads, of both signs
    torch.float32: (1, 0x007FFFFF, 0x7F7FFFFF, 0x7F800001, 0x7FC01234, -0x80000000 + 1, -0x00800001, -1),
    torch.float64: (1, (1 << 52) - 1, (0x7FF << 52) - 1, (0x7FF << 52) + 1, -(1 << 63) + 1, -(1 << 52) - 1, -1),
}


def integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers from -15 to 15 that depend on rank and position: up to 8 ranks sum exactly in every dtype."""
    mixed = (torch.arange(numel) + 7919 * rank) * 2654435761 >> 16
    return (mixed % 31 - 15).to(dtype)


def normal(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random normal values."""
    return torch.randn(numel, generator=_generator(rank)).to(dtype)


def bit_patterns(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all: every 16-bit pattern, or random ones with many infinities, NaNs, zeros and subnormals.

    Other ones on every rank, and here and there a whole 16-byte pack with all bits set.
    """
    if dtype in HALVES:
        x = (torch.arange(numel) * (2 * rank + 1) + 4099 * rank).to(torch.int16).view(dtype)
    else:
        x = _random_with_specials(rank, numel, dtype)
    elements = 16 // dtype.itemsize
    all_ones = torch.arange(numel) // elements % 97 == rank
    return x.view(_SAME_SIZE_INTEGER[dtype.itemsize]).masked_fill_(all_ones, -1).view(dtype)


def negative_zeros(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """-0.0 in every other lane, whole numbers in the rest."""
    x = integers(rank, numel, dtype)
    x[::2] = -0.0
    return x


FLOAT_FILLS = (integers, normal, bit_patterns, negative_zeros)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements of ``a`` differ from those of ``b`` in any bit: 0 where the bits are the same."""
    assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    kind = _SAME_SIZE_INTEGER[a.element_size()]
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


def _random_with_specials(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = _generator(rank)
    x = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    bits = torch.tensor(_SPECIAL_BITS[dtype], dtype=_SAME_SIZE_INTEGER[dtype.itemsize]).view(dtype)
    specials = torch.cat([bits, torch.tensor(_SPECIAL_VALUES, dtype=dtype)])
    picked = specials[torch.randint(len(specials), (numel,), generator=generator)]
    return torch.where(torch.randint(2, (numel,), generator=generator).bool(), picked, x)


def _generator(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + rank)
