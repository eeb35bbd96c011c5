"""Draws the figures of README and docs/ from committed reports. `python -m perf.figures` writes the README's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perf import charts
from perf.charts import Axis, Figure, Line, Mark, Plot, Rows
from perf.models.bench import by_title
from perf.ratios import best, best_peer, by_method, ratio
from perf.report import Report, StoredReport, read
from perf.topics import allreduce, fused, lossless, model, norms, quantized

ROOT = Path(__file__).parents[1]
README_FILES = ROOT / "docs" / "pages" / "figures"


@dataclass(frozen=True)
class Source:
    """One figure of a page.

    Attributes:
        folder: the folder under reports/.
        draw: draws the figure from a report.
    """

    folder: str
    topic: type[Report]
    draw: Callable[[Report], Figure]

    def read(self) -> StoredReport:
        return read(ROOT / "reports" / self.folder, self.topic)

    def figure(self) -> Figure:
        """The figure, with the machine and the date below it."""
        written = self.read()
        drawn, machine = self.draw(written.report), written.machine
        where = f"{machine['gpu_count']}x {machine['gpu']}, {machine['date']}."
        return replace(drawn, note=" ".join(filter(None, [drawn.note, where])))


# ---- figures --------------------------------------------------------------------------------------------------------


def main_rows(report: allreduce.AllReduce) -> list[allreduce.Row]:
    return allreduce.members(report.rows, allreduce.main_first(report.rows)[0])


def time_by_size(report: allreduce.AllReduce) -> Plot:
    """Plots the times of graphar, NCCL and the best peer. NCCL is the faster of with and without registered memory."""
    cases = by_method(main_rows(report), lambda row: row.nbytes)
    picks = {
        "graphar": lambda rows: rows.get("graphar"),
        "NCCL": lambda rows: best(row for name, row in rows.items() if name.startswith("nccl")),
        "best peer": lambda rows: best_peer(rows.values()),
    }
    lines = []
    for name, pick in picks.items():
        mine = [row for rows in cases.values() if (row := pick(rows))]
        lines.append(allreduce.line_of(name, mine, lambda row: row.median))
    note = "In CUDA graphs, bf16. Best peer: at each size the fastest of NCCL, torch's symmetric memory, vLLM,"
    note += " FlashInfer and SGLang. graphar's line covers most of it."
    return Plot("Time of an all-reduce by size", lines, allreduce.SIZE, allreduce.TIME, note=note)


def codec_ratios(report: quantized.Quantized) -> Plot:
    """Plots the time with each codec / the time of the exact all-reduce."""
    cases = by_method(report.times, lambda row: row.nbytes)
    lines = []
    for name in quantized.DRAWN:
        if name == "graphar":
            continue
        mine = {nbytes: rows for nbytes, rows in cases.items() if ratio(rows.get(name), rows.get("graphar"))}
        points = [(nbytes, ratio(rows[name], rows["graphar"])) for nbytes, rows in mine.items()]
        lines.append(Line(name.removeprefix(quantized.CODEC_PREFIX), points))
    axis = Axis("time / exact time", form="{:.2f}".format)
    return Plot("Time / exact all-reduce's time, by codec", lines, allreduce.SIZE, axis, 1.0)


def matmul_ratios(report: fused.Fused) -> Plot:
    world_size, n, k = max((row.world_size, row.n, row.k) for row in report.rows)
    mine = [row for row in report.rows if (row.world_size, row.n, row.k) == (world_size, n, k)]
    drawn = fused.Fused.ratios_plot(by_method(mine, lambda row: row.m))
    return replace(drawn, title=f"Matmul + all-reduce: time / best peer's time, N = {n}, K = {k}")


def model_speedups(report: model.Model) -> Rows:
    """Plots the speedup of each step over the same step with NCCL's all-reduces."""
    picks = {"graphar, fastest exact method": model.best_own, "best peer": lambda rows: best_peer(rows.values())}
    marks = []
    for step, rows in by_title(report.rows).items():
        for name, pick in picks.items():
            row = pick(rows)
            marks.append(Mark(step.split(": ")[1], name, rows["nccl"].median / row.median))
    title = f"Layers of {report.rows[0].size}: speed of a step relative to NCCL"
    return Rows(title, marks, Axis("times as fast as with NCCL"), 1.0)


def lossless_ratios(report: lossless.Lossless) -> Plot:
    """Plots all-reduces of the largest number of ranks."""
    return lossless.ratio_plot(only_largest_world([row for row in report.rows if row.op == "allreduce"]))


def only_largest_world(rows: Sequence) -> list:
    world_size = max(row.world_size for row in rows)
    return [row for row in rows if row.world_size == world_size]


FIGURES: Mapping[str, Source] = {
    "allreduce": Source("h200x4", allreduce.AllReduce, time_by_size),
    "allreduce-ratio": Source("h200x4", allreduce.AllReduce, lambda report: allreduce.ratios_by_world(report.rows)),
    "codec-error": Source("h200x4", quantized.Quantized, lambda made: quantized.error_plot(replace(made, times=[]))),
    "codec-time": Source("h200x4", quantized.Quantized, codec_ratios),
    "lossless": Source("h200x4", lossless.Lossless, lossless_ratios),
    "norms": Source("h200x4", norms.Norms, lambda report: norms.times(only_largest_world(report.rows))),
    "matmul": Source("h200x4", fused.Fused, matmul_ratios),
    "model": Source("h200x2", model.Model, model_speedups),
}


def render(name: str) -> str:
    return charts.render(FIGURES[name].figure())


def readme_files() -> dict[Path, str]:
    """Returns the contents of the README's figure files, by path."""
    return {README_FILES / "allreduce.svg": f"{charts.svg(FIGURES['allreduce'].figure())}\n"}


if __name__ == "__main__":
    README_FILES.mkdir(exist_ok=True)
    for path, text in readme_files().items():
        path.write_text(text)
        print(path)
