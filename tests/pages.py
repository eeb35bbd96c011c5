"""The README and the pages of docs/, and the code in them.

What holds for each page:

- Its first ```python block is a whole program. A command (`torchrun --nproc-per-node 2 NAME.py`, or `python NAME.py`)
  and what the program prints without GPUs follow it, where `...` stands for any text. It runs as a file.
- Its other ```python blocks run as they stand, in order, with the names of the first, on 2 ranks over gloo or as many
  as that command says. A block that begins with `# needs a GPU` runs where torch sees CUDA, and is only compiled
  elsewhere. One that begins with `# needs g++` is run by `nox -s host`, since it compiles the simulator
  (tests/simulator/test_page.py). Files that the page links to or asks to save are beside them. A page with a block that
  begins with `# pip install ...` is skipped where one of these packages is missing.
- Rows between `<!-- table: reports/... -->` and `<!-- end of table -->` have some of the report's columns, and are rows
  of the report.
- Measured numbers in prose stand in a report that the page links to, or tests/docs/test_numbers.py computes them.
- `<!-- figure: NAME -->` and `<!-- generated: NAME -->` are replaced when docs are built (docs/hooks.py).
- Links lead to other pages, and out of docs/ to `../../reports/` alone.
"""

import re
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "pages"
PAGES = [ROOT / "README.md", *sorted(FOLDER.rglob("*.md"))]
# Files that a page asks its reader to save.
SAVED = re.compile(r"[Ss]ave it as\s`([\w.]+)`:\n\n```[a-z+]+\n(.*?)```", re.DOTALL)
NEEDS_GPU, NEEDS_COMPILER = "# needs a GPU", "# needs g++"


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: the path in the repository.
        line: the number of the text's first line on the page.
    """

    page: str
    language: str
    line: int
    text: str

    def runs(self, has_gpu: bool) -> bool:
        """Whether it runs with its page."""
        return not self.text.startswith(NEEDS_COMPILER) and (has_gpu or not self.text.startswith(NEEDS_GPU))

    def packages(self) -> list[str]:
        """The packages of the `# pip install` that it begins with."""
        found = re.match(r"# pip install (.+)\n", self.text)
        return found[1].split() if found else []

    def compiled(self):
        """Its code; tracebacks name the page and its line."""
        return compile("\n" * (self.line - 1) + self.text, str(ROOT / self.page), "exec")


# A block that is a file, its name, how many ranks `torchrun` starts (None: `python` does), and what it prints.
Program = namedtuple("Program", "block name ranks prints")


def blocks_of(path: Path, language: str = r"[\w+]+") -> list[Block]:
    """The fenced blocks of a language on a page, or of all."""
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    found = []
    for fence in re.finditer(rf"^( *)```({language})\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        inside = re.sub(f"^{fence[1]}", "", fence[3], flags=re.MULTILINE)
        found.append(Block(name, fence[2], text.count("\n", 0, fence.start(3)) + 1, inside))
    return found


def programs_of(path: Path) -> list[Program]:
    """The blocks of Python of a page that a command and the text that it prints follow."""
    found, blocks = [], blocks_of(path)
    for block, command, text in zip(blocks, blocks[1:], blocks[2:], strict=False):
        run = re.match(r"(?:torchrun --nproc-per-node (\d)|python) (\w+\.py)\b", command.text)
        if (block.language, command.language, text.language) == ("python", "sh", "text") and run:
            prints = re.compile(re.escape(text.text).replace(r"\.\.\.", ".*"), re.DOTALL)
            found.append(Program(block, run[2], int(run[1]) if run[1] else None, prints))
    return found
