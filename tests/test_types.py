"""Type checkers accept ordinary code: results are tensors or lists of them, by what goes in."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What the README's blocks speak of without defining it.
PRELUDE = """
from __future__ import annotations
from typing import Any
import torch
import torch.distributed as dist
import graphar
x, partial, residual, weight, bias, a, w, normed = [torch.ones(4)] * 8
up, down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
llama: torch.nn.Module = model
mesh, ids, next_weight = list[Any]([None] * 3)
"""

ORDINARY = """
rows: torch.Tensor = graphar.allreduce(x) + 1
made: torch.Tensor = graphar.empty(4, 4).view(-1)
product: torch.Tensor = graphar.fused_matmul_allreduce(x, w).relu()
lists: list[torch.Tensor] = graphar.allreduce([x, x], codec="int8")
part: torch.Tensor = graphar.reducescatter(x, axis=0).sum()
whole: torch.Tensor = graphar.allgather(x)[0]
first, second = graphar.allreduce_residual_rmsnorm(x, x, w)
total: torch.Tensor = first + second
own: torch.Tensor = graphar.fused_matmul_reducescatter(x, w) * 2
both, more = graphar.fused_matmul_allreduce_residual_rmsnorm(x, w, x, w)
active: torch.Tensor = both.relu() + more
name: str = graphar.explain(x).algorithm
with graphar.Communicator(devices=["cpu", "cpu"]) as communicator:
    sums: list[torch.Tensor] = communicator.allreduce([x, x])
    same: list[torch.Tensor] = graphar.allreduce([x, x], communicator)
with graphar.Communicator() as of_group:
    one: torch.Tensor = of_group.allreduce(x) * 2
layer: torch.nn.Module = graphar.nn.RowParallelLinear(up)
"""


def blocks_of(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def as_functions(blocks):
    """Each block as a function, which may define names anew."""
    return "\n".join(f"def block_{at}() -> None:\n{textwrap.indent(block, '    ')}" for at, block in enumerate(blocks))


# What of torch such code speaks of. The rest of it takes mypy four times as long to read.
CONFIGURATION = """
[mypy]
strict = true
untyped_calls_exclude = torch
[mypy-torch.*,sympy.*,numpy.*]
follow_imports = skip
[mypy-torch,torch._C.*,torch._tensor,torch.autograd.*,torch.distributed,torch.distributed.distributed_c10d,torch.nn.*,torch.types]
follow_imports = normal
"""


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    """What mypy in strict mode says of a file of a user's."""
    folder = tmp_path_factory.mktemp("users")  # one, so that torch is read once
    (folder / "mypy.ini").write_text(CONFIGURATION)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(folder), "users.py"]

    def check(text):
        (folder / "users.py").write_text(text)
        done = subprocess.run(command, cwd=folder, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
        return done.stdout + done.stderr

    return check


needs_mypy = pytest.mark.skipif(shutil.which("mypy", path=str(Path(sys.executable).parent)) is None, reason="no mypy")


@needs_mypy
def test_ordinary_code_and_the_readmes_pass_mypy_in_strict_mode(mypy):
    readme = blocks_of((ROOT / "README.md").read_text())
    assert len(readme) > 8

    said = mypy(PRELUDE + as_functions([ORDINARY, *readme]))

    assert said == ""


@needs_mypy
def test_a_list_is_not_taken_for_a_tensor(mypy):
    said = mypy(PRELUDE + "wrong: torch.Tensor = graphar.allreduce([x, x])\n")

    assert "Incompatible types in assignment" in said


def test_the_package_says_that_it_has_types():
    assert (ROOT / "graphar" / "py.typed").exists()
