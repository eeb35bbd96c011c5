"""Whose matmul multiplies before a sum: graphar's or torch's, by rows, waves of tiles and measured shapes."""

from dataclasses import replace

import pytest

from graphar.plan.matmuls import choose_matmul, fills_wave
from graphar.plan.policy import MeasuredMatmul
from graphar.plan.tables import shipped_table

SHIPPED = ("nvidia_h200", "default")
LOW = MeasuredMatmul(64, 1024, 8192, 1.784)
HIGH = MeasuredMatmul(768, 1024, 8192, 0.687)
POLICY = replace(shipped_table("default").matmul, own_from_rows=32, against_torch=(LOW, HIGH))
SMS = 132


def takes_own(m, n=1024, k=8192, policy=POLICY, **more):
    return choose_matmul(policy, m, n, k, SMS, **more).own


@pytest.mark.parametrize("name", SHIPPED)
def test_where_a_table_was_measured_the_faster_matmul_is_taken(name):
    table = shipped_table(name)
    sms = table.chip.sms

    for one in table.matmul.against_torch:
        own_us, torch_us = one.ratio, 1.0
        taken_us = own_us if choose_matmul(table.matmul, *one[:3], sms).own else torch_us
        assert taken_us <= 1.02 * min(own_us, torch_us), one


@pytest.mark.parametrize("name", SHIPPED)
def test_tables_have_the_shapes_that_the_rule_does_not_decide(name):
    table = shipped_table(name)
    measured = table.matmul.against_torch

    assert len(measured) >= 32
    assert {one.ratio > 1 for one in measured} == {True, False}
    for m, n, _, _ in measured:
        assert m >= table.matmul.own_from_rows
        assert not fills_wave(m, n, table.chip.sms)


def test_the_nearest_measured_shape_decides_below_a_wave():
    assert [takes_own(m) for m in (64, 221, 222, 768)] == [False, False, True, True]  # 222 is above sqrt(64 * 768)


def test_factors_count_alike_in_every_dimension():
    wide, deep = MeasuredMatmul(64, 4096, 1024, 0.5), MeasuredMatmul(64, 1024, 4096, 1.5)
    policy = replace(POLICY, against_torch=(wide, deep))

    assert takes_own(64, 2048, 1024, policy)
    assert not takes_own(64, 1024, 2048, policy)


@pytest.mark.parametrize(("m", "n"), [(2048, 1152), (64, 132 * 128), (100_000, 8)])
def test_a_wave_of_tiles_takes_graphars_whatever_was_measured_below(m, n):
    slower = replace(POLICY, against_torch=(MeasuredMatmul(m, n - 1, 64, 9.0),))

    assert takes_own(m, n, 64, slower)


def test_a_tile_less_than_a_wave_goes_by_what_was_measured():
    slower = replace(POLICY, against_torch=(LOW,))

    assert takes_own(64, 128 * SMS, 8192, slower)
    assert not takes_own(64, 128 * SMS - 128, 8192, slower)


@pytest.mark.parametrize("panels", [1, 4])
@pytest.mark.parametrize("n", [8, 128 * 1024])
def test_fewer_rows_take_torchs(panels, n):
    faster = replace(POLICY, against_torch=(MeasuredMatmul(31, 8, 64, 0.5),))

    assert not takes_own(31, n, 64, faster, panels=panels)
    assert takes_own(32, n, 64, faster, panels=panels)


@pytest.mark.parametrize("shape", [(64, 1024, 0), (64, 0, 64)])
def test_operands_without_elements_have_a_choice_too(shape):
    assert choose_matmul(POLICY, *shape, SMS).reason


@pytest.mark.parametrize(
    ("shape", "panels", "reason"),
    [
        ((64, 1024, 8192), 1, "torch's matmul, which was measured to be 1.78 times as fast at 64 x 1024 x 8192"),
        ((700, 999, 8000), 1, "graphar's matmul, which was measured to take 0.69 of torch's time at 768 x 1024 x 8192"),
        ((31, 1024, 8192), 1, "torch's matmul, for fewer than 32 rows"),
        ((64, 1024, 8192), 4, "graphar's matmul, for all panels"),
        ((4096, 8192, 64), 1, "graphar's matmul, whose tiles fill the GPU"),
    ],
)
def test_the_reason_is_told(shape, panels, reason):
    assert choose_matmul(POLICY, *shape, SMS, panels).reason == reason


def test_a_table_without_measured_shapes_says_so():
    policy = replace(POLICY, against_torch=())

    assert choose_matmul(policy, 64, 64, 64, SMS).reason == "graphar's matmul, which was not timed against torch's"
