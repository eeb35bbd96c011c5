"""The page of a report folder: what it says and draws, and how a browser shows it."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from graphar.matmul.timelines import PHASES
from graphar.plan.sizes import MB
from perf import __main__ as program
from perf import report
from perf.page import bands as band_figure
from perf.page import build, front, models, plot, svg
from perf.page.markdown import render
from perf.page.plot import Axis, Line, Plot
from tests.perf import browser
from tests.perf.test_report import MACHINE, row
from tests.perf.test_schema import FOUND, NVLINK, TIMELINE

BROWSER = browser.find()
REPORTS = Path(__file__).parents[2] / "reports"
COMMITTED = REPORTS / "2026-11-21-h200x4"
CPU = MACHINE | dict.fromkeys(("gpu", "driver", "nccl"), None) | {"gpu_count": 0}


def sweep(mode="cpu", peer="gloo", wrong=0):
    """Rows of graphar and a peer at three sizes; graphar is slower at the last one."""
    sizes = ((2048, 10.0, 20.0), (64 << 10, 20.0, 30.0), (MB, 60.0, 40.0))
    return [
        one
        for nbytes, ours, theirs in sizes
        for one in (
            row(time_us=ours, nbytes=nbytes, mode=mode, wrong=wrong),
            row(peer, theirs, nbytes=nbytes, mode=mode),
        )
    ]


def counted(rows):
    """As if NVLink's counters had been read."""
    return [replace(one, nvlink=NVLINK) for one in rows]


def page_of(folder, rows, machine=CPU, **more):
    report.write(folder, machine, report.Findings(rows, **more), "python -m perf allreduce")
    return build.write(folder).read_text()


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_the_first_screen_says_machine_answer_and_what_falls_short(tmp_path):
    text = page_of(tmp_path, sweep())

    first_screen = text[: text.index("<section")]
    assert "<h1>graphar on a CPU</h1>" in first_screen
    assert "<b>10 us</b>for 2 KB between 4 ranks, 2x the speed of gloo" in first_screen
    assert "<b>1.26x</b>the speed of the best peer at each size, the mean over 3 sizes" in first_screen
    assert "4 ranks, on the CPU: slower at 1 MB (1.50x the time of gloo)." in first_screen
    assert first_screen.count('<svg class="plot"') == 1


def test_what_was_not_measured_says_why(tmp_path):
    text = page_of(tmp_path, sweep("graph", "nccl"), MACHINE, skipped=["vllm, 4 ranks: no such package"])

    assert "<li>vllm, 4 ranks: no such package</li>" in text
    assert "<li>The multimem algorithms: NVLink multicast is off unless it is asked for.</li>" in text
    assert "<li>Training with quantised gradients: <code>python -m perf train</code></li>" in text


def test_nothing_that_falls_short_is_said():
    found = report.Findings([row(), row("nccl", 20.0)])

    assert front.shortfalls(found) == []
    assert "Nothing, by more than noise." in front.answer(found)


def test_narrower_worlds_are_counted():
    slow = [row(time_us=30.0), row("nccl", 20.0)]
    found = report.Findings(
        [*slow, row(mode="eager"), *(one.__class__(**vars(one) | {"world_size": 2}) for one in slow)]
    )

    assert front.shortfalls(found) == [
        "4 ranks, in CUDA graphs: slower at 2 KB (1.50x the time of nccl).",
        "2 ranks: slower at 1 size, over all modes, at worst 2 KB, in CUDA graphs (1.50x the time of nccl).",
    ]


def test_wrong_results_are_red_everywhere(tmp_path):
    text = page_of(tmp_path, sweep(wrong=3))

    assert "No result of graphar&#x27;s was right." in text or "No result of graphar's was right." in text
    assert re.search(r'<tr class="wrong"><td class=left>2 KB</td><td>10 <strong>\(3 WRONG\)', text)
    assert '<circle class="wrong"' in text
    assert '<p class="wrong"><strong>WRONG RESULTS: 3 of 6 rows (graphar).</strong>' in text


def test_each_link_has_a_cell_a_size_whose_colour_is_its_share_of_the_links_rate(tmp_path):
    text = page_of(tmp_path, counted(sweep("graph", "nccl")), MACHINE)

    drawn = [one for one in re.findall(r"<figure>.*?</figure>", text, re.DOTALL) if 'class="heat"' in one]
    assert re.findall(r"<figcaption>(.*?),", "".join(drawn)) == ["NVLink counters: graphar", "NVLink counters: nccl"]
    cells = re.findall(r'fill-opacity="([\d.]+)"><title>link (\d+), (\d+ \wB): ([\d.]+)%<', drawn[0])
    assert len(cells) == 18 * 3
    assert ("0.600", "0", "2 KB", "60.0") in cells
    assert ("0.940", "17", "1 MB", "94.0") in cells
    assert "least loaded link sent at 60.0% of its raw rate, the most loaded at 94.0%" in drawn[0]


def test_links_that_were_not_counted_one_by_one_have_no_heat_map(tmp_path):
    rows = [replace(one, nvlink=NVLINK | {"links": []}) for one in sweep()]

    text = page_of(tmp_path, rows)

    assert "NVLink counters" in text
    assert 'class="heat"' not in text


def test_a_page_needs_nothing_but_itself(tmp_path):
    text = page_of(tmp_path, sweep())

    assert not re.findall(r"""(?:src|href)=["'](?!#)|@import|url\(|<script""", text)


def test_what_names_hold_is_no_markup(tmp_path):
    text = page_of(tmp_path, sweep(), CPU | {"cpu": "<b>&"}, skipped=["<script>x: y"])

    assert "&lt;b&gt;&amp;" in text
    assert "<script" not in text


def test_every_topic_that_a_folder_holds_has_its_section(tmp_path):
    for module, found in FOUND.values():
        module.write(tmp_path, MACHINE, found, "python -m perf")

    text = build.write(tmp_path).read_text()

    assert re.findall(r'<section id="(\w+)">', text) == list(FOUND)
    for topic in FOUND:
        section = re.search(rf'<section id="{topic}">.*?</section>', text, re.DOTALL)[0]
        assert section.count("<table>") >= 1
        assert section.count('<svg class="plot"') >= 1


def test_what_somebody_notes_of_a_report_is_on_its_page(tmp_path):
    (tmp_path / "notes.md").write_text("The fan was **broken**.")

    text = page_of(tmp_path, sweep())

    assert "<p>The fan was <strong>broken</strong>.</p>" in text
    assert '<a href="#notes">' in text[: text.index("<section")]


def test_files_of_the_folder_that_are_no_topics_are_linked(tmp_path):
    (tmp_path / "tests.md").write_text("# Tests")

    assert '<a href="tests.md">tests.md</a>' in page_of(tmp_path, sweep())


def test_an_unfinished_sweep_of_nothing_still_makes_a_page(tmp_path):
    assert "Nothing was measured." in page_of(tmp_path, [], skipped=["all of it"])


def test_the_command_makes_a_page_anew_or_says_why_not(tmp_path, capsys):
    report.write(tmp_path, CPU, report.Findings(sweep()), "python -m perf allreduce")

    assert program.main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "index.html").exists()
    assert program.main(["report", str(tmp_path / "none")]) == 1
    assert "holds no report" in capsys.readouterr().err


@pytest.mark.parametrize(
    "committed", [path.parent for path in REPORTS.glob("*/index.html")], ids=lambda path: path.name
)
def test_a_committed_page_is_that_of_its_reports(committed, tmp_path):
    for path in committed.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())

    made = build.write(tmp_path).read_bytes() == (committed / "index.html").read_bytes()
    assert made, f"make it anew: python -m perf report reports/{committed.name}"


# ---- Markdown and plots ---------------------------------------------------------------------------------------------


def test_the_markdown_of_reports_becomes_html():
    blocks = ["# Title", "A `code` **strong** [link](to.md)\nhere.", "- one\n- two\n  on", "```\na < b\n```"]
    blocks.append("| a | b |\n| --- | ---: |\n| 1 | 2 |")

    assert render("\n\n".join(blocks)).splitlines() == [
        '<p>A <code>code</code> <strong>strong</strong> <a href="to.md">link</a>',
        "here.</p>",
        "<ul><li>one</li><li>two",
        "  on</li></ul>",
        "<pre>a &lt; b</pre>",
        '<div class="scroll" tabindex="0"><table><thead><tr><th class=left>a</th><th>b</th></tr></thead><tbody>',
        "<tr><td class=left>1</td><td>2</td></tr>",
        "</tbody></table></div>",
    ]


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("low", "high"), [(2.0, 9000.0), (0.93, 1.12), (0.5, 8.0), (5.0, 5.0), (1e-3, 1.0), (3.0, 31.0)]
)
def test_an_axis_has_a_few_ticks_within_its_ends(log, low, high):
    scale = plot.scale(Axis("x", log=log), [low, high], 0.0, 100.0)

    assert 2 <= len(scale.ticks()) <= 2 * plot.MOST_TICKS
    assert all(-0.1 <= scale(tick) <= 100.1 for tick in scale.ticks())
    assert 0 <= scale(low) <= scale(high) < 100


def test_a_size_axis_has_powers_of_two():
    assert plot.log_ticks(2048, 2 << 30, base=2)[:3] == [2048, 16384, 131072]


def test_points_lie_where_their_values_are():
    drawn = svg.render(Plot("p", [Line("one", [(1, 1), (100, 10)], "own")], Axis("x", log=True), Axis("y", log=True)))

    (left, low), (right, high) = (map(float, pair) for pair in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn))
    assert svg.LEFT < left < right < svg.RIGHT
    assert svg.TOP < high < low < svg.BOTTOM


def test_points_without_a_place_are_left_out_and_others_keep_what_is_theirs():
    points = [(1, 1.0), (2, math.inf), (4, 0.0), (8, 10.0)]
    line = Line("one", points, "own", hints=["a", "b", "c", "d"], wrong=frozenset({3}))

    drawn = svg.render(Plot("p", [line], Axis("x", log=True), Axis("y", log=True), [(math.inf, "never")]))

    assert re.findall(r"<title>one, (\w)</title>", drawn) == ["a", "d"]
    assert re.findall(r'<circle( class="wrong")?', drawn) == ["", ' class="wrong"']
    assert "never" not in drawn


def test_labels_at_the_ends_of_lines_lie_in_the_lines_order_and_none_over_another():
    ends = {"low": 1.0, "high": 9.0, "lowest": 0.99, "higher": 1.01}
    lines = [Line(name, [(0, 5.0), (1, end)], "own", label=name) for name, end in ends.items()]

    drawn = svg.render(Plot("p", lines, Axis("x"), Axis("y")))

    found = re.findall(r'<text class="label" x="[\d.]+" y="([\d.]+)">(\w+)<', drawn)
    heights = [float(height) for height, _ in found]
    assert [name for _, name in found] == ["high", "higher", "low", "lowest"]
    assert all(below - above >= svg.LABEL_HEIGHT for above, below in pairwise(heights))
    assert heights[-1] <= svg.BOTTOM + 4
    assert '<ul class="key"></ul>' in drawn


def test_a_plot_of_nothing_is_nothing():
    assert svg.render(Plot("p", [Line("one", [], "own")], Axis("x"), Axis("y"))) == ""


@pytest.fixture
def bands():
    """The figure of a timeline."""
    ((*_, figure),) = models.fused(FOUND["fused"][1]).values()
    return figure


def test_a_timeline_has_a_band_a_block_a_lane_a_warp_and_a_colour_a_phase(bands):
    drawn = band_figure.render(bands)

    by_phase = dict(zip(PHASES, re.findall(r'<g class="line span (.*?)</g>', drawn), strict=True))
    heights = {phase: re.findall(r'd="M[\d.]+ ([\d.]+)H', spans) for phase, spans in by_phase.items()}
    assert [len(heights[phase]) for phase in PHASES] == [2, 4, 2, 2, 2, 2]
    assert len({at for of_phase in heights.values() for at in of_phase}) == 2 * 3
    assert all(by_phase[phase].count(f"<title>{phase}, ") == len(heights[phase]) for phase in PHASES)
    assert "<title>multiplying, 8.00 us</title>" in by_phase["multiplying"]
    assert re.findall(r"</svg>(\w+)</li>", drawn) == list(PHASES)
    assert "In each from the top: consumer 0, sender 0, gatherer 0." in drawn


def test_spans_lie_where_their_times_are(bands):
    drawn = band_figure.render(bands)

    (begin, end), *_ = re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)"><title>adding', drawn)
    (first, _), *_ = re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)"><title>multiplying', drawn)
    (_, last), *_ = re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)"><title>gathering', drawn)
    whole = (float(last) - float(first)) / 11
    assert float(first) == svg.LEFT < float(last) <= svg.RIGHT
    assert float(begin) - float(first) == pytest.approx(8 * whole, abs=0.2)
    assert float(end) - float(begin) == pytest.approx(0.5 * whole, abs=0.2)


def test_a_timeline_whose_result_was_wrong_says_so():
    assert models.timeline(replace(TIMELINE, wrong=1)).title.startswith("WRONG RESULT: One op with M = 1")


# ---- in a browser ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cpu_page(tmp_path_factory):
    """Of every topic, and methods on the CPU."""
    folder = tmp_path_factory.mktemp("page")
    for name, (module, found) in FOUND.items():
        if name != "allreduce":
            module.write(folder, CPU, found, "python -m perf")
    page_of(folder, counted(sweep()))
    return folder / "index.html"


@pytest.mark.skipif(BROWSER is None, reason=f"there is no browser: none of {', '.join(browser.NAMES)}")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("which", ["cpu", "committed"])
def test_a_browser_shows_all_of_it_at_any_width_by_day_and_night(cpu_page, tmp_path, which, width, dark):
    page = cpu_page if which == "cpu" else COMMITTED / "index.html"

    seen = browser.look(BROWSER, page, width, dark=dark, folder=tmp_path)

    assert seen.console == []
    assert (seen.width, seen.scroll) == (width, width)
    assert len(seen.plots) == page.read_text().count('<svg class="plot"') > 5
    assert [one["beyond"] for one in seen.plots if one["beyond"]] == []
    assert all(300 < one["width"] <= width and one["height"] > 150 and one["font"] > 9 for one in seen.plots)
    assert browser.contrast(seen.text, seen.page) > 10
    assert (browser.contrast(seen.page, "rgb(0, 0, 0)") < 2) == dark
