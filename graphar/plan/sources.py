"""The files of a kernel from outside the package: the kernel's file, and the files beside it that it includes."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

_INCLUDED = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def files_of(source: Path) -> dict[str, bytes]:
    """Returns the content of a file and of all files that it includes, by their paths; ``source`` is first.

    A header that is neither beside the file that includes it, nor beside ``source``, is left to the compiler.
    """
    contents: dict[str, bytes] = {}
    left = [source]
    while left:
        path = left.pop()
        if str(path) in contents:
            continue
        contents[str(path)] = content = path.read_bytes()
        for name in _INCLUDED.findall(content):
            beside = [folder / name.decode(errors="replace") for folder in (path.parent, source.parent)]
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
