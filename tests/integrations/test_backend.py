"""The process group backend "graphar" between processes on the CPU: every entry point, its route and its results.

A set of processes makes all calls once, over the backend and over gloo; each test looks at one of them.
"""

from __future__ import annotations

import functools
import re
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from graphar.runtime import engine
from tests.integrations.entry_points import ENTRIES
from tests.integrations.programs import PROGRAMS, WITHOUT_GRAPHAR
from tests.pages import FOLDER
from tests.processes import run_ranks

WORLD_SIZE = 4
BACKEND = "cpu:graphar"
GRAPHAR, INNER = "graphar", "gloo or NCCL"


def make_every_call(rank, world_size, device="cpu", without=()):
    """By entry or program: the results on ``device``, those expected, and the route; or a traceback."""
    calls = []

    def count(engine, call, x, note, run):
        calls.append(call.op)
        run()

    engine.profilers.append(count)
    gloo, found = dist.new_group(backend="gloo"), {}

    def attempt(name, run):
        calls.clear()
        try:
            with torch.device(device):
                got = run()
            found[name] = (on_cpu(got), GRAPHAR if calls else INNER, "")
        except Exception:
            found[name] = (None, None, traceback.format_exc())

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        for name, entry in ENTRIES.items():
            if name not in without:
                attempt(name, functools.partial(entry.call, dist.group.WORLD, rank, world_size))
                got, route, error = found[name]
                found[name] = (got, on_cpu(entry.call(gloo, rank, world_size)), route, error)
        for name, program in PROGRAMS.items():
            if name not in without:
                attempt(name, functools.partial(program, rank, world_size))
                pairs, route, error = found[name]
                found[name] = ([one for one, _ in pairs or []], [one for _, one in pairs or []], route, error)
    return found


def on_cpu(found):
    return tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), found)


@functools.cache
def by_rank():
    return run_ranks(make_every_call, WORLD_SIZE, backend=BACKEND, timeout_s=120)


def flat(found):
    return found if isinstance(found, list) else [found]


def check_entry(of_ranks, name):
    for rank, found in enumerate(of_ranks):
        got, expected, _, error = found[name]
        assert not error, error
        for one, other in zip(flat(got), flat(expected), strict=True):
            same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
            assert same, f"rank {rank}: {one} is not {other}"


def check_program(of_ranks, name):
    for rank, found in enumerate(of_ranks):
        got, expected, route, error = found[name]
        assert not error, error
        assert route == (INNER if name in WITHOUT_GRAPHAR else GRAPHAR)
        assert len(got) > 0
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other, msg=lambda text, rank=rank: f"rank {rank}: {text}")


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_point_gives_what_gloo_gives(name):
    check_entry(by_rank(), name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_what_it_gives_elsewhere(name):
    check_program(by_rank(), name)


def test_the_page_says_where_every_entry_point_goes():
    text = (FOLDER / "backend.md").read_text()
    rows = dict(re.findall(r"^\| (.*?) \| (graphar|gloo or NCCL) \|$", text, re.MULTILINE))

    routes = {(ENTRIES[name].row, found[name][2]) for found in by_rank() for name in ENTRIES}

    assert routes == set(rows.items())
