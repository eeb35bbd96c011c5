"""The Markdown of the reports as HTML: headings, paragraphs, lists, tables, code, and no more than they use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

WRONG = re.compile(r"WRONG|^wrong$")


def sections(markdown: str) -> list[tuple[str, str]]:
    """The text by its headings of the second level; what stands before the first has none."""
    first, *others = re.split(r"^## ", markdown, flags=re.MULTILINE)
    return [("", first), *(tuple(other.split("\n", 1)) for other in others)]


def render(markdown: str) -> str:
    """Blocks that an empty line divides. Headings of the first level and images are left out."""
    blocks = re.split(r"\n\s*\n", markdown.strip())
    return "\n".join(filter(None, (_block(block.strip()) for block in blocks)))


def render_list(title: str, lines: Sequence[str]) -> str:
    """Such lines as a list, under a title if it has one; nothing for none."""
    head = f"<h3>{title}</h3>" if title and lines else ""
    return head + render("\n".join(f"- {line}" for line in lines))


def inline(text: str) -> str:
    """Code, strong words and links."""
    text = escape(text, quote=False)
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)


def _block(block: str) -> str:
    if not block or block.startswith(("# ", "![")):
        return ""
    if block.startswith("### "):
        return f"<h4>{inline(block[4:])}</h4>"
    if block.startswith("```"):
        return f"<pre>{escape(block.strip('`').strip())}</pre>"
    if block.startswith("|"):
        return _table(block.splitlines())
    if block.startswith("- "):
        items = re.split(r"\n- ", block[2:])
        return f"<ul>{''.join(_told('li', item) for item in items)}</ul>"
    return _told("p", block)


def _told(tag: str, text: str) -> str:
    wrong = ' class="wrong"' if WRONG.search(text) else ""
    return f"<{tag}{wrong}>{inline(text)}</{tag}>"


def _table(lines: list[str]) -> str:
    header, rule, *body = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines)
    right = [cell.endswith(":") for cell in rule]
    head = "".join(_cell("th", cell, is_right) for cell, is_right in zip(header, right, strict=True))
    rows = []
    for cells in body:
        wrong = ' class="wrong"' if any(WRONG.search(cell) for cell in cells) else ""
        row = "".join(_cell("td", cell, is_right) for cell, is_right in zip(cells, right, strict=True))
        rows.append(f"<tr{wrong}>{row}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(rows)}\n</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>'


def _cell(tag: str, text: str, is_right: bool) -> str:
    return f"<{tag}{'' if is_right else ' class=left'}>{inline(text)}</{tag}>"
