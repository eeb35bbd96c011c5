"""The first screen: the machine, what was measured, how good graphar is there, and where it falls short."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from graphar.plan.sizes import format_nbytes
from perf import report
from perf.compare import (
    BASELINES,
    NOISE,
    baseline,
    best_peer,
    groups,
    members,
    methods_of,
    of_best_peer,
    verdict,
)
from perf.page.allreduce import FAMILIES, against_best_peer, answering
from perf.page.markdown import WRONG, inline, render_list
from perf.page.svg import render
from perf.page.topics import TOPICS, Topic
from perf.report import Findings
from perf.rows import Row

WHAT = "graphar sums tensors over the GPUs of one host, for PyTorch: the same bits on every rank, at every size."
ON_CPU = (
    " **This machine has no two GPUs**: what ran is graphar's form for CPUs, which defines what its kernels compute."
    " Its times say nothing about theirs."
)
IN_MODE = {  # in few words
    "graph": "in CUDA graphs",
    "chain": "in dependent chains",
    "eager": "eager",
    "host": "eager, host time alone",
    "cpu": "on the CPU",
}
MOST_NAMED = 4  # sizes; of more, the worst


def sweep_of(contents: Mapping[Topic, dict]) -> Findings:
    """What the all-reduce sweep has found; nothing where there was none."""
    content = next((content for topic, content in contents.items() if topic.name == "allreduce"), None)
    return report.found_in(content) if content else Findings()


def is_on_gpus(contents: Mapping[Topic, dict]) -> bool:
    return any(content["machine"]["gpu_count"] >= 2 for content in contents.values())


def what_was_measured(found: Findings, on_gpus: bool) -> str:
    """In a few sentences."""
    rows = found.rows
    what = WHAT + ("" if on_gpus else ON_CPU)
    if not rows:
        return f"{what} {verdict(rows)}" if found.skipped else what
    worlds = _all_of([str(size) for size in sorted({row.world_size for row in rows}, reverse=True)])
    sizes = [row.nbytes for row in rows]
    span = f"{format_nbytes(min(sizes))} to {format_nbytes(max(sizes))}"
    peers = [name for name in methods_of(rows) if not name.startswith("graphar")]
    families = [words for name, words in FAMILIES.items() if any(peer.startswith(name) for peer in peers)]
    beside = f", beside {_all_of(families)}" if families else ""
    return f"{what} Below: all-reduces of {span} between {worlds} ranks{beside}. {verdict(rows)}"


def _all_of(words: Sequence[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def answer(found: Findings) -> str:
    """Three numbers and what falls short, beside the one plot."""
    cards = "".join(
        f'<div class="number"><b>{inline(figure)}</b>{inline(words)}</div>' for figure, words in numbers(found)
    )
    short = f"<div>{render_list('What falls short', shortfalls(found) or [NOTHING_SHORT])}</div>"
    plot = against_best_peer(found.rows)
    drawn = render(plot) if plot else "<p>No peer ran, so there is nothing to compare with.</p>"
    return f'<div class="answer"><div class="numbers">{cards}</div>{drawn}{short}</div>'


NOTHING_SHORT = "Nothing, by more than noise."


def numbers(found: Findings) -> list[tuple[str, str]]:
    """Of the answer's table: a figure, and what it is."""
    rows = members(found.rows, answering(found.rows))
    own = [row for row in rows if row.method == "graphar" and not row.wrong]
    if not own:
        return [("wrong", "No result of graphar's was right.")]
    small, large = min(own, key=lambda row: row.nbytes), max(own, key=lambda row: row.busbw)
    ranks = f"{small.world_size} ranks"
    base = baseline(row for row in rows if row.nbytes == small.nbytes)
    times = f", {base.median / small.median:.2g}x the speed of {_known_as(base.method)}" if base else ""
    time = f"{small.median:.3g} us" if small.median < 1e3 else f"{small.median / 1e3:.3g} ms"
    cards = [(time, f"for {format_nbytes(small.nbytes)} between {ranks}{times}")]
    if ratios := of_best_peer(rows):
        speed = 1 / statistics.geometric_mean(ratios.values())
        cards.append((f"{speed:.2f}x", f"the speed of the best peer at each size, the mean over {len(ratios)} sizes"))
    ceiling = found.link_ceiling.get(small.world_size)
    of_link = f", {large.busbw / ceiling:.0%} of what the links carry at most" if ceiling else ""
    return [*cards, (f"{large.busbw:.3g} GB/s", f"bus bandwidth at {format_nbytes(large.nbytes)}{of_link}")]


def _known_as(method: str) -> str:
    return FAMILIES.get(method, method)


def shortfalls(found: Findings) -> list[str]:
    """Where graphar is slower than the best peer by more than noise: a line a mode of the widest world, and a line for
    each narrower one."""
    lines = [verdict(found.rows)] if any(row.wrong for row in found.rows) else []
    widest = answering(found.rows)[0]
    narrower: dict[int, list[tuple[float, str]]] = {}
    for key in groups(found.rows):
        mine = members(found.rows, key)
        ratios = of_best_peer(mine)
        slower = {
            nbytes: (ratio, f"{ratio:.2f}x the time of {_peer(mine, nbytes)}")
            for nbytes, ratio in ratios.items()
            if ratio > NOISE
        }
        if slower and key[0] == widest:
            lines.append(f"{widest} ranks, {IN_MODE[key[1]]}: slower at {_where(slower, len(ratios))}.")
        elif slower:
            told = [(ratio, f"{format_nbytes(n)}, {IN_MODE[key[1]]} ({words})") for n, (ratio, words) in slower.items()]
            narrower[key[0]] = narrower.get(key[0], []) + told
    for ranks, told in narrower.items():
        often = f"{len(told)} sizes" if len(told) > 1 else "1 size"
        lines.append(f"{ranks} ranks: slower at {often}, over all modes, at worst {max(told)[1]}.")
    return lines


def _where(slower: Mapping[int, tuple[float, str]], count: int) -> str:
    if len(slower) <= MOST_NAMED:
        return ", ".join(f"{format_nbytes(nbytes)} ({words})" for nbytes, (_, words) in slower.items())
    worst = max(slower, key=lambda nbytes: slower[nbytes][0])
    return f"{len(slower)} of {count} sizes, at worst {format_nbytes(worst)} ({slower[worst][1]})"


def _peer(rows: Sequence[Row], nbytes: int) -> str:
    return best_peer(row for row in rows if row.nbytes == nbytes).method


def glances(contents: Mapping[Topic, dict]) -> list[tuple[Topic, str, str, str]]:
    """Of each topic its figure, what that means, and where graphar was slower. What is wrong has no figure."""
    found = []
    for topic, content in contents.items():
        said = topic.verdict(content)
        if WRONG.search(said):
            found.append((topic, "wrong", said.split("\n")[0], ""))
        else:
            one = topic.glance(content)
            found.append((topic, one.headline, one.words, one.shortfall))
    return found


def overview(contents: Mapping[Topic, dict], others: Sequence[tuple[str, str]]) -> str:
    """A link to each topic, with what it comes to; and to other sections, each of an anchor and a title."""
    cells = []
    for topic, figure, words, shortfall in glances(contents):
        wrong = ' class="wrong"' if WRONG.search(figure) else ""
        slow = f'<span class="dim"> &middot; {inline(shortfall)}</span>' if shortfall else ""
        bold = f"<b{wrong}>{inline(figure)}</b> " if figure else ""
        cells.append(f'<li><a href="#{topic.name}">{inline(topic.title)}</a><br>{bold}{inline(words)}{slow}</li>')
    cells += [f'<li><a href="#{anchor}">{inline(title)}</a></li>' for anchor, title in others]
    return f'<nav><ul class="glances">{"".join(cells)}</ul></nav>'


def missing(contents: Mapping[Topic, dict]) -> list[str]:
    """Topics without a report, and what makes one. Where the sweep counted what NVLink carried, nothing else need."""
    counted = {"nvlink"} if any(row.nvlink for row in sweep_of(contents).rows) else set()
    absent = [topic for topic in TOPICS if topic not in contents and topic.name not in counted]
    return [f"{topic.title}: `python -m perf {topic.command}`" for topic in absent]


def not_run(found: Findings, on_gpus: bool) -> list[str]:
    """What the all-reduce sweep did not measure, and why."""
    lines = list(found.skipped)
    if found.rows and not any(row.method in BASELINES for row in found.rows):
        lines.append("NCCL and gloo were not among the methods.")
    if not on_gpus:
        lines.append("No kernel of graphar's and no NVLink: they need at least 2 GPUs. What ran is the CPU's form.")
    elif found.rows and not any("multimem" in str(row.algorithm) for row in found.rows):
        lines.append("The multimem algorithms: NVLink multicast is off unless it is asked for.")
    return lines
