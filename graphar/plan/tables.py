"""Tuning tables: which algorithm and grid was the fastest at which size, measured or shipped, as data."""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise

from graphar.numerics.codecs import codec
from graphar.plan.algorithms import (
    CHUNKED,
    TMA_THREADS,
    WARP,
    Algorithm,
    largest_nbytes,
    most_blocks,
    most_threads,
    scratch,
)
from graphar.runtime import cache
from graphar.runtime.catalogue import WORLD_SIZES

FOLDER = "tuning"  # in the package, and in the user's cache
DEFAULT = "default"


@dataclass(frozen=True)
class Table:
    """What was measured on a kind of machine.

    Attributes:
        name: as explanations give it; that of the device, see :func:`slug`, or "default".
        machine: what it was measured on.
        date: when.
        report: the path of the report that holds the figures, or None.
        rows: by world size, each with the largest size in bytes it is for, None: any, and an algorithm and its grid.
        measured: by world size, [bytes of one rank's tensor, microseconds of what the rows choose], sizes ascending.
        codecs: by world size and a codec's text, such points of all-reduces with that codec, in bytes of a bf16 tensor.
    """

    name: str
    machine: str
    date: str
    report: str | None
    rows: dict[int, list[dict]]
    measured: dict[int, list[list]] = field(default_factory=dict)
    codecs: dict[int, dict[str, list[list]]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str | bytes) -> Table:
        """The table that ``to_json`` wrote; ValueError, saying what is wrong, where it is none."""
        content = json.loads(text)
        if problem := problem_with(content):
            raise ValueError(problem)
        by_world_size = {
            key: {int(world_size): of_it for world_size, of_it in content.get(key, {}).items()}
            for key in _BY_WORLD_SIZE
        }
        return cls(**(content | by_world_size))

    def to_json(self) -> str:
        """The table as its file has it: one row a line."""
        parts = [f"  {json.dumps(key)}: {json.dumps(getattr(self, key))}" for key in _HEAD]
        rows = [
            f'    "{world_size}": [\n' + ",\n".join(f"      {json.dumps(row)}" for row in of_it) + "\n    ]"
            for world_size, of_it in sorted(self.rows.items())
        ]
        points = [f'    "{world_size}": {json.dumps(of_it)}' for world_size, of_it in sorted(self.measured.items())]
        codecs = [
            f'    "{world_size}": {{\n'
            + ",\n".join(f"      {json.dumps(text)}: {json.dumps(of_codec)}" for text, of_codec in of_it.items())
            + "\n    }"
            for world_size, of_it in sorted(self.codecs.items())
        ]
        for key, lines in zip(_BY_WORLD_SIZE, (rows, points, codecs), strict=True):
            if lines:
                parts.append(f'  "{key}": {{\n' + ",\n".join(lines) + "\n  }")
        return "{\n" + ",\n".join(parts) + "\n}\n"


# ---- where tables are -----------------------------------------------------------------------------------------------


def slug(device_name: str) -> str:
    """The name of a device's table: "nvidia_h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


def find_table(device_name: str) -> Table:
    """The table for a device: the user's own, else the shipped one, else ``default``.

    Warns, once, of a table of the user's that is not valid, and does without it.

    Args:
        device_name: as torch.cuda.get_device_name gives it.
    """
    name = slug(device_name)
    try:
        own = user_table(name)
    except (OSError, ValueError) as error:
        _warn_once(f"{FOLDER}/{name}.json of the cache", str(error))
        own = None
    return own or shipped_table(name if _shipped(name).is_file() else DEFAULT)


def user_table(name: str) -> Table | None:
    """The user's own table of that name; None where there is none.

    Raises:
        OSError: it cannot be read or trusted.
        ValueError: it is no table.
    """
    content = cache.load_file(FOLDER, f"{name}.json")
    return None if content is None else Table.from_json(content)


@functools.cache
def shipped_table(name: str) -> Table:
    """A table of graphar/tuning."""
    return Table.from_json(_shipped(name).read_text())


def _shipped(name: str):
    return resources.files("graphar.plan").joinpath("tables", f"{name}.json")


@functools.cache
def _warn_once(file: str, reason: str) -> None:
    message = f"graphar: the tuning table {file} is ignored: {reason}; `python -m graphar tune` writes another"
    warnings.warn(message, RuntimeWarning, stacklevel=3)


# ---- what a table must be -------------------------------------------------------------------------------------------

_HEAD = {"name": str, "machine": str, "date": str, "report": (str, type(None))}
_BY_WORLD_SIZE = ("rows", "measured", "codecs")
_FIELDS = _HEAD | dict.fromkeys(_BY_WORLD_SIZE, dict)
_OPTIONAL = {"measured", "codecs"}


def problem_with(content: object) -> str:
    """What is wrong with a table as JSON gives it, or nothing: every shape it names is one that its kernel can run."""
    if not isinstance(content, dict):
        return "it is not a JSON object"
    if unknown := content.keys() - _FIELDS.keys():
        return f"it has an unknown field {min(unknown)!r}"
    for key, kind in _FIELDS.items():
        if not isinstance(content.get(key, {} if key in _OPTIONAL else ...), kind):
            return f"its field {key!r} is missing or of another type"
    known = [str(world_size) for world_size in WORLD_SIZES]
    for world_size, rows in content["rows"].items():
        if world_size not in known:
            return f"its rows are for {world_size!r} ranks"
        if problem := _problem_with_rows(rows, int(world_size)):
            return f"{world_size} ranks: {problem}"
    for key in sorted(_OPTIONAL):
        if without := content.get(key, {}).keys() - content["rows"].keys():
            return f"it has {key} points for {min(without)!r} ranks and no rows"
    for world_size, points in content.get("measured", {}).items():
        if not _are_points(points):
            return f"{world_size} ranks: measured points must be {_POINTS}"
    for world_size, by_codec in content.get("codecs", {}).items():
        if problem := _problem_with_codecs(by_codec):
            return f"{world_size} ranks: {problem}"
    return ""


def _problem_with_codecs(by_codec: object) -> str:
    if not isinstance(by_codec, dict):
        return "codecs must be an object"
    for text, points in by_codec.items():
        try:
            codec(text)
        except ValueError as error:
            return f"codecs: {error}"
        if not _are_points(points):
            return f"points of {text} must be {_POINTS}"
    return ""


def _problem_with_rows(rows: object, world_size: int) -> str:
    if not isinstance(rows, list) or not rows:
        return "rows must be a list of at least one"
    for at, row in enumerate(rows):
        if problem := _problem_with_row(row, world_size):
            return f"row {at}: {problem}"
    *limits, last = [row["max_nbytes"] for row in rows]
    if None in limits or last is not None:
        return "the last row, and only that, must have no max_nbytes"
    if any(below >= above for below, above in pairwise(limits)):
        return "rows must be sorted by max_nbytes"
    return ""


def _problem_with_row(row: object, world_size: int) -> str:
    if not isinstance(row, dict) or row.get("algorithm") not in _CHOOSABLE:
        return f"algorithm must be one of {', '.join(_CHOOSABLE)}"
    algorithm = Algorithm(row["algorithm"])
    numbers = {"max_nbytes", "blocks", "threads"} | ({"chunk"} if algorithm in CHUNKED else set())
    if row.keys() != {"algorithm", *numbers}:
        return f"{algorithm.value} needs exactly {', '.join(sorted(numbers))}"
    if not all(_is_count(row[key]) or (key == "max_nbytes" and row[key] is None) for key in numbers):
        return f"{', '.join(sorted(numbers))} must be positive integers"
    largest, threads = largest_nbytes(algorithm, world_size), most_threads(algorithm)
    if largest is not None and (row["max_nbytes"] or math.inf) > largest:
        return f"{algorithm.value} takes at most {largest} bytes"
    if row["threads"] % WARP or row["threads"] > threads:
        return f"threads of {algorithm.value} must be a multiple of {WARP}, at most {threads}"
    if algorithm is Algorithm.TWO_SHOT_TMA and row["threads"] != TMA_THREADS:
        return f"{algorithm.value} has {TMA_THREADS} threads"
    if row["blocks"] > most_blocks(algorithm):
        return f"{algorithm.value} has at most {most_blocks(algorithm)} blocks"
    if row.get("chunk", 0) > scratch(algorithm, world_size).capacity:
        return f"{algorithm.value} has chunks of at most {scratch(algorithm, world_size).capacity} packs"
    return ""


# Rows serve all dtypes that kernels have.
_CHOOSABLE = [
    one.value
    for one in Algorithm
    if one.op == "allreduce" and one.exact and one not in (Algorithm.FALLBACK, Algorithm.TWO_SHOT_LOSSLESS)
]


_POINTS = "[bytes, microseconds], positive, sizes ascending"


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _are_points(points: object) -> bool:
    if not isinstance(points, list) or not all(isinstance(one, list) and len(one) == 2 for one in points):
        return False
    if not all(_is_count(nbytes) and type(us) in (int, float) and 0 < us < math.inf for nbytes, us in points):
        return False
    return all(below[0] < above[0] for below, above in pairwise(points))
