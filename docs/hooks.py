"""What pages hold besides the text that is written in them.

- `<!-- figure: NAME -->` becomes a figure of perf/figures.py, drawn from a committed report.
- `<!-- generated: NAME -->` becomes a table of GENERATED, made from the code's own data.
- Links to `../../reports/` lead to copies of the reports' pages; the changelog is a page.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # perf and tests are of the checkout, and not installed

from docs import headers, tables  # noqa: E402
from perf import figures  # noqa: E402

GENERATED = {
    "arguments": headers.arguments,
    "callers": headers.callers,
    "interface_version": headers.interface_version,
    "memory": tables.memory,
    "primitives": headers.primitives,
    "promises": tables.promises,
}


def on_files(files, config):
    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    files.append(File.generated(config, "figures.css", content=style_of_figures()))
    for page in sorted((ROOT / "reports").rglob("index.html")):
        name = page.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(page), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(text, page, config, files):
    up = "../" * page.file.src_uri.count("/")
    text = re.sub(r"<!-- figure: ([\w-]+) -->", lambda found: with_source(found[1], up), text)
    text = re.sub(r"<!-- generated: (\w+) -->", lambda found: GENERATED[found[1]](), text)
    return to_reports(text, up)


def with_source(name: str, up: str) -> str:
    """A figure, and a link to the report that it shows."""
    source = figures.FIGURES[name]
    report = f'<a href="{up}reports/{source.folder}/index.html#{source.topic.name}">report</a>'
    return figures.render(name).replace("</p></figure>", f" Data: {report}.</p></figure>").strip()


def to_reports(text: str, up: str) -> str:
    """Links to a report in the repository, as links to its place on its folder's page."""
    text = re.sub(r"\]\((?:\.\./)+reports/([\w/]+)/(\w+)\.md\)", rf"]({up}reports/\1/index.html#\2)", text)
    return re.sub(r"\]\((?:\.\./)+reports/([\w/]*)index\.html\)", rf"]({up}reports/\1index.html)", text)


def style_of_figures() -> str:
    """The colours of figures, in both of the theme's palettes."""
    schemes = {"light": "default", "dark": "slate"}
    lines = []
    for theme, colours in figures.themes().items():
        values = "; ".join(f"{name}: {colour}" for name, colour in colours.items())
        lines.append(f"[data-md-color-scheme={schemes[theme]}] {{ {values} }}\n")
    return "".join(lines)
