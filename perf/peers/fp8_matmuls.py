"""The methods of `perf fused_fp8`, which multiply e4m3 operands and sum the products: graphar's op, and peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import graphar
from graphar.numerics.fp8_products import BLOCK, FP8
from graphar.plan.work import FORMATS as SCALES
from perf.harness.ranks import Ranks
from perf.peers.matmuls import SUMS, Alone, FusedPlan, Layer, Variant, after_matmul, in_tiles, make_sums, sum_of

OF_ROWS, OF_BLOCKS = SCALES


@dataclass(frozen=True)
class Fp8Layer(Layer):
    """A row-parallel layer of e4m3 operands.

    Attributes:
        scales: one of SCALES. "rows": one for each row of both operands. "blocks": one for each 1 x BLOCK of the
            activations and each BLOCK x BLOCK of the weight.
    """

    scales: str = OF_ROWS

    def __str__(self) -> str:
        return f"{super().__str__()}, scales of {self.scales}"

    def operands(self, rank: int, device: torch.device) -> tuple[Tensor, ...]:
        """Returns this rank's activations, weight, and their scales: random data with another seed on every rank.

        The result has a variance of about ``world_size``. The activations' scales of blocks have contiguous columns,
        as `torch._scaled_mm` needs them.
        """
        generator = torch.Generator(device).manual_seed(3000 + rank)
        drawn = partial(torch.rand, device=device, generator=generator)
        a, w = (torch.randn(rows, self.k, device=device, generator=generator).to(FP8) for rows in (self.m, self.n))
        if self.scales == OF_ROWS:
            a_scale, w_scale = drawn(self.m, 1), drawn(self.n, 1)
        else:
            a_scale = drawn(-(-self.k // BLOCK), self.m).t()
            w_scale = drawn(-(-self.n // BLOCK), -(-self.k // BLOCK))
        return a, w, a_scale.add_(0.5), w_scale.add_(0.5).mul_(self.k**-0.5)


@dataclass(frozen=True)
class Fp8Plan(FusedPlan):
    """The layers to measure with one number of ranks. ``scales`` has names from SCALES."""

    scales: Sequence[str] = SCALES

    def layers(self) -> Iterator[Fp8Layer]:
        for scales in self.scales:
            for k in self.features:
                for m in self.rows:
                    share = max(k // self.world_size // BLOCK, 1) * BLOCK
                    yield Fp8Layer(self.world_size, m, self.columns, share, scales)


MATMUL, ALLREDUCE = FLOORS = ("scaled_mm", "allreduce")
AFTER = "scaled_mm+"  # followed by the name of an all-reduce in perf/peers/catalogue.py
TILES = "graphar:tiles"
PARTITIONS = {"graphar": "auto", "graphar:none": "none", TILES: "tiles"}  # by method
CUDA_METHODS = (*FLOORS, *(f"{AFTER}{name}" for name in SUMS), *PARTITIONS)
CPU_METHODS = (*FLOORS, f"{AFTER}gloo", f"{AFTER}graphar", *PARTITIONS)


def own_product(a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor) -> Tensor:
    """Returns this rank's product. It has the bits of graphar's op in every partition: it is the op with one rank."""
    return graphar.fused_matmul_allreduce([a], [w], a_scale=[a_scale], w_scale=[w_scale])[0]


def scaled_mm(a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor, out: Tensor | None = None) -> Tensor:
    return torch._scaled_mm(a, w.t(), a_scale, w_scale.t(), out_dtype=torch.bfloat16, out=out)


def make_variants(plan: Fp8Plan, ranks: Ranks) -> tuple[list[Variant], list[str]]:
    """Returns the plan's methods in its order, and why some are missing. Allocates all memory. Collective."""
    sums = [name.removeprefix(AFTER) for name in plan.methods if name.startswith(AFTER)]
    sums_made, skipped = make_sums(plan, sums, ranks)
    variants = [
        Variant(MATMUL, scaled_mm, summed=False),
        Variant(ALLREDUCE, Alone(own_product, sum_of), exact=True),
        *(after_matmul(method, AFTER, scaled_mm) for method in sums_made),
        *(Variant(name, partial(fused, partition), exact=True) for name, partition in PARTITIONS.items()),
    ]
    made = {variant.name: variant for variant in variants}
    made[TILES] = replace(made[TILES], serves=in_tiles)
    return [made[name] for name in plan.methods if name in made], skipped


def fused(partition: str, a: Tensor, w: Tensor, a_scale: Tensor, w_scale: Tensor) -> Tensor:
    return graphar.fused_matmul_allreduce(a, w, a_scale=a_scale, w_scale=w_scale, partition=partition)
