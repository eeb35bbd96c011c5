"""Tables of NVLink traffic, from the hardware's counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def link_table(rows: Sequence[Row]) -> str:
    """Returns a table with a row for each link and a column for each method. Empty without figures of single links."""
    shares: dict[str, Mapping[int, float | None]] = {
        row.method: {link.link: link.raw_share for link in row.nvlink.links} for row in rows
    }
    links = sorted({link for by_link in shares.values() for link in by_link})
    cells = [[str(link), *(_percent(by_link.get(link)) for by_link in shares.values())] for link in links]
    return table(["link", *(f"{name} (%)" for name in shares)], cells) if links else ""


def _percent(share: float | None) -> str:
    return NOT_SERVED if share is None else f"{100 * share:.1f}"
