"""The headers that kernels from outside the package include: contracts in their comments, their version, their page."""

import hashlib
import re
import shutil

import pytest

from docs import headers
from docs.headers import CALLERS, PUBLIC, Entry
from graphar.runtime.arguments import Arguments
from tests.outside import FOLDER as OUTSIDE
from tests.pages import FOLDER, PAGES

# By version, a hash of what the headers declare (`declarations`).
INTERFACES = {1: "4300c3ce0433854e"}
CHANGED = """The public headers declare something else than before. If a kernel from outside may need a change for it,
raise `interface_version` in cuda_src/device/arguments.cuh, and add the new version and its hash to INTERFACES. If every
such kernel compiles and means the same as before, replace the hash of this version. The hash is now {digest}."""

NAME = re.compile(r"([\w:]+|operator\(\))\(")
ACCESSES = (
    "load|store|exchange|add_relaxed|push|receive|send|arm|wait|flag$|flagged|cop[yi]|epoch|_call|check|look|report"
)
ORDERS, SCOPES = r"\b(relaxed|acquire|release)\b", r"\b(block|gpu|system) scope\b"
WITHOUT_SCOPE = r"\bweak\b|\borders no access\b"


def public() -> list[Entry]:
    return [one for header in PUBLIC for one in headers.shown(header)]


def says(contract: str, pattern: str) -> bool:
    return re.search(pattern, contract, re.IGNORECASE) is not None


def lacking(one: Entry) -> list[str]:
    """What the contract of a function, or of a type's members, does not say."""
    members = one.signatures if one.is_function else one.signatures[1:]
    callers = [name for name in CALLERS if name in one.contract]
    missing = []
    if members and not (one.contract.startswith(tuple(callers)) if one.is_function and callers else callers):
        missing.append("caller")
    accesses = any(says(NAME.search(text)[1], ACCESSES) for text in members)
    if accesses and not says(one.contract, WITHOUT_SCOPE):
        missing += [what for what, words in (("order", ORDERS), ("scope", SCOPES)) if not says(one.contract, words)]
    return missing


def declarations() -> list[str]:
    """What kernels from outside depend on: the public signatures and fields, and the layout of Arguments."""
    declared = [f"{one.name}: {text}" for one in public() for text in headers.declared(one)]
    fields = [(name, getattr(Arguments, name)) for name, *_ in Arguments._fields_]
    return sorted(declared) + [f"{name} at {of.offset} of {of.size} bytes" for name, of in fields]


def digest() -> str:
    without_version = [text for text in declarations() if not text.startswith("interface_version")]
    return hashlib.sha256("\n".join(without_version).encode()).hexdigest()[:16]


@pytest.mark.parametrize("header", PUBLIC)
def test_every_public_function_says_who_may_call_it_and_in_what_order_and_scope_it_accesses_memory(header):
    shown = headers.shown(header)

    assert shown
    assert {one.name: lacking(one) for one in shown if lacking(one)} == {}
    assert [one.name for one in shown if not one.contract] == []


@pytest.mark.parametrize(
    ("comment", "missing"),
    [
        ("", ["caller", "order", "scope"]),
        ("// Stores a word, relaxed, of system scope. By any thread.\n", ["caller"]),
        ("// By any thread: stores a word.\n", ["order", "scope"]),
        ("// By any thread: a release store.\n", ["scope"]),
        ("// By any thread: a release store\n// of system scope.\n", []),
        ("// By any thread: a weak store.\n", []),
    ],
)
def test_a_contract_that_is_not_complete_is_told(comment, missing):
    (one,) = headers.entries_of(f"{comment}DEVICE void store_word(u32* at,\n  u32 v) {{ *at = v; }}\n")

    assert (one.signatures, lacking(one)) == (["void store_word(u32* at, u32 v)"], missing)


@pytest.mark.parametrize("header", PUBLIC)
def test_every_function_of_a_header_is_read(header):
    found = headers.entries(header)

    read = sum(len(one.signatures) - (not one.is_function) for one in found)
    text = (headers.SOURCES / header).read_text().replace("#define DEVICE __device__", "")
    assert read == text.count("__device__ ") + text.count("DEVICE ")


def test_what_the_headers_declare_changes_only_with_their_version():
    known = INTERFACES.get(int(headers.interface_version()))

    assert known == digest(), CHANGED.format(digest=digest())


@pytest.mark.parametrize(
    ("old", "new", "changes"),
    [
        ("u32 patience = 4) {\n    return", "u32 patience = 5) {\n    return", True),
        ("DEVICE u64 start()", "DEVICE u32 start()", True),
        ("Each thread that polls has its own.", "Each has its own.", False),
        ("u32 spins_ = 0;", "u64 spins_ = 0;", False),
    ],
)
def test_signatures_change_the_hash_and_comments_and_private_members_do_not(tmp_path, monkeypatch, old, new, changes):
    before = digest()
    shutil.copytree(headers.SOURCES, tmp_path / "cuda_src")
    monkeypatch.setattr(headers, "SOURCES", tmp_path / "cuda_src")
    path = tmp_path / "cuda_src/device/sync/deadline.cuh"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))

    assert (digest() != before) is changes


def test_the_page_has_every_public_header_and_every_field_of_the_arguments():
    sections = re.findall(r"^### (.+)$", headers.primitives(), re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)(?:\[\w+\])?` \| `.+` \| \S.* \|$", headers.arguments(), re.MULTILINE)

    assert tuple(sections) == PUBLIC
    assert rows == [name for name, *_ in Arguments._fields_]


def test_kernels_from_outside_include_public_headers_alone():
    files = [*PAGES, *OUTSIDE.glob("*.cu*"), *(FOLDER / "algorithms").glob("*.cu")]
    texts = [one.read_text() for one in files]
    included = {name for text in texts for name in re.findall(r'^#include "(device/.+)"', text, re.MULTILINE)}

    assert included
    assert included <= set(PUBLIC)
