"""Which calls one kernel multiplies and sums tile by tile, and what it is given."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from graphar.matmul import fused
from graphar.matmul.fused import FusedMatmuls
from graphar.matmul.gemm import layout_of
from graphar.matmul.launches import box_rows
from graphar.matmul.operands import Operands
from graphar.matmul.tensor_maps import matrix_of
from graphar.numerics.codecs import Codec
from graphar.plan import matmuls
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.policy import Chip
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import SKINNY_TILES, skinny_tile, summed_tiles, travels_in_tiles

H200 = shipped_table("nvidia_h200")
POLICY, SMS = H200.matmul, 132


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 1000, 4096, 10001])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_rows_are_owned_in_whole_tiles_but_for_the_last(rows, world_size):
    owned = matmuls.owned_rows(rows, world_size)

    assert sum(owned) == rows
    assert len(owned) == world_size
    partial = [count for count in owned if count % 128]
    assert len(partial) <= 1
    assert max(owned) - min(owned) <= 256


# ---- which calls ----------------------------------------------------------------------------------------------------


class Ranks:
    """Stands in for an engine of GPUs and records what reaches which kernel."""

    def __init__(self, world_size: int = 4, no_kernel: str = "", arch: str = "sm_90a") -> None:
        self.world_size, self.devices, self.table = world_size, None, H200
        self._no_kernel, self.ran = no_kernel, []
        self.runner = SimpleNamespace(chip=Chip(SMS, arch))

    def keeping_failure(self):
        return contextlib.nullcontext()

    def why_no_kernel(self, op, x):
        return self._no_kernel

    def attached(self, kind):
        return self

    def watch(self, call, x, run, note=""):
        run()

    def run(self, call, placed, inputs, tile, timelines):
        (one,) = placed
        self.ran.append((call.op, one.a, one.w, one.bias, one.out, call.counts, call.timeout_s, inputs, call.codec))


def member(dtype=torch.bfloat16, is_cuda=True):
    return SimpleNamespace(a=SimpleNamespace(is_cuda=is_cuda, dtype=dtype))


def takes(ranks=None, partition="tiles", codec="", one=None, rows=4096, columns=8192):
    ranks = ranks or Ranks()
    counts = matmuls.owned_rows(rows, ranks.world_size)
    return fused.takes(ranks, partition, codec, [one or member()], counts, columns)


@pytest.mark.parametrize("rows", [1, 64, 100000])
def test_what_asks_for_tiles_gets_them_at_any_size(rows):
    assert takes(rows=rows, columns=8)


@pytest.mark.parametrize(
    "call",
    [
        {"one": member(torch.float32)},
        {"one": member(is_cuda=False)},
        {"codec": "fp8_e4m3"},
        {"codec": "int4", "columns": 8208},
        {"columns": 8196},
        {"ranks": Ranks(no_kernel="kernels serve 2 to 8 ranks, not 9")},
        {"ranks": Ranks(arch="sm_90")},
        {"partition": "none"},
        {"partition": "split_m"},
    ],
    ids=["fp32", "cpu", "codec", "buckets", "columns", "ranks", "device", "none", "split_m"],
)
def test_what_the_kernel_cannot_serve_goes_another_way(call):
    assert not takes(**call)


@pytest.mark.parametrize(
    ("world_size", "rows", "taken"),
    [
        (4, 64, True),
        (4, 65, False),
        (4, 1024, True),
        (4, 1023, False),
        (5, 64, False),
        (2, 1024, True),
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
    ("world_size", "rows", "taken"), [(2, 4096, True), (2, 4095, False), (2, 1, False), (4, 4096, False)]
)
def test_auto_takes_a_codec_where_that_was_measured_to_be_faster(world_size, rows, taken):
    assert takes(Ranks(world_size), "auto", "int8", rows=rows) == taken
    assert not matmuls.prefers_tiles(POLICY, SMS, world_size, rows, 8192, scattered=True, codec="int8")


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
    assert matmuls.prefers_tiles(POLICY, SMS, 4, 16, columns, scattered) == taken


@pytest.mark.parametrize(
    ("archs", "columns", "reason"),
    [
        (("sm_90a", "sm_90a"), 8192, ""),
        (("sm_90a", "sm_100a"), 8192, "a rank's device is not of sm_90a"),
        (("sm_90a", "sm_90a"), 1 << 20, "1048576 columns are too many for its scratch"),
    ],
)
def test_ranks_agree_on_what_serves(archs, columns, reason):
    ranks = Ranks(2)
    ranks.runner.chip = Chip.in_common(Chip(SMS, arch) for arch in archs)

    assert fused.why_not_columns(ranks, columns) == reason


def test_ranks_whose_codecs_differ_in_their_seeds_meet_for_the_same_kernel():
    runner = SimpleNamespace(
        loaded=lambda key: None, prepare_kernel=lambda key, algorithm, described, load: (key, described)
    )
    algorithm, tiles = Algorithm.MATMUL_ALLREDUCE, summed_tiles("matmul_allreduce", Codec(8))[:1]

    def prepared(codec):
        call = Call(algorithm.op, (8, 8), torch.bfloat16, 0, codec=codec.text)
        return FusedMatmuls(SimpleNamespace(runner=runner))._prepare(call, algorithm, tiles)

    found = [prepared(codec) for codec in (Codec(8), Codec(8, seed=1), Codec(8, seed=2))]

    assert found == found[:1] * 3
    assert prepared(Codec(6)) != found[0]


# ---- what the kernel is given ---------------------------------------------------------------------------------------

ALIGNED = torch.randn(6, 16).bfloat16()


@pytest.mark.parametrize("a", [ALIGNED[:, 1:], ALIGNED[:, :7], ALIGNED[:, ::2], torch.randn(5, 6).bfloat16().t()])
@pytest.mark.parametrize("transposed", [False, True])
def test_operands_that_lie_badly_are_copied(a, transposed):
    w = torch.randn(8, a.shape[1]).bfloat16()
    ranks, weights = Ranks(), w.t().contiguous().t() if transposed else w[:, :]

    fused.run(ranks, Algorithm.MATMUL_REDUCESCATTER, [Operands(a, weights, None, None)], [6], 1.5)

    ((_, given, weights, bias, _, counts, timeout_s, *_),) = ranks.ran
    assert matrix_of(given)
    assert layout_of(weights)
    assert torch.equal(given, a)
    assert torch.equal(weights, w)
    assert (bias, counts, timeout_s) == (None, (6,), 1.5)


def test_operands_that_lie_well_are_not_copied():
    ranks, w = Ranks(), torch.randn(16, 24).bfloat16().t()

    fused.run(ranks, Algorithm.MATMUL_REDUCESCATTER, [Operands(ALIGNED, w, None, None)], [6], None)

    ((_, a, weights, *_),) = ranks.ran
    assert a is ALIGNED
    assert weights is w


def test_a_rank_without_k_adds_zeros():
    ranks, bias = Ranks(), torch.randn(16).bfloat16()[::2]

    fused.run(
        ranks, Algorithm.MATMUL_REDUCESCATTER, [Operands(ALIGNED[:, :0], ALIGNED.t()[:8, :0], bias, None)], [6], None
    )

    ((_, a, w, given, *_),) = ranks.ran
    assert a.shape[1] == w.shape[1] > 0
    assert (a @ w.t()).count_nonzero() == 0
    assert given.is_contiguous()
    assert torch.equal(given, bias)


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
    ranks, out = Ranks(world_size), torch.empty(rows, columns).bfloat16()

    fused.allreduce(ranks, [Operands(out[:, :8], out[:, :8], None, out)], matmuls.owned_rows(rows, world_size), None)

    assert ranks.ran[0][0] == algorithm.value


def test_with_an_epilogue_few_rows_are_summed_in_parts_too():
    ranks, out = Ranks(), torch.empty(1, 8).bfloat16()

    fused.allreduce(
        ranks, [Operands(out, out, None, out)], [1, 0, 0, 0], None, epilogue=SimpleNamespace(form=None, inputs=[])
    )

    assert ranks.ran[0][0] == Algorithm.MATMUL_ALLREDUCE.value


def test_with_a_codec_few_rows_are_summed_in_parts_too():
    ranks, out = Ranks(), torch.empty(1, 32).bfloat16()

    fused.allreduce(ranks, [Operands(out, out, None, out)], [1, 0, 0, 0], None, codec="int8")

    assert ranks.ran == [(Algorithm.MATMUL_ALLREDUCE.value, out, out, None, out, (1, 0, 0, 0), None, None, "int8")]


def chosen(algorithm, rows, columns=8192, codec=None):
    return matmuls.tiles_of_sum(POLICY, algorithm, (rows,) * 4, columns, SMS, codec)


def test_a_codec_takes_tiles_that_leave_registers_to_code():
    for rows in (1, 64, 200, 256, 4096):
        for algorithm in (Algorithm.MATMUL_REDUCESCATTER, Algorithm.MATMUL_ALLREDUCE):
            assert all(tile.columns <= 128 for tile in chosen(algorithm, rows, 16384, Codec(8)))


@pytest.mark.parametrize("world_size", range(3, 9))
def test_every_rank_sums_some_of_what_is_summed_in_two_hops(world_size):
    """A rank that sums nothing waits for the ranks that do. It might name one of them instead of an absent rank."""
    for rows in (1, 2, 7, 8, 64):
        sizes = (columns for columns in range(8, 1 << 19, 8) if matmuls.is_skinny(world_size, rows, columns))
        kernels = ((n, matmuls.allreduce_algorithm(POLICY, world_size, rows, n)) for n in sizes)
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

    assert (
        {matmuls.tile_for(POLICY, tiles, k) for k in (8, 2048, 7168)}
        == set(tiles)
        <= set(summed_tiles(algorithm.value))
    )
    assert len({tile.columns for tile in tiles}) == 1


def test_finished_tiles_leave_sooner_where_consumers_alternate_unless_k_is_large():
    tiles = chosen(Algorithm.MATMUL_ALLREDUCE, 256)

    assert [matmuls.tile_for(POLICY, tiles, k).alternating for k in (2048, 7168)] == [True, False]


def test_consumers_that_make_codes_do_not_alternate():
    for rows in (200, 256, 4096):
        assert not any(tile.alternating for tile in chosen(Algorithm.MATMUL_ALLREDUCE, rows, codec=Codec(8)))


def test_a_result_that_lies_badly_is_copied_to_its_place():
    ranks, room = Ranks(), torch.empty(6 * 8 + 1).bfloat16()
    out = room[1:].view(6, 8)
    ranks.run = lambda call, placed, *rest: placed[0].out.fill_(placed[0].out.data_ptr() % 16)

    fused.allreduce(ranks, [Operands(ALIGNED, torch.ones(8, 16).bfloat16(), None, out)], [6], None)

    assert out.data_ptr() % 16
    assert out.count_nonzero() == 0


def test_a_result_that_lies_well_is_not_copied():
    ranks, out, given = Ranks(), torch.empty(6, 8).bfloat16(), []
    ranks.run = lambda call, placed, *rest: given.append(placed[0].out)

    fused.allreduce(ranks, [Operands(ALIGNED, torch.ones(8, 16).bfloat16(), None, out)], [6], None)

    assert given[0] is out
