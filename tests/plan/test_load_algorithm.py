"""graphar.load_algorithm: what its result stands for, and which rows and sources it refuses."""

import inspect
import os
import runpy
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import graphar
from graphar.numerics.dtypes import BYTE
from graphar.plan.row import FLOATS, Grid
from graphar.plan.scratch import MAX_BLOCKS, SIGNAL_PAD_NBYTES, Scratch
from graphar.plan.slices import Slice, slices
from tests.outside import FOLDER, MAX_NBYTES, load, slots

pytestmark = pytest.mark.usefixtures("nothing_stays_loaded")

SOURCE = FOLDER / "pushed_sum.cu"


@pytest.fixture
def folder(tmp_path):
    """A copy of the folder with the kernel, to edit."""
    return Path(shutil.copytree(FOLDER, tmp_path / "kernels"))


def reversed_sum(tensors):
    return sum(reversed(tensors))


def test_the_name_has_the_kernels_and_twelve_digits():
    name, at, digits = load().partition("@")

    assert (name, at) == ("pushed_sum", "@")
    assert len(digits) == 12
    assert set(digits) <= set("0123456789abcdef")


def test_the_same_file_and_row_are_the_same_algorithm_wherever_the_file_lies(folder):
    assert load() is load()
    assert load(folder / "pushed_sum.cu") == load()


@pytest.mark.parametrize("file", ["pushed_sum.cu", "slots_of_call.cuh"])
def test_an_edited_file_is_another_algorithm(folder, file):
    before = load(folder / "pushed_sum.cu")

    (folder / file).write_text((folder / file).read_text() + "// edited\n")

    assert load(folder / "pushed_sum.cu") != before


def test_a_file_beside_it_that_it_does_not_include_is_no_part_of_it(folder):
    before = load(folder / "pushed_sum.cu")

    (folder / "other.cuh").write_text("// new\n")

    assert load(folder / "pushed_sum.cu") == before


@pytest.mark.parametrize(
    "row",
    [
        {"op": "reducescatter"},
        {"scratch": lambda n: Scratch.of_slots(3 * n, MAX_NBYTES, fill=0xFF)},
        {"dtypes": [torch.float32]},
        {"max_nbytes": 1 << 19},
        {"threads": 128},
        {"blocks": 64},
        {"blocks": lambda nbytes: 64},
        {"chunk": 64},
        {"world_sizes": [2, 4]},
        {"minimum_arch": 90},
        {"specification": reversed_sum},
        {"specification": lambda tensors: sum(tensors)},
    ],
    ids=lambda row: next(iter(row)),
)
def test_another_row_is_another_algorithm(row):
    assert load(**row) != load()


def test_functions_of_equal_values_are_equal():
    rows = [{"blocks": lambda nbytes: min(64, 1 + nbytes // 4096)} for _ in range(2)]

    assert load(**rows[0], max_nbytes=lambda n: MAX_NBYTES) == load(**rows[1])


SCALE = 2.0


def scaled(tensors, by=SCALE, *, then=None):
    return sum(tensors) * by


def scaled_by_the_module(tensors):
    return scaled(tensors, SCALE)


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, tensors):
        return sum(tensors) * self.by

    @staticmethod
    def twice(tensors):
        return sum(tensors) * 2


def depending_on(value, default=None):
    def specification(tensors, default=default):
        return sum(tensors) * value if default is None else value

    return specification


def calling(inner):
    """A function with inner functions that call each other."""

    def outer(tensors):
        return inner(tensors) if len(tensors) else again()

    def again():
        return outer([])

    return outer


# Makers of specifications, of which any two differ in one thing only.
UNLIKE = {
    "code": [lambda: reversed_sum, lambda: lambda tensors: sum(reversed(tensors[1:]))],
    "attributes": [lambda: lambda xs: torch.stack(xs).amax(0), lambda: lambda xs: torch.stack(xs).amin(0)],
    "constants": [lambda value=value: depending_on(value) for value in (1, 1.0, True, -0.0, 0.0, "1", b"1", None)],
    "containers": [lambda value=value: depending_on(value) for value in ((1, 2), [1, 2], {1: 2}, {1, 2}, [[1], 2])],
    "tensors": [lambda at=at: depending_on(torch.arange(2) + at) for at in (0, 1)],
    "names": [lambda value=value: depending_on(value) for value in (torch.bfloat16, torch.float16, torch.add, Scaled)],
    "a default": [lambda value=value: depending_on(1, value) for value in (None, 1, 2)],
    "an inner function": [lambda by=by: calling(depending_on(by)) for by in (1, 2)],
    "a partial": [lambda by=by, one=one: partial(one, by=by) for by in (1, 2) for one in (scaled, reversed_sum)],
    "a keyword": [lambda how=how: partial(scaled, **how) for how in ({"by": 1}, {"then": 1})],
    "a static method": [lambda: Scaled.twice, lambda: scaled],
}


@pytest.mark.parametrize("makers", UNLIKE.values(), ids=UNLIKE)
def test_specifications_that_differ_are_different_algorithms_and_equal_ones_are_the_same(makers):
    """A later one does not change what an earlier one computes."""
    made = [make() for make in makers]
    loaded = [load(specification=one) for one in made]
    again = [load(specification=make()) for make in makers]

    assert len(set(loaded)) == len(makers)
    assert loaded == again
    assert [one.row.specification for one in loaded] == made


def test_what_a_specification_takes_from_its_module_is_part_of_it(monkeypatch):
    before = load(specification=scaled_by_the_module)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    other_scale = load(specification=scaled_by_the_module)
    monkeypatch.setitem(globals(), "scaled", lambda tensors, by: sum(tensors) / by)

    assert len({before, other_scale, load(specification=scaled_by_the_module)}) == 3


@pytest.mark.parametrize(
    ("specification", "on"),
    [
        (Scaled(2), "an object of type .*Scaled"),
        (depending_on(Scaled(2)), "'value' of type .*Scaled"),
        (depending_on([Scaled(2)]), "'value' of type .*Scaled"),
        (depending_on(1, Scaled(2)), "a default of type .*Scaled"),
        (Scaled(2).__call__, "an object of type .*Scaled"),
        (partial(scaled, by=Scaled(2)), "an object of type .*Scaled"),
        (depending_on([].append), "'value' of type builtins.builtin_function"),
        (depending_on(type("Local", (), {"__qualname__": "f.<locals>.Local"})), "'value' of type builtins.type"),
    ],
)
def test_a_specification_that_ranks_cannot_compare_is_refused(specification, on):
    with pytest.raises(ValueError, match=rf"load_algorithm: specification depends on {on}.*, which ranks cannot comp"):
        load(specification=specification)


def name_in_a_new_process(seed):
    code = (
        "from tests.plan.test_load_algorithm import *\n"
        "print(load(specification=depending_on([{'b', 'a', 'c'}, frozenset({1, 'd'}), {'a': torch.ones(2)}, calling])))"
    )
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_processes_give_a_specification_the_same_name():
    assert name_in_a_new_process(1) == name_in_a_new_process(2)


def test_an_earlier_algorithm_goes_on_where_its_file_lies_now(folder):
    earlier = load(folder / "pushed_sum.cu", specification=reversed_sum)

    assert load(specification=reversed_sum) is earlier
    assert Path(earlier.row.folder) == FOLDER


def test_the_row_is_what_was_given():
    row = load(threads=128, blocks=32, dtypes={torch.float32, torch.bfloat16}, world_sizes=(4, 2)).row

    assert (row.op, row.dtypes, row.world_sizes) == ("allreduce", (torch.bfloat16, torch.float32), (2, 4))
    assert (row.limit(2), row.limit(4), row.scratch(4)) == (MAX_NBYTES, MAX_NBYTES, slots(4))
    assert row.default_grid(2, 1 << 20) == Grid(32, 128)
    assert (row.max_blocks, row.max_threads, row.exact) == (32, 128, True)


@pytest.mark.parametrize(
    ("op", "dtypes", "expected"),
    [
        ("allreduce", None, (FLOATS, Slice(8))),
        ("reducescatter", None, (FLOATS, Slice(8, (0, 4), (4, 4)))),
        ("allgather", None, ((BYTE,), Slice(16, (0, 8), (8, 8)))),
        ("allgather", [torch.float16], ((torch.float16,), Slice(8, (0, 4), (4, 4)))),
    ],
)
def test_an_all_gather_moves_bytes_unless_it_has_dtypes(op, dtypes, expected):
    algorithm, counts = load(op=op, dtypes=dtypes), (8,) if op == "allreduce" else (4, 4)

    assert (algorithm.row.dtypes, *slices(algorithm, 2, counts, itemsize=2)) == expected


def test_blocks_may_be_a_function_of_the_size():
    row = load(blocks=lambda nbytes: 8 if nbytes < 4096 else 64).row

    assert [row.default_grid(2, nbytes).blocks for nbytes in (4095, 4096)] == [8, 64]
    assert row.max_blocks == MAX_BLOCKS


def test_one_with_a_specification_of_its_own_is_not_exact_and_no_candidate_of_tuning():
    row = load(specification=reversed_sum).row

    assert (row.exact, row.candidates) == (False, None)


def test_scratch_with_a_sentinel_may_be_smaller_for_a_specification_of_its_own():
    """Its wire may be narrower than the tensor."""
    assert load(max_nbytes=1 << 24, specification=reversed_sum).row.limit(2) == 1 << 24


def test_a_signal_pad_comes_before_the_slots():
    one = Scratch.of_slots(4, 1024, signal_pad=True, shared_nbytes=512)

    assert (one.capacity, one.nbytes, one.fill, one.shared_nbytes) == (64, SIGNAL_PAD_NBYTES + 4096, 0, 512)


@pytest.mark.parametrize(
    "given",
    [
        {"slots": 0, "slot_nbytes": 1024},
        {"slots": 2, "slot_nbytes": 0},
        {"slots": 2, "slot_nbytes": 1000},
        {"slots": 2, "slot_nbytes": 1024, "fill": 256},
        {"slots": 2, "slot_nbytes": 1024, "fill": 1, "signal_pad": True},
        {"slots": 2, "slot_nbytes": 1024, "shared_nbytes": 1 << 20},
    ],
)
def test_scratch_with_a_number_out_of_range_is_refused(given):
    with pytest.raises(ValueError, match=r"^Scratch: "):
        Scratch.of_slots(**given)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"op": "broadcast"}, "op must be one of allreduce, reducescatter, allgather, got 'broadcast'"),
        ({"scratch": 1 << 20}, "scratch must be a graphar.Scratch, or a function that returns one, got 1048576"),
        ({"scratch": lambda n: None}, "scratch must be a graphar.Scratch, or a function that returns one, got None"),
        ({"scratch": Scratch(64, 512, 0)}, "scratch of 2 ranks has 512 bytes and a slot of 1024"),
        ({"dtypes": [torch.int8]}, "dtypes must be some of torch.bfloat16, .*, got "),
        ({"dtypes": []}, "dtypes must be some of"),
        ({"max_nbytes": 0}, "max_nbytes of 2 ranks must be a number from 1 to"),
        ({"max_nbytes": lambda n: -1}, "max_nbytes of 2 ranks must be"),
        ({"max_nbytes": None}, "max_nbytes must be given for scratch with a sentinel"),
        ({"max_nbytes": 1 << 24}, "scratch of 2 ranks has 4194304 bytes, and peers push 8388608 or more"),
        ({"op": "allgather", "max_nbytes": 1 << 23}, "scratch of 2 ranks has 4194304 bytes, and peers push 8388608"),
        ({"threads": 100}, "threads must be a multiple of 32, got 100"),
        ({"threads": 2048}, "threads must be a number from 1 to 1024, got 2048"),
        ({"blocks": 257}, "blocks must be a number from 1 to 256, got 257"),
        ({"blocks": lambda nbytes: 0}, "blocks for 16 bytes must be a number from 1 to 256, got 0"),
        ({"chunk": 1 << 20}, "chunk must be a number from 0 to 65536, got 1048576"),
        ({"world_sizes": [1, 2]}, "world_sizes must be some of 2, 3, 4, 5, 6, 7, 8, got"),
        ({"world_sizes": 4}, "world_sizes must be some of"),
        ({"minimum_arch": "sm_90"}, "minimum_arch must be a number such as 80 or 90, got 'sm_90'"),
        ({"specification": torch.float32}, "specification must be a function or None"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused_with_file_and_line_of_the_call(row, rule):
    line = inspect.currentframe().f_lineno + 2
    with pytest.raises(ValueError, match=rf"^{__file__}:{line}: load_algorithm: {rule}"):
        graphar.load_algorithm(SOURCE, **({"op": "allreduce", "scratch": slots, "max_nbytes": MAX_NBYTES} | row))


@pytest.mark.parametrize(("slot_nbytes", "refused"), [(1008, True), (1024, False), (1040, True), (4096, False)])
def test_slots_for_flags_beside_the_data_are_refused_if_they_are_no_whole_units(folder, slot_nbytes, refused):
    (folder / "slots_of_call.cuh").write_text('#include "device/sync/flagged.cuh"\n')  # the kernel includes this file
    row = {"scratch": Scratch.of_slots(16, slot_nbytes), "max_nbytes": 512}

    if not refused:
        assert load(folder / "pushed_sum.cu", **row).row.scratch(2).capacity == slot_nbytes // 16
        return
    rule = f"flagged.cuh needs slots of a multiple of 1024 bytes, and the scratch of 2 ranks has slots of {slot_nbytes}"
    with pytest.raises(ValueError, match=rf"outside\.py:\d+: load_algorithm: device/sync/{rule}"):
        load(folder / "pushed_sum.cu", **row)
    load(**row)  # a kernel without flags


def test_a_source_that_does_not_exist_is_refused_with_file_and_line_of_the_call():
    with pytest.raises(FileNotFoundError, match=r"outside\.py:\d+: load_algorithm: there is no file /.*/absent\.cu"):
        load(FOLDER / "absent.cu")


def test_a_relative_source_lies_beside_the_file_that_calls_or_in_the_working_directory(folder, tmp_path, monkeypatch):
    scratch = "graphar.Scratch.of_slots(4, 1 << 20, fill=0xFF)"
    row = f"op='allreduce', scratch={scratch}, world_sizes=[2], max_nbytes=1 << 20"
    for file in (folder / "mine.py", tmp_path / "mine.py"):
        file.write_text(f"import graphar\nmade = graphar.load_algorithm('pushed_sum.cu', {row})\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)

    beside = runpy.run_path("../kernels/mine.py")["made"]
    with pytest.raises(FileNotFoundError, match=f"no file {tmp_path}/.*pushed_sum.cu or {elsewhere}/pushed_sum.cu"):
        runpy.run_path("../mine.py")
    monkeypatch.chdir(folder)

    assert runpy.run_path("../mine.py")["made"] is beside


@pytest.mark.parametrize("name", ["pushed-sum.cu", "pushed_sum.cpp"])
def test_a_file_whose_name_is_none_of_a_kernel_is_refused(folder, name):
    (folder / "pushed_sum.cu").rename(folder / name)

    with pytest.raises(ValueError, match=r"source must be NAME\.cu, got"):
        load(folder / name)


@pytest.mark.parametrize("comment", ["", "// the kernel ring()\n", "/* ring(a)\n */"])
def test_a_file_without_a_kernel_of_its_name_is_refused(folder, comment):
    text = (folder / "pushed_sum.cu").read_text()
    (folder / "ring.cu").write_text(comment + text)

    with pytest.raises(ValueError, match=r"ring\.cu has no kernel 'ring': it must have the name of its file"):
        load(folder / "ring.cu")


def test_what_is_no_path_is_refused():
    with pytest.raises(ValueError, match="source must be the path of a file, got 3"):
        load(3)
