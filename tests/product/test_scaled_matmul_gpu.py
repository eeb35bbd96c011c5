"""The matmul of e4m3 operands on a GPU, against exact integers, its specification, float64 and torch._scaled_mm."""

import itertools

import pytest
import torch

from graphar import reference
from graphar.numerics.fp8_products import BLOCK, FP8, RESULT_DTYPES
from graphar.plan.tiles import FP8_TILES
from graphar.product.gemm import matmul
from tests.cases import same_bits
from tests.product.test_matmul_gpu import COLUMNS, TAILS, Framed

pytestmark = [pytest.mark.gpu(1), pytest.mark.usefixtures("hopper")]

FORMATS = ("rows", "blocks")
every_tile = pytest.mark.parametrize("tile", FP8_TILES, ids=str)
every_format = pytest.mark.parametrize("form", FORMATS)
every_result = pytest.mark.parametrize("result", RESULT_DTYPES, ids=str)


def generator(seed):
    return torch.Generator("cuda").manual_seed(seed)


def operand(values: torch.Tensor) -> torch.Tensor:
    """The values in e4m3, with NaN beside and between their rows, which begin at multiples of 16 bytes."""
    rows, columns = values.shape
    buffer = torch.full((rows + 2, (columns + 31) // 16 * 16), 0x7F, dtype=torch.uint8, device="cuda")
    inside = buffer[1:-1, :columns]
    inside.copy_(values.to(FP8).view(torch.uint8))
    return inside.view(FP8)


def integers(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Integers from -4 to 4: the sum of a block has at most 11 bits, which the accumulator of a tensor core keeps."""
    return operand(torch.randint(-4, 5, (rows, columns), device="cuda", generator=generator(seed)).float())


def normal(rows: int, columns: int, seed: int) -> torch.Tensor:
    return operand(torch.randn(rows, columns, device="cuda", generator=generator(seed)))


def scales_of(form: str, m: int, n: int, k: int, seed: int = 3, powers: bool = False) -> list[torch.Tensor]:
    """Scales that differ everywhere, or powers of two. Those of blocks of ``a`` are column-major, as torch has them."""
    blocks = -(-k // BLOCK)
    shapes = ((m, 1), (1, n)) if form == "rows" else ((blocks, m), (-(-n // BLOCK), blocks))
    found = [torch.rand(shape, device="cuda", generator=generator(seed)) + 0.5 for shape in shapes]
    if powers:
        found = [torch.tensor([0.25, 0.5, 1.0, 2.0], device="cuda")[(4 * scale - 2).long()] for scale in found]
    return [found[0].t() if form == "blocks" else found[0], found[1]]


def in_float64(a, w, a_scale, w_scale):
    if a_scale.shape[1] == 1 and w_scale.shape[0] == 1:
        return (a.double() * a_scale) @ (w.double() * w_scale.t()).t()
    k, n = a.shape[1], len(w)
    of_a = a_scale.repeat_interleave(BLOCK, 1)[:, :k]
    of_w = w_scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return (a.double() * of_a) @ (w.double() * of_w).t()


def multiply(a, w, scales, out=None, **options):
    return matmul(a, w, out, a_scale=scales[0], w_scale=scales[1], **options)


@every_tile
@every_format
@every_result
def test_integers_of_any_size_give_the_exact_result(tile, form, result):
    for m, n, k in itertools.product(TAILS, COLUMNS, (*TAILS, 1000)):
        of_one_block = max(n, k) <= BLOCK  # whose weights have one number: scales of rows
        of = scales_of("rows" if of_one_block else form, m, n, k, powers=True)
        a, w = integers(m, k, 1), integers(n, k, 2)
        out = Framed(torch.zeros(m, n, dtype=result, device="cuda"))

        multiply(a, w, of, out.inside, tile=tile, out_dtype=result)

        assert out.inside.equal(in_float64(a, w, *of).float().to(result)), (m, n, k)
        assert out.frame_is_untouched(), (m, n, k)


@every_tile
@every_format
@every_result
def test_integers_have_the_bits_of_the_specification_with_any_scales(tile, form, result):
    a, w, scales = integers(300, 1000, 1), integers(520, 1000, 2), scales_of(form, 300, 520, 1000)
    bias = None if result == torch.float32 else torch.randn(520, device="cuda", generator=generator(4)).to(result)

    out = multiply(a, w, scales, tile=tile, bias=bias, out_dtype=result)

    assert same_bits(out, reference.scaled_linear(a, w, *scales, bias, result)) == 0


@every_tile
@every_format
def test_more_tiles_than_sms_and_more_of_k_than_the_ring_holds(tile, form):
    a, w, scales = integers(4095, 2100, 1), integers(2056, 2100, 2), scales_of(form, 4095, 2056, 2100, powers=True)

    for sms in (None, 7):
        out = multiply(a, w, scales, tile=tile, sms=sms, out_dtype=torch.float32)
        assert out.equal(in_float64(a, w, *scales).float()), sms


@every_tile
def test_scales_of_one_give_both_formats_the_same_bits(tile):
    a, w = normal(300, 2000, 5), normal(520, 2000, 6)
    rows, blocks = ([torch.ones_like(scale) for scale in scales_of(form, 300, 520, 2000)] for form in FORMATS)

    found = [multiply(a, w, scales, tile=tile, out_dtype=torch.float32) for scales in (rows, blocks)]

    assert same_bits(*found) == 0


def test_one_number_is_the_scale_of_all_rows():
    a, w, number = normal(100, 300, 5), normal(136, 300, 6), torch.tensor([0.7], device="cuda")
    scales = [number.expand(100, 1).contiguous(), number.expand(1, 136).contiguous()]

    for found in ([number, number], [number.view(()), number], [scales[0], number], [number, scales[1].t()]):
        assert same_bits(multiply(a, w, found), multiply(a, w, scales)) == 0


def test_scales_of_blocks_may_have_any_strides():
    a, w, scales = normal(100, 300, 5), normal(136, 300, 6), scales_of("blocks", 100, 136, 300)
    expected = multiply(a, w, scales)
    apart = [torch.full((2 * len(one), 3 * one.shape[1]), float("nan"), device="cuda")[::2, ::3] for one in scales]
    for one, scale in zip(apart, scales, strict=True):
        one.copy_(scale)

    for found in ([one.contiguous() for one in scales], apart):
        assert same_bits(multiply(a, w, found), expected) == 0


def test_what_is_not_a_number_stays_in_its_row_and_column():
    values = torch.ones(200, 300, device="cuda")
    values[7, 3] = float("nan")
    a, w, scales = operand(values), integers(304, 300, 13), scales_of("rows", 200, 304, 300)
    scales[1][0, 11] = float("inf")

    found = multiply(a, w, scales).isfinite()

    assert found.logical_not().nonzero()[:, 0].unique().numel() == 200
    assert not found[7].any()
    assert not found[:, 11].any()
    assert found[torch.arange(200, device="cuda") != 7][:, torch.arange(304, device="cuda") != 11].all()


@every_format
def test_every_tile_and_grid_gives_the_same_bits(form):
    a, w, scales = normal(1000, 1500, 5), normal(1000, 1500, 6), scales_of(form, 1000, 1000, 1500)
    first = multiply(a, w, scales, tile=FP8_TILES[0])

    for tile, sms in itertools.product(FP8_TILES, (None, 5)):
        out = torch.full_like(first, torch.nan)
        assert same_bits(multiply(a, w, scales, out, tile=tile, sms=sms), first) == 0, (tile, sms)


@every_format
@pytest.mark.parametrize("k", [1000, 7168])
def test_a_row_has_the_same_bits_for_every_number_of_rows(form, k):
    a, w, (a_scale, w_scale) = normal(4096, k, 5), normal(1032, k, 6), scales_of(form, 4096, 1032, k)

    for tile in (*FP8_TILES, None):  # None: the chosen one
        whole = multiply(a, w, (a_scale, w_scale), tile=tile)
        for rows in (1, 8, 17, 64, 65, 300, 2048):
            last = multiply(a[-rows:], w, (a_scale[-rows:], w_scale), tile=tile)
            assert same_bits(last, whole[-rows:]) == 0, (tile, rows)


@every_tile
def test_a_call_gives_the_same_bits_again(tile):
    a, w, scales = normal(2000, 2048, 7), normal(2048, 2048, 8), scales_of("blocks", 2000, 2048, 2048)
    first = multiply(a, w, scales, tile=tile)

    for _ in range(50):
        assert same_bits(multiply(a, w, scales, torch.full_like(first, torch.nan), tile=tile), first) == 0


def rms(x):
    return x.double().square().mean().sqrt().item()


@pytest.mark.parametrize("k", [512, 4096, 16384])
@pytest.mark.parametrize("positive", [False, True])
def test_errors_are_no_larger_than_those_of_torch(k, positive):
    a, w = normal(512, k, 5), normal(1024, k, 6)
    if positive:  # sums grow, and an accumulator of few bits would lose what is added last
        a, w = (operand(x.float().abs()) for x in (a, w))
    scales = scales_of("rows", 512, 1024, k)
    expected = in_float64(a, w, *scales)
    one = torch.ones((), device="cuda")
    ones = [torch.ones_like(scale) for scale in scales]
    a, w = a.contiguous(), w.contiguous()

    theirs = torch._scaled_mm(a, w.t(), *scales, out_dtype=torch.bfloat16)
    theirs_in_fp32 = torch._scaled_mm(a, w.t(), one, one, out_dtype=torch.float32)

    assert rms(multiply(a, w, scales) - expected) <= 1.01 * rms(theirs - expected)
    unscaled = a.double() @ w.double().t()
    in_fp32 = multiply(a, w, ones, out_dtype=torch.float32)
    assert rms(in_fp32 - unscaled) <= 1.1 * rms(theirs_in_fp32 - unscaled)


def test_calls_in_a_row_each_see_the_one_before():
    """The scales of a call are the result of the one before."""
    tile = FP8_TILES[3]
    a, w = operand(torch.eye(256, device="cuda")), operand(torch.eye(256, device="cuda"))
    a_scale = torch.full((256, 256), 1.0, device="cuda")
    two = torch.full((1,), 2.0, device="cuda")
    column = a_scale.diagonal()[:, None]
    others = torch.empty_like(a_scale)
    multiply(a, w, (column, two), others, tile=tile, out_dtype=torch.float32)  # loads the kernel, which no capture may
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(8):
            multiply(a, w, (column, two), others, tile=tile, out_dtype=torch.float32)
            multiply(a, w, (others.diagonal()[:, None], two), a_scale, tile=tile, out_dtype=torch.float32)
    for _ in range(3):
        graph.replay()

    assert column.eq(2.0**48).all()
