"""Draws the figures of README and docs/ from committed reports. `python -m perf.figures` writes the README's files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from perf import charts
from perf.charts import Figure
from perf.report import Report, StoredReport, read, topics

ROOT = Path(__file__).parents[1]
README_FILES = ROOT / "docs" / "pages" / "figures"


@dataclass(frozen=True)
class Source:
    """One figure of a page.

    Attributes:
        folder: the folder under reports/.
        name: the name of the topic.
        method: the topic's method that draws the figure.
    """

    folder: str
    name: str
    method: str

    @property
    def topic(self) -> type[Report]:
        return next(topic for topic in topics() if topic.name == self.name)

    def read(self) -> StoredReport:
        return read(ROOT / "reports" / self.folder, self.topic)

    def figure(self) -> Figure:
        """The figure, with the machine and the date below it."""
        written = self.read()
        drawn, machine = getattr(written.report, self.method)(), written.machine
        where = f"{machine['gpu_count']}x {machine['gpu']}, {machine['date']}."
        return replace(drawn, note=" ".join(filter(None, [drawn.note, where])))


FIGURES = {
    "allreduce": Source("h200x4", "allreduce", "figure_of_times"),
    "allreduce-ratio": Source("h200x4", "allreduce", "overview"),
    "codec-error": Source("h200x4", "quantized", "figure_of_errors"),
    "codec-time": Source("h200x4", "quantized", "figure_of_times"),
    "lossless": Source("h200x4", "lossless", "figure_of_ratios"),
    "norms": Source("h200x4", "norms", "figure_of_times"),
    "matmul": Source("h200x4", "fused", "figure_of_ratios"),
    "model": Source("h200x2", "model", "figure_of_speedups"),
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
