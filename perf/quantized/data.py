"""What is summed up to see a codec's error: one tensor a rank, of the kinds that all-reduces meet."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

DTYPE = torch.bfloat16
TOKENS, HIDDEN, HEADS, FFN = 256, 1024, 16, 2816


def normal(world_size: int, device: torch.device) -> list[Tensor]:
    """Independent, of variance 1."""
    return [torch.randn(TOKENS, HIDDEN, generator=_generator(rank)).to(device, DTYPE) for rank in range(world_size)]


def heavy_tailed(world_size: int, device: torch.device) -> list[Tensor]:
    """Student's t with 3 degrees of freedom: one element in 1000 beyond 7 of its scale."""
    return [_student(rank).to(device, DTYPE) for rank in range(world_size)]


def activations(world_size: int, device: torch.device) -> list[Tensor]:
    """What the ranks of a tensor-parallel Llama block have to sum up after its last matmul.

    The block has random weights and is really run, on embeddings of the Python standard library's source text: RMSNorm,
    causal attention, RMSNorm, SwiGLU, of which rank r has a share of the columns of the last matmul's input.
    """
    text = Path(os.__file__).read_bytes()[:TOKENS]
    make = _generator(0)

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=make) * columns**-0.5

    x = torch.randn(256, HIDDEN, generator=make)[torch.tensor(list(text))]
    q, k, v = (
        (_norm(x) @ weight(HIDDEN, HIDDEN).T).view(TOKENS, HEADS, -1).transpose(0, 1).unsqueeze(0) for _ in "qkv"
    )
    attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1)
    x = x + attended @ weight(HIDDEN, HIDDEN).T
    inner = nn.functional.silu(_norm(x) @ weight(FFN, HIDDEN).T) * (_norm(x) @ weight(FFN, HIDDEN).T)
    down = weight(HIDDEN, FFN)
    shares = zip(inner.tensor_split(world_size, 1), down.tensor_split(world_size, 1), strict=True)
    return [(part @ columns.T).to(device, DTYPE) for part, columns in shares]


KINDS: dict[str, Callable[[int, torch.device], list[Tensor]]] = {
    "normal": normal,
    "heavy-tailed": heavy_tailed,
    "activations": activations,
}


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _student(seed: int) -> Tensor:
    make = _generator(seed)
    chi_square = sum(torch.randn(TOKENS, HIDDEN, generator=make).square() for _ in range(3))
    return torch.randn(TOKENS, HIDDEN, generator=make) * (chi_square / 3).rsqrt()


def _norm(x: Tensor) -> Tensor:
    return nn.functional.rms_norm(x, (HIDDEN,))
