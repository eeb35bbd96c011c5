"""Every measured number in the README and docs is that of a committed report.

Rows of tables are compared with the report's, and figures are drawn from it. A number in prose must stand in a report
that the page links to, or in the summary of that report's folder; what was computed from a report, or comes from a
tuning table, is computed here.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from graphar.plan.matmuls import fills_wave
from graphar.plan.tables import shipped_table
from perf import figures
from perf.ratios import geometric_mean
from tests.pages import PAGES, ROOT

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows_of(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """The rows of all tables of a Markdown text, by column."""
    header: list[str] = []
    for line in lines:
        if not line.startswith("|"):
            header = []
        elif not header:
            header = cells(line)
        elif not re.fullmatch(r"[|\s:-]+", line):
            yield dict(zip(header, cells(line), strict=False))


def checked_tables() -> list[tuple[Path, str, str]]:
    """Page, report and rows."""
    marked = re.compile(r"<!-- table: (\S+) -->\n(.*?)<!-- end of table -->", re.DOTALL)
    return [(page, *found.groups()) for page in PAGES for found in marked.finditer(page.read_text())]


@pytest.mark.parametrize(
    ("page", "report", "body"), checked_tables(), ids=lambda one: one.stem if isinstance(one, Path) else None
)
def test_every_row_of_a_table_is_a_row_of_the_report_it_names(page, report, body):
    reported = [row.items() for row in rows_of((ROOT / report).read_text().splitlines())]
    shown = list(rows_of(body.splitlines()))

    assert shown
    assert [row for row in shown if not any(row.items() <= one for one in reported)] == []


def test_the_page_of_performance_has_the_tables_of_several_reports():
    reports = {report for page, report, _ in checked_tables() if page.stem == "performance"}

    assert len(reports) > 4


def test_every_figure_of_a_page_exists_and_each_is_shown():
    shown = {name for page in PAGES for name in re.findall(r"<!-- figure: ([\w-]+) -->", page.read_text())}

    assert shown == figures.FIGURES.keys()


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_drawn_from_a_report_and_says_where_it_was_measured(name):
    drawn = figures.render(name)

    machine = figures.FIGURES[name].read().machine
    assert drawn.startswith("<figure>")
    assert f"{machine['gpu_count']}x {machine['gpu']}, {machine['date']}" in drawn


def test_the_readmes_figure_is_what_its_command_draws():
    stale = [path.name for path, text in figures.readme_files().items() if path.read_text() != text]

    assert stale == [], "run `python -m perf.figures`"


NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.]\d)"
MEASURED = re.compile(
    rf"({NUMBER})(?: (?:to|and) ({NUMBER}))? ?(?:us\b|ms\b|GB/s|%|times (?:as|the)|of (?:the|its|that))"
)


@cache
def report_of(path: str) -> dict:
    return json.loads((ROOT / "reports" / path).read_text())


def medians(path: str, rows: str = "rows", **having: object) -> dict[int, dict[str, float]]:
    """The median times of the rows with these fields, by size and method."""
    found: dict[int, dict[str, float]] = {}
    for row in report_of(path)[rows]:
        if all(row[name] == value for name, value in having.items()):
            found.setdefault(row["nbytes"], {})[row["method"]] = row["time_us"]["median"]
    return found


def allreduces(ranks: int) -> dict[int, dict[str, float]]:
    """The times of all-reduces of bf16 between this many H200s, in CUDA graphs, by size and method."""
    return medians("h200x4/allreduce.json", world_size=ranks, mode="graph", dtype="bfloat16")


def over_nccl() -> list[str]:
    """The smallest and the largest speed-up over the faster NCCL, with registered memory or without, up to 1 MB."""
    times = allreduces(4)
    gains = [
        min(time for name, time in of_size.items() if name.startswith("nccl")) / of_size["graphar"]
        for nbytes, of_size in times.items()
        if nbytes <= MB and "nccl" in of_size
    ]
    return [f"{min(gains):.1f}", f"{max(gains):.1f}"]


def codec_ratios(codec: str, nbytes: int) -> str:
    times = medians("h200x4/quantized.json", "times", world_size=4)[nbytes]
    return f"{times[f'graphar_{codec}'] / times['graphar']:.2f}"


def codec_losses() -> list[str]:
    """How much slower than exact calls codecs are at 256 KB, at least and at most, in percent."""
    times = medians("h200x4/quantized.json", "times", world_size=4)[256 * KB]
    losses = [100 * (time / times["graphar"] - 1) for name, time in times.items() if name.startswith("graphar_")]
    return [f"{min(losses):.0f}", f"{max(losses):.0f}"]


def lossless(data: str, nbytes: int) -> float:
    (row,) = (
        row
        for row in report_of("h200x4/lossless.json")["rows"]
        if (row["world_size"], row["data"], row["nbytes"]) == (4, data, nbytes)
    )
    return row["lossless_us"] / row["plain_us"]


def parts_over_nccl() -> list[str]:
    """The least and the largest time of a reduce-scatter or an all-gather, of NCCL's, without compression."""
    rows = [row for row in report_of("h200x2/lossless.json")["rows"] if row["op"] in ("reducescatter", "allgather")]
    ratios = [row["plain_us"] / row["nccl_us"] for row in rows]
    return [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]


def lossless_gain() -> str:
    """How much time is saved at most at 16 MB, in percent, by data other than random bits."""
    kinds = {row["data"] for row in report_of("h200x4/lossless.json")["rows"]} - {"any bits"}
    return f"{100 * (1 - min(lossless(kind, 16 * MB) for kind in kinds)):.0f}"


def between_8() -> list[str]:
    """The rates of large sums as they are, the time that a rank adds to a small sum, and what follows for 8 ranks."""
    times = {ranks: allreduces(ranks) for ranks in (2, 3, 4)}
    large = {ranks: of[2 * GB]["graphar:two_shot_pipelined"] for ranks, of in times.items()}
    rates = [2 * (ranks - 1) / ranks * 2 * GB / time / 1e3 for ranks, time in large.items()]
    small = {ranks: of[2 * KB]["graphar"] for ranks, of in times.items()}
    step = (small[4] - small[2]) / 2
    ends = [343, 358]
    assert min(rates) - 1 < ends[0] < ends[1] < max(rates) + 1
    of_8 = [f"{2 * 7 / 8 * n / rate / 1e6:.{digits}f}" for n, digits in ((64 * MB, 2), (GB, 1)) for rate in ends]
    return [*map(str, ends), f"{step:.2f}", f"{small[4] + 4 * step:.1f}", *of_8]


def random_bits_over_nccl() -> list[str]:
    """The time of bits that cannot be compressed / NCCL's, at the smallest size that is compressed and the largest."""
    times = allreduces(4)
    return [f"{times[n]['graphar_any_bits'] / times[n]['nccl']:.2f}" for n in (256 * MB, 2 * GB)]


def worst(ranks: int) -> str:
    """How much slower than its best peer an all-reduce is at most, in percent, in CUDA graphs."""
    ratios = [
        of["graphar"] / min(time for name, time in of.items() if "graphar" not in name and "fp8" not in name)
        for of in allreduces(ranks).values()
        if len(of) > 3
    ]
    return f"{100 * (max(ratios) - 1):.0f}"


def eager_ratios() -> list[str]:
    """The time of an eager call / its best peer's: the geometric mean over sizes, and that of 2 KB."""
    of = medians("h200x4/allreduce.json", world_size=4, mode="eager", dtype="bfloat16")
    peers = {size: min(time for name, time in times.items() if "graphar" not in name) for size, times in of.items()}
    ratios = {size: times["graphar"] / peers[size] for size, times in of.items()}
    assert max(ratios.values()) == ratios[2 * KB]
    return [f"{one:.2f}" for one in (geometric_mean(ratios.values()), ratios[2 * KB])]


def of_torchs_matmul(*shape: int) -> str:
    """The time of graphar's matmul / torch's at a measured shape, by the table of H200s."""
    (found,) = (one for one in shipped_table("nvidia_h200").matmul.against_torch if one[:3] == shape)
    return f"{found.ratio:.2f}"


def of_torch_from_a_wave(machine: str) -> str:
    """The time of graphar's matmul / torch's: the geometric mean over shapes of at least one wave of tiles."""
    report = report_of(f"{machine}/matmul.json")
    own, of_torch = (
        {(row["m"], row["n"], row["k"]): row["time_us"]["median"] for row in report["rows"] if row[name] == value}
        for name, value in (("is_taken", True), ("method", "torch.mm"))
    )
    ratios = [own[shape] / of_torch[shape] for shape in own if fills_wave(*shape[:2], report["rows"][0]["sms"])]
    return f"{geometric_mean(ratios):.2f}"


# By page, the numbers that are computed from reports, or stand in a tuning table.
CLAIMS: dict[str, list[Callable[[], str | Sequence[str]]]] = {
    "README": [over_nccl, lambda: worst(4), eager_ratios],
    "functions": [
        over_nccl,
        lambda: codec_ratios("int8", 2 * MB),
        lambda: codec_ratios("int8", GB),
        lambda: f"{lossless('activations', GB):.2f}",
        lambda: f"{lossless('any bits', GB):.2f}",
        parts_over_nccl,
        lambda: of_torch_from_a_wave("h200x1"),
    ],
    "performance": [
        codec_losses,
        lossless_gain,
        between_8,
        lambda: f"{int(100 * lossless('any bits', 16 * MB)) / 100}",
        lambda: [worst(ranks) for ranks in (2, 3, 4)],
        random_bits_over_nccl,
        lambda: "3",  # perf.ratios.NOISE
        lambda: of_torch_from_a_wave("h200x1"),
        lambda: of_torch_from_a_wave("h100x1"),
    ],
    "batch_invariance": [lambda: of_torch_from_a_wave("h200x1")],
    "matmul": [lambda: of_torchs_matmul(64, 1024, 8192), lambda: of_torchs_matmul(768, 1024, 8192)],
}


def prose_of(page: Path) -> str:
    """A page without code, checked tables and figures."""
    text = page.read_text()
    for pattern in (r"^ *```.*?^ *```$", r"<!-- table: .*?<!-- end of table -->", r"<!--.*?-->"):
        text = re.sub(pattern, "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`\n]*`", "", text))


def numbers_of_reports(page: Path) -> set[str]:
    """All numbers of the reports that a page links to, and of the summaries of their folders."""
    linked = {ROOT / "reports" / name for name in re.findall(r"\]\((?:\.\./)*reports/([\w/]+\.md)\)", page.read_text())}
    summaries = {path.parent / "report.md" for path in linked}
    texts = [path.read_text() for path in linked | summaries if path.exists()]
    return set(re.findall(NUMBER, " ".join(texts)))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).stem)
def test_numbers_in_prose_are_those_of_reports(page):
    claimed: set[str] = set()
    for claim in CLAIMS.get(page.stem, []):
        computed = claim()
        claimed |= {computed} if isinstance(computed, str) else set(computed)
    known = numbers_of_reports(page) | claimed

    told = [number for pair in MEASURED.findall(prose_of(page)) for number in pair if number]

    assert [number for number in told if number not in known] == []
    assert claimed <= set(re.findall(NUMBER, prose_of(page))), "a claim that the page no longer makes"
