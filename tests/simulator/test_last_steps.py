"""What the threads did last before a step of the scheduler, in words."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from graphar.plan.algorithms import Algorithm
from graphar.simulator.build import Mutation
from graphar.simulator.simulation import KernelFailure, Simulation
from tests.host.build import build
from tests.host.cases import Kernels, draw, dtypes_of, scratch_of
from tests.host.mutants import NOT_RELEASED, PAD, SET

pytestmark = pytest.mark.host

LATE, DEADLINE_NS = 1, 400_000_000
RELAXED = Mutation(PAD, SET, NOT_RELEASED)
APART = Mutation(
    PAD, "OfWarp ? __syncwarp() : __syncthreads();", "OfWarp || threadIdx.x == 0 ? __syncwarp() : __syncthreads();"
)


def simulation(algorithm, sanitizer="plain", *mutations, world_size=2, seed=0):
    """Returns a simulation of kernels with mistakes, and two calls that follow one another."""
    dtype = dtypes_of(algorithm)[0]
    kernels = Kernels(algorithm, (world_size,), (dtype,))
    program = build(kernels.sources(), sanitizer, *mutations)
    calls = draw(algorithm, world_size, dtype, seed, 2).calls
    return Simulation(program, algorithm, world_size, scratch_of(algorithm, world_size), 0, seed), calls


def lines_of(text, rank):
    """The lines of one rank."""
    return re.search(rf"^rank {rank}:\n((  .*\n)*)", text, re.MULTILINE)[1].splitlines()


def test_a_wait_for_an_absent_rank_is_told_with_its_address_and_the_value_that_is_there():
    simulated, calls = simulation(Algorithm.ONE_SHOT)
    calls[1] = replace(calls[1], absent=(LATE,), timeout_ns=DEADLINE_NS)
    outcomes = simulated.run(calls)

    text = simulated.last_steps(calls, outcomes[0].gave_up_at)

    pattern = (
        r"  call 1, block \d, thread 1: load_acquire_sys of rank 0's scratch, byte \d*8 sees 0x\w+ \(\d{3,} times\)"
    )
    assert any(re.fullmatch(pattern, line) for line in lines_of(text, 0)), text
    assert not any("call 1" in line for line in lines_of(text, LATE)), text


def test_steps_are_those_before_the_step_that_is_named():
    simulated, calls = simulation(Algorithm.ONE_SHOT_PUSH)
    outcomes = simulated.run(calls)

    first, second = (simulated.last_steps(calls, step) for step in outcomes[0].ended_at)

    assert not any("call 1" in line and "scratch" in line for line in lines_of(first, 0)), first
    assert any("call 1" in line for line in lines_of(second, 0)), second


def test_threads_that_wait_for_one_another_are_told_last():
    simulated, calls = simulation(Algorithm.ONE_SHOT, "plain", APART)

    with pytest.raises(KernelFailure, match="stuck: the threads wait for one another") as failure:
        simulated.run(calls)

    last = [line for line in lines_of(simulated.last_steps(calls, failure.value.step), 0) if "block 0" in line][-2:]
    assert "  call 0, block 0, thread 0: waits at a barrier of the warp" in last
    assert any(re.fullmatch(r"  call 0, block 0, threads? 1\S*: waits? at a barrier of the block", one) for one in last)


def test_a_sanitizers_report_leaves_the_step_that_it_is_about():
    simulated, calls = simulation(Algorithm.ONE_SHOT, "thread", RELAXED)

    with pytest.raises(KernelFailure, match="ThreadSanitizer: data race") as failure:
        simulated.run(calls)

    text = simulated.last_steps(calls, failure.value.step)
    assert any("store_relaxed_sys to rank" in line for line in lines_of(text, 1)), text
