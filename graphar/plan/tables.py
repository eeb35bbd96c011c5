"""Tuning tables: the fastest algorithm and grid by size, measured on a kind of machine; and what a call finds there."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import typing
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import pairwise
from typing import Any

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.plan.algorithms import Algorithm, in_tables, is_from_outside, is_loaded
from graphar.plan.config import Config
from graphar.plan.policy import Policies
from graphar.plan.scratch import PACK_NBYTES, WARP, WORLD_SIZES

DEFAULT = "default"


@dataclass(frozen=True)
class Table(Policies):
    """The measurements of one kind of machine."""

    name: str  # the device's name as :func:`slug` gives it, or "default". Explanations name the table by it
    machine: str  # the machine that was measured
    date: str  # the date of the measurement
    report: str | None  # the path of the report with the figures, or None
    # By world size, the entries of all-reduces: the bytes of the largest tensor (None: any), an algorithm and its grid.
    rows: dict[int, list[dict]]
    # By op, the entries of reduce-scatters, all-gathers and all-to-alls, by the bytes of the largest part.
    parts: dict[str, list[dict]]
    # By world size, the points [bytes of one rank's tensor, microseconds of the chosen entry], sizes ascending.
    measured: dict[int, list[list]] = field(default_factory=dict)
    # By world size and a codec's text, the points [bytes of a bf16 tensor, microseconds], sizes ascending.
    codecs: dict[int, dict[str, list[list]]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str | bytes) -> Table:
        """Returns the table that ``to_json`` wrote; ValueError says what is wrong with another text.

        The default table supplies sections that are left out, and ops that an earlier release did not have.
        """
        sections, default = _sections(json.loads(text)), shipped_table(DEFAULT)
        sections["parts"] = default.parts | sections.get("parts", {})
        return cls(**{key: getattr(default, key) for key in POLICIES} | sections)

    def to_json(self) -> str:
        """Returns the table as JSON text, with one entry a line."""
        sections = _written(self)
        sections |= {key: dict(sorted(sections[key].items())) for key in _BY_WORLD_SIZE}
        return _text({key: sections[key] for key in _FIELDS if sections[key] or key in _REQUIRED}) + "\n"


def _text(value: Any, indent: str = "") -> str:
    """Returns JSON text: the table, its sections, objects of lists and lists of objects have an entry a line."""
    is_object = isinstance(value, dict)
    inside = value.values() if is_object else value if isinstance(value, list) else ()
    is_section = is_object and len(indent) < 4
    if not is_section and not any(isinstance(entry, list if is_object else dict) for entry in inside):
        return json.dumps(value)
    names = [f'"{name}": ' for name in value] if is_object else [""] * len(value)
    lines = [f"{indent}  {name}{_text(entry, indent + '  ')}" for name, entry in zip(names, inside, strict=True)]
    begin, end = "{}" if is_object else "[]"
    return begin + "\n" + ",\n".join(lines) + f"\n{indent}{end}"


def slug(device_name: str) -> str:
    """Returns the name of a device's table: "nvidia_h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "_", device_name.lower()).strip("_")


@functools.cache
def shipped_table(name: str) -> Table:
    """Returns the table ``name`` of graphar/plan/tables, or the default table if there is none."""
    file = resources.files("graphar.plan").joinpath("tables", f"{name}.json")
    if name == DEFAULT:
        return Table(**_sections(json.loads(file.read_text())))
    return Table.from_json(file.read_text()) if file.is_file() else shipped_table(DEFAULT)


def config_of(entry: dict) -> Config:
    """Returns the configuration that an entry names, with the most blocks that a call may have."""
    return Config(Algorithm(entry["algorithm"]), entry["blocks"], entry["threads"], entry.get("chunk", 0))


def entry_of(config: Config, max_nbytes: int | None) -> dict:
    """Returns the entry by which calls of up to ``max_nbytes`` take ``config``; None: of any size."""
    grid = {"blocks": config.blocks, "threads": config.threads} | ({"chunk": config.chunk} if config.chunk else {})
    return {"max_nbytes": max_nbytes, "algorithm": config.algorithm.value} | grid


def fitted(most: Config, world_size: int, nbytes: int) -> Config:
    """Returns a configuration for ``nbytes``, with as many of its blocks as have work, or one more."""
    row, threads = most.algorithm.row, most.threads
    if row.in_groups:
        threads = max(1, threads // (WARP * world_size)) * WARP * world_size
    packs, in_block = -(-nbytes // PACK_NBYTES), row.packs_a_block(world_size, threads, most.chunk)
    blocks = max(1, -(-packs // in_block)) + row.tells
    return replace(most, blocks=min(most.blocks, blocks), threads=threads)


def by_entries(entries: Sequence[dict], world_size: int, nbytes: int, algorithm: Algorithm | None = None) -> Config:
    """Returns the configuration of a call of ``nbytes``, by its first entry of an algorithm that is loaded and fits.

    With ``algorithm`` the configuration has this algorithm: by its first entry that fits, else by its last entry, or
    with its default grid if it has no entry.
    """
    known = [entry for entry in entries if entry["algorithm"] == algorithm.value] if algorithm else loaded(entries)
    if algorithm is not None and not known:
        return fitted(Config(algorithm, *algorithm.row.default_grid(world_size, nbytes)[:3]), world_size, nbytes)
    return fitted(config_of(next(_fitting(known, nbytes), known[-1])), world_size, nbytes)


def loaded(entries: Sequence[dict]) -> list[dict]:
    """Returns the entries, but for algorithms from outside the package that this process has not loaded."""
    return [entry for entry in entries if is_loaded(entry["algorithm"])]


def named_by(entries: Sequence[dict], nbytes: int) -> str:
    """Returns the algorithm by which a call of ``nbytes`` goes, or would go if it were loaded."""
    return next(_fitting(entries, nbytes))["algorithm"]


def _fitting(entries: Sequence[dict], nbytes: int) -> Iterator[dict]:
    return (entry for entry in entries if entry["max_nbytes"] is None or nbytes <= entry["max_nbytes"])


def serving(table: Table, world_size: int) -> Table:
    """Returns ``table``, or the default table if it has no entries for ``world_size``."""
    return table if world_size in table.rows else shipped_table(DEFAULT)


def measured_config(table: Table, world_size: int, nbytes: int, algorithm: Algorithm | None = None) -> Config:
    """Returns the configuration of an exact all-reduce of ``nbytes`` a rank, as :func:`by_entries` does."""
    return by_entries(serving(table, world_size).rows[world_size], world_size, nbytes, algorithm)


def expected_us(table: Table, world_size: int, nbytes: int) -> float | None:
    """Returns the expected microseconds of the exact all-reduce that the table chooses; None without measurements."""
    return _between(serving(table, world_size).measured.get(world_size, []), nbytes)


def expected_quantized_us(table: Table, codec: Codec, world_size: int, numel: int) -> float | None:
    """Returns the expected microseconds of an all-reduce of ``numel`` elements with ``codec``; None if not measured.

    It goes by the measured codec with the nearest bits per element, among codecs that use the same kernels.
    """
    measured = serving(table, world_size).codecs.get(world_size, {}).items()
    codecs = [(codec_of_text(text), points) for text, points in measured]
    alike = [(other, points) for other, points in codecs if other.spares_a_word == codec.spares_a_word]
    _, points = min(alike, key=lambda pair: abs(pair[0].bits_per_element - codec.bits_per_element), default=(codec, []))
    return _between(points, numel * torch.bfloat16.itemsize)


def _between(points: list[list], nbytes: int) -> float | None:
    """Returns the time for a size, by a power law between the two nearest measured sizes.

    Smaller sizes take the time of the smallest. Larger sizes take the bytes per microsecond of the largest.
    """
    if not points:
        return None
    at = bisect_left(points, nbytes, key=lambda point: point[0])
    if at == 0:
        return points[0][1]
    (low, low_us), (high, high_us) = points[at - 1], points[min(at, len(points) - 1)]
    if at == len(points):
        return high_us * nbytes / high
    return low_us * (nbytes / low) ** (math.log(high_us / low_us) / math.log(high / low))


POLICIES: dict[str, Any] = typing.get_type_hints(Policies)
_HEAD = {"name": str, "machine": str, "date": str, "report": (str, type(None))}
_BY_WORLD_SIZE = ("rows", "measured", "codecs")
_FIELDS = _HEAD | dict.fromkeys((*_BY_WORLD_SIZE, "parts", *POLICIES), dict)
_REQUIRED = {*_HEAD, "rows"}  # the default table supplies the others
_PART_OPS = ("reducescatter", "allgather", "alltoall")
_NUMBERS = ("max_nbytes", "blocks", "threads")  # of every entry


def require(holds: bool, rule: str) -> None:
    """Raises ValueError, which says the rule, unless it holds."""
    if not holds:
        raise ValueError(rule)


@contextmanager
def inside(what: str) -> Iterator[None]:
    """Puts the name of a section in front of what the checks inside raise."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: {error}") from error


def _sections(content: Any) -> dict[str, Any]:
    """Returns the fields of a table by the JSON of it."""
    require(isinstance(content, dict), "it is not a JSON object")
    if unknown := content.keys() - _FIELDS.keys():
        raise ValueError(f"it has an unknown field {min(unknown)!r}")
    for key, kind in _FIELDS.items():
        field = content.get(key, ... if key in _REQUIRED else {})
        require(isinstance(field, kind), f"its field {key!r} is missing or of another type")
    for world_size, entries in content["rows"].items():
        require(world_size in map(str, WORLD_SIZES), f"its rows are for {world_size!r} ranks")
        with inside(f"{world_size} ranks"):
            _check_entries(entries, "allreduce", [int(world_size)])
    for key, check in (("measured", _check_points), ("codecs", _check_codecs)):
        for world_size, of_it in content.get(key, {}).items():
            require(world_size in content["rows"], f"it has {key} points for {world_size!r} ranks and no rows")
            with inside(f"{world_size} ranks"):
                check(of_it)
    sections = dict(content)
    for key in _BY_WORLD_SIZE:
        sections[key] = {int(world_size): of_it for world_size, of_it in content.get(key, {}).items()}
    if "parts" in content:
        require(content["parts"].keys() <= set(_PART_OPS), f"its parts must be of {', '.join(_PART_OPS)}")
        for op, entries in content["parts"].items():
            with inside(op):
                _check_entries(entries, op, WORLD_SIZES)
    for key in [key for key in POLICIES if key in content]:
        with inside(key):
            sections[key] = _read(POLICIES[key], content[key])
    return sections


def _check_codecs(by_codec: Any) -> None:
    require(isinstance(by_codec, dict), "codecs must be an object")
    for text, points in by_codec.items():
        with inside("codecs"):
            codec_of_text(text)
        _check_points(points, f"points of {text}")


def _check_points(points: Any, name: str = "measured points") -> None:
    are_pairs = isinstance(points, list) and all(isinstance(point, list) and len(point) == 2 for point in points)
    are_measured = are_pairs and all(_is_count(nbytes) and _is_positive(us) for nbytes, us in points)
    ascend = are_measured and all(below[0] < above[0] for below, above in pairwise(points))
    require(ascend, f"{name} must be [bytes, microseconds], positive, sizes ascending")


def _check_entries(entries: Any, op: str, world_sizes: Sequence[int]) -> None:
    require(isinstance(entries, list) and bool(entries), "rows must be a list of at least one")
    for at, entry in enumerate(entries):
        with inside(f"row {at}"):
            _check_entry(entry, op, world_sizes)
    require(not is_from_outside(entries[-1]["algorithm"]), "the last row must be of an algorithm of graphar's own")
    *limits, last = [entry["max_nbytes"] for entry in entries]
    require(None not in limits and last is None, "the last row, and only that, must have no max_nbytes")
    require(all(below < above for below, above in pairwise(limits)), "rows must be sorted by max_nbytes")


def _check_entry(entry: Any, op: str, world_sizes: Sequence[int]) -> None:
    name = entry.get("algorithm") if isinstance(entry, dict) else None
    if is_from_outside(name) and not is_loaded(name):  # its row is not known, and calls pass over it
        _check_numbers(entry, [*_NUMBERS, *(["chunk"] if "chunk" in entry else [])])
        return
    known = in_tables(op)
    require(name in known, f"algorithm must be one of {', '.join(algorithm.value for algorithm in known)}")
    can = Algorithm(name).row
    _check_numbers(entry, [*_NUMBERS, *(["chunk"] if can.chunked else [])])
    for world_size in world_sizes:
        require(world_size in can.world_sizes, f"{name} does not serve {world_size} ranks")
        largest, capacity = can.limit(world_size), can.scratch(world_size).capacity
        fits = largest is None or (entry["max_nbytes"] or math.inf) <= largest
        require(fits, f"{name} takes at most {largest} bytes")
        require(entry.get("chunk", 0) <= capacity, f"{name} has chunks of at most {capacity} packs")
    are_warps = entry["threads"] % WARP == 0 and entry["threads"] <= can.max_threads
    require(are_warps, f"threads of {name} must be a multiple of {WARP}, at most {can.max_threads}")
    require(can.only_threads in (None, entry["threads"]), f"{name} has {can.only_threads} threads")
    require(entry["blocks"] <= can.max_blocks, f"{name} has at most {can.max_blocks} blocks")


def _check_numbers(entry: dict, names: Sequence[str]) -> None:
    numbers = ", ".join(sorted(names))
    require(entry.keys() == {"algorithm", *names}, f"{entry['algorithm']} needs exactly {numbers}")
    are_counts = all(_is_count(entry[key]) or (key == "max_nbytes" and entry[key] is None) for key in names)
    require(are_counts, f"{numbers} must be positive integers")


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _written(section: Any) -> dict[str, Any]:
    values = {name: getattr(section, name) for name in _types_of(type(section))}
    return {name: _written(value) if dataclasses.is_dataclass(value) else value for name, value in values.items()}


def _read(kind: type, content: Any) -> Any:
    """Returns a dataclass from the JSON of its ``asdict``; ValueError says what is wrong with other content."""
    if not isinstance(content, dict):
        raise ValueError(f"must be an object, got {content!r}")
    types = _types_of(kind)
    optional = {field.name for field in dataclasses.fields(kind) if field.default_factory is not dataclasses.MISSING}
    if wrong := (content.keys() | optional) ^ types.keys():
        raise ValueError(f"needs exactly {', '.join(types)}, and differs in {min(wrong)!r}")
    return kind(**{name: _value(name, types[name], value) for name, value in content.items()})


@functools.cache
def _types_of(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.metadata.get("measured", True)}


def _point(name: str, kind: type, content: Any) -> Any:
    types = typing.get_type_hints(kind)
    if not isinstance(content, list) or len(content) != len(types):
        raise ValueError(f"{name} must have points [{', '.join(types)}], got {content!r}")
    return kind(*[_value(f"{field} of {name}", types[field], x) for field, x in zip(types, content, strict=True)])


def _value(name: str, wanted: Any, value: Any) -> Any:
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        return _read(wanted, value)
    if typing.get_origin(wanted) is dict and isinstance(value, dict) and all(map(_is_count, value.values())):
        return {int(key): number for key, number in value.items()}
    if typing.get_origin(wanted) is tuple and isinstance(value, list):
        kind, _ = typing.get_args(wanted)
        return tuple([_point(name, kind, point) for point in value])
    if wanted is int and _is_count(value):
        return value
    if wanted is float and _is_positive(value):
        return value
    if wanted in (str, bool) and type(value) is wanted:
        return value
    raise ValueError(f"{name} must be {getattr(wanted, '__name__', wanted)}, got {value!r}")
