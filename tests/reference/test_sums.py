"""The specification: what the sum of all ranks is, to the bit."""

import numpy as np
import pytest
import torch

from graphar.numerics.codecs import Codec
from graphar.reference import (
    allreduce,
    allreduce_residual_rmsnorm,
    hierarchical_allreduce,
    quantized_allreduce,
    quantized_reducescatter,
)
from tests.cases import EVERY_16_BIT_PATTERN, HALVES, INTEGERS, KERNEL_DTYPES, bit_patterns, integers, normal, same_bits

FLOATS = (*KERNEL_DTYPES, torch.float64)
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
CANONICAL_NAN = {torch.bfloat16: 0x7FFF, torch.float16: 0x7FFF, torch.float32: 0x7FFFFFFF, torch.float64: (1 << 63) - 1}

every_float = pytest.mark.parametrize("dtype", FLOATS)
every_kernel_dtype = pytest.mark.parametrize("dtype", KERNEL_DTYPES)


def sum_of(dtype, *values):
    return allreduce([torch.tensor([value], dtype=dtype) for value in values]).item()


def bits_of(dtype, *values):
    return allreduce([torch.tensor([value], dtype=dtype) for value in values]).view(BITS[dtype]).item()


@pytest.mark.promise("All-reduce has the bits of its specification: fp32 sums in rank order, rounded once.")
@every_kernel_dtype
def test_ranks_are_added_in_their_order(dtype):
    # In the 24 bits of fp32, 1 is lost when added to big, and not when added to 0.
    big, one = (2.0**15, 2.0**-10) if dtype == torch.float16 else (2.0**24, 1.0)

    assert sum_of(dtype, big, one, -big) == 0
    assert sum_of(dtype, big, -big, one) == one


@pytest.mark.promise("All-reduce has the bits of its specification: fp32 sums in rank order, rounded once.")
@pytest.mark.parametrize(("dtype", "big"), [(torch.bfloat16, 256), (torch.float16, 2048)])
def test_a_sum_is_rounded_once(dtype, big):
    # big + 1 is halfway between two values; rounded at every step it would go back to big, twice.
    assert sum_of(dtype, big, 1, 1) == big + 2


def test_fp64_is_held_in_fp64():
    assert sum_of(torch.float64, 2.0**52, 1) == 2.0**52 + 1


@every_float
def test_a_zero_is_negative_only_if_all_ranks_have_a_negative_one(dtype):
    negative_zero = torch.iinfo(BITS[dtype]).min

    assert bits_of(dtype, -0.0, -0.0, -0.0) == negative_zero
    assert bits_of(dtype, -0.0, 0.0, -0.0) == 0
    assert bits_of(dtype, 1.0, -1.0) == 0


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap(dtype):
    limits = torch.iinfo(dtype)

    assert sum_of(dtype, limits.max, 1) == limits.min
    assert sum_of(dtype, limits.max, 3, 1) == limits.min + 3


@every_float
def test_of_one_rank_the_sum_is_a_bit_exact_copy(dtype):
    x = bit_patterns(3, EVERY_16_BIT_PATTERN, dtype)

    y = allreduce([x])

    assert same_bits(y, x) == 0
    assert y.data_ptr() != x.data_ptr()


def test_of_one_rank_sums_by_hosts_and_with_codecs_are_copies_too():
    x = bit_patterns(0, 2048, torch.bfloat16).view(64, 32)
    codec = Codec(2)

    (part,) = quantized_reducescatter([x], codec, axis=1)
    copies = [part, quantized_allreduce([x], codec), hierarchical_allreduce([x], [[0]], codec)]

    assert [same_bits(copy, x) for copy in copies] == [0] * 3
    assert x.data_ptr() not in {copy.data_ptr() for copy in copies}
    assert part.is_contiguous()


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_the_inputs_are_left_alone(dtype):
    parts = [integers(rank, 100, dtype) for rank in range(2)]

    allreduce(parts)

    assert [same_bits(part, integers(rank, 100, dtype)) for rank, part in enumerate(parts)] == [0, 0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 0, 5)])
def test_the_shape_is_that_of_the_inputs(shape):
    assert allreduce([torch.ones(shape)] * 2).shape == shape


@pytest.mark.parametrize("world_size", range(2, 9))
@every_float
def test_the_error_against_float64_is_that_of_one_rounding(dtype, world_size):
    parts = [normal(rank, 10_000, dtype) for rank in range(world_size)]
    exact = torch.stack(parts).double().sum(0)
    magnitudes = torch.stack(parts).double().abs().sum(0)

    error = (allreduce(parts).double() - exact).abs()

    while_adding = world_size * torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps * magnitudes
    at_the_end = torch.finfo(dtype).eps / 2 * exact.abs() if dtype in HALVES else 0
    assert bool((error <= while_adding + at_the_end).all())


@pytest.mark.parametrize("world_size", [2, 3, 8])
@every_float
def test_any_bits_give_what_numpy_gives(dtype, world_size):
    """Among them are sums that overflow, ties, subnormals, and NaNs of any payload, which become the canonical one."""
    parts = [bit_patterns(rank, EVERY_16_BIT_PATTERN, dtype) for rank in range(world_size)]

    with np.errstate(all="ignore"):
        total = widened(parts[0])
        for part in parts[1:]:
            total = total + widened(part)
        expected = rounded_bits(total, dtype)

    assert np.array_equal(allreduce(parts).view(BITS[dtype]).numpy(), expected)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "add",
    [
        allreduce,
        lambda parts: quantized_allreduce(parts, Codec(4, rounding="stochastic")),
        lambda parts: torch.stack(allreduce_residual_rmsnorm(parts, parts[0], parts[0][0])),
    ],
    ids=["exact", "quantized", "normed"],
)
@every_kernel_dtype
def test_the_number_of_torchs_threads_changes_no_bit(add, dtype, threads):
    parts = [normal(rank, 1 << 18, dtype).view(64, -1) for rank in range(3)]  # past 2^15, torch uses its threads

    threads(1)
    alone = add(parts)
    threads(5)

    assert same_bits(add(parts), alone) == 0


def test_a_codec_may_be_given_by_its_name():
    parts = [normal(rank, 300, torch.float32) for rank in range(3)]
    hosts = [[0, 1], [2]]

    assert torch.equal(quantized_allreduce(parts, "int4"), quantized_allreduce(parts, Codec(4)))
    assert torch.equal(hierarchical_allreduce(parts, hosts, "int8"), hierarchical_allreduce(parts, hosts, Codec(8)))
    by_name, by_codec = quantized_reducescatter(parts, "int6"), quantized_reducescatter(parts, Codec(6))
    assert all(map(torch.equal, by_name, by_codec))


@pytest.mark.parametrize(("wrong", "error"), [("int9", ValueError), (8, TypeError)])
def test_what_names_no_codec_is_refused(wrong, error):
    with pytest.raises(error, match=r"reference\.quantized_allreduce: codec must be a graphar\.Codec"):
        quantized_allreduce([torch.ones(3)] * 2, wrong)


def widened(x):
    """The elements in fp32, or fp64 ones as they are."""
    if x.dtype == torch.bfloat16:
        return (x.view(torch.int16).numpy().astype(np.int32) << 16).view(np.float32)
    return x.numpy().astype(np.promote_types(np.float32, x.numpy().dtype))


def rounded_bits(total, dtype):
    if dtype == torch.bfloat16:
        word = total.view(np.uint32)
        bits = ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16).view(np.int16)
    elif dtype == torch.float16:
        bits = total.astype(np.float16).view(np.int16)
    else:
        bits = total.view(np.int32 if dtype == torch.float32 else np.int64)
    return np.where(np.isnan(total), CANONICAL_NAN[dtype], bits).astype(bits.dtype)
