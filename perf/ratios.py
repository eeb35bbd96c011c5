"""Groups of rows, the best of them, and ratios of their times. All comparisons use time / best peer's time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

NOISE = 1.03  # a ratio above this counts as slower
LIBRARIES = {  # by the prefix of their methods
    "nccl": "NCCL",
    "symm": "torch symm_mem",
    "vllm": "vLLM",
    "flashinfer": "FlashInfer",
    "sglang": "SGLang",
    "gloo": "gloo",
}


def best(rows: Iterable) -> object | None:
    """Returns the fastest row with a correct result; None if there is none."""
    return min((row for row in rows if not row.wrong), key=lambda row: row.median, default=None)


def best_peer(rows: Iterable) -> object | None:
    """Returns the fastest peer's row with a correct result; None if there is none."""
    return best(row for row in rows if row.is_peer)


def ratio(row, other) -> float | None:
    """Returns the row's time / the other row's time; None if one of them is missing or wrong."""
    return None if row is None or other is None or row.wrong or other.wrong else row.median / other.median


def of_best_peer(by_case: Mapping[object, Mapping[str, object]]) -> dict[object, float]:
    """Returns graphar's time / the best peer's time by case. Cases without correct results of both are left out."""
    ratios = {case: ratio(rows.get("graphar"), best_peer(rows.values())) for case, rows in by_case.items()}
    return {case: value for case, value in ratios.items() if value is not None}


def extent(ratios: Mapping[object, float]) -> str:
    """Returns the range of the ratios, such as "0.50 to 0.98", or one number if it is a point."""
    ends = (min(ratios.values()), max(ratios.values()))
    return " to ".join(dict.fromkeys(f"{end:.2f}" for end in ends))


def geometric_mean(ratios: Iterable[float]) -> float:
    return statistics.geometric_mean(ratios)


def group(rows: Iterable, key: Callable) -> dict[object, list]:
    groups: dict[object, list] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def by_method(rows: Iterable, key: Callable) -> dict[object, dict[str, object]]:
    """Returns the rows by key and method. Keys are ascending."""
    return {case: {row.method: row for row in mine} for case, mine in sorted(group(rows, key).items())}


def of_largest_world(rows: Sequence) -> list:
    world_size = max(row.world_size for row in rows)
    return [row for row in rows if row.world_size == world_size]


def words_for(peers: Sequence[str]) -> str:
    names = list(dict.fromkeys(peers))
    if len(names) > 1:
        return f"the best of {len(names)} peers"
    return LIBRARIES.get(names[0], names[0]) if names else "no peer"
