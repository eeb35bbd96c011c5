"""Fused matmuls between ranks that share one GPU: the bits of a matmul alone and a collective."""

import itertools
import random

import pytest
import torch
from torch.nn import functional

import graphar
from graphar import Epilogue, reference
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.numerics.fp8_products import BLOCK, FP8
from graphar.numerics.leaf_tree import LEAVES
from graphar.plan.algorithms import Algorithm
from graphar.plan.tiles import (
    FP8_TILES,
    GATHERED_TILES,
    LAYOUTS,
    PARTIAL_TILES,
    REDUCED_FP8_TILES,
    SCATTERED_FP8_TILES,
    SKINNY_TILES,
    skinny_tile,
)
from graphar.product import gemm
from graphar.product.gemm import matmul
from graphar.product.tensor_maps import aligned_copy
from graphar.reference.products import unrounded_product
from graphar.runtime.catalogue import SKINNY_KERNELS
from graphar.runtime.launcher import sm_count
from tests.cases import leaf_product, normal, raw, same_bits
from tests.one_gpu import MOST_BLOCKS, RanksOfOneGpu
from tests.small_kernels import held, write_late

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0), reason="needs an sm_90 GPU"
    ),
]

REDUCE, SCATTER = Algorithm.MATMUL_ALLREDUCE, Algorithm.MATMUL_REDUCESCATTER
TILES = REDUCE.row.tiles
BF16, FP16 = torch.bfloat16, torch.float16
ROWS, COLUMNS = 1664, 1096  # several tiles of each owner, and partial ones; no owner's are a multiple of MOST_BLOCKS
SHAPES = ((7, 136, 48), (300, 1096, 528), (1030, 520, 4096))  # rows, columns, K
DEPTHS = {"": (64, 520, 4096), "rows": (48, 528, 4096)}  # of K; the last takes more places than a ring has
CALLS = 3  # the first one on a stream is not launched early
FORMATS = ("rows", "blocks")
every_tile_kernel = pytest.mark.parametrize("algorithm", [REDUCE, SCATTER], ids=str)
every_skinny_kernel = pytest.mark.parametrize("algorithm", SKINNY_KERNELS, ids=str)
every_format = pytest.mark.parametrize("factors", FORMATS)


@pytest.fixture(scope="module")
def ranks(request):
    made = RanksOfOneGpu(request.param)
    yield made
    made.close()


def of(*world_sizes):
    return pytest.mark.parametrize("ranks", world_sizes, indirect=True, ids=lambda n: f"{n}ranks")


#
# `factors`: "" of 16-bit operands, "rows" or "blocks": scales of e4m3, "leaves": partials that are added as a tree.


def drawn(ranks, factors, rows, columns, k, seed, dtype=BF16, layout="by_rows"):
    """Each rank's a and w, and their scales.

    Integers are small, so that every sum is exact. Ranks with scales differ in K; those of A lie column by column. With
    leaves each rank has its columns of whole operands.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    if factors == "leaves":
        a, w = (normal(at, n * k, dtype).view(n, k).cuda() for at, n in enumerate((rows, columns)))
        w = w if layout == "by_rows" else w.t().contiguous().t()
        return list(zip(a.chunk(ranks.world_size, 1), w.chunk(ranks.world_size, 1), strict=True))
    if not factors:
        shapes = (rows, k), (columns, k)
        return [
            tuple(torch.randint(-2, 3, one, generator=generator, device="cuda").to(dtype) for one in shapes)
            for _ in range(ranks.world_size)
        ]

    def scale(*shape):
        return torch.rand(shape, generator=generator, device="cuda") + 0.5

    found = []
    for own in range(k, k + 16 * ranks.world_size, 16):
        a, w = (torch.randn(n, own, generator=generator, device="cuda").to(FP8) for n in (rows, columns))
        blocks = -(-own // BLOCK)
        if factors == "rows":
            found.append((a, w, scale(rows, 1), scale(1, columns)))
        else:
            found.append((a, w, scale(blocks, rows).t(), scale(-(-columns // BLOCK), blocks)))
    return found


def partial(a, w, *scales, dtype):
    """A rank's partial: graphar's matmul of e4m3 alone, and the exact product of integers."""
    if not scales:
        return (a.float() @ w.float().t()).to(dtype)
    return matmul(aligned_copy(a), aligned_copy(w), a_scale=scales[0], w_scale=scales[1], out_dtype=dtype)


def expected(algorithm, factors, operands, dtype, bias=None):
    """What each rank gets: the sum of partials in the order of ranks, or the bits of one rank that has all leaves."""
    if factors == "leaves":
        a, w = (torch.cat(one, 1) for one in zip(*operands, strict=True))
        total = leaf_product(a, w, LEAVES, bias=bias)
    else:
        parts = [partial(*own, dtype=dtype) for own in operands]
        total = reference.allreduce(parts if bias is None else [reference.widened(part, bias) for part in parts])
        total = total if bias is None else reference.with_bias(total, bias, dtype)
    return parts_of(total, algorithm, len(operands))


def parts_of(total, algorithm, world_size):
    return total.tensor_split(world_size) if algorithm is SCATTER else [total] * world_size


def wrong(found, wanted):
    return [same_bits(one, part) for one, part in zip(found, wanted, strict=True)]


def expect_sum(ranks, algorithm, factors, operands, dtype=BF16, bias=None, times=2, wanted=None, **how):
    wanted = wanted or expected(algorithm, factors, operands, dtype, bias)
    for _ in range(times):
        found = ranks.fused_sum(operands, algorithm, dtype, factors=factors, bias=bias, **how)

        assert wrong(found, wanted) == [0] * ranks.world_size, (operands[0][0].shape, bias is not None)


def small_bias(columns, dtype):
    return torch.arange(columns, device="cuda").remainder(17).to(dtype)


@of(2, 3)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_gives_the_sum_of_the_rounded_products(ranks, tile):
    expect_sum(ranks, REDUCE, "", drawn(ranks, "", ROWS, COLUMNS, 320, seed=ranks.world_size), times=3, tile=tile)


@of(2, 4, 8)
@every_tile_kernel
@every_format
@pytest.mark.parametrize("tile", [None, *SCATTERED_FP8_TILES], ids=str)
def test_every_tile_has_the_bits_of_the_scaled_matmuls_partials(ranks, algorithm, factors, tile):
    if tile and ranks.world_size == 4:
        pytest.skip("each tile is compiled for 2 and for 8 ranks")
    if tile and algorithm is REDUCE and tile not in REDUCED_FP8_TILES:
        pytest.skip("not a tile of all-reduces")
    dtype = FP16 if ranks.world_size == 2 else BF16
    for (rows, columns, k), with_bias in itertools.product(SHAPES, (False, True)):
        operands = drawn(ranks, factors, rows, columns, k, seed=rows + k)
        bias = small_bias(columns, dtype) if with_bias else None
        expect_sum(ranks, algorithm, factors, operands, dtype, bias, tile=tile)


@of(2, 4, 8)
@every_tile_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_gives_the_bits_of_one_rank(ranks, algorithm, layout):
    for tile, dtype, k in itertools.product(PARTIAL_TILES[LEAVES // ranks.world_size], (BF16, FP16), (512, 3072)):
        operands = drawn(ranks, "leaves", ROWS, COLUMNS, k, 0, dtype, layout)
        expect_sum(ranks, algorithm, "leaves", operands, dtype, normal(2, COLUMNS, dtype).cuda(), tile=tile)


@of(2, 4, 8)
@every_tile_kernel
def test_leaves_that_are_no_whole_loads_give_the_bits_of_one_rank(ranks, algorithm):
    operands = drawn(ranks, "leaves", ROWS, COLUMNS, 8 * 100, 0)

    expect_sum(ranks, algorithm, "leaves", operands, times=1, tile=PARTIAL_TILES[LEAVES // ranks.world_size][0])


@of(2, 4, 8)
@every_tile_kernel
def test_an_epilogue_is_done_to_the_sum_before_it_is_rounded(ranks, algorithm):
    tile, form = PARTIAL_TILES[LEAVES // ranks.world_size][2], Pointwise("max(v, 0) * 0.37", (), COLUMNS)
    operands = drawn(ranks, "leaves", ROWS, COLUMNS, 1024, 0)
    a, w = (torch.cat(one, 1) for one in zip(*operands, strict=True))
    total = leaf_product(a, w, LEAVES, out_dtype=torch.float32)
    wanted = parts_of(reference.rounded_after(form, EpilogueInputs([], []), total, BF16), algorithm, ranks.world_size)

    expect_sum(ranks, algorithm, "leaves", operands, times=1, wanted=wanted, tile=tile, epilogue=form.text)


@of(2, 4, 8)
@every_skinny_kernel
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_rows_have_the_bits_of_one_rank(ranks, algorithm, layout):
    for rows, dtype, k in itertools.product((1, 8, 17, 64), (BF16, FP16), (512, 800, 3072)):
        operands = drawn(ranks, "leaves", rows, COLUMNS, k, 0, dtype, layout)
        bias, tile = normal(2, COLUMNS, dtype).cuda(), skinny_tile(rows, LEAVES // ranks.world_size)
        expect_sum(ranks, algorithm, "leaves", operands, dtype, bias, tile=tile)


@of(2, 4, 8)
@every_skinny_kernel
@every_format
def test_few_rows_have_the_bits_of_the_scaled_matmuls_partials(ranks, algorithm, factors):
    dtype = FP16 if ranks.world_size == 2 else BF16
    for rows, k, with_bias in itertools.product((1, 16, 17, 64), DEPTHS["rows"], (False, True)):
        operands = drawn(ranks, factors, rows, COLUMNS, k, seed=rows + k)
        expect_sum(ranks, algorithm, factors, operands, dtype, small_bias(COLUMNS, dtype) if with_bias else None)


@of(2, 4, 8)
@pytest.mark.parametrize("algorithm", [REDUCE, SCATTER, *SKINNY_KERNELS], ids=str)
@every_format
def test_a_captured_launch_has_the_same_bits_whenever_it_is_replayed(ranks, algorithm, factors):
    operands = drawn(ranks, factors, 8 if algorithm in SKINNY_KERNELS else 300, COLUMNS, 528, seed=3)

    for replays in (1, CALLS):
        expect_sum(ranks, algorithm, factors, operands, times=1, replays=replays)


@of(2, 4, 8)
@every_skinny_kernel
@every_format
def test_operands_that_tma_cannot_load_are_copied(ranks, algorithm, factors):
    operands = drawn(ranks, factors, 5, COLUMNS, 100, seed=4)
    by_columns = [(a, w.t().contiguous().t(), *more) for a, w, *more in operands]

    expect_sum(ranks, algorithm, factors, by_columns, times=1, wanted=expected(algorithm, factors, operands, BF16))


@of(2, 4, 8)
@every_skinny_kernel
@every_format
def test_a_rank_whose_k_is_zero_adds_nothing(ranks, algorithm, factors):
    (first, *others), cut = drawn(ranks, factors, 8, COLUMNS, 528, seed=7), 4 if factors == "blocks" else 2
    empty = *[one[:, :0] for one in first[:cut]], *first[cut:]
    zeros = torch.zeros(8, COLUMNS, dtype=BF16, device="cuda")
    wanted = reference.allreduce([zeros, *[partial(*own, dtype=BF16) for own in others]])

    expect_sum(ranks, algorithm, factors, [empty, *others], times=1, wanted=[wanted] * ranks.world_size)


def wrong_after_late_writes(ranks, algorithm, factors, operands, late: int, constant_weight: bool) -> list[int]:
    """How many elements of each rank's result are wrong, of the last of some calls.

    The kernel before each call writes one of the operands, number ``late``, after the call's kernel could start.
    """
    targets = [tuple(torch.zeros_like(one) if at == late else one for at, one in enumerate(own)) for own in operands]
    wanted, found = expected(algorithm, factors, operands, BF16), []
    for _ in range(CALLS):
        for target in targets:
            target[late].zero_()

        found = ranks.fused_sum(
            targets,
            algorithm,
            BF16,
            factors=factors,
            constant_weight=constant_weight,
            before=lambda rank: write_late(operands[rank][late], targets[rank][late]),
        )
    return wrong(found, wanted)


@of(2, 3)
@every_skinny_kernel
@pytest.mark.parametrize("rows", [1, *(tile.rows for tile in SKINNY_TILES)])
@pytest.mark.parametrize("constant_weight", [False, True])
def test_rows_that_the_kernel_before_writes_are_those_multiplied(ranks, algorithm, rows, constant_weight):
    for k in DEPTHS[""]:
        pairs = drawn(ranks, "", rows, COLUMNS, k, seed=rows + k)
        found = wrong_after_late_writes(ranks, algorithm, "", pairs, 0, constant_weight)
        assert found == [0] * ranks.world_size


@of(2, 3)
@every_skinny_kernel
def test_a_weight_that_the_kernel_before_writes_is_too_unless_it_is_called_constant(ranks, algorithm):
    pairs = drawn(ranks, "", 16, COLUMNS, 520, seed=1)

    assert wrong_after_late_writes(ranks, algorithm, "", pairs, 1, constant_weight=False) == [0] * ranks.world_size
    assert all(wrong_after_late_writes(ranks, algorithm, "", pairs, 1, constant_weight=True))


@of(2, 4, 8)
@every_skinny_kernel
@every_format
@pytest.mark.parametrize("constant_weight", [False, True])
@pytest.mark.parametrize("late", [0, 2], ids=["a", "a_scale"])
def test_rows_and_scales_that_the_kernel_before_writes_are_used(ranks, algorithm, factors, constant_weight, late):
    operands = drawn(ranks, factors, 16, COLUMNS, 4096, seed=6)

    found = wrong_after_late_writes(ranks, algorithm, factors, operands, late, constant_weight)

    assert found == [0] * ranks.world_size


@of(2, 3)
@pytest.mark.promise(
    "Calls of two communicators, or as many as declared, end in any order, if a matmul's K is equal on all ranks."
)
@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.cluster == 1], ids=str)
def test_a_rank_with_room_for_one_block_ends(ranks, tile):
    """Another kernel holds most SMs. The first ranks have room for all blocks of their grids, the last one for one."""
    room = MOST_BLOCKS * (ranks.world_size - 1) + 1
    operands = drawn(ranks, "", ROWS, COLUMNS, 320, seed=ranks.world_size)

    expect_sum(ranks, REDUCE, "", operands, times=1, tile=tile, beside=held(sm_count(0) - room))


HEIGHTS = (1, 8, 40, 64, 100, 200)  # of a rank's part, below a tile's and above
every_group = of(2, 3, 4, 8)
every_form = pytest.mark.parametrize("form", ["", *FORMATS])


def random_rows(generator, *shape, dtype=BF16):
    return torch.randn(*shape, generator=generator).to(dtype)


def scales_of(generator, form, rows, n, k, transposed):
    """A rank's scales of its rows and of its weight, near one and in one layout or the other."""
    blocks = -(-k // BLOCK)
    shapes = ((rows, 1), (n, 1)) if form == "rows" else ((rows, blocks), (-(-n // BLOCK), blocks))
    made = [(torch.rand(*shape, generator=generator) + 0.5).cuda() for shape in shapes]
    return tuple(one.t().contiguous().t() if transposed else one for one in made)


def multiplied(a, w, bias, scales, out_dtype):
    """graphar's matmul, for any K and N."""
    n = len(w)
    if n == 0:
        return torch.empty(len(a), 0, dtype=out_dtype, device="cuda:0")
    bias = functional.pad(bias.cuda(), (0, -n % 8)) if bias is not None else None
    if not scales:
        w = functional.pad(w, (0, 0, 0, -n % 8))
        return gemm.matmul(aligned_copy(a), aligned_copy(w), bias=bias)[:, :n].contiguous()
    a_scale, w_scale = scales
    w = torch.cat([w.view(torch.uint8), w.new_zeros(-n % 8, w.shape[1]).view(torch.uint8)]).view(FP8)
    w_scale = functional.pad(w_scale, (0, 0, 0, len(w) - n)) if a_scale.shape[1] == 1 else w_scale  # of rows
    given = {"a_scale": a_scale, "w_scale": w_scale, "out_dtype": out_dtype}
    return matmul(aligned_copy(a), aligned_copy(w), bias=bias, **given)[:, :n].contiguous()


def wrong_gathered(ranks, form, counts, columns, k, tile=None, dtype=BF16, transposed=False, with_bias=False):
    """How many elements of all products, gathered rows and scales differ from those of a gather and graphar's matmul.

    Rank r's weight has ``columns`` + r rows. It is transposed, or its scales are.
    """
    generator, element = torch.Generator().manual_seed(sum(counts) + k), FP8 if form else dtype
    parts = [random_rows(generator, count, k, dtype=element) for count in counts]
    weights = [random_rows(generator, columns + rank, k, dtype=element).cuda() for rank in range(len(counts))]
    weights = [w.t().contiguous().t() if transposed and not form else w for w in weights]
    biases = [random_rows(generator, len(w), dtype=dtype) for w in weights] if with_bias else None
    scales = [
        scales_of(generator, form, len(part), len(w), k, transposed)
        for part, w in zip(parts, weights, strict=True)
        if form
    ]
    products, gathered, *of = ranks.allgather_matmul(parts, weights, biases, tile, scales=scales, out_dtype=dtype)
    whole = torch.cat([part.view(torch.uint8) for part in parts]).view(element).cuda()
    of_rows, found = torch.cat([own for own, _ in scales]).contiguous() if form else None, 0
    for rank, w in enumerate(weights):
        own = (of_rows, scales[rank][1]) if form else ()
        wanted = multiplied(whole, w, biases[rank] if biases else None, own, dtype)
        found += same_bits(products[rank].contiguous(), wanted)
        found += int((gathered[rank].contiguous().view(torch.uint8) != whole.view(torch.uint8)).sum())
        found += sum(same_bits(one[rank], of_rows) for one in of)
    return found


def tiles_of(form):
    return FP8_TILES if form else GATHERED_TILES


every_gathered_tile = pytest.mark.parametrize(
    ("form", "tile"), [(form, tile) for form in ("", *FORMATS) for tile in tiles_of(form)], ids=str
)


def parts_of_every_height(world_size):
    """The rows of all ranks in several calls: equally many on all ranks, then different ones on neighbours."""
    yield from ([rows] * world_size for rows in HEIGHTS)
    yield from ([HEIGHTS[(first + rank) % len(HEIGHTS)] for rank in range(world_size)] for first in range(len(HEIGHTS)))


@every_group
@every_gathered_tile
def test_every_tile_gives_the_bits_of_a_gather_and_a_matmul(ranks, form, tile):
    counts = [300 + 17 * rank for rank in range(ranks.world_size)]

    for dtype, transposed in itertools.product((BF16, FP16) if form else (BF16,), (False, True)):
        if form or not transposed or "by_columns" in tile.layouts:
            k = 656 if form else 328
            assert wrong_gathered(ranks, form, counts, 456, k, tile, dtype, transposed, with_bias=True) == 0


@every_group
@every_gathered_tile
def test_parts_that_are_no_whole_tiles_give_these_bits(ranks, form, tile):
    for counts in parts_of_every_height(ranks.world_size):
        assert wrong_gathered(ranks, form, counts, 456, 400 if form else 328, tile) == 0, counts


@every_group
@every_form
def test_ranks_that_take_different_tiles_give_these_bits(ranks, form, monkeypatch):
    turns = itertools.cycle(tiles_of(form))
    monkeypatch.setattr("graphar.plan.matmuls.best_tile", lambda *given: next(turns))

    for counts in parts_of_every_height(ranks.world_size):
        assert wrong_gathered(ranks, form, counts, 456, 400 if form else 328) == 0, counts


@every_group
@pytest.mark.parametrize(("form", "dtype"), [("", BF16), ("", FP16), *((form, BF16) for form in FORMATS)], ids=str)
def test_any_rows_and_columns_in_a_row_give_these_bits(ranks, form, dtype):
    choices = random.Random(ranks.world_size)
    # Scales of up to 128 rows and 128 columns could be of either format.
    fewest, depths = (129, (144, 200, 1024)) if form else (0, (8, 200, 1024))
    for _ in range(12):
        counts = [choices.choice([0, 1, 64, choices.randint(1, 700)]) for _ in range(ranks.world_size)]
        counts[choices.randrange(len(counts))] = choices.randint(1, 700)
        columns, k = choices.randint(fewest, 700), choices.choice([*depths, choices.randint(max(8, fewest), 900)])

        assert wrong_gathered(ranks, form, counts, columns, k, dtype=dtype) == 0, (counts, columns, k)


@every_group
def test_gathered_rows_have_every_bit_pattern(ranks):
    parts = [raw(rank, 64 * 96, BF16).view(64, 96) for rank in range(ranks.world_size)]
    weights = [torch.zeros(8, 96, dtype=BF16)] * ranks.world_size

    _, gathered = ranks.allgather_matmul(parts, weights)

    assert [same_bits(one, torch.cat(parts).cuda()) for one in gathered] == [0] * ranks.world_size


@pytest.fixture
def counts_of_several_launches(ranks, monkeypatch):
    monkeypatch.setattr("graphar.product.fused.gathered_rows_a_launch", lambda *given: 256)
    return [choice for choice, _ in zip(itertools.cycle((700, 256, 0, 1000)), range(ranks.world_size))]


@every_group
@every_form
def test_rows_that_fill_several_launches_give_these_bits(ranks, form, counts_of_several_launches):
    assert wrong_gathered(ranks, form, counts_of_several_launches, 200, 272 if form else 264) == 0


EXACT = "max(v * scale, c[col]) + f[index] - r[row] + row * 3 - col + bf16(index)"


def inputs_of(rows, columns, rank):
    """One rank's tensors of EXACT, and its number."""
    generator = torch.Generator().manual_seed(rank)
    sizes = (columns, rows * columns, rows)
    return EpilogueInputs([random_rows(generator, size).cuda() for size in sizes], [0.375])


def wrong_after_epilogue(ranks, counts, columns, k, tile=None, dtype=BF16):
    """How many elements of integer products differ from the specification after EXACT, and of the gathered rows."""
    generator = torch.Generator().manual_seed(sum(counts) + k)

    def integers(*shape):
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)

    parts = [integers(count, k) for count in counts]
    weights = [integers(own, k).cuda() for own in columns]
    inputs = [inputs_of(sum(counts), own, rank) for rank, own in enumerate(columns)]
    products, gathered = ranks.allgather_matmul(parts, weights, None, tile, EXACT, inputs)
    rows, found = [part.cuda() for part in parts], 0
    for rank, own in enumerate(columns):
        tensors = dict(zip("cfr", inputs[rank].tensors, strict=True))
        form = Pointwise(EXACT, (BF16,) * 3, max(1, own))
        wanted = reference.rounded_after(form, inputs[rank], unrounded_product(torch.cat(rows), weights[rank]), dtype)
        specified = Epilogue(EXACT, scale=0.375, **tensors)
        found += same_bits(wanted, reference.fused_allgather_matmul(rows, weights[rank], epilogue=specified))
        found += same_bits(products[rank].contiguous(), wanted)
        found += same_bits(gathered[rank].contiguous(), torch.cat(rows))
    return found


@every_group
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("tile", GATHERED_TILES, ids=str)
def test_an_epilogue_is_applied_to_each_element_in_its_place(ranks, tile, dtype):
    counts, columns = (
        [first + step * rank for rank in range(ranks.world_size)] for first, step in ((300, 17), (456, 1))
    )

    assert wrong_after_epilogue(ranks, counts, columns, 328, tile, dtype) == 0


@every_group
def test_an_epilogue_of_ranks_without_rows_or_columns_gives_the_specification(ranks):
    counts = [0 if rank == 1 else 130 for rank in range(ranks.world_size)]
    columns = [0 if rank == 0 else 77 + rank for rank in range(ranks.world_size)]

    assert wrong_after_epilogue(ranks, counts, columns, 72) == 0


@every_group
def test_an_epilogue_counts_on_over_several_launches(ranks, counts_of_several_launches):
    assert wrong_after_epilogue(ranks, counts_of_several_launches, [200] * ranks.world_size, 264) == 0


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("columns", [0, 136])
def test_behind_an_all_gather_the_epilogue_is_applied_to_the_unrounded_product(dtype, columns):
    """One rank alone gathers, then multiplies by torch."""
    generator = torch.Generator().manual_seed(columns)
    x, w = (
        torch.randint(-60, 61, shape, generator=generator).to(dtype).cuda() for shape in ((96, 264), (columns, 264))
    )
    c = torch.arange(columns).to(dtype).cuda()
    with graphar.Communicator(devices=["cuda:0"]) as alone:
        (y,) = graphar.fused_allgather_matmul(
            [x], [w], bias=[c], epilogue=Epilogue("v / 64 + c[col] - row", c=[c]), group=alone
        )

    wanted = reference.fused_allgather_matmul([x], w, c, epilogue=Epilogue("v / 64 + c[col] - row", c=c))
    assert same_bits(y, wanted) == 0
