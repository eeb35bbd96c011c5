"""How a matmul's result is cut into panels."""

import re

import pytest

from graphar.numerics.partitions import PARTITIONS, Panel, panels


def cut(partition, count, parts, columns):
    return panels("op", partition, count, parts, columns)


def test_rows_are_cut_evenly_and_the_last_partition_has_the_remainder():
    assert cut("split_m", 3, [11], 5) == [
        Panel((slice(0, 3),), slice(0, 5)),
        Panel((slice(3, 6),), slice(0, 5)),
        Panel((slice(6, 11),), slice(0, 5)),
    ]


def test_columns_are_cut_in_eights_where_there_are_as_many():
    assert [one.columns for one in cut("split_n", 3, [4], 61)] == [slice(0, 16), slice(16, 32), slice(32, 61)]
    assert [one.columns for one in cut("split_n", 3, [4], 11)] == [slice(0, 3), slice(3, 6), slice(6, 11)]


def test_the_rows_of_each_rank_are_cut_alike():
    first, second = cut("split_m", 2, [5, 4, 1], 7)

    assert first.rows == (slice(0, 2), slice(5, 7), slice(9, 9))
    assert second.rows == (slice(2, 5), slice(7, 9), slice(9, 10))
    assert (first.shape, second.shape) == ((4, 7), (6, 7))


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("columns", [0, 1, 7, 4095])
def test_every_element_is_in_one_panel(partition, columns):
    for parts in ([0], [1], [129], [3, 3, 2], [1, 1, 0], [0, 0]):
        seen = [0] * sum(parts)
        for panel in cut(partition, None, parts, columns):
            assert len(panel.rows) == len(parts)
            for rows in panel.rows:
                for row in range(rows.start, rows.stop):
                    seen[row] += panel.columns.stop - panel.columns.start
        assert seen == [columns] * sum(parts)


def test_without_a_number_there_are_four_or_as_many_as_there_can_be():
    assert [len(cut("split_m", None, [rows], 8)) for rows in (0, 1, 3, 4, 4096)] == [1, 1, 3, 4, 4]
    assert [len(cut("split_n", None, [8], columns)) for columns in (0, 1, 3, 4, 4096)] == [1, 1, 3, 4, 4]


@pytest.mark.parametrize("partition", ["none", "auto", "tiles"])
def test_one_panel_has_all(partition):
    assert cut(partition, None, [4, 3], 9) == [Panel((slice(0, 4), slice(4, 7)), slice(0, 9))]


NAMES = "auto, split_m, split_n, tiles, none, batch_invariant, tp_invariant"


@pytest.mark.parametrize(
    ("partition", "count", "kind", "message"),
    [
        ("split_k", None, ValueError, f"partition must be one of {NAMES}, got 'split_k'"),
        (None, None, ValueError, f"partition must be one of {NAMES}, got None"),
        ("split_m", 0, ValueError, "num_partitions must be 1 or more, got 0"),
        ("split_n", -1, ValueError, "num_partitions must be 1 or more, got -1"),
        ("split_m", 2.0, TypeError, "num_partitions must be an int, got float"),
        ("split_m", True, TypeError, "num_partitions must be an int, got bool"),
        ("none", 2, ValueError, "num_partitions goes with split_m or split_n, got 2 with 'none'"),
        ("auto", 1, ValueError, "num_partitions goes with split_m or split_n, got 1 with 'auto'"),
        ("tiles", 4, ValueError, "num_partitions goes with split_m or split_n, got 4 with 'tiles'"),
        ("batch_invariant", 2, ValueError, "num_partitions goes with split_m or split_n, got 2 with 'batch_invariant'"),
        ("split_m", 6, ValueError, "split_m cannot make 6 partitions of 5 rows"),
        ("split_n", 8, ValueError, "split_n cannot make 8 partitions of 7 columns"),
    ],
)
def test_a_partition_that_cannot_be_is_refused(partition, count, kind, message):
    with pytest.raises(kind, match=f"^{re.escape(f'op: {message}')}$"):
        cut(partition, count, [5, 4], 7)
