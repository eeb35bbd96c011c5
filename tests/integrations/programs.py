"""Programs over the backend "graphar": each returns pairs of a result and what is expected."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import graphar
from graphar.runtime.watch.hook import watching
from tests.integrations.entry_points import values

WHOLE_GROUP = torch.__version__ < "2.14"  # the backend is then a process group in Python


def total(n: int, numel: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return graphar.reference.allreduce([values(rank, numel, dtype) for rank in range(n)])


def data(rank: int, numel: int) -> torch.Tensor:
    made = torch.randn(numel, generator=torch.Generator("cpu").manual_seed(rank), device="cpu")
    return made.to(torch.get_default_device())


def mean(n: int, numel: int) -> torch.Tensor:
    return graphar.reference.allreduce([data(rank, numel) for rank in range(n)]) / n


def equal(found: torch.Tensor, expected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the pair; AssertionError unless both have the same bits, which later comparisons do not ask."""
    assert torch.equal(found, expected), f"{found} is not {expected}"
    return found, expected


def averages_round_once(rank, n):
    x = data(rank, 120 * n).bfloat16()  # whose sum is not a bf16
    expected = (sum(data(one, 120 * n).bfloat16().float() for one in range(n)) / n).bfloat16()
    part, single = torch.empty(120).bfloat16(), torch.empty(120).bfloat16()
    dist.reduce_scatter(part, list(x.split(120)), dist.ReduceOp.AVG)
    dist.reduce_scatter_tensor(single, x, dist.ReduceOp.AVG)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    own = expected.split(120)[rank]
    return [equal(x, expected), equal(part, own), equal(single, own)]


def averages_in_fp32(rank, n):
    out, single, whole = torch.empty(rank + 100), torch.empty(300), data(rank, 1000)
    dist.all_reduce(whole, dist.ReduceOp.AVG)
    lengths = [one + 100 for one in range(n)]
    dist.reduce_scatter(out, list(data(rank, sum(lengths)).split(lengths)), dist.ReduceOp.AVG)
    dist.reduce_scatter_tensor(single, data(rank, 300 * n), dist.ReduceOp.AVG)
    part = mean(n, sum(lengths)).split(lengths)[rank]
    return [equal(out, part), equal(single, mean(n, 300 * n).chunk(n)[rank]), equal(whole, mean(n, 1000))]


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
    if x.is_cuda:
        torch.cuda.synchronize()  # wait() makes the stream wait, not the host
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
    group.barrier().wait()
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


def batches_of_sends(rank, n):
    # As one batch, also where a group in Python has torch make its calls one by one.
    out, group = torch.empty(6), dist.group.WORLD
    ops = [dist.P2POp(dist.isend, values(rank), (rank + 1) % n), dist.P2POp(dist.irecv, out, (rank - 1) % n)]
    with mock.patch.object(group, "send", side_effect=AssertionError) if WHOLE_GROUP else contextlib.nullcontext():
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return [(out, values((rank - 1) % n))]


def coalesced_calls(rank, n):
    """Small tensors make one launch, large ones their own, with the bits of single calls."""
    numels = [3, 0, 12, 1 << 18, 5, 7]  # in fp32, 2 packs beside the one of 1 MiB
    made = torch.Generator(torch.get_default_device()).manual_seed(rank)
    xs = [torch.randn(n * numel, generator=made) for numel in numels]
    xs[2] = xs[2].view(3, 4 * n).t()
    found = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        together, alone = ([x.clone() for x in xs] for _ in range(2))
        with launches() as ops, coalescing_manager():
            for x in together:
                dist.all_reduce(x, op)
        assert ops == ["allreduce"] * 3, ops
        for x in alone:
            dist.all_reduce(x, op)
        found += zip(together, alone, strict=True)
        together, alone = ([torch.empty(numel) for numel in numels] for _ in range(2))
        with launches() as ops, coalescing_manager(async_ops=True) as works:
            for out, x in zip(together, xs, strict=True):
                dist.reduce_scatter_tensor(out, x, op)
        works.wait()
        assert ops == ["reducescatter"] * 3, ops
        for out, x in zip(alone, xs, strict=True):
            dist.reduce_scatter_tensor(out, x, op)
        found += zip(together, alone, strict=True)
    together, alone = ([torch.empty(n * x.numel()) for x in xs] for _ in range(2))
    with launches() as ops, coalescing_manager():
        for out, x in zip(together, xs, strict=True):
            dist.all_gather_into_tensor(out, x)
    assert ops == ["allgather"] * 3, ops
    for out, x in zip(alone, xs, strict=True):
        dist.all_gather_into_tensor(out, x)
    found += zip(together, alone, strict=True)
    assert all(torch.equal(one, other) for one, other in found)
    return found


@contextlib.contextmanager
def launches():
    """The ops of calls that graphar serves meanwhile."""
    ops = []

    def record(engine, call, ranks):
        ops.append(call.op)
        return contextlib.nullcontext()

    with watching(record):
        yield ops


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
    sent = functional.broadcast(x, 1 % n, group)
    # What Inductor makes of all-gathers that it puts into one bucket.
    gather_into = torch.ops._c10d_functional.all_gather_into_tensor_out
    bucket = gather_into(x, n, group.group_name, out=torch.empty(3 * n * n))
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
            (bucket, whole),
            (sent, values(1 % n, 3 * n)),
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


def compiled_with_breaks(rank, n):
    """What torch.compile does not trace: it calls the group's methods, twice."""

    def step(x):
        dist.broadcast(x, 1 % n)
        dist.barrier()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        if n == 1:
            return x + 1
        out = torch.empty_like(x)
        ops = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, out, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return out + 1

    step = torch.compile(step, backend="aot_eager")
    return [(step(values(rank)), values(1 % n) + 1) for _ in range(2)]


def compiled_ddp(rank, n):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    batches = [[data(10 * step + one, 24).view(4, 6) for one in range(n)] for step in range(2)]
    model = torch.compile(DistributedDataParallel(copy.deepcopy(eager)), backend="aot_eager")
    found = []
    for batch in batches:
        for one in (model, eager):
            one.zero_grad()
        model(batch[rank]).square().mean().backward()
        for x in batch:
            (eager(x).square().mean() / n).backward()
        found += [(one.grad, other.grad) for one, other in zip(model.parameters(), eager.parameters(), strict=True)]
    return found


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
    for members in ([n - 1, 0], [n - 1, *range(1, n - 1)], [1]):  # overlapping, out of order, alone
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
    rows, columns = (n // 2, 2) if n % 2 == 0 else (1, n)
    mesh = init_device_mesh(torch.get_default_device().type, (rows, columns), mesh_dim_names=("dp", "tp"))
    x, y = values(rank), values(rank)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    dist.all_reduce(y, group=mesh["dp"].get_group())
    first = rank - rank % columns
    of_row = sum(values(one) for one in range(first, first + columns))
    of_column = sum(values(one) for one in range(rank % columns, n, columns))
    return [(x, of_row), (y, of_column)]


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
    with pytest.raises(ValueError, match=f"reduce_scatter: needs a tensor for each of {n} ranks"):
        dist.reduce_scatter(torch.empty(2), [torch.empty(3)] * n)
    with pytest.raises(ValueError, match=f"all_gather: needs a tensor for each of {n} ranks"):
        dist.all_gather([torch.empty(3)] * (n - 1), torch.empty(3))
    group, options = dist.group.WORLD, dist.distributed_c10d
    with pytest.raises(ValueError, match=f"all_gather: the output must have {n} times the input's 3 elements, got 4"):
        group._allgather_base(torch.empty(4), torch.empty(3), options.AllgatherOptions())
    with pytest.raises(
        ValueError, match=f"reduce_scatter: the input must have {n} times the output's 3 elements, got 4"
    ):
        group._reduce_scatter_base(torch.empty(3), torch.empty(4), options.ReduceScatterOptions())
    return [(torch.zeros(1), torch.zeros(1))]


def several_tensors_of_a_rank(rank, n):
    """gloo adds the tensors of a rank to each other, and NCCL does not take them."""
    group, xs = dist.group.WORLD, [values(rank), values(rank)]
    for dtype in (torch.float32, torch.int64):  # graphar's, and torch's own group's
        with pytest.raises(ValueError, match=r"all_reduce: takes one tensor of each rank, got 2; make a call for each"):
            group.allreduce([x.to(dtype) for x in xs])
        with pytest.raises(ValueError, match=r"all_gather: takes one tensor of each rank, got 2; make a call for each"):
            group.allgather([[torch.empty(6, dtype=dtype)] * 2 * n] * 2, [x.to(dtype) for x in xs])
        with pytest.raises(ValueError, match="reduce_scatter: takes one tensor of each rank, got 2; make a call for"):
            group.reduce_scatter([x.to(dtype) for x in xs], [[x.to(dtype)] * n for x in xs])
    dist.all_reduce_coalesced(xs)
    return [(x, total(n)) for x in xs]


PROGRAMS = {
    program.__name__.replace("_", " "): program
    for program in (
        *(averages_round_once, averages_in_fp32, uneven_parts, asynchronous_calls, calls_of_the_group_itself),
        *(recv_from_any_rank, batches_of_sends, coalesced_calls, calls_of_graphar, functional_collectives),
        *(compiled, compiled_with_breaks, compiled_ddp, dtensors, subgroups, device_meshes, ddp, fsdp),
        *(wrong_sizes, several_tensors_of_a_rank),
    )
}
WITHOUT_GRAPHAR = ("compiled with breaks", "wrong sizes", "recv from any rank", "batches of sends", "pipeline")
