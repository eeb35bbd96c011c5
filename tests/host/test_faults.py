"""A rank that never calls, on the host: every kernel ends within its deadline and names that rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphar.plan.algorithms import Algorithm
from graphar.simulator.calls import first_epoch
from graphar.simulator.simulation import Call
from tests.host.build import build
from tests.host.cases import ALGORITHMS, WAYS, WORLD_SIZES, Kernels, differences, dtypes_of, simulate
from tests.host.every_kernel import EVERY_KERNEL, draw, run

pytestmark = pytest.mark.host

TIMED_OUT, OVERLAPPED = 1, 2  # `timed_out` and `overlapped` in cuda_src/device/sync/record.cuh
DEADLINE_NS = 400_000_000  # many times as long as 1024 spins, after which a thread reads the clock
DEADLINE_OF_WARPS_NS = 8 * DEADLINE_NS  # the spins of a warp take longer, since its lanes meet in each


def deadline_of(algorithm: Algorithm) -> int:
    if algorithm not in ALGORITHMS:
        return 3 * DEADLINE_NS
    return DEADLINE_OF_WARPS_NS if WAYS[algorithm].codecs else DEADLINE_NS


@pytest.mark.promise("Kernels run on the CPU, on models of the PTX they use, and mistakes in ordering are noticed.")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_absent_rank_is_named_and_nothing_is_written_beside_the_tensors(algorithm, world_size):
    dtype = dtypes_of(algorithm)[0]
    kernels = Kernels(algorithm, WORLD_SIZES, dtypes_of(algorithm))
    program = build(kernels.sources(), "plain")
    for absent in range(world_size):
        first, *others = draw(algorithm, world_size, absent, 6 if WAYS[algorithm].codecs else 2).calls
        largest = max(others, key=lambda call: sum(call.counts))  # a rank without a part could name a waiting rank
        late = replace(largest, absent=(absent,), timeout_ns=deadline_of(algorithm))

        outcomes = simulate(program, kernels, world_size, dtype, absent, [first, late])

        named = {outcome.record.peer for outcome in outcomes if outcome.record.kind == TIMED_OUT}
        told = [outcome.record.kind for rank, outcome in enumerate(outcomes) if rank != absent]
        assert named == {absent}
        assert set(told) == {TIMED_OUT}
        assert outcomes[absent].record.kind == 0
        assert not any(outcome.broken_guards for outcome in outcomes)


@pytest.mark.parametrize(("share_of_deadline", "kind"), [(0.7, 0), (1.6, TIMED_OUT)])
@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT_PUSH, Algorithm.TWO_SHOT_PIPELINED])
def test_a_late_rank_is_waited_for_as_long_as_the_deadline_says(algorithm, share_of_deadline, kind):
    drawn = draw(algorithm, 2, 0, 1)
    late = replace(drawn.calls[0], timeout_ns=DEADLINE_NS, late_ns=int(share_of_deadline * DEADLINE_NS))

    outcomes = run(algorithm, 2, 0, [late])

    assert outcomes[0].record.kind == kind
    assert kind or differences(drawn, outcomes) == []


LATE, SEED = 1, 1
every_kernel = pytest.mark.parametrize("algorithm", EVERY_KERNEL)


def draw_sizes(algorithm, world_size: int) -> tuple[Call, Call, Call]:
    """Three calls in which every rank has a part: with the fewest blocks, with the most blocks, and the largest."""

    def blocks(call):
        return sum(call.blocks) or call.shape.blocks

    def numel(call):
        return sum(call.counts)

    drawn = draw(algorithm, world_size, SEED, 12).calls
    calls = [call for call in drawn if all(call.counts) and numel(call) >= world_size * call.columns]
    few = max(calls, key=lambda call: (-blocks(call), numel(call)))
    return few, max(calls, key=lambda call: (blocks(call), numel(call))), max(calls, key=numel)


@every_kernel
def test_after_a_failure_nothing_is_sent_not_even_once_the_late_rank_has_come(algorithm, few_slots):
    few, many, _ = draw_sizes(algorithm, 3)
    some = [replace(call, timeout_ns=deadline_of(algorithm)) for call in (many, few, many, many, many)]
    calls = [replace(call, absent=(LATE,)) if number in (1, 2) else call for number, call in enumerate(some)]

    outcomes = run(algorithm, 3, SEED, calls)

    records = [(one.record.kind, one.record.sequence - first_epoch(SEED), one.record.peer) for one in outcomes]
    kind, sequence, peer = records.pop(LATE)
    assert set(records) == {(TIMED_OUT, 1, LATE)}
    assert kind == TIMED_OUT
    assert sequence in (1, 2)  # its second call; its third if what was sent before the failure sufficed
    assert peer != LATE
    for outcome in outcomes:
        after_failure, after_next_call = outcome.scratch_hashes
        assert after_failure == after_next_call
        assert bytes(outcome.seen) == bytes(outcome.record)
        assert outcome.broken_guards == 0


@every_kernel
def test_after_a_failure_of_another_algorithm_one_call_ends_and_no_later_one_sends(algorithm, few_slots):
    few, many, _ = draw_sizes(algorithm, 2)

    outcomes = run(algorithm, 2, SEED, [replace(call, absent=(LATE,)) for call in (few, many)], aborted=True)

    for outcome in outcomes:
        after_failure, after_next_call = outcome.scratch_hashes
        assert after_failure == after_next_call
        assert outcome.record.kind == 0  # the other algorithm has reported


@every_kernel
def test_a_graph_that_is_replayed_while_suspended_sends_nothing_and_is_reported(algorithm, few_slots):
    few, _, largest = draw_sizes(algorithm, 2)

    outcomes = run(algorithm, 2, SEED, [few, largest, few], suspended=True)

    for outcome in outcomes:
        assert outcome.record.kind == OVERLAPPED
        assert (outcome.broken_guards, outcome.sent_nbytes) == (0, 0)  # nor anything written into its own scratch


@every_kernel
def test_a_call_that_begins_while_another_runs_is_reported(algorithm, few_slots):
    _, _, largest = draw_sizes(algorithm, 2)

    outcomes = run(algorithm, 2, SEED, [largest], busy=True)

    assert [(outcome.record.kind, outcome.record.rank) for outcome in outcomes] == [(OVERLAPPED, 0), (OVERLAPPED, 1)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_calls_on_two_streams_of_a_rank_are_reported(algorithm):
    _, _, largest = draw_sizes(algorithm, 2)

    outcomes = run(algorithm, 2, SEED, [replace(largest, absent=(LATE,), twice=(1 - LATE,))])

    assert outcomes[1 - LATE].record.kind == OVERLAPPED


@pytest.mark.parametrize("seed", range(4))
def test_a_record_is_complete_as_soon_as_it_has_a_kind(seed):
    _, _, largest = draw_sizes(Algorithm.ONE_SHOT_PUSH, 2)

    outcomes = run(
        Algorithm.ONE_SHOT_PUSH, 2, seed, [replace(largest, absent=(LATE,), timeout_ns=DEADLINE_NS)], "thread"
    )

    assert bytes(outcomes[1 - LATE].seen) == bytes(outcomes[1 - LATE].record)
