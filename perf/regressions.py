"""What takes longer than in an earlier run on the same machine, beyond noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphar.plan.sizes import format_nbytes
from perf import files
from perf.machine import slug

TOPICS = {"allreduce": "rows", "quantized": "times", "fused": "rows"}  # those whose times have a spread, and where
SLOWER = 1.03
IDENTITY = ("method", "world_size", "dtype", "mode", "form", "nbytes", "m", "n", "k")


@dataclass(frozen=True)
class Comparison:
    """Attributes:
    compared: how many rows both runs have, right in both.
    regressions: graphar's rows that take longer, each in words.
    slower_peers: how many rows of others do; where they are many, it is the machine that has changed.
    """

    compared: int
    regressions: list[str]
    slower_peers: int

    def __str__(self) -> str:
        found = "\n".join(f"- {line}" for line in self.regressions)
        head = f"{len(self.regressions)} of {self.compared} rows are regressions of graphar's" if found else ""
        head = head or f"No regression of graphar's in {self.compared} rows"
        peers = f" (and {self.slower_peers} rows of peers are slower)" if self.slower_peers else ""
        return f"{head}{peers}{':' if found else '.'}\n{found}".strip()


def read(folder: Path, topic: str, machine: dict[str, object]) -> list[dict]:
    """The rows of an earlier run.

    Raises:
        OSError, ValueError: there are none, or they are of another machine.
    """
    content = files.read(folder, topic)
    before, now = (what["cpu"] if not what["gpu"] else slug(what) for what in (content["machine"], machine))
    if before != now:
        raise ValueError(f"{folder} is of another machine: {before}, and this is {now}")
    return content[TOPICS[topic]]


def compare(before: Sequence[dict], now: Sequence[dict]) -> Comparison:
    """Rows as their JSON has them; a wrong one's time says nothing, before or now. One regresses that takes more than
    3 % longer, and of whose repeats nine in ten are beyond the slowest before."""
    older = {_key(row): row for row in before if not row["wrong"]}
    pairs = [(older[_key(row)], row) for row in now if _key(row) in older and not row["wrong"]]
    slower = [(old, new) for old, new in pairs if _is_slower(old["time_us"], new["time_us"])]
    own = [pair for pair in slower if pair[1]["method"].startswith("graphar")]
    return Comparison(len(pairs), [_in_words(*pair) for pair in own], len(slower) - len(own))


def _key(row: dict) -> tuple:
    return tuple(row.get(name) for name in IDENTITY)


def _is_slower(old: dict[str, float], new: dict[str, float]) -> bool:
    return new["median"] > SLOWER * old["median"] and new["p10"] > old["p99"]


def _in_words(old: dict, new: dict) -> str:
    size = format_nbytes(new["nbytes"]) if "nbytes" in new else f"{new['m']} x {new['n']} x {new['k']}"
    how = [str(new[name]) for name in ("dtype", "mode", "form") if name in new]
    before, now = old["time_us"]["median"], new["time_us"]["median"]
    where = ", ".join([new["method"], f"{new['world_size']} ranks", *how, size])
    return f"{where}: {now:.4g} us, before {before:.4g} us ({now / before - 1:+.1%})"
