"""What the pages hold besides what is written in them: the changelog, the reports, figures, and tables of the code's data.

mkdocs calls the functions `on_...`. A page has `<!-- figure: NAME -->`, of perf/figures.py, and `<!-- generated: NAME -->`,
of GENERATED, where those stand. Links to `../../reports/` lead to copies of the reports' pages.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parents[1]


def on_files(files, config):
    files.append(File.generated(config, "changelog.md", content=(ROOT / "CHANGELOG.md").read_text()))
    for page in sorted((ROOT / "reports").rglob("index.html")):
        name = page.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(page), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(text, page, config, files):
    return to_reports(text, "../" * page.file.src_uri.count("/"))


def to_reports(text: str, up: str) -> str:
    """Links to a report in the repository, as links to its place on its folder's page."""
    text = re.sub(r"\]\((?:\.\./)+reports/([\w/]+)/(\w+)\.md\)", rf"]({up}reports/\1/index.html#\2)", text)
    return re.sub(r"\]\((?:\.\./)+reports/([\w/]*)index\.html\)", rf"]({up}reports/\1index.html)", text)
