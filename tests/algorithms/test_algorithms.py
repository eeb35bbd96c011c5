"""The algorithms of docs/pages/algorithms: they compile, and their kernels compute their specifications."""

import re
import runpy
from functools import reduce

import pytest
import torch

import graphar
from graphar import reference, simulator
from graphar.plan.config import Kernel
from graphar.runtime.catalogue import source_of
from graphar.runtime.compiler import compile_kernel
from graphar.simulator import Mutation
from tests.pages import FOLDER

pytestmark = pytest.mark.usefixtures("nothing_stays_loaded")

NAMES = sorted(path.stem for path in (FOLDER / "algorithms").glob("*.cu"))
# By algorithm, a mistake: each call takes the same slots, or a partial sum travels on without its next addend. A ring
# with one half would be wrong only where the store that arms a word comes later than a trip around the ring.
MISTAKES = {
    "allreduce_row_max": ("(call.epoch & 1)", "0"),
    "direct_allgather": ("(call.epoch & 1)", "0"),
    "direct_reducescatter": ("(call.epoch & 1)", "0"),
    "ring_allreduce": ("a.capacity + i, p)", "a.capacity + i, received[0])"),
}
# Sizes in elements: beside a pack, beside a row and its last pack, and of several rows or of shards that differ.
NUMELS = (1, 9, 1024, 1025, 1032, 3000)

BF16 = (torch.bfloat16,)

every_name = pytest.mark.parametrize("name", NAMES)


def load(name):
    """What the Python file of an algorithm defines."""
    return runpy.run_path(str(FOLDER / "algorithms" / f"{name}.py"))


def ranks_tensors(ranks, numel, dtype=torch.bfloat16):
    return list(torch.randn(ranks, numel, generator=torch.Generator().manual_seed(1)).to(dtype))


@every_name
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize(("dtype", "ranks"), [(torch.bfloat16, 2), (torch.float16, 3), (torch.float32, 8)])
def test_a_kernel_compiles_without_a_warning(name, arch, dtype, ranks):
    cubin = compile_kernel(source_of(Kernel(load(name)[name], dtype), ranks), arch)

    assert name in cubin.symbol
    assert not cubin.said


@every_name
def test_a_kernel_has_under_a_hundred_lines(name):
    assert len((FOLDER / "algorithms" / f"{name}.cu").read_text().splitlines()) < 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_adds_each_shard_from_its_own_rank_on_and_rounds_every_partial_sum(ranks, dtype):
    line = 128 // dtype.itemsize
    xs = ranks_tensors(ranks, 5 * ranks * line - line - 3, dtype)  # shards of 5 lines, of which the last is short

    found = graphar.allreduce(xs, algorithm=load("ring_allreduce")["ring_allreduce"])

    shards = [
        reduce(torch.add, [xs[(s + hop) % ranks][5 * s * line :][: 5 * line] for hop in range(ranks)])
        for s in range(ranks)
    ]
    assert all(torch.equal(one, torch.cat(shards)) for one in found)
    assert ranks == 2 or not torch.equal(found[0], reference.allreduce(xs))


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5)])
def test_a_ring_keeps_the_shape_of_tensors_smaller_than_a_line(shape):
    xs = [torch.ones(shape)] * 3

    found = graphar.allreduce(xs, algorithm=load("ring_allreduce")["ring_allreduce"])

    assert all(torch.equal(one, torch.full(shape, 3.0)) for one in found)


def test_a_gather_changes_words_of_all_ones_alone():
    bits = [[-1, -1, -1, 5], [7, -1, -1], [-1, 0x7FFF, -1]]  # of elements of two bytes
    xs = [torch.tensor(part, dtype=torch.int16).view(torch.bfloat16) for part in bits]

    found = graphar.allgather(xs, algorithm=load("direct_allgather")["direct_allgather"])

    expected = [0x7FFF, 0x7FFF, -1, 5, 7, -1, -1, -1, 0x7FFF, -1]
    assert [one.view(torch.int16).tolist() for one in found] == [expected] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_end_with_the_largest_magnitude_of_their_sums(dtype):
    width = 1024 + 16 // dtype.itemsize
    xs = [x.view(3, width) for x in ranks_tensors(3, 3 * width, dtype)]

    found, *_ = graphar.allreduce(xs, algorithm=load("allreduce_row_max")["allreduce_row_max"])

    sums = reference.allreduce(xs)[:, :1024]
    assert torch.equal(found[:, :1024], sums)
    assert torch.equal(found[:, 1024:], sums.abs().amax(1, keepdim=True).expand(3, width - 1024))


def test_the_largest_magnitude_of_a_row_with_a_nan_is_nan():
    xs = [torch.ones(2, 1028), torch.ones(2, 1028)]
    xs[1][1, 7] = torch.nan

    found, *_ = graphar.allreduce(xs, algorithm=load("allreduce_row_max")["allreduce_row_max"])

    assert found[0, 1024:].tolist() == [2.0] * 4
    assert found[1, 1024:].isnan().all()


def test_both_files_have_rows_of_as_many_columns():
    (columns,) = re.findall(r"columns = (\d+);", (FOLDER / "algorithms" / "allreduce_row_max.cu").read_text())

    assert load("allreduce_row_max")["COLUMNS"] == int(columns)


@pytest.mark.host
@every_name
@pytest.mark.parametrize("sanitizer", ["plain", "thread"])
def test_calls_of_sizes_that_change_have_the_bits_of_the_specification(name, sanitizer, request):
    every = request.config.getoption("--whole") or sanitizer == "plain"
    asked = {"ranks": (2, 3, 4), "seeds": 2} if every else {"ranks": (2, 3), "seeds": 1, "dtypes": BF16}

    report = simulator.run(load(name)[name], numel=NUMELS, sanitizers=[sanitizer], **asked)

    assert (len(report.passed), report.failures, report.skipped) == (6 if every else 2, (), ())


@pytest.mark.host
@every_name
def test_a_mistake_in_a_kernel_is_found(name):
    mistake = Mutation(f"{name}.cu", *MISTAKES[name])

    report = simulator.run(
        load(name)[name], ranks=(3,), dtypes=BF16, numel=NUMELS, sanitizers=["plain"], seeds=8, mutations=(mistake,)
    )

    assert report.failures


@pytest.mark.host
def test_a_part_that_sends_nothing_is_found():
    """Its peers do not wait for it, and one that is slower has yet to arm the slots that it then fills."""
    silent = Mutation(
        "direct_allgather.cu", "max(u32(pack_count<T>(a.count[rank])), 1u)", "u32(pack_count<T>(a.count[rank]))"
    )

    report = simulator.run(
        load("direct_allgather")["direct_allgather"],
        ranks=(2,),
        numel=(1, 9),
        sanitizers=["plain"],
        seeds=40,
        mutations=(silent,),
    )

    assert report.failures
