"""Every kernel between ranks that share one GPU: the specification's bits.

Those marked ``sanitize`` are few and small: `nox -s sanitize` runs them under compute-sanitizer.
"""

import pytest
import torch

from graphar import reference
from graphar.numerics import norms
from graphar.numerics.codecs import codec
from graphar.numerics.norms import REDUCESCATTER_NORM
from graphar.plan.algorithms import COMPRESSING, Algorithm, kernels_that, with_kernels
from graphar.runtime.catalogue import NORM_KERNELS
from tests.cases import FLOAT_FILLS, KERNEL_DTYPES, bit_patterns, far_apart, in_turns, normal, raw, same_bits
from tests.one_gpu import RanksOfOneGpu

pytestmark = pytest.mark.gpu(1)

ALLREDUCES, REDUCESCATTERS, ALLGATHERS = map(with_kernels, ("allreduce", "reducescatter", "allgather"))
QUANTIZED = with_kernels("allreduce", codec=True)
TREES = tuple(one for op in ("allreduce", "reducescatter") for one in with_kernels(op) if one.row.adds_tree)
(SCATTERED_NORM,) = with_kernels(REDUCESCATTER_NORM)
SMALL = (1, 7, 8, 64, 8199)
MEDIUM = (8192, 8193, 8216, 131072)
EVERY_EPOCH = 3  # calls in a row: buffers take turns


@pytest.fixture(scope="module", params=[2, 3, 4, 8], ids=lambda n: f"{n}ranks")
def ranks(request):
    made = RanksOfOneGpu(request.param)
    yield made
    made.close()


def parts_of(ranks, fill, numel, dtype=torch.bfloat16):
    return [fill(rank, numel, dtype) for rank in range(ranks.world_size)]


def needs(algorithm, dtype=torch.bfloat16):
    if dtype not in algorithm.row.dtypes:
        pytest.skip(f"{algorithm} has no kernel for {dtype}")
    if algorithm is Algorithm.TWO_SHOT_TMA and torch.cuda.get_device_capability(0) < (9, 0):
        pytest.skip(f"{algorithm} needs sm_90 or newer")


def assert_bits(results, expected):
    for rank, (result, one) in enumerate(zip(results, expected, strict=True)):
        assert same_bits(result.cpu(), one) == 0, f"rank {rank}, {len(one)} elements"


def check(expected, call, *given):
    """Checks calls in a row."""
    for _ in range(EVERY_EPOCH):
        assert_bits(call(*given), expected)


def check_allreduce(ranks, parts, *how):
    check([reference.allreduce(parts)] * ranks.world_size, ranks.allreduce, parts, *how)


@pytest.mark.promise("No kernel accesses memory out of bounds or races in shared memory (`nox -s sanitize`).")
@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", ALLREDUCES)
def test_every_allreduce_gives_the_specification(ranks, algorithm):
    needs(algorithm)
    for numel in SMALL:
        check_allreduce(ranks, parts_of(ranks, bit_patterns, numel), algorithm)


@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", kernels_that(lambda row: row.direct))
def test_every_direct_allreduce_gives_the_specification(ranks, algorithm):
    for numel in (8, 8199):
        check_allreduce(ranks, parts_of(ranks, bit_patterns, numel), algorithm, True)


@pytest.mark.promise("No kernel accesses memory out of bounds or races in shared memory (`nox -s sanitize`).")
@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", TREES)
@pytest.mark.parametrize("out_dtype", KERNEL_DTYPES, ids=str)
def test_every_sum_as_a_tree_gives_the_specification(ranks, algorithm, out_dtype):
    if ranks.world_size == 3:
        pytest.skip("a tree has 2, 4 or 8 ranks")
    for numel in SMALL:
        for fill in (normal, bit_patterns):
            parts = parts_of(ranks, fill, numel, torch.float32)
            total = reference.allreduce(parts, order="tree", out_dtype=out_dtype)
            expected = [total] * ranks.world_size
            if algorithm in REDUCESCATTERS:
                expected = total.tensor_split(ranks.world_size)
            check(expected, ranks.tree_sum, parts, algorithm, out_dtype)


@pytest.mark.promise("No kernel accesses memory out of bounds or races in shared memory (`nox -s sanitize`).")
@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", REDUCESCATTERS)
@pytest.mark.parametrize("fill", [bit_patterns, in_turns], ids=lambda fill: fill.__name__)
def test_every_reducescatter_gives_the_specification(ranks, algorithm, fill):
    for numel in SMALL:
        parts = parts_of(ranks, fill, numel)
        check(reference.reducescatter(parts), ranks.reducescatter, parts, algorithm)


@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", ALLGATHERS)
def test_allgather_joins_parts_of_any_length(ranks, algorithm):
    for numel in SMALL:
        parts = [bit_patterns(rank, max(0, numel - rank), torch.bfloat16) for rank in range(ranks.world_size)]
        check([reference.allgather(parts)] * ranks.world_size, ranks.allgather, parts, algorithm)


@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", [Algorithm.ALLGATHER_FLAGGED, Algorithm.ALLGATHER_PUSH])
def test_allgather_joins_each_tensor_of_tuples(ranks, algorithm):
    columns = (384, 3, 1)
    for rows in (1, 5, 64):
        sizes = [0 if rank == 1 else rows + rank for rank in range(ranks.world_size)]
        parts = [
            [raw(9 * rank, size * n, torch.uint8).view(size, n) for n in columns] for rank, size in enumerate(sizes)
        ]
        parts = [[fp8.view(torch.float8_e4m3fn), *rest] for fp8, *rest in parts]
        expected = [reference.allgather(ones) for ones in zip(*parts, strict=True)]
        for _ in range(EVERY_EPOCH):
            for found in ranks.allgather_tuple(parts, algorithm):
                assert_bits(found, expected)


@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["int4", "fp8_e4m3"])
@pytest.mark.parametrize("algorithm", QUANTIZED)
def test_every_allreduce_with_a_codec_gives_the_specification(ranks, algorithm, name):
    for numel in SMALL:
        parts = parts_of(ranks, bit_patterns, numel)
        expected = [reference.quantized_allreduce(parts, codec(name))] * ranks.world_size
        check(expected, ranks.quantized_allreduce, parts, algorithm, codec(name))


@pytest.mark.sanitize
@pytest.mark.parametrize("name", ["int4", "fp8_e4m3"])
def test_reducescatter_with_a_codec_gives_the_specification(ranks, name):
    for numel in SMALL:
        parts = parts_of(ranks, bit_patterns, numel)
        expected = reference.quantized_reducescatter(parts, codec(name))
        check(expected, ranks.reducescatter, parts, Algorithm.QUANTIZED_REDUCESCATTER, codec(name))


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("output", "fp8"),
    [
        ("like_input", {}),
        ("dynamic_fp8", {"out_dtype": torch.float8_e4m3fn}),
        ("grouped_fp8", {"out_dtype": torch.float8_e4m3fn, "group_size": 128}),
    ],
)
def test_reducescatter_with_a_norm_gives_the_specification(ranks, output, fp8):
    for rows, columns in ((1, 128), (ranks.world_size + 1, 384), (9 * ranks.world_size - 1, 4224)):
        parts = [part.view(rows, columns) for part in parts_of(ranks, normal, rows * columns)]
        residuals = list(normal(20, rows * columns, torch.bfloat16).view(rows, columns).tensor_split(ranks.world_size))
        weight = normal(21, columns, torch.bfloat16)
        expected = reference.reducescatter_residual_rmsnorm(
            parts, residuals, weight, eps=1e-5, weight_offset=1.0, **fp8
        )
        for _ in range(EVERY_EPOCH):
            found = ranks.norm(SCATTERED_NORM, parts, residuals, weight, (1e-5, 1.0), output)
            assert_bits(*([one for of_rank in ones for one in of_rank] for ones in (found, expected)))


@pytest.mark.promise("No kernel accesses memory out of bounds or races in shared memory (`nox -s sanitize`).")
@pytest.mark.sanitize
@pytest.mark.parametrize("algorithm", NORM_KERNELS)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_every_norm_of_a_sum_as_a_tree_gives_the_specification(ranks, algorithm, dtype):
    if ranks.world_size == 3:
        pytest.skip("a tree has 2, 4 or 8 ranks")
    largest = (7 * ranks.world_size - 1, 4224)  # with 8 ranks nearly all of the scratch of a one-shot
    shapes = ((1, 128), (1, 8192), (ranks.world_size + 1, 384), largest)
    for rows, columns in shapes:
        fill = bit_patterns if rows == 1 else normal
        parts = [part.view(rows, columns) for part in parts_of(ranks, fill, rows * columns, torch.float32)]
        residual, weight = normal(20, rows * columns, dtype).view(rows, columns), normal(21, columns, dtype)
        whole = norms.specification(reference.allreduce(parts, order="tree"), residual, weight, 1e-5, 1.0)
        residuals, expected = [residual] * ranks.world_size, list(whole) * ranks.world_size
        if algorithm.op == REDUCESCATTER_NORM:
            residuals = residual.tensor_split(ranks.world_size)
            split = zip(*(one.tensor_split(ranks.world_size) for one in whole), strict=True)
            expected = [one for of_rank in split for one in of_rank]
        for _ in range(EVERY_EPOCH):
            found = ranks.norm(algorithm, parts, residuals, weight, (1e-5, 1.0), order="tree", out_dtype=dtype)
            assert_bits([one for of_rank in found for one in of_rank], expected)


@pytest.mark.promise("All-reduce has the bits of its specification: fp32 sums in rank order, rounded once.")
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("fill", [*FLOAT_FILLS, far_apart], ids=lambda fill: fill.__name__)
@pytest.mark.parametrize("algorithm", ALLREDUCES)
def test_any_data_of_any_dtype_gives_the_specification(ranks, algorithm, fill, dtype):
    needs(algorithm, dtype)
    for numel in MEDIUM:
        check_allreduce(ranks, parts_of(ranks, fill, numel, dtype), algorithm)


@pytest.mark.parametrize("fill", [normal, far_apart, bit_patterns, in_turns], ids=lambda fill: fill.__name__)
def test_compressed_parts_give_the_specification(ranks, fill):
    for numel in (*MEDIUM, 1_000_003):
        uneven = [part[: numel - rank * 1000] for rank, part in enumerate(parts_of(ranks, fill, numel))]
        found = ranks.allgather(uneven, COMPRESSING["allgather"])
        assert_bits(found, [reference.allgather(uneven)] * ranks.world_size)


@pytest.mark.parametrize("algorithm", ALLREDUCES)
def test_calls_in_a_row_do_not_mix(ranks, algorithm):
    needs(algorithm)
    for numel in (8192, 8, 131072, 64, 8199):
        calls = [
            [normal(10 * call + rank, numel, torch.bfloat16) for rank in range(ranks.world_size)] for call in range(20)
        ]
        for results, parts in zip(ranks.allreduces(calls, algorithm), calls, strict=True):
            assert_bits(results, [reference.allreduce(parts)] * ranks.world_size)
