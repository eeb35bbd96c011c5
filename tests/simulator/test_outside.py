"""Algorithms from outside the package in the simulator: they pass, and their mistakes are found."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from graphar import simulator
from graphar.simulator import Mutation
from tests.outside import FOLDER, load

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("nothing_stays_loaded")]

ONE_BUFFER = Mutation("pushed_sum.cu", "slots_of_call<N>(a, call)", "0 * slots_of_call<N>(a, call)")
FEW = {"dtypes": (torch.bfloat16,), "sanitizers": ("plain",), "seeds": 2}


def in_reverse(tensors):
    total = torch.zeros_like(tensors[0], dtype=torch.float32)
    for one in reversed(tensors):
        total += one
    return total.to(tensors[0].dtype)


def test_an_algorithm_from_outside_passes_with_its_own_headers():
    report = simulator.run(load(), ranks=(2, 3), **FEW | {"sanitizers": ("plain", "thread")})

    assert (len(report.passed), report.failures, report.skipped) == (4, (), ())


def test_a_mistake_in_its_own_file_is_found_and_told():
    report = simulator.run(load(), ranks=(2,), **FEW | {"seeds": 5}, mutations=(ONE_BUFFER,))

    (failure,) = report.failures
    assert "expected" in failure.what
    assert "rank 1:" in failure.last_steps


def test_its_own_specification_is_what_it_is_compared_with():
    """It adds in rank order, and says that it adds in reverse."""
    report = simulator.run(load(specification=in_reverse), ranks=(3,), **FEW | {"dtypes": (torch.float32,), "seeds": 4})

    (failure,) = report.failures
    assert "are the same terms in another order, of ranks 0, 1, 2; the same under another schedule" in failure.what
    assert len(re.findall(r"^rank \d", failure.last_steps, re.MULTILINE)) == 1


def test_numbers_of_ranks_and_sizes_that_it_does_not_take_are_left_out():
    mine = load(world_sizes=(2,), max_nbytes=64)

    report = simulator.run(mine, ranks=(2, 3), numel=(1, 7, 1000), **FEW)

    assert [case.world_size for case in report.passed] == [2]
    assert report.skipped == (f"{mine}, 3 ranks, bfloat16, plain: the algorithm does not serve so many ranks",)


# Some of the names that twins of the PTX have for themselves.
TAKEN = ("most_blocks", "Exchange", "exchange", "note", "pump", "meet", "order_of", "acquire", "release", "load_word")


def test_a_kernel_may_use_names_that_the_twins_of_the_ptx_have_for_themselves():
    given = "".join(f"struct {name} {{}};\n" for name in TAKEN)
    own = Mutation("pushed_sum.cu", "template <class T, int N>", f"{given}template <class T, int N>")

    assert simulator.run(load(), ranks=(2,), **FEW, mutations=(own,)).ok


def test_headers_may_include_each_other_and_the_compiler_for_gpus_may_have_more(tmp_path):
    source = shutil.copytree(FOLDER, tmp_path / "mine") / "pushed_sum.cu"
    with source.with_name("slots_of_call.cuh").open("a") as header:
        header.write('#include "slots_of_call.cuh"\n#ifdef __CUDACC__\n#include "cuda_fp8.h"\n#endif\n')

    assert simulator.run(load(source), ranks=(2,), **FEW).ok


def test_one_that_is_not_loaded_is_an_error():
    with pytest.raises(ValueError, match="algorithm 'ring@0123456789ab' is not loaded in this process"):
        simulator.run("ring@0123456789ab")
