"""The public headers of cuda_src/device, which kernels from outside the package may include, as their comments tell.

What a header has for such kernels is each type, constant and function with a comment directly above it. The comment of
a function is its contract: it begins with who may call it, one of CALLERS, and for an access to memory it says order
and scope. An overload without a comment has the comment of the one before it, and a member without one its type's. A
comment that begins with "Internal" takes its owner off the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from docs.tables import markdown

SOURCES = Path(__file__).parents[1] / "cuda_src"

PUBLIC = (
    "device/arguments.cuh",
    "device/pack.cuh",
    "device/parts.cuh",
    "device/sync/kernel_order.cuh",
    "device/sync/call.cuh",
    "device/sync/sentinel.cuh",
    "device/sync/flagged.cuh",
    "device/sync/signal_pad.cuh",
    "device/sync/deadline.cuh",
    "device/sync/record.cuh",
    "device/ptx/ptx.cuh",
)

CALLERS = {
    "By any thread": "each thread for itself, also where threads diverge",
    "By one thread": "for each place, one thread of the rank's grid; others may do the same elsewhere",
    "By all threads of a warp": "all 32 threads of it, converged",
    "By all threads of the block": "all threads of it, converged, since there may be a barrier in it",
}
_INTERNAL = "Internal"
_ATTRIBUTES = re.compile(r"DEVICE |__device__ |__noinline__ |explicit ")
_TYPE = re.compile(r"(?:struct|class)(?: alignas\(.+?\))? (\w+)(?:<.*>)?(?: : \w+)? \{")
_CONSTANT = re.compile(r"(?:constexpr \w+|using) (\w+).*?;")
_FIELD = re.compile(r"  ((?!using|static)(?:const )?\w+\*?) (\w+(?:, \w+)*(?:\[\w+\])*)(?: = \w+)?;(?: +// (.*))?")


@dataclass
class Entry:
    """A type, a constant, or a function with its overloads.

    Attributes:
        name: a member's begins with its type's, as in C++.
        signatures: declarations; for a type also its members' that have no comment of their own.
        contract: the comment.
        fields: of a type: the type, the name and the comment of each.
    """

    name: str
    signatures: list[str]
    contract: str
    is_function: bool = False
    fields: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def is_public(self) -> bool:
        return not self.contract.startswith(_INTERNAL)


def entries(header: str) -> list[Entry]:
    """What a header defines, in its order; the internal, too."""
    return entries_of((SOURCES / header).read_text())


def entries_of(text: str) -> list[Entry]:
    return list(_Reader(text).read())


class _Reader:
    """Reads a header line by line. Definitions begin in the first column, and members in the third."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._at = 0
        self._owner: Entry | None = None  # the type whose members follow
        self._hidden = False  # whether these are private
        self._found: dict[str, Entry] = {}
        self._last: Entry | None = None

    def read(self) -> Iterator[Entry]:
        comment: list[str] = []
        template = ""
        while self._at < len(self._lines):
            line = self._lines[self._at]
            self._at += 1
            indent = "  " if self._owner else ""
            if line.startswith(f"{indent}//"):
                comment.append(line.strip().removeprefix("//").strip())
                continue
            if line.startswith(f"{indent}template <"):
                template = line.strip()
                continue
            found = self._entry(line, indent, template, " ".join(comment).strip())
            if found:
                self._found[found.name] = self._last = found
                yield found
            comment, template = [], ""

    def _entry(self, line: str, indent: str, template: str, comment: str) -> Entry | None:
        """The entry that begins in a line, if one does."""
        if line == "};":
            self._owner, self._hidden = None, False
        elif line.startswith(" private:"):
            self._hidden = True
        elif re.match(rf"{indent}(?!#)\S", line) and re.search(r"\b(?:DEVICE|__device__) ", line):
            return None if self._hidden else self._function(line, template, comment)
        elif not self._owner and (found := _TYPE.match(line)):
            if "<>" in template:  # a specialisation
                self._owner = self._last
                return None
            self._owner = Entry(found[1], [f"{template} {line.removesuffix(' {')}".strip()], comment)
            if line.endswith("};"):
                owner, self._owner = self._owner, None
                return owner
            return self._owner
        elif not self._owner and comment and (found := _CONSTANT.match(line)):
            return Entry(found[1], [f"{template} {found[0].removesuffix(';')}".strip()], comment)
        elif self._owner and not self._hidden and (found := _FIELD.match(line)):
            self._owner.fields.append((found[1], found[2], found[3] or ""))
        return None

    def _function(self, line: str, template: str, comment: str) -> Entry | None:
        while not _closed(line):
            line += f" {self._lines[self._at].strip()}"
            self._at += 1
        signature = f"{template} {_declaration(line)}".strip()
        name = re.search(r"(operator\(\)|\w+)\(", _declaration(line))[1]
        if self._owner:
            if not comment:
                self._owner.signatures.append(signature)
                return None
            signature = re.sub(rf"(?<![\w:]){re.escape(name)}\(", f"{self._owner.name}::{name}(", signature, count=1)
            name = f"{self._owner.name}::{name}"
            if not self._owner.is_public:
                comment = comment if comment.startswith(_INTERNAL) else f"{_INTERNAL}: {comment}"
        if not comment and name in self._found:
            self._found[name].signatures.append(signature)
            return None
        return Entry(name, [signature], comment, is_function=True)


def _closed(line: str) -> bool:
    return "(" in line and line.count("(") == line.count(")")


def _declaration(line: str) -> str:
    """A function without its attributes and its body."""
    text = _ATTRIBUTES.sub("", line.strip())
    depth = 0
    begin = text.index("operator()") + len("operator()") if "operator()" in text else 0
    for at, one in enumerate(text[begin:], begin):
        depth += (one == "(") - (one == ")")
        if one == ")" and depth == 0:
            return text[: at + 1] + (" const" if text[at + 1 :].startswith(" const") else "")
    return text


def about(header: str) -> str:
    """What a header says of itself: the first paragraph of its opening comment."""
    opening = (SOURCES / header).read_text().split("#pragma once")[0]
    return " ".join(line.removeprefix("//").strip() for line in opening.split("\n//\n")[0].splitlines())


# ---- what docs/pages/primitives.md shows ----------------------------------------------------------------------------


def interface_version() -> str:
    text = (SOURCES / "device/arguments.cuh").read_text()
    return re.search(r"^constexpr int interface_version = (\d+);", text, re.MULTILINE)[1]


def callers() -> str:
    return markdown(["contract", "called by"], [[f"`{name}`", meaning] for name, meaning in CALLERS.items()])


def arguments() -> str:
    (one,) = (entry for entry in entries("device/arguments.cuh") if entry.name == "Arguments")
    return markdown(
        ["field", "type", "meaning"], [[f"`{name}`", f"`{kind}`", _cell(says)] for kind, name, says in one.fields]
    )


def primitives() -> str:
    """A section for each public header: what it says of itself, and a table of what it has."""
    sections = []
    for header in PUBLIC:
        lines = [["<br>".join(f"`{text}`" for text in declared(one)), _cell(one.contract)] for one in shown(header)]
        sections.append(f"### {header}\n\n{_cell(about(header))}\n\n{markdown(['signature', 'contract'], lines)}")
    return "\n\n".join(sections)


def shown(header: str) -> list[Entry]:
    return [one for one in entries(header) if one.is_public]


def declared(one: Entry) -> list[str]:
    """The declarations of an entry and of its fields, but for Arguments, whose fields have a table."""
    fields = [] if one.name == "Arguments" else [f"{kind} {name}" for kind, name, _ in one.fields]
    return [one.signatures[0], *fields, *one.signatures[1:]]


def _cell(text: str) -> str:
    """Text outside code, with no marks of Markdown."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<\[|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)
