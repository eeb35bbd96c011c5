"""Kernels from outside the package: compiled like graphar's, with mistakes told by file and line."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from docs import headers
from graphar.errors import CollectiveTimeout, CompileError
from graphar.numerics.dtypes import BYTE
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Kernel
from graphar.plan.policy import Chip
from graphar.plan.select import Facts, select
from graphar.plan.slices import Slice
from graphar.plan.tables import shipped_table
from graphar.plan.work import Sum
from graphar.runtime import compiler
from graphar.runtime.arguments import Record
from graphar.runtime.bind import collective
from graphar.runtime.catalogue import source_of
from graphar.runtime.compiler import cache_key, compile_kernel
from graphar.runtime.runner import COUNTERS_NBYTES, Runner
from tests.outside import FOLDER, MAX_NBYTES, PUSHED_SUM, forget_loaded, load, load_own, slots
from tests.runtime.conftest import edit, line_of


@pytest.fixture(autouse=True)
def nothing_stays_loaded(monkeypatch, tmp_path):
    forget_loaded(monkeypatch)
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path / "cache"))
    compiler.compile_kernel.cache_clear()


@pytest.fixture
def folder(tmp_path):
    """A copy of the folder with the kernel, to edit."""
    return Path(shutil.copytree(FOLDER, tmp_path / "kernels"))


def compiled(algorithm, dtype=torch.bfloat16, world_size=2):
    return compile_kernel(source_of(Kernel(algorithm, dtype), world_size), "sm_90a")


def failure(algorithm):
    with pytest.raises(CompileError) as raised:
        compiled(algorithm)
    return raised.value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_kernel_is_compiled_for_each_dtype_and_number_of_ranks(dtype, world_size):
    cubin = compiled(load(), dtype, world_size)

    assert "pushed_sum" in cubin.symbol
    assert f"Li{world_size}E" in cubin.symbol
    assert not cubin.said


@pytest.mark.parametrize(("required", "compiles"), [(headers.interface_version(), True), ("999", False)])
def test_a_kernel_that_requires_another_version_of_the_headers_does_not_compile(folder, required, compiles):
    file = folder / "pushed_sum.cu"
    check = f'static_assert(interface_version == {required}, "written for {required}");'
    edit(file, "template <class T, int N>\n", f"{check}\n\ntemplate <class T, int N>\n")
    ring = load(file)

    if compiles:
        assert "pushed_sum" in compiled(ring).symbol
    else:
        error = failure(ring)
        assert (error.file, error.line) == (str(file), line_of(file, check))
        assert "written for 999" in error.log


def test_a_kernel_that_moves_data_gets_bytes():
    source = source_of(Kernel(load(op="allgather"), BYTE), 4)

    assert (source.name, source.file) == ("pushed_sum<byte, 4>", str(PUSHED_SUM))


@pytest.mark.parametrize("op", ["allreduce", "reducescatter", "allgather"])
def test_a_kernel_of_graphars_own_may_come_from_outside(op):
    own = load_own()[op]
    (element,) = own.row.dtypes[:1]

    cubin = compiled(own, element)

    assert cubin == compiled(Algorithm(own.kernel_name), element)


# By what is wrong: a file, its text and another one in its place, and the word of that which the log names.
WRONG = {
    "a source": ("pushed_sum.cu", "output.store(i,", "output.stow(i,", "stow"),
    "a header beside it": ("slots_of_call.cuh", "call.epoch", "call.epic", "epic"),
    "a header that is nowhere": ("pushed_sum.cu", "slots_of_call.cuh", "absent.cuh", "absent.cuh"),
}


@pytest.mark.parametrize(("name", "old", "new", "word"), WRONG.values(), ids=WRONG)
def test_what_does_not_compile_is_told_with_its_own_file_and_line(folder, name, old, new, word):
    edit(folder / name, old, new)

    error = failure(load(folder / "pushed_sum.cu"))

    assert (error.file, error.line) == (str(folder / name), line_of(folder / name, new))
    assert word in error.log


def test_a_kernel_with_other_template_arguments_is_told_by_its_file(folder):
    file = folder / "pushed_sum.cu"
    edit(file, "template <class T, int N>", "template <class T>")

    error = failure(load(file))

    assert error.file == str(file)
    assert "pushed_sum" in error.log


@pytest.mark.parametrize("name", ["pushed_sum.cu", "slots_of_call.cuh"])
def test_a_file_that_was_edited_since_it_was_loaded_is_not_compiled_under_the_old_name(folder, name):
    algorithm = load(folder / "pushed_sum.cu")
    compiled(algorithm)
    (folder / name).write_text((folder / name).read_text() + "// edited\n")

    compiler.compile_kernel.cache_clear()

    assert "was edited since it was loaded; load it again" in failure(algorithm).log
    assert compiled(load(folder / "pushed_sum.cu")).symbol == compiled(load()).symbol


def test_a_file_that_is_gone_is_told(folder):
    algorithm = load(folder / "pushed_sum.cu")
    (folder / "pushed_sum.cu").unlink()

    assert "it cannot be read" in failure(algorithm).log


def test_a_header_beside_it_is_part_of_the_key_of_the_cache(folder):
    keys = []
    for _ in range(2):
        keys.append(cache_key(source_of(Kernel(load(folder / "pushed_sum.cu"), torch.bfloat16), 2), "sm_90a"))
        (folder / "slots_of_call.cuh").write_text((folder / "slots_of_call.cuh").read_text() + "// edited\n")

    assert keys[0] != keys[1]


class Nowhere:
    """A rendezvous of which one rank alone publishes what it calls."""

    def __init__(self):
        self.told = {}
        self.publish, self.withdraw = self.told.__setitem__, self.told.pop

    def published(self, name, rank):
        return self.told.get(name)


@pytest.fixture
def runner():
    """The runner of the second of two ranks, which has loaded pushed_sum, without a GPU."""
    member = SimpleNamespace(rank=1, device=0, record=Record(), record_pointer=0x30, abort=0x40)
    found = Runner([member], 2, Chip(132, "sm_90a"), None, Nowhere(), None)
    region = SimpleNamespace(pointers=[0x10000, 0x20000], multicast_pointer=0)
    found.regions[load()] = region
    return found


def test_a_launch_has_the_scratch_and_the_number_of_its_algorithm(runner):
    ring, (member,) = load(), runner.members

    arguments = runner.arguments(member, ring, Slice(1024), 2.0, "a call")

    assert (arguments.algorithm, arguments.capacity) == (len(Algorithm), MAX_NBYTES // 16)
    assert list(arguments.ring[:2]) == [0x20000 + COUNTERS_NBYTES, 0x10000 + COUNTERS_NBYTES]
    assert (arguments.numel, arguments.timeout_ns, arguments.world_size) == (1024, 2_000_000_000, 2)


def test_a_call_is_bound_to_its_kernel_and_to_a_grid_of_its_row(runner, monkeypatch):
    made = []
    monkeypatch.setattr(collective, "KernelLaunch", lambda *given: made.append(given))
    monkeypatch.setattr(collective, "bind_launch", lambda *given: lambda: None)
    monkeypatch.setattr(collective.launcher, "can_overlap", lambda device: True)
    monkeypatch.setattr(runner, "prepare", lambda kernel: [kernel])
    ring = load(threads=128, scratch=lambda n: replace(slots(n), shared_nbytes=512))
    runner.regions[ring] = runner.regions[load()]
    call = Call(Sum(1024), torch.bfloat16, 0, algorithm=ring.value)
    facts = Facts(2, shipped_table("default"), runner.chip)

    collective.bind_slice(runner, call, select(call, facts).config, Slice(1024), 1.0)

    ((kernel, (arguments,), grid),) = made
    assert kernel == Kernel(ring, torch.bfloat16)
    assert (grid.blocks, grid.threads, grid.shared_nbytes) == (1, 128, 512)
    assert arguments.algorithm == ring.number


def test_an_expired_wait_is_told_with_the_algorithms_name():
    record = Record(kind=1, algorithm=load().number, sequence=7, rank=1, peer=0, expected=3, seen=2)

    runner = SimpleNamespace(_unlike_calls=lambda *given: None, _last_calls=lambda: ["none", "pushed_sum call 7"])
    error = Runner._failure_of(runner, record)

    assert isinstance(error, CollectiveTimeout)
    assert (error.record.op, error.record.algorithm, error.record.sequence) == ("allreduce", load().value, 7)
    assert str(error).startswith(f"allreduce call 7 by {load()}: rank 1 waited past the deadline for rank 0")
