"""The process group backend "graphar" between processes on the CPU: every entry point, its route and its results."""

import re
from dataclasses import astuple
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.utils._pytree import tree_map

import graphar
from graphar.integrations.routing import Routing, tensors_in
from graphar.integrations.works import GrapharWork
from tests.integrations.entry_points import ENTRIES
from tests.integrations.every_call import (
    FOR_ONE_RANK,
    by_rank,
    check,
    check_entry,
    check_program,
    make_calls,
    run_watched,
)
from tests.integrations.programs import PROGRAMS
from tests.pages import FOLDER
from tests.processes import on_ranks, run_ranks


@pytest.fixture(scope="module")
def of_ranks():
    return by_rank(4, "cpu:graphar", [*ENTRIES, *PROGRAMS])


@pytest.fixture(scope="module")
def of_one_rank():
    return by_rank(1, "cpu:graphar", FOR_ONE_RANK)


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_point_gives_what_gloo_gives(of_ranks, name):
    check_entry(of_ranks, name)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_what_it_gives_elsewhere(of_ranks, name):
    check_program(of_ranks, name)


@pytest.mark.parametrize("name", FOR_ONE_RANK)
def test_a_group_of_one_rank_gives_what_gloo_gives(of_one_rank, name):
    check(of_one_rank, name)


def test_the_page_says_where_every_entry_point_goes(of_ranks):
    text = (FOLDER / "backend.md").read_text()
    rows = dict(re.findall(r"^\| (.*?) \| (graphar|gloo or NCCL) \|$", text, re.MULTILINE))

    routes = {(ENTRIES[name].row, found[name].route) for found in of_ranks for name in ENTRIES}

    assert routes == set(rows.items())


def spread(x):
    """A tensor with the values of ``x``, and with others between them."""
    whole = torch.full((*x.shape, 2), 77, dtype=x.dtype)
    whole[..., 0] = x.detach()
    return whole[..., 0]


def between(x):
    return x.as_strided(x.shape, x.stride(), x.storage_offset() + 1)


def call_with_gaps(rank, world_size, file, names):
    """Makes calls whose tensors, at the backend's methods, all have gaps."""

    def spreading(method):
        def call(self, *given, **named):
            if self._window is not None:  # the call may be made only at the window's end
                return method(self, *given, **named)
            tensors = {id(x): x for x in tensors_in([*given, *named.values()])}
            pairs = {at: (x, spread(x)) for at, x in tensors.items() if type(x) in (torch.Tensor, nn.Parameter)}
            spread_out = partial(tree_map, lambda x: pairs[id(x)][1] if id(x) in pairs else x)
            work = method(self, *spread_out(given), **spread_out(named))
            if work is not None:
                work.wait()  # once: gloo's waits for messages end only once
                work = GrapharWork([])
            for x, found in pairs.values():
                assert (between(found) == 77).all(), method.__name__
                x.detach().copy_(found)
            return work

        return call

    for name in METHODS:
        setattr(Routing, name, spreading(getattr(Routing, name)))
    return make_calls(rank, world_size, file, "cpu", names)


METHODS = [
    name
    for name in vars(Routing)
    if name in ("_reduce_scatter_base", "_allgather_base")
    or (name[0] != "_" and re.search("reduce|gather|scatter|broadcast|alltoall|all_to_all|send|recv", name))
]


@pytest.fixture(scope="module")
def with_gaps():
    names = [name for name in ENTRIES if name not in ("reduce_scatter into its input", "coalescing_manager")]
    return run_watched(call_with_gaps, 3, names, backend="cpu:graphar")


@pytest.mark.parametrize("name", [name for name in ENTRIES if "into its input" not in name and "manager" not in name])
def test_tensors_with_gaps_give_what_gloo_gives_for_dense_ones(with_gaps, name):
    check_entry(with_gaps, name)


@on_ranks(2, backend="cpu:graphar")
def test_stats_count_the_calls_that_graphar_serves_and_those_that_it_passes_on(rank, world_size):
    group, x = dist.new_group(), torch.ones(6)
    for _ in range(3):
        dist.all_reduce(x, group=group)
    dist.all_gather_into_tensor(torch.empty(6 * world_size), x, group=group)
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    dist.all_reduce(x.double(), group=group)
    dist.reduce_scatter_tensor(torch.empty(3), torch.ones(3 * world_size), dist.ReduceOp.MIN, group=group)
    for _ in range(2):
        dist.broadcast(x[:3], 0, group=group)
    dist.barrier(group)
    found, other = graphar.stats(group), graphar.stats()
    served = [one for one in found.calls if one.algorithm != "gloo"]
    passed_on = [one[:3] + one[4:] for one in map(astuple, found.calls) if one[1] == "gloo"]
    assert [(one.op, one.calls, one.nbytes) for one in served] == [("allreduce", 3, 72), ("allgather", 1, 48)]
    assert (found.plans, found.host_waited_s > 0, other.calls) == (2, True, ())
    add_only, none = "graphar's kernels add, and do nothing else", "graphar has no "
    assert passed_on == [
        ("allreduce", "gloo", 1, 24, add_only),
        ("allreduce", "gloo", 1, 48, "graphar's kernels do not add torch.float64"),
        ("reducescatter", "gloo", 1, 24, add_only),
        ("broadcast", "gloo", 2, 24, f"{none}broadcast"),
        ("barrier", "gloo", 1, 0, f"{none}barrier"),
    ]


@on_ranks(3, backend="cpu:graphar")
def test_an_all_gather_in_place_copies_nothing(rank, world_size):
    out = torch.zeros(3 * world_size)
    own = out[3 * rank :][:3].fill_(rank + 1)
    with mock.patch("torch.Tensor.clone", side_effect=AssertionError("the input was copied")):
        dist.all_gather_into_tensor(out, own)
    gathered = out.tolist()
    assert gathered == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def exchange(rank, world_size):
    """Lists, functional calls and their gradients, and what torch's own group refuses: over graphar."""
    ranks = range(world_size)
    sent, got = ([1 + (rank + one) % 3 for one in ranks] for _ in range(2))
    x = (torch.arange(sum(sent)) + 100 * rank).to(torch.int64)
    outs = [torch.empty(one, dtype=torch.int64) for one in got]
    dist.all_to_all(outs, list(x.split(sent)))
    functional = funcol.all_to_all_single(x, got, sent, dist.group.WORLD)
    even = torch.arange(2.0 * world_size).add(rank).requires_grad_()
    y = funcol.all_to_all_single_autograd(even, None, None, dist.group.WORLD)
    (y * (1 + torch.arange(2.0 * world_size))).sum().backward()
    with pytest.raises(RuntimeError, match=r"[Ss]plit|size"):
        dist.all_to_all_single(torch.empty(3), torch.ones(3), [1] * world_size, [1] * world_size)
    calls = {
        (one.op, one.algorithm, one.calls) for one in graphar.stats(dist.group.WORLD).calls if one.op == "alltoall"
    }
    return torch.cat(outs).tolist(), functional.tolist(), y.tolist(), even.grad.tolist(), calls


def test_every_form_of_all_to_all_is_served():
    ranks = range(2)
    inputs = [torch.arange(sum(1 + (rank + one) % 3 for one in ranks)) + 100 * rank for rank in ranks]
    parts = [x.split([1 + (rank + one) % 3 for one in ranks]) for rank, x in enumerate(inputs)]
    for rank, (lists, functional, even, gradient, calls) in enumerate(run_ranks(exchange, 2, backend="cpu:graphar")):
        expected = torch.cat([of[rank] for of in parts]).tolist()
        assert lists == functional == expected
        assert even == [2 * rank, 2 * rank + 1, 2 * rank + 1, 2 * rank + 2]
        assert gradient == [2 * rank + 1, 2 * rank + 2] * 2
        assert sum(count for *_, count in calls) == 4
