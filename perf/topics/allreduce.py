"""`python -m perf allreduce`: times all-reduce with every available library, by size, mode and dtype."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from graphar.cli.options import size
from graphar.plan.sizes import format_nbytes
from perf.charts import OF_BEST_PEER, SIZE, TIME, Line, Plot
from perf.choices import choice_table, choices
from perf.harness import cases, sweep
from perf.harness.cases import ITEMSIZES, SIZES, LinkCeiling, Plan, Row, SizesPlan
from perf.machine import check_world_sizes
from perf.md import NOT_SERVED, columns, method_table, name_cell, rate, ratio_cell, time_cell, time_table
from perf.peers.catalogue import CPU_METHODS, CUDA_METHODS, FIXED_ALGORITHM, LIST_METHODS, why_no_method
from perf.ratios import LIBRARIES, NOISE, best, best_peer, by_method, extent, group, of_best_peer, ratio, words_for
from perf.report import Arguments, Choice, Glance, Report, Section
from perf.traffic import NVLINK_NOTES, traffic_table

CPU_WORLD_SIZES = (2, 4)
MODES = {
    "graph": "in CUDA graphs",
    "chain": "in CUDA graphs of dependent operations",
    "eager": "eager",
    "host": "eager, host time only",  # in older reports: 50 calls in a loop without warm-up
    "host_loop": "eager, host time in loops of 2,000 calls",
    "host_between": "eager, host time between other operations",
    "cpu": "on the CPU",
}
FORMS = {"process": "one process per rank", "list": "one process, one tensor per rank"}


@dataclass(frozen=True)
class Key:
    """The fields that all rows of a table have in common."""

    world_size: int
    mode: str
    form: str
    dtype: str

    def has(self, row: Row) -> bool:
        return (row.world_size, row.mode, row.form, row.dtype) == (self.world_size, self.mode, self.form, self.dtype)

    @property
    def title(self) -> str:
        return f"{self.world_size} ranks, {self.dtype}, {MODES[self.mode]} ({FORMS[self.form]})"


@dataclass
class AllReduce(Report):
    """The sweep of all-reduces.

    Attributes:
        link_ceiling: the measured bandwidth of a GPU's links in one direction, in GB/s, by world size. It is measured
            while every rank only writes to all others.
    """

    link_ceiling: dict[int, float] | None = None
    rows: list[Row] = field(default_factory=list)

    order: ClassVar[int] = 0
    arguments: ClassVar[Arguments] = Arguments(
        quick_on_gpus="--dtypes bfloat16 --max-nbytes 64M",
        on_cpu="--max-nbytes 10M",
        quick_on_cpu="--world-size 2 --max-nbytes 1M",
    )
    has_spread: ClassVar[bool] = True

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--world-size", type=int, nargs="+", metavar="N", help="ranks (default: all GPUs)")
        parser.add_argument(
            "--dtypes",
            nargs="+",
            choices=list(ITEMSIZES),
            help="the first is timed at all sizes, the others at a few (default: bfloat16; on GPUs all)",
        )
        parser.add_argument("--max-nbytes", type=size, metavar="SIZE", help="the largest tensor, such as 64M")
        add_sizes(parser)
        help_of_methods = (
            f"{', '.join(dict.fromkeys(CUDA_METHODS + CPU_METHODS))}, or {FIXED_ALGORITHM} (default: all but the last)"
        )
        parser.add_argument("--methods", type=method, nargs="+", metavar="METHOD", help=help_of_methods)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[Plan]:
        """Returns one plan for each world size. Each rank is a process. On the CPU the list form is measured too."""
        on_gpus = gpu_count >= 2
        world_sizes = options.world_size or ([gpu_count] if on_gpus else CPU_WORLD_SIZES)
        default = CUDA_METHODS if on_gpus else CPU_METHODS
        methods = tuple(options.methods or default)
        dtypes = tuple(dict.fromkeys(options.dtypes or (ITEMSIZES if on_gpus else ["bfloat16"])))
        max_nbytes = options.max_nbytes or (SIZES[-1] if on_gpus else cases.CPU_MAX_NBYTES)
        device, forms = ("cuda", ("process",)) if on_gpus else ("cpu", ("process", "list"))
        if unknown := [name for name in methods if name not in default and not (on_gpus and "graphar:" in name)]:
            sys.exit(f"{', '.join(unknown)}: not on this machine, which has {', '.join(default)}")
        check_world_sizes(world_sizes, gpu_count)
        if sizes := named_sizes(options, ITEMSIZES[dtypes[0]]):
            how = "process", dtypes[:1], methods, max(sizes)
            return [SizesPlan(device, world_size, *how, sizes=sizes) for world_size in world_sizes]
        backends = []
        if not options.world_size:
            gloo_max_nbytes = options.max_nbytes or cases.GLOO_MAX_NBYTES  # up to the largest size that was asked for
            limits = {"gloo": gloo_max_nbytes, device: max_nbytes}
            backends = backend_plans(device, world_sizes, gpu_count, methods, dtypes[0], limits)
        variants = cases.VARIANTS if on_gpus and not options.methods else ()
        methods += variants
        return [
            Plan(device, world_size, form, dtypes, served, max_nbytes, world_size == max(world_sizes), variants)
            for form in forms
            if (served := tuple(name for name in methods if form == "process" or name in LIST_METHODS))
            for world_size in world_sizes
        ] + backends

    @classmethod
    def count(cls, plan: Sequence[Plan]) -> int:
        return sum(world_plan.row_count() for world_plan in plan)

    def measure(self, plan: Sequence[Plan]) -> Iterator[Row | LinkCeiling | str]:
        for world_plan in plan:
            yield from sweep.run(world_plan)

    def take(self, message: Row | LinkCeiling | str) -> None:
        if isinstance(message, LinkCeiling):
            self.link_ceiling = (self.link_ceiling or {}) | {message.world_size: message.busbw}
            print(f"# link ceiling, {message.world_size} ranks: {message.busbw:.1f} GB/s", flush=True)
        else:
            super().take(message)

    def findings(self) -> list[str]:
        """Returns one or two sentences for each table. They say how graphar compares with its peers."""
        told = []
        for key in groups(self.rows):
            ratios = of_best_peer(by_method(members(self.rows, key), _nbytes))
            if ratios:
                slower = [f"{format_nbytes(nbytes)} ({value:.2f})" for nbytes, value in ratios.items() if value > NOISE]
                where = f" Above {NOISE}: {', '.join(slower)}." if slower else ""
                mean = f", geometric mean {statistics.geometric_mean(ratios.values()):.2f}" if len(ratios) > 1 else ""
                told.append(f"{key.title}: graphar's time / the best peer's time is {extent(ratios)}{mean}.{where}")
        if loss := self.loss_of_auto():
            told.append(f"The time of `auto` / the fastest variant's time is at most {loss}.")
        return told

    def losses(self) -> list[tuple[str, Choice]]:
        named = []
        for key in groups(self.rows):
            chosen = choices(by_method(members(self.rows, key), _nbytes), IS_VARIANT)
            named += [(f"{format_nbytes(size)}, {key.title}", choice) for (size, _), choice in chosen.items()]
        return named

    def sections(self) -> list[Section]:
        rows, sections = self.rows, []
        for key in main_first(rows):
            mine = members(rows, key)
            cases = by_method(mine, _nbytes)
            named = {format_nbytes(nbytes): of_size for nbytes, of_size in cases.items()}
            body = [size_table(mine, (self.link_ceiling or {}).get(key.world_size))]
            body += [
                *choice_table("size", choices(named, IS_VARIANT)),
                "Times of all methods:",
                time_table("size", named),
            ]
            sections.append(Section(key.title, body, [latency(mine), ratio_plot({"graphar": mine})]))
        sections += [*backend_section(rows), *token_section(rows), *dtype_section(rows)]
        return [*sections, *nvlink_sections(rows)]

    def glance(self) -> Glance:
        if not self.rows:
            return Glance("nothing was measured")
        key = main_first(self.rows)[0]
        rows = members(self.rows, key)
        ratios = {format_nbytes(nbytes): value for nbytes, value in of_best_peer(by_method(rows, _nbytes)).items()}
        over = words_for([row.method for row in rows if row.is_peer])
        return Glance(f"graphar's time / the time of {over}, by size, {key.world_size} ranks", ratios)

    def overview(self) -> Plot | None:
        """Plots graphar's time / the best peer's time for every world size, in the main result's mode."""
        if not self.rows:
            return None
        main = main_first(self.rows)[0]
        keys = [key for key in groups(self.rows) if replace(key, world_size=main.world_size) == main]
        return ratio_plot({f"{key.world_size} ranks": members(self.rows, key) for key in reversed(keys)})

    def figure_of_times(self) -> Plot:
        """Plots graphar, NCCL and the best peer. NCCL is the faster of with and without registered memory."""
        cases = by_method(members(self.rows, main_first(self.rows)[0]), _nbytes)
        picks = {
            "graphar": lambda rows: rows.get("graphar"),
            "NCCL": lambda rows: best(row for name, row in rows.items() if name.startswith("nccl")),
            "best peer": lambda rows: best_peer(rows.values()),
        }
        lines = []
        for name, pick in picks.items():
            mine = [row for rows in cases.values() if (row := pick(rows))]
            lines.append(line_of(name, mine, lambda row: row.median))
        note = "In CUDA graphs, bf16. Best peer: at each size the fastest of NCCL, torch's symmetric memory, vLLM,"
        note += " FlashInfer and SGLang. graphar's line covers most of it."
        return Plot("Time of an all-reduce by size", lines, SIZE, TIME, note=note)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Adds the options that name what is measured."""
    parser.add_argument("--sizes", type=size, nargs="+", metavar="SIZE", help="measure these sizes alone, such as 64M")
    parser.add_argument("--shapes", type=shape, nargs="+", metavar="RxC", help="or tensors of R rows and C columns")


def shape(text: str) -> int:
    """Returns the elements of a tensor, for argparse."""
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 32x8192")
    return int(rows) * int(columns)


def named_sizes(options: argparse.Namespace, itemsize: int) -> tuple[int, ...]:
    """Returns the bytes of the tensors that the command line names, in order; none if it names none."""
    return tuple(sorted({*(options.sizes or ()), *(numel * itemsize for numel in options.shapes or ())}))


def method(name: str) -> str:
    """Checks a method's name. This is an argparse type."""
    if reason := why_no_method(name):
        raise argparse.ArgumentTypeError(reason)
    return name


def backend_plans(
    device: str, swept: Sequence[int], gpu_count: int, methods: Sequence[str], dtype: str, limits: dict[str, int]
) -> list[SizesPlan]:
    """Returns the plans that only the table of backends needs: smaller worlds, and gloo on machines with GPUs.

    Args:
        limits: the largest size in bytes, for ``device`` and for "gloo".
    """
    plans = []
    for world_size in cases.BACKEND_WORLD_SIZES:
        if world_size > (gpu_count or world_size):
            continue
        served = tuple(name for name in methods if name in cases.PLAIN_METHODS)
        if served and world_size not in swept:
            plans.append(backend_plan(device, world_size, dtype, served, limits[device]))
        if "nccl" in served:
            plans.append(backend_plan("cpu", world_size, dtype, ("gloo",), limits["gloo"]))
    return plans


def backend_plan(device: str, world_size: int, dtype: str, methods: Sequence[str], limit: int) -> SizesPlan:
    sizes = tuple(nbytes for nbytes in cases.BACKEND_SIZES if nbytes <= limit)
    return SizesPlan(device, world_size, "process", (dtype,), tuple(methods), limit, sizes=sizes)


def _nbytes(row: Row) -> int:
    return row.nbytes


def groups(rows: Sequence[Row]) -> list[Key]:
    """Returns the keys of the tables for the first dtype, by world size and then in the order of MODES and FORMS.

    World sizes that were measured only for the table of backends are left out.
    """
    rows = [row for row in rows if row.dtype == rows[0].dtype]
    swept = [row for row in rows if row.nbytes in SIZES and row.nbytes not in cases.BACKEND_SIZES]
    keys = {Key(row.world_size, row.mode, row.form, row.dtype) for row in swept or rows}
    modes, forms = list(MODES), list(FORMS)
    return sorted(keys, key=lambda key: (key.world_size, modes.index(key.mode), forms.index(key.form)))


def main_first(rows: Sequence[Row]) -> list[Key]:
    """Returns the keys of :func:`groups`, beginning with the main result: the first mode of the largest world."""
    keys = groups(rows)
    main = next((key for key in keys if key.world_size == keys[-1].world_size), None)
    return sorted(keys, key=lambda key: key != main)


def members(rows: Iterable[Row], key: Key) -> list[Row]:
    return [row for row in rows if key.has(row) and row.nbytes in SIZES]


# For "graphar", whose algorithm "auto" chooses: whether another method has a fixed algorithm or grid.
IS_VARIANT = {"graphar": lambda name: name.startswith("graphar:") and name != "graphar:two_shot_lossless"}


def size_table(rows: Sequence[Row], link_ceiling: float | None = None) -> str:
    """Returns a table of graphar and its best peer. It has a row for each size."""
    cases = by_method(rows, _nbytes)
    ours = {nbytes: mine.get("graphar") for nbytes, mine in cases.items()}
    peers = {nbytes: best_peer(mine.values()) for nbytes, mine in cases.items()}

    def known(cell: Callable[[Row], str | None]) -> Callable[[int], str]:
        return lambda nbytes: (ours[nbytes] and cell(ours[nbytes])) or NOT_SERVED

    cells = {
        "size": format_nbytes,
        "graphar (us)": lambda nbytes: time_cell(ours[nbytes]),
        "algbw (GB/s)": known(lambda row: rate(row.algbw)),
        "busbw (GB/s)": known(lambda row: rate(row.busbw)),
        "best peer": lambda nbytes: name_cell(peers[nbytes]),
        "best peer (us)": lambda nbytes: time_cell(peers[nbytes]),
        "of_best_peer": lambda nbytes: ratio_cell(ratio(ours[nbytes], peers[nbytes])),
        "of_link": known(lambda row: f"{row.busbw / link_ceiling:.2f}" if link_ceiling else None),
        "algorithm": known(lambda row: row.algorithm),
    }
    if any("graphar_any_bits" in mine for mine in cases.values()):
        cells["any bits (us)"] = lambda nbytes: time_cell(cases[nbytes].get("graphar_any_bits"))
    return columns(cases, cells)


def backend_section(rows: Sequence[Row]) -> list[Section]:
    """Returns a section of torch's backends and graphar at common sizes. Empty if no row was measured only for it."""
    compared = [
        row
        for row in rows
        if row.nbytes in cases.BACKEND_SIZES
        and row.method in cases.PLAIN_METHODS
        and (row.mode in ("graph", "cpu") and row.form == "process" and row.dtype == rows[0].dtype)
    ]
    if all(row.nbytes in SIZES for row in compared):
        return []
    order = ("gloo", "nccl", "graphar")
    keys = sorted({(row.world_size, row.method) for row in compared}, key=lambda key: (key[0], order.index(key[1])))
    titles = {key: f"{key[0]} ranks: {key[1]}" for key in keys}
    times = times_by_size(compared, lambda row: (row.world_size, row.method), titles)
    text = "Times on GPUs are measured in CUDA graphs. gloo sums CPU tensors."
    if any(row.mode == "graph" for row in compared) and any(row.method == "gloo" for row in compared):
        text += " Sizes above 100 MB are measured with gloo if `--max-nbytes 1G` is given."
    names = ", ".join(name for name in order if any(row.method == name for row in compared))
    return [Section(f"{names} by number of ranks, {span(compared)}", [text, times])]


def token_section(rows: Sequence[Row]) -> list[Section]:
    """Returns a section of times by number of tokens (cases.TOKENS), for each world with sizes of only this table."""
    if not rows:
        return []
    dtype = rows[0].dtype
    tokens_of = dict(zip(cases.token_sizes(dtype), cases.TOKENS, strict=True))
    sections = []
    for world_size, mode in itertools.product(sorted({row.world_size for row in rows}, reverse=True), ("graph", "cpu")):
        key = Key(world_size, mode, "process", dtype)
        mine = [row for row in rows if key.has(row) and row.nbytes in tokens_of]
        if any(row.nbytes not in SIZES for row in mine):
            by_tokens = {str(tokens_of[nbytes]): of_size for nbytes, of_size in by_method(mine, _nbytes).items()}
            title = f"{world_size} ranks, {dtype}, hidden size {cases.HIDDEN}, by number of tokens, {MODES[mode]}"
            sections.append(Section(title, [method_table("tokens", by_tokens)]))
    return sections


def dtype_section(rows: Sequence[Row]) -> list[Section]:
    others = [row for row in rows if row.dtype != rows[0].dtype]
    if not others:
        return []
    like = {(row.world_size, row.mode, row.form, row.method, row.nbytes) for row in others}
    mine = [row for row in rows if (row.world_size, row.mode, row.form, row.method, row.nbytes) in like]
    keys = itertools.product(*(dict.fromkeys(getattr(row, of) for row in mine) for of in ("method", "dtype")))
    times = times_by_size(mine, lambda row: (row.method, row.dtype), {key: " ".join(key) for key in keys})
    return [Section(f"{mine[0].world_size} ranks, by dtype, {MODES[mine[0].mode]}", [times])]


def nvlink_sections(rows: Sequence[Row]) -> list[Section]:
    counted = group([row for row in rows if row.nvlink], lambda row: row.world_size)
    return [Section(f"NVLink traffic, {n} ranks", [NVLINK_NOTES, traffic_table(mine)]) for n, mine in counted.items()]


def span(rows: Sequence[Row]) -> str:
    sizes = [row.nbytes for row in rows]
    return " to ".join(format_nbytes(nbytes) for nbytes in dict.fromkeys([min(sizes), max(sizes)]))


def times_by_size(rows: Iterable[Row], column_of: Callable[[Row], object], titles: Mapping[object, str]) -> str:
    """Returns a table of times. ``titles`` has its columns, by what ``column_of`` returns for their rows."""
    by_size = {size: {column_of(row): row for row in mine} for size, mine in sorted(group(rows, _nbytes).items())}
    named = {format_nbytes(size): {titles[key]: cells.get(key) for key in titles} for size, cells in by_size.items()}
    return time_table("size", named)


def families(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Returns the rows to draw, by library: graphar's rows, and the fastest row of each peer at each size.

    A wrong row is drawn only if the library has no correct row at that size.
    """
    drawn = {"graphar": [row for row in rows if row.method == "graphar"]}
    for prefix, name in LIBRARIES.items():
        mine = [row for row in rows if row.method.startswith(prefix) and row.is_peer]
        at_sizes = by_method(mine, _nbytes).values()
        drawn[name] = [min(of_size.values(), key=lambda row: (bool(row.wrong), row.median)) for of_size in at_sizes]
    return {name: sorted(of_library, key=_nbytes) for name, of_library in drawn.items() if of_library}


def line_of(name: str, rows: Sequence[Row], value, band=None) -> Line:
    return Line(
        name,
        [(row.nbytes, value(row)) for row in rows],
        [band(row) for row in rows] if band else (),
        frozenset(at for at, row in enumerate(rows) if row.wrong),
    )


FASTEST = "Each peer's line shows its fastest method at each size."


def latency(rows: Sequence[Row]) -> Plot:
    lines = [
        line_of(name, mine, lambda row: row.median, lambda row: (row.time_us["p10"], row.time_us["p99"]))
        for name, mine in families(rows).items()
    ]
    note = f"Lines are medians, bands are the 10th to 99th percentile. {FASTEST}"
    return Plot("Time by size", lines, SIZE, TIME, note=note)


def ratio_plot(named: Mapping[str, Sequence[Row]]) -> Plot | None:
    """Plots graphar's time / the best peer's time for the rows of one or more tables, by name."""
    lines = []
    for name, rows in named.items():
        if ratios := of_best_peer(by_method(rows, _nbytes)):
            lines.append(Line(name, list(ratios.items())))
    note = f"Below 1 graphar is faster than every peer at that size. Ratios up to {NOISE:.2f} are noise."
    title = "Time / best peer's time"
    return Plot(title, lines, SIZE, OF_BEST_PEER, 1.0, note) if lines else None
