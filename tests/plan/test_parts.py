"""Reduce-scatter's and all-gather's kernels: their grids, their scratch, and the slices of a call."""

import contextlib
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from graphar.plan import scratch
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.policy import Chip
from graphar.plan.scratch import PACK_NBYTES, WORLD_SIZES
from graphar.plan.slices import Slice, row_slices, slices
from graphar.plan.tables import by_entries, shipped_table
from graphar.plan.work import Parts
from graphar.ranks.agreement import Fingerprints
from graphar.ranks.rendezvous import Alone
from graphar.runtime.bind import collective, launches
from graphar.runtime.runner import Runner

H200 = shipped_table("nvidia_h200")
REDUCESCATTER, ALLGATHER = Algorithm.REDUCESCATTER_PUSH, Algorithm.ALLGATHER_PUSH
FLAGGED = Algorithm.ALLGATHER_FLAGGED
every_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


@every_world_size
def test_a_reducescatter_with_a_norm_has_room_for_the_longest_row_and_splits_none(world_size):
    algorithm = Algorithm.REDUCESCATTER_RMSNORM
    capacity = algorithm.row.scratch(world_size).capacity
    longest = scratch.NORM_ROW_PACKS * PACK_NBYTES // 2

    assert capacity >= scratch.NORM_ROW_PACKS
    assert algorithm.row.scratch(world_size).nbytes == 2 * world_size * capacity * PACK_NBYTES
    for columns in (8, 24, 8200, longest):
        rows = [3 * capacity * 8 // columns + 1, *[3 * capacity * 8 // columns] * (world_size - 1)]
        counts = [one * columns for one in rows]
        made = slices(algorithm, world_size, counts, 2, columns)
        assert all(count % columns == 0 for one in made for count in (*one.count, one.offset))
        assert max(max(one.count) for one in made) <= capacity * 8
        assert [sum(of_rank) for of_rank in zip(*(one.count for one in made), strict=True)] == counts
        assert len(made) == -(-rows[0] // (capacity * 8 // columns))


def test_steps_of_allgather_push_may_wrap():
    assert (1 << 32) % scratch.PUSH_DEPTH == 0


STEP = REDUCESCATTER.row.scratch(4).capacity * PACK_NBYTES // 2  # bf16 elements of a part in one launch


@pytest.mark.parametrize("algorithm", [one for one in Algorithm if one.op == "allreduce"])
def test_an_allreduce_is_one_launch(algorithm):
    assert slices(algorithm, 4, (12345,), 2) == [Slice(12345)]


@pytest.mark.parametrize("counts", [(3, 3, 2, 2), (0, 7, 0, 1), (STEP, 1, 0, STEP), (0, 0, 0, 1)])
def test_what_fits_the_slots_is_one_launch(counts):
    (only,) = slices(REDUCESCATTER, 4, counts, 2)

    assert only.count == counts
    assert only.offset == 0
    assert only.begin == tuple(sum(counts[:rank]) for rank in range(4))
    assert only.numel == sum(counts)


@pytest.mark.parametrize(
    "counts", [(STEP + 1, STEP, 5, 0), (3 * STEP, 3 * STEP, 3 * STEP - 1, 3 * STEP - 1), (0, 0, 5 * STEP + 7, 1)]
)
def test_the_slices_of_a_large_call_make_up_every_part_once(counts):
    launches = slices(REDUCESCATTER, 4, counts, 2)

    assert len(launches) == -(-max(counts) // STEP) > 1
    assert [one.offset for one in launches] == [STEP * i for i in range(len(launches))]
    assert {one.begin for one in launches} == {tuple(sum(counts[:rank]) for rank in range(4))}
    for rank, count in enumerate(counts):
        filled = [one.count[rank] for one in launches]
        assert sum(filled) == count
        assert all(before == STEP or after == 0 for before, after in pairwise(filled))
        assert max(filled) <= STEP


def test_an_allgather_counts_in_bytes_and_is_one_launch():
    (only,) = slices(ALLGATHER, 3, (5, 0, 1 << 33), 8)

    assert only.count == (40, 0, 1 << 36)
    assert only.begin == (0, 40, 40)


def test_a_reduce_scatter_with_a_codec_is_one_launch_whatever_its_parts():
    found = slices(Algorithm.QUANTIZED_REDUCESCATTER, 3, (5, 0, 1 << 30), 2)

    assert found == [Slice(5 + (1 << 30), (0, 5, 5), (5, 0, 1 << 30))]


def test_rows_of_every_rank_are_launched_a_step_at_a_time():
    assert row_slices((5, 3, 0), 2) == [
        Slice(0, (0, 5, 8), (2, 2, 0)),
        Slice(0, (2, 7, 10), (2, 1, 0), 2),
        Slice(0, (4, 9, 12), (1, 0, 0), 4),
    ]


def rank_one_of_four(monkeypatch, algorithm, note, rendezvous):
    """Stands in for an engine whose launches are bound by ``note``. It has rank 1 of 4."""
    monkeypatch.setattr(collective.launcher, "can_overlap", lambda device: True)
    monkeypatch.setattr(collective, "KernelLaunch", lambda function, parameters, grid: None)
    monkeypatch.setattr(collective, "bind_launch", note)
    runner = Runner.__new__(Runner)
    runner.chip = Chip(132, "sm_90a")
    runner.world_size, runner.members = 4, [SimpleNamespace(rank=1, device=0, abort=0, record_pointer=0)]
    runner.lock, runner.raise_failure, runner.symmetric = contextlib.nullcontext(), lambda: None, None
    runner._fingerprints = Fingerprints(rendezvous)
    runner.prepare = lambda kernel: [None]
    runner.regions = {algorithm: SimpleNamespace(pointers=[0x1000] * 4, multicast_pointer=0)}
    return SimpleNamespace(
        runner=runner, world_size=4, table=H200, deadline=lambda call: 1.0, why_no_kernel=lambda *_: ""
    )


@pytest.fixture
def bound(monkeypatch):
    """Binds a call. Returns the arguments of each launch, a list of launches, and the bound call."""
    monkeypatch.setattr(launches, "on_own_device", lambda device, launch: launch)

    def bind(algorithm, counts):
        made, launched = [], []

        def note(runner, member, launch, arguments, put=None):
            made.append(arguments)
            return lambda inputs, outputs, *_: launched.append((inputs[0].numel(), outputs[0].numel()))

        engine = rank_one_of_four(monkeypatch, algorithm, note, Alone())
        call = Call(Parts(algorithm.op, counts), torch.bfloat16, 0)
        plan = collective.bind_kernel(engine, call, by_entries(H200.parts[algorithm.op], 1, max(counts) * 2))
        return made, launched, plan.run

    return bind


def test_a_launch_is_given_where_parts_begin_and_how_much_of_them_it_handles(bound):
    made, _, _ = bound(FLAGGED, (5, 0, 7, 1))

    (arguments,) = made
    assert list(arguments.begin) == [0, 10, 10, 24, 0, 0, 0, 0]
    assert list(arguments.count) == [10, 0, 14, 2, 0, 0, 0, 0]
    assert (arguments.rank, arguments.algorithm) == (1, FLAGGED.number)


def test_each_slice_is_a_launch_of_what_is_left_of_the_tensors(bound):
    counts = (2 * STEP + 3, STEP + 5, 0, 2)
    made, launched, run = bound(REDUCESCATTER, counts)

    x, out = (torch.empty(numel, dtype=torch.bfloat16) for numel in (sum(counts), counts[1]))
    run([Operands((x,), (out,))])

    assert [list(arguments.count)[:4] for arguments in made] == [[STEP, STEP, 0, 2], [STEP, 5, 0, 0], [3, 0, 0, 0]]
    assert {tuple(arguments.begin)[:4] for arguments in made} == {(0, 2 * STEP + 3, 3 * STEP + 8, 3 * STEP + 8)}
    assert launched == [(sum(counts) - STEP * i, max(0, counts[1] - STEP * i)) for i in range(3)]
