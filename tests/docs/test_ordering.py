"""The index of memory ordering arguments names every argument in the kernels, and the file that has it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {path.relative_to(ROOT / "cuda_src").as_posix(): path for path in (ROOT / "cuda_src").rglob("*.cu*")}


def comments(path: Path) -> str:
    return "\n".join(re.findall(r"//(.*)", path.read_text()))


def test_the_index_has_each_argument_with_its_file():
    page = (ROOT / "docs/pages/internals.md").read_text()
    indexed = re.findall(r"^\| (\d+) \| .+ \| `(.+)` \|$", page, re.MULTILINE)
    found = [(n, file) for file, path in SOURCES.items() for n in re.findall(r"(?m)^ \((\d+)\) [A-Z]", comments(path))]

    assert indexed == sorted(found, key=lambda one: int(one[0]))
    assert [int(number) for number, _ in indexed] == [*range(1, len(indexed) + 1)]


def citations(text: str) -> list[tuple[str, str]]:
    """Number and file of each citation: "(9) in pipeline.cuh", or "in pipeline.cuh, (9)"."""
    before = re.findall(r"\((\d+)\) (?:in|of) (?:\w+/)*(\w+\.cuh?)\b", text)
    return before + [(number, name) for name, number in re.findall(r"\b(\w+\.cuh?), \((\d+)\)", text)]


def test_an_argument_that_is_cited_with_a_file_is_in_that_file():
    cited = [
        (number, name, path.name)
        for folder in ("cuda_src", "graphar", "tests")
        for path in (ROOT / folder).rglob("*.*")
        if path.suffix in (".py", ".cu", ".cuh")
        for number, name in citations(path.read_text())
    ]
    texts = {path.name: comments(path) for path in SOURCES.values()}

    assert len(cited) > 10
    assert [one for one in cited if not re.search(rf"(?m)^ \({one[0]}\) [A-Z]", texts[one[1]])] == []
