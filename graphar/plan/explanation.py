"""Explanation: the result of graphar.explain."""

from __future__ import annotations

from dataclasses import dataclass

from graphar.plan.sizes import MB


@dataclass(frozen=True)
class Explanation:
    """The algorithm and grid of a call, the reason for them, and the expected time.

    Attributes:
        algorithm: the algorithm's name.
        blocks: thread blocks on each GPU; 0 if no kernel of graphar runs.
        threads: threads in a block; 0 if no kernel of graphar runs.
        reason: why this algorithm is chosen.
        expected_us: expected microseconds inside a CUDA graph, from the measurements in the tuning table. None if there
            are none, if no kernel runs, if the caller named an algorithm, if symmetric tensors save a copy, with an
            epilogue, and with lossless compression, whose time depends on the data.
        exact_us: for a call with a codec, the expected microseconds without any compression, inside a CUDA graph. None
            for other calls, and if there are no measurements.
        scratch_nbytes: bytes of scratch on each GPU, which all calls by this algorithm share; 0 if no kernel runs.
    """

    algorithm: str
    blocks: int
    threads: int
    reason: str
    expected_us: float | None = None
    exact_us: float | None = None
    scratch_nbytes: int = 0

    def __str__(self) -> str:
        """One line: algorithm, grid, expected time, reason and scratch; with a codec also whether it is faster."""
        grid = f"{self.blocks} blocks of {self.threads}" if self.blocks else ""
        time = f"about {format_us(self.expected_us)} us" if self.expected_us is not None else ""
        scratch = f"; {self.scratch_nbytes / MB:.1f} MB of scratch on each GPU" if self.scratch_nbytes else ""
        detail = ", ".join(part for part in (grid, time) if part)
        gain = ""
        if self.expected_us is not None and self.exact_us is not None:
            word = "faster" if self.expected_us < self.exact_us else "slower"
            gain = f"; {word} than exact: {time} instead of {format_us(self.exact_us)} us"
        return f"{self.algorithm}{f' ({detail})' if detail else ''}: {self.reason}{gain}{scratch}"


def format_us(us: float) -> str:
    """Returns microseconds as text: with one decimal below 100, else with none."""
    return f"{us:.1f}" if us < 100 else f"{us:.0f}"
