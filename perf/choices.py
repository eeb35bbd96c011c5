"""Compares the choice of "auto" with the fastest variant, such as another algorithm or partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from perf.md import columns, ratio_cell, time_cell
from perf.ratios import best, ratio
from perf.report import Choice, Timing


def choices(
    by_case: Mapping[object, Mapping[str, Timing]], is_variant: Mapping[str, Callable[[str], bool]]
) -> dict[tuple[object, str], Choice]:
    """Returns the choices of "auto", by case and method. Cases without a variant or with a wrong result are left out.

    Args:
        is_variant: for each method that uses "auto", a function that says whether another method is its variant.
    """
    chosen = {}
    for case, rows in by_case.items():
        for method, is_one in is_variant.items():
            auto, fastest = rows.get(method), best(row for name, row in rows.items() if is_one(name))
            if ratio(auto, fastest) is not None:
                chosen[case, method] = Choice(auto, fastest)
    return chosen


def choice_table(first: str, chosen: Mapping[tuple[object, str], Choice]) -> list[str]:
    """Returns a caption and a table with a row for each choice; an empty list if there are none."""
    if not chosen:
        return []
    cells = {
        first: lambda key: key[0],
        "method": lambda key: key[1],
        "time (us)": lambda key: time_cell(chosen[key].auto),
        "fastest variant": lambda key: chosen[key].variant.method,
        "its time (us)": lambda key: time_cell(chosen[key].variant),
        "of_best_variant": lambda key: ratio_cell(chosen[key].loss),
    }
    return ["The time of `auto`, and the fastest variant:", columns(chosen, cells)]
