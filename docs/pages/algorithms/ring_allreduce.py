"""An all-reduce around a ring: `ring_allreduce.cu`, and what it computes."""

from pathlib import Path

import torch

import graphar

MAX_NBYTES = 4 << 20
LINE_NBYTES = 128  # shards begin at whole lines


def scratch(ranks):
    """2 (ranks - 1) slots of a shard for each of two calls."""
    shard_nbytes = -(-MAX_NBYTES // (ranks * LINE_NBYTES)) * LINE_NBYTES
    return graphar.Scratch.of_slots(4 * (ranks - 1), shard_nbytes, fill=0xFF)


def around_the_ring(tensors):
    """Adds shard s from rank s on around the ring, and rounds each partial sum to the dtype."""
    ranks, line = len(tensors), LINE_NBYTES // tensors[0].itemsize
    shard = -(-tensors[0].numel() // (ranks * line)) * line
    sums = []
    for s, of_ranks in enumerate(zip(*(x.flatten().split(shard) for x in tensors), strict=True)):
        total = of_ranks[s]
        for hop in range(1, ranks):
            total = graphar.reference.allreduce([total, of_ranks[(s + hop) % ranks]])
        sums.append(total)
    return torch.cat(sums).view_as(tensors[0])


ring_allreduce = graphar.load_algorithm(
    Path(__file__).with_name("ring_allreduce.cu"),
    op="allreduce",
    scratch=scratch,
    max_nbytes=MAX_NBYTES,
    threads=128,
    specification=around_the_ring,
)
