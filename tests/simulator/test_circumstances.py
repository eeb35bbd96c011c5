"""What the simulator tries by itself: kernels that are wrong in one circumstance fail with default arguments.

Each is circumstances/gathered.cu with other text, and serves 3 ranks.
"""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar import simulator
from graphar.plan.algorithms import Algorithm
from graphar.simulator import SANITIZERS, Mutation, check
from graphar.simulator.check import NUMELS
from graphar.simulator.simulation import Simulation
from tests.pages import FOLDER as PAGES
from tests.simulator.test_public_mistakes import FOLDER

pytestmark = pytest.mark.usefixtures("nothing_stays_loaded")

KERNEL = FOLDER.with_name("circumstances") / "gathered.cu"
SLOT_NBYTES = max(NUMELS) * 4  # in fp32
LOAD, STORE, WAIT = "input.load(i);", "mine.store(i, p);", ")) != number)"
TAIL = "(i + 1) * 16 > a.count[a.rank] ? input.load(i) : "
# By circumstance: the texts of the kernel, as they are and as they should not be, and sanitizers that see it.
WRONG = {
    "epochs that wrap": ([(WAIT, WAIT.replace("!=", "<"))], SANITIZERS),
    "parts of unlike sizes": ([("a.count[rank]", "a.count[0 * rank]")], SANITIZERS),
    "an empty part": ([("has_peer = threadIdx.x", "has_peer = packs_of(a.rank) && threadIdx.x")], SANITIZERS),
    "an odd start": ([(LOAD, f"{TAIL}reinterpret_cast<const Pack*>(a.input)[i];")], ["address"]),
    "an end within a pack": (
        [(LOAD, "reinterpret_cast<u64>(a.input) % 16 ? input.load(i) : reinterpret_cast<const Pack*>(a.input)[i];")],
        ["address"],
    ),
    "a size of few packs": ([("u32(pack_count<T>(a.count[rank]))", "u32(a.count[rank] + 7) / 16")], SANITIZERS),
    "the largest size": (
        [("u32(pack_count<T>(a.count[rank]))", "min(u32(pack_count<T>(a.count[rank])), 511u)")],
        SANITIZERS,
    ),
    "a result over the input": ([(LOAD, f"(mine.store(i, {{}}), {LOAD[:-1]});")], SANITIZERS),
    "several blocks": ([("first = blockIdx.x * blockDim.x + threadIdx.x", "first = threadIdx.x")], SANITIZERS),
    "words of all ones": ([(STORE, "mine.store(i, p.word[1] + 1 ? p : Pack{});")], SANITIZERS),
    "the last rank": ([(STORE, "if (a.rank + 1 < N) mine.store(i, p);")], SANITIZERS),
    "a call after another": ([("(1 + half * N + from)", "(1 + from)")], SANITIZERS),
    "an overflow of a signed number": (
        [
            (
                "  const u32 first = ",
                "  const int last = int(blockIdx.x * blockDim.x + threadIdx.x) + 0x7fffffff;\n  const u32 first = ",
            ),
            ("= blockIdx.x * blockDim.x + threadIdx.x,", "= u32(last) - 0x7fffffff,"),
        ],
        ["address"],
    ),
    "stores that come late": ([("store_release_sys(told", "store_relaxed_sys(told")], SANITIZERS),
    "stores of other threads that come late": ([("  __syncthreads();\n", "")], SANITIZERS),
    "data that nothing orders": (
        [
            ("store_relaxed_sys(slot((a.rank + hop) % N, a.rank) + i, p)", "slot((a.rank + hop) % N, a.rank)[i] = p"),
            ("load_relaxed_sys(slot(a.rank, peer) + i)", "slot(a.rank, peer)[i]"),
            ("load_acquire_sys(told", "load_relaxed_sys(told"),
        ],
        ["thread"],
    ),
    "a write to the input": ([(STORE, "mine.store(i, p); if (a.input != mine.base) input.store(i, {});")], SANITIZERS),
    "a wait of a block that is not marked": ([("  bool failed", "  end_call(a, call);\n  bool failed")], SANITIZERS),
}

# That calls have all circumstances is tested below without runs.
SAMPLED = ("epochs that wrap", "an empty part", "an odd start", "stores that come late", "data that nothing orders")


def load() -> Algorithm:
    return graphar.load_algorithm(
        KERNEL,
        op="allgather",
        scratch=lambda ranks: graphar.Scratch.of_slots(2 * ranks + 1, SLOT_NBYTES),
        max_nbytes=SLOT_NBYTES,
        threads=32,
        blocks=2,
        world_sizes=(3,),
    )


@pytest.mark.host
def test_a_kernel_that_is_right_passes_with_default_arguments():
    report = simulator.run(load())

    assert report.ok, str(report)
    assert {(case.dtype, case.sanitizer) for case in report.passed} == {
        (dtype, sanitizer) for dtype in (torch.bfloat16, torch.float32) for sanitizer in SANITIZERS
    }
    assert len(report.skipped) == 6 * len(report.passed)  # 2, 4, 5, 6, 7 and 8 ranks


@pytest.mark.host
@pytest.mark.parametrize(
    "circumstance", [pytest.param(one, marks=() if one in SAMPLED else pytest.mark.whole) for one in WRONG]
)
def test_a_kernel_that_is_wrong_in_one_circumstance_fails_with_default_arguments(circumstance):
    texts, sanitizers = WRONG[circumstance]
    mutations = tuple(Mutation(KERNEL.name, old, new) for old, new in texts)

    report = simulator.run(load(), mutations=mutations)

    assert {failure.case.sanitizer for failure in report.failures} >= set(sanitizers), str(report)


@pytest.fixture
def drawn(monkeypatch):
    """The simulations and the calls of each case and seed that a run has, in place of what it would find."""
    made = []

    def keep(simulation, calls):
        made.append((simulation, calls))
        return []

    monkeypatch.setattr(check, "build", lambda *arguments: KERNEL)
    monkeypatch.setattr(check, "_mistakes", keep)
    return made


def calls_of(drawn):
    return [call for _, one in drawn for call in one.calls]


@pytest.mark.parametrize("algorithm", simulator.ALGORITHMS)
def test_thirty_seeds_draw_other_orders_sizes_grids_parts_starts_and_data(drawn, algorithm):
    row, ranks, itemsize = Algorithm(algorithm).row, 3, 2
    simulator.run(algorithm, ranks=[ranks], dtypes=[torch.bfloat16], sanitizers=["plain"], seeds=30)

    calls = calls_of(drawn)
    parts = [call.counts for call in calls if len(call.counts) > 1]
    assert [simulation.seed for simulation, _ in drawn] == list(range(30))
    assert {simulation.epoch for simulation, _ in drawn} >= {0, (1 << 32) - 4}
    assert all(len(one.calls) >= 6 for _, one in drawn)  # more than two calls behind a counter's largest value
    assert len({tuple(max(call.counts) for call in one.calls) for _, one in drawn}) > 20
    assert {call.offset for call in calls} == {0, 16, itemsize}
    assert {call.kernel for call in calls} == set(range(len(simulator.calls.find(algorithm).variants)))
    assert {call.shape.blocks for call in calls} >= ({1} if (row.only_threads or 0) >= 256 else {1, 2, 3})
    assert row.only_threads or len({call.shape.threads for call in calls}) == 2
    assert not row.chunked or len({call.shape.chunk for call in calls}) > 1
    assert {call.in_place for call in calls} == ({False} if row.op in ("reducescatter", "alltoall") else {False, True})
    assert row.op == "allreduce" or {0, 1} < {len(set(counts)) - 1 for counts in parts}  # equal ones, others
    for rank in range(ranks if parts else 0):
        assert any(counts[rank] == 0 for counts in parts)
        assert any(counts[rank] > max(counts[:rank] + counts[rank + 1 :]) for counts in parts)
    bits = [x.view(torch.uint8) for call in calls for x in call.inputs if x.nbytes > 1000]
    ones = [float((x[: len(x) // 4 * 4].view(torch.int32) == -1).float().mean()) for x in bits]
    distinct = [len(x.unique()) for x in bits]
    assert max(ones) > 0.01  # words of all ones
    assert min(distinct) == 2
    assert max(distinct) == 256  # any bits
    assert any(2 < one < 100 for one in distinct)  # small numbers


def test_a_reduce_scatter_with_a_specification_of_its_own_has_the_parts_of_tensor_split(drawn):
    mine = graphar.load_algorithm(
        PAGES / "algorithms" / "direct_reducescatter.cu",
        op="reducescatter",
        scratch=lambda ranks: graphar.Scratch.of_slots(2 * ranks, SLOT_NBYTES, fill=0xFF),
        max_nbytes=SLOT_NBYTES,
        specification=lambda tensors: list(sum(tensors).tensor_split(len(tensors))),
    )
    simulator.run(mine, ranks=[3], dtypes=[torch.float32], sanitizers=["plain"], seeds=10)
    counts = [call.counts for call in calls_of(drawn)]
    assert all(one == tuple(map(len, torch.empty(sum(one)).tensor_split(3))) for one in counts)
    assert {len(set(one)) for one in counts} == {1, 2}


def test_a_run_has_all_sanitizers_dtypes_ranks_and_seeds_by_default(drawn):
    simulator.run("one_shot_push")

    assert len(drawn) == 3 * len(SANITIZERS) * 2 * 7
    assert {simulation.world_size for simulation, _ in drawn} == set(range(2, 9))
    assert {max(call.counts) for call in calls_of(drawn)} == set(NUMELS) == {1, 7, 8, 9, 1000, 4096}
    assert {call.inputs[0].dtype for call in calls_of(drawn)} == {torch.bfloat16, torch.float32}


@pytest.mark.host
def test_another_seed_is_another_schedule_and_the_same_seed_the_same(monkeypatch):
    """The same calls end at other steps of the scheduler. The run that a failure names repeats it."""
    ended, run = [], Simulation.run

    def keep(simulation, calls):
        outcomes = run(simulation, calls)
        ended.append([outcome.ended_at for outcome in outcomes])
        return outcomes

    monkeypatch.setattr(Simulation, "run", keep)
    asked = {"ranks": [3], "dtypes": [torch.bfloat16], "sanitizers": ["plain"], "numel": (9,)}
    simulator.run("one_shot_push", **asked, seeds=[*range(12), 5])

    assert len({str(one) for one in ended[:12]}) == 12
    assert ended[12] == ended[5]
