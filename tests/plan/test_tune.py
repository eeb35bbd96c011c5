"""Tuning: candidates, and the table made of measurements."""

from dataclasses import replace

import pytest

from graphar.plan import tune
from graphar.plan.algorithms import ROWS, Algorithm, in_tables
from graphar.plan.config import Config
from graphar.plan.policy import Chip
from graphar.plan.scratch import TMA_THREADS, WORLD_SIZES
from graphar.plan.sizes import KB, MB
from graphar.plan.tables import Table, by_entries, config_of, entry_of, fitted, shipped_table

DEVICE = "NVIDIA B999"
CHIP = Chip(132, "sm_90a")
SMALL = Config(Algorithm.ONE_SHOT_PUSH, 132, 128)
WIDE = Config(Algorithm.ONE_SHOT_PUSH, 132, 512)
TWO_SHOT = Config(Algorithm.TWO_SHOT_PUSH, 131, 512)
LARGE = Config(Algorithm.TWO_SHOT_PIPELINED, 132, 512, 2048)
OLDER = shipped_table("default").rows[2]
NEW = replace(shipped_table("default"), name="nvidia_b999", machine="2x NVIDIA B999", date="2026-01-01")


def limits_and_threads(entries):
    return [(one["max_nbytes"], one["algorithm"], one["threads"]) for one in entries]


def test_candidates_are_possible_between_each_of_the_numbers_of_ranks_and_have_the_grids_of_the_first(monkeypatch):
    asked, limits = [], {2: 8 * MB, 3: MB, 4: None, 5: None}
    row = replace(
        Algorithm.ONE_SHOT_PUSH.row,
        limit=limits.__getitem__,
        world_sizes=(2, 3, 4),
        candidates=lambda *given: asked.append(given) or [(128, 0)],
    )
    monkeypatch.setitem(ROWS, Algorithm.ONE_SHOT_PUSH, row)

    def is_tried(*world_sizes, nbytes=2 * MB):
        found = tune.candidates("allreduce", world_sizes, nbytes, CHIP)
        return Algorithm.ONE_SHOT_PUSH in {one.algorithm for one in found}

    assert [is_tried(*ranks) for ranks in ((2,), (4, 2), (2, 3), (3,), (4, 5))] == [True] * 2 + [False] * 3
    assert [is_tried(2, 3, nbytes=MB), is_tried(3, nbytes=MB + 1)] == [True, False]
    assert asked == [(2, 2 * MB), (4, 2 * MB), (2, MB)]


def candidates(world_size, nbytes):
    return tune.candidates("allreduce", [world_size], nbytes, CHIP)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_candidate_can_run_and_serves_its_size(world_size):
    for nbytes in tune.SIZES:
        found = candidates(world_size, nbytes)
        assert len(set(found)) == len(found) > 0
        for one in found:
            config = fitted(one, world_size, nbytes)
            largest = one.algorithm.row.limit(world_size)
            assert config_of(entry_of(one, None)) == one
            assert (config.threads, config.chunk) == (one.threads, one.chunk)
            assert 1 <= config.blocks <= one.blocks <= one.algorithm.row.max_blocks
            assert one.threads <= one.algorithm.row.max_threads
            assert one.chunk <= one.algorithm.row.scratch(world_size).capacity
            assert largest is None or nbytes <= largest


@pytest.mark.parametrize(("world_size", "threads"), [(3, {96, 192, 288, 384}), (4, {128, 256, 384, 512})])
def test_a_megabyte_takes_no_grid_that_leaves_a_few_packs_for_another_round(world_size, threads):
    tried = {one.threads for one in candidates(world_size, MB) if one.algorithm is Algorithm.TWO_SHOT_PUSH}
    assert tried == threads
    for name in ("default", "nvidia_h200"):
        taken = by_entries(shipped_table(name).rows[world_size], world_size, MB)
        assert (taken.algorithm, taken.threads in threads) == (Algorithm.TWO_SHOT_PUSH, True)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("op", ["allreduce", "reducescatter", "allgather"])
def test_every_algorithm_that_a_table_may_name_is_tried(op, world_size):
    sizes = tune.SIZES if op == "allreduce" else tune.PART_SIZES
    found = {one.algorithm for nbytes in sizes for one in tune.candidates(op, [world_size], nbytes, CHIP)}

    assert found == set(in_tables(op))
    largest = tune.candidates("allreduce", [world_size], tune.SIZES[-1], CHIP)
    assert {one.algorithm for one in largest} == {Algorithm.TWO_SHOT_PIPELINED, Algorithm.TWO_SHOT_TMA}  # of any size


def test_pulls_are_tried_up_to_their_limit_and_bulk_copies_from_some_size_on():
    tried = {nbytes: {one.algorithm for one in candidates(4, nbytes)} for nbytes in tune.SIZES}

    assert [n for n in tune.SIZES if Algorithm.ONE_SHOT in tried[n]] == [n for n in tune.SIZES if n <= 8 * MB]
    assert [n for n in tune.SIZES if Algorithm.TWO_SHOT_TMA in tried[n]] == [n for n in tune.SIZES if n >= 4 * MB]
    bulk = [one for one in candidates(4, 64 * MB) if one.algorithm is Algorithm.TWO_SHOT_TMA]
    assert [(one.blocks, one.threads) for one in bulk] == [(32, TMA_THREADS)]


def test_what_a_chip_has_no_instructions_for_is_not_tried():
    found = tune.candidates("allreduce", [4], 64 * MB, Chip(108, "sm_80"))

    assert Algorithm.TWO_SHOT_TMA not in {one.algorithm for one in found}
    assert max(one.blocks for one in found) == 107


def test_a_grid_of_parts_is_tried_where_every_world_size_can_have_it():
    tried = {nbytes: tune.candidates("allgather", WORLD_SIZES, nbytes, CHIP) for nbytes in tune.PART_SIZES}

    flagged = [nbytes for nbytes in tried if Algorithm.ALLGATHER_FLAGGED in {one.algorithm for one in tried[nbytes]}]
    assert flagged == [32 * KB, 128 * KB, 256 * KB]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_table_of_any_measurements_is_valid(world_size):
    times = {n: {one: 1.0 + at for at, one in enumerate(candidates(world_size, n))} for n in tune.SIZES}
    slowest_first = {n: dict(zip(of_size, reversed(of_size.values()), strict=True)) for n, of_size in times.items()}

    for measurements in (times, slowest_first, {n: times[n] for n in tune.SIZES[:3]}):
        made = tune.update(shipped_table("default"), NEW, {world_size: measurements})
        assert Table.from_json(made.to_json()) == made


SMALL_IS_FASTER = {SMALL: 1, WIDE: 2}
LITTLE, NEAR, FAR = ({SMALL: slower, WIDE: 1} for slower in (1.004, 1.005, 1.02))


@pytest.mark.parametrize(
    ("measurements", "small", "wide"),
    [
        ({1024: SMALL_IS_FASTER, 2048: {SMALL: 2, WIDE: 3}, 4096: {SMALL: 4, WIDE: 3}}, 2048, 4096),
        ({1024: {SMALL: 1}, 2048: {WIDE: 9}}, 1024, 2048),  # no candidate any more
        ({1: SMALL_IS_FASTER, 2: FAR}, 1, 2),
        ({1: SMALL_IS_FASTER, 2: NEAR}, 2, None),
        ({1: SMALL_IS_FASTER, 2: LITTLE, 3: LITTLE}, 3, None),
        ({1: SMALL_IS_FASTER, 2: LITTLE, 3: LITTLE, 4: LITTLE}, 1, 4),  # small gains at many sizes make an entry
    ],
)
def test_an_entry_goes_on_while_it_is_near_the_fastest(measurements, small, wide):
    entries = [(small, "one_shot_push", 128), (wide, "one_shot_push", 512)]

    assert limits_and_threads(tune.entries_from(measurements, [])) == entries[: 2 if wide else 1]


def test_the_order_of_the_measurements_does_not_matter():
    by_size = {1024: {SMALL: 1, WIDE: 2}, 4096: {SMALL: 4, WIDE: 3}}

    assert tune.entries_from(by_size, OLDER) == tune.entries_from(dict(reversed(by_size.items())), OLDER)


def test_an_algorithm_without_a_limit_takes_all_sizes_from_its_entry_on():
    entries = tune.entries_from({MB: {TWO_SHOT: 1}, 16 * MB: {TWO_SHOT: 3, LARGE: 2}, 64 * MB: {LARGE: 8}}, OLDER)

    assert limits_and_threads(entries) == [(MB, "two_shot_push", 512), (None, "two_shot_pipelined", 512)]
    assert entries[-1]["chunk"] == 2048


def test_the_entries_that_served_before_go_on_above_what_was_measured():
    entries = tune.entries_from({32 * KB: {SMALL: 1}}, OLDER)

    assert entries[0]["max_nbytes"] == 32 * KB
    assert entries[1:] == OLDER


def table_of(measurements, old=None):
    return tune.update(old or shipped_table("default"), NEW, measurements)


def test_other_world_sizes_of_the_same_table_stay():
    old = table_of({3: {MB: {TWO_SHOT: 7.0}}})

    made = table_of({2: {MB: {TWO_SHOT: 5.0}}}, old)

    assert (made.rows[3], made.measured) == (old.rows[3], {3: [[MB, 7.0]], 2: [[MB, 5.0]]})


def test_world_sizes_of_another_machines_table_do_not_stay():
    assert list(table_of({2: {MB: {TWO_SHOT: 5.0}}}).rows) == [2]


def test_points_above_what_was_measured_stay():
    old = table_of({2: {KB: {SMALL: 1.0}, MB: {TWO_SHOT: 9.0}}})

    assert table_of({2: {KB: {SMALL: 2.0}}}, old).measured == {2: [[KB, 2.0], [MB, 9.0]]}


def test_codecs_that_were_not_timed_again_stay():
    old = tune.update(shipped_table("default"), NEW, {2: {MB: {TWO_SHOT: 9.0}}}, {2: {"int8": {MB: 8.0}}})

    made = tune.update(old, NEW, {2: {MB: {TWO_SHOT: 9.0}}}, {2: {"int4": {MB: 6.0001}}})

    assert made.codecs == {2: {"int8": [[MB, 8.0]], "int4": [[MB, 6.0]]}}
    assert Table.from_json(made.to_json()) == made


def test_faster_codecs_is_said_of_every_codec():
    table = table_of({2: {KB: {SMALL: 2.0}, MB: {TWO_SHOT: 9.0}}})

    said = tune.faster_codecs(table, {2: {"int8": {KB: 3.0, MB: 10.0}, "int4": {KB: 2.5, MB: 6.0}}})

    assert said == [
        "2 ranks, int8: faster than exact at no size",
        "2 ranks, int4: faster than exact at 1 MB (6.0 us, exact 9.0 us)",
    ]


def test_codecs_are_timed_where_exact_sums_were_not():
    made = tune.update(shipped_table("default"), NEW, {}, {2: {"int8": {MB: 8.0}}})

    assert (made.codecs, made.rows, made.measured) == ({2: {"int8": [[MB, 8.0]]}}, {2: OLDER}, {})
    assert Table.from_json(made.to_json()) == made
    assert tune.faster_codecs(made, {2: {"int8": {MB: 8.0}}}) == ["2 ranks, int8: exact was not measured"]


def test_what_changed_names_each_size_with_both_choices_and_the_times_that_are_known():
    measurements = {2: {32 * KB: {SMALL: 2.0}, MB: {WIDE: 8.0, TWO_SHOT: 12.5}, 2 * MB: {WIDE: 30.0, TWO_SHOT: 20.0}}}
    old = table_of({2: {2 * MB: {WIDE: 1.0}}})

    new = table_of(measurements, old)

    assert tune.what_changed(new, new, measurements) == []
    assert tune.what_changed(old, new, measurements) == [
        "2 ranks, 32 KB: one_shot_push (5 blocks of 512), not measured -> one_shot_push (17 blocks of 128), 2.0 us",
        "2 ranks, 2 MB: one_shot_push (132 blocks of 512), 30.0 us -> two_shot_push (131 blocks of 512), 20.0 us",
    ]
