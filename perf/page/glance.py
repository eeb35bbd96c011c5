"""What each topic comes to, in a figure and a few words: the first screen has one of each that was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from graphar.plan.sizes import format_nbytes
from perf import prefetch as prefetch_report
from perf import report
from perf.compare import NOISE, members, methods_of, of_best_peer
from perf.fused import report as fused_report
from perf.lossless import LosslessRow
from perf.model import report as model_report
from perf.norms import OWN, NormRow
from perf.page.allreduce import FAMILIES, answering
from perf.quantized import report as quantized_report
from perf.quantized.figure import speed_ups
from perf.throughput import report as throughput_report
from perf.training import report as training_report
from perf.training.report import TrainingRow


@dataclass(frozen=True)
class Glance:
    """Attributes:
    speeds: by case, how many times as fast graphar was as what it is compared with.
    words: what that is; or, without speeds, all there is to say.
    figure: what stands in the speeds' place, where there is something else to read first.
    """

    words: str
    speeds: Mapping[str, float] = field(default_factory=dict)
    figure: str = ""

    @property
    def headline(self) -> str:
        """The range of the speeds; nothing where there are none."""
        if not self.speeds:
            return self.figure
        ends = dict.fromkeys(f"{end:.2f}x" for end in (min(self.speeds.values()), max(self.speeds.values())))
        return " to ".join(ends)

    @property
    def shortfall(self) -> str:
        """Where graphar was slower by more than noise; nothing if nowhere."""
        slower = {case: speed for case, speed in self.speeds.items() if speed < 1 / NOISE}
        if not slower:
            return ""
        worst = min(slower, key=slower.__getitem__)
        return f"slower in {len(slower)} of {len(self.speeds)}, at worst {slower[worst]:.2f}x: {worst}"


def allreduce(found: report.Findings) -> Glance:
    """Of the answer's table."""
    if not found.rows:
        return Glance("nothing was measured")
    rows = members(found.rows, answering(found.rows))
    peers = [name for name in methods_of(row for row in rows if not row.quantised) if not name.startswith("graphar")]
    speeds = {format_nbytes(nbytes): 1 / ratio for nbytes, ratio in of_best_peer(rows).items()}
    return Glance(f"the speed of {_best_of(peers)}, by size, {rows[0].world_size} ranks", speeds)


def nvlink(found: report.Findings) -> Glance:
    """Of the widest world at its largest size."""
    rows = [row for row in found.rows if row.method == "graphar" and row.nvlink and not row.wrong]
    if not rows:
        return Glance("nothing was counted here")
    row = max(rows, key=lambda one: (one.world_size, one.nbytes))
    overhead, raw = (row.nvlink[name] for name in ("protocol_overhead", "raw_share"))
    at = f"at {format_nbytes(row.nbytes)} between {row.world_size} ranks"
    return Glance(
        f"of the links' raw rate {at}, of which the protocol is {overhead / (1 + overhead):.0%}",
        figure="not timed" if raw is None else f"{raw:.0%}",
    )


def quantized(found: quantized_report.Findings) -> Glance:
    """Of each codec the mean of large sizes, over the baseline."""
    errors = {row.codec: row.relative_l2 for row in found.errors if row.data == "normal"}
    told = ", ".join(f"{name} {errors[name]:.2g}" for name in ("int8", "int4") if name in errors)
    of_errors = f"relative errors of normal data: {told}" if told else ""
    gains = speed_ups(found.rows, max((row.world_size for row in found.rows), default=0))
    gains.pop("exact", None)
    if not gains:
        return Glance(f"{of_errors or 'no errors'}; not timed here", figure="errors only")
    base = next(name for name in methods_of(found.rows) if name in ("nccl", "gloo"))
    between = f"{max(row.world_size for row in found.rows)} ranks"
    return Glance(f"the speed of {FAMILIES[base]} from 16 MB up, by codec, {between}; {of_errors}", gains)


def lossless(rows: Sequence[LosslessRow]) -> Glance:
    timed = {
        f"{row.data}, {format_nbytes(row.nbytes)}, {row.world_size} ranks": row.plain_us / row.lossless_us
        for row in rows
        if row.nbytes
    }
    if not timed:
        bits = [row.bits for row in rows]
        figure = f"{min(bits):.3g} to {max(bits):.3g}" if bits else ""
        return Glance("bits an element, by kind of data; not timed here", figure=figure)
    return Glance("the speed of sending all 16 bits, by size and kind of data", timed)


def norms(found: tuple[Sequence[NormRow], Sequence[str]]) -> Glance:
    speeds = {}
    rows = [row for row in found[0] if not row.wrong]
    for (world_size, tokens), mine in _by(rows, lambda row: (row.world_size, row.tokens)).items():
        times = {row.method: row.time_us["median"] for row in mine}
        peers = [time for name, time in times.items() if not name.startswith("graphar")]
        if OWN in times and peers:
            speeds[f"{_tokens(tokens)}, {world_size} ranks"] = min(peers) / times[OWN]
    peers = [name for name in dict.fromkeys(row.method for row in rows) if not name.startswith("graphar")]
    return Glance(f"the speed of {_best_of(peers)}, by tokens", speeds)


def prefetch(found: prefetch_report.Found) -> Glance:
    speeds = {}
    rows = [row for row in found[0] if not row.wrong]
    for (world_size, m, n), mine in _by(rows, lambda row: (row.world_size, row.m, row.n)).items():
        times = {row.method: row.time_us["median"] for row in mine}
        if {prefetch_report.SEQUENCE, prefetch_report.PREFETCHED} <= times.keys():
            speed = times[prefetch_report.SEQUENCE] / times[prefetch_report.PREFETCHED]
            speeds[f"M = {m}, N = {n}, {world_size} ranks"] = speed
    return Glance("the speed of the same all-reduce and matmul without the hint", speeds)


def fused(found: fused_report.Findings) -> Glance:
    speeds, peers = {}, []
    for (world_size, m, k), mine in _by(found.rows, lambda row: (row.world_size, row.m, row.k)).items():
        by_method = {row.method: row for row in mine}
        own, peer = by_method.get("graphar"), fused_report.best_peer(by_method)
        if own and peer and not own.wrong:
            speeds[f"M = {m}, K = {k}, {world_size} ranks"] = peer.median / own.median
            peers += [name for name in by_method if "graphar" not in name and name not in fused_report.FLOORS]
    return Glance(f"the speed of {_best_of(list(dict.fromkeys(peers)))}, by rows", speeds)


def model(found: model_report.Findings) -> Glance:
    speeds, of_what = {}, "its baseline"
    for title, by_method in model_report.by_step(found.rows).items():
        base, best = model_report.base_of(by_method), model_report.best_own(by_method)
        if base and best:
            speeds[title] = base.median / best.median
            of_what = FAMILIES[base.method]
    return Glance(f"the speed of a step with {of_what}, by the fastest exact way", speeds)


def training(rows: Sequence[TrainingRow]) -> Glance:
    near, all_of = 0, 0
    for _, mine in groupby(rows, key=lambda row: row.task):
        good, bad = training_report.near_and_far(list(mine))
        near, all_of = near + len(good), all_of + len(good) + len(bad)
    if not all_of:
        return Glance("no codec was trained with")
    return Glance("ways to round gradients that train as exact ones do, within noise", figure=f"{near} of {all_of}")


def throughput(found: throughput_report.Findings) -> Glance:
    speeds, base = {}, "torch's own hook"
    for model_name, mine in _by(found.rows, lambda row: row.model).items():
        steps = {str(row.way): row.step_ms for row in mine if row.same_bits}
        for row in mine:
            if row.way.is_base and row.same_bits:
                base = f"DistributedDataParallel over {FAMILIES[str(row.way)]}"
                speeds |= {model_name: row.step_ms / steps["exact"]} if "exact" in steps else {}
    return Glance(f"the speed of a training step with {base}, exact gradients, by model", speeds)


def compiled(content: dict) -> Glance:
    slowest = max((one["compile_s"] for one in content["kernels"]), default=0.0)
    return Glance(
        f"to compile {len(content['kernels'])} kernels by NVRTC, {slowest:.2g} s the slowest",
        figure=f"{content['wall_s']:.0f} s",
    )


def _by(rows: Sequence, key: Callable) -> dict:
    found: dict = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _best_of(peers: Sequence[str]) -> str:
    return (
        f"the best of {len(peers)} others"
        if len(peers) > 1
        else FAMILIES.get(peers[0], peers[0])
        if peers
        else "no other"
    )


def _tokens(count: int) -> str:
    return f"{count} token{'s' if count > 1 else ''}"
