"""The first screen: the machine, what was measured, and how good graphar is there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from graphar.sizes import format_nbytes
from perf.compare import (
    BASELINES,
    MODES,
    NOISE,
    baseline,
    best_peer,
    groups,
    members,
    methods_of,
    of_best_peer,
    verdict,
)
from perf.page.allreduce import against_best_peer, answering
from perf.page.markdown import inline, render_list
from perf.page.svg import render
from perf.report import Findings
from perf.rows import Row


def what_was_measured(found: Findings) -> str:
    """In a sentence."""
    rows = found.rows
    worlds = ", ".join(map(str, sorted({row.world_size for row in rows})))
    sizes = [row.nbytes for row in rows]
    span = f"{format_nbytes(min(sizes))} to {format_nbytes(max(sizes))}"
    peers = [name for name in methods_of(rows) if not name.startswith("graphar")]
    beside = f" beside {', '.join(peers)}" if peers else ""
    return f"All-reduces of {span} between {worlds} ranks{beside}. {verdict(rows)}"


def answer(found: Findings) -> str:
    """Three numbers and what falls short, beside the one plot."""
    rows = members(found.rows, answering(found.rows))
    cards = "".join(
        f'<div class="number"><b>{inline(figure)}</b>{inline(words)}</div>' for figure, words in numbers(rows, found)
    )
    short = f"<div>{render_list('What falls short', shortfalls(found) or ['Nothing, by more than noise.'])}</div>"
    plot = against_best_peer(found.rows)
    drawn = render(plot) if plot else "<p>No peer ran, so there is nothing to compare with.</p>"
    return f'<div class="answer"><div class="numbers">{cards}</div>{drawn}{short}</div>'


def numbers(rows: Sequence[Row], found: Findings) -> list[tuple[str, str]]:
    """Of the answer's table: a figure, and what it is."""
    own = [row for row in rows if row.method == "graphar" and not row.wrong]
    if not own:
        return [("wrong", "No result of graphar's was right.")]
    small, large = min(own, key=lambda row: row.nbytes), max(own, key=lambda row: row.busbw)
    ranks = f"{small.world_size} ranks"
    base = baseline(row for row in rows if row.nbytes == small.nbytes)
    times = f", {base.median / small.median:.2g}x the speed of {base.method}" if base else ""
    time = f"{small.median:.3g} us" if small.median < 1e3 else f"{small.median / 1e3:.3g} ms"
    cards = [(time, f"for {format_nbytes(small.nbytes)} between {ranks}{times}")]
    if ratios := of_best_peer(rows):
        speed = 1 / statistics.geometric_mean(ratios.values())
        cards.append((f"{speed:.2f}x", f"the speed of the best peer at each size, the mean over {len(ratios)} sizes"))
    ceiling = found.link_ceiling.get(small.world_size)
    of_link = f", {large.busbw / ceiling:.0%} of what the links carry at most" if ceiling else ""
    return [*cards, (f"{large.busbw:.3g} GB/s", f"bus bandwidth at {format_nbytes(large.nbytes)}{of_link}")]


def shortfalls(found: Findings) -> list[str]:
    """Where graphar is slower than the best peer by more than noise, a line a mode of the widest world."""
    lines = [verdict(found.rows)] if any(row.wrong for row in found.rows) else []
    widest = answering(found.rows)[0]
    narrower: dict[int, int] = {}
    for key in groups(found.rows):
        mine = members(found.rows, key)
        slower = {nbytes: ratio for nbytes, ratio in of_best_peer(mine).items() if ratio > NOISE}
        if slower and key[0] == widest:
            where = ", ".join(f"{format_nbytes(n)} ({ratio:.2f}x {_peer(mine, n)})" for n, ratio in slower.items())
            lines.append(f"{widest} ranks, {MODES[key[1]]}: slower at {where}.")
        elif slower:
            narrower[key[0]] = narrower.get(key[0], 0) + len(slower)
    return lines + [f"{ranks} ranks: slower at {count} sizes, over all modes." for ranks, count in narrower.items()]


def _peer(rows: Sequence[Row], nbytes: int) -> str:
    return best_peer(row for row in rows if row.nbytes == nbytes).method


def not_run(found: Findings, on_gpus: bool) -> list[str]:
    """What the all-reduce sweep did not measure, and why."""
    lines = list(found.skipped)
    if not any(row.method in BASELINES for row in found.rows):
        lines.append("NCCL and gloo were not among the methods.")
    if not on_gpus:
        lines.append("No kernel of graphar's and no NVLink: they need at least 2 GPUs. What ran is the CPU's form.")
    elif not any("multimem" in str(row.algorithm) for row in found.rows):
        lines.append("The multimem algorithms: NVLink multicast is off unless it is asked for.")
    return lines
