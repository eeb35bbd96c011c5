"""The tables of the traffic that NVLink's counters counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphar.plan.sizes import format_nbytes
from perf.harness.cases import Row
from perf.report import NOT_SERVED, table

NVLINK_NOTES = """\
The counters are those of the first rank's GPU, during one replay of the timed CUDA graph.

- payload efficiency: the bytes that an all-reduce must send, 2(N-1)/N of its size / the payload that was sent. With
  lossless compression it is above 1.
- protocol overhead: the bytes sent besides the payload / the payload.
- link balance: the payload of the least loaded link / that of the most loaded link.
- raw share: all bytes that were sent / the bytes that the links' raw rate allows in that time."""


def traffic_table(rows: Sequence[Row]) -> str:
    columns = ("payload_efficiency", "protocol_overhead", "link_balance", "raw_share")
    lines = []
    for row in rows:
        ratios = (getattr(row.nvlink, name) for name in columns)
        cells = (NOT_SERVED if one is None else f"{one:.3f}" for one in ratios)
        lines.append([format_nbytes(row.nbytes), row.method, *cells])
    return table(["size", "method", *(name.replace("_", " ") for name in columns)], lines)


def link_table(rows: Sequence[Row]) -> str:
    """Returns a table with a row for each link, a column for each method; empty without figures of single links."""
    shares: dict[str, Mapping[int, float | None]] = {
        row.method: {link.link: link.raw_share for link in row.nvlink.links} for row in rows
    }
    links = sorted({link for by_link in shares.values() for link in by_link})
    cells = [[str(link), *(_percent(by_link.get(link)) for by_link in shares.values())] for link in links]
    return table(["link", *(f"{name} (%)" for name in shares)], cells) if links else ""


def _percent(share: float | None) -> str:
    return NOT_SERVED if share is None else f"{100 * share:.1f}"
