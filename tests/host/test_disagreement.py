"""Ranks that call different things with one kernel, on the host: every rank is told.

Where flags announce the data, in the same call and before any data is read; else at most ten calls later.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.work import Exchange
from graphar.runtime.arguments import Arguments, ExchangeArguments
from graphar.simulator.build import Mutation
from graphar.simulator.calls import arguments_of, first_epoch
from graphar.simulator.simulation import ENOUGH_NS, Call, has_pad
from tests.host import build
from tests.host.build import known
from tests.host.cases import WORLD_SIZES, Kernels, dtypes_of, simulate
from tests.host.every_kernel import EVERY_KERNEL, run
from tests.host.every_kernel import draw as draw_every
from tests.host.mutant import notices
from tests.host.products import GATHER, of_ranks
from tests.host.test_faults import DEADLINE_OF_WARPS_NS, SEED, TIMED_OUT

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("few_slots")]

BESIDE_DATA = (Algorithm.ALLGATHER_FLAGGED, Algorithm.ALLTOALL_FLAGGED)
FLAGGED = [algorithm for algorithm in EVERY_KERNEL if has_pad(algorithm) or algorithm in BESIDE_DATA]
WRAPPING = 2  # a seed whose epochs wrap
DISAGREED = 3  # `disagreed` in cuda_src/device/sync/record.cuh
ONE, OTHER = 7, 8  # fingerprints
KEPT_CALLS = 16  # `kept_calls` in cuda_src/device/arguments.cuh


def seeds_of(world_size):
    return (0, 1, WRAPPING) if build.WHOLE and world_size > 2 else (WRAPPING,)


def fingerprints(world_size):
    """The last rank's differs."""
    return (*[ONE] * (world_size - 1), OTHER)


def draw_calls(algorithm, world_size, count=11):
    """Calls of every size whose blocks have a thread for each rank, as all blocks on GPUs do, in turn."""
    return [call for call, _ in draw_with_results(algorithm, world_size, count)]


def draw_with_results(algorithm, world_size, count):
    """The same calls, each with what the ranks must get."""
    drawn = draw_every(algorithm, world_size, SEED, 12)
    pairs = zip(drawn.calls, drawn.expected, strict=True)
    return list(itertools.islice(itertools.cycle(one for one in pairs if one[0].shape.threads >= world_size), count))


def expect_all_told(records, sequence):
    *same, odd = records
    last = len(same)
    assert [(one.kind, one.sequence, one.peer, one.expected, one.seen) for one in same] == [
        (DISAGREED, sequence, last, ONE, OTHER)
    ] * last
    assert (odd.kind, odd.sequence, odd.expected, odd.seen) == (DISAGREED, sequence, OTHER, ONE)
    assert odd.peer != last


@pytest.mark.promise("Ranks whose calls differ all get an error that says what each called.")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", EVERY_KERNEL)
def test_every_rank_is_told_at_most_ten_calls_later(algorithm, world_size):
    for seed in seeds_of(world_size):
        first, *later = draw_calls(algorithm, world_size)
        calls = [replace(first, fingerprints=fingerprints(world_size)), *later]

        outcomes = run(algorithm, world_size, seed, calls)

        expect_all_told([outcome.record for outcome in outcomes], first_epoch(seed))


@pytest.mark.parametrize("seed", [0, 2])  # of which the epochs begin at 0, and four before they wrap
@pytest.mark.parametrize("before", range(8))
@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT_PUSH, Algorithm.REDUCESCATTER_PUSH])
def test_every_rank_is_told_at_most_ten_calls_later_wherever_among_eight_the_call_is(algorithm, before, seed):
    """Ranks compare at every eighth call, and not yet the call before it: of call 7 they hear in call 16."""
    together = next(later for later in range(2, 11) if (first_epoch(seed) + before + later) % 8 == 0)
    drawn, sequence = draw_with_results(algorithm, 3, before + together + 1), first_epoch(seed) + before
    calls = [call for call, _ in drawn]
    calls[before] = replace(calls[before], fingerprints=fingerprints(3))

    outcomes = run(algorithm, 3, seed, calls)

    expect_all_told([outcome.record for outcome in outcomes], sequence % (1 << 32))
    for rank, outcome in enumerate(outcomes):
        for result, (_, expected) in list(zip(outcome.results, drawn, strict=True))[:before]:
            assert torch.equal(result, expected[rank].contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("algorithm", EVERY_KERNEL)
def test_calls_that_are_alike_are_never_told_apart(algorithm):
    calls = [replace(call, fingerprints=(at,) * 3) for at, call in enumerate(draw_calls(algorithm, 3))]

    assert [outcome.record.kind for outcome in run(algorithm, 3, 0, calls)] == [0, 0, 0]


@pytest.mark.promise("Ranks whose calls differ all get an error that says what each called.")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", FLAGGED)
def test_every_rank_is_told_in_the_same_call_and_gets_no_data_where_flags_announce_them(algorithm, world_size):
    for seed in seeds_of(world_size):
        (first, _), *others = draw_with_results(algorithm, world_size, 12)
        second, expected = max(others, key=lambda one: sum(one[0].counts))
        unlike = replace(second, fingerprints=fingerprints(world_size))

        outcomes = run(algorithm, world_size, seed, [first, unlike])

        expect_all_told([outcome.record for outcome in outcomes], (first_epoch(seed) + 1) % (1 << 32))
        for outcome, result in zip(outcomes, expected, strict=True):
            assert not torch.equal(outcome.results[1], result.contiguous().view(-1).view(torch.uint8))


def draw_stopped(algorithm, timeout_ns):
    """Five calls of two ranks. The first ones are unlike, and in the last one rank 0 calls no more."""
    first, *between, last = draw_calls(algorithm, 2, 5)
    unlike, alone = replace(first, fingerprints=fingerprints(2)), replace(last, timeout_ns=timeout_ns, absent=(0,))
    return [unlike, *between, alone]


@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT_PUSH, Algorithm.REDUCESCATTER_PUSH])
def test_a_rank_that_waits_for_one_that_has_found_a_difference_is_told_long_before_the_deadline(algorithm):
    *_, odd = (outcome.record for outcome in run(algorithm, 2, 0, draw_stopped(algorithm, 1000 * ENOUGH_NS)))

    assert (odd.kind, odd.sequence, odd.peer, odd.expected, odd.seen) == (DISAGREED, 0, 0, OTHER, ONE)


@pytest.mark.parametrize("algorithm", [one for one in EVERY_KERNEL if one not in FLAGGED])
def test_a_rank_that_has_found_a_difference_tells_of_no_later_call(algorithm):
    """Its later calls would replace what it told of the one that differs, before a late rank looks."""
    first, *later = draw_calls(algorithm, 2, KEPT_CALLS + 2)
    late = replace(later[0], late_ns=DEADLINE_OF_WARPS_NS)

    records = [one.record for one in run(algorithm, 2, 0, [replace(first, fingerprints=fingerprints(2)), late, *later])]

    expect_all_told(records, 0)


def test_a_rank_that_does_not_come_is_not_said_to_call_anything():
    first, second = draw_calls(Algorithm.ONE_SHOT, 2, 2)
    late = replace(second, fingerprints=fingerprints(2), timeout_ns=DEADLINE_OF_WARPS_NS, absent=(0,))

    *_, odd = (outcome.record for outcome in run(Algorithm.ONE_SHOT, 2, 0, [first, late]))

    assert (odd.kind, odd.sequence, odd.peer) == (TIMED_OUT, 1, 0)


AGREEMENT, PAD = "device/sync/record.cuh", "device/sync/signal_pad.cuh"
TELL = "->called[a.rank][epoch % kept_calls]"
LOOK = "if (found_difference("
BLIND = Mutation("device/sync/deadline.cuh", LOOK, "if (false && found_difference(")  # while they wait


# What a rank tells, and how others compare it, where they do not look while they wait.
IN_TELLING = {
    "one entry for all calls": (TELL, TELL.replace("epoch % kept_calls", "0")),
    "a rank tells under another's number": (TELL, TELL.replace("a.rank", "threadIdx.x")),
    "a rank compares itself": ("called[peer][i % kept_calls]", "called[a.rank][i % kept_calls]"),
    "different calls are compared": ("called[peer][i % kept_calls]", "called[peer][(i + 1) % kept_calls]"),
    "nothing is compared": ("    if (disagree(own, told) && ", "    if (false && "),
    "nothing is told": ("if (there != nullptr)", "if (false)"),
}
IN_TELLING = {name: (BLIND, Mutation(AGREEMENT, *texts)) for name, texts in IN_TELLING.items()}
# Calls that differ, and are not compared at once: in flags of a pad, and beside the data.
LATER = {
    Algorithm.ONE_SHOT: (PAD, "u32(seen) == a.fingerprint) return true;", "true) return true;"),
    Algorithm.ALLGATHER_FLAGGED: (
        "device/sync/flagged.cuh",
        "|= flag ^ a.fingerprint;",
        "|= flag == 0 ? a.fingerprint : 0;",
    ),
}
# Calls that are alike, and are told apart.
APART = {
    "flags of the next call are compared": ("!of_this_call || ", "(false && of_this_call) || "),
    "flags of the last call are compared": ("base_ + steps, OfWarp || steps > 0);", "base_ + steps, true);"),
    "flags have no parity": ("u64(2 * step + call.epoch % 2)", "u64(2 * step + 0 * call.epoch)"),
}
IN_FLAGS = [Mutation(*one) for one in LATER.values()] + [Mutation(PAD, *one) for one in APART.values()]
known([BLIND, *IN_TELLING.values(), *IN_FLAGS])


@pytest.mark.parametrize("mistake", IN_TELLING)
def test_a_mistake_in_telling_is_noticed(mistake):
    first, *later = draw_calls(Algorithm.ONE_SHOT_PUSH, 3)
    calls = [replace(first, fingerprints=fingerprints(3)), *later]

    assert kinds_of(Algorithm.ONE_SHOT_PUSH, calls, BLIND) == {DISAGREED}
    assert kinds_of(Algorithm.ONE_SHOT_PUSH, calls, *IN_TELLING[mistake]) != {DISAGREED}


def kinds_of(algorithm, calls, *mutations):
    """The kinds of the records that ranks write with mistakes in the kernel."""
    return {one.kind for one in records_of(algorithm, calls, *mutations)}


def records_of(algorithm, calls, *mutations):
    kernels, world_size = Kernels(algorithm, WORLD_SIZES, dtypes_of(algorithm)), len(calls[0].inputs)
    program = build.build(kernels.sources(), "plain", *mutations)
    return [one.record for one in simulate(program, kernels, world_size, kernels.dtypes[0], 0, calls)]


@pytest.mark.parametrize("algorithm", LATER)
def test_a_call_that_is_not_compared_at_once_is_noticed(algorithm):
    unlike = replace(draw_calls(algorithm, 3)[0], fingerprints=fingerprints(3), timeout_ns=DEADLINE_OF_WARPS_NS)

    assert kinds_of(algorithm, [unlike]) == {DISAGREED}
    assert kinds_of(algorithm, [unlike], Mutation(*LATER[algorithm])) != {DISAGREED}


@pytest.mark.parametrize("mistake", APART)
def test_calls_that_are_alike_and_told_apart_by_a_mistake_are_noticed(mistake):
    found = set()
    for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT_PIPELINED):
        drawn = draw_calls(algorithm, 2)
        small = min(drawn, key=lambda call: (sum(call.blocks) or call.shape.blocks, sum(call.counts)))
        calls = [replace(small, fingerprints=(at,) * 2) for at in range(1, 100)]

        assert kinds_of(algorithm, calls) == {0}
        found |= kinds_of(algorithm, calls, Mutation(PAD, *APART[mistake]))

    assert DISAGREED in found


@pytest.mark.parametrize("absent", range(3))
@pytest.mark.parametrize("algorithm", [Algorithm.ALLGATHER_FLAGGED, Algorithm.ONE_SHOT])
def test_flags_tell_of_another_call_although_those_of_a_third_rank_are_missing(algorithm, absent):
    here = [rank for rank in range(3) if rank != absent]
    unlike = tuple(OTHER if rank == here[-1] else ONE for rank in range(3))
    call = replace(draw_calls(algorithm, 3)[0], timeout_ns=DEADLINE_OF_WARPS_NS, absent=(absent,))

    records = records_of(algorithm, [replace(call, fingerprints=unlike)], BLIND)

    assert [(records[rank].kind, records[rank].peer) for rank in here] == [(DISAGREED, peer) for peer in here[::-1]]


def test_ranks_that_wait_without_a_look_at_what_others_call_are_noticed():
    calls = draw_stopped(Algorithm.ONE_SHOT_PUSH, DEADLINE_OF_WARPS_NS)

    assert TIMED_OUT in kinds_of(Algorithm.ONE_SHOT_PUSH, calls, BLIND)


def test_lanes_that_each_read_whether_their_call_is_aborted_are_noticed():
    """Another block gives up while the lanes of a warp read: some then vote that others never come to."""
    (first, _), *others = draw_with_results(GATHER, 2, 12)
    largest = sorted((call for call, _ in others), key=lambda call: -sum(call.blocks))[:4]
    unlike = [replace(call, blocks=(2 * call.cluster,) * 2, fingerprints=fingerprints(2)) for call in largest]
    apart = Mutation("device/sync/call.cuh", "  call.aborted = __shfl_sync(0xffffffff, call.aborted, 0);\n", "")

    def run_unlike(seed, call):
        of_ranks(GATHER, 2).run([first, call], seed, apart)

    assert any(notices(partial(run_unlike, *one)) for one in itertools.product(range(12), unlike))


def test_a_block_ends_whose_first_warp_alone_reads_that_the_call_is_aborted():
    """Another block gives up once the other warps have read, which wait for what the first one sets up."""
    largest = max(draw_calls(Algorithm.TWO_SHOT_TMA, 2), key=lambda call: sum(call.counts))
    unlike = replace(largest, shape=replace(largest.shape, blocks=2), fingerprints=fingerprints(2))
    read = "DEVICE void read_epoch(const Arguments& a, Call& call) {\n"
    late = (
        "  while (blockIdx.x && threadIdx.x < 32 && !load_relaxed_gpu(&a.counters->epoch_state[1].aborted)) continue;\n"
    )
    is_late = Mutation("device/sync/call.cuh", read, read + late)

    assert kinds_of(Algorithm.TWO_SHOT_TMA, [unlike], is_late) == {DISAGREED}


def unlike_parts(world_size, sender, receiver, unlike_at):
    """A call in which one of two ranks takes a part between them for another one."""
    row, lengths = (1, 16), tuple(range(world_size))
    works = [Exchange(rank, row, (lengths,), ((rank,) * world_size,), known=False) for rank in range(world_size)]
    of_ranks = [bytearray(arguments_of(work)) for work in works]
    odd = ExchangeArguments.from_buffer_copy(bytes(ctypes.sizeof(Arguments)) + bytes(of_ranks[unlike_at]))
    (odd.sent_words if unlike_at == sender else odd.received_words)[receiver if unlike_at == sender else sender] += 1
    of_ranks[unlike_at] = bytes(odd)[ctypes.sizeof(Arguments) :]
    operand = torch.frombuffer(bytearray(b"".join(of_ranks)), dtype=torch.uint8)
    inputs = [torch.arange(16 * sum(lengths), dtype=torch.uint8) for _ in range(world_size)]
    nbytes = tuple(16 * rank * world_size for rank in range(world_size))
    shape = Config(Algorithm.ALLTOALL_PUSH, 2, 2 * world_size, 3)
    return Call(0, shape, inputs, nbytes, nbytes, operands=(operand,), timeout_ns=DEADLINE_OF_WARPS_NS)


@pytest.mark.parametrize(("sender", "receiver"), [(0, 1), (2, 1), (1, 2)])
def test_both_ranks_are_told_of_a_part_that_they_disagree_on(sender, receiver):
    for unlike_at in (sender, receiver):
        call = unlike_parts(3, sender, receiver, unlike_at)

        outcomes = run(Algorithm.ALLTOALL_PUSH, 3, SEED, [call])

        told = [outcomes[rank].record for rank in (sender, receiver)]
        assert [(one.kind, one.peer) for one in told] == [(DISAGREED, receiver), (DISAGREED, sender)]
        assert (told[0].expected, told[0].seen) == (told[1].seen, told[1].expected)
