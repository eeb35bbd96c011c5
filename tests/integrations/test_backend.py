"""The process group backend "graphar" between processes on the CPU: every entry point, its route and its results.

A set of processes makes all calls once, over the backend and over gloo; each test looks at one of them.
"""

from __future__ import annotations

import functools
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import graphar
from graphar.integrations import backend
from graphar.runtime import engine
from tests.pages import FOLDER
from tests.processes import run_ranks

WORLD_SIZE = 4
BACKEND = "cpu:graphar"
GRAPHAR, INNER = "graphar", "gloo or NCCL"
WHOLE_GROUP = torch.__version__ < "2.14"  # the backend is then a process group in Python


def values(rank: int, numel: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Integers that sum exactly in any order, and differ by rank and place."""
    return (torch.arange(numel) + 10 * rank).to(dtype)


# ---- entry points ---------------------------------------------------------------------------------------------------


def all_reduce(group, rank, n, op=dist.ReduceOp.SUM, dtype=torch.float32):
    x = values(rank, dtype=dtype)
    dist.all_reduce(x, op, group=group)
    return x


def all_reduce_of_a_transposed_tensor(group, rank, n):
    x = values(rank, 12).view(3, 4)
    y = x.clone().t()  # gloo takes contiguous tensors alone
    dist.all_reduce(x if is_gloo(group) else y, group=group)
    return x if is_gloo(group) else y.t()


def all_reduce_of_a_parameter(group, rank, n):
    x = nn.Parameter(values(rank))
    dist.all_reduce(x.data if is_gloo(group) else x, group=group)
    return x.detach()


def all_reduce_coalesced(group, rank, n):
    xs = [values(rank), values(rank, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_reduce_coalesced(xs, group=group)
    return xs


def reduce_scatter(group, rank, n):
    out = torch.empty(3)
    dist.reduce_scatter(out, list(values(rank, 3 * n).chunk(n)), group=group)
    return out


def reduce_scatter_tensor(group, rank, n, dtype=torch.float32):
    out = torch.empty(3, dtype=dtype)
    dist.reduce_scatter_tensor(out, values(rank, 3 * n, dtype), group=group)
    return out


def reduce_scatter_into_its_input(group, rank, n):
    x = values(rank, 3 * n)
    out = torch.empty(3) if is_gloo(group) else x[3 * rank : 3 * rank + 3]
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


def all_gather(group, rank, n, dtype=torch.float32):
    outs = [torch.empty(6, dtype=dtype) for _ in range(n)]
    dist.all_gather(outs, values(rank, dtype=dtype), group=group)
    return outs


def all_gather_into_tensor(group, rank, n):
    out = torch.empty(2 * n, 3)
    dist.all_gather_into_tensor(out, values(rank).view(2, 3), group=group)
    return out


def all_gather_from_its_output(group, rank, n):
    out = torch.zeros(6 * n)
    x = out[6 * rank : 6 * rank + 6].copy_(values(rank))
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def all_gather_coalesced(group, rank, n):
    outs = [[torch.empty(6), torch.empty(3)] for _ in range(n)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.all_gather_coalesced(outs, [values(rank), values(rank, 3)], group=group)
    return [one for of_rank in outs for one in of_rank]


def coalescing_manager(group, rank, n):
    xs, outs, parts = [values(rank), values(rank, 3)], [torch.empty(6 * n)], [torch.empty(6)]
    with dist.distributed_c10d._coalescing_manager(group):
        for x in xs:
            dist.all_reduce(x, group=group)
    if is_gloo(group):  # has no coalesced all-gather and reduce-scatter
        dist.all_gather_into_tensor(outs[0], values(rank), group=group)
        dist.reduce_scatter_tensor(parts[0], values(rank, 6 * n), group=group)
        return [*xs, *outs, *parts]
    with dist.distributed_c10d._coalescing_manager(group):
        dist.all_gather_into_tensor(outs[0], values(rank), group=group)
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as works:
        dist.reduce_scatter_tensor(parts[0], values(rank, 6 * n), group=group)
    works.wait()
    return [*xs, *outs, *parts]


def broadcast(group, rank, n):
    x = values(rank)
    dist.broadcast(x, 1, group=group)
    return x


def reduce(group, rank, n):
    x = values(rank)
    dist.reduce(x, 1, group=group)
    return x if rank == 1 else torch.zeros(6)  # elsewhere the result is undefined


def gather(group, rank, n):
    outs = [torch.empty(6) for _ in range(n)] if rank == 1 else None
    dist.gather(values(rank), outs, 1, group=group)
    return outs or []


def scatter(group, rank, n):
    out = torch.empty(6)
    dist.scatter(out, [values(one) for one in range(n)] if rank == 1 else None, 1, group=group)
    return out


def all_to_all_single(group, rank, n):
    out = torch.empty(3 * n)
    dist.all_to_all_single(out, values(rank, 3 * n), group=group)
    return out


def all_to_all_of_uneven_parts(group, rank, n):
    sent = [1 + (rank + to) % 3 for to in range(n)]
    got = [1 + (rank + by) % 3 for by in range(n)]
    out = torch.empty(sum(got))
    dist.all_to_all_single(out, values(rank, sum(sent)), got, sent, group=group)
    return out


def send_and_recv(group, rank, n):
    # Only two of the ranks: nothing may wait for the others.
    x = values(rank)
    if rank == 2:
        dist.send(x, 3, group=group)
    if rank == 3:
        dist.recv(x, 2, group=group)
    return x


def batch_isend_irecv(group, rank, n):
    out = torch.empty(6)
    ops = [
        dist.P2POp(dist.isend, values(rank), (rank + 1) % n, group=group),
        dist.P2POp(dist.irecv, out, (rank - 1) % n, group=group),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out


def barrier(group, rank, n):
    begin = time.monotonic()
    time.sleep(0.3 if rank == 1 else 0)
    dist.barrier(group=group)
    return torch.tensor(time.monotonic() - begin > 0.25)


def all_gather_object(group, rank, n):
    found = [None] * n
    dist.all_gather_object(found, {"rank": rank, "of": "x" * rank}, group=group)
    return found


def broadcast_object_list(group, rank, n):
    found = [{"rank": rank}, rank]
    dist.broadcast_object_list(found, 1, group=group)
    return found


def gather_object(group, rank, n):
    found = [None] * n if rank == 1 else None
    dist.gather_object({"rank": rank}, found, 1, group=group)
    return found


def scatter_object_list(group, rank, n):
    found = [None]
    dist.scatter_object_list(found, [{"to": one} for one in range(n)] if rank == 1 else None, 1, group=group)
    return found


class Entry(NamedTuple):
    """An entry point: its row in the table of docs/pages/backend.md, and a call."""

    row: str
    call: Callable


SUMS, OTHER_OPS = "`all_reduce` of sums and averages", "`all_reduce` of maxima, minima, products and bits"
OTHER_DTYPES = "sums of fp64, integers and other dtypes"
SCATTERS = "`reduce_scatter`, `reduce_scatter_tensor` of sums and averages"
GATHERS = "`all_gather`, `all_gather_into_tensor` of any dtype"
MORE_GATHERS = "`all_gather_object`, by `all_gather`"
OBJECTS = "`broadcast_object_list`, `scatter_object_list`"
POINTS = "`send`, `recv`, `isend`, `irecv`, `batch_isend_irecv`"

ENTRIES = {
    "all_reduce": Entry(SUMS, all_reduce),
    "all_reduce of bf16": Entry(SUMS, functools.partial(all_reduce, dtype=torch.bfloat16)),
    "all_reduce of fp16": Entry(SUMS, functools.partial(all_reduce, dtype=torch.float16)),
    "all_reduce of a transposed tensor": Entry(SUMS, all_reduce_of_a_transposed_tensor),
    "all_reduce of a parameter": Entry(SUMS, all_reduce_of_a_parameter),
    "all_reduce_coalesced": Entry("`all_reduce_coalesced`", all_reduce_coalesced),
    "reduce_scatter": Entry(SCATTERS, reduce_scatter),
    "reduce_scatter_tensor": Entry(SCATTERS, reduce_scatter_tensor),
    "reduce_scatter into its input": Entry(SCATTERS, reduce_scatter_into_its_input),
    "all_gather": Entry(GATHERS, all_gather),
    "all_gather of int64": Entry(GATHERS, functools.partial(all_gather, dtype=torch.int64)),
    "all_gather of fp64": Entry(GATHERS, functools.partial(all_gather, dtype=torch.float64)),
    "all_gather_into_tensor": Entry(GATHERS, all_gather_into_tensor),
    "all_gather from its output": Entry(GATHERS, all_gather_from_its_output),
    "all_gather_coalesced": Entry("`all_gather_coalesced`", all_gather_coalesced),
    "coalescing_manager": Entry("sums and all-gathers in a `_coalescing_manager`", coalescing_manager),
    "all_gather_object": Entry(MORE_GATHERS, all_gather_object),
    "all_reduce of maxima": Entry(OTHER_OPS, functools.partial(all_reduce, op=dist.ReduceOp.MAX)),
    "all_reduce of minima": Entry(OTHER_OPS, functools.partial(all_reduce, op=dist.ReduceOp.MIN)),
    "all_reduce of products": Entry(OTHER_OPS, functools.partial(all_reduce, op=dist.ReduceOp.PRODUCT)),
    "all_reduce of bits": Entry(OTHER_OPS, functools.partial(all_reduce, op=dist.ReduceOp.BOR, dtype=torch.int32)),
    "all_reduce of fp64": Entry(OTHER_DTYPES, functools.partial(all_reduce, dtype=torch.float64)),
    "all_reduce of int64": Entry(OTHER_DTYPES, functools.partial(all_reduce, dtype=torch.int64)),
    "reduce_scatter of int64": Entry(OTHER_DTYPES, functools.partial(reduce_scatter_tensor, dtype=torch.int64)),
    "broadcast": Entry("`broadcast`", broadcast),
    "reduce": Entry("`reduce`", reduce),
    "gather": Entry("`gather`", gather),
    "scatter": Entry("`scatter`", scatter),
    "all_to_all_single": Entry("`all_to_all`, `all_to_all_single`", all_to_all_single),
    "all_to_all of uneven parts": Entry("`all_to_all`, `all_to_all_single`", all_to_all_of_uneven_parts),
    "send and recv": Entry(POINTS, send_and_recv),
    "batch_isend_irecv": Entry(POINTS, batch_isend_irecv),
    "barrier": Entry("`barrier`", barrier),
    "broadcast_object_list": Entry(OBJECTS, broadcast_object_list),
    "scatter_object_list": Entry(OBJECTS, scatter_object_list),
}


def is_gloo(group) -> bool:
    return dist.get_backend(group) == "gloo"


# ---- what gloo does not have, with what is expected -----------------------------------------------------------------


def total(n: int, numel: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return graphar.reference.allreduce([values(rank, numel, dtype) for rank in range(n)])


def averages(rank, n):
    x = values(rank)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return [(x, total(n) / n)]


def averages_round_once(rank, n):
    x = torch.tensor([257.0 + 2 * rank, 1.0]).bfloat16()  # whose sum is not a bf16
    expected = sum(torch.tensor([257.0 + 2 * one, 1.0]).bfloat16().float() for one in range(n)) / n
    dist.all_reduce(x, dist.ReduceOp.AVG)
    return [(x, expected.bfloat16())]


def averages_of_parts(rank, n):
    out, single = torch.empty(rank + 1), torch.empty(3)
    lengths = [one + 1 for one in range(n)]
    dist.reduce_scatter(out, list(values(rank, sum(lengths)).split(lengths)), dist.ReduceOp.AVG)
    dist.reduce_scatter_tensor(single, values(rank, 3 * n), dist.ReduceOp.AVG)
    mine = (total(n, sum(lengths)) / n).split(lengths)[rank], (total(n, 3 * n) / n).chunk(n)[rank]
    return [(out, mine[0]), (single, mine[1])]


def uneven_parts(rank, n):
    lengths = [2 * one for one in range(n)]  # also none
    out, outs = torch.empty(lengths[rank]), [torch.empty(one) for one in lengths]
    dist.reduce_scatter(out, list(values(rank, sum(lengths)).split(lengths)))
    dist.all_gather(outs, out)
    whole = total(n, sum(lengths)).split(lengths)
    return [(out, whole[rank]), *zip(outs, whole, strict=True)]


def asynchronous_calls(rank, n):
    x, y, out = values(rank), values(rank, 3 * n), torch.empty(3)
    works = [dist.all_reduce(x, async_op=True), dist.reduce_scatter_tensor(out, y, async_op=True)]
    assert all(work.wait() for work in works)
    (found,) = works[0].get_future().wait()
    assert found is x or found.data_ptr() == x.data_ptr()
    if WHOLE_GROUP:  # later torch hides these of a backend in Python
        assert works[0].is_completed()
        assert works[0].result()[0] is x
    return [(x, total(n)), (out, total(n, 3 * n).chunk(n)[rank])]


def calls_of_the_group_itself(rank, n):
    group, xs = dist.group.WORLD, [values(rank) for _ in range(4)]
    group.allreduce([xs[0]]).wait()
    group.allreduce(xs[1]).wait()
    group.allreduce([xs[2]], dist.ReduceOp.SUM).wait()
    group.allreduce([xs[3]], op=dist.ReduceOp.SUM).wait()
    outs = [torch.empty(6) for _ in range(n)]
    group.allgather(outs, values(rank)).wait()
    return [*((x, total(n)) for x in xs), *((out, values(one)) for one, out in enumerate(outs))]


def recv_from_any_rank(rank, n):
    x = values(rank)
    if rank == 0:
        dist.send(x, 1)
    if rank == 1 and WHOLE_GROUP:
        assert dist.recv(x) == 0
    elif rank == 1:  # torch hides the source of a backend in Python
        with pytest.raises(RuntimeError, match="sourceRank"):
            dist.recv(x)
    return [(x, values(0 if rank == 1 else rank))]


def calls_of_graphar(rank, n):
    x = values(rank)
    return [
        (graphar.allreduce(x), total(n)),
        (graphar.reducescatter(values(rank, 3 * n)), total(n, 3 * n).chunk(n)[rank]),
        (graphar.allgather(x), torch.cat([values(one) for one in range(n)])),
        (graphar.allreduce(x.double()), total(n, dtype=torch.float64)),
    ]


def functional_collectives(rank, n):
    group, x = dist.group.WORLD, values(rank, 3 * n)
    gathered = functional.all_gather_tensor(x, 0, group)
    part = functional.reduce_scatter_tensor(x, "sum", 0, group)
    mean = functional.all_reduce(x, "avg", group)
    peak = functional.all_reduce(x, "max", group)
    (one, two) = functional.all_reduce_coalesced([x, x + 1], "sum", group)
    (both,) = functional.reduce_scatter_tensor_coalesced([x], "sum", [0], group)
    (all_of_it,) = functional.all_gather_into_tensor_coalesced([x], group)
    sent = functional.broadcast(x, 1, group)
    whole = torch.cat([values(one, 3 * n) for one in range(n)])
    return [
        (functional.wait_tensor(found), expected)
        for found, expected in (
            (functional.all_reduce(x, "sum", group), total(n, 3 * n)),
            (gathered, whole),
            (part, total(n, 3 * n).chunk(n)[rank]),
            (mean, total(n, 3 * n) / n),
            (peak, values(n - 1, 3 * n)),
            (one, total(n, 3 * n)),
            (two, total(n, 3 * n) + n),
            (both, total(n, 3 * n).chunk(n)[rank]),
            (all_of_it, whole),
            (sent, values(1, 3 * n)),
        )
    ]


def compiled(rank, n):
    def step(x, out):
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        dist.all_reduce(x)
        dist.all_gather_into_tensor(out, x)
        return y + functional.all_gather_tensor(x, 0, dist.group.WORLD)[:6]

    x, out = values(rank), torch.empty(6 * n)
    y = torch.compile(step, backend="aot_eager", fullgraph=True)(x, out)
    return [(y, 3 * total(n)), (x, total(n)), (out, total(n).repeat(n))]


def dtensors(rank, n):
    mesh, whole = init_device_mesh(torch.get_default_device().type, (n,)), torch.arange(24.0).view(8, 3)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    partial = torch.distributed.tensor.DTensor.from_local(values(rank, 8), mesh, [Partial()])
    matmul = distribute_tensor(torch.eye(8), mesh, [Shard(1)]) @ sharded  # partial sums
    return [
        (sharded.full_tensor(), whole),
        (partial.redistribute(placements=[Replicate()]).to_local(), total(n, 8)),
        (partial.redistribute(placements=[Shard(0)]).to_local(), total(n, 8).chunk(n)[rank]),
        (sharded.redistribute(placements=[Shard(1)]).full_tensor(), whole),
        (matmul.full_tensor(), whole),
    ]


def subgroups(rank, n):
    found = []
    for members in ([0, 2], [3, 1, 2], [1]):  # overlapping, out of order, alone
        group = dist.new_group(members)
        if rank in members:
            x, outs = values(rank), [torch.empty(6) for _ in members]
            dist.all_reduce(x, group=group)
            dist.all_gather(outs, values(rank), group=group)
            order = dist.get_process_group_ranks(group)
            found += [(x, sum(values(one) for one in members))]
            found += [(out, values(one)) for one, out in zip(order, outs, strict=True)]
            dist.broadcast(x, members[0], group=group)
    return found


def device_meshes(rank, n):
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    x, y = values(rank), values(rank)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    dist.all_reduce(y, group=mesh["dp"].get_group())
    return [(x, values(rank) + values(rank ^ 1)), (y, values(rank) + values(rank ^ 2))]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def gradients(model: nn.Module, rank: int) -> list[torch.Tensor]:
    model(values(rank).view(1, 6) / 100).square().mean().backward()
    return [one.grad for one in model.parameters()]


def mean_gradients(n: int) -> list[torch.Tensor]:
    by_rank = [gradients(make_model(), rank) for rank in range(n)]
    return [torch.stack(of_one).mean(0) for of_one in zip(*by_rank, strict=True)]


def ddp(rank, n):
    found = gradients(DistributedDataParallel(make_model(), bucket_cap_mb=0.0001), rank)
    return list(zip(found, mean_gradients(n), strict=True))


def fsdp(rank, n):
    model = fully_shard(make_model())
    found = [one.full_tensor() for one in gradients(model, rank)]
    return list(zip(found, mean_gradients(n), strict=True))


def wrong_sizes(rank, n):
    with pytest.raises(ValueError, match="reduce_scatter: needs a tensor for each of 4 ranks"):
        dist.reduce_scatter(torch.empty(2), [torch.empty(3)] * n)
    with pytest.raises(ValueError, match="all_gather: needs a tensor for each of 4 ranks"):
        dist.all_gather([torch.empty(3)] * (n - 1), torch.empty(3))
    group, options = dist.group.WORLD, dist.distributed_c10d
    with pytest.raises(ValueError, match="all_gather: the output must have 4 times the input's 3 elements, got 3"):
        group._allgather_base(torch.empty(3), torch.empty(3), options.AllgatherOptions())
    with pytest.raises(ValueError, match="reduce_scatter: the input must have 4 times the output's 3 elements, got 3"):
        group._reduce_scatter_base(torch.empty(3), torch.empty(3), options.ReduceScatterOptions())
    return [(torch.zeros(1), torch.zeros(1))]


PROGRAMS = {
    "averages": averages,
    "averages round once": averages_round_once,
    "averages of parts": averages_of_parts,
    "uneven parts": uneven_parts,
    "asynchronous calls": asynchronous_calls,
    "calls of the group itself": calls_of_the_group_itself,
    "recv from any rank": recv_from_any_rank,
    "calls of graphar": calls_of_graphar,
    "functional collectives": functional_collectives,
    "torch.compile": compiled,
    "DTensor": dtensors,
    "subgroups": subgroups,
    "device meshes": device_meshes,
    "DistributedDataParallel": ddp,
    "fully_shard": fsdp,
    "wrong sizes": wrong_sizes,
}
WITHOUT_GRAPHAR = ("wrong sizes", "recv from any rank")


# ---- the processes --------------------------------------------------------------------------------------------------


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


# ---- the backend's name ---------------------------------------------------------------------------------------------


def sum_and_meet(rank, world_size):
    x, integers = values(rank), values(rank, dtype=torch.int64)
    dist.all_reduce(x)
    dist.all_reduce(integers)
    dist.barrier()
    return torch.equal(x, total(world_size)), torch.equal(integers.float(), total(world_size)), dist.get_backend()


def test_the_backend_is_known_after_import():
    assert "graphar" in dist.Backend.backend_list

    backend.register()  # once more does nothing

    assert dist.Backend.backend_list.count("graphar") == 1


@pytest.mark.parametrize("name", ["graphar", "cpu:graphar", "cpu:gloo"])
def test_a_group_has_the_backend_by_every_name(name):
    for exact, also, found in run_ranks(sum_and_meet, 2, backend=name):
        assert exact
        assert also
        assert found == name


def init_beside_gloo(rank, world_size, port):
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("cpu:gloo,cuda:graphar", store=store, rank=rank, world_size=world_size)
    found = sum_and_meet(rank, world_size)
    return found, len(engine.open_engines)


def test_cpu_tensors_stay_with_gloo_where_the_backend_has_only_cuda():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for (exact, also, _), engines in run_ranks(init_beside_gloo, 2, store.port):
        assert exact
        assert also
        assert engines == 0


# ---- groups that are split, groups that end, and ranks that do not come ---------------------------------------------


def split(rank, world_size, port):
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    place = {"store": store, "rank": rank, "world_size": world_size, "device_id": torch.device("cpu:0")}
    dist.init_process_group(BACKEND, **place)
    found = []
    for parts in ([[0, 1], [2]], [[2, 0], [1]]):
        mine = next(part for part in parts if rank in part)
        group, x = dist.split_group(None, parts), values(rank)
        dist.all_reduce(x, group=group)
        dist.barrier(group=group)
        found.append((torch.equal(x, sum(values(one) for one in mine)), group.rank() == mine.index(rank)))
    if rank == 1:
        with pytest.raises(graphar.UnsupportedError, match=r"rank 1 of \w+ must be in one of the groups"):
            dist.split_group(None, [[0, 2]])
    else:
        dist.split_group(None, [[0, 2]])
    return found


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch before 2.15 splits no group of CPU tensors")
def test_a_group_is_split():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for found in run_ranks(split, 3, store.port, backend="gloo"):
        assert found == [(True, True)] * 2


def end_and_begin_again(rank, world_size, port):
    counts = []
    x = values(rank)
    dist.all_reduce(x)
    part = dist.new_group([0, 1])
    dist.all_reduce(x, group=part)
    counts.append(len(engine.open_engines))
    dist.destroy_process_group(part)
    counts.append(len(engine.open_engines))
    dist.destroy_process_group()
    counts.append(len(engine.open_engines))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    x = values(rank)
    dist.all_reduce(x)
    return counts, torch.equal(x, total(world_size))


def test_destroying_a_group_closes_its_communicator_and_another_can_be_made():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for counts, exact in run_ranks(end_and_begin_again, 2, store.port, backend=BACKEND):
        assert counts == [2, 1, 0]
        assert exact


def call_without_rank_1(rank, world_size, how):
    group = dist.new_group(timeout=timedelta(seconds=2))
    x = values(rank)
    dist.all_reduce(x, group=group)
    if rank == 1:
        if how == "killed":
            os._exit(0)
        time.sleep(4)
        return None
    begin = time.monotonic()
    try:
        dist.all_reduce(x, group=group)
    except graphar.CollectiveTimeout as error:
        return error.record.peer, time.monotonic() - begin, str(error)
    return None


@pytest.mark.parametrize("how", ["killed", "absent"])
def test_a_rank_that_does_not_come_is_named_in_time(how):
    lost = [1] if how == "killed" else []

    found = run_ranks(call_without_rank_1, 3, how, backend=BACKEND, lost=lost)

    for rank in (0, 2):
        peer, took_s, text = found[rank]
        assert peer == 1, text
        assert took_s < 4


def set_timeout(rank, world_size):
    group = dist.new_group()
    dist.all_reduce(values(rank), group=group)
    group.set_timeout(timedelta(seconds=1))
    if rank == 1:
        time.sleep(2.5)
        return None
    begin = time.monotonic()
    with pytest.raises(graphar.CollectiveTimeout):
        dist.all_reduce(values(rank), group=group)
    return time.monotonic() - begin


def test_the_time_out_of_a_group_can_be_changed():
    assert run_ranks(set_timeout, 2, backend=BACKEND)[0] < 2.5
