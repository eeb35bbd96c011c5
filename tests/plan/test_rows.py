"""The rows of algorithms agree with the kernels' files, and all facts about a chip are in one file."""

import ast
import json
import re
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

import graphar
from graphar.numerics.codecs import TILE_NUMEL, codec
from graphar.plan import algorithms, matmuls, scratch
from graphar.plan.algorithms import COPYING, ROWS, WITHOUT_KERNEL, Algorithm, kernels_that
from graphar.plan.call import Call
from graphar.plan.policy import Chip
from graphar.plan.select import Facts, select
from graphar.plan.tables import Table, shipped_table, slug
from graphar.plan.tiles import MATMUL_TILES, SKINNY_TILES, SUMMED_TILES, MatmulTile
from graphar.plan.work import MATMUL_ALLREDUCE, Norm, Parts, Product, Sum
from graphar.runtime import cache, compiler
from graphar.runtime.catalogue import NORM_KERNELS, SKINNY_KERNELS, SUMMED_TILE_KERNELS, file_of, kernel_source
from graphar.runtime.user_tables import FOLDER, find_table
from tests.cases import of_table

PACKAGE = Path(graphar.__file__).parent
WITH_KERNELS = kernels_that(lambda row: True)
every_kernel = pytest.mark.parametrize("algorithm", WITH_KERNELS)


def text_of(algorithm):
    return (compiler.source_directory() / file_of(algorithm)).read_text()


def parameters(algorithm):
    """The template parameters of an algorithm's kernel: their kinds by name."""
    declared = re.search(rf"template <([^()]*)>\n__global__ [^{{]*?\b{algorithm.value}\(", text_of(algorithm))[1]
    kinds = [one.split(" = ")[0].split() for one in re.sub(r"<\w+>", "", declared).split(",")]
    return {name: kind for kind, name in kinds}


def test_every_algorithm_has_exactly_one_row():
    families = [made for name, made in vars(algorithms).items() if name.endswith("_rows")]
    written = [one for family in families for one in family(scratch.Sizes())]

    assert list(ROWS) == list(Algorithm)
    assert sorted([*written, Algorithm.FALLBACK, Algorithm.HIERARCHICAL]) == sorted(Algorithm)


def test_every_kernels_file_is_that_of_a_row_or_of_a_kernel_that_meets_no_other_rank():
    directory = compiler.source_directory()
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*.cu")}

    alone = {"matmul/matmul.cu", "norm/residual_rmsnorm.cu", "norm/residual_rmsnorm_backward.cu"}
    alone |= {"copies/sum_of_parts.cu", "quantized/local_codec.cu"}
    alone |= {f"loss/softmax_{step}.cu" for step in ("partials", "results", "backward")}
    assert files == {file_of(one) for one in WITH_KERNELS} | alone
    assert set(Algorithm) - set(WITH_KERNELS) == {*WITHOUT_KERNEL.values(), *COPYING.values()}
    assert {*WITHOUT_KERNEL.values()} == {Algorithm.FALLBACK, Algorithm.HIERARCHICAL}


def test_no_algorithm_is_named_outside_the_table_of_rows():
    """Whoever asks what an algorithm can do, or which one serves, asks rows."""
    naming = {
        f"{path.relative_to(PACKAGE).as_posix()}:{node.lineno}: {ast.unparse(node)}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr.isupper() and ast.unparse(node.value).endswith("Algorithm")
    }

    assert not [one for one in naming if not one.startswith("plan/algorithms.py:")]
    assert len(naming) >= len(Algorithm)


@every_kernel
def test_a_grid_comes_from_a_policy_a_table_or_a_tile(algorithm):
    row = algorithm.row

    assert (row.policy_grid is not None) == (row.takes_codec or algorithm in NORM_KERNELS)
    assert bool(row.tiles) == (row.folder == "matmul")
    assert row.candidates is None or (row.exact, row.takes_codec, row.compresses) == (True, False, False)


@pytest.mark.promise(
    "Calls of two communicators, or as many as declared, end in any order, if a matmul's K is equal on all ranks."
)
@every_kernel
def test_a_kernel_releases_the_next_one_early_if_half_an_sm_is_enough_for_its_blocks(algorithm):
    """Two blocks fit an SM by the registers of their launch bounds, and by the shared memory of an H200."""
    text = text_of(algorithm)
    bounds = re.search(r"__launch_bounds__\(([^()]+)\)", text)[1].split(", ")
    most = max(algorithm.row.scratch(n).shared_nbytes for n in range(2, 9))
    condition = re.search(r"  (?:(if .*) )?release_next_kernel\(\);", text)

    if algorithm is Algorithm.QUANTIZED_TWO_SHOT_PUSH:
        assert (condition[1], bounds) == ("if (blockDim.x <= 256)", ["512", "1"])
    elif algorithm in NORM_KERNELS:  # blocks of a cluster release it in rms_norm.cuh
        begins = r"if constexpr \(C == 1\) (?:\{\n +wait_for_previous_kernel\(a\);\n +)?release_next_kernel\(\);"
        assert re.search(begins, text)
        assert text.count("release_next_kernel()") == 1
        assert bounds[1:] == ["2"]
    else:
        in_pipeline = re.search(r"run_\w+_pipeline<N, .*, true>\(a\);", text)  # HalfSm
        assert bool(condition or in_pipeline) == (bounds[1:] == ["2"] and most <= 113 << 10)
        assert condition is None or not condition[1]


def test_only_headers_of_norms_and_of_pipelines_release_the_next_kernel():
    headers = {path.name: path.read_text() for path in (compiler.source_directory() / "device").rglob("*.cuh")}
    releasing = {name for name, text in headers.items() if "release_next_kernel()" in text}

    pipelines = {"push_pipeline.cuh", "two_shot_pipeline.cuh"}
    assert releasing == {"ptx.cuh", "rms_norm.cuh", *pipelines}
    assert all("if constexpr (HalfSm) release_next_kernel();" in headers[name] for name in pipelines)


@every_kernel
def test_a_row_claims_the_threads_of_the_kernels_launch_bounds(algorithm):
    bound = re.search(r"__launch_bounds__\(([^,)]+)", text_of(algorithm))[1]
    named = {"max_threads": scratch.ONE_SHOT_THREADS, "threads": scratch.TMA_THREADS, "C > 1 ? 1024 / C : 512": 512}

    if algorithm in (*SUMMED_TILE_KERNELS, Algorithm.ALLGATHER_MATMUL):
        assert bound == "128 + 128 * Tile::consumers"
        assert max(tile.threads for tile in (*MATMUL_TILES, *SUMMED_TILES)) <= algorithm.row.max_threads
    else:
        assert algorithm.row.max_threads == (named[bound] if bound in named else int(bound))
    if algorithm in SKINNY_KERNELS:
        assert max(tile.threads for tile in SKINNY_TILES) <= algorithm.row.max_threads


@every_kernel
def test_a_row_claims_an_epilogue_a_tree_a_codec_and_direct_access_where_the_template_has_them(algorithm):
    row, has = algorithm.row, parameters(algorithm)

    assert row.takes_epilogue == ("Expression" in has)
    assert row.adds_tree == ("Order" in has) == ("Out" in has)
    assert row.takes_codec == (has.get("C") == "class")
    assert (row.folder == "matmul") == ("Scales" in has)
    assert row.direct == ("Direct" in has) == ("direct" in row.variants)
    assert row.direct == ("peer_output" in text_of(algorithm))
    assert (not row.exact) == ("Multimem" in has)


@every_kernel
def test_a_kernel_that_takes_no_floats_is_told_bytes(algorithm):
    assert algorithm.row.dtypes
    if algorithm.row.folder in ("allreduce", "norm"):
        source = kernel_source(algorithm, algorithm.row.dtypes[0], 2)
        assert source.name.startswith(f"{algorithm.value}<")
        assert source.name.count(",") == len(parameters(algorithm)) - 1 - missing_defaults(algorithm)


def missing_defaults(algorithm):
    """How many template parameters the plain kernel leaves at their defaults."""
    return len({"Direct", "Expression", "Order", "Out"} & parameters(algorithm).keys())


def test_no_module_holds_the_sms_of_a_chip():
    """Except plan/scratch.py, whose blocks may outnumber the SMs of a chip."""
    holding = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value == 132
    }

    assert holding == {"plan/scratch.py"}


def test_no_module_names_a_chip_that_has_a_table():
    """A module that named a chip would need a change for every new chip."""
    shipped = {path.name.removesuffix(".json") for path in resources.files("graphar.plan").joinpath("tables").iterdir()}
    naming = [
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in shipped - {"default"}
    ]

    assert len(shipped) > 1
    assert naming == []


DEVICE, SMS = "NVIDIA B999", 40
CHIP = Chip(SMS, "sm_90a")


def made_up(content):
    """The content of a table with other numbers than any chip's."""
    content |= {"name": slug(DEVICE), "machine": f"4x {DEVICE}", "report": None, "measured": {}, "codecs": {}}
    content["chip"] = {"sms": SMS, "arch": "sm_90a"}
    content["parts"] = {
        "reducescatter": [{"max_nbytes": None, "algorithm": "reducescatter_push", "blocks": 7, "threads": 96}],
        "allgather": [{"max_nbytes": None, "algorithm": "allgather_push", "blocks": 9, "threads": 160, "chunk": 24}],
    }
    content["rows"] = {
        "4": [
            {"max_nbytes": 2048, "algorithm": "one_shot_push", "blocks": 5, "threads": 64},
            {"max_nbytes": None, "algorithm": "two_shot_pipelined", "blocks": 11, "threads": 256, "chunk": 40},
        ]
    }
    content["quantized"] = {"half_sm_tiles": 4, "pipelined_tiles": 3, "many_tiles": 100}
    content["norm"] = {"one_shot_sent_nbytes": 4096}
    content["beside"] = {"blocks": 3, "pipelined_from_nbytes": 512}
    content["matmul"] |= {
        "own_from_rows": 16,
        "against_torch": [[16, 64, 64, 1.5], [32, 64, 64, 0.5]],
        "tiles_from_numel": {"4": 4096},
        "codec_tiles_from_numel": {"4": 8192},
        "skinny_from_columns": {"8": 64},
        "skinny_least_busy": 0.5,
        "one_shot_nbytes": {"4": 64},
        "one_shot_nbytes_beyond": 32,
        "estimated_below_numel": 64,
        "large_from_numel": 128,
        "alternating_below_k": 10,
        "small_tile": of_table(MatmulTile(64, 128, 8, whole=True)),
        "large_tile": of_table(MatmulTile(128, 128, 6, whole=True)),
    }
    return content


@pytest.fixture
def table(tmp_path, monkeypatch):
    """The made-up chip's table, read from the user's folder."""
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path / "cache"))
    content = made_up(json.loads(shipped_table("nvidia_h200").to_json()))
    cache.store_file(FOLDER, f"{slug(DEVICE)}.json", json.dumps(content).encode())
    return find_table(DEVICE)


def test_a_chips_table_is_found_and_kept_by_being_written(table):
    assert (table.name, table.chip) == ("nvidia_b999", Chip(SMS, "sm_90a"))
    assert Table.from_json(table.to_json()) == table


def chosen(table, work, **options):
    return select(Call(work, torch.bfloat16, 0, **options), Facts(4, table, table.chip)).config


def test_sums_and_parts_follow_its_entries(table):
    small, large = chosen(table, Sum(1024)), chosen(table, Sum(1 << 24))

    assert (small.algorithm, small.blocks, small.threads) == (Algorithm.ONE_SHOT_PUSH, 3, 64)
    assert (large.algorithm, large.blocks, large.threads, large.chunk) == (Algorithm.TWO_SHOT_PIPELINED, 11, 256, 40)
    scattered = chosen(table, Parts("reducescatter", (1 << 20,) * 4))
    gathered = chosen(table, Parts("allgather", (1 << 20,) * 4))
    assert (scattered.algorithm, scattered.blocks, scattered.threads) == (Algorithm.REDUCESCATTER_PUSH, 7, 96)
    assert (gathered.algorithm, gathered.blocks, gathered.chunk) == (Algorithm.ALLGATHER_PUSH, 9, 24)


def test_codecs_follow_its_policy_and_sms(table):
    few, text = 4 * 320 * TILE_NUMEL, codec("int4").text
    halving = replace(table, quantized=replace(table.quantized, half_sm_tiles=5))

    pushed = chosen(table, Sum(few, text))
    assert (pushed.algorithm, pushed.blocks) == (Algorithm.QUANTIZED_TWO_SHOT_PUSH, SMS - 1)
    assert pushed.threads == 4 * 4 * 32
    assert chosen(halving, Sum(few, text)).threads == 4 * 2 * 32  # of two warps for each owner

    def pipelined(tiles):
        return chosen(table, Sum(4 * tiles * TILE_NUMEL, text), algorithm="quantized_two_shot_pipelined")

    assert pipelined(99).chunk == 3
    assert pipelined(90).threads == 512
    assert pipelined(101).threads == 256
    assert chosen(table, Parts("reducescatter", (1 << 22,) * 4, text)).blocks == SMS - 1


def test_norms_follow_its_policy_and_sms(table):
    def normed(rows):
        return chosen(table, Norm("allreduce_residual_rmsnorm", (rows * 512,), 512))

    # A row is 1 KB, of which a rank sends three in one shot.
    assert [normed(rows).algorithm for rows in (1, 2)] == [
        Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT,
        Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT,
    ]
    assert normed(1000).blocks == (SMS - 1) // 4 * 4


def test_a_norm_takes_no_kernel_whose_scratch_is_too_small_whatever_the_policy_says(table):
    largest = Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT.row.limit(4)
    careless = replace(table, norm=replace(table.norm, one_shot_sent_nbytes=1 << 40))

    taken = [
        chosen(careless, Norm("allreduce_residual_rmsnorm", (nbytes // 2,), 512)).algorithm
        for nbytes in (largest, largest + 1024)
    ]

    assert taken == [Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT, Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT]


def test_sums_beside_other_work_follow_its_policy(table):
    by_itself = replace(table, beside=shipped_table("nvidia_h200").beside)

    assert chosen(table, Sum(512), blocks=3).algorithm is Algorithm.TWO_SHOT_PIPELINED
    assert chosen(by_itself, Sum(512), blocks=3).algorithm is Algorithm.ONE_SHOT_PUSH


def test_matmuls_follow_its_policy_and_sms(table):
    policy = table.matmul

    def in_tiles(rows, columns, world_size=4, policy=policy, **more):
        return matmuls.prefers_tiles(Product(MATMUL_ALLREDUCE, (rows,), columns, **more), policy, CHIP, world_size)

    assert [in_tiles(128, 32), in_tiles(128, 24), in_tiles(128, 1 << 23, 2)] == [True, False, False]
    assert [in_tiles(128, columns, codec="int8") for columns in (64, 32)] == [True, False]
    # A kernel may take all SMs but one. Two waves of blocks of 64 columns must fill half of them.
    assert all(in_tiles(16, 64 * blocks, 8) for blocks in (1, SMS - 1, SMS, 2 * SMS - 2))
    busier = replace(policy, skinny_least_busy=0.6)
    assert [in_tiles(16, 64 * blocks, 8, busier) for blocks in (1, SMS)] == [True, False]
    assert not in_tiles(16, 56, 8)
    assert not in_tiles(1, 64 * (SMS - 1))
    one_shot, two_shot = (Product("fused_matmul_allreduce", (1,), columns) for columns in (32, 40))
    assert matmuls.fused_algorithm(table, one_shot, 4) is Algorithm.MATMUL_ONE_SHOT
    assert matmuls.fused_algorithm(table, two_shot, 4) is Algorithm.MATMUL_TWO_SHOT
    assert [matmuls.choose_matmul(policy, m, 64, 64, SMS).own for m in (15, 16, 32)] == [False, False, True]
    scattered = Algorithm.MATMUL_REDUCESCATTER
    works = [Product(scattered.op, (rows,) * 4, 8) for rows in (1, 2, 4)]
    tiles = [matmuls.tiles_to_load(policy, scattered, work, CHIP, 4) for work in works]
    assert tiles[1:] == [(policy.small_tile,), (policy.large_tile,)]
    assert tiles[0][0] not in (policy.large_tile, policy.alternating_tile)
