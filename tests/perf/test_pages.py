"""perf's pages: of a folder, of all folders and of two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from graphar.plan.sizes import MB
from perf import __main__ as program
from perf import charts, pages
from perf.md import rate
from perf.topics.allreduce import AllReduce
from perf.topics.lossless import Lossless, LosslessRow
from perf.topics.norms import Norms
from tests.perf.samples import CPU, MACHINE, REPORTS, norm_row, row

REPORTS_FOLDER = Path(__file__).parents[2] / "reports"
NO_CHARTS = ["training", "host", "suspend", "beside", "convergence", "compile"]  # reports without ratios
COMMITTED = pages.folders_of(REPORTS_FOLDER)


def sweep(mode="cpu", peer="gloo", wrong=0):
    """Rows of graphar and a peer at three sizes; graphar is slower at the last one."""
    sizes = ((2048, 10.0, 20.0), (64 << 10, 20.0, 30.0), (MB, 60.0, 40.0))
    return [
        made
        for nbytes, ours, theirs in sizes
        for made in (row("graphar", ours, wrong, nbytes, mode), row(peer, theirs, nbytes=nbytes, mode=mode))
    ]


def page_of(folder, rows, machine=CPU, **more):
    AllReduce(rows=rows, **more).write(folder, machine, "python -m perf allreduce")
    return pages.write(folder).read_text()


def first_section(text):
    return text[: text.index("</section>")]


def test_the_first_section_says_machine_answer_and_where_graphar_is_slower(tmp_path):
    text = first_section(page_of(tmp_path, sweep()))

    assert "<h1>graphar on CPU (a CPU)</h1>" in text
    # the geometric mean of 1/2, 2/3 and 3/2
    assert (
        "graphar's time / the best peer's time is 0.50 to 1.50, geometric mean 0.79. Above 1.03: 1 MB (1.50)." in text
    )
    assert text.count("<svg ") == 1
    assert "This machine has fewer than two GPUs" in text


def test_what_was_not_measured_says_why(tmp_path):
    text = page_of(tmp_path, sweep("graph", "nccl"), MACHINE, skipped=["vllm, 4 ranks: no such package"])

    assert "<li>vllm, 4 ranks: no such package</li>" in text
    assert "<li>The multimem algorithms: NVLink multicast is off unless the user turns it on.</li>" in text
    assert "<li>Training with quantised gradients: <code>python -m perf train</code></li>" in text


def test_wrong_results_are_bold_and_red_everywhere(tmp_path):
    text = page_of(tmp_path, sweep(wrong=3))

    assert re.search(r"<td[^>]*>10 <strong>\(3 WRONG\)</strong></td>", text)
    assert f"fill: {charts.WRONG}" in text
    assert "<strong>WRONG RESULTS: 3 of 6 (graphar at bfloat16, cpu, process, 2 KB, graphar at" in text
    assert f"td strong {{ color: {charts.WRONG}; }}" in text


def test_a_wrong_result_of_any_topic_stands_in_the_first_section(tmp_path):
    Norms([norm_row("graphar", 1, 4.0, wrong=7)]).write(tmp_path, MACHINE, "python -m perf norms")

    text = first_section(pages.write(tmp_path).read_text())

    told = "WRONG RESULTS: 1 of 1 (graphar at 1 token, hidden size 8192)."
    assert told in text
    assert f"| wrong | {told}" in (tmp_path / "report.md").read_text()


def test_a_wrong_peer_is_shown_and_competes_with_nothing(tmp_path):
    Norms([norm_row("graphar", 1, 4.0), norm_row("nccl + norm", 1, 12.0, wrong=2)]).write(tmp_path, CPU, "python")
    text = pages.write(tmp_path).read_text()

    assert "(wrong results of peers, which are not compared: 1)" in first_section(text)
    assert "<strong>WRONG RESULTS OF PEERS: 1 of 2 (nccl + norm at 1 token, hidden size 8192).</strong>" in text


def test_a_page_needs_nothing_but_itself(tmp_path):
    text = page_of(tmp_path, sweep())

    assert not re.findall(r"""src=|@import|url\((?!#)|<script""", text)
    assert re.findall(r'href="(?!#)([^"]+)"', text) == []


def test_what_names_hold_is_no_markup(tmp_path):
    text = page_of(tmp_path, sweep(), CPU | {"cpu": "<b>&"}, skipped=["<script>x: y"])

    assert "&lt;b&gt;&amp;" in text
    assert "<script" not in text


def test_every_topic_that_a_folder_holds_has_its_section(tmp_path):
    for report in REPORTS:
        report.write(tmp_path, MACHINE, "python -m perf")

    text = pages.write(tmp_path).read_text()

    first, *sections = re.findall(r'<section id="(\w+)">(.*?)</section>', text, re.DOTALL)
    assert [name for name, _ in sections] == [report.name for report in REPORTS]
    assert all(section.count("<table>") >= 1 for _, section in sections)
    assert [name for name, section in sections if "<svg " not in section] == NO_CHARTS
    assert all(f'<a href="#{name}">' in first[1] for name, _ in sections)


def test_notes_and_other_files_of_the_folder_are_on_its_page(tmp_path):
    (tmp_path / "notes.md").write_text("The fan was **broken**.")
    (tmp_path / "tests.md").write_text("# Tests")

    text = page_of(tmp_path, sweep())

    assert "<p>The fan was <strong>broken</strong>.</p>" in text
    assert '<a href="tests.md">tests.md</a>' in text


def test_an_unfinished_sweep_of_nothing_still_makes_a_page(tmp_path):
    assert "Nothing was measured." in page_of(tmp_path, [], skipped=["all of it"])


def test_a_folder_without_a_sweep_has_no_answer(tmp_path):
    Lossless([LosslessRow("normal", 4, 0, 12.06)]).write(tmp_path, CPU, "python -m perf lossless")

    text = first_section(pages.write(tmp_path).read_text())

    assert "<h2>All-reduce</h2>" not in text
    assert "per element, by kind of data; times need GPUs" in text


def test_the_command_makes_a_page_anew_or_says_why_not(tmp_path, capsys):
    folder = tmp_path / "of_a_machine"
    AllReduce(rows=sweep()).write(folder, CPU, "python -m perf allreduce")

    assert program.main(["report", str(folder), "--write"]) == 0
    assert (folder / "index.html").exists()
    assert program.main(["report", str(tmp_path / "none")]) == 1
    assert "holds no report" in capsys.readouterr().err
    assert program.main(["report", str(tmp_path)]) == 1
    assert f"holds no report of python -m perf; try {folder}" in capsys.readouterr().err


def two_folders(tmp_path):
    for name, machine, factor in (("small", MACHINE, 1.0), ("large", MACHINE | {"gpu": "NVIDIA B300"}, 0.5)):
        rows = [row(time_us=10.0 * factor), row("nccl", 20.0 * factor)]
        AllReduce(rows=rows).write(tmp_path / name, machine, "python -m perf allreduce")
        pages.write(tmp_path / name)
    Norms([norm_row("graphar", 1, 4.0), norm_row("nccl + norm", 1, 8.0)]).write(tmp_path / "small", MACHINE, "perf")


def test_the_index_has_a_column_a_folder_and_a_row_a_topic(tmp_path, capsys):
    two_folders(tmp_path)

    assert program.main(["index", str(tmp_path)]) == 0

    text = (tmp_path / "index.html").read_text()
    assert '<a href="large/index.html">graphar on 4x NVIDIA B300</a>' in text
    assert "2 reports, 2026-01-31" in text
    assert all(f'<a href="{name}/index.html#allreduce">0.50</a>' in text for name in ("large", "small"))
    without = MACHINE | {"gpu": None, "gpu_count": 0}
    AllReduce(rows=[row(), row("gloo")]).write(tmp_path / "a_cpu", without, "python -m perf allreduce")
    readme = pages.index_texts(tmp_path)["README.md"]
    assert "| All-reduce with residual and RMSNorm | - | [0.50](small/norms.md) | - |" in readme
    assert "| topic | [large](large/report.md) | [small](small/report.md) | [a_cpu](a_cpu/report.md) |" in readme
    assert program.main(["index", str(tmp_path / "none")]) == 1
    assert "holds no folder of reports" in capsys.readouterr().err


def test_a_small_rate_has_two_significant_digits():
    assert [*map(rate, (0.00032, 0.057, 0.57, 1.0, 335.61))] == ["0.00032", "0.057", "0.57", "1.0", "335.6"]


@pytest.mark.parametrize("folder", COMMITTED, ids=lambda path: path.name)
def test_what_is_committed_is_what_is_made_of_its_json(folder, monkeypatch):
    monkeypatch.setattr(charts, "render", lambda figure: "")

    made = pages.texts(folder)

    committed = {path.name: path.read_text() for path in folder.glob("*.md") if path.name in made}
    assert committed.keys() == {name for name in made if name.endswith(".md")}
    differing = [name for name, text in committed.items() if made[name] != text]
    assert differing == [], f"make them anew: python -m perf report reports/{folder.name} --write"


def test_the_committed_index_is_that_of_its_folders():
    committed = (REPORTS_FOLDER / "README.md").read_text()

    assert pages.index_texts(REPORTS_FOLDER)["README.md"] == committed, "make it anew: python -m perf index reports"
