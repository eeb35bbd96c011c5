"""Which calls one kernel multiplies and adds as a tree tile by tile, and what it is given."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.numerics.leaf_tree import LEAF_UNIT, LEAVES
from graphar.ops import preparation
from graphar.plan import matmuls
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.scratch import MATMUL_BOX_COLUMNS, MATMUL_BOX_ROWS, MATMUL_PARTIAL_PLACES
from graphar.plan.tiles import LAYOUTS, PARTIAL_TILES, SKINNY_TILES, SkinnyTile, skinny_tile
from graphar.plan.work import MATMUL_ALLREDUCE, MATMUL_REDUCESCATTER, Product
from graphar.product import fused, products
from graphar.product.operands import MatmulOperands
from graphar.ranks import agreement
from graphar.runtime.catalogue import SKINNY_KERNELS
from tests.plan.test_algorithms import MOST_SHARED_NBYTES, constant
from tests.plan.test_tiles import CHIP, H200, Ranks, operand

OPS = {MATMUL_ALLREDUCE: Algorithm.MATMUL_ALLREDUCE, MATMUL_REDUCESCATTER: Algorithm.MATMUL_REDUCESCATTER}
INVARIANT = {"partition": "tp_invariant"}
STATIC_NBYTES = 2048  # of shared memory
every_op = pytest.mark.parametrize("op", OPS)
every_world_size = pytest.mark.parametrize("world_size", [2, 4, 8])


def call_of(op=MATMUL_ALLREDUCE, rows=4096, columns=8192, world_size=4, **options):
    counts = tuple(matmuls.owned_rows(rows, world_size))
    return Call(Product(op, counts, columns, **INVARIANT, **options), torch.bfloat16, 0)


def takes(ranks=None, a=None, **options):
    ranks = ranks or Ranks()
    return products.takes_tiles(ranks, call_of(world_size=ranks.world_size, **options), a or operand())


@every_op
@pytest.mark.parametrize(
    ("world_size", "rows", "taken"),
    [(2, 512, True), (2, 511, False), (4, 512, True), (4, 65, False), (8, 1 << 20, False)],
)
def test_results_take_it_whose_partials_have_as_many_bytes_as_rounded_ones_that_do(op, world_size, rows, taken):
    assert takes(Ranks(world_size), op=op, rows=rows) == taken


@pytest.mark.parametrize(
    ("rows", "options", "taken"),
    [
        (1, {}, True),
        (64, {"bias": True}, True),
        (64, {"columns": 1024}, False),
        (64, {"op": MATMUL_REDUCESCATTER}, False),
        (64, {"epilogue": form_to_prepare("-v")}, False),
        (4096, {"bias": True}, True),
        (4096, {"epilogue": form_to_prepare("-v")}, True),
        (4096, {"norm": (1e-6, 0.0)}, False),
    ],
    ids=["one row", "bias", "few columns", "scattered", "epilogue", "many: bias", "many: epilogue", "many: norm"],
)
def test_results_take_one_kernel_where_they_do_so_in_the_order_of_ranks(rows, options, taken):
    assert takes(rows=rows, **options) == taken


def test_a_skinny_result_of_partials_has_half_of_the_scratch():
    limit = max(algorithm.row.limit(4) for algorithm in SKINNY_KERNELS)
    halves, quarters = (Product(MATMUL_ALLREDUCE, (64,), limit // 64 // itemsize) for itemsize in (2, 4))

    assert matmuls.is_skinny(halves, 4)
    assert matmuls.is_skinny(quarters._replace(partition="tp_invariant"), 4)
    assert not matmuls.is_skinny(halves._replace(partition="tp_invariant"), 4)


@every_world_size
def test_a_skinny_call_loads_a_tile_with_the_leaves_of_a_rank(world_size, monkeypatch):
    monkeypatch.setattr(fused, "load_tile", lambda *given: [{}])

    launches = fused.Skinny(Ranks(world_size), call_of(rows=17, world_size=world_size), Algorithm.MATMUL_ONE_SHOT)

    assert launches.tiles == (SkinnyTile(32, 16, 2, leaves=LEAVES // world_size, partials=True),)


def test_shared_memory_of_a_skinny_tile_holds_its_rows_in_fp32():
    for tile in SKINNY_TILES:
        partial = skinny_tile(tile.rows, 4)
        assert partial.shared_nbytes - tile.shared_nbytes == 8192
        assert partial.shared_nbytes + STATIC_NBYTES <= MOST_SHARED_NBYTES


def test_communicators_that_share_a_gpu_multiply_and_then_sum():
    ranks = Ranks()
    ranks.runner.chip = replace(CHIP, communicators=3)

    assert not takes(ranks)


@every_op
def test_the_plan_says_that_one_kernel_does_it(op):
    given = [Operands((operand(), operand()), (operand(),))]

    plan = products.bind(Ranks(), call_of(op, bias=True), given)

    assert plan.config.algorithm is OPS[op]
    assert plan.reason == "multiplied in 2 leaves a rank and summed as a tree in one kernel"


def test_shared_memory_holds_operands_and_a_whole_tile_in_fp32():
    for tile in itertools.chain(*PARTIAL_TILES.values()):
        loaded = tile.stages * (tile.rows + tile.columns) * 128
        assert tile.shared_nbytes == loaded + tile.rows * tile.columns * 4 + 2 * tile.stages * 8
        assert tile.shared_nbytes + STATIC_NBYTES <= MOST_SHARED_NBYTES


def tiles_of(rows, columns, world_size):
    """The tiles that ranks load for sums of partials."""
    work = call_of(rows=rows, columns=columns, world_size=world_size).work
    return matmuls.tiles_to_load(H200.matmul, Algorithm.MATMUL_ALLREDUCE, work, CHIP, world_size)


@every_world_size
def test_every_size_has_a_tile_with_the_leaves_of_a_rank(world_size):
    for rows, columns in itertools.product((64, 1000, 4096, 16384), (512, 4096, 16384)):
        (tile,) = tiles_of(rows, columns, world_size)
        assert tile in PARTIAL_TILES[LEAVES // world_size]
        assert tile.layouts == LAYOUTS


@pytest.mark.parametrize(
    ("rows", "shape"), [(128, (64, 128, 1)), (1000, (128, 128, 1)), (1024, (128, 128, 2)), (8192, (128, 128, 2))]
)
def test_large_results_take_the_shape_that_was_measured_for_rounded_tiles(rows, shape):
    (tile,) = tiles_of(rows, 8192, 4)

    assert (tile.rows, tile.columns, tile.cluster) == shape


@every_world_size
@pytest.mark.parametrize("columns", [8, 64, 1000, 8192, 16384])
def test_the_partial_boxes_of_a_launch_have_places_in_a_slot(world_size, columns):
    work = Product(MATMUL_ALLREDUCE, (), columns, partition="tp_invariant")
    rows = matmuls.summed_rows_a_launch(work, world_size)
    boxes = -(-rows // MATMUL_BOX_ROWS) * -(-columns // MATMUL_BOX_COLUMNS)

    for algorithm in OPS.values():
        assert MATMUL_PARTIAL_PLACES * boxes <= algorithm.row.scratch(world_size).capacity
    assert constant("device/matmul/tile_travel.cuh", "fp32_places") == MATMUL_PARTIAL_PLACES


@pytest.fixture
def bound(monkeypatch):
    """Returns the launches of a call. Their operands are on the CPU."""
    monkeypatch.setattr(fused, "why_not", lambda a, w, out: "")

    def bind(op=MATMUL_ALLREDUCE, **options):
        ranks = Ranks(options.get("world_size", 4))
        call = call_of(op, **options)
        return fused.fused_launches(ranks, call, OPS[op])

    return bind


@every_op
def test_all_ranks_load_one_tile_whatever_their_k_and_take_it(bound, op):
    launches = bound(op)
    (tile,) = launches.tiles

    assert tile.leaves == 2
    for k in (128, 4096, 65536):
        own = MatmulOperands(torch.empty(1, k, device="meta"), None, None, None)
        assert launches._tile_of(own, None, "by_rows") == tile


def test_a_result_takes_twice_the_launches_of_one_that_travels_rounded(bound):
    columns, rounded = 8192, Product(MATMUL_ALLREDUCE, (), 8192)
    rows = 4 * matmuls.summed_rows_a_launch(rounded, 4)
    launches = bound(rows=rows, columns=columns)

    assert len(launches._slices) == 2
    assert sum(sum(one.count) for one in launches._slices) == rows


@pytest.mark.parametrize("k", [2, 100, 128, 130, 512])
def test_leaves_are_filled_up_with_zeros_to_whole_loads(bound, k):
    a, w, out = (torch.randn(shape).bfloat16() for shape in ((6, k), (8, k), (6, 8)))
    launches, given = bound(rows=6, columns=8), MatmulOperands(a, w, None, out)

    found = launches._place(given)

    assert found.a.shape[1] % (2 * LEAF_UNIT) == 0
    assert found.given_k == (None if k % 128 == 0 else k)
    for x, whole in ((a, found.a), (w, found.w)):
        for leaf, part in zip(x.tensor_split(2, 1), whole.chunk(2, 1), strict=True):
            assert torch.equal(part[:, : leaf.shape[1]], leaf)
            assert part[:, leaf.shape[1] :].count_nonzero() == 0
    if k % 128 == 0:
        assert found is given


def test_ranks_with_another_k_are_told(bound, monkeypatch):
    said = []

    def arguments(member, algorithm, one, seconds, words):
        said.append(words)
        return SimpleNamespace(epilogue=SimpleNamespace(put=None))

    launches = bound(rows=6, columns=8)
    launches._runner.arguments = arguments
    launches._engine.deadline = lambda call: 1.0
    monkeypatch.setattr(fused.Summed, "parameters", lambda *given: ([], None))
    for name in ("KernelLaunch", "bind_launch"):
        monkeypatch.setattr(fused, name, lambda *given: ([], None))
    launches._functions = [{(launches.tiles[0], "by_rows"): None}]
    for k in (128, 126, 256):
        own = MatmulOperands(*(torch.zeros(shape).bfloat16() for shape in ((6, k), (8, k))), None, torch.empty(6, 8))
        launches._launch(launches._runner.members[0], launches._place(own), launches._slices[0])

    assert ["products of 128 columns" in said[0], "126" in said[1], "256" in said[2]] == [True] * 3
    plain = agreement.words_of_matmul_launch(call_of(), Algorithm.MATMUL_ALLREDUCE, launches._slices[0])
    assert "products of" not in plain


@pytest.mark.parametrize(
    ("world_size", "ops", "prepared"),
    [
        (4, ["fused_matmul_allreduce", "allreduce"], True),
        (2, ["fused_matmul_reducescatter"], True),
        (4, ["allreduce"], False),
        (8, ["fused_matmul_allreduce"], False),  # no call takes them
    ],
)
def test_what_tensor_parallel_invariant_calls_take_is_prepared(world_size, ops, prepared):
    epilogue = form_to_prepare("-v")

    needed = preparation._needed_tiles(Ranks(world_size), ops, [torch.bfloat16], [], [epilogue], tp_invariant=True)

    of_tree = [
        (algorithm, tile, work.epilogue) for algorithm, _, tile, work in needed if work.partition == "tp_invariant"
    ]
    tiles = PARTIAL_TILES[LEAVES // world_size] if prepared else ()
    wanted = itertools.product([OPS[op] for op in ops if op in OPS], (None, epilogue), tiles)
    assert of_tree == [(algorithm, tile, one) for algorithm, one, tile in wanted]
