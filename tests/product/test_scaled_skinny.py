"""Which calls with scales take a skinny kernel, and what its launches are given, with scales or none. Needs no GPU."""

from types import SimpleNamespace

import pytest
import torch

from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.numerics.fp8_products import FP8
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.slices import Slice
from graphar.plan.tiles import LAYOUTS, skinny_tile
from graphar.plan.work import FACTORS, MATMUL_ALLREDUCE, MATMUL_REDUCESCATTER, Product
from graphar.product import fused
from graphar.product.fused import fused_launches, load_tile
from graphar.product.operands import operands_of
from graphar.product.products import takes_tiles
from graphar.ranks import agreement
from graphar.runtime.arguments import MatmulArguments, ScaledMatmulArguments
from graphar.runtime.catalogue import SCALE_FORMATS, fused_matmul_source
from tests.plan.test_tiles import Ranks

ROWS, COLUMNS, K = 4, 136, 272
MEMBER = SimpleNamespace(rank=0, device=0)
STRIDES = ("a_scale_row", "a_scale_block", "w_scale_row", "w_scale_block")
SCALES = ("rows", "blocks")
every_format = pytest.mark.parametrize("scales", SCALES)
every_product = pytest.mark.parametrize("scales", ["", *SCALES])


def product(rows=ROWS, columns=COLUMNS, op=MATMUL_ALLREDUCE, **how):
    return Product(op, (rows, 0, 0, 0), columns, **how)


@every_format
@pytest.mark.parametrize(
    ("call", "taken"),
    [
        ({}, True),
        ({"rows": 32, "bias": True}, True),
        ({"rows": 65}, False),
        ({"rows": 4096}, True),  # tiles
        ({"rows": 4096, "codec": "int8"}, False),
        ({"columns": 64}, False),
        ({"columns": 8196}, False),
        ({"op": MATMUL_REDUCESCATTER}, False),
        ({"epilogue": form_to_prepare("-v")}, False),
        ({"codec": "int8"}, False),
        ({"partition": "none"}, False),
    ],
    ids=str,
)
def test_results_take_one_kernel_where_they_do_without_scales(scales, call, taken):
    work = product(**({"rows": 16, "columns": 8192} | call), format=scales)
    for dtype in (torch.bfloat16, torch.float16):
        out = SimpleNamespace(is_cuda=True, dtype=dtype)
        assert takes_tiles(Ranks(), Call(work, dtype, 0), out) is taken


@pytest.mark.parametrize("scales", SCALE_FORMATS)
def test_the_kernel_is_that_of_the_result_and_of_the_format_of_the_scales(scales):
    tile = skinny_tile(16)
    source = fused_matmul_source(Algorithm.MATMUL_TWO_SHOT, torch.float16, 4, tile, "by_rows", format=scales)

    assert source.name == f"matmul_two_shot<fp16, 4, {tile}, by_rows, {scales}>"


@every_format
def test_kernels_are_loaded_for_a_weight_by_rows_and_for_each_format(scales, monkeypatch):
    monkeypatch.setattr(fused.launcher, "load", lambda source, *given: source)
    asked = []

    def prepare_all(key, algorithm, words, load):
        asked.append((key, words))
        return [load(MEMBER)]

    runner, given = SimpleNamespace(world_size=2, prepare_all=prepare_all), skinny_tile(8)
    for work in (product(), product(format=scales)):
        (loaded,) = load_tile(runner, Algorithm.MATMUL_ONE_SHOT, torch.bfloat16, given, work)
        assert [layout for _, layout in loaded] == list(LAYOUTS[:1] if work.format else LAYOUTS)
        assert all(("Scales" in source.name) == bool(work.format) for source in loaded.values())
    (key, words), (scaled_key, scaled_words) = asked
    assert key != scaled_key
    assert scaled_words == f"{words}, {FACTORS[scales]}"


def test_ranks_that_differ_in_the_format_differ_in_words():
    rows, blocks = (Call(product(format=scales), torch.bfloat16, 0) for scales in SCALES)

    assert agreement.words(rows) != agreement.words(blocks)


@pytest.fixture
def launches_of(monkeypatch):
    """The fused matmul of a work; its launches are recorded, and bound to nothing."""
    monkeypatch.setattr(fused, "KernelLaunch", lambda function, parameters, grid: parameters)
    monkeypatch.setattr(fused, "bind_launch", lambda runner, member, launch, *rest: launch)
    monkeypatch.setattr(fused, "why_not", lambda *given: "")  # the operands are on the CPU
    monkeypatch.setattr(fused, "tensor_map", lambda *given: given)
    monkeypatch.setattr(fused, "load_tile", lambda runner, algorithm, dtype, tile, work: [{(tile, "by_rows"): None}])
    engine = Ranks()
    engine.deadline, engine.runner.arguments = lambda call: 1.0, lambda *given: None

    def launches(work):
        return fused_launches(engine, Call(work, torch.bfloat16, 0), Algorithm.MATMUL_ONE_SHOT)

    return launches


def operands(scales, k=K, w=None, a_scale=None, bias=None):
    dtype = FP8 if scales else torch.bfloat16
    a, blocks = torch.zeros(ROWS, k).to(dtype), -(-k // 128)
    w = torch.zeros(COLUMNS, k).to(dtype) if w is None else w
    shapes = ((ROWS, 1), (1, COLUMNS)) if scales == "rows" else ((ROWS, blocks), (-(-COLUMNS // 128), blocks))
    a_scale = torch.ones(shapes[0]) if a_scale is None else a_scale
    more = [a_scale, torch.ones(shapes[1])] if scales else []
    more += [] if bias is None else [bias]
    return Operands((a, w, *more), (torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16),))


def launched(launches, work, own):
    """The operands as the kernel takes them, the matrix of W, and the sizes and scales that a launch is given."""
    placed = launches._place(operands_of(work, own))
    (w, _), _, sizes, _ = launches._launch(MEMBER, placed, Slice(ROWS * COLUMNS))
    return placed, w, sizes


@every_format
def test_a_launch_is_given_the_scales_with_their_strides(launches_of, scales):
    work, bias = product(format=scales, bias=True, constant_weight=True), torch.zeros(COLUMNS, dtype=torch.bfloat16)
    transposed = torch.ones(-(-K // 128), ROWS).t() if scales == "blocks" else torch.ones(2 * ROWS, 1)[::2]
    own = operands(scales, a_scale=transposed, bias=bias)

    placed, _, sizes = launched(launches_of(work), work, own)

    a, w, a_scale, w_scale, _ = own.inputs
    assert isinstance(sizes, ScaledMatmulArguments)
    assert (placed.a is a, placed.w is w) == (True, True)
    assert (sizes.m, sizes.n, sizes.k, sizes.constant_weight, sizes.bias) == (ROWS, COLUMNS, K, 1, bias.data_ptr())
    assert (sizes.a_scale, sizes.w_scale) == (a_scale.data_ptr(), w_scale.data_ptr())
    strides = [getattr(sizes, name) for name in STRIDES]
    assert strides[::2] == ([2, 1] if scales == "rows" else [1, 3])
    assert scales == "rows" or strides[1::2] == [ROWS, 1]


@every_product
def test_launches_at_equal_addresses_are_apart_by_what_is_said_of_the_weight(launches_of, scales):
    work, constant = (product(format=scales, constant_weight=said) for said in (False, True))
    launches, own = launches_of(work), operands(scales)

    found = [launched(launches, one, own)[2].constant_weight for one in (work, constant, work)]

    assert found == [0, 1, 0]
    assert type(launched(launches, work, own)[2]) is (ScaledMatmulArguments if scales else MatmulArguments)


@every_product
def test_a_weight_that_the_kernel_cannot_read_is_copied_and_is_not_constant(launches_of, scales):
    work, dtype = product(format=scales, constant_weight=True), FP8 if scales else torch.bfloat16
    launches = launches_of(work)
    by_columns = torch.zeros(K, COLUMNS).to(dtype).t()
    misaligned = torch.zeros(COLUMNS * K + 1).to(dtype)[1:].view(COLUMNS, K)

    for weight in (by_columns, misaligned) if scales else (misaligned,):
        placed, w, sizes = launched(launches, work, operands(scales, w=weight))
        assert placed.w is not weight
        assert w.leading * dtype.itemsize % 16 == 0
        assert (w.rows, w.columns, sizes.constant_weight) == (COLUMNS, K, 0)


@every_format
def test_a_k_of_no_whole_16_bytes_is_copied_and_stays(launches_of, scales):
    work = product(format=scales)

    _, w, sizes = launched(launches_of(work), work, operands(scales, k=100))

    assert (w.columns, w.leading, sizes.k) == (100, 112, 100)


@every_product
def test_zeros_stand_in_place_of_no_columns_have_scales_and_are_not_constant(launches_of, scales):
    work = product(format=scales, constant_weight=True)

    placed, w, sizes = launched(launches_of(work), work, operands(scales, k=0))

    assert not any(one.float().any() for one in (placed.a, placed.w))
    assert sizes.constant_weight == 0
    if scales:
        assert (placed.scales.format, w.columns, sizes.k) == (scales, 16, 16)
        assert sizes.a_scale == placed.scales.a.data_ptr() != 0
        assert len(placed.scales.a) == ROWS


@every_format
def test_a_repeated_launch_is_bound_to_the_scales_of_its_call(launches_of, scales, monkeypatch):
    launches, first, second, given_sizes = launches_of(product(format=scales)), operands(scales), operands(scales), []

    def bind_launch(runner, member, parameters, *rest):
        return lambda *given: given_sizes.append(parameters[2])

    monkeypatch.setattr(fused, "bind_launch", bind_launch)
    launch = launches.launch_like(first)
    for own in (first, second, first):
        launch(own.inputs, own.outputs, ())

    addresses = [own.inputs[2].data_ptr() for own in (first, second, first)]
    assert [sizes.a_scale for sizes in given_sizes] == addresses


def test_operands_that_are_flattened_into_copies_are_not_repeated(launches_of):
    work = product(format="blocks")
    a, w, *more = operands("blocks").inputs
    in_three = torch.zeros(K, 2, 2).transpose(0, 2).to(FP8), torch.ones(3, 2, 2).transpose(0, 2)
    out = torch.empty(2, 2, COLUMNS, dtype=torch.bfloat16)

    for inputs in ((in_three[0], w, *more), (a.view(2, 2, K), w, in_three[1], more[1])):
        assert launches_of(work).launch_like(Operands(inputs, (out,))) is None
