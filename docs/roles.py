"""Makes references in docstrings, :func:`allreduce` and ``graphar.allreduce``, links between API pages."""

from __future__ import annotations

import re
from pathlib import Path

import griffe

PAGES = Path(__file__).parent / "pages" / "api"


def documented() -> set[str]:
    """What has a heading on an API page."""
    pages = "\n".join(page.read_text() for page in PAGES.glob("*.md"))
    return set(re.findall(r"^::: (graphar\.[\w.]+)$", pages, re.MULTILINE))


class Roles(griffe.Extension):
    def __init__(self) -> None:
        self.documented = documented()

    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            text = re.sub(r":\w+:`([\w.]+)`", lambda role: self.linked(role[1]), obj.docstring.value)
            obj.docstring.value = re.sub(r"``(graphar\.[\w.]+)``", lambda name: self.linked(name[1]), text)

    def linked(self, name: str) -> str:
        """A name in code type; a link if it has a heading."""
        path = name if name.startswith("graphar.") else f"graphar.{name}"
        return f"[`{name}`][{path}]" if path in self.documented else f"`{name}`"
