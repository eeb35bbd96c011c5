"""Tuning tables: the fastest algorithm and grid by size, measured on a kind of machine, stored as JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import typing
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise

from graphar.numerics.codecs import codec
from graphar.plan.algorithms import Algorithm, kernels_that, with_kernels
from graphar.plan.policy import (
    BesidePolicy,
    Chip,
    MatmulPolicy,
    NormPolicy,
    PrefetchPolicy,
    QuantizedPolicy,
)
from graphar.plan.scratch import TMA_THREADS, WARP, WORLD_SIZES

DEFAULT = "default"


@dataclass(frozen=True)
class Table:
    """The measurements of one kind of machine. The default table supplies sections that are left out.

    Attributes:
        name: the device's name as :func:`slug` gives it, or "default". Explanations name the table by it.
        machine: the machine that was measured.
        date: the date of the measurement.
        report: the path of the report with the figures, or None.
        rows: by world size, the rows of all-reduces: the largest tensor in bytes that a row is for (None: any size), an
            algorithm and its grid.
        measured: by world size, the points [bytes of one rank's tensor, microseconds of the chosen row], sizes
            ascending.
        codecs: by world size and a codec's text, the points [bytes of a bf16 tensor, microseconds] of all-reduces with
            that codec, sizes ascending.
        parts: by op, the rows of reduce-scatters and all-gathers, by the bytes of the largest part.
        chip: the kind of GPU that the table is for.
        quantized: grids with a codec on the wire (graphar.plan.policy.QuantizedPolicy).
        norm: thresholds of all-reduces with RMSNorm (graphar.plan.policy.NormPolicy).
        prefetch: limits of prefetching into L2 (graphar.plan.policy.PrefetchPolicy).
        beside: the grid beside other work (graphar.plan.policy.BesidePolicy).
        matmul: thresholds and tiles of matmuls (graphar.plan.policy.MatmulPolicy).
    """

    name: str
    machine: str
    date: str
    report: str | None
    rows: dict[int, list[dict]]
    measured: dict[int, list[list]] = field(default_factory=dict)
    codecs: dict[int, dict[str, list[list]]] = field(default_factory=dict)
    parts: dict[str, list[dict]] = field(default_factory=lambda: shipped_table(DEFAULT).parts)
    chip: Chip = field(default_factory=lambda: shipped_table(DEFAULT).chip)
    quantized: QuantizedPolicy = field(default_factory=lambda: shipped_table(DEFAULT).quantized)
    norm: NormPolicy = field(default_factory=lambda: shipped_table(DEFAULT).norm)
    prefetch: PrefetchPolicy = field(default_factory=lambda: shipped_table(DEFAULT).prefetch)
    beside: BesidePolicy = field(default_factory=lambda: shipped_table(DEFAULT).beside)
    matmul: MatmulPolicy = field(default_factory=lambda: shipped_table(DEFAULT).matmul)

    @classmethod
    def from_json(cls, text: str | bytes) -> Table:
        """Returns the table that ``to_json`` wrote; ValueError says what is wrong with another text."""
        content = json.loads(text)
        if problem := problem_with(content):
            raise ValueError(problem)
        by_world_size = {
            key: {int(world_size): of_it for world_size, of_it in content.get(key, {}).items()}
            for key in _BY_WORLD_SIZE
        }
        policies = {key: _read(POLICIES[key], content[key]) for key in POLICIES if key in content}
        return cls(**(content | by_world_size | policies))

    def to_json(self) -> str:
        """Returns the table as JSON text, with one row a line."""
        parts = [f"  {json.dumps(key)}: {json.dumps(getattr(self, key))}" for key in _HEAD]
        rows = [_rows_text(str(world_size), of_it) for world_size, of_it in sorted(self.rows.items())]
        points = [f'    "{world_size}": {json.dumps(of_it)}' for world_size, of_it in sorted(self.measured.items())]
        codecs = [
            f'    "{world_size}": {{\n'
            + ",\n".join(f"      {json.dumps(text)}: {json.dumps(of_codec)}" for text, of_codec in of_it.items())
            + "\n    }"
            for world_size, of_it in sorted(self.codecs.items())
        ]
        by_op = [_rows_text(op, of_it) for op, of_it in self.parts.items()]
        for key, lines in zip((*_BY_WORLD_SIZE, "parts"), (rows, points, codecs, by_op), strict=True):
            if lines or key in _REQUIRED:
                parts.append(f'  "{key}": {{\n' + ",\n".join(lines) + "\n  }")
        for key in POLICIES:
            values = dataclasses.asdict(getattr(self, key))
            lines = [f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
            parts.append(f'  "{key}": {{\n' + ",\n".join(lines) + "\n  }")
        return "{\n" + ",\n".join(parts) + "\n}\n"


def _rows_text(key: str, rows: list[dict]) -> str:
    return f'    "{key}": [\n' + ",\n".join(f"      {json.dumps(row)}" for row in rows) + "\n    ]"


def slug(device_name: str) -> str:
    """Returns the name of a device's table: "nvidia_h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


@functools.cache
def shipped_table(name: str) -> Table:
    """Returns the table ``name`` of graphar/plan/tables, or the default table if there is none."""
    file = resources.files("graphar.plan").joinpath("tables", f"{name}.json")
    return Table.from_json(file.read_text()) if file.is_file() else shipped_table(DEFAULT)


# ---- validation -----------------------------------------------------------------------------------------------------

_HEAD = {"name": str, "machine": str, "date": str, "report": (str, type(None))}
_BY_WORLD_SIZE = ("rows", "measured", "codecs")
POLICIES = {
    "chip": Chip,
    "quantized": QuantizedPolicy,
    "norm": NormPolicy,
    "prefetch": PrefetchPolicy,
    "beside": BesidePolicy,
    "matmul": MatmulPolicy,
}
_FIELDS = _HEAD | dict.fromkeys((*_BY_WORLD_SIZE, "parts", *POLICIES), dict)
_REQUIRED = {*_HEAD, "rows"}  # the default table supplies the others


def problem_with(content: object) -> str:
    """Returns what is wrong with a table in JSON, or an empty string if its kernels can run every row."""
    if not isinstance(content, dict):
        return "it is not a JSON object"
    if unknown := content.keys() - _FIELDS.keys():
        return f"it has an unknown field {min(unknown)!r}"
    for key, kind in _FIELDS.items():
        if not isinstance(content.get(key, ... if key in _REQUIRED else {}), kind):
            return f"its field {key!r} is missing or of another type"
    known = [str(world_size) for world_size in WORLD_SIZES]
    for world_size, rows in content["rows"].items():
        if world_size not in known:
            return f"its rows are for {world_size!r} ranks"
        if problem := _problem_with_rows(rows, _CHOOSABLE, [int(world_size)]):
            return f"{world_size} ranks: {problem}"
    for key in ("codecs", "measured"):
        if without := content.get(key, {}).keys() - content["rows"].keys():
            return f"it has {key} points for {min(without)!r} ranks and no rows"
    for world_size, points in content.get("measured", {}).items():
        if not _are_points(points):
            return f"{world_size} ranks: measured points must be {_POINTS}"
    for world_size, by_codec in content.get("codecs", {}).items():
        if problem := _problem_with_codecs(by_codec):
            return f"{world_size} ranks: {problem}"
    return _problem_with_parts(content.get("parts")) or _problem_with_policies(content)


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


def _problem_with_parts(parts: dict | None) -> str:
    if parts is None:
        return ""
    if parts.keys() != set(_PART_OPS):
        return f"its parts must be of {', '.join(_PART_OPS)}"
    for op, rows in parts.items():
        if problem := _problem_with_rows(rows, [one.value for one in with_kernels(op)], list(WORLD_SIZES)):
            return f"{op}: {problem}"
    return ""


def _problem_with_rows(rows: object, choosable: list[str], world_sizes: list[int]) -> str:
    if not isinstance(rows, list) or not rows:
        return "rows must be a list of at least one"
    for at, row in enumerate(rows):
        if problem := _problem_with_row(row, choosable, world_sizes):
            return f"row {at}: {problem}"
    *limits, last = [row["max_nbytes"] for row in rows]
    if None in limits or last is not None:
        return "the last row, and only that, must have no max_nbytes"
    if any(below >= above for below, above in pairwise(limits)):
        return "rows must be sorted by max_nbytes"
    return ""


def _problem_with_row(row: object, choosable: list[str], world_sizes: list[int]) -> str:
    if not isinstance(row, dict) or row.get("algorithm") not in choosable:
        return f"algorithm must be one of {', '.join(choosable)}"
    algorithm = Algorithm(row["algorithm"])
    can = algorithm.row
    numbers = {"max_nbytes", "blocks", "threads"} | ({"chunk"} if can.chunked else set())
    if row.keys() != {"algorithm", *numbers}:
        return f"{algorithm.value} needs exactly {', '.join(sorted(numbers))}"
    if not all(_is_count(row[key]) or (key == "max_nbytes" and row[key] is None) for key in numbers):
        return f"{', '.join(sorted(numbers))} must be positive integers"
    for world_size in world_sizes:
        largest = can.limit(world_size)
        if largest is not None and (row["max_nbytes"] or math.inf) > largest:
            return f"{algorithm.value} takes at most {largest} bytes"
        if row.get("chunk", 0) > can.scratch(world_size).capacity:
            return f"{algorithm.value} has chunks of at most {can.scratch(world_size).capacity} packs"
    if row["threads"] % WARP or row["threads"] > can.max_threads:
        return f"threads of {algorithm.value} must be a multiple of {WARP}, at most {can.max_threads}"
    if algorithm is Algorithm.TWO_SHOT_TMA and row["threads"] != TMA_THREADS:
        return f"{algorithm.value} has {TMA_THREADS} threads"
    if row["blocks"] > can.max_blocks:
        return f"{algorithm.value} has at most {can.max_blocks} blocks"
    return ""


# A row serves every dtype that kernels sum, so only algorithms for all of them are choosable.
_CHOOSABLE = [one.value for one in kernels_that(lambda row: row.choosable)]
_PART_OPS = ("reducescatter", "allgather")
_POINTS = "[bytes, microseconds], positive, sizes ascending"


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _are_points(points: object) -> bool:
    if not isinstance(points, list) or not all(isinstance(one, list) and len(one) == 2 for one in points):
        return False
    if not all(_is_count(nbytes) and type(us) in (int, float) and 0 < us < math.inf for nbytes, us in points):
        return False
    return all(below[0] < above[0] for below, above in pairwise(points))


# ---- policies: dataclasses as JSON ----------------------------------------------------------------------------------


def _problem_with_policies(content: dict) -> str:
    for key, kind in POLICIES.items():
        if key in content:
            try:
                _read(kind, content[key])
            except (TypeError, ValueError) as error:
                return f"{key}: {error}"
    return ""


def _read(kind: type, content: object):
    """Returns a dataclass from the JSON of its ``asdict``; ValueError says what is wrong with other content."""
    if not isinstance(content, dict):
        raise ValueError(f"must be an object, got {content!r}")
    types = _types_of(kind)
    if wrong := content.keys() ^ types.keys():
        raise ValueError(f"needs exactly {', '.join(types)}, and differs in {min(wrong)!r}")
    return kind(**{name: _value(name, types[name], content[name]) for name in types})


@functools.cache
def _types_of(kind: type) -> dict[str, object]:
    return typing.get_type_hints(kind)


def _value(name: str, wanted: object, value: object):
    if dataclasses.is_dataclass(wanted):
        return _read(wanted, value)
    if typing.get_origin(wanted) is dict and isinstance(value, dict) and all(map(_is_count, value.values())):
        return {int(key): one for key, one in value.items()}
    if typing.get_origin(wanted) is tuple and isinstance(value, list) and all(map(_is_count, value)):
        kinds = typing.get_args(wanted)
        if ... in kinds or len(kinds) == len(value):
            return tuple(value)
    if wanted is int and _is_count(value):
        return value
    if wanted is float and type(value) in (int, float) and 0 < value < math.inf:
        return value
    if wanted in (str, bool) and type(value) is wanted:
        return value
    raise ValueError(f"{name} must be {getattr(wanted, '__name__', wanted)}, got {value!r}")
