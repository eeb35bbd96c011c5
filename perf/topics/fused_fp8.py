"""`python -m perf fused_fp8`: times a fused matmul and all-reduce of e4m3 operands, and torch._scaled_mm with peers."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from torch import Tensor

from perf import fusion
from perf.md import plural
from perf.peers import fp8_matmuls as peers
from perf.products import sentence
from perf.ratios import of_best_peer
from perf.report import Arguments
from perf.topics import fp8


def most_lost(a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor) -> Tensor:
    """Returns how far another kernel's product may be: LOST of the sum of the magnitudes of an element's terms."""
    x, y = a.float(), w.float()
    return (x * fp8.of_elements(a_scale, x)).abs() @ (y * fp8.of_elements(w_scale, y)).abs().t() * fp8.LOST


count_wrong = partial(fusion.count_wrong, product=peers.own_product, most_lost=most_lost)


@dataclass(frozen=True)
class FusedFp8Row(fusion.FusionRow):
    """The measured and verified time of one method on one layer. ``scales`` is one of SCALES."""

    scales: str = peers.OF_ROWS

    @property
    def more(self) -> tuple[str, ...]:
        return (f"scales of {self.scales}",)


@dataclass
class FusedFp8(fusion.RowParallelReport):
    rows: list[FusedFp8Row] = field(default_factory=list)

    order: ClassVar[int] = 10
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--rows 1 64 2048 8192", quick_on_gpus="--rows 64 2048 --features 8192 --scales rows"
    )
    methods: ClassVar = (peers.CUDA_METHODS, peers.CPU_METHODS)
    make_variants: ClassVar = staticmethod(peers.make_variants)
    row_of: ClassVar = staticmethod(lambda layer: partial(FusedFp8Row, scales=layer.scales))
    count_wrong: ClassVar = staticmethod(count_wrong)
    floors: ClassVar = peers.FLOORS
    sequence: ClassVar = f"{peers.AFTER}graphar"
    # of "graphar", which uses the partition "auto"
    variants: ClassVar = {"graphar": lambda name: name.startswith("graphar:")}
    plans: ClassVar = peers.Fp8Plan

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        scales = "scales of rows, of blocks, or both (default: both; rows on the CPU)"
        parser.add_argument("--scales", nargs="+", choices=peers.SCALES, help=scales)
        super().add_options(parser)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[peers.Fp8Plan]:
        known = peers.SCALES if gpu_count >= 2 else (peers.OF_ROWS,)  # on the CPU torch has none of blocks
        return super().plan(options, gpu_count, scales=options.scales or known)

    def findings(self) -> list[str]:
        sentences = []
        for scales in (f"scales of {name}" for name in peers.SCALES):
            ratios = {case: value for case, value in of_best_peer(self.cases()).items() if scales in case}
            named = {self.in_words(case): value for case, value in ratios.items()}
            where = f"{plural(len(named), 'case')} of {scales}"
            sentences += [sentence("graphar / best peer", where, named)] if named else []
        return [*sentences, *super().findings()]
