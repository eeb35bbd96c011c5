"""What graphar.explain says of a call."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """Which way a call takes.

    Attributes:
        algorithm: the algorithm's name.
        blocks: thread blocks on each GPU; 0 where no kernel of graphar runs.
        threads: threads in a block; 0 likewise.
        reason: why this one.
        expected_us: microseconds it takes inside a CUDA graph, from what was measured for the table; None where nothing
            was, where an algorithm was asked for by name, and where symmetric tensors spare it a copy.
        exact_us: of a call with a codec, what it would take without, likewise; None for other calls.
    """

    algorithm: str
    blocks: int
    threads: int
    reason: str
    expected_us: float | None = None
    exact_us: float | None = None

    def __str__(self) -> str:
        """With a codec, also whether that pays, where it is known."""
        grid = f"{self.blocks} blocks of {self.threads}" if self.blocks else ""
        time = f"about {format_us(self.expected_us)} us" if self.expected_us is not None else ""
        detail = ", ".join(part for part in (grid, time) if part)
        return f"{self.algorithm}{f' ({detail})' if detail else ''}: {self.reason}{self._gain()}"

    def _gain(self) -> str:
        if self.expected_us is None or self.exact_us is None:
            return ""
        pays = "" if self.expected_us < self.exact_us else "does not pay: "
        return f"; {pays}exact about {format_us(self.exact_us)} us, with the codec {format_us(self.expected_us)} us"


def format_us(us: float) -> str:
    """Microseconds with as many digits as a measurement is good for."""
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"
