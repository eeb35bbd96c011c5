"""Tables of NVLink traffic, from the hardware's counters."""

from __future__ import annotations

from collections.abc import Sequence

from graphar.plan.sizes import format_nbytes
from perf.harness.cases import Row
from perf.md import NOT_SERVED, table, text_beside

NVLINK_NOTES = text_beside(__name__)


def traffic_table(rows: Sequence[Row]) -> str:
    columns = ("payload_efficiency", "protocol_overhead", "link_balance", "raw_share")
    lines = []
    for row in rows:
        ratios = (getattr(row.nvlink, name) for name in columns)
        cells = (NOT_SERVED if one is None else f"{one:.3f}" for one in ratios)
        lines.append([format_nbytes(row.nbytes), row.method, *cells])
    return table(["size", "method", *(name.replace("_", " ") for name in columns)], lines)
