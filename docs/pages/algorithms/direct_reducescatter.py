"""A reduce-scatter of small parts in one hop: `direct_reducescatter.cu`, with the exact bits of the op."""

import graphar

MAX_NBYTES = 256 << 10  # of the largest part

direct_reducescatter = graphar.load_algorithm(
    "direct_reducescatter.cu",
    op="reducescatter",
    scratch=lambda ranks: graphar.Scratch.of_slots(2 * ranks, MAX_NBYTES, fill=0xFF),
    max_nbytes=MAX_NBYTES,
    threads=64,
)
