"""Mistakes of a file that are chosen when its program begins, so that one program has many (mutant schemata).

The statements that a mistake changes stand in the file once as they are, and once for each mistake:
`if (mistakes::chosen == 2) { changed } else { original }`. A mistake outside of functions, or in a constexpr one, is
compiled by itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from graphar.simulator.build import Mutation

_UNREAD = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
_NO_FUNCTION = re.compile(r"^\s*(?:template\s*<.*>\s*)?(?:struct|class|union|namespace|enum)\b", re.DOTALL)
_STATEMENTS = re.compile(r"(?:\)|\b(?:else|do|const|noexcept|mutable))\s*(?:->\s*[\w:<>, *&]+)?$|^\s*$")
_STEP = re.compile(r"^\s*(?:return|if|for|while|do|else|break|continue|switch)\b|^\s*[({*+-]")
# A type and a name; a structured binding; a using: what later statements may name.
_DECLARES = re.compile(
    r"^\s*(?:\[\[\w+\]\]\s*)?(?:using\b|static_assert\b|[\w:]+(?:<[^;=]*?>)?(?:::\w+)*[\s*&]+[\w\[])"
)
_CONTROL = re.compile(r"^\s*(?:#[^\n]*\n\s*)*(?:if|for|while|switch|do|else|\{)")


class NotSelectable(Exception):
    """A mistake that no statement of a function holds."""


def with_all(text: str, mistakes: Sequence[tuple[int, Mutation]]) -> str:
    """The text with all of these numbered mistakes. NotSelectable if one cannot be chosen at run time."""
    masked = _masked(text)
    changes = [(number, edit) for number, one in mistakes for edit in _edits(text, one)]
    ranges = _merged([_statements(masked, *edit) for _, edit in changes])
    outside = [edit for _, edit in changes if not any(a <= edit[0] and edit[1] <= b for a, b in ranges)]
    if outside:
        raise NotSelectable("a change beyond its statements")
    for begin, end in reversed(ranges):
        inside = {}
        for number, edit in changes:
            if begin <= edit[0] and edit[1] <= end:
                inside.setdefault(number, []).append(edit)
        choices = [
            f"if (mistakes::chosen == {n}) {{\n{_changed(text, begin, end, e)}\n}} else" for n, e in inside.items()
        ]
        text = f"{text[:begin]}\n{' '.join(choices)} {{\n{text[begin:end]}\n}}\n{text[end:]}"
    return f'#include "mistakes.hpp"\n{text}'


def can_be_chosen(text: str, one: Mutation) -> bool:
    """Whether a mistake can be chosen at run time."""
    try:
        with_all(text, [(1, one)])
    except NotSelectable:
        return False
    return True


def _masked(text: str) -> str:
    """The text with blanks in place of comments and literals."""
    return _UNREAD.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def _edits(text: str, one: Mutation) -> list[tuple[int, int, str]]:
    """Where the text changes, and to what, without what old and new text begin and end with alike."""
    one.apply(text)  # raises unless the old text is there
    first = next((i for i, (a, b) in enumerate(zip(one.old, one.new, strict=False)) if a != b), None)
    first = min(len(one.old), len(one.new)) if first is None else first
    last = 0
    while last < min(len(one.old), len(one.new)) - first and one.old[-1 - last] == one.new[-1 - last]:
        last += 1
    found, at = [], text.find(one.old)
    while at >= 0:
        begin, end = at + first, at + len(one.old) - last
        old, new = _masked(text)[begin:end], one.new[first : len(one.new) - last]
        if new.strip() != old.strip():
            begin += len(old) - len(old.lstrip()) if old.strip() else 0
            end -= len(old) - len(old.rstrip()) if old.strip() else 0
        found.append((begin, end, new))
        at = text.find(one.old, at + len(one.old))
    return found


def _changed(text: str, begin: int, end: int, edits: Sequence[tuple[int, int, str]]) -> str:
    for at, to, new in sorted(edits, reverse=True):
        text = text[:at] + new + text[to:]
        end += len(new) - (to - at)
    return text[begin:end]


def _merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found = []
    for begin, end in sorted(ranges):
        if found and begin < found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _statements(masked: str, begin: int, end: int, new: str) -> tuple[int, int]:
    """The statements that hold a change; if they declare something, up to the end of their block."""
    if not (_matches(_masked(new)) and _matches(masked[begin:end])):
        raise NotSelectable("braces that do not match")
    opened, closed = _block(masked, begin, end)
    whole = [(a, b) for a, b in _split(masked, opened + 1, closed) if a < max(end, begin + 1) and begin < b]
    if not whole:
        raise NotSelectable("no statement")
    first, last = whole[0][0], whole[-1][1]
    texts = [masked[a:b] for a, b in whole] + [part.strip() for part in new.split(";")]
    if any(_DECLARES.match(one) and not _STEP.match(one) for one in texts):
        last = closed
    variant = (masked[first:begin] + new + masked[end:last]).strip()
    if variant and variant[-1] not in ";}":
        last = closed  # what follows becomes a part of the statement
    return first, last


def _matches(text: str) -> bool:
    """Whether each brace that closes has one before it that opens, and the reverse."""
    depths = list(itertools.accumulate((one == "{") - (one == "}") for one in text))
    return min(depths, default=0) >= 0 and (not depths or depths[-1] == 0)


def _block(masked: str, begin: int, end: int) -> tuple[int, int]:
    """The places of the braces around the innermost statements of a function that hold a change."""
    enclosing = _enclosing(masked, begin, end)
    headers = [re.split(r"[;{}]", masked[:at])[-1] for at, _ in enclosing]
    for header in headers:
        if re.search(r"(?<!if )\bconst(?:expr|eval)\b", header) and not _NO_FUNCTION.match(header):
            raise NotSelectable("a constexpr function")
    for (opened, closed), header in zip(reversed(enclosing), reversed(headers), strict=True):
        if _NO_FUNCTION.match(header):
            break
        if _STATEMENTS.search(header):
            return opened, closed
    raise NotSelectable("outside of functions")


def _enclosing(masked: str, begin: int, end: int) -> list[tuple[int, int]]:
    """The braces around a change, the outermost first."""
    opened, found = [], []
    for at, one in enumerate(masked):
        if one == "{":
            opened.append(at)
        elif one == "}" and opened:
            first = opened.pop()
            if first < begin and end <= at:
                found.append((first, at))
    return found[::-1]


def _split(masked: str, begin: int, end: int) -> list[tuple[int, int]]:
    """The statements between two places of a block."""
    found, opened, first, before = [], [], begin, ""
    for at in range(begin, end):
        one = masked[at]
        if one in "({[":
            opened.append(at)
        elif one in ")}]":
            before = masked[first : opened.pop()].rstrip()
        if opened or one not in ";}" or masked[at + 1 : end].lstrip().startswith("else"):
            continue
        statement = masked[first : at + 1]
        of_control = (
            _CONTROL.match(statement) and _STATEMENTS.search(before) and not statement.lstrip().startswith("do")
        )
        if one == ";" or of_control:  # else the end of a lambda, an initializer, or a do
            found.append((first, at + 1))
            first = at + 1
    return found
