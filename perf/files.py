"""A report's files: TOPIC.json for programs, and TOPIC.md for people, which is made from it.

The JSON file is one object. It has ``schema``, the version of this format; ``topic``; ``machine``, see perf/machine.py;
``command``, the command line; and the fields of the topic's dataclass in perf/topics/. Each row is one line of the
file. Fields that were added in later versions have defaults, and others are not read, so that older files can be.

version 2   training's outcomes have ``losses``, NVLink traffic has ``links``, and compile has a ``command``
version 3   fused has ``timelines``
version 4   lossless and training have ``skipped``
version 5   model has ``generations`` and ``calls``
version 6   lossless has ``op``, ``entropy``, ``nccl_us`` and ``wrong``
version 7   fused has no ``timelines``: older files' are not read
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path

from graphar.numerics.codecs import Codec, codec

VERSION = 7


def text_of(content: dict[str, object]) -> str:
    """Returns JSON with one row per line."""
    parts = []
    for key, value in content.items():
        if isinstance(value, list) and value:
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            parts.append(f' "{key}": [\n{rows}\n ]')
        else:
            parts.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read(path: Path) -> dict[str, object]:
    """Returns the object in a report's JSON file. Only its version is checked.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not JSON, holds no object, or has an unknown version.
    """
    try:
        content = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: it is not a JSON object")
    if content.get("schema") not in range(1, VERSION + 1):
        raise ValueError(f"{path}: it has schema {content.get('schema')!r}, and this is {VERSION}")
    content.pop("timelines", None)
    return content


def to_json(value: object) -> object:
    """Returns a value as JSON types. A dataclass becomes an object of its fields and its properties in ``derived``."""
    if isinstance(value, Codec):
        names = [field.name for field in fields(value)]
        dtype = str(value.scale_dtype).removeprefix("torch.")
        return {name: getattr(value, name) for name in names} | {"scale_dtype": dtype}
    if is_dataclass(value):
        names = [field.name for field in fields(value)] + list(getattr(value, "derived", ()))
        return {name: to_json(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value


def from_json(kind: object, value: object, where: str = "") -> object:
    """Returns an instance of ``kind`` from JSON types. This is the inverse of :func:`to_json`.

    Raises:
        ValueError: ``value`` does not fit ``kind``. The message says where.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _one_of(arguments, value, where)
    if origin is list:
        return [from_json(arguments[0], item, f"{where}[{at}]") for at, item in enumerate(_checked(list, value, where))]
    if origin is dict:
        items = _checked(dict, value, where).items()
        return {arguments[0](key): from_json(arguments[1], item, f"{where}.{key}") for key, item in items}
    if kind is Codec:
        values = _checked(dict, value, where)
        return replace(codec(values["text"]), seed=values["seed"])
    if is_dataclass(kind) or typing.is_typeddict(kind):
        return kind(**_fields_of(kind, _checked(dict, value, where), where))
    return _checked(kind, value, where)


def _one_of(kinds: Sequence, value: object, where: str) -> object:
    errors = []
    for kind in kinds:
        try:
            return from_json(kind, value, where)
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _fields_of(kind, values: dict, where: str) -> dict:
    hints = _hints(kind)
    optional = set()
    if is_dataclass(kind):
        optional = {item.name for item in fields(kind) if (item.default, item.default_factory) != (MISSING, MISSING)}
    if missing := sorted(hints.keys() - values.keys() - optional):
        raise ValueError(f"{where}.{missing[0]} is missing".removeprefix("."))
    return {name: from_json(hints[name], values[name], f"{where}.{name}") for name in hints if name in values}


@functools.cache
def _hints(kind) -> dict[str, object]:
    """Returns the types of the fields, by name."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)} if is_dataclass(kind) else hints


def _checked(kind: type, value, where: str):
    right = type(value) in (int, float) if kind is float else type(value) is kind
    if not right:
        name = {list: "a list", dict: "an object"}.get(kind)
        said = f"is not {name}" if name else f"is {value!r}"
        raise ValueError(f"{where} {said}".removeprefix("."))
    return value
