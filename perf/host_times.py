"""The table of host times of eager all-reduces. It distinguishes methods by the tensor that they write to."""

from __future__ import annotations

from collections.abc import Sequence

from graphar.plan.sizes import format_nbytes
from perf.harness.cases import HOST_MODES, Row
from perf.md import NOT_SERVED, ratio_cell, table, time_cell
from perf.ratios import best_peer, ratio

OUTPUTS = {  # the tensor that each method writes to
    "a new tensor": (
        *("graphar", "vllm_unregistered"),
        *("sglang_one_shot_push", "sglang_two_shot_push", "sglang_two_shot_pull"),
    ),
    "a given tensor": ("graphar_out", "graphar_symmetric", "vllm", "symm_one_shot"),
    "the input": ("nccl", "symm_two_shot"),
}


def host_table(rows: Sequence[Row]) -> list[str]:
    """Returns a caption and a table of host times by method and output; an empty list for other modes."""
    mine = [row for row in rows if row.mode in HOST_MODES]
    if not mine:
        return []
    lines = []
    for row in sorted(mine, key=lambda row: (row.nbytes, row.median)):
        output = next((name for name, ones in OUTPUTS.items() if row.method in ones), NOT_SERVED)
        peer = best_peer([one for one in mine if one.nbytes == row.nbytes])
        compared = ratio_cell(ratio(row, peer)) if row.is_own else NOT_SERVED
        lines.append([row.method, format_nbytes(row.nbytes), output, time_cell(row), compared])
    header = ["method", "size", "writes to", "host time (us)", "of_best_peer"]
    return ["Host time of a call, by the tensor that it writes to:", table(header, lines)]
