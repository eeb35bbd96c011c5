"""What is measured: row-parallel layers of Llama-3-70B, by how many rows of activations they get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

HIDDEN = 8192  # columns of the result
FEATURES = (8192, 28672)  # inputs of the whole layers: attention output, MLP down projection
ROWS = (1, 16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
_WHOLE_LINES = 64  # of K: 128 bytes


@dataclass(frozen=True)
class Layer:
    """One rank's share of a matmul, and all ranks' sum of it: [m, k] x [n, k]^T, summed over ``world_size``."""

    world_size: int
    m: int
    n: int
    k: int

    @property
    def nbytes(self) -> int:
        """Of the result, in bfloat16."""
        return self.m * self.n * 2

    @property
    def iterations(self) -> int:
        """How many operations one timed repeat holds."""
        return 20 if self.m <= 1024 else 8 if self.m <= 4096 else 4

    @property
    def repeats(self) -> int:
        return 9

    def operands(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Normal data, another seed on every rank, which give results of variance world_size."""
        generator = torch.Generator(device).manual_seed(1000 + rank)
        a, w = (
            torch.randn(rows, self.k, dtype=torch.bfloat16, device=device, generator=generator)
            for rows in (self.m, self.n)
        )
        return a, w.mul_(self.k**-0.5)


@dataclass(frozen=True)
class Plan:
    """The layers one world of ranks works through.

    Attributes:
        device: "cuda" or "cpu".
        methods: names from perf/fused/methods.py.
    """

    device: str
    world_size: int
    rows: Sequence[int]
    columns: int
    features: Sequence[int]
    methods: Sequence[str]

    def layers(self) -> Iterator[Layer]:
        for k in self.features:
            for m in self.rows:
                yield Layer(
                    self.world_size, m, self.columns, max(k // self.world_size // _WHOLE_LINES, 1) * _WHOLE_LINES
                )
