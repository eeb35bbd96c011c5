"""graphar's matmul without a GPU: what its kernels compile to, what it launches, and the arguments it refuses."""

import io
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace

import pytest
import torch

from graphar.errors import UnsupportedError
from graphar.plan.algorithms import MATMUL_TYPES
from graphar.plan.matmuls import Shape, Sms, alone, best_tile
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import FP8_TILES, LAYOUTS, LEAF_COUNTS, LEAF_TILES, MATMUL_TILES, MatmulTile
from graphar.product import gemm, tensor_maps
from graphar.product.tensor_maps import Matrix, matrix_of
from graphar.runtime import compiler
from graphar.runtime.catalogue import matmul_source
from perf.cubin import resources

POLICY = shipped_table("nvidia_h200").matmul
SHARED_NBYTES_OF_A_BLOCK = 227 * 1024  # on sm_90
EVERY_TILE = tuple(itertools.chain(*LEAF_TILES.values()))
OF_WHOLE = (pytest.mark.catalogue, pytest.mark.whole)
every_kind = pytest.mark.parametrize(  # of each tile one kind; in the whole run all of them
    ("tile", "layout", "out_dtype"),
    [
        pytest.param(tile, *kind, marks=() if at == number % (2 * len(tile.layouts)) else OF_WHOLE)
        for number, tile in enumerate(EVERY_TILE)
        for at, kind in enumerate(itertools.product(tile.layouts, (torch.bfloat16, torch.float32)))
    ],
    ids=str,
)
SIZES = [1, 16, 64, 129, 256, 1000, 4096, 16384]


def fastest_tile(cost, m, n, k, sms, layout="by_rows", leaves=1, in_clusters=0):
    """The tile that is chosen for a plain matmul."""
    return best_tile(alone(leaves=leaves), Shape((m,), n, k, layout), cost, Sms(sms, in_clusters))


def compile_with_log(source):
    """The cubin, the kernel's symbol, and what the compiler and the assembler said."""
    from cuda.core import Program, ProgramOptions

    directory = compiler.source_directory()
    options = ProgramOptions(
        name=str(directory / source.file), arch="sm_90a", include_path=str(directory), **compiler.OPTIONS
    )
    log = io.StringIO()
    compiled = Program(compiler._text(source), "c++", options).compile("cubin", (source.name,), logs=log)
    return bytes(compiled.code), compiled.symbol_mapping[source.name].decode(), log.getvalue()


def assert_asynchronous_and_in_registers(source, threads):
    image, symbol, log = compile_with_log(source)
    needed = resources(image, symbol)

    assert log.strip() == ""  # it would say that it serializes wgmma, or ignores setmaxnreg
    assert needed.stack_nbytes == 0
    assert needed.registers <= 65536 // threads // 8 * 8


def columns_of(rows, columns, leading, dtype=torch.bfloat16):
    """A matrix whose rows are ``leading`` elements apart."""
    return torch.zeros(rows, leading, dtype=dtype)[:, :columns]


@every_kind
def test_the_assembler_keeps_the_products_asynchronous_and_all_sums_in_registers(tile, layout, out_dtype):
    assert_asynchronous_and_in_registers(matmul_source(torch.bfloat16, tile, layout, out_dtype), tile.threads)


def test_the_assembler_tells_of_a_sum_that_is_touched_too_early(monkeypatch, tmp_path):
    sources = shutil.copytree(compiler.source_directory(), tmp_path / "cuda_src")
    monkeypatch.setattr(compiler, "source_directory", lambda: sources)
    path, wait = sources / "device" / "matmul" / "pipeline.cuh", "wait_for_all_but_last_products();"
    assert wait in path.read_text()
    path.write_text(path.read_text().replace(wait, "sums[0] *= 2;"))

    _, _, log = compile_with_log(matmul_source(torch.bfloat16, MatmulTile(64, 64, 2), "by_rows"))

    assert "is injected" in log  # which wait is, assemblers of different versions say in different words


@pytest.mark.parametrize("tile", [*EVERY_TILE, *FP8_TILES], ids=str)
def test_a_block_fits_into_an_sm(tile):
    assert tile.shared_nbytes <= SHARED_NBYTES_OF_A_BLOCK


@pytest.mark.parametrize("leaves", LEAF_COUNTS)
@pytest.mark.parametrize("m", SIZES)
@pytest.mark.parametrize("sms", [1, 2, 7, 108, 120, 132])
def test_every_matrix_has_a_tile(m, sms, leaves):
    for layout, n, in_clusters in itertools.product(LAYOUTS, SIZES, (0, 4, 120)):
        tile = fastest_tile(POLICY.cost, m, n, 1024, sms, layout, leaves, in_clusters)
        assert tile in LEAF_TILES[leaves]
        assert layout in tile.layouts
        assert tile.blocks <= max(2, min(sms, in_clusters))


def test_tiles_have_the_leaves_under_which_they_are_listed():
    assert {leaves: {tile.leaves for tile in tiles} for leaves, tiles in LEAF_TILES.items()} == {
        leaves: {leaves} for leaves in LEAF_COUNTS
    }


def name_of(tile):
    return f"{tile.rows}x{tile.columns}x{tile.stages}{'c2' if tile.cluster == 2 else ''}"


NAMES = [name_of(tile) for tile in MATMUL_TILES]


@pytest.mark.parametrize("sms", [108, 120, 132])
def test_the_tile_is_near_the_fastest_that_was_measured(sms):
    """The file has microseconds on an H200 by tile, with weights that are not in L2."""
    measured = json.loads((Path(__file__).parent / "matmul_times.json").read_text())
    slowdowns = [
        one["us"][name_of(fastest_tile(POLICY.cost, one["m"], one["n"], one["k"], sms))]
        / min(map(one["us"].get, NAMES))
        for one in measured
        if one["sms"] == sms
    ]

    assert geometric_mean(slowdowns) <= 1.005
    assert max(slowdowns) <= 1.15


def test_few_rows_take_low_tiles():
    assert fastest_tile(POLICY.cost, 16, 8192, 4096, 132).rows == 64


@pytest.mark.parametrize("leaves", [4, 8])
@pytest.mark.parametrize("in_clusters", [120, 128])
@pytest.mark.parametrize("m", [1, 16, 64, 128])
def test_leaves_of_few_tiles_are_split_so_that_more_sms_work(m, leaves, in_clusters):
    tile = fastest_tile(POLICY.cost, m, 1024, 8192, 132, leaves=leaves, in_clusters=in_clusters)

    tiles = -(-m // tile.rows) * -(-1024 // tile.columns)
    assert tile.split > 1
    assert 64 <= tiles * tile.split <= 132


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(16, 8192, 8192), (64, 4096, 14336), (2048, 8192, 4096), (64, 1024, 512), (256, 5120, 8192), (512, 1024, 8192)],
)
def test_leaves_are_not_split_where_memory_or_tiles_are_the_limit_or_k_is_short(m, n, k):
    assert fastest_tile(POLICY.cost, m, n, k, 132, leaves=8, in_clusters=128).split == 1


@pytest.mark.parametrize(
    ("m", "n", "split"),
    [
        (512, 5120, 4),  # 160 tiles: 28 beyond a round
        (768, 6144, 4),  # 288 tiles: 24 beyond two rounds
        (1024, 5120, 1),  # 320 tiles: too many beyond two rounds to be split
        (1536, 4096, 1),  # 384 tiles: the same
        (8192, 8192, 1),  # 4096 tiles: 4 beyond 31 rounds, which are a small part of the time
        (256, 5120, 1),  # less than a round
    ],
)
def test_leaves_of_few_tiles_beyond_whole_rounds_are_split(m, n, split):
    assert fastest_tile(POLICY.cost, m, n, 8192, 132, leaves=8, in_clusters=120).tail_split == split


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tile_serves_the_layout_of_the_weight(layout):
    chosen = {fastest_tile(POLICY.cost, m, n, 4096, 132, layout) for m in SIZES for n in (1024, 5120, 7168)}

    assert chosen <= {tile for tile in MATMUL_TILES if layout in tile.layouts}
    assert any(tile.columns % 64 for tile in chosen) == (layout == "by_rows")


def bind(tile, layout="by_rows", m=1000, n=520, k=200, sms=132):
    w = (n, k) if layout == "by_rows" else (k, n)
    a, w, c = (Matrix(4096, torch.bfloat16, *shape, shape[1]) for shape in ((m, k), w, (m, n)))
    gemm._bind(0, tile, sms, gemm.Matrices(a, w, layout, c))


@pytest.mark.parametrize(
    ("tile", "blocks"), [(MatmulTile(128, 128, 6), [1, 7, 40]), (MatmulTile(128, 256, 4, cluster=2), [2, 6, 24])]
)
def test_no_more_blocks_than_sms_and_than_tiles_in_whole_clusters(launches, tile, blocks):
    for sms in (1, 7, 132):
        bind(tile, sms=sms)

    assert [grid.blocks for *_, grid in launches] == blocks


@pytest.mark.parametrize(("split", "blocks"), [(2, 80), (4, 120), (8, 120)])
def test_blocks_that_split_leaves_are_no_more_than_run_at_once(launches, split, blocks):
    bind(MatmulTile(128, 128, 5, leaves=8, split=split), k=512)

    ((_, parameters, grid),) = launches
    assert (grid.blocks, grid.cluster) == (blocks, split)
    assert (parameters[3].c, parameters[3].c_leading) == (4096, 520)


@pytest.mark.parametrize(("split", "sms", "blocks"), [(2, 30, 20), (4, 36, 16)])
def test_the_last_round_of_tiles_has_a_launch_of_its_own_if_its_leaves_are_split(launches, split, sms, blocks):
    bind(MatmulTile(128, 128, 5, leaves=8, tail_split=split), k=512, sms=sms)

    found = [(one[3].first_tile, one[3].end_tile, grid.blocks, grid.cluster) for _, one, grid in launches]
    assert found == [(0, sms, sms, 1), (sms, 40, blocks, split)]


@pytest.mark.parametrize(("sms", "blocks", "cluster"), [(40, 40, 1), (20, 20, 1), (41, 40, 2)])
def test_rounds_that_are_all_full_or_a_last_one_alone_take_one_launch(launches, sms, blocks, cluster):
    bind(MatmulTile(128, 128, 5, leaves=8, tail_split=2), k=512, sms=sms)

    ((_, (*_, sizes), grid),) = launches
    assert (sizes.first_tile, sizes.end_tile, grid.blocks, grid.cluster) == (0, 40, blocks, cluster)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_launch_is_told_sizes_and_groups_of_the_rows_there_are(launches, layout):
    bind(MatmulTile(64, 64, 12), layout, m=300, n=5, k=7)

    arguments = launches[0][1][3]
    told = [getattr(arguments, name) for name in ("bias", "m", "n", "k", "group_rows")]
    assert told == [0, 300, 5, 7, 5]


def test_boxes_of_a_are_no_higher_than_a(launches):
    for m in (1, 17, 64, 65):
        bind(MatmulTile(64, 64, 12), m=m)

    assert [parameters[0][1] for _, parameters, _ in launches] == [8, 24, 64, 64]


@pytest.mark.parametrize(
    ("layout", "cluster", "rows"),
    [("by_rows", 1, 192), ("by_rows", 2, 96), ("by_columns", 1, 64), ("by_columns", 2, 32)],
)
def test_the_blocks_of_a_cluster_share_the_boxes_of_w(launches, layout, cluster, rows):
    bind(MatmulTile(128, 192, 4, cluster), layout)

    a, w, c = [box_rows for _, box_rows in launches[0][1][:3]]
    assert (a, w, c) == (128, rows, 64)


def test_a_result_in_fp32_takes_the_kernel_that_does_not_round(launches):
    tile = MatmulTile(64, 64, 12, leaves=8)
    a, w = (Matrix(0, torch.bfloat16, rows, 512, 512) for rows in (100, 72))

    gemm._bind(0, tile, 132, gemm.Matrices(a, w, "by_rows", Matrix(0, torch.float32, 100, 72, 72)))

    assert launches[0][0] == (torch.bfloat16, tile, "by_rows", torch.float32, "")


def test_the_default_tile_has_the_leaves(monkeypatch):
    monkeypatch.setattr(gemm, "cost_on", lambda device: POLICY.cost)
    monkeypatch.setattr(gemm, "_sms_in_clusters", lambda device: 120)

    assert [gemm.default_tile(0, 64, 1024, 1024, 132, leaves=count).leaves for count in LEAF_COUNTS] == [*LEAF_COUNTS]


@pytest.mark.parametrize("dtype", MATMUL_TYPES)
def test_a_matrix_may_have_rows_apart(dtype):
    x = columns_of(5, 7, 16, dtype)
    assert matrix_of(x) == Matrix(x.data_ptr(), dtype, 5, 7, 16)


def test_one_row_or_one_column_may_have_any_stride():
    assert matrix_of(torch.zeros(7, 3, dtype=torch.bfloat16)[:1]).leading == 8
    assert matrix_of(columns_of(7, 1, 8)).columns == 1


@pytest.mark.parametrize(
    "x",
    [
        columns_of(5, 7, 7),
        columns_of(5, 7, 16).t(),
        columns_of(5, 8, 16)[:, 1:],
        columns_of(1, 8, 8).expand(5, 8),
        columns_of(0, 8, 8),
        columns_of(5, 8, 8, torch.float64),
        columns_of(5, 6, 6, torch.float32),
    ],
    ids=["rows of 14 bytes", "columns", "misaligned", "one row repeated", "nothing", "fp64", "rows of 24 bytes"],
)
def test_what_the_copy_engine_cannot_read_is_no_matrix(x):
    assert matrix_of(x) is None


@pytest.fixture
def bound(monkeypatch):
    """The devices whose context was made current."""
    devices = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(tensor_maps, "bind_context", devices.append)
    return devices


def test_a_map_is_made_once(monkeypatch, bound):
    made = []
    monkeypatch.setattr(tensor_maps, "_encode_tiled", lambda: lambda place, *rest: made.append((place, rest)) or 0)
    tensor_maps.tensor_map.cache_clear()
    matrix = Matrix(4096, torch.float16, 5, 7, 16)

    first = tensor_maps.tensor_map(matrix, 64)

    assert tensor_maps.tensor_map(replace(matrix), 64) is first
    ((place, (dtype, rank, pointer, sizes, strides, box, steps, *modes)),) = made
    assert place % 128 == 0
    assert (dtype, rank, pointer, *modes) == (6, 2, 4096, 0, 3, 3, 0)
    assert ([*sizes], [*strides], [*box], [*steps]) == ([7, 5], [32], [64, 64], [1, 1])
    assert bound == [3]
    tensor_maps.tensor_map.cache_clear()


def test_boxes_of_fp32_are_as_many_bytes_wide(monkeypatch, bound):
    made = []
    monkeypatch.setattr(tensor_maps, "_encode_tiled", lambda: lambda place, *rest: made.append(rest) or 0)
    tensor_maps.tensor_map.cache_clear()

    tensor_maps.tensor_map(Matrix(4096, torch.float32, 5, 7, 12), 64)

    ((dtype, _, _, _, strides, box, *_),) = made
    assert (dtype, [*strides], [*box]) == (7, [48], [32, 64])
    tensor_maps.tensor_map.cache_clear()


A, W = columns_of(4, 16, 16), columns_of(8, 16, 16)


def test_a_matmul_on_the_cpu_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="needs a device of sm_90a, got tensors on cpu"):
        gemm.matmul(A, W)


@pytest.mark.parametrize(("leaves", "k"), [(2, 64), (4, 128), (8, 256), (8, 576), (2, 100)])
def test_columns_that_are_no_whole_leaves_are_refused_by_name(monkeypatch, leaves, k):
    monkeypatch.setattr(gemm.launcher, "architecture", lambda _: "sm_90a")
    a, w, out = (
        SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=shape, numel=lambda: 1)
        for shape in ((4, k), (8, k), (4, 8))
    )
    monkeypatch.setattr(gemm, "matrix_of", lambda _: True)

    reason = gemm.why_not(a, w, out, leaves)

    assert reason == f"the columns of a must be a multiple of {64 * leaves} for {leaves} leaves, got {k}"
    assert gemm.why_not(a, w, out) is None


def test_no_rows_or_no_columns_give_an_empty_result():
    assert gemm.matmul(A[:0], W).shape == (0, 8)
    assert gemm.matmul(A, W[:0]).shape == (4, 0)


def test_a_sum_of_no_products_is_zero_or_the_bias():
    bias = torch.arange(8, dtype=A.dtype)

    assert not gemm.matmul(A[:, :0], W[:, :0], torch.full((4, 8), 7, dtype=A.dtype)).any()
    assert gemm.matmul(A[:, :0], W[:, :0], bias=bias).equal(bias.expand(4, 8))
