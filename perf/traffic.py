"""Tables of NVLink traffic, from the hardware's counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphar.plan.sizes import format_nbytes
from perf.harness.cases import Row
from perf.md import NOT_SERVED, table

NVLINK_NOTES = """\
The counters were read on the first rank's GPU, for one replay of the timed CUDA graph.

- payload efficiency: the bytes that an all-reduce must send / the payload that was sent. It must send 2(N-1)/N times
  its size. With lossless compression the efficiency is above 1.
- protocol overhead: the bytes sent in addition to the payload / the payload.
- link balance: the payload of the least loaded link / the payload of the most loaded link.
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
    """Returns a table with a row for each link and a column for each method. Empty without figures of single links."""
    shares: dict[str, Mapping[int, float | None]] = {
        row.method: {link.link: link.raw_share for link in row.nvlink.links} for row in rows
    }
    links = sorted({link for by_link in shares.values() for link in by_link})
    cells = [[str(link), *(_percent(by_link.get(link)) for by_link in shares.values())] for link in links]
    return table(["link", *(f"{name} (%)" for name in shares)], cells) if links else ""


def _percent(share: float | None) -> str:
    return NOT_SERVED if share is None else f"{100 * share:.1f}"
