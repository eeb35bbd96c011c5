"""Which calls one kernel multiplies and sums tile by tile, and what it is given."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.plan import matmuls
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.policy import Chip
from graphar.plan.tables import Table, shipped_table
from graphar.plan.tiles import SKINNY_TILES, skinny_tile, travels_in_tiles
from graphar.plan.work import ALLGATHER_MATMUL, FACTORS, MATMUL_ALLREDUCE, MATMUL_REDUCESCATTER, Product
from graphar.product import fused
from graphar.product.fused import box_rows
from graphar.product.gemm import layout_of
from graphar.product.operands import MatmulOperands
from graphar.product.products import takes_tiles
from graphar.product.tensor_maps import matrix_of

H200 = shipped_table("nvidia_h200")
POLICY, SMS, CHIP = H200.matmul, 132, Chip(132, "sm_90a")


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000, 4096, 10001])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_rows_are_owned_in_whole_tiles_but_for_the_last(rows, world_size):
    owned = matmuls.owned_rows(rows, world_size)

    assert sum(owned) == rows
    assert len(owned) == world_size
    partial = [count for count in owned if count % 128]
    assert len(partial) <= 1
    assert max(owned) - min(owned) <= 256


class Ranks:
    """Stands in for an engine of GPUs."""

    def __init__(self, world_size: int = 4, no_kernel: str = "", arch: str = "sm_90a", table: Table = H200) -> None:
        self.world_size, self.devices, self.table = world_size, None, table
        self._no_kernel = no_kernel
        self.runner = SimpleNamespace(chip=Chip(SMS, arch), members=[SimpleNamespace(rank=0, device=0)])
        self.runner.prepare_all = lambda key, algorithm, words, load: [{key: words}]
        self.runner.lock, self.runner.raise_failure = contextlib.nullcontext(), lambda: None

    def keeping_failure(self):
        return contextlib.nullcontext()

    def why_no_kernel(self, op, x):
        return self._no_kernel


def operand(dtype=torch.bfloat16, is_cuda=True):
    return SimpleNamespace(is_cuda=is_cuda, dtype=dtype)


def takes(ranks=None, partition="tiles", a=None, rows=4096, columns=8192, op=MATMUL_ALLREDUCE, **how):
    ranks = ranks or Ranks()
    counts = tuple(matmuls.owned_rows(rows, ranks.world_size))
    work = Product(op, counts, columns, partition=partition, **how)
    return takes_tiles(ranks, Call(work, torch.bfloat16, 0), a or operand())


# Products of every kind: in 16 bits, with scales, and as a tree.
KINDS = [{}, {"partition": "auto", "format": "rows"}, {"partition": "auto", "format": "blocks"}]
KINDS += [{"partition": "tp_invariant"}]


@pytest.mark.parametrize("rows", [1, 64, 100000])
def test_what_asks_for_tiles_gets_them_at_any_size(rows):
    assert takes(rows=rows, columns=8)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "".join(map(str, kind.values())) or "plain")
@pytest.mark.parametrize(
    "call",
    [
        {"a": operand(torch.float32)},
        {"a": operand(is_cuda=False)},
        {"columns": 8196},
        {"columns": 1 << 19},
        {"ranks": Ranks(no_kernel="kernels serve 2 to 8 ranks, not 9")},
        {"ranks": Ranks(arch="sm_90")},
        {"partition": "none"},
    ],
    ids=["fp32", "cpu", "columns", "scratch", "ranks", "device", "none"],
)
def test_what_the_kernel_cannot_serve_goes_another_way(kind, call):
    assert takes(**kind)
    assert not takes(**kind | call)


@pytest.mark.parametrize(
    "call", [{"codec": "fp8_e4m3"}, {"codec": "int4", "columns": 8208}, {"partition": "split_m"}], ids=str
)
def test_codecs_and_partitions_without_a_kernel_go_another_way(call):
    assert not takes(**call)


@pytest.mark.parametrize(
    ("world_size", "rows", "taken"),
    [
        (4, 64, True),
        (4, 65, False),
        (4, 512, True),
        (4, 511, False),
        (5, 64, False),
        (2, 512, True),
        (3, 2047, False),
        (8, 1 << 20, False),
    ],
)
def test_auto_takes_it_where_it_was_measured_to_be_faster(world_size, rows, taken):
    assert takes(Ranks(world_size), "auto", rows=rows) == taken


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 64, 65, 1023, 1024, 2048, 100000])
def test_batch_invariant_calls_take_it_where_auto_does(world_size, rows):
    assert takes(Ranks(world_size), "batch_invariant", rows=rows) == takes(Ranks(world_size), "auto", rows=rows)


@pytest.mark.parametrize(
    ("world_size", "rows", "taken"),
    [(2, 4096, True), (2, 4095, False), (2, 1, False), (4, 2048, True), (4, 2047, False), (3, 4096, False)],
)
def test_auto_takes_a_codec_where_that_was_measured_to_be_faster(world_size, rows, taken):
    assert takes(Ranks(world_size), "auto", codec="int8", rows=rows) == taken
    scattered = Product(MATMUL_REDUCESCATTER, (rows,), 8192, codec="int8")
    assert not matmuls.prefers_tiles(scattered, POLICY, CHIP, world_size)


@pytest.mark.parametrize(
    ("codec", "columns", "travels"),
    [
        (Codec(8), 96, True),
        (Codec(8), 104, False),
        (Codec(2, 64, scale_dtype=torch.float32), 128, True),
        (Codec(2, 64), 96, False),
        (Codec(4, 128), 128, False),
        (Codec(4, rounding="stochastic"), 64, False),
        (Codec(4, scheme="minmax"), 64, False),
    ],
    ids=lambda case: getattr(case, "text", str(case)),
)
def test_codecs_that_round_to_nearest_travel_in_tiles_where_rows_are_whole_buckets(codec, columns, travels):
    assert travels_in_tiles(codec, columns) == travels


@pytest.mark.parametrize(
    ("columns", "scattered", "taken"),
    [(8192, False, True), (8192, True, False), (1 << 17, False, False), (4096, False, False), (9216, False, False)],
)
def test_auto_takes_few_rows_of_a_small_result_that_is_summed_whole_and_keeps_the_sms_busy(columns, scattered, taken):
    work = Product(MATMUL_REDUCESCATTER if scattered else MATMUL_ALLREDUCE, (16,), columns)
    assert matmuls.prefers_tiles(work, POLICY, CHIP, 4) == taken


@pytest.mark.parametrize(("rows", "scales", "taken"), [(64, "rows", True), (32, "blocks", True), (33, "blocks", False)])
def test_auto_takes_few_rows_with_scales_of_blocks_up_to_32(rows, scales, taken):
    work = Product(MATMUL_ALLREDUCE, (rows,), 8192, format=scales)
    assert matmuls.prefers_tiles(work, POLICY, CHIP, 4) == taken


@pytest.mark.parametrize("how", [{"partition": "tp_invariant"}, *({"format": name} for name in FACTORS)], ids=repr)
def test_auto_takes_tiles_from_the_same_number_of_elements_for_all_products(how):
    least = POLICY.tiles_from(4, False) // 1024

    works = [Product(MATMUL_ALLREDUCE, (rows,), 1024, **how) for rows in (least - 1, least)]
    assert [matmuls.prefers_tiles(work, POLICY, CHIP, 4) for work in works] == [False, True]


@pytest.mark.parametrize(("columns", "taken"), [(4088, False), (4096, True), (8384, True), (8392, False)])
def test_auto_takes_few_rows_of_two_ranks_from_fewer_columns_on_if_they_are_one_wave(columns, taken):
    assert matmuls.prefers_tiles(Product(MATMUL_ALLREDUCE, (16,), columns), POLICY, CHIP, 2) == taken


@pytest.mark.parametrize(
    ("archs", "columns", "reason"),
    [
        (("sm_90a", "sm_90a"), 8192, None),
        (("sm_90a", "sm_100a"), 8192, "a rank's device is not of sm_90a"),
        (("sm_90a", "sm_90a"), 1 << 20, "1048576 columns are too many for its scratch"),
    ],
)
def test_ranks_agree_on_what_serves(archs, columns, reason):
    ranks = Ranks(2)
    ranks.runner.chip = Chip.in_common(Chip(SMS, arch) for arch in archs)

    assert matmuls.why_not_columns(Product(MATMUL_ALLREDUCE, (), columns), ranks.runner.chip, 2) == reason


def bound(op, rows, columns, codec="", ranks=None):
    """The fused kernel of a call on this rank's ``rows``, and 8 of each other rank."""
    work = Product(op, (rows, 8, 8, 8), columns, codec=codec)
    ranks = ranks or Ranks()
    call = Call(work, torch.bfloat16, 0)
    return fused.fused_launches(ranks, call, matmuls.fused_algorithm(H200, work, ranks.world_size))


def test_ranks_whose_codecs_differ_in_their_seeds_meet_for_the_same_kernel():
    def prepared(codec):
        return bound(MATMUL_ALLREDUCE, 8, 8, codec.text)._functions

    found = [prepared(codec) for codec in (Codec(8), Codec(8, seed=1), Codec(8, seed=2))]

    assert found == found[:1] * 3
    assert prepared(Codec(6)) != found[0]


ALIGNED = torch.randn(6, 16).bfloat16()


@pytest.fixture
def place(monkeypatch):
    """Returns operands as the kernel of a reduce-scatter takes them."""
    monkeypatch.setattr(fused, "why_not", lambda a, w, out: "")  # these tensors are on the CPU
    return lambda own: bound(MATMUL_REDUCESCATTER, len(own.a), len(own.w))._place(own)


@pytest.mark.parametrize("a", [ALIGNED[:, 1:], ALIGNED[:, :7], ALIGNED[:, ::2], torch.randn(5, 6).bfloat16().t()])
@pytest.mark.parametrize("transposed", [False, True])
def test_operands_that_lie_badly_are_copied(place, a, transposed):
    w = torch.randn(8, a.shape[1]).bfloat16()
    weights = w.t().contiguous().t() if transposed else w[:, :]
    out = torch.empty(6, 8).bfloat16()

    found = place(MatmulOperands(a, weights, None, out))

    assert matrix_of(found.a)
    assert layout_of(found.w)
    assert torch.equal(found.a, a)
    assert torch.equal(found.w, w)
    assert found.bias is None
    assert found.out is out


def test_operands_that_lie_well_are_not_copied(place):
    given = MatmulOperands(ALIGNED, torch.randn(16, 24).bfloat16().t(), None, torch.empty(6, 24).bfloat16())

    assert place(given) is given


def test_a_rank_without_k_adds_zeros(place):
    bias = torch.randn(8).bfloat16()

    found = place(MatmulOperands(ALIGNED[:, :0], ALIGNED.t()[:8, :0], bias, torch.empty(6, 8).bfloat16()))

    assert found.a.shape[1] == found.w.shape[1] > 0
    assert (found.a @ found.w.t()).count_nonzero() == 0
    assert found.bias is bias


def algorithm_of(counts, columns, world_size=4, **options):
    return matmuls.fused_algorithm(H200, Product(MATMUL_ALLREDUCE, tuple(counts), columns, **options), world_size)


@pytest.mark.parametrize(
    ("world_size", "rows", "columns", "algorithm"),
    [
        (4, 1, 8192, Algorithm.MATMUL_ONE_SHOT),
        (4, 16, 8192, Algorithm.MATMUL_ONE_SHOT),
        (4, 17, 8192, Algorithm.MATMUL_TWO_SHOT),
        (4, 64, 16384, Algorithm.MATMUL_TWO_SHOT),
        (2, 64, 16384, Algorithm.MATMUL_ONE_SHOT),
        (8, 9, 8192, Algorithm.MATMUL_TWO_SHOT),
        (4, 64, 16392, Algorithm.MATMUL_ALLREDUCE),
        (4, 65, 8, Algorithm.MATMUL_ALLREDUCE),
    ],
)
def test_results_of_few_rows_are_summed_in_one_hop_or_two_by_size(world_size, rows, columns, algorithm):
    assert algorithm_of(matmuls.owned_rows(rows, world_size), columns, world_size) is algorithm


@pytest.mark.parametrize("how", [{"epilogue": form_to_prepare("-v")}, {"codec": "int8"}])
def test_with_an_epilogue_or_a_codec_few_rows_are_summed_in_parts_too(how):
    assert algorithm_of([1, 0, 0, 0], 32, **how) is Algorithm.MATMUL_ALLREDUCE


@pytest.mark.parametrize(
    ("op", "algorithm"),
    [(MATMUL_REDUCESCATTER, Algorithm.MATMUL_REDUCESCATTER), (ALLGATHER_MATMUL, Algorithm.ALLGATHER_MATMUL)],
)
@pytest.mark.parametrize("rows", [1, 4096])
def test_other_products_have_one_algorithm_whatever_their_size(op, algorithm, rows):
    assert matmuls.fused_algorithm(H200, Product(op, (rows,) * 4, 8192), 4) is algorithm


def chosen(algorithm, rows, columns=8192, codec=None):
    work = Product(algorithm.op, (rows,) * 4, columns, codec=codec.text if codec else "")
    return matmuls.tiles_to_load(POLICY, algorithm, work, CHIP, 4)


def test_a_codec_takes_tiles_that_leave_registers_to_code():
    for rows in (1, 64, 200, 256, 4096):
        for algorithm in (Algorithm.MATMUL_REDUCESCATTER, Algorithm.MATMUL_ALLREDUCE):
            assert all(tile.columns <= 128 for tile in chosen(algorithm, rows, 16384, Codec(8)))


@pytest.mark.parametrize("world_size", range(3, 9))
def test_every_rank_sums_some_of_what_is_summed_in_two_hops(world_size):
    """A rank that sums nothing waits for the ranks that do. It might name one of them instead of an absent rank."""
    for rows in (1, 2, 7, 8, 64):
        kernels = ((n, algorithm_of([rows], n, world_size)) for n in range(8, 1 << 19, 8))
        smallest = next(n for n, algorithm in kernels if algorithm is Algorithm.MATMUL_TWO_SHOT)
        owners = {(row + line) % world_size for row in range(rows) for line in range(-(-smallest // 64))}
        assert len(owners) == world_size


def test_few_rows_take_the_smallest_tile_with_room_and_its_block_fits():
    tiles = [skinny_tile(rows) for rows in range(1, 65)]

    assert all(tile.rows >= rows for rows, tile in enumerate(tiles, 1))
    assert [tiles[rows - 1].rows for rows in (1, 8, 9, 16, 17, 33, 64)] == [8, 8, 16, 16, 32, 64, 64]
    assert all(tile.shared_nbytes + 2048 <= 228 << 10 for tile in SKINNY_TILES)


def test_a_cluster_loads_each_row_once_in_eights():
    for rows in range(1, 65):
        tile = skinny_tile(rows)
        share = box_rows(tile, rows)
        assert share % 8 == 0
        assert rows <= share * tile.cluster <= tile.rows


@pytest.mark.parametrize("algorithm", [Algorithm.MATMUL_REDUCESCATTER, Algorithm.MATMUL_ALLREDUCE])
@pytest.mark.parametrize("rows", [1, 64, 100, 128, 200, 256, 4096])
def test_ranks_take_tiles_of_as_many_columns_whatever_their_k(algorithm, rows):
    tiles = chosen(algorithm, rows)

    assert {matmuls.tile_for(POLICY, tiles, k) for k in (8, 2048, 7168)} == set(tiles) <= set(algorithm.row.tiles)
    assert len({tile.columns for tile in tiles}) == 1


def test_finished_tiles_leave_sooner_where_consumers_alternate_unless_k_is_large():
    tiles = chosen(Algorithm.MATMUL_ALLREDUCE, 256)

    assert [matmuls.tile_for(POLICY, tiles, k).alternating for k in (2048, 7168)] == [True, False]


def test_consumers_that_make_codes_do_not_alternate():
    for rows in (200, 256, 4096):
        assert not any(tile.alternating for tile in chosen(Algorithm.MATMUL_ALLREDUCE, rows, codec=Codec(8)))


@pytest.fixture
def run(monkeypatch):
    """Runs an all-reduce whose kernel does what a function of the placed operands does."""
    monkeypatch.setattr(fused, "why_not", lambda a, w, out: "")
    monkeypatch.setattr(fused, "on_own_device", lambda device, launch: launch)

    def run(out, kernel):
        launches = bound(MATMUL_ALLREDUCE, 100, out.shape[1])
        launches._launch = lambda member, own, one: lambda *tensors: kernel(own)
        launches.run([Operands((ALIGNED, torch.ones(8, 16).bfloat16()), (out,))])

    return run


def test_a_result_that_lies_badly_is_copied_to_its_place(run):
    out = torch.empty(6 * 8 + 1).bfloat16()[1:].view(6, 8)

    run(out, lambda own: own.out.fill_(own.out.data_ptr() % 16))

    assert out.data_ptr() % 16
    assert out.count_nonzero() == 0


def test_a_result_that_lies_well_is_not_copied(run):
    out, given = torch.empty(6, 8).bfloat16(), []

    run(out, lambda own: given.append(own.out))

    assert given[0] is out
