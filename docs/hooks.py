"""What pages hold besides the text that is written in them.

- `<!-- figure: NAME -->` becomes a figure of perf/figures.py, drawn from a committed report.
- `<!-- generated: NAME -->` becomes a table of GENERATED, made from the code's own data.
- Links to `../../reports/` lead to the reports' pages. The pages are made from the committed JSON.
- The changelog is a page.
"""

from __future__ import annotations

import functools
import re
import shutil
import sys
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # perf and tests are of the checkout, and not installed

from docs import headers, tables  # noqa: E402
from perf import figures, pages  # noqa: E402

REPORTS = ROOT / "reports"

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
    for name, text in made_of_reports().items():
        if name.endswith(pages.INDEX):
            files.append(File.generated(config, name, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_post_build(config):
    """Writes what the reports' pages link to: tables as Markdown, which mkdocs would turn into pages, and JSON."""
    site = Path(config.site_dir)
    shutil.copytree(REPORTS, site / REPORTS.name, ignore=shutil.ignore_patterns("*.html"), dirs_exist_ok=True)
    for name, text in made_of_reports().items():
        (site / name).write_text(text)


@functools.cache
def made_of_reports() -> dict[str, str]:
    """The texts of the reports' pages and tables, by path in the site."""
    made = {REPORTS.name: pages.index_texts(REPORTS)}
    made |= {f"{REPORTS.name}/{folder.name}": pages.texts(folder) for folder in pages.folders_of(REPORTS)}
    return {f"{folder}/{name}": text for folder, texts in made.items() for name, text in texts.items()}


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
    """Links to a report in the repository, as links to its place on its folder's page; the page lists other files."""
    links = r"\]\((?:\.\./)+(reports/[\w./]+\.md)\)"
    return re.sub(links, lambda link: pages.to_pages(f"]({up}{link[1]})"), text)
