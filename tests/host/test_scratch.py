"""The simulated kernels have the small scratch of tests/host/cases.py, laid out as on GPUs."""

from __future__ import annotations

import ctypes
from dataclasses import asdict, fields, replace

import pytest
import torch

from graphar.plan.algorithms import ROWS, Algorithm, rows
from graphar.plan.scratch import Sizes
from graphar.runtime.catalogue import NORM_KERNELS
from graphar.simulator.simulation import _Call, _Case
from tests.host import test_epilogues, test_norms
from tests.host.cases import ALGORITHMS, SMALL, SMALL_ROWS, WORLD_SIZES, Kernels, draw, dtypes_of, simulate

pytestmark = pytest.mark.host

some_world_sizes = pytest.mark.parametrize("world_size", [min(WORLD_SIZES), 3, max(WORLD_SIZES)])


@some_world_sizes
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *NORM_KERNELS])
def test_small_scratch_is_a_fraction_of_what_gpus_have_and_filled_alike(algorithm, world_size):
    small, real = SMALL_ROWS[algorithm].scratch(world_size), ROWS[algorithm].scratch(world_size)

    assert small.nbytes <= real.nbytes / 10
    assert 0 < small.capacity <= real.capacity / 5
    assert small.fill == real.fill


@pytest.mark.parametrize("size", [field.name for field in fields(Sizes)])
def test_each_size_is_smaller_and_changes_some_scratch(size):
    one_size_smaller = rows(replace(Sizes(), **{size: getattr(SMALL, size)}))
    with_scratch = [one for one in Algorithm if one.row.layout]

    assert 0 < asdict(SMALL)[size] < asdict(Sizes())[size]
    assert any(one_size_smaller[one].scratch(n) != ROWS[one].scratch(n) for one in with_scratch for n in WORLD_SIZES)


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_small_rows_differ_in_their_sizes_alone(algorithm):
    small, real = SMALL_ROWS[algorithm], ROWS[algorithm]

    # Functions are made anew with each table of rows, and are never equal.
    functions = {one.name: getattr(real, one.name) for one in fields(real) if callable(getattr(real, one.name))}
    assert {name for name in functions if not callable(getattr(small, name))} == set()
    assert replace(small, **functions, max_blocks=real.max_blocks) == real
    assert [small.limit(n) is None for n in WORLD_SIZES] == [real.limit(n) is None for n in WORLD_SIZES]


@pytest.fixture
def told(tmp_path, monkeypatch):
    """Replaces every program by one that saves its case. Returns the scratch and the slots that the case names."""
    program, case = tmp_path / "program", tmp_path / "told"
    program.write_text(f'#!/bin/sh\ncp "$1" {case}\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(test_epilogues, "build", lambda *arguments: program)
    monkeypatch.setattr(test_norms, "build", lambda *arguments: program)

    def told_by(simulation, *arguments):
        with pytest.raises(RuntimeError, match="the case was not understood"):
            list(simulation(*arguments))
        header, text = _Case.from_buffer_copy(case.read_bytes()), case.read_bytes()[ctypes.sizeof(_Case) :]
        calls = [_Call.from_buffer_copy(text, at * ctypes.sizeof(_Call)) for at in range(header.calls)]
        slots = {(call.capacity, call.shared_nbytes) for call in calls}
        return header.scratch_nbytes, header.fill, slots

    told_by.program = program
    return told_by


def as_told(algorithm, world_size):
    small = SMALL_ROWS[algorithm].scratch(world_size)
    return small.nbytes, small.fill, {(small.capacity, small.shared_nbytes)}


@some_world_sizes
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_simulated_kernels_are_told_the_small_scratch(algorithm, world_size, told):
    dtype, kernels = dtypes_of(algorithm)[0], Kernels(algorithm, WORLD_SIZES, dtypes_of(algorithm))
    calls = draw(algorithm, world_size, dtype, 0).calls

    assert told(simulate, told.program, kernels, world_size, dtype, 0, calls) == as_told(algorithm, world_size)


@pytest.mark.parametrize("algorithm", test_epilogues.ALGORITHMS)
@pytest.mark.parametrize("world_size", test_epilogues.WORLD_SIZES)
def test_simulated_kernels_with_an_epilogue_are_told_the_small_scratch(algorithm, world_size, told):
    run = algorithm, world_size, (torch.bfloat16,), torch.bfloat16, "plain", 0, range(len(test_epilogues.EXACT))

    assert told(test_epilogues.simulate, *run) == as_told(algorithm, world_size)


@pytest.mark.parametrize("algorithm", NORM_KERNELS)
@pytest.mark.parametrize("world_size", test_norms.WORLD_SIZES)
def test_simulated_norms_are_told_the_small_scratch(algorithm, world_size, told):
    norms = test_norms.Norms(algorithm, (torch.bfloat16,))

    assert told(test_norms.simulate, norms, world_size, torch.bfloat16, "plain", 0) == as_told(algorithm, world_size)
