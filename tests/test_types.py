"""Type checkers accept ordinary code: results are tensors or lists of them, by what goes in."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import graphar
from graphar.plan import algorithms
from tests.pages import FOLDER, PAGES, ROOT, SAVED, blocks_of

ORDINARY = """
import torch
import graphar
x, w = torch.ones(4), torch.ones(4)
up = torch.nn.Linear(4, 8)
rows: torch.Tensor = graphar.allreduce(x) + 1
made: torch.Tensor = graphar.empty(4, 4).view(-1)
product: torch.Tensor = graphar.fused_matmul_allreduce(x, w).relu()
lists: list[torch.Tensor] = graphar.allreduce([x, x], codec="int8")
part: torch.Tensor = graphar.reducescatter(x, axis=0).sum()
whole: torch.Tensor = graphar.allgather(x)[0]
several: tuple[torch.Tensor, ...] = graphar.allgather((x, x))
of_devices: list[torch.Tensor] = graphar.allgather(([x], [x]))[0]
first, second = graphar.allreduce_residual_rmsnorm(x, x, w)
total: torch.Tensor = first + second
normed, rest = graphar.reducescatter_residual_rmsnorm(x, x, w)
kept: torch.Tensor = normed + rest
own: torch.Tensor = graphar.fused_matmul_reducescatter(x, w) * 2
both, more = graphar.fused_matmul_allreduce_residual_rmsnorm(x, w, x, w)
half, of_half = graphar.fused_matmul_reducescatter_residual_rmsnorm(x, w, x, w)
passive: torch.Tensor = half + of_half
active: torch.Tensor = both.relu() + more
name: str = graphar.explain(x).algorithm
with graphar.Communicator(devices=["cpu", "cpu"]) as communicator:
    sums: list[torch.Tensor] = communicator.allreduce([x, x])
    same: list[torch.Tensor] = graphar.allreduce([x, x], communicator)
with graphar.Communicator() as of_group:
    one: torch.Tensor = of_group.allreduce(x) * 2
layer: torch.nn.Module = graphar.nn.RowParallelLinear(up)
graphar.fsdp.set_collectives(up, of_group, codec="int8", error_feedback=True)
"""


# The modules of torch that such code uses. With the rest of torch, mypy takes four times as long. Errors within graphar
# are not a user's.
CONFIGURATION = """
[mypy]
strict = true
untyped_calls_exclude = torch
[mypy-graphar.*]
follow_imports = silent
[mypy-torch.*,sympy.*,numpy.*,transformers.*]
follow_imports = skip
[mypy-torch,torch._C.*,torch._tensor,torch.autograd.*,torch.distributed,torch.distributed.device_mesh,torch.distributed.distributed_c10d,torch.nn.*,torch.types]
follow_imports = normal
"""


@pytest.fixture(scope="module")
def mypy(tmp_path_factory):
    """The output of mypy in strict mode for a user's files, whose texts are given by name."""
    folder = tmp_path_factory.mktemp("users")  # one, so that torch is read once
    (folder / "mypy.ini").write_text(CONFIGURATION)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--cache-dir", str(folder)]

    def check(**files):
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        names = [f"{name}.py" for name in files]
        done = subprocess.run(
            [*command, *names], cwd=folder, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    return check


needs_mypy = pytest.mark.skipif(shutil.which("mypy", path=str(Path(sys.executable).parent)) is None, reason="no mypy")

# Examples define short functions without types, replace layers of a module, and do not check for None.
LESS_STRICT = """\
# mypy: allow-untyped-defs, allow-untyped-calls, allow-redefinition-new, local-partial-types
# mypy: disable-error-code="union-attr, assignment"
"""


@needs_mypy
def test_ordinary_code_and_that_of_the_pages_pass_mypy(mypy):
    imported = {path.stem: path.read_text() for path in (FOLDER / "algorithms").glob("*.py")}
    pages = {}
    for path in PAGES:
        blocks = [block.text for block in blocks_of(path, "python")]
        saved = {name.removesuffix(".py"): text for name, text in SAVED.findall(path.read_text())}
        modules = {name: text for name, text in saved.items() if f"\nfrom {name} import " in "".join(blocks)}
        imported |= modules
        if text := "\n".join(block for block in blocks if block not in modules.values()):
            pages[f"page_{path.stem}"] = text
    assert len(pages) > 2
    files = {name: LESS_STRICT + text for name, text in (pages | imported).items()}

    said = mypy(ordinary=ORDINARY, **files)

    assert said == ""


@needs_mypy
def test_a_list_is_not_taken_for_a_tensor(mypy):
    said = mypy(wrong=ORDINARY + "wrong: torch.Tensor = graphar.allreduce([x, x])\n")

    assert "Incompatible types in assignment" in said


@needs_mypy
def test_a_name_spelt_as_torch_does_is_refused(mypy):
    said = mypy(spelt=ORDINARY + "graphar.all_reduce(x)\n")

    assert 'Module has no attribute "all_reduce"; maybe "allreduce"' in said


# Calls with a name that an option has, and with a name that it does not have.
OPTIONS = [
    ("graphar.allreduce(x, codec={})", "int8", "int9"),
    ("graphar.reducescatter([x, x], codec={})", "fp8_e4m3", "fp8"),
    ("graphar.allreduce(x, algorithm={})", "one_shot_push", "one_shot_pull"),
    ("graphar.reducescatter(x, algorithm={})", "reducescatter_push", "one_shot"),
    ("graphar.allgather(x, algorithm={})", "allgather_push", "ring"),
    ("graphar.alltoall(x, algorithm={})", "alltoall_push", "ring"),
    ("graphar.explain(x, algorithm={}).reason", "hierarchical", "hierarchic"),
    ("graphar.fused_matmul_allreduce(x, w, partition={})", "split_n", "split_k"),
    ("graphar.fused_allgather_matmul(x, w, partition={})", "chunks", "split_m"),
    ("graphar.fused_matmul_allreduce_residual_rmsnorm(x, w, x, w, partition={})", "tiles", "split_m"),
    ("graphar.reference.allreduce([x], order={})", "tree", "ring"),
    ("graphar.ddp.quantized_hook({})", "int4", "int9"),
    ("graphar.ddp.exact_hook(algorithm={})", "one_shot", "ring"),
    ("of_group.prepare(codecs=[{}])", "int2", "int1"),
]


@needs_mypy
def test_a_name_that_an_option_does_not_have_is_refused(mypy):
    right, wrong = (
        ORDINARY + "".join(f"{call.format(repr(name))}\n" for call, name in named)
        for named in ([option[:2] for option in OPTIONS], [(option[0], option[2]) for option in OPTIONS])
    )

    said = mypy(right=right, misspelt=wrong)

    first = ORDINARY.count("\n") + 1
    refused = {int(line) for line in re.findall(r"^misspelt\.py:(\d+): error: ", said, re.MULTILINE)}
    assert refused == {*range(first, first + len(OPTIONS))}, said
    assert "right.py" not in said


@pytest.mark.parametrize(
    ("op", "hints"),
    [
        ("allreduce", algorithms.AllReduceAlgorithm),
        ("reducescatter", algorithms.ReduceScatterAlgorithm),
        ("allgather", algorithms.AllGatherAlgorithm),
        ("alltoall", algorithms.AllToAllAlgorithm),
    ],
)
def test_the_types_of_algorithms_have_the_names_of_the_rows(op, hints):
    algorithm, *literals = get_args(hints)

    assert algorithm is graphar.Algorithm
    assert [name for one in literals for name in get_args(one)] == ["auto", *algorithms.NAMED[op]]


# What pyright finds no error in, in its standard mode.
WITHOUT_ERRORS = (
    *("cli", "communicator.py", "graph", "nn", "numerics", "ops", "plan", "product", "runtime", "simulator"),
)
has_pyright = shutil.which("pyright", path=str(Path(sys.executable).parent)) is not None


@pytest.mark.skipif(not has_pyright, reason="no pyright")
def test_pyright_finds_no_error_in_the_folders_that_have_none():
    checked = [str(ROOT / "graphar" / name) for name in WITHOUT_ERRORS]
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]

    done = subprocess.run([*command, *checked], cwd=ROOT, capture_output=True, text=True)

    said = json.loads(done.stdout)
    assert said["summary"]["filesAnalyzed"] > 100
    errors = [one for one in said["generalDiagnostics"] if one["severity"] == "error"]
    assert [one for one in errors if one.get("rule") != "reportMissingImports"] == []  # of what is optional


def test_the_package_says_that_it_has_types():
    assert (ROOT / "graphar" / "py.typed").exists()
