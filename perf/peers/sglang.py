"""SGLang's all-reduces: one-shot push and two-shot push with flags in the data, and two-shot pull."""

from __future__ import annotations

import torch
from torch import Tensor

from graphar.plan.sizes import MB
from perf.harness.cases import Plan
from perf.harness.ranks import Ranks
from perf.peers.methods import Family, Method, symmetric, up_to

ONE_SHOT_MAX_NBYTES = 8 * MB
TWO_SHOT_MAX_NBYTES = 64 * MB
PULL_MAX_NBYTES = 256 * MB

PACK_NBYTES = 16
SEMAPHORE_NBYTES = 128  # the semaphore of a block
PULL_BLOCKS = 96  # with more than 2 ranks; with 2 ranks there is a block on every SM


def load(plan: Plan) -> None:
    from sglang.kernels.ops.communication import all_reduce

    all_reduce.get_all_reduce_module(getattr(torch, plan.dtypes[0]), plan.world_size)


def make(plan: Plan, ranks: Ranks) -> list[Method]:
    from sglang.kernels.ops.communication.all_reduce import AllReduceAlgo, custom_all_reduce

    communicator, keeps = make_communicator(plan, ranks)

    def method(name: str, algo: AllReduceAlgo, max_nbytes: int) -> Method:
        def call(x: Tensor) -> Tensor:
            return custom_all_reduce(communicator, x, algo)

        return Method(name, call, max_nbytes=max_nbytes, keeps=keeps)

    return [
        method("sglang_one_shot_push", AllReduceAlgo.ONE_SHOT_PUSH, ONE_SHOT_MAX_NBYTES),
        method("sglang_two_shot_push", AllReduceAlgo.TWO_SHOT_PUSH, TWO_SHOT_MAX_NBYTES),
        method("sglang_two_shot_pull", AllReduceAlgo.TWO_SHOT_PULL, PULL_MAX_NBYTES),
    ]


def make_communicator(plan: Plan, ranks: Ranks) -> tuple[object, object]:
    """Returns SGLang's communicator, and the symmetric memory that it uses.

    The memory holds slots for pushes, a workspace for pulls, and semaphores.
    """
    from sglang.kernels.ops.communication.all_reduce import Communicator, PullPlane, PushPlane

    size = ranks.size
    sm_count = torch.cuda.get_device_properties(ranks.device).multi_processor_count
    pull_blocks = sm_count if size == 2 else min(PULL_BLOCKS, sm_count)
    slot = slot_nbytes(plan, size)
    push, pull = 2 * size * slot, aligned(up_to(plan, PULL_MAX_NBYTES))
    nbytes = push + pull + pull_blocks * SEMAPHORE_NBYTES
    mine, handle = symmetric(nbytes)
    mine.zero_()
    counter = torch.zeros(sm_count, 1, dtype=torch.int32, device=ranks.device)
    ranks.barrier()
    everyone = [handle.get_buffer(rank, [nbytes], torch.uint8, handle.offset) for rank in range(size)]
    push_plane = PushPlane(
        ranks.rank,
        size,
        workspaces=[memory[:push].view(2 * size, slot) for memory in everyone],
        counter=counter.view(torch.uint8),
    )
    pull_plane = PullPlane(
        ranks.rank,
        size,
        workspaces=[memory[push : push + pull] for memory in everyone],
        semaphores=[memory[push + pull :].view(pull_blocks, SEMAPHORE_NBYTES) for memory in everyone],
    )
    return Communicator(push=push_plane, pull=pull_plane), (mine, handle, counter)


def slot_nbytes(plan: Plan, world_size: int) -> int:
    """Returns the size of a slot. It holds a rank's input in a one-shot, or a shard and its sum in a two-shot."""
    packs = -(-up_to(plan, TWO_SHOT_MAX_NBYTES) // PACK_NBYTES)
    shard = -(-packs // world_size) * PACK_NBYTES
    return aligned(max(up_to(plan, ONE_SHOT_MAX_NBYTES), 2 * shard))


def aligned(nbytes: int) -> int:
    return -(-nbytes // SEMAPHORE_NBYTES) * SEMAPHORE_NBYTES


FAMILIES = (Family(("sglang_one_shot_push", "sglang_two_shot_push", "sglang_two_shot_pull"), make, load),)
