"""The built pages: what mkdocs makes of docs/. `nox -s docs` runs this."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import MKDOCS, in_navigation
from tests.pages import ROOT


@pytest.fixture(scope="module")
def site(request, tmp_path_factory):
    """The built pages; what mkdocs warns of, such as a link that leads nowhere, is an error."""
    if built := request.config.getoption("--site"):
        return Path(built)
    pytest.importorskip("material", reason="needs mkdocs-material, which builds the site")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", MKDOCS, "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_is_built_without_a_warning_and_asks_no_other_host(site):
    pages = {path.relative_to(site).with_suffix(".md").as_posix(): path.read_text() for path in site.rglob("*.html")}

    assert in_navigation() <= pages.keys()
    loaded = [re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)"', text) for text in pages.values()]
    assert [one for one in loaded if one] == []


def test_arguments_in_docstrings_are_lists_and_references_are_links(site):
    options, ops = ((site / "api" / f"{name}.html").read_text() for name in ("options", "ops"))

    assert re.search(r"<code>bucket_size</code>.*?elements that share a scale", options, re.DOTALL)
    assert re.search(r'href="#graphar\.allreduce"><code>allreduce</code>', ops)
    assert not re.findall(r":(?:func|class|meth):", options + ops)


def test_figures_and_generated_tables_are_on_the_pages(site):
    names = ("performance", "semantics", "promises", "changelog")
    texts = {name: (site / f"{name}.html").read_text() for name in names}

    assert texts["performance"].count("<svg ") > 5
    assert "<code>two_shot_push</code></td>" in texts["semantics"]
    assert "test_allreduce_gpu.py::" in texts["promises"]
    assert "Changelog" in texts["changelog"]
    assert [name for name, text in texts.items() if "<!-- generated" in text or "<!-- figure" in text] == []


def test_links_of_reports_pages_lead_to_places_of_the_site(site):
    pages = [site / "reports" / "index.html", *(site / "reports").glob("*/index.html")]
    found = {page: re.findall(r'<a href="(?!http)([^"#]*)#?([^"]*)"', page.read_text()) for page in pages}
    links = {(page.parent / (file or page.name), place) for page, of in found.items() for file, place in of}

    assert len(links) > 50
    assert [file for file, _ in links if not file.exists()] == []
    assert [place for file, place in links if place and f'id="{place}"' not in file.read_text()] == []
