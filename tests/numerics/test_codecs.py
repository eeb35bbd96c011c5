"""The codecs: their names and costs, and what their specification promises of values, NaNs and random rounding."""

import re

import pytest
import torch

from graphar.numerics import codecs
from graphar.numerics.codec_reference import SUM, Noise, decode, encode, philox
from graphar.numerics.codecs import BITS, BUCKET_SIZES, FP8, NAMES, ROUNDINGS, SCALE_DTYPES, SCHEMES, Codec, codec
from graphar.plan.algorithms import Algorithm
from graphar.reference import quantized_allreduce
from graphar.runtime.catalogue import kernel_source
from tests.cases import normal, same_bits
from tests.pages import ROOT

EVERY_CODEC = tuple(
    Codec(bits, size, rounding, scheme, scale)
    for bits in BITS
    for size in BUCKET_SIZES
    for rounding in ROUNDINGS
    for scheme in SCHEMES
    for scale in SCALE_DTYPES
    if bits != FP8 or scheme == "absmax"
)
SOME_CODECS = (*(codec(name) for name in NAMES), Codec(4, 128, scheme="minmax"), Codec(3, 1024, "stochastic"))
NOISE = Noise(seed=1, call=2, source=0)
LISTED = ", ".join(map(repr, BITS))
BAD = {
    "bits": ({"bits": 9}, f"bits must be one of {LISTED}, got 9"),
    "bool": ({"bits": True}, f"bits must be one of {LISTED}, got True"),
    "float": ({"bits": 4.0}, f"bits must be one of {LISTED}, got 4.0"),
    "bucket of a float": ({"bucket_size": 64.0}, "bucket_size must be one of 32, 64, 128, 256, 512, 1024, got 64.0"),
    "large seed": ({"seed": 1 << 64}, "seed must be None or an int of 64 bits, not negative, got 18446744073709551616"),
    "seed of a float": ({"seed": 4.0}, "seed must be None or an int of 64 bits, not negative, got 4.0"),
    "seed of a bool": ({"seed": True}, "seed must be None or an int of 64 bits, not negative, got True"),
    "bucket": ({"bucket_size": 100}, "bucket_size must be one of 32, 64, 128, 256, 512, 1024, got 100"),
    "rounding": ({"rounding": "up"}, "rounding must be one of 'nearest', 'stochastic', got 'up'"),
    "scheme": ({"scheme": "l2"}, "scheme must be one of 'absmax', 'minmax', got 'l2'"),
    "scale": (
        {"scale_dtype": torch.float16},
        "scale_dtype must be one of torch.bfloat16, torch.float32, got torch.float16",
    ),
    "fp8": ({"bits": FP8, "scheme": "minmax"}, "fp8_e4m3 has no minmax scheme, its codes are symmetric about zero"),
    "seed": ({"seed": -1}, "seed must be None or an int of 64 bits, not negative, got -1"),
}

some_codecs = pytest.mark.parametrize("one", SOME_CODECS, ids=lambda one: one.type_name)


def coded(x: torch.Tensor, one: Codec, noise: Noise = NOISE) -> torch.Tensor:
    """``x`` after encoding and decoding."""
    return decode(encode(x, one, noise), one)[: x.numel()]


def test_what_an_element_costs_is_what_is_documented():
    """The module's docstring and the page have a row for each name, whose last number is the bits of an element."""
    rows = r"^(?:\| `\")?(fp8_e4m3|int\d+)\b.* (\d+\.\d+)(?: \|)?$"
    costs = {name: codec(name).bits_per_element for name in NAMES}

    for text in (codecs.__doc__, (ROOT / "docs/pages/quantized.md").read_text()):
        assert {name: float(bits) for name, bits in re.findall(rows, text, re.MULTILINE)} == costs


def test_every_codec_is_found_by_its_text():
    for one in (*EVERY_CODEC, Codec(rounding="stochastic", seed=1 << 63)):
        assert codec(one.text) == one


def test_the_text_of_a_codec_with_a_name_is_its_name():
    assert [codec(name).text for name in NAMES] == list(NAMES)
    assert Codec().text == "int4"
    assert Codec(seed=3).text != "int4"


@pytest.mark.parametrize("text", ["int9", "", "INT4", "bits=4", "bits=4, color=red"])
def test_any_other_text_names_no_codec(text):
    with pytest.raises(ValueError, match=f"must be a graphar.Codec or one of fp8_e4m3, .*, int2, got '{text}'"):
        codec(text)


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD)
def test_a_bad_argument_is_refused(arguments, message):
    with pytest.raises(ValueError, match="Codec") as raised:
        Codec(**arguments)

    assert str(raised.value) == f"Codec: {message}"


def test_a_kernel_is_named_after_its_codec():
    source = kernel_source(Algorithm.QUANTIZED_TWO_SHOT_PUSH, torch.float16, 4, Codec(5, 64, "stochastic").type_name)

    assert source.name == "quantized_two_shot_push<fp16, 4, Codec<Int<5>, 64, bf16, absmax, stochastic>>"


@some_codecs
def test_the_error_is_at_most_a_step_of_the_bucket(one):
    x = normal(1, 8 * 1024, torch.float32)
    buckets = x.view(-1, one.bucket_size)
    size = buckets.amax(1) - buckets.amin(1) if one.scheme == "minmax" else buckets.abs().amax(1)
    step = size / one.largest_code * (32 if one.is_float else 1)  # e4m3's largest numbers are 32 apart
    at_most = step * (1 if one.rounding == "stochastic" else 0.5) * 1.02 + 0.01 * buckets.abs().amax(1)

    error = (coded(x, one) - x).abs().view(buckets.shape).amax(1)

    assert bool((error <= at_most).all())
    assert bool((error > 0).any())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@some_codecs
def test_a_bucket_that_holds_no_number_is_nan_and_no_other_one_is(one, value):
    x = normal(2, 4096, torch.float32)
    x[1500] = value

    bad = coded(x, one).isnan().view(-1, one.bucket_size)

    assert bool(bad[1500 // one.bucket_size].all())
    assert int(bad.sum()) == one.bucket_size


@some_codecs
def test_zeros_stay_zeros(one):
    assert coded(torch.zeros(1024), one).tolist() == [0.0] * 1024


@pytest.mark.parametrize("bits", [bits for bits in BITS if bits != FP8])
def test_whole_numbers_of_a_power_of_two_are_exact(bits):
    top = (1 << bits - 1) - 1
    x = torch.arange(1024).remainder(2 * top + 1).sub(top) * 0.25
    x[::32] = top * 0.25

    assert coded(x, Codec(bits)).tolist() == x.tolist()


@some_codecs
def test_a_bucket_does_not_depend_on_those_after_it(one):
    x = normal(3, 2048, torch.float32)

    assert same_bits(coded(x[:1500], one)[:1024], coded(x, one)[:1024]) == 0


def test_only_codecs_with_minmax_may_have_a_word_of_all_ones_on_the_wire():
    x = torch.cat([normal(4, 4096, torch.float32), torch.ones(1024), -torch.ones(1024), torch.full((1024,), torch.nan)])
    for one in EVERY_CODEC[::7]:
        words = encode(x, one, NOISE).view(torch.int32)
        assert not (one.spares_a_word and bool((words == -1).any())), one.type_name


def test_the_sign_of_the_smallest_zero_of_a_bucket_is_not_on_the_wire():
    x, one = torch.arange(1024.0).remainder(32), Codec(8, 32, scheme="minmax")

    assert torch.equal(encode(torch.where(x == 0, -0.0, x), one), encode(x, one))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
        ),
    ],
)
def test_philox_gives_its_authors_numbers(counter, key, expected):
    words = philox([torch.tensor([word]) for word in counter], *key)

    assert tuple(int(word) for word in words) == expected


def test_random_rounding_does_not_go_beyond_the_largest_of_a_bucket():
    x = torch.tensor([127.0, -127.0]).repeat(1 << 16)

    assert coded(x, Codec(8, rounding="stochastic"), NOISE).abs().max() == 127


@pytest.mark.promise("Stochastic rounding is unbiased, repeatable with a seed, and new in each call and replay.")
@pytest.mark.parametrize(
    "one",
    [Codec(4, 32, "stochastic"), Codec(2, 128, "stochastic", "minmax"), Codec(FP8, 128, "stochastic")],
    ids=lambda one: one.type_name,
)
def test_the_mean_of_many_random_roundings_is_the_value(one):
    x = normal(5, 4096, torch.float32)
    calls, copies = 20, 20
    rounds = calls * copies

    found = torch.stack([coded(x.repeat(copies), one, Noise(7, call, 0)) for call in range(calls)])
    errors = (found.view(rounds, -1) - x).double()

    step = errors.amax(0) - errors.amin(0)
    both_ways = errors.std(0) > 0.2 * step  # often enough for a mean to be near normal
    scores = errors.mean(0) / errors.std(0) * rounds**0.5
    assert float(both_ways.double().mean()) > 0.8
    assert 0.8 < float(scores[both_ways].square().mean()) < 1.2
    assert float(scores[both_ways].abs().max()) < 6
    assert abs(float(errors.sum() / errors.square().sum().sqrt())) < 4


def test_seed_call_and_source_each_change_the_rounding():
    x, one = normal(6, 1024, torch.float32), Codec(4, 32, "stochastic")
    noises = [NOISE, Noise(3, 2, 0), Noise(1, 3, 0), Noise(1, 2, 1), Noise(1, 2, SUM), Noise(1 << 40, 2, 0)]

    results = {tuple(coded(x, one, noise).tolist()) for noise in noises}

    assert len(results) == len(noises)
    assert tuple(coded(x, one, Noise(1, 2, 0)).tolist()) in results


def test_the_sum_is_rounded_once_more():
    parts = [normal(rank, 2048, torch.bfloat16) for rank in range(3)]
    one = codec("int8")
    total = sum(coded(part, one) for part in parts)

    assert same_bits(quantized_allreduce(parts, one), coded(total, one).bfloat16()) == 0


@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (1, 2049)])
def test_the_sum_has_the_shape_of_the_inputs(shape):
    parts = [torch.ones(shape, dtype=torch.float16)] * 3

    total = quantized_allreduce(parts, codec("int8"))

    assert (total.shape, total.dtype) == (shape, torch.float16)
    assert bool(((total - 3).abs() < 0.1).all())
