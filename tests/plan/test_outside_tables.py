"""Algorithms from outside the package in tuning tables: chosen where they are loaded, and passed over elsewhere."""

from dataclasses import replace

import pytest
import torch

from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.plan import select, tune
from graphar.plan.algorithms import GENERAL, Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config, Kernel
from graphar.plan.policy import Chip
from graphar.plan.scratch import WORLD_SIZES, Scratch
from graphar.plan.select import Facts, needed_kernels
from graphar.plan.tables import Table, shipped_table
from graphar.plan.work import Parts, Sum, TensorTuple
from tests.outside import load, unload

pytestmark = pytest.mark.usefixtures("nothing_stays_loaded")

BF16 = torch.bfloat16
CHIP = Chip(132, "sm_90a")
H200 = shipped_table("nvidia_h200")
LIMIT = 64 << 10
SIGNALLED = Scratch.of_slots(64, 4096, signal_pad=True)
OPS = ("allreduce", "reducescatter", "allgather")


def table_with(algorithm, **changes):
    """The table of the H200, in which an algorithm is the fastest up to LIMIT."""
    entry = {"max_nbytes": LIMIT, "algorithm": str(algorithm), "blocks": 20, "threads": 256} | changes
    op = algorithm.op
    if op != "allreduce":
        others = [one for one in H200.parts[op] if one["max_nbytes"] is None or one["max_nbytes"] > LIMIT]
        return replace(H200, parts=H200.parts | {op: [entry, *others]})
    others = [one for one in H200.rows[4] if one["max_nbytes"] is None or one["max_nbytes"] > LIMIT]
    return replace(H200, rows=H200.rows | {4: [entry, *others]})


def choose(op, table, nbytes=8192, dtype=BF16, **options):
    numel = nbytes // dtype.itemsize
    work = Sum(numel, **options) if op == "allreduce" else Parts(op, (numel,) * 4, **options)
    return select.select(Call(work, dtype, 0), Facts(4, table, CHIP))


@pytest.mark.parametrize("op", OPS)
def test_auto_takes_it_where_the_table_names_it(op):
    ring = load(op=op)

    small, large = (choose(op, table_with(ring), nbytes) for nbytes in (LIMIT, LIMIT + 16))

    assert small.config == Config(ring, 16, 256)  # as many blocks as have work
    assert large.config == choose(op, H200, LIMIT + 16).config


@pytest.mark.parametrize("op", OPS)
def test_one_that_is_not_loaded_is_passed_over_with_the_reason(op):
    ring = load(op=op)
    table = table_with(ring)
    unload(ring)

    config, reason = choose(op, Table.from_json(table.to_json()))

    _, following, *_ = table.rows[4] if op == "allreduce" else table.parts[op]
    assert config.algorithm == following["algorithm"]
    assert f"; the table's {ring} is not loaded in this process" in reason
    assert "is not loaded" not in choose(op, table, LIMIT + 16).reason


@pytest.mark.parametrize(
    ("op", "row", "call", "lacks"),
    [
        ("allreduce", {"dtypes": [BF16]}, {"dtype": torch.float32}, "it has no kernel for torch.float32"),
        ("allreduce", {"world_sizes": [4]}, {"epilogue": form_to_prepare("-v")}, "has no kernel with an epilogue"),
        ("allreduce", {}, {"order": "tree", "dtype": torch.float32}, "has no kernel that adds as a tree"),
        ("reducescatter", {}, {"epilogue": form_to_prepare("-v")}, "has no kernel with an epilogue"),
        ("reducescatter", {"dtypes": [BF16]}, {"dtype": torch.float32}, "it has no kernel for torch.float32"),
        ("allgather", {"dtypes": [BF16]}, {"dtype": torch.int64}, "it has no kernel for torch.int64"),
    ],
)
def test_what_it_cannot_serve_goes_by_the_general_one(op, row, call, lacks):
    ring = load(op=op, **row)

    config, reason = choose(op, table_with(ring), **call)

    assert config.algorithm is GENERAL[op]
    assert reason.startswith(f"{ring}, ")
    assert lacks in reason


def test_a_tuple_is_gathered_by_the_general_one():
    work = TensorTuple((BF16,) * 2, ((8,),) * 2, (4,) * 4)

    choice = select.select(Call(work, BYTE, 0), Facts(4, table_with(load(op="allgather")), CHIP))

    assert choice.config.algorithm is Algorithm.ALLGATHER_PUSH
    assert "has no kernel for several tensors" in choice.reason


def test_a_time_is_expected_where_it_is_loaded_alone():
    ring = load()
    facts, call = Facts(4, table_with(ring), CHIP), Call(Sum(4096), BF16, 0)

    loaded = select.explain(call, facts)
    unload(ring)

    assert (loaded.algorithm, loaded.expected_us is None) == (ring.value, False)
    assert select.explain(call, facts).expected_us is None


@pytest.mark.parametrize("op", OPS)
def test_what_auto_may_take_is_prepared(op):
    ring = load(op=op, dtypes=[BF16])
    facts = Facts(4, table_with(ring), CHIP)

    kernels = set(needed_kernels(facts, [op], [BF16, torch.float32], LIMIT))
    unload(ring)
    without = set(needed_kernels(facts, [op], [BF16, torch.float32], LIMIT))

    assert Kernel(ring, BF16) in kernels
    assert Kernel(ring, torch.float32) not in kernels
    assert any(one.algorithm is GENERAL[op] for one in kernels)  # for the other dtype
    assert {one.algorithm for one in without} >= {
        choose(op, facts.table, size).config.algorithm for size in (2048, LIMIT)
    }


def test_no_tuple_is_prepared_for_it():
    ring = load(op="allgather")

    kernels = list(needed_kernels(Facts(4, table_with(ring), CHIP), ["allgather_tuple"], [BF16], None))

    assert {one.algorithm for one in kernels} == {Algorithm.ALLGATHER_FLAGGED, Algorithm.ALLGATHER_PUSH}


@pytest.mark.parametrize(
    ("row", "entry", "reason"),
    [
        ({}, {"chunk": 4}, "pushed_sum@.* needs exactly blocks, max_nbytes, threads"),
        ({"chunk": 8}, {}, "pushed_sum@.* needs exactly blocks, chunk, max_nbytes, threads"),
        ({}, {"threads": 128}, "pushed_sum@.* has 256 threads"),
        ({"blocks": 16}, {}, "pushed_sum@.* has at most 16 blocks"),
        ({"max_nbytes": 1024}, {}, "pushed_sum@.* takes at most 1024 bytes"),
        ({"world_sizes": [2]}, {}, "pushed_sum@.* does not serve 4 ranks"),
        ({"specification": torch.stack}, {}, "algorithm must be one of one_shot_push, "),
    ],
)
def test_an_entry_that_its_kernel_cannot_run_is_refused(row, entry, reason):
    table = table_with(load(**row), **entry)

    with pytest.raises(ValueError, match=f"4 ranks: row 0: {reason}"):
        Table.from_json(table.to_json())


def test_of_one_that_is_not_loaded_the_numbers_are_checked():
    ring = load(chunk=8)
    valid, without_chunk, with_speed = [
        table_with(ring, **how).to_json() for how in ({"chunk": 8}, {"chunk": 0}, {"speed": 1})
    ]
    unload(ring)

    assert Table.from_json(valid).to_json() == valid
    with pytest.raises(ValueError, match=r"blocks, chunk, max_nbytes, threads must be positive integers$"):
        Table.from_json(without_chunk)
    with pytest.raises(ValueError, match="needs exactly blocks, max_nbytes, threads"):
        Table.from_json(with_speed)


def test_the_last_entry_which_serves_every_size_is_of_graphars_own():
    ring = load(max_nbytes=None, scratch=SIGNALLED)
    entry = {"max_nbytes": None, "algorithm": ring.value, "blocks": 20, "threads": 256}

    table = replace(H200, rows=H200.rows | {4: [entry]})

    with pytest.raises(ValueError, match=r"^4 ranks: the last row must be of an algorithm of graphar's own$"):
        Table.from_json(table.to_json())


@pytest.mark.parametrize("op", OPS)
def test_one_that_is_loaded_is_tried(op):
    ring = load(op=op, threads=128, blocks=32)

    tried = tune.candidates(op, WORLD_SIZES, LIMIT, CHIP)

    assert Config(ring, 32, 128) in tried


@pytest.mark.parametrize(
    "row",
    [
        {"max_nbytes": 1024},
        {"world_sizes": [2, 4]},
        {"dtypes": [torch.float32]},
        {"minimum_arch": 100},
        {"specification": torch.stack},
    ],
    ids=lambda row: next(iter(row)),
)
def test_one_that_cannot_serve_the_timed_calls_exactly_is_not_tried(row):
    ring = load(**row)

    assert ring not in {one.algorithm for one in tune.candidates("allreduce", WORLD_SIZES, LIMIT, CHIP)}


@pytest.mark.parametrize("max_nbytes", [1 << 20, None])
def test_where_it_is_the_fastest_a_table_names_it_before_one_of_graphars_own(max_nbytes):
    ring = load(max_nbytes=max_nbytes, scratch=SIGNALLED)
    new = replace(H200, machine="made up")
    sizes = [nbytes for nbytes in tune.SIZES if nbytes <= 1 << 20]
    measured = {
        nbytes: {one: 1.0 if one.algorithm is ring else 9.0 for one in tune.candidates("allreduce", [4], nbytes, CHIP)}
        for nbytes in sizes
    }

    table = tune.update(H200, new, {4: measured})

    assert Table.from_json(table.to_json()) == table
    assert table.rows[4][0]["algorithm"] == ring
    assert table.rows[4][0]["max_nbytes"] == 1 << 20
    assert any(f"-> {ring} (" in line for line in tune.what_changed(H200, table, {4: measured}))
