"""What a kernel from outside the package is made of, as bytes that ranks compare.

Its files are the kernel's file, and the files beside it that it includes. Of its specification it is what the function
computes: these bytes are equal in all processes with the same source.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_INCLUDED = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.Size)
_SHAPE_OF_CODE = ("co_flags", "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_names")
_NO_VALUE = object()  # of a name, or of a variable that is not bound yet


def files_of(source: Path, root: Path | None = None) -> dict[str, bytes]:
    """Returns the content of a file and of all files that it includes, by their paths; ``source`` is first.

    A header that lies neither beside the file that includes it, nor in ``root``, is left to the compiler. None: the
    folder of ``source``.
    """
    contents: dict[str, bytes] = {}
    left = [source]
    while left:
        path = left.pop()
        if str(path) in contents:
            continue
        contents[str(path)] = content = path.read_bytes()
        for name in _INCLUDED.findall(content):
            beside = [folder / name.decode(errors="replace") for folder in (path.parent, root or source.parent)]
            left += [Path(os.path.normpath(file)) for file in beside if file.is_file()][:1]
    return contents


def includes(source: Path, header: str) -> bool:
    """Returns whether a file, or one of the files beside it that it includes, includes a header of this name."""
    return any(header.encode() in _INCLUDED.findall(content) for content in files_of(source).values())


def digest_of(source: Path) -> str:
    """Returns a SHA-256, in hex, of what :func:`files_of` returns; it does not depend on where the files lie."""
    files = {os.path.relpath(name, source.parent): content for name, content in files_of(source).items()}
    return hashed(field for name, content in sorted(files.items()) for field in (name.encode(), content))


def hashed(fields: Iterable[bytes]) -> str:
    """Returns a SHA-256, in hex, of a list of fields."""
    digest = hashlib.sha256()
    for field in fields:
        digest.update(b"%d:" % len(field) + field)  # the lengths make the encoding of a list unique
    return digest.hexdigest()


def contents(specification: Callable) -> Iterator[bytes]:
    """Yields the code of a function, and all values that it takes from its defaults, its closure and its module.

    It may be a ``functools.partial`` or a method. Functions of other modules, classes and modules count by their names,
    all others by their code.

    Raises:
        ValueError: the function has a value that processes cannot compare, such as an object with a state.
    """
    return _Reader().read(specification, "an object")


class _Reader:
    def __init__(self) -> None:
        self._module: str | None = None  # of the first function
        self._read: dict[int, int] = {}  # the functions so far, by identity: they may call each other

    def read(self, value: Any, name: str) -> Iterator[bytes]:
        """Yields the bytes by which a value is hashed; ``name`` is its name in errors."""
        kind = type(value)
        if value is _NO_VALUE or kind in _PLAIN:
            yield f"{kind.__name__} {'' if value is _NO_VALUE else repr(value)}".encode()
        elif kind in (tuple, list, dict):
            yield f"{kind.__name__} of {len(value)}".encode()
            for part in value.items() if kind is dict else value:
                yield from self.read(part, name)
        elif kind in (set, frozenset):  # their order differs between processes
            yield from sorted(hashed(self.read(part, name)).encode() for part in value)
        elif isinstance(value, enum.Enum):
            yield f"{_name_of(kind)}.{value.name}".encode()
        elif kind is torch.Tensor:
            raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            yield from (f"{value.dtype} {list(value.shape)}".encode(), bytes(raw.tolist()))
        elif kind is functools.partial:
            yield from self.read([value.func, value.args, value.keywords], name)
        elif kind is MethodType:
            yield from self.read([value.__func__, value.__self__], name)
        elif kind is FunctionType:
            yield from self._function(value)
        elif full_name := _name_of(value):
            yield full_name.encode()
        else:
            raise ValueError(
                f"specification depends on {name} of type {kind.__module__}.{kind.__qualname__}, which ranks cannot "
                "compare; let it depend on plain values and functions only"
            )

    def _function(self, function: FunctionType) -> Iterator[bytes]:
        self._module = self._module or function.__module__
        if id(function) in self._read:
            yield f"function {self._read[id(function)]}".encode()
        elif function.__module__ != self._module and _is_found_by_name(function):
            yield f"{function.__module__}.{function.__qualname__}".encode()
        else:
            self._read[id(function)] = len(self._read)
            yield from self._code(function.__code__, function.__globals__)
            yield from self.read([function.__defaults__, function.__kwdefaults__], "a default")
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                is_bound = cell != CellType()  # an inner function may not be defined yet
                yield from self.read(cell.cell_contents if is_bound else _NO_VALUE, repr(name))

    def _code(self, code: CodeType, module: dict[str, object]) -> Iterator[bytes]:
        yield code.co_code
        yield code.co_exceptiontable
        yield repr([getattr(code, attribute) for attribute in _SHAPE_OF_CODE]).encode()
        for const in code.co_consts:
            yield from self._code(const, module) if isinstance(const, CodeType) else self.read(const, "a constant")
        names = [op.argval for op in dis.get_instructions(code) if op.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
        for name in dict.fromkeys(names):
            if name in module or not hasattr(builtins, name):
                yield from self.read(module.get(name, _NO_VALUE), repr(name))


def _name_of(value: Any) -> str:
    """Returns the name of a module, a class or a function of C; an empty string for others, and for local classes."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    owner = getattr(value, "__self__", None)
    is_free = isinstance(value, BuiltinFunctionType) and (owner is None or isinstance(owner, (ModuleType, type)))
    if not (is_free or isinstance(value, type)) or "<locals>" in value.__qualname__:
        return ""
    return f"{value.__module__}.{value.__qualname__}"


def _is_found_by_name(function: FunctionType) -> bool:
    value: object = sys.modules.get(function.__module__)
    for part in function.__qualname__.split("."):
        value = getattr(value, part, None)
    return value is function
