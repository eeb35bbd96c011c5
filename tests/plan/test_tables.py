"""Tuning tables: where they are found, which are refused, and the times that they predict."""

import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar import Codec
from graphar.numerics.codecs import NAMES, codec
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.policy import Chip
from graphar.plan.select import Facts, needed_kernels, select
from graphar.plan.sizes import MB
from graphar.plan.tables import DEFAULT, Table, expected_quantized_us, expected_us, shipped_table
from graphar.plan.tiles import SUMMED_TILES
from graphar.plan.work import Sum
from graphar.runtime import cache, engine, launcher, runner
from graphar.runtime.user_tables import find_table
from tests.cases import of_table
from tests.processes import on_ranks

DEVICE = "NVIDIA B999"
ENTRIES = shipped_table("default").rows[2]
MINE = replace(shipped_table("default"), name="nvidia_b999", machine="mine", rows={2: ENTRIES})


pytestmark = pytest.mark.usefixtures("user_folder")


def store(table):
    return cache.store_file("tuning", f"{table.name}.json", table.to_json().encode())


def test_a_table_survives_being_written():
    table = shipped_table("nvidia_h200")
    table = replace(table, measured={2: [[2048, 2.125], [MB, 8]], 4: [[2048, 2.5]]})
    rounded = replace(table, codecs={2: {"int8": [[2048, 3.5]], Codec(4, 128).text: [[2048, 3.25], [MB, 7]]}})

    assert Table.from_json(table.to_json()) == table
    assert Table.from_json(rounded.to_json()) == rounded


def test_the_users_table_comes_before_the_default_one_and_the_shipped_one(user_folder):
    path = store(MINE)
    mine = replace(MINE, name="nvidia_h200")
    store(mine)

    assert path == user_folder / "nvidia_b999.json"
    assert [find_table(device) for device in (DEVICE, "NVIDIA H200")] == [MINE, mine]


def test_a_table_without_thresholds_of_compression_or_of_copied_all_to_alls_takes_neither():
    content = json.loads(shipped_table("nvidia_h200").to_json())
    del content["lossless"], content["copies"]["alltoall_from_nbytes"]

    assert Table.from_json(json.dumps(content)).lossless == shipped_table("default").lossless
    assert Table.from_json(json.dumps(content)).copies.alltoall_from_nbytes == {}


def without(key, *policy):
    return lambda content: (content[policy[0]] if policy else content).pop(key)


def with_entry(**changes):
    return lambda content: content["rows"]["2"][0].update(changes)


def with_part(op, **changes):
    return lambda content: content["parts"][op][0].update(changes)


def with_policy(name, **changes):
    return lambda content: content[name].update(changes)


BAD_TABLES = {
    "its field 'rows' is missing": without("rows"),
    "its field 'name' is missing": without("name"),
    "unknown field 'speed'": lambda content: content.update(speed=1),
    "rows are for '9' ranks": lambda content: content["rows"].update({"9": ENTRIES}),
    "2 ranks: rows must be a list of at least one": lambda content: content["rows"].update({"2": []}),
    "2 ranks: rows must be a list of at least": lambda content: content["rows"].update({"2": {"0": ENTRIES[0]}}),
    "row 1: algorithm must be one of": lambda content: content["rows"]["2"].__setitem__(1, "one_shot"),
    "row 0: algorithm must be one of": with_entry(algorithm="two_shot_fast"),
    "row 0: algorithm must be one of one_shot_push": with_entry(algorithm="multimem_one_shot"),
    "row 0: algorithm must be one of one_shot_push, ": with_entry(algorithm="two_shot_lossless"),
    "row 0: one_shot_push needs exactly": with_entry(chunk=1),
    "row 0: blocks, max_nbytes, threads must be positive": with_entry(blocks="many"),
    "row 0: blocks, max_nbytes, threads must be": with_entry(blocks=0),
    "row 0: blocks, max_nbytes, threads must": with_entry(threads=None),
    "one_shot_push takes at most 4194304 bytes": with_entry(max_nbytes=None),
    "row 0: one_shot_push takes at most 4194304 bytes": with_entry(max_nbytes=4 * MB + 1),
    "row 0: threads of one_shot_push must be a multiple of 32, at most 512": with_entry(threads=100),
    "threads of one_shot must be a multiple of 32, at most 256": with_entry(algorithm="one_shot", threads=512),
    "two_shot_tma has 640 threads": with_entry(algorithm="two_shot_tma", threads=512, chunk=32),
    "row 0: one_shot_push has at most 256 blocks": with_entry(blocks=257),
    "two_shot_pipelined has at most 132 blocks": with_entry(algorithm="two_shot_pipelined", chunk=32, blocks=133),
    "chunks of at most 2048 packs": with_entry(algorithm="two_shot_pipelined", chunk=2049),
    "the last row, and only that": lambda content: content["rows"]["2"].pop(),
    "the last row, and only that, must have": lambda content: content["rows"]["2"].insert(0, content["rows"]["2"][-1]),
    "rows must be sorted": lambda content: content["rows"]["2"].insert(0, content["rows"]["2"][1]),
    "measured points for '3' ranks": lambda content: content.update(measured={"3": [[1, 1.0]]}),
    "measured points must be": lambda content: content.update(measured={"2": [[2, 1.0], [1, 1.0]]}),
    "codecs points for '3' ranks": lambda content: content.update(codecs={"3": {"int8": [[1, 1.0]]}}),
    "2 ranks: codecs must be an object": lambda content: content.update(codecs={"2": [[1, 1.0]]}),
    "2 ranks: codecs: codec must be a graphar.Codec": lambda content: content.update(codecs={"2": {"int9": []}}),
    "its parts must be of reducescatter, allgather, alltoall": lambda content: content["parts"].update(broadcast=[]),
    "reducescatter: row 0: algorithm must be one of reducescatter_push": with_part(
        "reducescatter", algorithm="two_shot"
    ),
    "allgather: row 0: allgather_flagged takes at most 262144 bytes": with_part("allgather", max_nbytes=262145),
    "allgather: row 0: allgather_flagged needs exactly blocks, max_nbytes, threads": with_part("allgather", chunk=1),
    "chip: sms must be int, got 0": with_policy("chip", sms=0),
    "chip: arch must be str, got 90": with_policy("chip", arch=90),
    "lossless: allgather_from_nbytes must be": with_policy("lossless", allgather_from_nbytes={"4": 0}),
    "allgather_from_nbytes, and differs in 'from'": with_policy("lossless", **{"from": 1}),
    "norm: one_shot_sent_nbytes must be int, got 1.5": with_policy("norm", one_shot_sent_nbytes=1.5),
    "quantized: needs exactly half_sm_tiles, pipelined_tiles, many_tiles": without("many_tiles", "quantized"),
    "beside: needs exactly blocks, pipelined_from_nbytes, and differs in 'warps'": with_policy("beside", warps=1),
    "matmul: own_from_rows must be int, got [64]": with_policy("matmul", own_from_rows=[64]),
    "matmul: against_torch must be": with_policy("matmul", against_torch={"64": 1.0}),
    "matmul: against_torch must have points [m, n, k, ratio], got [64, 64, 1.0]": with_policy(
        "matmul", against_torch=[[64, 64, 64, 1.0], [64, 64, 1.0]]
    ),
    "matmul: against_torch must have points [m, n, k, ratio], got 64": with_policy("matmul", against_torch=[64]),
    "matmul: n of against_torch must be int, got 0": with_policy("matmul", against_torch=[[64, 0, 64, 1.0]]),
    "matmul: k of against_torch must be int, got 64.0": with_policy("matmul", against_torch=[[64, 64, 64.0, 1.0]]),
    "matmul: ratio of against_torch must be float, got 0": with_policy("matmul", against_torch=[[64, 64, 64, 0]]),
    "matmul: against_torch must have each [m, n, k] once": with_policy(
        "matmul", against_torch=[[64, 64, 64, 1.0], [64, 64, 64, 2.0]]
    ),
    "matmul: skinny_least_busy must be float": with_policy("matmul", skinny_least_busy="most"),
    "matmul: tiles_from_numel must be": with_policy("matmul", tiles_from_numel={"2": -1}),
    "matmul: must be an object, got 'large'": with_policy("matmul", large_tile="large"),
    "matmul: large_tile must be MatmulTile<64, 128, ": with_policy("matmul", large_tile=of_table(SUMMED_TILES[-1])),
    "matmul: small_tile must be MatmulTile<64, 128, ": with_policy("matmul", small_tile=of_table(SUMMED_TILES[3])),
    "2 ranks: points of int8 must be": lambda content: content.update(codecs={"2": {"int8": [[1, -1.0]]}}),
}


@pytest.mark.parametrize("reason", BAD_TABLES)
def test_a_bad_table_of_the_users_is_ignored_with_one_warning_that_says_why(user_folder, reason):
    content = json.loads(MINE.to_json())
    BAD_TABLES[reason](content)
    cache.store_file("tuning", "nvidia_b999.json", json.dumps(content).encode())

    with pytest.warns(RuntimeWarning, match=r"tuning/nvidia_b999\.json") as warned:
        found = [find_table(DEVICE) for _ in range(3)]

    assert found == [shipped_table("default")] * 3
    assert len(warned) == 1
    assert reason in str(warned[0].message)


@pytest.mark.parametrize(
    "points",
    [
        {"1024": 2.0},
        [1024, 2.0],
        [[1, 1.0], [1024]],
        [[1024, 2.0, 3.0]],
        [[1024.0, 2.0]],
        [[0, 2.0]],
        [[1024, 0]],
        [[1024, True]],
        [[1024, math.inf]],
        [[1024, 2.0], [1024, 3.0]],
    ],
    ids=str,
)
def test_malformed_points_are_refused(points):
    content = json.loads(MINE.to_json())

    assert Table.from_json(json.dumps(content | {"measured": {"2": [[1, 0.5], [2, 1]]}})).measured
    with pytest.raises(ValueError, match=r"^2 ranks: measured points must be \[bytes,"):
        Table.from_json(json.dumps(content | {"measured": {"2": points}}))


@pytest.mark.parametrize(
    ("algorithm", "grid"),
    [
        ("one_shot", {"blocks": 1, "threads": 32}),
        ("two_shot_tma", {"blocks": 32, "threads": 640, "chunk": 1}),
        ("two_shot_pipelined", {"blocks": 132, "threads": 512, "chunk": 2048}),
    ],
)
def test_an_entry_may_have_the_smallest_and_the_largest_grid(algorithm, grid):
    entry = {"max_nbytes": 1, "algorithm": algorithm, **grid}
    content = json.loads(MINE.to_json())

    assert Table.from_json(json.dumps(content | {"rows": {"2": [entry, *content["rows"]["2"]]}})).rows[2][0] == entry


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'"rows"'])
def test_what_is_no_table_at_all_is_ignored_with_a_warning(content):
    cache.store_file("tuning", "nvidia_b999.json", content)

    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert find_table(DEVICE) == shipped_table("default")


@pytest.mark.parametrize("of_the_folder", [True, False])
def test_a_table_that_others_may_write_is_not_read(of_the_folder):
    path = store(MINE)
    (path.parent if of_the_folder else path).chmod(0o777)

    with pytest.warns(RuntimeWarning, match="is not trusted"):
        assert find_table(DEVICE) == shipped_table("default")


def test_a_table_is_not_written_to_a_folder_that_others_may_write(user_folder):
    path = store(MINE)
    path.parent.chmod(0o777)

    with pytest.raises(PermissionError, match="is not trusted"):
        store(MINE)


@on_ranks(2)
def test_the_table_of_rank_0_serves_all_ranks(rank, world_size, tmp_path):
    folder = tmp_path
    os.environ["GRAPHAR_CACHE_DIR"] = f"{folder}/{rank}"
    store(replace(MINE, machine=f"that of rank {rank}"))
    torch.cuda.get_device_name = lambda device: DEVICE
    engine.missing_software = lambda: ""
    launcher.chip = lambda device: Chip(132, "sm_90a")
    runner.ProcessMemory = lambda *_: SimpleNamespace(check=lambda: None, close=lambda: None)
    runner.Member = runner.Runner = runner.TorchMemory = lambda *_: None
    communicator = graphar.Communicator()
    communicator.engine._set_up(torch.device("cuda", 0))
    assert communicator.engine.table.machine == "that of rank 0"


@pytest.mark.parametrize(
    ("nbytes", "expected"), [(1, 2), (1024, 2), (2048, 4), (4096, 8), (8192, 8), (16384, 8), (65536, 32)]
)
def test_a_time_lies_between_the_measured_ones_and_beyond_them_goes_by_bandwidth(nbytes, expected):
    table = replace(MINE, measured={2: [[1024, 2], [4096, 8], [16384, 8]]})

    assert expected_us(table, 2, nbytes) == pytest.approx(expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_no_time_is_expected_where_none_was_measured(world_size):
    assert expected_us(MINE, world_size, 1024) is None


@pytest.fixture
def with_kernels(monkeypatch):
    """A communicator that chooses as if it had two GPUs, by a measured table."""
    communicator = graphar.Communicator(devices=["cuda:0", "cuda:1"])
    monkeypatch.setattr(communicator.engine, "find_runner", lambda device: True)
    entries = [{"max_nbytes": None, "algorithm": "two_shot_pipelined", "blocks": 1, "threads": 512, "chunk": 32}]
    measured = {2: [[16384, 2.2], [32768, 220]]}
    communicator.engine.table = replace(MINE, name="mine", rows={2: entries}, measured=measured)
    yield communicator
    communicator.close()


def explained(communicator, numel, algorithm="auto", codec=""):
    engine, x = communicator.engine, torch.empty(numel, dtype=torch.bfloat16, device="meta")
    call = Call.of(Sum(numel, codec), x, algorithm=algorithm, symmetric=engine.is_symmetric([x] * 2))
    return engine.explain(call, x)


@pytest.mark.parametrize(
    ("max_nbytes", "prepared"),
    [
        (1 << 10, ["one_shot_push"]),
        (70_000, ["one_shot_push"]),
        (70_001, ["one_shot_push", "one_shot"]),
        (80_000, ["one_shot_push", "one_shot"]),
        (100_000, ["one_shot_push", "one_shot", "two_shot_pipelined"]),
        (None, ["one_shot_push", "one_shot", "two_shot_pipelined"]),
    ],
)
def test_what_is_prepared_is_all_that_a_table_takes_up_to_a_size(max_nbytes, prepared):
    """Entries may serve a few sizes only, none of them a power of two."""
    entries = [(70_000, "one_shot_push"), (80_000, "one_shot"), (None, "two_shot_pipelined")]
    of_two = [{"max_nbytes": limit, "algorithm": name, "blocks": 1, "threads": 32} for limit, name in entries]
    facts = Facts(2, replace(MINE, rows={2: of_two}), Chip(132, "sm_80"))

    needed = needed_kernels(facts, ["allreduce"], [torch.bfloat16], max_nbytes)

    assert [kernel.algorithm.value for kernel in needed] == prepared


def test_an_explanation_says_the_expected_time(with_kernels):
    said = explained(with_kernels, 8192)

    assert said.expected_us == 2.2
    assert str(said) == (
        "two_shot_pipelined (1 blocks of 512, about 2.2 us): the fastest by table 'mine' for 2 ranks and 16384 bytes; "
        "49.5 MB of scratch on each GPU"
    )
    assert said.scratch_nbytes == Algorithm.TWO_SHOT_PIPELINED.row.scratch(2).nbytes
    assert "about 220 us" in str(explained(with_kernels, 16384))


def test_a_choice_by_the_default_table_is_called_a_guess():
    table = shipped_table(DEFAULT)

    choice = select(Call(Sum(1024), torch.bfloat16, 0), Facts(2, table, table.chip))

    assert choice.reason == "a guess by table 'default' for 2 ranks and 2048 bytes"


def test_no_time_is_expected_of_an_algorithm_that_was_asked_for_or_where_symmetric_tensors_spare_a_copy(with_kernels):
    asked_for = [explained(with_kernels, 8192, algorithm) for algorithm in ("two_shot_pipelined", "fallback")]
    with_kernels.engine.symmetric = SimpleNamespace(hold=lambda out: True)

    assert [said.expected_us for said in (*asked_for, explained(with_kernels, 8192))] == [None] * 3


INT8, INT4 = [[1024, 6], [4096, 12]], [[1024, 3], [4096, 6]]
ROUNDED = replace(MINE, measured={2: [[1024, 4], [4096, 16]]}, codecs={2: {"int8": INT8, "int4": INT4}})


@pytest.mark.parametrize(("name", "expected"), [("int8", 12), ("fp8_e4m3", 12), ("int5", 6), ("int4", 6), ("int2", 6)])
def test_a_codec_takes_as_long_as_the_measured_one_of_about_as_many_bits(name, expected):
    assert expected_quantized_us(ROUNDED, codec(name), 2, 2048) == pytest.approx(expected)


def test_a_time_depends_on_the_number_of_elements_and_lies_between_the_measured_ones():
    assert expected_quantized_us(ROUNDED, Codec(4, 128), 2, 1024) == pytest.approx(18**0.5)
    assert expected_quantized_us(ROUNDED, Codec(4, 128), 2, 4096) == pytest.approx(12)


def test_a_codec_that_is_named_in_full_counts_like_its_name():
    in_full = Codec(4).text, "bits=4, bucket_size=32, rounding=nearest, scheme=absmax, scale_dtype=bfloat16"
    tables = [replace(ROUNDED, codecs={2: {text: INT4}}) for text in in_full]

    assert [expected_quantized_us(table, codec("int4"), 2, 2048) for table in tables] == [6, 6]


def test_a_codec_whose_kernel_was_not_measured_has_no_time():
    assert expected_quantized_us(ROUNDED, Codec(4, scheme="minmax"), 2, 2048) is None
    assert expected_quantized_us(ROUNDED, codec("int4"), 4, 2048) is None
    assert all(expected_quantized_us(MINE, codec(name), 2, 2048) is None for name in NAMES)


def said_of(communicator, numel, name, algorithm="auto"):
    return explained(communicator, numel, algorithm, codec(name).text)


def test_an_explanation_says_whether_a_codec_is_faster(with_kernels):
    with_kernels.engine.table = ROUNDED

    gains, loses = said_of(with_kernels, 2048, "int4"), said_of(with_kernels, 512, "int8")

    assert (gains.expected_us, gains.exact_us) == (6, 16)
    assert "blocks of 64, about 6.0 us): 4.5 bits an element" in str(gains)
    assert "for 2 ranks and 4096 bytes; faster than exact: about 6.0 us instead of 16.0 us" in str(gains)
    assert "for 2 ranks and 1024 bytes; slower than exact: about 6.0 us instead of 4.0 us" in str(loses)


def test_an_explanation_says_nothing_of_that_where_either_time_is_missing(with_kernels):
    for table in (replace(ROUNDED, codecs={}), replace(ROUNDED, measured={})):
        with_kernels.engine.table = table
        said = str(said_of(with_kernels, 2048, "int4"))
        assert said.endswith("for 2 ranks and 4096 bytes; 144 MB of scratch on each GPU")
    with_kernels.engine.table = ROUNDED
    asked_for = said_of(with_kernels, 2048, "int4", "quantized_two_shot_pipelined")
    assert (asked_for.expected_us, asked_for.exact_us) == (None, None)


def test_the_exact_call_is_not_compared_with_itself(with_kernels):
    assert explained(with_kernels, 8192).exact_us is None
