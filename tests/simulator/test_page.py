"""The page of the simulator: its program runs, and its table has what the simulator finds."""

from __future__ import annotations

import pytest
import torch

from graphar import simulator
from tests.pages import FOLDER, NEEDS_COMPILER, blocks_of
from tests.simulator.test_public_mistakes import FOLDER as KERNELS
from tests.simulator.test_public_mistakes import MISTAKES, NUMEL

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("nothing_stays_loaded")]

PAGE = FOLDER / "simulator.md"


def rows() -> dict[str, list[str]]:
    """The table of counts: by kernel, plain at 2 and 3 ranks, then its time, then the same under ThreadSanitizer."""
    table = PAGE.read_text().partition("| kernel | plain, 2 ranks |")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {name.strip("`"): others for name, *others in cells}


def test_the_program_of_the_page_runs(capsys):
    (program,) = [block for block in blocks_of(PAGE, "python") if block.text.startswith(NEEDS_COMPILER)]

    exec(program.compiled(), {})

    assert capsys.readouterr().out.startswith("one_shot_push: 2 of 2 cases passed in ")


def test_the_table_has_every_kernel_with_a_mistake():
    assert set(rows()) == {one.name for one in MISTAKES} == {file.stem for file in KERNELS.glob("*.cu")}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.name)
def test_the_table_says_how_many_seeds_find_a_mistake_without_a_sanitizer(mistake):
    algorithm = mistake.load()
    options = {"dtypes": [torch.bfloat16], "numel": NUMEL, "sanitizers": ["plain"]}

    found = [
        sum(not simulator.run(algorithm, ranks=[ranks], seeds=[seed], **options).ok for seed in range(10))
        for ranks in (2, 3)
    ]

    assert [str(one) for one in found] == rows()[mistake.name][:2]
