"""Every entry point of torch.distributed, as a call with a group: what the backend's tests make, also over gloo."""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn


def values(rank: int, numel: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Integers that sum exactly in any order, and differ by rank and place."""
    return (torch.arange(numel) + 10 * rank).to(dtype)


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


def results_with_gaps(group, rank, n):
    part, whole = torch.zeros(3, 2).t()[:1], torch.zeros(3, 2 * n).t()  # gloo takes contiguous tensors alone
    part, whole = (part.contiguous(), whole.contiguous()) if is_gloo(group) else (part, whole)
    dist.reduce_scatter_tensor(part, values(rank, 3 * n).view(n, 3), group=group)
    dist.all_gather_into_tensor(whole, values(rank).view(2, 3), group=group)
    return [part, whole]


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
    dist.broadcast(x, 1 % n, group=group)
    return x


def reduce(group, rank, n):
    x = values(rank)
    dist.reduce(x, 1 % n, group=group)
    return x if rank == 1 % n else torch.zeros(6)  # elsewhere the result is undefined


def gather(group, rank, n):
    outs = [torch.empty(6) for _ in range(n)] if rank == 1 % n else None
    dist.gather(values(rank), outs, 1 % n, group=group)
    return outs or []


def scatter(group, rank, n):
    out = torch.empty(6)
    dist.scatter(out, [values(one) for one in range(n)] if rank == 1 % n else None, 1 % n, group=group)
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
    if rank == n - 2:
        dist.send(x, n - 1, group=group)
    if rank == n - 1:
        dist.recv(x, n - 2, group=group)
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
    time.sleep(0.3 if rank == 1 % n else 0)
    dist.barrier(group=group)
    return torch.tensor(time.monotonic() - begin > 0.25)


def all_gather_object(group, rank, n):
    found = [None] * n
    dist.all_gather_object(found, {"rank": rank, "of": "x" * rank}, group=group)
    return found


def broadcast_object_list(group, rank, n):
    found = [{"rank": rank}, rank]
    dist.broadcast_object_list(found, 1 % n, group=group)
    return found


def gather_object(group, rank, n):
    found = [None] * n if rank == 1 % n else None
    dist.gather_object({"rank": rank}, found, 1 % n, group=group)
    return found


def scatter_object_list(group, rank, n):
    found = [None]
    dist.scatter_object_list(found, [{"to": one} for one in range(n)] if rank == 1 % n else None, 1 % n, group=group)
    return found


def send_object_list(group, rank, n):
    found = [{"rank": rank}, rank]
    if rank == n - 2:
        dist.send_object_list(found, n - 1, group=group)
    if rank == n - 1:
        dist.recv_object_list(found, n - 2, group=group)
    return found


class Entry(NamedTuple):
    """An entry point: its row in the table of docs/pages/backend.md, and a call."""

    row: str
    call: Callable


SUMS, OTHER_OPS = "`all_reduce` of sums and averages", "`all_reduce` of maxima, minima, products and bits"
OTHER_DTYPES = "sums of fp64, integers and other dtypes"
SCATTERS = "`reduce_scatter`, `reduce_scatter_tensor` of sums and averages"
GATHERS = "`all_gather`, `all_gather_into_tensor` of any dtype"
MORE_GATHERS = "`all_gather_object`, and the sizes in `gather_object`"
OBJECTS = "`broadcast_object_list`, `scatter_object_list`, `send_object_list`, `recv_object_list`"
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
    "results with gaps": Entry(SCATTERS, results_with_gaps),
    "all_gather": Entry(GATHERS, all_gather),
    "all_gather of int64": Entry(GATHERS, functools.partial(all_gather, dtype=torch.int64)),
    "all_gather of fp64": Entry(GATHERS, functools.partial(all_gather, dtype=torch.float64)),
    "all_gather_into_tensor": Entry(GATHERS, all_gather_into_tensor),
    "all_gather from its output": Entry(GATHERS, all_gather_from_its_output),
    "all_gather_coalesced": Entry("`all_gather_coalesced`", all_gather_coalesced),
    "coalescing_manager": Entry("sums and all-gathers in a `_coalescing_manager`", coalescing_manager),
    "all_gather_object": Entry(MORE_GATHERS, all_gather_object),
    "gather_object": Entry(MORE_GATHERS, gather_object),
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
    "all_to_all_single": Entry("`all_to_all`, `all_to_all_single` of any dtype and sizes", all_to_all_single),
    "all_to_all of uneven parts": Entry(
        "`all_to_all`, `all_to_all_single` of any dtype and sizes", all_to_all_of_uneven_parts
    ),
    "send and recv": Entry(POINTS, send_and_recv),
    "batch_isend_irecv": Entry(POINTS, batch_isend_irecv),
    "barrier": Entry("`barrier`", barrier),
    "broadcast_object_list": Entry(OBJECTS, broadcast_object_list),
    "scatter_object_list": Entry(OBJECTS, scatter_object_list),
    "send_object_list": Entry(OBJECTS, send_object_list),
}


def is_gloo(group) -> bool:
    return dist.get_backend(group) == "gloo"
