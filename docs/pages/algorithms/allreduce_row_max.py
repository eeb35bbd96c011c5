"""An all-reduce that also finds the largest magnitude of each row: `allreduce_row_max.cu`, and what it computes."""

from pathlib import Path

import torch

import graphar

MAX_NBYTES = 1 << 20
COLUMNS = 1024  # as `columns` in allreduce_row_max.cu
INTEGERS = {2: torch.int16, 4: torch.int32}  # in the order of magnitudes, with NaN last


def sums_and_row_max(tensors):
    """Adds in rank order. Elements of a row from COLUMNS on get the largest magnitude of those before."""
    sums = graphar.reference.allreduce(tensors)
    for row in sums.view(-1).split(COLUMNS + 16 // sums.itemsize):
        if row.numel() > COLUMNS:
            bits = row.view(INTEGERS[sums.itemsize])
            bits[COLUMNS:] = row[:COLUMNS].abs().view(bits.dtype).max()
    return sums


allreduce_row_max = graphar.load_algorithm(
    Path(__file__).with_name("allreduce_row_max.cu"),
    op="allreduce",
    scratch=lambda ranks: graphar.Scratch.of_slots(2 * ranks, MAX_NBYTES, fill=0xFF),
    max_nbytes=MAX_NBYTES,
    threads=64,
    specification=sums_and_row_max,
)
