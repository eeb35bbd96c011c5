"""The tables of the all-reduce report, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from graphar.plan.sizes import format_nbytes
from perf.cases import TOKENS, token_sizes
from perf.compare import baseline, best, best_peer, methods_of, of_best_peer
from perf.rows import Row

NOT_SERVED = "-1"
BACKENDS = ("gloo", "nccl", "graphar")  # in the order of their columns


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column left, the rest right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def size_table(rows: Sequence[Row], link_ceiling: float | None = None) -> str:
    """Sizes down; graphar's figures, and beside them its best peer's."""
    header = [
        "size",
        "graphar (us)",
        "algbw (GB/s)",
        "busbw (GB/s)",
        "best peer",
        "best peer (us)",
        "of_best_peer",
        "of_link",
        "algorithm",
    ]
    ratios = of_best_peer(rows)
    lines = []
    for nbytes, by_method in by_size(rows):
        ours, peer = by_method.get("graphar"), best_peer(by_method.values())
        lines.append(
            [
                format_nbytes(nbytes),
                time_cell(ours),
                f"{ours.algbw:.1f}" if ours else "-",
                f"{ours.busbw:.1f}" if ours else "-",
                peer.method if peer else "-",
                time_cell(peer),
                f"{ratios[nbytes]:.2f}" if nbytes in ratios else "-",
                f"{ours.busbw / link_ceiling:.2f}" if ours and link_ceiling else "-",
                (ours and ours.algorithm) or "-",
            ]
        )
    return table(header, lines)


def method_table(rows: Sequence[Row]) -> str:
    """Sizes down, methods across: milliseconds, and the speed-up over the baseline."""
    methods = methods_of(rows)
    lines = []
    for nbytes, by_method in by_size(rows):
        base = baseline(by_method.values())
        cells = [speed_up_cell(by_method[name], base) if name in by_method else NOT_SERVED for name in methods]
        lines.append([format_nbytes(nbytes), *cells])
    return table(["size", *(f"{name} (ms)" for name in methods)], lines)


def backend_table(rows: Sequence[Row]) -> str:
    """Sizes down, ranks and backends across: milliseconds, and graphar's speed-up."""
    columns = sorted({(row.world_size, row.method) for row in rows}, key=lambda one: (one[0], BACKENDS.index(one[1])))
    lines = []
    for nbytes in sorted({row.nbytes for row in rows}):
        found = {(row.world_size, row.method): row for row in rows if row.nbytes == nbytes}
        cells = [
            speed_up_cell(found[at], _base_of(found[at], found.values())) if at in found else NOT_SERVED
            for at in columns
        ]
        lines.append([format_nbytes(nbytes), *cells])
    return table(["size", *(f"{world_size} ranks: {method}" for world_size, method in columns)], lines)


def _base_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """What graphar's row is compared with."""
    alike = (one for one in rows if (one.world_size, one.mode) == (row.world_size, row.mode))
    return baseline(alike) if row.is_own else None


def token_table(rows: Sequence[Row]) -> str:
    """Tokens down, methods across, in microseconds; then the best method, and its speed-up over the baseline."""
    methods = methods_of(rows)
    tokens_of = dict(zip(token_sizes(rows[0].dtype), TOKENS, strict=True))
    lines = []
    for nbytes, by_method in by_size(rows):
        winner, base = best(by_method.values()), baseline(by_method.values())
        lines.append(
            [
                str(tokens_of[nbytes]),
                *(time_cell(by_method[name]) if name in by_method else NOT_SERVED for name in methods),
                winner.method if winner else "-",
                f"{base.median / winner.median:.2f}x" if winner and base else "-",
            ]
        )
    return table(["tokens", *(f"{name} (us)" for name in methods), "best method", "over nccl"], lines)


def dtype_table(rows: Sequence[Row]) -> str:
    """Sizes down, methods and dtypes across: microseconds, and how many times the first dtype's for as many bytes."""
    first, *others = dict.fromkeys(row.dtype for row in rows)
    methods = methods_of(row for row in rows if row.dtype in others)
    lines = []
    for nbytes in sorted({row.nbytes for row in rows if row.dtype in others}):
        found = {(row.method, row.dtype): row for row in rows if row.nbytes == nbytes}
        line = [format_nbytes(nbytes)]
        for method in methods:
            base = found.get((method, first))
            line.append(time_cell(base))
            for dtype in others:
                row = found.get((method, dtype))
                ratio = f" ({row.median / base.median:.2f})" if row and base else ""
                line.append(time_cell(row) + ratio)
        lines.append(line)
    return table(["size", *(f"{method} {dtype}" for method in methods for dtype in (first, *others))], lines)


def nvlink_table(rows: Sequence[Row]) -> str:
    """A line for every row whose traffic was counted."""
    columns = ("payload_efficiency", "protocol_overhead", "link_balance", "raw_share")
    lines = [
        [
            str(row.world_size),
            format_nbytes(row.nbytes),
            row.method,
            *(ratio_cell(row.nvlink[name]) for name in columns),
        ]
        for row in rows
        if row.nvlink
    ]
    return table(["ranks", "size", "method", *(name.replace("_", " ") for name in columns)], lines)


def by_size(rows: Sequence[Row]) -> list[tuple[int, Mapping[str, Row]]]:
    """The rows of each size, by method."""
    sizes = sorted({row.nbytes for row in rows})
    return [(nbytes, {row.method: row for row in rows if row.nbytes == nbytes}) for nbytes in sizes]


def time_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    text = f"{row.median:.3g}" if row.median < 100 else f"{row.median:.0f}"
    return flagged(text, row)


def ratio_cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def speed_up_cell(row: Row, base: Row | None) -> str:
    milliseconds = f"{row.median / 1e3:.4g}"
    return flagged(f"{milliseconds} ({base.median / row.median:.2f}x)" if base else milliseconds, row)


def flagged(text: str, row: Row) -> str:
    return f"{text} **({row.wrong} WRONG)**" if row.wrong else text
