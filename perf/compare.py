"""Which rows stand beside each other, and how graphar's compare with its peers'."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from graphar.plan.sizes import format_nbytes
from perf.cases import BACKEND_SIZES, SIZES
from perf.rows import Row

MODES = {
    "graph": "in a CUDA graph, back to back",
    "chain": "in a CUDA graph, each reading the result of the one before",
    "eager": "eager, one call after another",
    "host": "eager, the host's share: until the call returns",
    "cpu": "on the CPU, one call after another",
}
FORMS = {"process": "one process a rank", "list": "one process, one tensor a rank"}
BASELINES = ("nccl", "gloo")

NOISE = 1.03  # what graphar may take of the best peer's time before it counts as slower

Key = tuple[int, str, str, str]


def groups(rows: Sequence[Row]) -> list[Key]:
    """One table each, of the first dtype: by world size, then in the order of MODES and FORMS.

    A world that was measured for the table of backends alone has no other.
    """
    rows = [row for row in rows if row.dtype == rows[0].dtype]
    swept = [row for row in rows if row.nbytes in SIZES and row.nbytes not in BACKEND_SIZES]
    keys = {(row.world_size, row.mode, row.form, row.dtype) for row in swept or rows}
    return sorted(keys, key=lambda key: (key[0], list(MODES).index(key[1]), list(FORMS).index(key[2])))


def members(rows: Iterable[Row], key: Key) -> list[Row]:
    """The rows of one table, at the sizes that every world has."""
    return [row for row in rows if (row.world_size, row.mode, row.form, row.dtype) == key and row.nbytes in SIZES]


def title(key: Key) -> str:
    world_size, mode, form, dtype = key
    return f"{world_size} ranks, {dtype}, {MODES[mode]} ({FORMS[form]})"


def methods_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.method for row in rows))


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest. A wrong result wins nothing, nor does one of fewer bits."""
    return min((row for row in rows if not row.wrong and not row.quantised), key=lambda row: row.median, default=None)


def best_peer(rows: Iterable[Row]) -> Row | None:
    """The fastest method that is not graphar."""
    return best(row for row in rows if not row.is_own)


def baseline(rows: Iterable[Row]) -> Row | None:
    """NCCL's row, or gloo's."""
    return next((row for row in rows if row.method in BASELINES and not row.wrong), None)


def of_best_peer(rows: Sequence[Row]) -> dict[int, float]:
    """By size, graphar's time over the best peer's, where both are right."""
    ratios = {}
    for ours in (row for row in rows if row.method == "graphar" and not row.wrong):
        if peer := best_peer(row for row in rows if row.nbytes == ours.nbytes):
            ratios[ours.nbytes] = ours.median / peer.median
    return ratios


def verdict(rows: Sequence[Row]) -> str:
    """Whether all is right."""
    if not rows:
        return "Nothing was measured."
    bad = [row for row in rows if row.wrong]
    if not bad:
        return f"All {len(rows)} results were verified: none is wrong."
    names = ", ".join(methods_of(bad))
    return f"**WRONG RESULTS: {len(bad)} of {len(rows)} rows ({names}).** They are marked in the tables."


def comparisons(rows: Sequence[Row]) -> list[str]:
    """A sentence or two a table: how graphar compares, and where it is slower."""
    sentences = []
    for key in groups(rows):
        ratios = of_best_peer(members(rows, key))
        if not ratios:
            continue
        span = f"{min(ratios.values()):.2f} to {max(ratios.values()):.2f}"
        mean = statistics.geometric_mean(ratios.values())
        slower = [f"{format_nbytes(size)} ({ratio:.3f})" for size, ratio in ratios.items() if ratio > NOISE]
        where = f" Above {NOISE}: {', '.join(slower)}." if slower else ""
        sentences.append(f"{title(key)}: of_best_peer {span}, geometric mean {mean:.2f}.{where}")
    return sentences
