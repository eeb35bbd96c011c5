"""No kernel that `auto` takes between a few ranks has more code, registers or local memory than its budget.

The short run compiles one kernel of each file with each version of NVRTC. `nox -s catalogue` compiles those between
four ranks, each with one version, and with `--whole` all of them with all versions.
"""

import re
import subprocess

import pytest
from cuda.pathfinder import find_nvidia_binary_utility

from graphar.runtime.compiler import compile_kernel
from perf.cubin import code
from tests import kernel_budget
from tests.compilations import named
from tests.kernel_budget import COMMAND, Cost

BUDGET = kernel_budget.read()
STORED_NBYTES = {"": 4, ".64": 8, ".128": 16}
every_version = pytest.mark.parametrize("version", BUDGET)


def over_budget(version, sources):
    return "\n".join(kernel_budget.exceeding(kernel_budget.costs(version, sources), BUDGET[version]))


HINT = f"""
Find out what the added code is for. If it is worth it, make it the budget with `{COMMAND} --write`, and say why in the
commit. `{COMMAND} --only TEXT` compares the kernels whose names contain TEXT."""


@every_version
def test_a_kernel_of_each_file_keeps_to_its_budget(version):
    try:
        kernel_budget.libraries(version)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip does not bring NVRTC {version}: {error.stderr.decode()[-200:]}")

    assert (over := over_budget(version, kernel_budget.some())) == "", f"{over}{HINT}"


@pytest.mark.catalogue
@every_version
def test_every_kernel_keeps_to_its_budget(version, request):
    sources = kernel_budget.kernels()
    if not request.config.getoption("--whole", default=True):  # the versions take turns
        sources = kernel_budget.of_most_ranks()[list(BUDGET).index(version) :: len(BUDGET)]
    assert (over := over_budget(version, sources)) == "", f"{over}{HINT}"


@every_version
def test_the_budget_names_the_kernels_that_auto_takes(version):
    assert BUDGET[version].keys() == {source.name for source in kernel_budget.kernels()}, f"{COMMAND} --write"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Cost(1010, 64, 0, 8), []),
        (Cost(1011, 64, 0, 8), ["k: instructions 1000 -> 1011"]),
        (Cost(900, 65, 4, 16), ["k: registers 64 -> 65", "k: spilled_nbytes 0 -> 4", "k: stack_nbytes 8 -> 16"]),
    ],
)
def test_a_kernel_may_take_a_hundredth_more_instructions_and_nothing_else(found, expected):
    assert kernel_budget.exceeding({"k": found}, {"k": Cost(1000, 64, 0, 8)}) == expected


def test_a_kernel_without_a_budget_is_named():
    assert kernel_budget.exceeding({"k": Cost(1, 1, 0, 0)}, {}) == ["k has no budget"]


def test_changes_tell_what_a_kernel_took_and_takes():
    found, budget = {"k": Cost(900, 64, 0, 0), "l": Cost(1, 1, 0, 0)}, {"k": Cost(1000, 64, 8, 0)}
    assert kernel_budget.changes(found, budget) == ["k: instructions 1000 -> 900, spilled_nbytes 8 -> 0"]


def test_what_is_written_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_budget, "FILE", tmp_path / "budget.json")
    budget = {"13.0.88": {"a<1, 2>": Cost(1, 2, 3, 4)}, "13.5.37": {"a<1, 2>": Cost(5, 6, 7, 8)}}
    kernel_budget.write(budget)
    assert kernel_budget.read() == budget


def test_instructions_and_spilled_bytes_are_those_that_the_disassembler_lists(tmp_path):
    disassembler = find_nvidia_binary_utility("nvdisasm")
    if disassembler is None:
        pytest.skip("there is no nvdisasm: it comes with the CUDA toolkit, and in nvidia-cuda-nvdisasm")
    (source,) = [source for source in named() if source.name == "allgather_flagged<byte, 7>"]
    image = compile_kernel(source, kernel_budget.ARCH).image
    (tmp_path / "kernel.cubin").write_bytes(image)
    text = subprocess.run([disassembler, tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True).stdout
    listed = re.findall(r"/\*[0-9a-f]{4,}\*/ +(.*);", text)
    while listed[-1].strip() == "NOP":
        listed.pop()
    stores = [re.search(r"\bSTL(\.64|\.128)?(?=[. ])", line) for line in listed]
    found = code(image)
    assert found.instructions == len(listed)
    assert found.spilled_nbytes == sum(STORED_NBYTES[store[1] or ""] for store in stores if store) > 0
