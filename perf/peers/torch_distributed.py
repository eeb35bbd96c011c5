"""torch's all-reduces: NCCL and gloo, NCCL with registered memory, and kernels over symmetric memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from graphar.plan.sizes import GB, MB
from perf.harness.cases import Plan
from perf.harness.ranks import Ranks
from perf.peers.methods import Family, Method, Pair, symmetric, up_to

NCCL_WINDOW_MAX_NBYTES = 256 * MB
# Larger one-shots send so much more than two-shots that nobody would use them.
ONE_SHOT_MAX_NBYTES = 16 * MB
TWO_SHOT_MAX_NBYTES = 1 * GB


def make_backend(name: str) -> Method:
    """Returns torch.distributed's all-reduce on the default group."""
    return Method(name, all_reduce, in_place=True)


def all_reduce(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def make_nccl_window(plan: Plan, ranks: Ranks) -> list[Method]:
    backend = dist.group.WORLD._get_backend(ranks.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    dtype = getattr(torch, plan.dtypes[0])
    max_nbytes = up_to(plan, NCCL_WINDOW_MAX_NBYTES)
    with torch.cuda.use_mem_pool(pool):
        buffer = torch.empty(max_nbytes // dtype.itemsize, dtype=dtype, device=ranks.device)
    backend.register_mem_pool(pool, symm=True)
    return [Method("nccl_window", all_reduce, in_place=True, buffer=buffer, max_nbytes=max_nbytes, keeps=pool)]


def make_symm(plan: Plan, ranks: Ranks) -> list[Method]:
    dtype = getattr(torch, plan.dtypes[0])
    one_shot, two_shot = (up_to(plan, limit) for limit in (ONE_SHOT_MAX_NBYTES, TWO_SHOT_MAX_NBYTES))
    buffer, _ = symmetric(max(two_shot, 2 * one_shot), dtype)
    half = one_shot // dtype.itemsize
    pair = Pair(buffer[:half], buffer[half : 2 * half])
    group_name = dist.group.WORLD.group_name

    def call_one_shot(x: Tensor) -> Tensor:
        return torch.ops.symm_mem.one_shot_all_reduce_out(x, "sum", group_name, pair.opposite(x))

    def call_two_shot(x: Tensor) -> Tensor:
        return torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", group_name)

    return [
        Method("symm_one_shot", call_one_shot, buffer=pair.first, max_nbytes=one_shot),
        Method("symm_two_shot", call_two_shot, in_place=True, buffer=buffer, max_nbytes=two_shot),
    ]


FAMILIES = (Family(("nccl_window",), make_nccl_window), Family(("symm_one_shot", "symm_two_shot"), make_symm))
