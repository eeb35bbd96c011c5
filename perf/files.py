"""The two files of a report: one for machines, whose schema is perf/schema.py, and one for people."""

from __future__ import annotations

import json
from pathlib import Path

from perf import schema


def write(folder: Path, topic: str, content: dict[str, object], text: str) -> Path:
    """``topic``.json for machines and ``topic``.md for people, whose path is returned; makes the folder.

    Args:
        content: what the schema asks of the topic.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = {"schema": schema.VERSION, "topic": topic, **content}
    (folder / f"{topic}.json").write_text(json.dumps(content, indent=1) + "\n")
    path = folder / f"{topic}.md"
    path.write_text(text)
    return path


def read(folder: Path, topic: str) -> dict[str, object]:
    """What :func:`write` wrote for machines, now or in an earlier version of the schema.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is none, or of a version that is not known.
    """
    path = folder / f"{topic}.json"
    try:
        content = json.loads(path.read_text())
        problem = schema.problem_with(content)
    except json.JSONDecodeError as error:
        problem = str(error)
    if problem:
        raise ValueError(f"{path}: {problem}")
    return schema.upgraded(content)
