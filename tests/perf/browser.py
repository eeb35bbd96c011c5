"""Renders a page in headless Chromium and measures it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")

# Opens all details and writes its findings into the document around the page, which the browser then prints.
PROBE = """
<script>
addEventListener("load", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  const box = (element) => element.getBoundingClientRect();
  const style = getComputedStyle(document.body);
  const plots = [...document.querySelectorAll("svg.plot")].map((plot) => ({
    width: box(plot).width,
    height: box(plot).height,
    font: Math.min(...[...plot.querySelectorAll("text")].map((text) =>
      parseFloat(getComputedStyle(text).fontSize) * box(plot).width / plot.viewBox.baseVal.width)),
    beyond: [...plot.querySelectorAll("text, path, circle, rect")].filter((mark) => box(mark).width
      && (box(mark).right > box(plot).right + 6 || box(mark).left < box(plot).left - 6
      || box(mark).bottom > box(plot).bottom + 6 || box(mark).top < box(plot).top - 6)).map((mark) => mark.outerHTML),
  }));
  const seen = { width: innerWidth, scroll: document.documentElement.scrollWidth, plots,
    text: style.color, page: style.backgroundColor };
  parent.document.body.dataset.seen = JSON.stringify(seen);
});
</script>
"""

# A window has a minimum width; a frame has none. The page in the frame is light or dark as the document around it is.
AROUND = """
<!doctype html><meta charset="utf-8"><style>:root {{ color-scheme: light dark }}</style>
<iframe width="{width}" height="900" style="border: 0" srcdoc="{page}"></iframe>
"""


@dataclass(frozen=True)
class Seen:
    """Measurements of a page. Lengths are in CSS pixels.

    Attributes:
        width: of the frame.
        scroll: width of the content.
        plots: the width, height and smallest font of each plot, and its elements that lie beyond its box.
        text: colour of the text.
        page: colour of the background.
        console: messages of the page, and of resources that did not load.
    """

    width: int
    scroll: int
    plots: list[dict]
    text: str
    page: str
    console: list[str]


def find() -> str | None:
    """The path of a browser."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def look(browser: str, page: Path, width: int, *, dark: bool, folder: Path) -> Seen:
    """Opens the page from disk in a frame of that width.

    Args:
        folder: for temporary files.
    """
    probed = html.escape(page.read_text().replace("</body>", f"{PROBE}</body>"))
    around = folder / "around.html"
    around.write_text(AROUND.format(width=width, page=probed))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1600,1000"]
    options += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--dump-dom"]
    run = subprocess.run([browser, *options, around.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-seen="([^"]*)"', run.stdout)
    assert found, run.stderr
    console = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    return Seen(**json.loads(html.unescape(found[1])), console=console)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two computed CSS colours, rgb(r, g, b): from 1 to 21."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    channels = [int(number) / 255 for number in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
