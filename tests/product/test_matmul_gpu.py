"""graphar's matmul on a GPU, against exact integers and against float64."""

import itertools
import threading

import pytest
import torch

from graphar.numerics.leaf_tree import LEAVES, tree_sum
from graphar.plan.algorithms import MATMUL_TYPES
from graphar.plan.tiles import LAYOUTS, LEAF_COUNTS, LEAF_TILES, MATMUL_TILES, MatmulTile
from graphar.product.gemm import _sms_in_clusters, matmul
from graphar.runtime.launcher import sm_count
from tests.cases import same_bits

pytestmark = [pytest.mark.gpu(1), pytest.mark.usefixtures("hopper")]

every_tile = pytest.mark.parametrize("tile", MATMUL_TILES, ids=str)
every_dtype = pytest.mark.parametrize("dtype", MATMUL_TYPES, ids=str)
EVERY_TILE = list(itertools.chain(*LEAF_TILES.values()))  # those of one leaf are MATMUL_TILES
every_kind = pytest.mark.parametrize(
    ("tile", "layout"), [(tile, layout) for tile in EVERY_TILE for layout in tile.layouts], ids=str
)
every_layout = pytest.mark.parametrize("layout", LAYOUTS)
TAILS = (1, 7, 129, 520)
COLUMNS = (8, 72, 136, 520)  # the kernel stores eight at a time


class Framed:
    """A matrix with NaN beside and between its rows, which begin at multiples of 16 bytes."""

    def __init__(self, values: torch.Tensor) -> None:
        rows, columns = values.shape
        leading = (columns + 15) // 8 * 8
        self.buffer = torch.full((rows + 2, leading), float("nan"), dtype=values.dtype, device="cuda")
        self.inside = self.buffer[1:-1, :columns]
        self.inside.copy_(values)

    def frame_is_untouched(self) -> bool:
        frame = self.buffer.clone()
        frame[1:-1, : self.inside.shape[1]] = float("nan")
        return bool(frame.isnan().all())


def operand(values: torch.Tensor, layout: str = "by_rows") -> torch.Tensor:
    return Framed(values).inside if layout == "by_rows" else Framed(values.t()).inside.t()


def integers(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random integers from -8 to 8: a sum of fewer than 2^18 products is exact in fp32, in any order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(-8, 9, (rows, columns), device="cuda", generator=generator).to(dtype)


def normal(rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, columns, dtype=dtype, device="cuda", generator=generator)


def exact(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (a.double() @ w.double().t()).to(a.dtype)


def check_integers(m: int, n: int, k: int, dtype: torch.dtype, layout: str, tile: MatmulTile | None, **options) -> None:
    a, w, leaves = integers(m, k, dtype, seed=1), integers(n, k, dtype, seed=2), tile.leaves if tile else 1
    for out_dtype in (dtype, torch.float32):
        out = Framed(torch.zeros(m, n, dtype=out_dtype, device="cuda"))

        how = options | {"leaves": leaves, "out_dtype": out_dtype}
        matmul(operand(a), operand(w, layout), out.inside, tile=tile, **how)

        assert out.inside.equal(exact(a.float(), w.float()).to(out_dtype)), (m, n, k, out_dtype)
        assert out.frame_is_untouched(), (m, n, k, out_dtype)


@every_kind
@every_dtype
def test_integers_of_any_size_give_the_exact_result(tile, layout, dtype):
    depths = [64 * tile.leaves * steps for steps in (1, 3)] + [k for k in TAILS if tile.leaves == 1]
    for m, n, k in itertools.product(TAILS, COLUMNS, depths):
        check_integers(m, n, k, dtype, layout, tile)


@every_kind
def test_more_tiles_than_sms_and_more_of_k_than_the_ring_holds(tile, layout):
    for sms in (None, 7):
        check_integers(4095, 2056, 1030 if tile.leaves == 1 else 1536, torch.bfloat16, layout, tile, sms=sms)


def test_a_tile_of_columns_that_are_no_whole_boxes_refuses_a_weight_by_columns():
    a, w = integers(8, 64, torch.bfloat16, 1), integers(16, 64, torch.bfloat16, 2)

    with pytest.raises(ValueError, match=r"MatmulTile<64, 160, .*> serves weights by_rows, got one by_columns"):
        matmul(a, operand(w, "by_columns"), tile=MatmulTile(64, 160, stages=7))


@every_tile
@pytest.mark.parametrize("sms", [1, 2, 7, 108])
def test_any_number_of_sms_gives_the_exact_result(tile, sms):
    check_integers(700, 904, 200, torch.bfloat16, "by_rows", tile, sms=sms)


@every_tile
@every_dtype
@pytest.mark.parametrize("k", [64, 2048, 7168])
def test_random_data_are_as_close_to_float64_as_fp32_sums_can_be(tile, dtype, k):
    a, w = normal(300, k, dtype, seed=3), normal(520, k, dtype, seed=4)

    out = matmul(a, w, tile=tile)

    expected = a.double() @ w.double().t()
    # wgmma adds 16 products at a time and keeps at least 22 bits of each sum, none of which is larger than the sum of
    # the absolute values; rounding the last one errs by half a unit in its last place.
    of_sums = k / 16 * 2**-22 * (a.double().abs() @ w.double().abs().t())
    of_rounding = torch.finfo(dtype).eps / 2 * (expected.abs() + of_sums)
    assert ((out.double() - expected).abs() <= of_sums + of_rounding).all()


@every_dtype
@every_layout
@pytest.mark.parametrize("k", [64, 1000, 7168])
def test_a_row_has_the_same_bits_for_every_number_of_rows(dtype, layout, k):
    a, w = normal(4096, k, dtype, seed=5), operand(normal(1032, k, dtype, seed=6), layout)

    for tile in (*[tile for tile in MATMUL_TILES if layout in tile.layouts], None):  # None: the chosen one
        whole = matmul(a, w, tile=tile)
        for rows in (1, 8, 16, 17, 64, 65, 128, 300, 2048):
            first = 4096 - rows
            assert same_bits(matmul(a[first:], w), whole[first:]) == 0, (tile, rows)


@every_dtype
@pytest.mark.parametrize("n", [8, 136, 520])
def test_a_bias_is_added_before_rounding(dtype, n):
    a, w, bias = integers(129, 200, dtype, 9), integers(n, 200, dtype, 10), integers(1, n, dtype, 11)[0]

    for tile in MATMUL_TILES:
        out = Framed(torch.zeros(129, n, dtype=dtype, device="cuda"))
        matmul(a, w, out.inside, bias=bias, tile=tile)
        assert out.inside.equal((a.double() @ w.double().t() + bias.double()).to(dtype)), tile
        assert out.frame_is_untouched(), tile


def test_what_is_not_a_number_stays_in_its_row_and_column():
    a, w = integers(200, 300, torch.bfloat16, 12), integers(304, 300, torch.bfloat16, 13)
    a[7, 3], a[8, 5], w[11, 9] = float("nan"), float("inf"), float("-inf")

    out = matmul(operand(a), operand(w))

    assert torch.equal(out.isfinite(), (a.float() @ w.float().t()).isfinite())


def test_calls_in_a_row_each_see_the_one_before():
    tile = MatmulTile(128, 128, 6, cluster=2)
    identity = torch.eye(512, dtype=torch.bfloat16, device="cuda").roll(1, dims=0)
    first = integers(640, 512, torch.bfloat16, 14)
    x, y = first.clone(), torch.empty_like(first)
    matmul(x, identity, y, tile=tile)  # loads the kernel, which no capture may
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(32):
            matmul(x, identity, y, tile=tile)
            matmul(y, identity, x, tile=tile)
    x.copy_(first)
    for _ in range(5):
        graph.replay()

    assert x.equal(first.roll(5 * 64, dims=1))


def test_a_new_thread_multiplies_before_it_calls_the_cuda_runtime():
    a, w = integers(100, 256, torch.bfloat16, seed=1), integers(72, 256, torch.bfloat16, seed=2)
    out = torch.empty(100, 72, dtype=torch.bfloat16, device="cuda")

    for _ in range(2):  # a launch that is new, and one that is known
        out.fill_(7)
        torch.cuda.synchronize()
        thread = threading.Thread(target=matmul, args=(a, w, out))
        thread.start()
        thread.join()
        assert out.equal(exact(a.float(), w.float()).bfloat16())


every_count = pytest.mark.parametrize("leaves", LEAF_COUNTS)
every_tile_of_leaves = pytest.mark.parametrize("tile", EVERY_TILE, ids=str)
SPLIT_TILES = [tile for tile in EVERY_TILE if tile.split > 1]
every_split_tile = pytest.mark.parametrize("tile", SPLIT_TILES, ids=str)


def partials(a: torch.Tensor, w: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """What each rank computes of a row-parallel layer, in fp32."""
    leaves = LEAVES // world_size
    shares = zip(a.chunk(world_size, 1), w.chunk(world_size, 1), strict=True)
    return [matmul(*share, leaves=leaves, out_dtype=torch.float32) for share in shares]


@every_dtype
@every_layout
def test_the_partials_of_every_number_of_ranks_have_one_sum(dtype, layout):
    a, w = normal(300, 4096, dtype, seed=5), normal(520, 4096, dtype, seed=6)
    bias = normal(1, 520, dtype, seed=7)[0]
    w = operand(w, layout)

    (whole,) = partials(a, w, 1)

    assert same_bits(matmul(a, w, leaves=LEAVES), whole.to(dtype)) == 0
    assert same_bits(matmul(a, w, bias=bias, leaves=LEAVES), (whole + bias.float()).to(dtype)) == 0
    for world_size in (2, 4, 8):
        assert same_bits(tree_sum(partials(a, w, world_size)), whole) == 0, world_size


def test_a_sum_in_the_order_of_k_has_other_bits_than_the_tree():
    a, w = normal(300, 4096, torch.bfloat16, seed=5), normal(520, 4096, torch.bfloat16, seed=6)
    (whole,) = partials(a, w, 1)
    first, *others = partials(a, w, 8)

    assert same_bits(sum(others, first), whole) > 0
    assert same_bits(matmul(a, w, out_dtype=torch.float32), whole) > 0


@every_count
def test_every_tile_and_grid_gives_the_same_bits_of_leaves(leaves):
    a, w = normal(1000, 2048, torch.bfloat16, seed=5), normal(1000, 2048, torch.bfloat16, seed=6)
    first = matmul(a, w, leaves=leaves, out_dtype=torch.float32)

    for tile, sms in itertools.product(LEAF_TILES[leaves], (None, 5)):
        out = torch.full_like(first, torch.nan)
        matmul(a, w, out, tile=tile, sms=sms, leaves=leaves, out_dtype=torch.float32)
        assert same_bits(out, first) == 0, (tile, sms)
        assert same_bits(matmul(a, w, tile=tile, leaves=leaves), first.bfloat16()) == 0, tile
        if "by_columns" in tile.layouts:
            assert same_bits(matmul(a, operand(w, "by_columns"), tile=tile, leaves=leaves), first.bfloat16()) == 0, tile


@pytest.mark.parametrize(
    ("tile", "layout"), [(tile, layout) for tile in SPLIT_TILES for layout in tile.layouts], ids=str
)
def test_leaves_that_blocks_split_have_the_bits_of_one_block(tile, layout):
    whole = MatmulTile(64, 64, stages=12, leaves=tile.leaves)
    for m, n, k in ((1, 1024, 8192), (16, 2056, 1024), (65, 520, 4096), (256, 1024, 8192), (1000, 1032, 512)):
        a, w = normal(m, k, torch.bfloat16, seed=5), operand(normal(n, k, torch.bfloat16, seed=6), layout)
        bias = normal(1, n, torch.bfloat16, seed=7)[0]
        for options in ({"bias": bias}, {"out_dtype": torch.float32}):
            first = matmul(a, w, tile=whole, leaves=tile.leaves, **options)
            for sms in (None, 7):
                out = Framed(torch.full_like(first, torch.nan))
                matmul(a, w, out.inside, tile=tile, sms=sms, leaves=tile.leaves, **options)
                assert same_bits(out.inside.contiguous(), first) == 0, (m, n, k, sms, options.keys())
                assert out.frame_is_untouched(), (m, n, k, sms)


def test_the_largest_clusters_find_most_sms():
    found, sms = _sms_in_clusters(0), sm_count(0)

    assert found % 8 == 0
    assert sms // 2 < found <= sms


@every_split_tile
def test_leaves_that_blocks_split_have_the_same_bits_beside_other_work(tile):
    a, w = normal(500, 4096, torch.bfloat16, seed=7), normal(1024, 4096, torch.bfloat16, seed=8)
    first, other = matmul(a, w, tile=tile, leaves=tile.leaves), torch.cuda.Stream()
    outs = [torch.full_like(first, torch.nan) for _ in range(200)]
    torch.cuda.synchronize()

    with torch.cuda.stream(other):
        for _ in range(100):
            w.t().contiguous()
    for out in outs:
        matmul(a, w, out, tile=tile, leaves=tile.leaves)

    torch.cuda.synchronize()
    assert [same_bits(out, first) for out in outs] == [0] * len(outs)


@every_count
@every_layout
def test_an_element_has_the_same_bits_beside_any_rows_and_columns(leaves, layout):
    a, w = normal(4096, 2048, torch.bfloat16, seed=5), normal(1032, 2048, torch.bfloat16, seed=6)
    how = {"leaves": leaves, "out_dtype": torch.float32}
    whole = matmul(a, operand(w, layout), **how)

    for rows, columns in itertools.product((1, 16, 65, 300, 2048), (8, 136, 1032)):
        part = matmul(a[4096 - rows :], operand(w[1032 - columns :], layout), **how)
        assert same_bits(part, whole[4096 - rows :, 1032 - columns :].contiguous()) == 0, (rows, columns)


@every_count
def test_a_sum_of_leaves_is_as_close_to_float64_as_fp32_sums_can_be(leaves):
    a, w = normal(300, 7168, torch.bfloat16, seed=3), normal(520, 7168, torch.bfloat16, seed=4)

    out = matmul(a, w, leaves=leaves, out_dtype=torch.float32)

    expected = a.double() @ w.double().t()
    of_sums = 7168 / 16 * 2**-22 * (a.double().abs() @ w.double().abs().t())  # as above
    assert ((out.double() - expected).abs() <= of_sums).all()


@every_tile_of_leaves
def test_a_call_gives_the_same_bits_of_leaves_again(tile):
    a, w = normal(2000, 2048, torch.bfloat16, seed=7), normal(2048, 2048, torch.bfloat16, seed=8)
    first = matmul(a, w, tile=tile, leaves=tile.leaves)

    for _ in range(50):
        out = torch.full_like(first, torch.nan)
        assert same_bits(matmul(a, w, out, tile=tile, leaves=tile.leaves), first) == 0
