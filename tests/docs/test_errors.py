"""Error messages and reasons that pages quote are in graphar's source.

A quote is the text of a heading such as `## ValueError: text`, or the code in the first column of a table of reasons.
It is part of a message. Numbers, devices, dtypes and `...` stand for what the message fills in.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.docs.test_numbers import rows_of
from tests.pages import PAGES, ROOT

ANY = "\0"
FILLED_IN = re.compile(r"\.\.\.|\[[\d, ]*\]|\bcuda:(?:\d+|\0)|\btorch\.\w*\d+|\b\d+(?:\.\d+)*")
HEADING = re.compile(r"^## \w+(?:Error|Timeout): (.+)$", re.MULTILINE)


def with_gaps(text: str) -> str:
    """The text with one mark for each value that a message fills in."""
    return re.sub(f"{ANY}+", ANY, FILLED_IN.sub(ANY, text))


@cache
def messages() -> list[str]:
    """Every string of the source, f-strings among them, and no docstring."""
    nodes = [node for path in (ROOT / "graphar").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [with_gaps(text) for node in nodes if id(node) not in docstrings and (text := text_of(node))]


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or ANY for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def quotes() -> Iterator[tuple[str, str]]:
    """Pages and what they quote."""
    for page in PAGES:
        text = page.read_text()
        yield from ((page.stem, quote) for quote in HEADING.findall(text))
        for row in rows_of(text.splitlines()):
            if quote := re.match("`(.+?)`", row.get("reason", "")):
                yield page.stem, quote[1]


QUOTES = sorted(set(quotes()))


@pytest.mark.parametrize(("page", "quote"), QUOTES)
def test_a_message_that_a_page_quotes_is_in_the_source(page, quote):
    fixed = with_gaps(quote).strip(f"{ANY} ")

    assert [message for message in messages() if fixed in message]


def test_pages_quote_messages_in_headings_and_in_tables():
    assert len(QUOTES) > 25
    assert {page for page, _ in QUOTES} == {"troubleshooting", "hosts", "compile"}
