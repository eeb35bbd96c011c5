"""The launches of fused matmuls, which are bound to what their ranks agree on. Needs no GPU."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from graphar.numerics.epilogues.epilogue import bind
from graphar.numerics.fp8_products import BLOCK, FP8, Scales
from graphar.plan.algorithms import MATMUL_ARCH, Algorithm
from graphar.plan.call import Call
from graphar.plan.matmuls import Shape, best_tile, tiles_that_serve
from graphar.plan.policy import Chip
from graphar.plan.slices import Slice, row_slices
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import FP8_TILES, GATHERED_TILES, LAYOUTS, SKINNY_TILES, SUMMED_TILES
from graphar.plan.work import ALLGATHER_MATMUL, Product
from graphar.product import fused, gemm
from graphar.product.fused import Gathered, Skinny, Summed
from graphar.product.gemm import Matrices, layout_of
from graphar.product.operands import MatmulOperands, Step
from graphar.runtime import launcher

TILE, MEMBER, COUNTS = GATHERED_TILES[0], SimpleNamespace(rank=0, device=0), (16, 16)
CHIP = Chip(132, MATMUL_ARCH)


class Bound:
    """Stands in for a runner: keeps what launches must have alike on all ranks."""

    def __init__(self):
        self.chip, self.words, self.members = CHIP, [], [MEMBER]

    def prepare_all(self, *given):
        return [dict.fromkeys(itertools.product((*GATHERED_TILES, *FP8_TILES), LAYOUTS))]

    def arguments(self, member, algorithm, one, timeout_s, words):
        self.words.append(words)
        return SimpleNamespace(epilogue=SimpleNamespace(put=None))


@pytest.fixture
def engine(monkeypatch):
    """An engine of two ranks whose launches are recorded, and bound to nothing."""
    for kind in (Summed, Skinny, Gathered):
        monkeypatch.setattr(kind, "parameters", lambda *given: ([], None))
    monkeypatch.setattr(fused, "KernelLaunch", lambda *given: given)
    monkeypatch.setattr(fused, "bind_launch", lambda *given: given)
    monkeypatch.setattr(fused, "why_not", lambda *given: "")  # the operands are on the CPU
    monkeypatch.setattr(launcher, "sm_count", lambda device: 132)
    table = shipped_table("nvidia_h200")
    return SimpleNamespace(runner=Bound(), world_size=2, devices=None, table=table, deadline=lambda call: 1.0)


def launches_on(chip, kind):
    """Launches of a kind on one chip, which know nothing else but that each rank sums its own rows."""
    made = object.__new__(kind)
    made._runner, made._call = SimpleNamespace(chip=chip), SimpleNamespace(work=SimpleNamespace(scattered=True))
    return made


every_kind = pytest.mark.parametrize(
    "algorithm", [Algorithm.MATMUL_ALLREDUCE, Algorithm.ALLGATHER_MATMUL], ids=lambda one: one.value
)


@every_kind
def test_epilogues_that_differ_in_their_text_alone_share_no_launch(engine, algorithm):
    # Their code is the same, but ranks compare the text. The addresses of a rank may repeat where another's do not.
    a, w, out = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (32, 64, 32))
    forms = [bind("op", text, out, [], [2.0])[0] for text in ("v * a", "v * b", "v * a")]
    (one,) = row_slices(COUNTS, 32)

    by_call = {}  # as an engine keeps plans
    for form in forms:
        call = Call.of(Product(algorithm.op, COUNTS, 64, epilogue=form), a)
        if call not in by_call:
            by_call[call] = fused.fused_launches(engine, call, algorithm, TILE)
        launches = by_call[call]
        launches._launch(MEMBER, launches._place(MatmulOperands(a, w, None, out)), one)

    assert forms[0].generated == forms[1].generated
    assert [text.split(", ")[2] for text in engine.runner.words] == [
        f"epilogue v * a by {algorithm.value}",
        f"epilogue v * b by {algorithm.value}",
    ]


@every_kind
def test_a_weight_and_a_transposed_weight_at_its_address_share_no_launch(engine, algorithm):
    a, w, out = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (32, 64, 32))  # w is square
    (one,) = row_slices(COUNTS, 32)
    launches = fused.fused_launches(engine, Call.of(Product(algorithm.op, COUNTS, 64), a), algorithm, TILE)

    bound = [launches._launch(MEMBER, MatmulOperands(a, weight, None, out), one) for weight in (w, w.t(), w)]

    assert bound[0] is bound[2]
    assert bound[0] is not bound[1]


@pytest.mark.parametrize(
    ("algorithm", "scattered", "first"),
    [
        (Algorithm.MATMUL_ALLREDUCE, False, 24),
        (Algorithm.MATMUL_REDUCESCATTER, True, 8),
        (Algorithm.ALLGATHER_MATMUL, False, 0),
    ],
    ids=lambda value: getattr(value, "value", ""),
)
def test_rows_of_an_epilogue_are_counted_from_what_the_kernel_counts_from(engine, algorithm, scattered, first):
    """A sum counts from this rank's part of the launch, and a gather from the product's first row."""
    a, w, out = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (32, 64, 32))
    form, *_ = bind("op", "v + row", out, [], [])
    call = Call.of(Product(algorithm.op, COUNTS, 64, epilogue=form), a)
    _, second = row_slices(COUNTS, 8)

    corner = fused.fused_launches(engine, call, algorithm, TILE)._corner(
        SimpleNamespace(rank=1), MatmulOperands(a, w, None, out), second
    )

    assert call.work.scattered == scattered
    assert corner == (first, 0, 64)


@pytest.mark.parametrize("tile", GATHERED_TILES, ids=str)
def test_boxes_of_rows_are_no_higher_than_their_owners_part(monkeypatch, tile):
    boxes, counts, k = {}, (1, 40, 64, 0, 100, 200), 72

    def tensor_map(matrix, box_rows):
        if matrix.columns == k:
            boxes[matrix.rows] = box_rows
        return fused.TensorMap()

    for module in (gemm, fused):
        monkeypatch.setattr(module, "tensor_map", tensor_map)
    monkeypatch.setattr(Matrices, "weight_map", lambda *given: None)
    a, w, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((40, k), (456, k), (sum(counts), 456)))
    arguments = SimpleNamespace(world_size=len(counts), rank=1, scratch=[0] * len(counts), capacity=1 << 20)
    (one,) = row_slices(counts, 256)

    launches_on(CHIP, Gathered).parameters(tile, Matrices.of(Step(a, w, out)), one, arguments)

    assert boxes == {1: 8, 40: 40, 64: 64, 100: min(104, tile.rows), 200: tile.rows}


def scaled(k=256, rows=32):
    """e4m3 operands with scales of blocks, of a rank with more rows than a launch takes."""
    a, w = (torch.zeros(count, k, dtype=FP8) for count in (rows, 384))
    scales = Scales("blocks", torch.ones(rows, k // BLOCK), torch.ones(len(w) // BLOCK, k // BLOCK))
    return MatmulOperands(a, w, None, torch.zeros(2 * rows, len(w), dtype=torch.bfloat16), scales=scales)


def test_each_launch_has_the_scales_of_its_rows(monkeypatch):
    monkeypatch.setattr(fused, "rows_map", lambda *given: fused.TensorMap())
    monkeypatch.setattr(fused, "tensor_map", lambda *given: fused.TensorMap())
    monkeypatch.setattr(Matrices, "weight_map", lambda *given: None)
    own, counts = scaled(), (32, 32)
    matrices = Matrices.of(own.step)
    arguments = SimpleNamespace(world_size=2, rank=0, scratch=[0, 0], capacity=1 << 20)

    of_launches = [
        launches_on(CHIP, Gathered).parameters(FP8_TILES[0], matrices, one, arguments)[0][-1]
        for one in row_slices(counts, 16)
    ]

    assert [sizes.a_scale for sizes in of_launches] == [own.scales.a[row].data_ptr() for row in (0, 16)]
    assert {sizes.w_scale for sizes in of_launches} == {own.scales.w.data_ptr()}
    assert {(sizes.a_scale_row, sizes.a_scale_block, sizes.w_scale_row) for sizes in of_launches} == {(2, 1, 2)}


def scaled_launches(engine):
    call = Call(Product(Algorithm.ALLGATHER_MATMUL.op, (32, 32), 256, format="blocks"), torch.bfloat16, -1)
    return fused.fused_launches(engine, call, Algorithm.ALLGATHER_MATMUL, FP8_TILES[0])


def test_calls_whose_scales_have_other_addresses_share_no_launch(engine):
    own, (one,) = scaled(), row_slices((32, 32), 32)
    others = [replace(own, scales=replace(own.scales, **{of: getattr(own.scales, of).clone()})) for of in "aw"]
    launches = scaled_launches(engine)

    bound = [launches._launch(MEMBER, given, one) for given in (own, *others, own)]

    assert bound[0] is bound[-1]
    assert len({id(launch) for launch in bound}) == 3


def test_a_transposed_weight_in_e4m3_is_copied(engine):
    own = scaled()
    transposed = replace(own, w=own.w.t().contiguous().t())

    placed_there = scaled_launches(engine)._place(transposed)

    assert layout_of(transposed.w) == "by_columns"
    assert layout_of(placed_there.w) == "by_rows"
    assert scaled_launches(engine)._place(own).w is own.w


@pytest.mark.parametrize(("k", "copied"), [(256, False), (264, True)])
def test_rows_in_e4m3_are_sent_in_whole_packs(engine, k, copied):
    a, w, out = torch.zeros(32, k, dtype=FP8), torch.zeros(384, k, dtype=FP8), torch.zeros(64, 384)

    found = scaled_launches(engine)._place(MatmulOperands(a, w, None, out)).a

    assert (found is not a) == copied
    assert found.stride() == (-(-k // 16) * 16, 1)


@pytest.mark.parametrize(
    ("rows", "columns", "height"), [(1, 1024, 64), (32, 5120, 64), (64, 7168, 64), (2048, 5120, 128)]
)
def test_parts_of_few_rows_take_low_tiles(rows, columns, height):
    cost = shipped_table("nvidia_h200").matmul.cost

    for scales, k in (("", 8192), ("rows", 16384), ("blocks", 16384)):
        kind = tiles_that_serve(Algorithm.ALLGATHER_MATMUL, Product(ALLGATHER_MATMUL, (), 1, format=scales), 2)
        assert best_tile(kind, Shape((rows, rows), columns, k), cost, CHIP).rows == height


# Each kind of launch, with the tiles that it may take.
KINDS = [(Summed, tile) for tile in SUMMED_TILES]
KINDS += [(Gathered, tile) for tile in GATHERED_TILES] + [(Skinny, tile) for tile in SKINNY_TILES]


def grid_of(monkeypatch, kind, tile, sms, columns, communicators=2):
    """The grid of a launch whose result has so many columns."""
    monkeypatch.setattr(fused, "tensor_map", lambda *given: fused.TensorMap())
    monkeypatch.setattr(fused, "rows_map", lambda *given: fused.TensorMap())
    monkeypatch.setattr(Matrices, "weight_map", lambda *given: None)
    rows = tile.rows if kind is Skinny else 64 * tile.rows
    a, w, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((rows, 8), (columns, 8), (rows, columns)))
    arguments = SimpleNamespace(world_size=2, rank=0, scratch=[0, 0], capacity=1 << 20)
    (one,) = [Slice(rows * columns)] if kind is Skinny else row_slices((rows // 2,) * 2, rows)
    own = Matrices.of(Step(a, w, out))
    return launches_on(Chip(sms, MATMUL_ARCH, communicators), kind).parameters(tile, own, one, arguments)[1]


@pytest.mark.parametrize("sms", [132, 131, 108, 78])
@pytest.mark.parametrize(("kind", "tile"), KINDS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_a_large_grid_leaves_an_sm_free_or_as_many_as_two_of_its_clusters_take(monkeypatch, kind, tile, sms):
    grid = grid_of(monkeypatch, kind, tile, sms, columns=1 << 15)

    assert grid.cluster == tile.cluster
    assert grid.blocks % grid.cluster == 0
    left = sms // tile.cluster - grid.blocks // tile.cluster
    assert left == (1 if tile.cluster == 1 else 2)


@pytest.mark.parametrize("communicators", [3, 4, 7, 14])
@pytest.mark.parametrize(("kind", "tile"), KINDS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_grids_of_as_many_communicators_as_declared_fit_on_the_gpu(monkeypatch, kind, tile, communicators):
    grid = grid_of(monkeypatch, kind, tile, 132, 1 << 15, communicators)

    assert communicators * grid.blocks <= 132
    assert grid.blocks % grid.cluster == 0


@pytest.mark.parametrize(
    ("cluster", "most"), [(1, [131, 130, 1, 1, 1]), (2, [128, 126, 2, 2, 2]), (4, [124, 120, 4, 4, 4]), (8, [112] * 2)]
)
def test_as_many_whole_clusters_as_fit_beside_two_free_ones_are_the_most_and_one_is_the_least(cluster, most):
    assert [Chip(sms, MATMUL_ARCH).shared_blocks(cluster=cluster) for sms in (132, 131, 2, 1, 0)[: len(most)]] == most


@pytest.mark.parametrize(("kind", "tile"), KINDS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_a_small_grid_has_a_cluster_for_each_tile(monkeypatch, kind, tile):
    grid = grid_of(monkeypatch, kind, tile, 1 << 14, columns=8 * tile.columns)

    tiles = 8 // tile.cluster if kind is Skinny else 8 * 64 // tile.cluster
    assert grid.blocks == tiles * tile.cluster
