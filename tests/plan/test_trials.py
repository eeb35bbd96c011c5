"""Trials: every number of a policy has one, every value makes a valid table, and noise changes nothing."""

from dataclasses import fields, is_dataclass

import pytest

from graphar.plan import tune
from graphar.plan.matmuls import choose_matmul, fills_wave
from graphar.plan.policy import Chip
from graphar.plan.scratch import WORLD_SIZES
from graphar.plan.tables import POLICIES, Table, shipped_table

TABLE = shipped_table("default")


def numbers(policy, path):
    """The paths of all numbers of a policy. A dict by world size counts as one number, and so does a tile."""
    for field in fields(policy):
        value = getattr(policy, field.name)
        if is_dataclass(value) and not field.name.endswith("_tile"):
            yield from numbers(value, (*path, field.name))
        else:
            yield (*path, field.name)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_value_makes_a_valid_table_that_differs_there_alone(world_size):
    for trial in tune.trials(world_size, TABLE):
        present = tune.value_at(TABLE, trial.path)
        for value in trial.values:
            table = tune.with_value(TABLE, trial.path, value)
            assert Table.from_json(table.to_json()) == table, trial.name
            assert tune.value_at(table, trial.path) == value
            assert tune.with_value(table, trial.path, present) == TABLE


def test_every_number_of_a_policy_has_a_trial():
    tried = {trial.path[:-1] if isinstance(trial.path[-1], int) else trial.path for trial in tune.trials(2, TABLE)}

    known = {path for name in POLICIES if name != "chip" for path in numbers(getattr(TABLE, name), (name,))}

    without = {"one_shot_nbytes_beyond", "alternating_tile", "against_torch"}
    assert known - tried == {
        ("copies", "beside_from_nbytes"),
        ("copies", "alltoall_from_nbytes"),
        ("training", "blocks"),
        ("training", "blocks_beyond"),
        *(("matmul", name) for name in without),
    }
    assert tried <= known


def test_numbers_of_a_world_size_are_marked():
    found = list(tune.trials(3, TABLE))
    in_dicts = [trial for trial in found if isinstance(tune.value_at(TABLE, trial.path[:-1]), dict)]

    assert [trial for trial in found if trial.by_world_size] == in_dicts
    assert {trial.path[-1] for trial in in_dicts} == {3}


@pytest.mark.parametrize(
    ("times", "chosen"),
    [
        ([[1.0, 8.0], [2.0, 2.0], [3.0, 3.0]], 1),
        ([[3.0, 3.0], [1.0, 8.0]], 1),  # of which the arithmetic mean is 4.5
        ([[1.0, 8.0], [2.5, 2.5]], 1),  # of which the least is 2.5 and the harmonic mean too
        ([[4.0, 4.0, 4.0], [1.0, 5.0, 9.0], [2.0, 2.0, 17.0]], 1),
        ([[2.0, 2.0], [1.0, 8.0]], 0),
    ],
    ids=str,
)
def test_the_value_with_the_least_geometric_mean_is_chosen(times, chosen):
    assert tune.choose(times, present=0) == chosen


def test_a_gain_of_less_than_one_percent_is_noise():
    assert tune.choose([[1.0], [0.992]], present=0) == 0
    assert tune.choose([[1.0], [0.985]], present=0) == 1


def test_costs_of_tiles_are_tried_with_small_fused_kernels_and_with_large_matmuls():
    costs = [trial for trial in tune.trials(2, TABLE) if trial.path[:2] == ("matmul", "cost")]

    for trial in costs:
        fused = [one for one in trial.workloads if one.op == "matmul_allreduce"]
        alone = [one for one in trial.workloads if one.op == "matmul"]
        assert all(one.rows * one.columns < TABLE.matmul.estimated_below_numel for one in fused)
        assert {one.rows for one in alone} == {512, 1024, 2048, 4096}
        assert all(choose_matmul(TABLE.matmul, one.rows, one.columns, one.k, TABLE.chip.sms).own for one in alone)


@pytest.mark.parametrize("sms", [66, 132])
def test_shapes_below_a_wave_are_timed_once_with_graphars_matmul_and_once_with_torchs(sms):
    found = list(tune.against_torch(TABLE.matmul, Chip(sms, "sm_90a")))

    assert len({one for one, *_ in found}) == len(found)
    for one, *policies in found:
        shape = one.rows, one.columns, one.k
        assert one.op == "matmul"
        assert not fills_wave(one.rows, one.columns, sms)
        assert [choose_matmul(policy, *shape, sms).own for policy in policies] == [True, False]


def test_all_rows_below_a_wave_are_timed_for_every_weight():
    found = {(one.rows, one.columns, one.k) for one, *_ in tune.against_torch(TABLE.matmul, TABLE.chip)}

    assert found == {one[:3] for one in TABLE.matmul.against_torch}
    assert all(fills_wave(2 * tune.ROWS_BELOW_WAVE[-1], n, TABLE.chip.sms) for n, _ in tune.WEIGHTS)


def test_a_gpu_without_graphars_matmul_times_no_shapes():
    assert list(tune.against_torch(TABLE.matmul, Chip(132, "sm_100a"))) == []
