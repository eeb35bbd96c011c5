"""What graphar logs: a line for each communicator, and at debug level the plans, and kernels that were compiled."""

import contextlib
import logging
import os
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.policy import Chip
from graphar.plan.select import Facts, select
from graphar.plan.tables import shipped_table
from graphar.plan.work import Parts, Sum
from graphar.ranks.rendezvous import Alone
from graphar.runtime.bind import collective
from graphar.runtime.catalogue import kernel_source
from graphar.runtime.compiler import compile_kernel
from graphar.runtime.plan import Plan
from graphar.runtime.runner import Runner

SOURCE = kernel_source(Algorithm.ONE_SHOT, torch.bfloat16, 2)


@pytest.fixture
def log(caplog):
    """The lines logged so far."""
    caplog.set_level(logging.DEBUG, logger="graphar")
    return lambda level=logging.DEBUG: [
        one.getMessage() for one in caplog.records if one.name.startswith("graphar") and one.levelno == level
    ]


def test_a_plan_is_logged_once_with_its_algorithm_and_the_reason(pair, log):
    for _ in range(3):
        pair.allreduce([torch.ones(4)] * 2)

    assert log() == ["allreduce of [4] torch.float32: fallback: the tensor is on the CPU"]


def test_a_communicator_is_logged_once_with_the_reason_why_no_kernels_serve_it(pair, log):
    for numel in (4, 5):
        pair.allreduce([torch.ones(numel)] * 2)

    assert log(logging.INFO) == ["communicator of ranks [0, 1]: no kernels: the tensor is on the CPU"]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            Call(Sum(1024), torch.bfloat16, 0),
            "allreduce of 1024 elements of torch.bfloat16: {grid}: the fastest by table 'nvidia_h200' for 4 ranks and",
        ),
        (
            Call(Parts("allgather", (4, 4, 4, 3)), torch.float32, 0),
            "allgather of parts of [4, 4, 4, 3] elements of torch.float32: {grid}: by table 'nvidia_h200' for 4 ranks",
        ),
    ],
)
def test_the_plan_of_a_kernel_is_logged_with_its_grid_and_table(call, line, log, monkeypatch):
    facts = Facts(4, shipped_table("nvidia_h200"), Chip(132, "sm_90a"))
    does_nothing = {name: lambda *given: None for name in ("raise_failure", "close")}
    stand_in = SimpleNamespace(**does_nothing, announced=contextlib.nullcontext, chip=facts.chip, members=())
    monkeypatch.setattr(collective, "bind_kernel", lambda engine, call, config: Plan(lambda ranks: None, config))
    with graphar.Communicator(devices=["cpu"] * 4) as communicator:
        monkeypatch.setattr(communicator.engine, "runner", stand_in)
        monkeypatch.setattr(communicator.engine, "facts", lambda call, x: facts)

        x = torch.ones(call.work.parts[0], dtype=call.dtype)
        communicator.engine.plan(call, [Operands((x,), (x,))] * 4)

    config = select(call, facts).config
    chosen = f"{config.algorithm.value} ({config.blocks} blocks of {config.threads})"
    (found,) = log()
    assert found.startswith(line.format(grid=chosen))
    (of_communicator,) = log(logging.INFO)
    assert of_communicator == (
        "communicator of ranks [0, 1, 2, 3]: kernels for 132 SMs of sm_90a, tuning table default, "
        "lossless compression on, NVLink multicast needs the opt-in GRAPHAR_MULTICAST=1"
    )


def test_kernels_that_are_loaded_are_logged_once(log, monkeypatch):
    runner = Runner([SimpleNamespace(rank=0, device=0)], 2, None, None, Alone(), multicast_memory=None)
    monkeypatch.setattr(runner, "_allocate", lambda algorithm: SimpleNamespace(pointers=[]))

    for _ in range(2):
        described = "matmul_allreduce for torch.bfloat16"
        runner.prepare_all("key", Algorithm.MATMUL_ALLREDUCE, described, lambda member: "function")

    (line,) = log()
    assert line.startswith("loaded matmul_allreduce for torch.bfloat16 in ")
    assert line.endswith(" s")


def test_a_compilation_is_logged_with_its_time_and_a_kernel_from_the_cache_as_such(tmp_path, monkeypatch, log):
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        compile_kernel.cache_clear()
        compile_kernel(SOURCE, "sm_90a")
        compile_kernel(SOURCE, "sm_90a")

    compiled, found = log()
    assert compiled.startswith(f"compiled {SOURCE.name} of {SOURCE.file} for sm_90a in ")
    assert found == f"found {SOURCE.name} of {SOURCE.file} for sm_90a in the kernel cache"


def test_graphar_installs_no_handler_and_prints_nothing(new_interpreter):
    program = """
import logging, torch, graphar
graphar.allreduce([torch.ones(3)] * 2)
names = [name for name in logging.root.manager.loggerDict if name.split(".")[0] == "graphar"]
print(sorted(names), [logging.getLogger(name).handlers for name in names if logging.getLogger(name).handlers])
"""
    done = new_interpreter(program)

    names, handlers = done.stdout.strip().rsplit(" ", 1)
    assert "'graphar.runtime.bind.collective'" in names
    assert handlers == "[]"
    assert done.stderr == ""


PROGRAM = """
import torch, graphar
with graphar.Communicator(devices=["cpu"] * 2) as pair:
    pair.allreduce([torch.ones(4)] * 2)
"""


@pytest.fixture
def logged(new_interpreter):
    """The lines on standard error of a program of rank 3 with a value of GRAPHAR_LOG."""

    def run(value):
        done = new_interpreter(PROGRAM, os.environ | {"GRAPHAR_LOG": value, "RANK": "3"})
        assert done.returncode == 0, done.stderr
        return done.stderr.splitlines()

    return run


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ("", []),
        ("info", ["INFO graphar.runtime.engine: communicator of ranks"]),
        (
            "debug",
            ["DEBUG graphar.runtime.bind.collective: allreduce of [4]", "INFO graphar.runtime.engine: communicator"],
        ),
    ],
)
def test_the_environment_chooses_what_is_logged_with_the_rank(logged, value, lines):
    found = logged(value)

    assert len(found) == len(lines), found
    assert all(f" rank 3 {line}" in one for one, line in zip(found, lines, strict=True)), found


def test_another_value_is_warned_of_and_logs_nothing(logged):
    found = "\n".join(logged("yes"))

    assert "GRAPHAR_LOG must be info or debug, got 'yes': nothing is logged" in found
    assert "rank 3" not in found
