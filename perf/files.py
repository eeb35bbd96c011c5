"""The two files of a report."""

from __future__ import annotations

import json
from pathlib import Path


def write(folder: Path, name: str, content: dict[str, object], text: str) -> Path:
    """``name``.json for machines and ``name``.md for people, whose path is returned; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    path = folder / f"{name}.md"
    path.write_text(text)
    return path
