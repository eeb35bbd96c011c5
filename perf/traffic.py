"""Tables of NVLink traffic, from the hardware's counters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from graphar.plan.sizes import format_nbytes
from perf.harness.cases import Row
from perf.md import NOT_SERVED, columns, text_beside

NVLINK_NOTES = text_beside(__name__)


def traffic_table(rows: Sequence[Row]) -> str:
    def ratio(row: Row, name: str) -> str:
        value = getattr(row.nvlink, name)
        return NOT_SERVED if value is None else f"{value:.3f}"

    names = ("payload_efficiency", "protocol_overhead", "link_balance", "raw_share")
    ratios = {name.replace("_", " "): partial(ratio, name=name) for name in names}
    return columns(rows, {"size": lambda row: format_nbytes(row.nbytes), "method": lambda row: row.method, **ratios})
