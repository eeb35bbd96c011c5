"""An all-gather of small parts in one hop: `direct_allgather.cu`, and what it computes."""

from pathlib import Path

import torch

import graphar

MAX_NBYTES = 256 << 10  # of the largest part


def with_another_nan(x):
    """Returns a part in which words of all ones, counted from its first element, are 0x7fff7fff."""
    nbytes = x.numel() * x.itemsize
    words = torch.zeros(-(-nbytes // 4), dtype=torch.int32)
    words.view(torch.uint8)[:nbytes] = x.flatten().view(torch.uint8).cpu()
    words[words == -1] = 0x7FFF7FFF
    return words.view(torch.uint8)[:nbytes].view(x.dtype).view_as(x).to(x.device)


def gathered(tensors):
    return graphar.reference.allgather([with_another_nan(x) for x in tensors])


direct_allgather = graphar.load_algorithm(
    Path(__file__).with_name("direct_allgather.cu"),
    op="allgather",
    scratch=lambda ranks: graphar.Scratch.of_slots(2 * ranks, MAX_NBYTES, fill=0xFF),
    dtypes=[torch.bfloat16, torch.float16, torch.float32],
    max_nbytes=MAX_NBYTES,
    threads=64,
    specification=gathered,
)
