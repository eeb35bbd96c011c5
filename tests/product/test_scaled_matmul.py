"""The matmul of e4m3 operands without a GPU: what its kernels compile to, what it launches, and what it refuses."""

import itertools
import re

import pytest
import torch

from graphar.errors import UnsupportedError
from graphar.numerics.fp8_products import FP8, checked_scales
from graphar.plan.matmuls import Shape, Sms, alone, best_tile
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import FP8_TILES, MatmulTile
from graphar.plan.work import FACTORS
from graphar.product import gemm
from graphar.product.operands import Step
from graphar.product.tensor_maps import Matrix, matrix_of
from graphar.runtime.catalogue import SCALE_FORMATS, matmul_source
from tests.product.test_matmul import assert_asynchronous_and_in_registers

COST = shipped_table("nvidia_h200").matmul.cost
every_tile = pytest.mark.parametrize("tile", FP8_TILES, ids=str)


def fastest_scaled_tile(cost, m, n, k, sms, in_blocks=False):
    """The tile that is chosen for operands in e4m3."""
    return best_tile(alone(FACTORS["blocks" if in_blocks else "rows"]), Shape((m,), n, k), cost, Sms(sms))


def operand(rows, columns):
    return torch.zeros(rows, columns).to(FP8)


@every_tile
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scales", SCALE_FORMATS)
def test_the_assembler_keeps_the_products_asynchronous_and_all_sums_in_registers(tile, out_dtype, scales):
    assert_asynchronous_and_in_registers(matmul_source(FP8, tile, "by_rows", out_dtype, scales), tile.threads)


def test_every_matrix_has_a_tile():
    for m, n, k, sms in itertools.product((1, 64, 1000, 16384), (8, 1024, 7168), (1, 128, 8192), (1, 2, 132)):
        tile = fastest_scaled_tile(COST, m, n, k, sms)
        assert tile in FP8_TILES
        assert tile.cluster <= max(2, sms)


def test_few_rows_take_low_tiles_and_many_rows_high_ones():
    assert {fastest_scaled_tile(COST, m, 8192, 4096, 132).rows for m in (1, 16, 64)} == {64}
    assert fastest_scaled_tile(COST, 4096, 8192, 4096, 132).rows == 128


def test_scales_of_blocks_take_clusters_for_large_results():
    assert fastest_scaled_tile(COST, 4096, 5120, 8192, 132, in_blocks=True).cluster == 2
    assert fastest_scaled_tile(COST, 4096, 5120, 8192, 132).cluster == 1


def bind(tile, scales, m=1000, n=520, k=300, sms=132, result=torch.bfloat16):
    a, w, c = (
        Matrix(4096, dtype, *shape, shape[1]) for dtype, shape in ((FP8, (m, k)), (FP8, (n, k)), (result, (m, n)))
    )
    of_scales = gemm.Matrices.of(Step(operand(16, 16), operand(16, 16), torch.zeros(16, 16), scales))
    gemm._bind(0, tile, sms, of_scales._replace(a=a, w=w, out=c, bias=8192))


def scales_of(m=1000, n=520, k=300, in_blocks=False):
    shapes = ((m, -(-k // 128)), (-(-n // 128), -(-k // 128))) if in_blocks else ((m, 1), (n, 1))
    return checked_scales("op", operand(m, k), operand(n, k), *map(torch.ones, shapes))


def told(arguments):
    return [
        getattr(arguments, name)
        for name in ("a_scale", "w_scale", "a_scale_row", "a_scale_block", "w_scale_row", "w_scale_block")
    ]


@pytest.mark.parametrize("result", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_kernel_is_that_of_the_result_and_of_the_format_of_the_scales(launches, result, in_blocks):
    tile = FP8_TILES[0]

    bind(tile, scales_of(in_blocks=in_blocks), result=result)

    assert launches[0][0] == (FP8, tile, "by_rows", result, "BlockScales" if in_blocks else "RowScales")


def test_a_launch_is_told_sizes_scales_and_groups_of_rows(launches):
    scales = scales_of(in_blocks=True)

    bind(MatmulTile(64, 64, 12), scales)

    arguments = launches[0][1][3]
    sizes = [getattr(arguments, name) for name in ("bias", "m", "n", "k", "group_rows")]
    assert sizes == [8192, 1000, 520, 300, 8]
    assert told(arguments) == [scales.a.data_ptr(), scales.w.data_ptr(), 3, 1, 3, 1]


def test_strides_of_scales_are_those_of_the_callers_tensors(launches):
    a, w = operand(1000, 300), operand(520, 300)
    by_columns = checked_scales("op", a, w, torch.ones(3, 1000).t(), torch.ones(3, 5).t())
    in_a_row = checked_scales("op", a, w, torch.ones(1), torch.ones(1, 520))

    for scales in (by_columns, in_a_row):
        bind(FP8_TILES[0], scales)

    assert told(launches[0][1][3])[2:] == [1, 1000, 1, 5]
    assert told(launches[1][1][3])[2] == 0  # one number serves all rows
    assert told(launches[1][1][3])[4] == 1


@pytest.mark.parametrize(("tile", "boxes"), [(MatmulTile(64, 64, 12), (64, 64)), (FP8_TILES[-1], (128, 96))])
def test_boxes_are_those_of_the_tile_and_the_cluster(launches, tile, boxes):
    bind(tile, scales_of())

    assert tuple(rows for _, rows in launches[0][1][:3]) == (*boxes, 64)
    assert launches[0][2].blocks % tile.cluster == 0


def test_rows_of_e4m3_begin_at_multiples_of_16_bytes():
    x = operand(5, 48)

    assert matrix_of(x[:, :33]) == Matrix(x.data_ptr(), FP8, 5, 33, 48)
    assert matrix_of(operand(5, 33)) is None
    assert matrix_of(x[:, 8:]) is None
    assert matrix_of(operand(1, 33)).leading == 48


A, W = operand(4, 256), operand(16, 256)
SCALES = {"a_scale": torch.ones(4, 1), "w_scale": torch.ones(16, 1)}


def test_scales_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ValueError, match=re.escape("a_scale must be [4, 1] or one number and w_scale [16, 1]")):
        gemm.matmul(A, W, **SCALES | {"a_scale": torch.ones(3, 1)})


def test_a_matmul_on_the_cpu_is_refused_with_the_reason():
    with pytest.raises(
        UnsupportedError, match="scaled_matmul: the kernel needs a device of sm_90a, got tensors on cpu"
    ):
        gemm.matmul(A, W, **SCALES)


@pytest.mark.parametrize(
    ("a", "w", "out", "reason"),
    [
        (operand(4, 40), operand(16, 40), (4, 16), "the rows of a must be contiguous and begin at multiples of 16"),
        (A, operand(256, 16).t(), (4, 16), "the rows of w must be contiguous and begin at multiples of 16 bytes"),
        (A, operand(12, 256), (4, 16), ""),
        (A, operand(12, 256), (4, 12), "the columns of out must be a multiple of 8, got 12"),
    ],
)
def test_what_the_kernel_cannot_read_or_write_is_told(monkeypatch, a, w, out, reason):
    monkeypatch.setattr(gemm, "why_none_like", lambda a: "")
    rows, columns = out
    result = torch.zeros(rows, -(-columns // 8) * 8).bfloat16()[:, :columns]

    found = gemm.why_not(a, w, result)

    assert (found or "").startswith(reason)
    assert bool(found) == bool(reason)
