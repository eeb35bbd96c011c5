"""Calls by algorithms from outside the package: how they are chosen, named, refused, prepared and put into words."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch

from graphar.errors import UnsupportedError
from graphar.numerics.dtypes import BYTE
from graphar.numerics.epilogues.epilogue import form_to_prepare
from graphar.plan import algorithms, select
from graphar.plan.algorithms import ROWS, Algorithm
from graphar.plan.call import Call
from graphar.plan.config import FALLBACK, Config, Kernel
from graphar.plan.policy import Chip
from graphar.plan.select import Facts, needed_kernels
from graphar.plan.slices import Slice
from graphar.plan.tables import shipped_table
from graphar.plan.work import Parts, Sum
from graphar.ranks import agreement
from graphar.runtime.checks import call_checks
from tests.outside import MAX_NBYTES, load

pytestmark = pytest.mark.usefixtures("nothing_stays_loaded")

BF16 = torch.bfloat16
H200 = shipped_table("nvidia_h200")
FACTS = Facts(4, H200, Chip(132, "sm_90a"))
OPS = ("allreduce", "reducescatter", "allgather")
ROW = ROWS[Algorithm.ONE_SHOT_PUSH]


def work_of(op, nbytes):
    return Sum(nbytes // 2) if op == "allreduce" else Parts(op, (nbytes // 2,) * 4)


def choose(algorithm, nbytes=8192, facts=FACTS, dtype=BF16, work=None):
    return select.select(Call(work or work_of(algorithm.op, nbytes), dtype, 0, algorithm=algorithm), facts)


@pytest.mark.parametrize("op", OPS)
def test_a_call_takes_what_it_names_with_the_grid_of_its_row(op):
    ring = load(op=op, threads=128, blocks=32, chunk=64)

    config, reason = choose(ring, nbytes=1 << 19)

    assert config == Config(ring, 32, 128, 64)
    assert reason.startswith("asked for, shaped by table 'nvidia_h200' for 4 ranks")


def test_the_grid_has_as_many_blocks_as_have_work():
    assert choose(load(threads=128), nbytes=5 * 128 * 16).config.blocks == 5


def test_a_function_of_the_bytes_gives_the_blocks():
    ring = load(blocks=lambda nbytes: 3 if nbytes <= 8192 else 200)

    assert choose(ring, 8192).config.blocks == 3
    assert choose(ring, 1 << 20).config.blocks == 131  # which leaves room for another communicator


@pytest.mark.parametrize(
    ("row", "call", "reason"),
    [
        ({}, {"nbytes": MAX_NBYTES + 2}, f"its scratch takes {MAX_NBYTES} bytes between 4 ranks, not {MAX_NBYTES + 2}"),
        ({"dtypes": [BF16]}, {"dtype": torch.float32}, r"it has no kernel for torch\.float32"),
        ({"world_sizes": (2, 8)}, {}, "it serves 2, 8 ranks, not 4"),
        ({"minimum_arch": 100}, {}, "it needs sm_100 or newer, the GPUs have sm_90a"),
    ],
)
@pytest.mark.parametrize("op", ["allreduce", "reducescatter"])
def test_a_call_that_its_kernel_cannot_serve_is_refused(op, row, call, reason):
    ring = load(op=op, **row)

    with pytest.raises(UnsupportedError, match=rf"^{op}: {ring} cannot serve this call: {reason}$"):
        choose(ring, **call)


@pytest.mark.parametrize(
    ("work", "lacks"),
    [
        (Sum(64, epilogue=form_to_prepare("-v")), "has no kernel with an epilogue; one_shot_push, "),
        (Sum(64, order="tree"), "has no kernel that adds as a tree; one_shot_push, "),
        (Parts("reducescatter", (64,) * 4, order="tree"), "has no kernel that adds as a tree; reducescatter_push have"),
    ],
)
def test_an_epilogue_or_a_tree_is_refused_as_for_builtin_ones(work, lacks):
    ring = load(op=work.op)

    with pytest.raises(UnsupportedError, match=f"{work.op}: {ring} {lacks}"):
        choose(ring, work=work, dtype=torch.float32)


@pytest.mark.parametrize("op", OPS)
def test_where_no_kernel_can_run_it_goes_by_its_specification(op):
    ring = load(op=op, world_sizes=[2], dtypes=[BF16])

    config, reason = choose(ring, 1 << 30, replace(FACTS, problem="the tensor is on the CPU"), torch.float64)

    assert (config, reason) == (FALLBACK, f"the tensor is on the CPU; by the specification of {ring}")


def test_a_builtin_one_is_still_refused_where_no_kernel_can_run():
    with pytest.raises(UnsupportedError, match="reducescatter_push cannot serve this call: the tensor is on the CPU"):
        choose(Algorithm.REDUCESCATTER_PUSH, facts=replace(FACTS, problem="the tensor is on the CPU"))


@pytest.mark.parametrize(
    "algorithm", [Algorithm.REDUCESCATTER_PUSH, Algorithm.ALLGATHER_LOSSLESS, Algorithm.ALLGATHER_FLAGGED]
)
def test_parts_may_name_a_builtin_one_too(algorithm):
    assert choose(algorithm).config.algorithm is algorithm


def test_any_dtype_travels_as_bytes():
    gather = load(op="allgather")

    assert choose(gather, dtype=torch.int64).config.algorithm is gather


def test_an_algorithm_from_outside_is_found_by_its_name():
    ring = algorithms.add("ring", "0123456789ab", ROW)

    assert ring == ring.value == "ring@0123456789ab"
    assert Algorithm("ring@0123456789ab") is ring
    assert (ring.row, ring.op, ring.kernel_name) == (ROW, "allreduce", "ring")


def test_a_record_names_it_by_a_number_after_the_builtin_ones():
    first, second = (algorithms.add("ring", digest, ROW) for digest in ("one", "two"))

    assert (first.number, second.number) == (len(Algorithm), len(Algorithm) + 1)
    assert [algorithms.of_number(one.number) for one in (first, second)] == [first, second]
    assert [algorithms.of_number(one.number) for one in Algorithm] == list(Algorithm)


def test_it_is_no_builtin_one():
    ring = algorithms.add("ring", "one", ROW)

    assert ring not in list(Algorithm)
    assert not hasattr(Algorithm, "ring")
    assert algorithms.is_from_outside(ring)
    assert not any(map(algorithms.is_from_outside, Algorithm))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_the_algorithm_itself(copied):
    ring = algorithms.add("ring", "one", ROW)

    assert copied(ring) is ring


def test_one_that_is_not_loaded_is_refused_in_these_words():
    with pytest.raises(ValueError, match=r"'ring@one' is not loaded in this process; graphar\.load_algorithm loads it"):
        Algorithm("ring@one")

    with pytest.raises(ValueError, match="'ring' is not a valid Algorithm"):
        Algorithm("ring")


def test_a_name_that_is_not_loaded_is_refused_by_the_check_of_calls():
    with pytest.raises(ValueError, match=r"^allreduce: this process has loaded no algorithm 'ring@123' of allreduce$"):
        call_checks.check_call("allreduce", "ring@123", None)


def test_one_of_another_op_is_refused():
    ring = load(op="allgather")

    call_checks.check_call("allgather", ring, None, "allgather")
    with pytest.raises(ValueError, match=r"has loaded no algorithm 'pushed_sum@.*' of allreduce"):
        call_checks.check_call("allreduce", ring, None)


def test_ranks_that_loaded_different_ones_differ_in_the_words_of_a_call():
    calls = [Call(Sum(8), BF16, 0, algorithm=one) for one in ("auto", load(), load(threads=128))]

    words = [agreement.words(call) for call in calls]
    launches = [agreement.words_of_launch(calls[0], Config(one.algorithm, 1, 32), Slice(8)) for one in calls[1:]]

    assert len(set(words)) == 3
    assert words[1] == f"allreduce of 8 elements of torch.bfloat16, algorithm {load()}"
    assert len(set(launches)) == 2


def test_one_that_is_named_is_prepared_for_the_dtypes_that_it_has():
    ring = load(dtypes=[BF16, torch.float32])

    kernels = list(needed_kernels(FACTS, [ring], [BF16, torch.float16, torch.float32], None))

    assert kernels == [Kernel(ring, BF16), Kernel(ring, torch.float32)]


def test_one_that_moves_bytes_is_prepared_once():
    ring = load(op="allgather")

    assert list(needed_kernels(FACTS, [ring.value], [BF16, torch.float32], None)) == [Kernel(ring, BYTE)]


def test_one_that_is_not_named_is_not_prepared():
    before = [set(needed_kernels(FACTS, [op], [BF16], None)) for op in (*OPS, "allgather_tuple")]
    for op in OPS:
        load(op=op)

    assert [set(needed_kernels(FACTS, [op], [BF16], None)) for op in (*OPS, "allgather_tuple")] == before


def test_one_that_does_not_serve_the_ranks_is_not_prepared():
    ring = load(world_sizes=[2])

    with pytest.raises(UnsupportedError, match=f"prepare: {ring} cannot be prepared: it serves 2 ranks, not 4"):
        list(needed_kernels(FACTS, [ring], [BF16], None))


def test_the_ops_to_prepare_may_have_it():
    ring = load()

    assert call_checks.check_ops("prepare", ["allgather", ring]) == ["allgather", ring.value]
    with pytest.raises(ValueError, match=r"ops must be a list with any of .*, got "):
        call_checks.check_ops("prepare", ["ring@123"])
