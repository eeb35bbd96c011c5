"""The API pages of `nox -s docs`: every public name is on one, and says what it is."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

import graphar

NOXFILE = (Path(__file__).parents[1] / "noxfile.py").read_text()
MODULES = ast.literal_eval(re.search(r"^API_MODULES = (\(.*?\))$", NOXFILE, re.MULTILINE)[1])


def public(owner):
    """What a module or class defines itself, by name; of modules their __all__, if they have one."""
    names = getattr(owner, "__all__", [name for name in vars(owner) if not name.startswith("_")])
    assert all(hasattr(owner, name) for name in names)  # which imports a module that is imported where it is used
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


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The folder of pages; what the generator warns of is an error."""
    pdoc = pytest.importorskip("pdoc", reason="needs pdoc, which makes the pages")
    folder = tmp_path_factory.mktemp("docs")
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*MODULES, output_directory=folder)
    return folder


def test_every_public_name_has_a_place_on_a_page(pages):
    missing = []
    for name in graphar.__all__:
        page = pages / "graphar" / f"{name}.html"
        if not page.exists() and f'id="{name}"' not in (pages / "graphar.html").read_text():
            missing.append(name)
    assert missing == []
    assert {path.stem for path in (pages / "graphar").rglob("*.html")} == {"codecs", "ddp", "nn", "reference"}


def test_arguments_in_docstrings_are_lists_on_pages_and_references_are_links(pages):
    text = (pages / "graphar.html").read_text()

    assert re.search(r"<strong>bucket_size:</strong>\s+elements", text)
    assert '<a href="#allreduce">graphar.allreduce()</a>' in text
