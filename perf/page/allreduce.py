"""The plots of an all-reduce report, by the headings of its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graphar.plan.sizes import format_nbytes
from perf.cases import Case
from perf.compare import NOISE, Key, baseline, best_peer, groups, members, methods_of, of_best_peer, title
from perf.page.heat import HeatMap
from perf.page.plot import Axis, Line, Plot
from perf.report import NVLINK_HEADING, Findings
from perf.rows import Row

FAMILIES = {  # what their methods begin with, and what they are known as
    "nccl": "NCCL",
    "symm": "torch's symmetric memory",
    "vllm": "vLLM",
    "flashinfer": "FlashInfer",
    "sglang": "SGLang",
    "gloo": "gloo",
}
SIZE = Axis("size of one rank's tensor", log=True, form=lambda nbytes: format_nbytes(round(nbytes)), base=2)
TIME = Axis("time (us)", log=True)


def figures(found: Findings) -> dict[str, list[Plot | HeatMap]]:
    """Those of the answer's table stand first, under no heading; the others with their tables."""
    keys = groups(found.rows)
    if not keys:
        return {}
    first = answering(found.rows)
    plots = {title(key): [latency(members(found.rows, key))] for key in keys if key != first}
    mine = members(found.rows, first)
    plots[""] = [latency(mine, title(first)), bandwidth(mine, found.link_ceiling.get(first[0])), *speed_up(mine)]
    carried = [row for row in mine if row.nvlink]
    plots[""] += of_rate(carried)
    plots[NVLINK_HEADING] = of_links(carried)
    return plots


def counted(found: Findings) -> dict[str, list[Plot | HeatMap]]:
    """Those of what NVLink carries, by the headings of its report."""
    plots = {}
    carried = [row for row in found.rows if row.nvlink]
    for world_size in dict.fromkeys(row.world_size for row in carried):
        mine = [row for row in carried if row.world_size == world_size]
        drawn = [*of_rate(mine), bandwidth(mine, found.link_ceiling.get(world_size)), *of_links(mine)]
        plots[f"{world_size} ranks"] = drawn
    return plots


def of_rate(carried: Sequence[Row]) -> list[Plot]:
    return share(carried, "raw_share", "share of the links' raw rate")


def of_links(carried: Sequence[Row]) -> list[Plot | HeatMap]:
    """What was protocol, and what each link carried."""
    heats = [heat for name in methods_of(carried) for heat in by_link(carried, name)]
    return share(carried, "protocol_overhead", "bytes besides the payload, over the payload") + heats


def leads(found: Findings) -> str:
    """The heading of the answer's table."""
    return title(answering(found.rows)) if found.rows else ""


def answering(rows: Sequence[Row]) -> Key:
    """The key of the table that a report's answer is read from: of the widest world, in a graph, or on the CPU."""
    keys = groups(rows)
    return next(key for key in keys if key[0] == keys[-1][0])


def style(method: str) -> str:
    """graphar's own way is bold; methods of one family share a colour."""
    if method == "graphar":
        return "own"
    if method.startswith("graphar"):
        return "own thin d1"
    family = next((at for at, name in enumerate(FAMILIES) if method.startswith(name)), len(FAMILIES))
    dash = sum(("two_shot" in method, "pull" in method, "window" in method, "unregistered" in method)) + 2 * (
        "fp8" in method
    )
    return f"m{family} d{min(dash, 3)}"


def hint(row: Row) -> str:
    wrong = f", {row.wrong} WRONG" if row.wrong else ""
    spread = f"{row.time_us['p10']:.4g} to {row.time_us['p99']:.4g}"
    return f"{format_nbytes(row.nbytes)}: {row.median:.4g} us ({spread}), busbw {row.busbw:.1f} GB/s{wrong}"


def line(rows: Sequence[Row], value: Callable[[Row], float], band: Callable[[Row], tuple] | None = None) -> Line:
    """One method's."""
    rows = sorted(rows, key=lambda row: row.nbytes)
    return Line(
        name=rows[0].method,
        points=[(row.nbytes, value(row)) for row in rows],
        style=style(rows[0].method),
        band=[band(row) for row in rows] if band else (),
        hints=[hint(row) for row in rows],
        wrong=frozenset(at for at, row in enumerate(rows) if row.wrong),
    )


def lines(rows: Sequence[Row], value: Callable[[Row], float], band: Callable[[Row], tuple] | None = None) -> list[Line]:
    return [line([row for row in rows if row.method == name], value, band) for name in methods_of(rows)]


def latency(rows: Sequence[Row], name: str = "") -> Plot:
    drawn = lines(rows, lambda row: row.median, lambda row: (row.time_us["p10"], row.time_us["p99"]))
    note = f"{name}. " if name else ""
    return Plot(
        "Latency by size", drawn, SIZE, TIME, note=f"{note}Medians; bands from the 10th to the 99th percentile."
    )


def bandwidth(rows: Sequence[Row], ceiling: float | None) -> Plot:
    rules = [(ceiling, f"{ceiling:.0f} GB/s: measured, all ranks do nothing but push")] if ceiling else []
    if nominal := nominal_rate(rows):
        rules.append((nominal, f"{nominal:.0f} GB/s: nominal, protocol included"))
    axis = Axis("busbw (GB/s)")
    full = [row for row in rows if not row.quantised]
    return Plot("Bus bandwidth by size", lines(full, lambda row: row.busbw), SIZE, axis, rules)


def nominal_rate(rows: Sequence[Row]) -> float | None:
    """GB/s in one direction of all of a GPU's links, as NVML gives it; None where counters were not read."""
    for row in rows:
        if row.nvlink and row.nvlink["raw_share"]:
            counted = Case(row.world_size, row.form, row.mode, row.dtype, row.nbytes).iterations
            return row.nvlink["raw_tx_nbytes"] / row.nvlink["raw_share"] / (row.median * counted) / 1e3
    return None


def speed_up(rows: Sequence[Row]) -> list[Plot]:
    """Over NCCL or gloo, where they ran."""
    base = {row.nbytes: baseline(one for one in rows if one.nbytes == row.nbytes) for row in rows}
    known = [row for row in rows if base[row.nbytes]]
    if not known:
        return []
    of_what = base[known[0].nbytes].method
    drawn = lines(known, lambda row: base[row.nbytes].median / row.median)
    axis = Axis("times as fast", log=True, form="{:g}x".format)
    return [Plot(f"Speed-up over {of_what}", drawn, SIZE, axis, [(1.0, of_what)])]


def against_best_peer(rows: Sequence[Row]) -> Plot | None:
    """graphar's speed over the best peer's, a line a world: the report's answer."""
    first = answering(rows)
    drawn = []
    for at, key in enumerate(key for key in reversed(groups(rows)) if key[1:] == first[1:]):
        mine = members(rows, key)
        ratios = of_best_peer(mine)
        hints = [f"{format_nbytes(n)}: {1 / ratio:.3f} x {_peer(mine, n)}" for n, ratio in ratios.items()]
        points = [(nbytes, 1 / ratio) for nbytes, ratio in ratios.items()]
        if points:
            drawn.append(Line(f"{key[0]} ranks", points, "own" if at == 0 else f"m{at}", hints=hints))
    if not drawn:
        return None
    axis = Axis("speed of graphar / of the best peer", form="{:.3g}x".format)
    note = "Above the line graphar is faster than every other method at that size; within the grey band that is noise."
    return Plot("graphar against the best peer", drawn, SIZE, axis, [(1.0, "")], (1 / NOISE, NOISE), note)


def _peer(rows: Sequence[Row], nbytes: int) -> str:
    return best_peer(row for row in rows if row.nbytes == nbytes).method


def share(rows: Sequence[Row], figure: str, label: str) -> list[Plot]:
    """A figure of the links' counters; nothing where none was read."""
    rows = [row for row in rows if row.nvlink[figure] is not None]
    if not rows:
        return []
    drawn = lines(rows, lambda row: row.nvlink[figure])
    return [Plot(f"NVLink counters: {label}", drawn, SIZE, Axis("share", form="{:.0%}".format))]


def by_link(rows: Sequence[Row], method: str) -> list[HeatMap]:
    """How much of its raw rate each link of the first rank sent at, by size; nothing where that was not counted."""
    shares = {
        row.nbytes: {link["link"]: link["raw_share"] for link in row.nvlink["links"] if link["raw_share"] is not None}
        for row in rows
        if row.method == method
    }
    shares = {nbytes: by_number for nbytes, by_number in sorted(shares.items()) if by_number}
    if not shares:
        return []
    links = sorted({number for by_number in shares.values() for number in by_number})
    largest, last = list(shares.items())[-1]
    note = f"At {format_nbytes(largest)} the least loaded link sent at {min(last.values()):.1%} of its raw rate,"
    return [
        HeatMap(
            f"NVLink counters: {method}, share of each link's raw rate",
            [format_nbytes(nbytes) for nbytes in shares],
            [str(number) for number in links],
            [[by_number.get(number) for by_number in shares.values()] for number in links],
            across="size of one rank's tensor",
            down="link",
            note=f"{note} the most loaded at {max(last.values()):.1%}.",
        )
    ]
