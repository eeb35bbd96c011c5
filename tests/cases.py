"""The data that tests share: sizes, dtypes, fills that differ by rank and position, and how results are compared."""

from collections.abc import Callable, Sequence
from dataclasses import fields

import torch

from graphar.numerics.codec_reference import Noise, encode, error_of_wire, first_elements
from graphar.numerics.codecs import Codec
from graphar.plan.tiles import MatmulTile

HALVES = (torch.bfloat16, torch.float16)
KERNEL_DTYPES = (*HALVES, torch.float32)  # what graphar's kernels add
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
ALL_DTYPES = (*KERNEL_DTYPES, torch.float64, *INTEGERS)

# A pack is 8 or 4 elements: sizes below, at and above a pack, a block's share, and what the original's own tests used.
SMALL_NUMELS = (0, 1, 7, 8, 9, 64, 8192, 8193, 8199, 8200, 8216)
MEDIUM_NUMELS = (16384, 32768, 114688, 131072, 262144, 262149, 2097152)
LARGE_NUMEL = 16777224
HUGE_NUMEL = 67108864

EVERY_16_BIT_PATTERN = 1 << 18  # the numel from which bit_patterns has all of them on every rank

_SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def integers(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers from -15 to 15 that depend on rank and position: up to 8 ranks sum exactly in every dtype."""
    mixed = (torch.arange(numel) + 7919 * rank) * 2654435761 >> 16
    return (mixed % 31 - 15).to(dtype)


def normal(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random normal values."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def by_position(seed: int, *shape: int, mostly: int = 0, device: str = "cpu") -> torch.Tensor:
    """Integers from -1 to 1 in float64 that depend on their position. ``mostly``: zeros for each other number."""
    at = torch.arange(torch.Size(shape).numel(), device=device) + 7919 * seed
    mixed = (at * 2654435761 % 2**32).bitwise_xor(at * 40503 // 7)
    found = mixed.bitwise_right_shift(9) % 3 - 1
    return (found * (mixed.bitwise_right_shift(13) % (mostly + 1) == 0)).double().view(shape)


def leaf_product(
    a: torch.Tensor,
    w: torch.Tensor,
    leaves: int,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``a @ w.T + bias`` with K in so many leaves that are added as a tree: what graphar.linear makes."""
    return torch.ops.graphar.linear(a, w, bias, leaves, out_dtype)


def bit_patterns(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Arbitrary bits: every 16-bit pattern, or random patterns of wider types. They differ by rank.

    Some 16-byte packs hold random infinities, NaNs, zeros, subnormals and largest values. These are the same packs on
    all ranks, so that special values are added to one another. Some packs have all bits set.
    """
    integer = _SAME_SIZE_INTEGER[dtype.itemsize]
    generator = torch.Generator().manual_seed(rank)
    place = torch.arange(numel, dtype=torch.int32)
    if dtype in HALVES:
        bits = (place * (2 * rank + 1) + 4099 * rank).to(integer)
    else:
        bits = torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(integer)
    special = _special_bits(dtype)
    pack = place.div(16 // dtype.itemsize, rounding_mode="floor")
    chosen = (pack % 13 == 0).nonzero().flatten()
    bits[chosen] = special[torch.randint(len(special), chosen.shape, generator=generator)]
    return bits.masked_fill_(pack % 97 == rank, -1).view(dtype)


def _special_bits(dtype: torch.dtype) -> torch.Tensor:
    """Zero, the extreme subnormals, the largest value, infinity and NaNs with payloads; then their negatives."""
    integer = _SAME_SIZE_INTEGER[dtype.itemsize]
    infinity = torch.tensor(torch.inf, dtype=dtype).view(integer).item()
    smallest_normal = torch.tensor(torch.finfo(dtype).tiny, dtype=dtype).view(integer).item()
    top = torch.iinfo(integer)
    positive = torch.tensor([0, 1, smallest_normal - 1, infinity - 1, infinity, infinity + 1, top.max], dtype=integer)
    return torch.cat([positive, positive | top.min])


def negative_zeros(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """-0.0 in every other lane, whole numbers in the rest."""
    x = integers(rank, numel, dtype)
    x[::2] = -0.0
    return x


def raw(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bytes, all of them legal: a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(1000 * rank + numel)
    most = 2 if dtype == torch.bool else 256
    return torch.randint(most, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


FLOAT_FILLS = (integers, normal, bit_patterns, negative_zeros)


def far_apart(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values. One in 300, at places that differ by rank, is divided by 2^8 to 2^40."""
    generator = torch.Generator().manual_seed(rank + 100)
    smaller = torch.rand(numel, generator=generator) < 1 / 300
    powers = torch.randint(8, 41, (numel,), generator=generator)
    x = torch.randn(numel, generator=generator)
    return torch.where(smaller, torch.ldexp(x, -powers), x).to(dtype)


def in_turns(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Normal values and arbitrary bits in turns of 3072 elements, which begin elsewhere on each rank."""
    turn = (torch.arange(numel) + 1024 * rank) // 3072 % 2 == 0
    return torch.where(turn, normal(rank, numel, dtype), bit_patterns(rank, numel, dtype))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many elements of ``a`` differ from those of ``b`` in any bit; 0 if all bits are the same."""
    assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    kind = _SAME_SIZE_INTEGER[a.element_size()]
    return int((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


def parts_of(fill: Callable, world_size: int, shape: int | Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors of all ranks, of one shape."""
    shape = torch.Size([shape] if isinstance(shape, int) else shape)
    return [fill(rank, shape.numel(), dtype).view(shape) for rank in range(world_size)]


def times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """``x * factor``, of FP8 too, which torch does not multiply."""
    return (x.float() * factor).to(x.dtype) if x.dtype.itemsize == 1 and x.dtype.is_floating_point else x * factor


def left_after_scatter(x: torch.Tensor, codec: Codec, noise: Noise, counts: Sequence[int]) -> torch.Tensor:
    """The rounding error of one rank's flat tensor in a reduce-scatter whose parts have these lengths."""
    left = []
    for message, first in zip(x.split(counts), first_elements(counts), strict=True):
        left.append(error_of_wire(message, encode(message, codec, noise._replace(first=first)), codec))
    return torch.cat(left)


LAYOUTS = ("contiguous", "misaligned", "transposed", "every_other")


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy of ``x`` with another memory layout."""
    match layout:
        case "misaligned":
            y = x.new_empty(x.numel() + 1)[1:].view(x.shape)
        case "transposed":
            y = x.new_empty(x.shape[::-1]).permute(tuple(reversed(range(x.ndim))))
        case "every_other":
            y = x.new_empty((*x.shape, 2))[..., 0]
        case _:
            y = torch.empty_like(x)
    return y.copy_(x)


def of_table(tile: MatmulTile) -> dict[str, object]:
    """A tile as tables name it: leaves are asked for by callers, and may be split."""
    return {one.name: getattr(tile, one.name) for one in fields(tile) if one.metadata.get("measured", True)}
